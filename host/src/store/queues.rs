//! Queues: what is in them, and whether they go on.

use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError};

impl Store {
    /// The rows of the view `rouse.queues`, by name.
    pub async fn queues(&self) -> Result<Vec<Value>, StoreError> {
        let rows = self.query(include_str!("queues.sql"), &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Whether a job was ever enqueued there; none: this login may not look.
    pub async fn queue_was_used(&self, queue: &str) -> Result<Option<bool>, StoreError> {
        let asked = self
            .query(
                "SELECT EXISTS (SELECT FROM rouse.lane WHERE queue = $1)",
                &[(&queue, Type::TEXT)],
            )
            .await;
        match asked {
            Ok(rows) => Ok(rows.first().map(|row| row.get(0))),
            Err(error) if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The queues into which jobs were enqueued; none: this login may not look.
    pub async fn used_queues(&self) -> Result<Option<Vec<String>>, StoreError> {
        let asked = self
            .query("SELECT DISTINCT queue FROM rouse.lane", &[])
            .await;
        let rows = allowed(asked)?;
        Ok(rows.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }

    /// Pauses a queue; returns since when it is paused, for people.
    pub async fn pause_queue(&self, queue: &str) -> Result<String, StoreError> {
        let rows = self
            .query(
                "SELECT to_jsonb(rouse.pause_queue($1)) #>> '{}'",
                &[(&queue, Type::TEXT)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Lets a queue go on; true where it was paused.
    pub async fn resume_queue(&self, queue: &str) -> Result<bool, StoreError> {
        let rows = self
            .query("SELECT rouse.resume_queue($1)", &[(&queue, Type::TEXT)])
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Cancels up to so many ready jobs; returns how many.
    pub async fn purge_queue(&self, queue: &str, most: i32) -> Result<i32, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.purge_queue($1, $2)",
                &[(&queue, Type::TEXT), (&most, Type::INT4)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }
}
