//! Checks whether functions, views, triggers and privileges are as they were applied.

use std::fmt;

use tokio_postgres::types::Type;
use tokio_postgres::{Client, Transaction};

use super::error::sql;
use super::ledger::release;
use super::{MigrateError, ROLES, Sources};

/// An object that differs from what was applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Difference {
    object: String,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Missing,
    Changed,
    Unknown,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Missing => write!(f, "{} is missing", self.object),
            Kind::Changed => write!(f, "{} was changed", self.object),
            Kind::Unknown => write!(f, "{} was added", self.object),
        }
    }
}

/// Rejects a database whose functions, views, triggers or privileges differ from what was applied. Changes nothing.
///
/// # Errors
/// If something differs, with a list, or if the database does not respond.
pub async fn check_in_force(client: &mut Client) -> Result<(), MigrateError> {
    let differences = differences(client).await?;
    if differences.is_empty() {
        return Ok(());
    }
    Err(MigrateError::NotInForce {
        differences: differences.iter().map(ToString::to_string).collect(),
    })
}

/// The differences between what was applied and what is in force. Empty if nothing was applied.
pub(super) async fn differences(client: &mut Client) -> Result<Vec<Difference>, MigrateError> {
    let transaction = client
        .build_transaction()
        .read_only(true)
        .start()
        .await
        .map_err(sql("begin"))?;
    transaction
        .batch_execute("SET LOCAL search_path = pg_catalog, pg_temp")
        .await
        .map_err(sql("set the search path"))?;
    // Another major version of the server prints the definitions of views differently.
    let query = format!(
        "SELECT coalesce(was.key, f.fact), was.key IS NULL, f.fact IS NULL
         FROM (SELECT w.key, w.value, d.server_major FROM rouse.definitions AS d CROSS JOIN LATERAL jsonb_each_text(d.facts) AS w) AS was
         FULL JOIN ({}) AS f ON f.fact = was.key
         WHERE was.value IS DISTINCT FROM f.value
           AND (f.fact LIKE 'view %' AND was.server_major <> current_setting('server_version_num')::integer / 10000) IS NOT TRUE
         ORDER BY f.fact IS NULL DESC, 1",
        include_str!("in_force.sql")
    );
    let rows = transaction
        .query_typed(&query, &[(&&ROLES[..], Type::TEXT_ARRAY)])
        .await
        .map_err(sql("read the functions and privileges in force"))?;
    Ok(rows
        .iter()
        .map(|row| Difference {
            object: row.get(0),
            kind: match (row.get(1), row.get(2)) {
                (true, _) => Kind::Unknown,
                (false, true) => Kind::Missing,
                (false, false) => Kind::Changed,
            },
        })
        .collect())
}

/// Records what is now in force as what was applied.
pub(super) async fn record(
    transaction: &Transaction<'_>,
    sources: Sources<'_>,
) -> Result<(), MigrateError> {
    let query = format!(
        "INSERT INTO rouse.definitions (sha256, release, protocol_oldest, server_major, facts)
         SELECT $2, $3, $4, current_setting('server_version_num')::integer / 10000, jsonb_object_agg(f.fact, f.value) FROM ({}) AS f",
        include_str!("in_force.sql")
    );
    transaction
        .batch_execute("DELETE FROM rouse.definitions")
        .await
        .map_err(sql("record what was applied"))?;
    transaction
        .execute_typed(
            &query,
            &[
                (&&ROLES[..], Type::TEXT_ARRAY),
                (&sources.digest(), Type::TEXT),
                (&release(), Type::INT4_ARRAY),
                (&sources.protocols.0, Type::INT4),
            ],
        )
        .await
        .map(|_| ())
        .map_err(sql("record what was applied"))
}
