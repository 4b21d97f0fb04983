//! Queues: what is in them, and whether they go on.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError};

impl Store {
    /// The rows of the view `rouse.queues`, by name.
    pub async fn queues(&self) -> Result<Vec<Value>, StoreError> {
        let rows = self.query(include_str!("queues.sql"), &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// The queues into which jobs were enqueued; none: this login may not look.
    pub async fn used_queues(&self) -> Result<Option<Vec<String>>, StoreError> {
        self.names("SELECT DISTINCT queue FROM rouse.lane").await
    }

    /// The handlers for which jobs were enqueued; none: this login may not look.
    pub async fn used_handlers(&self) -> Result<Option<Vec<String>>, StoreError> {
        self.names("SELECT DISTINCT handler FROM rouse.lane").await
    }

    /// A column of texts. None: this login may not look.
    pub(super) async fn names(&self, sql: &str) -> Result<Option<Vec<String>>, StoreError> {
        let rows = allowed(self.query(sql, &[]).await)?;
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

    /// Sets for how many days finished jobs of a queue are kept, and those that failed or timed out: none leaves it as it was, 0 means as
    /// long as all are. Returns what holds now; none: as long as all are.
    pub async fn set_retention(
        &self,
        queue: &str,
        keep_days: Option<i32>,
        keep_failed_days: Option<i32>,
    ) -> Result<(Option<i32>, Option<i32>), StoreError> {
        let rows = self
            .query(
                "SELECT keep_days, keep_failed_days FROM rouse.set_retention($1, $2, $3)",
                &[
                    (&queue, Type::TEXT),
                    (&keep_days, Type::INT4),
                    (&keep_failed_days, Type::INT4),
                ],
            )
            .await?;
        let row = rows.first().expect("the function returns one row");
        Ok((row.get(0), row.get(1)))
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
