//! The fleet, as operators see it: who works, what it can run, what is to be forgotten.

use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::{Store, StoreError};

impl StoreError {
    /// True where there is no such worker.
    pub fn is_unknown_worker(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }
}

impl Store {
    /// The rows of the view `rouse.workers`, one for each life: by id, the newest life first. None: this login
    /// may not look.
    pub async fn workers(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(include_str!("workers.sql")).await
    }

    /// The rows of the view `rouse.handlers`: one for each handler of each worker that lives. None: this login may
    /// not look.
    pub async fn fleet_handlers(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(include_str!("handlers.sql")).await
    }

    /// The rows of the view `rouse.backlog`. None: this login may not look.
    pub async fn backlog(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.look(include_str!("backlog.sql")).await
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

    async fn look(&self, sql: &str) -> Result<Option<Vec<Value>>, StoreError> {
        let rows = allowed(self.query(sql, &[]).await)?;
        Ok(rows.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }
}

/// None where the login may not ask that.
fn allowed<T>(asked: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match asked {
        Ok(answer) => Ok(Some(answer)),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(None),
        Err(error) => Err(error),
    }
}
