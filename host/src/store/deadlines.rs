//! Ends jobs that have not ended within their job timeout.

use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde_json::Value;
use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{Attempt, JobId};

/// The maximum number of deadlines that one call handles. Most of them belong to jobs that have ended, and are deleted
/// together.
const HANDLED_MAX: i32 = 1000;

/// The result of one call.
#[derive(Debug, Clone, PartialEq)]
pub struct Enforcement {
    /// The number of deadlines that were handled; 0 if there are none to handle now.
    pub handled: i32,
    /// Deadlines were handled up to this time, by the database's clock.
    pub looked_at: SystemTime,
    /// The time until the next deadline passes, by the database's clock; `None` if there is none.
    pub next_in: Option<Duration>,
    /// The jobs that the call has ended, except those that a limited login does not serve.
    pub ended: Vec<MissedDeadline>,
}

/// A job that has failed because its deadline has passed.
#[derive(Debug, Clone, PartialEq)]
pub struct MissedDeadline {
    /// The job.
    pub id: JobId,
    /// Its handler.
    pub handler: String,
    /// Its last attempt; 0 if there was none.
    pub attempt: Attempt,
    /// Its error, as it is stored.
    pub error: Value,
}

impl Store {
    /// Ends jobs whose deadline has passed, and deletes the deadlines of jobs that have already ended. Never waits for
    /// the lock of a job. `since` restricts the call to deadlines that passed after this time, by the database's clock
    /// (`None`: all).
    pub async fn enforce_deadlines(
        &self,
        since: Option<SystemTime>,
    ) -> Result<Enforcement, StoreError> {
        let me = self.identity()?;
        let rows = self
            .query(
                include_str!("enforce_deadlines.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&HANDLED_MAX, Type::INT4),
                    (&since, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        let next_ms: Option<i64> = row.get(1);
        // A list that this host cannot read comes from newer functions: the events are then missing from its log.
        let ended: Vec<EndedJob> = serde_json::from_value(row.get(3)).unwrap_or_default();
        Ok(Enforcement {
            handled: row.get(0),
            looked_at: row.get(2),
            next_in: next_ms.map(|ms| Duration::from_millis(ms.try_into().unwrap_or(0))),
            ended: ended.into_iter().map(MissedDeadline::from).collect(),
        })
    }
}

/// An entry of `ended`.
#[derive(Deserialize)]
struct EndedJob {
    job: i64,
    handler: String,
    attempt: i32,
    error: Value,
}

impl From<EndedJob> for MissedDeadline {
    fn from(ended: EndedJob) -> Self {
        Self {
            id: JobId(ended.job),
            handler: ended.handler,
            attempt: Attempt(ended.attempt),
            error: ended.error,
        }
    }
}
