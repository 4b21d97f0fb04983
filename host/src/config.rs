//! Settings, read from `rouse.toml` and the environment, then checked.
//!
//! This is the only module that reads the environment; [`Environment::VARIABLES`] lists what it reads. Options of the
//! command line override `rouse.toml`, and `rouse.toml` overrides the defaults.

mod env;
mod file;
mod key_file;
mod otlp;
mod private_file;
mod token_file;

pub use env::Environment;
#[cfg(test)]
pub(crate) use file::overrides;
pub use file::{
    ConfigError, File, HostSettings, InvokeSettings, Queue, check_queue, check_tag,
    check_worker_id, help, host_help, host_number,
};
pub use key_file::read_or_make_key;
pub use token_file::read_tokens;
