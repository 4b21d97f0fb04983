//! Settings: as written, then checked.
//!
//! The only room that reads the environment. Order of precedence: command line, environment,
//! `rouse.toml`, default.

mod env;
mod file;

pub use env::Environment;
pub use file::{ConfigError, File};
