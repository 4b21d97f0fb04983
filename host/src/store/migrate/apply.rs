//! Applies roles, the ledger, migrations and definitions within one transaction.

use tokio_postgres::Transaction;

use super::error::{Login, allowed, owned, sql};
use super::ledger::record;
use super::set_aside::set_aside;
use super::{LOCK_WAIT, MigrateError, Migration, ROLES, ROLES_SQL, Source, Sources, in_force};

/// Applies `migrations`, and the definitions if they are needed; on the `first` run also the roles and the ledger.
pub(super) async fn apply(
    transaction: &Transaction<'_>,
    sources: Sources<'_>,
    login: &Login,
    first: bool,
    migrations: &[&Migration],
    definitions: bool,
) -> Result<(), MigrateError> {
    transaction
        .batch_execute(&format!(
            "SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {};
             SET LOCAL default_tablespace = ''; SET LOCAL default_table_access_method = heap",
            LOCK_WAIT.as_millis()
        ))
        .await
        .map_err(sql("set the lock timeout"))?;
    let roles = transaction
        .query_typed(
            "SELECT count(*) FROM pg_roles WHERE rolname = ANY ($1)",
            &[(&&ROLES[..], tokio_postgres::types::Type::TEXT_ARRAY)],
        )
        .await
        .map_err(sql("find the roles"))?;
    let existing: i64 = roles.first().expect("a count is one row").get(0);
    if first || existing < ROLES.len() as i64 {
        transaction
            .batch_execute(ROLES_SQL)
            .await
            .map_err(allowed("create the roles"))?;
    }
    if first {
        transaction
            .batch_execute(include_str!("ledger.sql"))
            .await
            .map_err(owned("create schema rouse", login))?;
    }
    transaction
        .batch_execute("SET LOCAL ROLE rouse_owner")
        .await
        .map_err(owned("act as rouse_owner", login))?;
    for migration in migrations {
        transaction
            .batch_execute(migration.sql)
            .await
            .map_err(sql(migration.name))?;
        record(transaction, migration).await?;
    }
    if definitions {
        set_aside(transaction, sources.functions).await?;
        apply_each(transaction, sources.functions).await?;
        transaction
            .batch_execute(include_str!("drop_vanished.sql"))
            .await
            .map_err(sql("drop vanished functions"))?;
        apply_each(transaction, sources.privileges).await?;
        in_force::record(transaction, sources).await?;
    }
    Ok(())
}

/// Applies these sources, in order.
pub(super) async fn apply_each(
    transaction: &Transaction<'_>,
    sources: &[Source],
) -> Result<(), MigrateError> {
    for source in sources {
        transaction
            .batch_execute(source.sql)
            .await
            .map_err(sql(source.name))?;
    }
    Ok(())
}
