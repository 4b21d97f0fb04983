//! Why there is no connection.

use std::{error::Error, io, path::PathBuf};

use crate::store::error::describe_chain;

/// The reason why there is no connection. Never contains a password.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No setting names a database.
    #[error(
        "no database: set DATABASE_URL (postgres://user@host/database) or the PG* variables, \
         or run `rouse dev`, which starts its own"
    )]
    NoDatabase,
    /// The connection string cannot be read.
    #[error(
        "the connection string cannot be read ({why}): it should look like \
         postgres://user:password@host:5432/database?sslmode=verify-full or host=… user=… dbname=…"
    )]
    Unreadable {
        /// The problem, without quoting the string: it may contain a password.
        why: String,
    },
    /// A setting that Rouse does not support.
    #[error("the connection setting {setting} is not supported: remove it from DATABASE_URL{and}")]
    Unsupported {
        /// Its name.
        setting: String,
        /// `, or unset …`, if a variable may have set it.
        and: String,
    },
    /// A setting with an invalid value.
    #[error(
        "a connection setting cannot be used ({why}): correct it in DATABASE_URL or its PG* variable"
    )]
    BadValue {
        /// The setting, and the problem.
        why: String,
    },
    /// An unknown `sslmode`.
    #[error(
        "sslmode is {value:?} (in DATABASE_URL or PGSSLMODE): expected disable, allow, prefer, \
         require, verify-ca, verify-full"
    )]
    SslMode {
        /// The value.
        value: String,
    },
    /// The system's roots with a mode that does not check the host name.
    #[error(
        "sslmode={mode} is too weak for the root certificates of the system, whose authorities sign certificates for any \
         host: use sslmode=verify-full, or set sslrootcert to the certificate of the authority that signed the server's"
    )]
    WeakSslMode {
        /// The mode.
        mode: &'static str,
    },
    /// The file of root certificates cannot be used.
    #[error("sslrootcert (or PGSSLROOTCERT) is {path}, which cannot be used: {why}")]
    RootCert {
        /// The file.
        path: PathBuf,
        /// The problem.
        why: String,
    },
    /// This system has no root certificates.
    #[error(
        "this system has no root certificates ({why}): install ca-certificates, or set sslrootcert \
         to the certificate of the authority that signed the server's"
    )]
    NoSystemRoots {
        /// The result of the search.
        why: String,
    },
    /// TLS could not be set up.
    #[error("TLS cannot be set up: {0}")]
    Tls(#[from] rustls::Error),
    /// The password file cannot be read.
    #[error("the password file {path} (passfile or PGPASSFILE) cannot be read: {error}")]
    PassFile {
        /// The file.
        path: PathBuf,
        /// The system error.
        error: io::Error,
    },
    /// The server cannot be reached, is not trusted, or refuses the connection.
    #[error("cannot connect to {target}: {why}{next}")]
    Failed {
        /// The address.
        target: String,
        /// The chain of causes.
        why: String,
        /// `; what to do`, if known.
        next: &'static str,
    },
    /// Not tried: an earlier try has failed, and the backoff has not passed.
    #[error("cannot connect to {target}: {why}")]
    Away {
        /// The address.
        target: String,
        /// The cause of that failure.
        why: String,
    },
    /// The server did not respond.
    #[error(
        "cannot connect to {target}: no response within {waited_s} s; check host, port and firewall"
    )]
    TimedOut {
        /// The address.
        target: String,
        /// The time waited.
        waited_s: u64,
    },
}

impl ConnectError {
    pub(in crate::store) fn failed(target: String, error: &tokio_postgres::Error) -> Self {
        Self::Failed {
            target,
            why: describe_chain(error),
            next: next_step(error),
        }
    }
}

/// What to do, after a `; `, if known.
pub(in crate::store) fn next_step(error: &tokio_postgres::Error) -> &'static str {
    if let Some(code) = error.code() {
        return match code.code() {
            "28P01" | "28000" => {
                "; check user and password (DATABASE_URL, PGPASSWORD, ~/.pgpass), and pg_hba.conf of the server"
            }
            "3D000" => "; create that database, or name another",
            "53300" => {
                "; the server has no connections left: raise its max_connections, or use fewer"
            }
            _ => "",
        };
    }
    let io = error
        .source()
        .and_then(|cause| cause.downcast_ref::<io::Error>());
    match io {
        Some(io)
            if io
                .get_ref()
                .is_some_and(|inner| inner.is::<rustls::Error>()) =>
        {
            "; check sslmode and sslrootcert, and that the host name is the one in the certificate"
        }
        Some(io)
            if matches!(
                io.kind(),
                io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
            ) =>
        {
            "; check host and port, and that the server is running"
        }
        Some(_) | None => "",
    }
}
