//! Rouse runs Postgres jobs in WebAssembly sandboxes. This is the host; ARCHITECTURE.md is its map.
//!
//! Dependencies point one way: `cli`, `http`, `ui` → `invoke` → `worker` → `ends` →
//! `store`, `sandbox` → `job`. `store` and `sandbox` do not depend on each other. Only `config` reads the environment.

mod duration;
pub mod ends;
pub mod job;
mod read_in_time;
pub mod sandbox;
pub mod setting;
pub mod store;
pub mod traces;
pub mod worker;

pub mod invoke;

pub mod config;
pub mod http;
pub mod postgres;
pub mod telemetry;

pub mod ui;

pub mod cli;

use rouse_display::sanitize;
