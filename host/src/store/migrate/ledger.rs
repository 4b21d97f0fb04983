//! The ledger: the migrations and definitions that the database has recorded.

use tokio_postgres::GenericClient;

use super::error::sql;
use super::sources::digest;
use super::{MigrateError, Migration, Sources};

/// A row of the ledger.
pub(super) struct Recorded {
    pub(super) version: i32,
    name: String,
    sha256: String,
}

/// The recorded state of the database.
pub(super) struct Record {
    pub(super) migrations: Vec<Recorded>,
    pub(super) definitions: Option<Definitions>,
}

/// The definitions that were applied last.
pub(super) struct Definitions {
    pub(super) sha256: String,
    /// The release of the host that applied them.
    release: Vec<i32>,
    protocol_oldest: i32,
}

impl Record {
    pub(super) async fn read(client: &impl GenericClient) -> Result<Self, MigrateError> {
        let rows = client
            .query_typed(
                "SELECT to_regclass('rouse.migration') IS NOT NULL, to_regclass('rouse.definitions') IS NOT NULL,
                        current_setting('server_encoding')",
                &[],
            )
            .await
            .map_err(sql("find the ledger"))?;
        let found = rows.first().expect("a SELECT without FROM returns one row");
        let encoding: String = found.get(2);
        if encoding != "UTF8" {
            return Err(MigrateError::Encoding(encoding));
        }
        let mut record = Self {
            migrations: Vec::new(),
            definitions: None,
        };
        if found.get(0) {
            let rows = client
                .query_typed(
                    "SELECT version, name, sha256 FROM rouse.migration ORDER BY version",
                    &[],
                )
                .await
                .map_err(sql("read the ledger"))?;
            record.migrations = rows
                .iter()
                .map(|row| Recorded {
                    version: row.get(0),
                    name: row.get(1),
                    sha256: row.get(2),
                })
                .collect();
        }
        if found.get(1) {
            let rows = client
                .query_typed(
                    "SELECT sha256, release, protocol_oldest FROM rouse.definitions",
                    &[],
                )
                .await
                .map_err(sql("read which functions were applied"))?;
            record.definitions = rows.first().map(|row| Definitions {
                sha256: row.get(0),
                release: row.get(1),
                protocol_oldest: row.get(2),
            });
        }
        Ok(record)
    }

    pub(super) fn missing<'a>(&self, sources: Sources<'a>) -> Vec<&'a Migration> {
        let is_missing = |migration: &&Migration| {
            !self
                .migrations
                .iter()
                .any(|recorded| recorded.version == migration.version)
        };
        sources.migrations.iter().filter(is_missing).collect()
    }

    /// True if the definitions are neither this host's nor those of a later release.
    pub(super) fn needs_definitions(&self, sources: Sources<'_>) -> bool {
        self.definitions
            .as_ref()
            .is_none_or(|theirs| theirs.sha256 != sources.digest() && theirs.release <= release())
    }

    /// Rejects a recorded migration whose text differs from ours, and definitions that no longer serve this host's
    /// protocol. Migrations of later releases are accepted.
    pub(super) fn compare(&self, sources: Sources<'_>) -> Result<(), MigrateError> {
        let migrations = sources.migrations;
        for theirs in &self.migrations {
            match migrations
                .iter()
                .find(|ours| ours.version == theirs.version)
            {
                Some(ours) if digest(ours.sql) != theirs.sha256 => {
                    return Err(MigrateError::Drift {
                        name: theirs.name.clone(),
                        recorded: theirs.sha256.clone(),
                        ours: digest(ours.sql),
                    });
                }
                Some(_) | None => {}
            }
        }
        match &self.definitions {
            Some(theirs) if theirs.protocol_oldest > sources.protocols.1 => {
                Err(MigrateError::TooNew {
                    oldest: theirs.protocol_oldest,
                    ours: sources.protocols.1,
                })
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// Records a migration as applied.
pub(super) async fn record(
    client: &impl GenericClient,
    migration: &Migration,
) -> Result<(), MigrateError> {
    client
        .execute(
            "INSERT INTO rouse.migration (version, name, sha256) VALUES ($1, $2, $3)",
            &[&migration.version, &migration.name, &digest(migration.sql)],
        )
        .await
        .map(|_| ())
        .map_err(sql("write the ledger"))
}

/// This host's release, as comparable numbers.
pub(super) fn release() -> Vec<i32> {
    env!("CARGO_PKG_VERSION")
        .split(['.', '-', '+'])
        .map_while(|part| part.parse().ok())
        .collect()
}
