//! What a queue has left, for a worker that empties it.

use std::collections::HashMap;

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
    /// Those of both that come from one of the sources that were asked for.
    pub bound: i64,
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
    pub async fn remaining(
        &self,
        queue: &str,
        sources: &[String],
    ) -> Result<Vec<Remaining>, StoreError> {
        self.left(queue, sources, true).await
    }

    /// The same without what runs: `mine` and `others` are 0.
    pub async fn left_to_run(
        &self,
        queue: &str,
        sources: &[String],
    ) -> Result<Vec<Remaining>, StoreError> {
        self.left(queue, sources, false).await
    }

    async fn left(
        &self,
        queue: &str,
        sources: &[String],
        running: bool,
    ) -> Result<Vec<Remaining>, StoreError> {
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
        let bound = self.bound(queue, sources).await?;
        let remaining = |row: &tokio_postgres::Row| Remaining {
            handler: row.get(0),
            tags: row.get(1),
            bound: bound.get(&(row.get(0), row.get(1))).copied().unwrap_or(0),
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

    /// How many jobs there are of these sources, by handler and tags.
    async fn bound(
        &self,
        queue: &str,
        sources: &[String],
    ) -> Result<HashMap<(String, Vec<String>), i64>, StoreError> {
        if sources.is_empty() {
            return Ok(HashMap::new());
        }
        let rows = self
            .query(
                include_str!("remaining_bound.sql"),
                &[(&queue, Type::TEXT), (&sources, Type::TEXT_ARRAY)],
            )
            .await?;
        let bound = |row: &tokio_postgres::Row| ((row.get(0), row.get(1)), row.get(2));
        Ok(rows.iter().map(bound).collect())
    }
}
