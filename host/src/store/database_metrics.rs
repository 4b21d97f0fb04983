//! How the database fares, for those who watch it.

use std::time::Duration;

use super::{Store, StoreError};

/// How long counting may take, in Postgres. A count that nobody waits for any more would go on there, beside the next one.
pub const COUNTED_WITHIN: Duration = Duration::from_secs(5);

/// How many jobs one queue has for one handler. Counted up to 10,000 for each lane.
#[derive(Debug, Clone, PartialEq)]
pub struct Depth {
    /// The queue.
    pub queue: String,
    /// The handler.
    pub handler: String,
    /// Jobs that could start now.
    pub ready: i64,
    /// Jobs that wait for their time.
    pub scheduled: i64,
    /// Jobs that are claimed.
    pub running: i64,
    /// How long the oldest ready one has waited, seconds; none: there is none.
    pub oldest_wait_s: Option<f64>,
}

/// What keeps the live table small, or does not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DatabaseMetrics {
    /// Rows of `rouse.job` that are dead and not cleaned up, as the statistics have it.
    pub dead_rows: i64,
    /// The age of the oldest transaction that keeps dead rows, seconds; none: there is none that this login may see.
    pub oldest_transaction_s: Option<f64>,
    /// How many transactions back the oldest snapshot, prepared transaction or replication slot is; none: as above.
    pub xmin_age: Option<i64>,
    /// How much of the server's queue of notifications is in use, 0 to 1. Above one half, Rouse does not notify.
    pub notification_queue_usage: f64,
}

impl Store {
    /// What waits and runs, where anything does. Reads up to 10,000 entries of an index for each lane, and is given up by
    /// Postgres itself after [`COUNTED_WITHIN`].
    pub async fn depths(&self) -> Result<Vec<Depth>, StoreError> {
        let sql = include_str!("depths.sql");
        let rows = self.query_limited(COUNTED_WITHIN, sql).await?;
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

    /// How the live table fares.
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
