//! Admin actions in the audit outbox. They stay there until a host has logged them.

use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::JobId;

/// An admin action on a job, a queue or anything else.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdminAction {
    /// Its id in the outbox.
    pub id: i64,
    /// The time of the action (UTC, RFC 3339).
    pub at: String,
    /// `cancelled`, `retried`, `paused` …
    pub event: String,
    /// The job; `None` if the action was not on a job.
    pub job: Option<JobId>,
    /// The job's handler; `None` if the job is no longer kept.
    pub handler: Option<String>,
    /// The job's queue, or the queue that the action was on.
    pub queue: Option<String>,
    /// The job's attempt at that time; `None` before the first.
    pub attempt: Option<i32>,
    /// The login that took the action.
    pub who: String,
    /// Details, as JSON.
    pub detail: Option<String>,
}

impl Store {
    /// Deletes the actions with the ids `logged` from the outbox, and returns up to `rows_max` others, in order. The
    /// caller has to log these, and then pass their ids to its next call. Until then, no other host receives them for
    /// two minutes. After an error, the same call may be repeated.
    pub async fn take_audit_outbox(
        &self,
        logged: &[i64],
        rows_max: usize,
    ) -> Result<Vec<AdminAction>, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("audit_outbox.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&logged, Type::INT8_ARRAY),
                    (&i32::try_from(rows_max).unwrap_or(i32::MAX), Type::INT4),
                ],
            )
            .await?;
        rows.iter()
            .map(|row| {
                Ok(AdminAction {
                    id: row.try_get(0)?,
                    at: row.try_get(1)?,
                    event: row.try_get(2)?,
                    job: row.try_get::<_, Option<i64>>(3)?.map(JobId),
                    handler: row.try_get(4)?,
                    queue: row.try_get(5)?,
                    attempt: row.try_get(6)?,
                    who: row.try_get(7)?,
                    detail: row.try_get(8)?,
                })
            })
            .collect()
    }
}
