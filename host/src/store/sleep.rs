//! Requests for notifications by idle workers: hints that enqueues read.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::{Store, StoreError};

impl Store {
    /// Requests a NOTIFY for these queues (`*`: for any), for this long from now.
    pub async fn sleep(&self, queues: &[String], how_long: Duration) -> Result<(), StoreError> {
        let worker = self.identity()?;
        let ms = i64::try_from(how_long.as_millis()).unwrap_or(i64::MAX);
        self.query(
            "SELECT rouse.sleep($1, $2, $3, $4)",
            &[
                (&worker.incarnation.0, Type::INT8),
                (&worker.key(), Type::BYTEA),
                (&queues, Type::TEXT_ARRAY),
                (&ms, Type::INT8),
            ],
        )
        .await?;
        Ok(())
    }

    /// Withdraws the request: the worker is busy and needs no notifications.
    pub async fn awake(&self) -> Result<(), StoreError> {
        self.query_as_worker("SELECT rouse.awake($1, $2)").await?;
        Ok(())
    }
}
