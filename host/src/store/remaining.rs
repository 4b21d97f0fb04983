//! The jobs that remain in a queue, for a worker that drains it.

use std::collections::HashMap;

use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// The jobs that remain in a queue for one handler and one list of required tags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remaining {
    /// The handler.
    pub handler: String,
    /// The tags that a worker needs for them.
    pub tags: Vec<String>,
    /// Jobs that can be claimed.
    pub ready: i64,
    /// Jobs that can be claimed shortly: they are due, or their lease has ended.
    pub due: i64,
    /// The ready and due jobs from one of the requested sources.
    pub bound: i64,
    /// Jobs that are scheduled for later.
    pub scheduled: i64,
    /// The scheduled jobs that wait for a retry.
    pub retries: i64,
    /// Jobs that this worker is running.
    pub mine: i64,
    /// Jobs that other workers are running.
    pub others: i64,
    /// True if there are more ready or waiting jobs than were counted.
    pub at_least: bool,
}

impl Store {
    /// The jobs that remain in this queue. `mine` counts the jobs of the worker that has registered through this store,
    /// if any. Reads all running jobs, of all queues.
    pub async fn remaining(
        &self,
        queue: &str,
        sources: &[String],
    ) -> Result<Vec<Remaining>, StoreError> {
        self.left(queue, sources, true).await
    }

    /// [`remaining`](Self::remaining) without running jobs: `mine` and `others` are 0.
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
        let worker = self.incarnation().map(|incarnation| incarnation.0);
        let rows = self
            .query(
                include_str!("remaining.sql"),
                &[
                    (&queue, Type::TEXT),
                    (&worker, Type::INT8),
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

    /// The number of jobs of these sources, by handler and tags.
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
