//! Why the private Postgres did not start.

use std::{io, path::PathBuf};

/// Why the private Postgres did not start, in words that say what to do next.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No `postgres` and `initdb` anywhere.
    #[error(
        "no Postgres binaries found (looked in {looked_in}).\n\
         Install them (Debian, Ubuntu: apt-get install postgresql; Fedora: dnf install postgresql-server), \
         or set ROUSE_PG_BIN to the directory that holds `postgres` and `initdb`, \
         or set DATABASE_URL to use a server of your own."
    )]
    NoBinaries {
        /// The places that were searched.
        looked_in: String,
    },
    /// `ROUSE_PG_BIN` is set, and there is no Postgres there.
    #[error(
        "ROUSE_PG_BIN is {path}, and it has no {missing}: set it to the directory that holds \
         `postgres` and `initdb`, for instance /usr/lib/postgresql/15/bin, or unset it"
    )]
    PinnedHasNone {
        /// The value.
        path: PathBuf,
        /// Which program is not there.
        missing: &'static str,
    },
    /// The data were made by another major version than any of the binaries found.
    #[error(
        "the data in {cluster} were made by Postgres {wanted}, and only other versions were found \
         ({found}): install Postgres {wanted} or set ROUSE_PG_BIN to its directory, or move the data away"
    )]
    OtherVersion {
        /// The data.
        cluster: PathBuf,
        /// The major version that made the data.
        wanted: u32,
        /// The binaries found, with their versions.
        found: String,
    },
    /// The archive of binaries could not be had.
    #[error(
        "no Postgres binaries found, and none could be had with npm: {why}.\n\
         Install them (Debian, Ubuntu: apt-get install postgresql), \
         or set DATABASE_URL to use a server of your own."
    )]
    Archive {
        /// What failed.
        why: String,
    },
    /// Running as root, and there is no user to run Postgres as.
    #[error(
        "Postgres refuses to run as root, and neither a user `postgres` nor `nobody` is in /etc/passwd: \
         add one, or start rouse as an ordinary user"
    )]
    NoAccount,
    /// The user that is to run Postgres cannot run the binaries.
    #[error(
        "the user {user} cannot run {program} ({source}): install Postgres where every user can \
         read it, or set ROUSE_PG_BIN, or set DATABASE_URL to use a server of your own"
    )]
    NotRunnable {
        /// The user.
        user: String,
        /// The program.
        program: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The files belong to somebody else.
    #[error(
        "{path} belongs to user {owner}, not to {user}: run rouse as its owner, \
         choose another ROUSE_DATA_DIR, or remove it"
    )]
    ForeignFiles {
        /// The file or directory.
        path: PathBuf,
        /// The user id of its owner.
        owner: u32,
        /// Who the server would run as.
        user: String,
    },
    /// Another host has the data directory.
    #[error(
        "another rouse ({holder}) is using {data_dir}: commands such as `rouse job` in this folder reach it already; \
         to start another, stop it or choose another --data-dir (ROUSE_DATA_DIR)"
    )]
    Locked {
        /// The data directory.
        data_dir: PathBuf,
        /// Its process.
        holder: String,
    },
    /// `initdb` failed.
    #[error("cannot make a database cluster in {path}: initdb says:\n{output}")]
    InitDb {
        /// The directory.
        path: PathBuf,
        /// What it printed.
        output: String,
    },
    /// A TCP port was asked for that somebody else listens on.
    #[error("port {port} of 127.0.0.1 is taken: choose another with --pg-port")]
    PortTaken {
        /// The port.
        port: u16,
    },
    /// The password of the cluster is gone.
    #[error(
        "the password file {path} is missing: start without --pg-port, run \
         ALTER ROLE rouse PASSWORD '…', and write the same password into that file"
    )]
    PasswordLost {
        /// The file.
        path: PathBuf,
    },
    /// A server of an earlier host still holds the data.
    #[error(
        "an earlier Postgres{pid} still runs on {cluster} after {waited_s} s: stop it with \
         `kill -INT` and try again; where no such process runs, remove postmaster.pid there. Its last words:\n{tail}"
    )]
    StillRunning {
        /// ` (pid N)`, where known.
        pid: String,
        /// The data.
        cluster: PathBuf,
        /// How long was waited.
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
    /// The server is not ready, though it runs.
    #[error("Postgres was not ready after {waited_s} s and was stopped. The end of {log}:\n{tail}")]
    NotReady {
        /// How long was waited.
        waited_s: u64,
        /// The log file.
        log: PathBuf,
        /// The end of the log.
        tail: String,
    },
    /// The caller cancelled the start.
    #[error("the start of the private Postgres was cancelled")]
    Cancelled,
    /// The system refused something.
    #[error("cannot {what}: {source}")]
    Io {
        /// What was tried.
        what: String,
        /// What the system says.
        source: io::Error,
    },
}

/// Says what was tried, for the many small steps whose errors are all handled alike.
pub(super) trait Trying<T> {
    fn trying(self, what: impl FnOnce() -> String) -> Result<T, StartError>;
}

impl<T, E: Into<io::Error>> Trying<T> for Result<T, E> {
    fn trying(self, what: impl FnOnce() -> String) -> Result<T, StartError> {
        self.map_err(|error| StartError::Io {
            what: what(),
            source: error.into(),
        })
    }
}
