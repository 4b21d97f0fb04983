//! Settings, read from `rouse.toml` and the environment, then checked.
//!
//! This is the only module that reads the environment. The command line wins over `rouse.toml`, and `rouse.toml` over the default. The
//! environment gives the address of the database (`DATABASE_URL`, `ROUSE_LISTEN_URL`, `PG*`), the folder of the private one
//! (`ROUSE_DATA_DIR`), the token of invocations (`ROUSE_INVOKE_TOKEN`) and the log filter.

mod env;
mod file;
mod key_file;
mod private_file;
mod token_file;

pub use env::Environment;
pub use file::{ConfigError, File, Queue, check_worker_id};
pub use key_file::read_or_make_key;
pub use token_file::read_token;
