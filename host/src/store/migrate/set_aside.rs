//! Sets aside functions that the sources no longer define, or that CREATE OR REPLACE cannot change into those of the
//! sources because their result, the names of their parameters, or their defaults differ.
//!
//! Such a function is renamed, to its name and `~`, before the sources are applied, so that no definition can refer to
//! it by mistake; `drop_vanished.sql` drops it afterwards. Only Postgres can determine which functions these are. So
//! the sources are applied twice: first in a savepoint, with all functions set aside, only to compare the signatures.

use std::collections::HashSet;

use tokio_postgres::Transaction;

use super::apply::apply_each;
use super::error::sql;
use super::{MigrateError, Source};

/// Sets functions aside, in preparation for applying the sources.
pub(super) async fn set_aside(
    transaction: &Transaction<'_>,
    sources: &[Source],
) -> Result<(), MigrateError> {
    let rows = transaction
        .query_typed(include_str!("functions.sql"), &[])
        .await
        .map_err(sql("list the functions"))?;
    if rows.is_empty() {
        return Ok(());
    }
    // Each function with the statement that sets it aside.
    let functions: Vec<(u32, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let all: Vec<&str> = functions
        .iter()
        .map(|(_, statement)| &**statement)
        .collect();
    transaction
        .batch_execute(&format!(
            "SAVEPOINT signatures; SET LOCAL check_function_bodies = off; {}",
            all.join("; ")
        ))
        .await
        .map_err(sql("set functions aside"))?;
    apply_each(transaction, sources).await?;
    let rows = transaction
        .query_typed(include_str!("replaceable.sql"), &[])
        .await
        .map_err(sql("compare the functions"))?;
    let replaceable: HashSet<u32> = rows.iter().map(|row| row.get(0)).collect();
    let others: Vec<&str> = functions
        .iter()
        .filter(|(function, _)| !replaceable.contains(function))
        .map(|(_, statement)| &**statement)
        .collect();
    transaction
        .batch_execute(&format!(
            "ROLLBACK TO SAVEPOINT signatures; RELEASE SAVEPOINT signatures; {}",
            others.join("; ")
        ))
        .await
        .map_err(sql("set functions aside"))
}
