//! Metrics of the database, for monitoring.

use std::time::Duration;

use super::{Store, StoreError};

/// The time limit for counting, enforced by Postgres. Otherwise an abandoned count would keep running there, in
/// parallel with the next one.
pub const COUNT_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of jobs of one queue for one handler. Counted up to 10,000 for each lane, and about a million in all.
#[derive(Debug, Clone, PartialEq)]
pub struct Depth {
    /// The queue.
    pub queue: String,
    /// The handler.
    pub handler: String,
    /// Jobs that could start now.
    pub ready: i64,
    /// Jobs that are scheduled for later.
    pub scheduled: i64,
    /// Claimed jobs.
    pub running: i64,
    /// The wait of the oldest ready job, in seconds; `None` if no job is ready.
    pub oldest_wait_s: Option<f64>,
}

/// The values that determine how well the live table can be cleaned up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DatabaseMetrics {
    /// Dead rows of `rouse.job` that are not cleaned up, according to the statistics.
    pub dead_rows: i64,
    /// The age of the oldest transaction that keeps dead rows, in seconds; `None` if this login can see no such
    /// transaction.
    pub oldest_transaction_s: Option<f64>,
    /// The age, in transactions, of the oldest snapshot, prepared transaction or replication slot; `None` as above.
    pub xmin_age: Option<i64>,
    /// The used share of the server's notification queue, 0 to 1. Above one half, Rouse does not notify.
    pub notification_queue_usage: f64,
}

/// The wait of the oldest ready job of a key of a fair queue.
#[derive(Debug, Clone, PartialEq)]
pub struct FairAge {
    /// The queue.
    pub queue: String,
    /// The dimension by which it is divided, as in `rouse.queue.fair_key`.
    pub dimension: String,
    /// The key.
    pub key: String,
    /// The wait, in seconds.
    pub age_s: f64,
}

impl Store {
    /// The depths of all queues and handlers that have jobs. Reads up to 10,000 index entries for each lane, and about
    /// a million in all; Postgres cancels it after [`COUNT_TIMEOUT`].
    pub async fn depths(&self) -> Result<Vec<Depth>, StoreError> {
        let sql = include_str!("depths.sql");
        let rows = self.query_limited(COUNT_TIMEOUT, sql).await?;
        Ok(rows
            .iter()
            .map(|row| Depth {
                queue: row.get(0),
                handler: row.get(1),
                ready: row.get(2),
                scheduled: row.get(3),
                running: row.get(4),
                oldest_wait_s: row.get(5),
            })
            .collect())
    }

    /// The ages of the oldest ready jobs of the keys of fair queues, oldest first. Limited like [`Self::depths`].
    pub async fn fair_ages(&self) -> Result<Vec<FairAge>, StoreError> {
        let sql = include_str!("fair_ages.sql");
        let rows = self.query_limited(COUNT_TIMEOUT, sql).await?;
        Ok(rows
            .iter()
            .map(|row| FairAge {
                queue: row.get(0),
                dimension: row.get(1),
                key: row.get(2),
                age_s: row.get(3),
            })
            .collect())
    }

    /// The state of the live table.
    pub async fn database_metrics(&self) -> Result<DatabaseMetrics, StoreError> {
        let rows = self
            .query(include_str!("database_metrics.sql"), &[])
            .await?;
        let row = rows.first().expect("a SELECT without FROM returns one row");
        Ok(DatabaseMetrics {
            dead_rows: row.get(0),
            oldest_transaction_s: row.get(1),
            xmin_age: row.get(2),
            notification_queue_usage: row.get(3),
        })
    }
}
