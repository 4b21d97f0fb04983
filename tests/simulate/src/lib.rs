//! Hosts, tenants and jobs in virtual time: the scheduling of Rouse with more of each than a machine can run.
//!
//! The turns of lanes and the size of claims are the code of the host (the crate `rouse-turns`). What gates permit is a
//! model of the SQL functions ([`gates`]), which the integration tests compare with Postgres. Hosts, their slots, the
//! server and the network are models. A [`Scenario`] and its seed determine everything: the same seed results in the
//! same report. A witness that does not use the turns checks the guarantees by counting.
//!
//! `docs/explanation/simulation.md` describes what the model leaves out.

pub mod gates;

mod scenario;

mod events;
mod host;
mod lanes;
mod server;

mod engine;

mod histogram;
mod witness;

mod report;

pub use engine::run;
pub use report::{ClassReport, Report};
pub use scenario::{Class, Fault, FaultKind, Gate, Load, Name, Sabotage, Scenario, Sizes};

/// Virtual time since the start, or a duration, in nanoseconds.
pub type Nanos = u64;

/// A microsecond.
pub const US: Nanos = 1_000;
/// A millisecond.
pub const MS: Nanos = 1_000_000;
/// A second.
pub const SECOND: Nanos = 1_000_000_000;
