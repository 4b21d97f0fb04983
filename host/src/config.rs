//! Settings: as written, then checked.
//!
//! The only room that reads the environment. A setting comes from the command line, else from
//! `rouse.toml`, else it has its default; the environment says where the database is
//! (`DATABASE_URL`, `ROUSE_LISTEN_URL`, `PG*`), where the private one lives (`ROUSE_DATA_DIR`), what invocations have to
//! show (`ROUSE_INVOKE_TOKEN`) and what is logged.

mod env;
mod file;
mod key_file;
mod private_file;
mod token_file;

pub use env::Environment;
pub use file::{ConfigError, File, Overlays, Queue, check_worker_id};
pub use key_file::read_or_make_key;
pub use token_file::read_token;
