//! Divides the claims of a worker among its lanes, and decides the size of claims and how long they wait for a slot.
//!
//! This crate only makes decisions: the caller passes in the time, and what was claimed. It has no I/O, no clock, no
//! randomness and no dependencies, so the host and the simulator (`tests/simulate`) run the same code.

mod closings;
mod prefetch;
mod turns;
mod waits;

pub use closings::Closings;
pub use prefetch::Prefetch;
pub use turns::{Class, Part, Place, Turns};
pub use waits::{START_TIMEOUT, throttled_within};
