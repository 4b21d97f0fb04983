//! What a queue has left, for a worker that empties it.

use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// What one handler, with one list of required tags, has left in a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remaining {
    /// The handler.
    pub handler: String,
    /// What its worker has to have.
    pub tags: Vec<String>,
    /// Jobs that can be claimed.
    pub ready: i64,
    /// Jobs that can be claimed in a moment: their time has come, or their lease has run out.
    pub due: i64,
    /// Jobs that wait for their time.
    pub scheduled: i64,
    /// Those of them that wait for another try.
    pub retries: i64,
    /// Jobs that this worker runs.
    pub mine: i64,
    /// Jobs that others run.
    pub others: i64,
    /// There are more ready or waiting ones than were counted.
    pub at_least: bool,
}

impl Store {
    /// What this queue has left. `mine` is what the worker runs that has registered through this store, if any has.
    /// Everything that runs is read for it, in all queues.
    pub async fn remaining(&self, queue: &str) -> Result<Vec<Remaining>, StoreError> {
        self.left(queue, true).await
    }

    /// The same without what runs: `mine` and `others` are 0.
    pub async fn left_to_run(&self, queue: &str) -> Result<Vec<Remaining>, StoreError> {
        self.left(queue, false).await
    }

    async fn left(&self, queue: &str, running: bool) -> Result<Vec<Remaining>, StoreError> {
        let me = self.incarnation().map(|incarnation| incarnation.0);
        let rows = self
            .query(
                include_str!("remaining.sql"),
                &[
                    (&queue, Type::TEXT),
                    (&me, Type::INT8),
                    (&running, Type::BOOL),
                ],
            )
            .await?;
        let remaining = |row: &tokio_postgres::Row| Remaining {
            handler: row.get(0),
            tags: row.get(1),
            ready: row.get(2),
            due: row.get(3),
            scheduled: row.get(4),
            retries: row.get(5),
            mine: row.get(6),
            others: row.get(7),
            at_least: row.get(8),
        };
        Ok(rows.iter().map(remaining).collect())
    }
}
