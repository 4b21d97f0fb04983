//! How many statements were run, as the server counts them.
//!
//! Hosts run every statement as a transaction of its own, so that commits and rollbacks of their
//! database are statements. A session hands over what it has counted when it ends, and in between once
//! a second at most: exact figures are read when the hosts' sessions have ended.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio_postgres::Client;

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

/// Ends all sessions of the jobs' database but these, so that they hand over what they have counted.
pub(super) async fn end_sessions(observer: &Client, but: &[u32]) -> Result<()> {
    let but: Vec<i32> = but
        .iter()
        .map(|pid| i32::try_from(*pid))
        .collect::<Result<_, _>>()?;
    observer
        .execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
             WHERE backend_type = 'client backend' AND datname <> current_database() AND pid <> ALL ($1)",
            &[&but],
        )
        .await
        .context("end the sessions of the hosts")?;
    Ok(())
}
