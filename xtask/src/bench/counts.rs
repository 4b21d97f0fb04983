//! How many statements were run, as the server counts them.
//!
//! Hosts run every statement as a transaction of its own, so that commits and rollbacks of their
//! database are statements. A session adds what it has counted when it ends, and in between once a
//! second at most (an idle one after 10 s): exact figures are read after the hosts have stopped.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio_postgres::Client;

/// An idle session hands over its counts after this long (PGSTAT_IDLE_INTERVAL of PostgreSQL 15;
/// older servers do so within half a second).
pub(super) const IDLE_COUNTS_AFTER: Duration = Duration::from_secs(11);

/// Transactions of the jobs' database so far. `observer` is connected to another one.
pub(super) async fn statements(observer: &Client) -> Result<i64> {
    let row = observer
        .query_one(
            "SELECT sum(xact_commit + xact_rollback)::bigint FROM pg_stat_database
             WHERE datname IS NOT NULL AND datname <> current_database() AND datname NOT LIKE 'template_'",
            &[],
        )
        .await
        .context("read the server's count of transactions")?;
    Ok(row.get(0))
}

/// Lets the session of `client` hand over what it has counted, and nothing of it remain for later.
pub(super) async fn hand_over(client: &Client) -> Result<()> {
    // Once a second at most, at the end of a statement.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    client.batch_execute("SELECT 1").await?;
    Ok(())
}
