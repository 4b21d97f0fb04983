//! The database of a command.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;

use crate::config::Environment;
use crate::postgres::Running;
use crate::store::Store;
use crate::store::connect::{ConnectError, Connector, has_password};
use crate::telemetry;

/// The database in the private Postgres.
pub(super) const DATABASE: &str = "rouse";

/// The data folder of `rouse dev`, relative to the working directory.
pub(super) const DATA_DIR: &str = ".rouse/pg";

/// There is no such job, or it is no longer kept.
pub(super) const EXIT_NO_JOB: u8 = 3;

/// The database of a command.
#[derive(Debug, Clone, Args)]
pub(super) struct Target {
    /// The database; default: $DATABASE_URL, else a `rouse dev` that runs in this folder
    #[arg(long, value_name = "URL")]
    pub(super) database_url: Option<String>,
}

impl Target {
    pub(super) fn connector(&self) -> anyhow::Result<Connector> {
        if let Some(url) = &self.database_url {
            warn_of_a_password("--database-url", "DATABASE_URL", url);
        }
        let url = self
            .database_url
            .clone()
            .or_else(|| Environment.database_url());
        let env = |name: &str| Environment.get(name);
        match Connector::new(url.as_deref(), &env) {
            Err(ConnectError::NoDatabase) => {
                let server = Running::find(&data_dir(None)).with_context(|| {
                    format!(
                        "no database: set DATABASE_URL or give --database-url, or start `rouse dev` in this folder \
                         (looked for its server in {})",
                        data_dir(None).display()
                    )
                })?;
                Ok(Connector::from_url(&server.url(DATABASE), &env)?)
            }
            other => Ok(other?),
        }
    }

    /// True if neither an option nor the environment names a database: the command then uses that of a `rouse dev` in
    /// this folder.
    pub(super) fn is_implicit(&self) -> bool {
        let url = self
            .database_url
            .clone()
            .or_else(|| Environment.database_url());
        matches!(
            Connector::new(url.as_deref(), &|name| Environment.get(name)),
            Err(ConnectError::NoDatabase)
        )
    }

    pub(super) fn store(&self) -> anyhow::Result<Store> {
        Ok(Store::new(&self.connector()?, 1))
    }

    /// The store, after a check that this host supports the schema.
    pub(super) async fn checked_store(&self) -> anyhow::Result<Store> {
        let store = self.store()?;
        store.check_schema().await?;
        Ok(store)
    }
}

/// Warns of a password in an option: every user of the machine can read the arguments of a process.
pub(super) fn warn_of_a_password(option: &str, variable: &str, url: &str) {
    if has_password(url) {
        telemetry::line(&format!(
            "rouse: every user of this machine can read the password in {option} (`ps` shows arguments); set {variable} instead, \
             or keep the password in PGPASSWORD or a password file (PGPASSFILE, ~/.pgpass)"
        ));
    }
}

/// The result of a query of the fleet, or an error if this login may not see it.
pub(super) fn seen<T>(fleet: Option<T>) -> anyhow::Result<T> {
    fleet.context(
        "this login may not see the workers; it needs the role rouse_observer or rouse_worker",
    )
}

/// The message for a job that the database does not have.
pub(super) fn no_job(id: i64) -> String {
    format!(
        "no job {id}: it was never enqueued, its transaction is not committed, or it is no longer kept"
    )
}

/// The data folder of the private Postgres: the option, else $ROUSE_DATA_DIR, else `./.rouse/pg`.
pub(super) fn data_dir(option: Option<&Path>) -> PathBuf {
    option
        .map(Path::to_path_buf)
        .or_else(|| Environment.data_dir())
        .unwrap_or_else(|| DATA_DIR.into())
}
