//! The fleet, as operators see it: workers, the handlers they can run, and workers to forget.

use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use super::json::shown_rows;
use super::{Store, StoreError};

impl StoreError {
    /// True if the worker does not exist.
    pub fn is_unknown_worker(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }
}

/// The incarnations of a worker that are not forgotten.
#[derive(Debug)]
pub struct Incarnations {
    /// Rows of the view `rouse.workers`, the newest incarnation first.
    pub newest: Vec<Value>,
    /// The number of all incarnations.
    pub count: i64,
}

impl Store {
    /// The newest incarnation of each worker, unless it has unregistered: a row of the view `rouse.workers`. `None` if
    /// this login may not read it.
    pub async fn workers(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.read_view(include_str!("workers.sql"), &[]).await
    }

    /// All incarnations of every worker: rows of the view `rouse.workers`, by id, the newest incarnation first. `None`
    /// if this login may not read it.
    pub async fn all_incarnations(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.read_view(include_str!("all_incarnations.sql"), &[])
            .await
    }

    /// The newest `limit` incarnations of a worker, and the number of all of them. `None` if this login may not read
    /// them.
    pub async fn incarnations(
        &self,
        worker_id: &str,
        limit: i64,
    ) -> Result<Option<Incarnations>, StoreError> {
        let rows = self
            .read(
                include_str!("incarnations.sql"),
                &[(&worker_id, Type::TEXT), (&limit, Type::INT8)],
            )
            .await;
        Ok(allowed(rows)?.map(|rows| Incarnations {
            newest: shown_rows(&rows),
            count: rows.first().map_or(0, |row| row.get(1)),
        }))
    }

    /// The ids of all workers that are not forgotten. `None` if this login may not read them.
    pub async fn worker_ids(&self) -> Result<Option<Vec<String>>, StoreError> {
        self.names("SELECT DISTINCT worker_id FROM rouse.workers")
            .await
    }

    /// The `handlers`, `queues` and `tags` of each active worker. `None` if this login may not read them.
    pub async fn serving(&self) -> Result<Option<Vec<Value>>, StoreError> {
        self.read_view(include_str!("serving.sql"), &[]).await
    }

    /// The rows of the view `rouse.handlers`, for this handler or for all: one for each live worker that has it. `None`
    /// if this login may not read it.
    pub async fn fleet_handlers(
        &self,
        handler: Option<&str>,
    ) -> Result<Option<Vec<Value>>, StoreError> {
        self.read_view(include_str!("handlers.sql"), &[(&handler, Type::TEXT)])
            .await
    }

    /// The rows of the view `rouse.backlog`, for this handler or for all. `None` if this login may not read it.
    pub async fn backlog(&self, handler: Option<&str>) -> Result<Option<Vec<Value>>, StoreError> {
        self.read_view(include_str!("backlog.sql"), &[(&handler, Type::TEXT)])
            .await
    }

    /// When the queue was paused, as text. `None` if it is not paused, or this login may not read it.
    pub async fn queue_paused_at(&self, queue: &str) -> Result<Option<String>, StoreError> {
        let response = self
            .query(
                "SELECT to_jsonb(paused_at) #>> '{}' FROM rouse.queue WHERE name = $1",
                &[(&queue, Type::TEXT)],
            )
            .await;
        Ok(allowed(response)?.and_then(|rows| rows.first()?.get(0)))
    }

    /// Removes the ended incarnations of a worker; returns how many there were.
    pub async fn forget_worker(&self, worker_id: &str) -> Result<i32, StoreError> {
        loop {
            let call = "rouse.forget_worker($1)";
            let row = self.act(call, &[(&worker_id, Type::TEXT)]).await?;
            // Null if the database's clock has been set back since the last heartbeat of the worker. This call has
            // corrected the time, and the next one decides.
            if let Some(forgotten) = row.get::<_, Option<i32>>(0) {
                return Ok(forgotten);
            }
        }
    }

    /// Clears the timeout flag of all incarnations of a worker; returns how many had it.
    pub async fn clear_timeouts(&self, worker_id: &str) -> Result<i32, StoreError> {
        let call = "rouse.clear_timeouts($1)";
        let row = self.act(call, &[(&worker_id, Type::TEXT)]).await?;
        Ok(row.get(0))
    }

    async fn read_view(
        &self,
        sql: &str,
        params: &[(&(dyn ToSql + Sync), Type)],
    ) -> Result<Option<Vec<Value>>, StoreError> {
        let rows = allowed(self.read(sql, params).await)?;
        Ok(rows.map(|rows| shown_rows(&rows)))
    }
}

/// `None` if the login lacks the privilege.
pub(super) fn allowed<T>(response: Result<T, StoreError>) -> Result<Option<T>, StoreError> {
    match response {
        Ok(response) => Ok(Some(response)),
        Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(None),
        Err(error) => Err(error),
    }
}
