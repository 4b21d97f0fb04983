//! The number of transactions, as the server counts them: hosts run every statement in its own transaction.
//!
//! A session reports its counts when it ends, and at most once a second before that, so
//! exact figures are read only after the hosts' sessions have ended.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio_postgres::Client;

/// The number of transactions in the jobs' database so far. `observer` is connected to another database.
pub(super) async fn transactions(observer: &Client) -> Result<i64> {
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

/// Makes the session of `client` report its counts.
pub(super) async fn report_counts(client: &Client) -> Result<()> {
    // A session reports at most once a second, at the end of a statement.
    tokio::time::sleep(Duration::from_millis(1100)).await;
    client.batch_execute("SELECT 1").await?;
    Ok(())
}

/// Ends all sessions of the jobs' database except these, so that they report their counts.
pub(super) async fn end_sessions(observer: &Client, except: &[u32]) -> Result<()> {
    let except: Vec<i32> = except
        .iter()
        .map(|pid| i32::try_from(*pid))
        .collect::<Result<_, _>>()?;
    observer
        .execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity
             WHERE backend_type = 'client backend' AND datname <> current_database() AND pid <> ALL ($1)",
            &[&except],
        )
        .await
        .context("end the sessions of the hosts")?;
    Ok(())
}
