//! The waits and durations of the newest ended jobs, and the handlers whose jobs fail: for the dashboard.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError};

/// The number of the newest jobs that are examined for all handlers: 500 are enough for percentiles.
const NEWEST: i32 = 500;
/// The same for one handler, which may have only a few of them.
const NEWEST_OF_HANDLER: i32 = 10_000;
/// The number of the newest unsuccessful jobs that are examined.
const NEWEST_UNSUCCESSFUL: i32 = 2_000;

/// The numbers of jobs that had ended at a given time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EndedCounts {
    /// The time, seconds since 1970.
    pub at: f64,
    /// All ended jobs, since Postgres' statistics started.
    pub ended: i64,
    /// The jobs that live workers count as failed. Workers report every 30 s.
    pub failed: i64,
}

impl Store {
    /// The newest ended jobs, of all handlers or of one: `jobs`, `failed`, and in seconds `wait_p50`, `wait_p95`,
    /// `run_p50`, `run_p95`, `cpu_p50`, `cpu_p95`. `None` if this login may not read them.
    pub async fn recent(&self, handler: Option<&str>) -> Result<Option<Value>, StoreError> {
        let examined = match handler {
            None => NEWEST,
            Some(_) => NEWEST_OF_HANDLER,
        };
        let result = self
            .read(
                include_str!("recent.sql"),
                &[(&handler, Type::TEXT), (&examined, Type::INT4)],
            )
            .await;
        Ok(allowed(result)?.and_then(|rows| Some(rows.first()?.get(0))))
    }

    /// The handlers whose jobs have failed or timed out in the last hour: `handler`, `jobs`, `at_least`, `first_at`,
    /// `last_at`, `message`. `None` if this login may not read them.
    pub async fn failing(&self) -> Result<Option<Vec<Value>>, StoreError> {
        let result = self
            .read(
                include_str!("failing.sql"),
                &[(&NEWEST_UNSUCCESSFUL, Type::INT4)],
            )
            .await;
        Ok(allowed(result)?.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }

    /// The numbers of jobs that have ended. `None` if this login may not read them.
    pub async fn ended_counts(&self) -> Result<Option<EndedCounts>, StoreError> {
        let result = self.read(include_str!("ended_counts.sql"), &[]).await;
        Ok(allowed(result)?.and_then(|rows| {
            let row = rows.first()?;
            Some(EndedCounts {
                at: row.get(0),
                ended: row.get(1),
                failed: row.get(2),
            })
        }))
    }
}
