//! Who wants to be notified: hints that enqueue reads.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::Incarnation;

impl Store {
    /// From now on, and for this long, the worker wants a NOTIFY for these queues (`*`: for any).
    pub async fn sleep(
        &self,
        worker: Incarnation,
        queues: &[String],
        how_long: Duration,
    ) -> Result<(), StoreError> {
        let ms = i64::try_from(how_long.as_millis()).unwrap_or(i64::MAX);
        self.query(
            "SELECT rouse.sleep($1, $2, $3)",
            &[
                (&worker.0, Type::INT8),
                (&queues, Type::TEXT_ARRAY),
                (&ms, Type::INT8),
            ],
        )
        .await?;
        Ok(())
    }

    /// The worker is busy: nobody needs to notify it.
    pub async fn awake(&self, worker: Incarnation) -> Result<(), StoreError> {
        self.query("SELECT rouse.awake($1)", &[(&worker.0, Type::INT8)])
            .await?;
        Ok(())
    }
}
