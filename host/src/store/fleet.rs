//! The fleet, as operators see it: who works, what it can run, what is to be forgotten.

use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use super::{Store, StoreError};

impl StoreError {
    /// True where there is no such worker.
    pub fn is_unknown_worker(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }
}

impl Store {
    /// Of each worker the newest life, unless it has ended in order: a row of the view `rouse.workers`. None: this
    /// login may not look.
    pub async fn workers(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(include_str!("workers.sql"), &[]).await
    }

    /// All lives of the worker with this id, or of every worker: rows of the view `rouse.workers`, by id, the newest
    /// life first. None: this login may not look.
    pub async fn incarnations(
        &self,
        worker_id: Option<&str>,
    ) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(
            include_str!("incarnations.sql"),
            &[(&worker_id, Type::TEXT)],
        )
        .await
    }

    /// The ids of all workers that are not forgotten. None: this login may not look.
    pub async fn worker_ids(&self) -> Result<Option<Vec<String>>, StoreError> {
        self.names("SELECT DISTINCT worker_id FROM rouse.workers")
            .await
    }

    /// What the active workers serve: `handlers`, `queues` and `tags` of each. None: this login may not look.
    pub async fn serving(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(include_str!("serving.sql"), &[]).await
    }

    /// The rows of the view `rouse.handlers`, of this handler or of all: one for each worker that lives and has it. None:
    /// this login may not look.
    pub async fn fleet_handlers(
        &self,
        handler: Option<&str>,
    ) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(include_str!("handlers.sql"), &[(&handler, Type::TEXT)])
            .await
    }

    /// The rows of the view `rouse.backlog`, of this handler or of all. None: this login may not look.
    pub async fn backlog(&self, handler: Option<&str>) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(include_str!("backlog.sql"), &[(&handler, Type::TEXT)])
            .await
    }

    /// Since when the queue is paused, for people. None: it is not, or this login may not look.
    pub async fn queue_paused_at(&self, queue: &str) -> Result<Option<String>, StoreError> {
        let asked = self
            .query(
                "SELECT to_jsonb(paused_at) #>> '{}' FROM rouse.queue WHERE name = $1",
                &[(&queue, Type::TEXT)],
            )
            .await;
        Ok(allowed(asked)?.and_then(|rows| rows.first()?.get(0)))
    }

    /// Takes the ended lives of a worker off the list; returns how many they were.
    pub async fn forget_worker(&self, worker_id: &str) -> Result<i32, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.forget_worker($1)",
                &[(&worker_id, Type::TEXT)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Clears the timeout flag of all lives of a worker; returns how many had it.
    pub async fn clear_timeouts(&self, worker_id: &str) -> Result<i32, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.clear_timeouts($1)",
                &[(&worker_id, Type::TEXT)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    async fn look(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Option<Vec<Value>>, StoreError> {
        let rows = allowed(self.query(sql, params).await)?;
        Ok(rows.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }
}

/// None where the login may not ask that.
pub(super) fn allowed<T>(asked: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match asked {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(None),
        Err(error) => Err(error),
    }
}
