//! Admin actions on a job, for the command line. Programs call the SQL functions themselves
//! (`migrations/functions/admin.sql`); when those refuse, the error includes the job's state. Admin actions on queues,
//! gates, schedules, workers, flows and the state of handlers use `Store::act` too.
//!
//! The statements limit the wait for locks, and restore the setting before the commit: commits that send a notification
//! wait for each other. Without a limit, a host would stop waiting for the response, and the change would still be made
//! once the locks are free.

use tokio_postgres::Row;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::{JsonText, LockWait, Params, Store, StoreError, retry_conflicts};
use crate::job::JobId;

/// When a job becomes ready.
#[derive(Debug, Clone, PartialEq)]
pub enum When {
    /// At once.
    Now,
    /// This many seconds from now, by the database's clock.
    InSecs(f64),
    /// At this time, as Postgres reads it.
    At(String),
}

impl StoreError {
    /// True if the job does not exist or is no longer kept.
    pub fn is_unknown_job(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }

    /// True if the job's state does not allow the action.
    pub fn is_refused_by_state(&self) -> bool {
        self.code() == Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE)
    }
}

/// A statement that makes this call, with this wait for locks. `call`: a function call, or a query of one value.
/// `from`: what the call reads, and its conditions.
fn waiting(wait: LockWait, call: &str, from: &str) -> String {
    format!(
        "WITH wait AS MATERIALIZED (
             SELECT current_setting('lock_timeout') AS was, set_config('lock_timeout', '{}', true))
         SELECT ({call}), set_config('lock_timeout', wait.was, true) FROM wait{from}",
        wait.lock_timeout()
    )
}

impl Store {
    /// Makes the call of an admin action on one job, queue, gate, schedule, worker or flow, or on the state of a
    /// handler: a function call, or a query of one value. Waits for locks, but not indefinitely.
    pub(super) async fn act(&self, call: &str, params: Params<'_>) -> Result<Row, StoreError> {
        let sql = waiting(LockWait::start(), call, "");
        let mut rows = self.query(&sql, params).await?;
        Ok(rows.pop().expect("the statement returns one row"))
    }

    /// Makes a call of a bulk change; again if concurrent transactions made Postgres roll the change back.
    pub(super) async fn act_in_bulk(
        &self,
        wait: LockWait,
        call: &str,
        from: &str,
        params: Params<'_>,
    ) -> Result<Option<Row>, StoreError> {
        let rows = retry_conflicts(StoreError::is_conflict, || async {
            self.query(&waiting(wait, call, from), params).await
        });
        Ok(rows.await?.pop())
    }

    /// True if the job is cancelled now; false if it has already ended or does not exist.
    pub async fn cancel(&self, id: JobId) -> Result<bool, StoreError> {
        let row = self.act("rouse.cancel($1)", &[(&id.0, Type::INT8)]).await?;
        Ok(row.get(0))
    }

    /// Like [`Self::cancel`], if the state of the job is one of these; part of a bulk change.
    pub async fn cancel_in(
        &self,
        id: JobId,
        states: &[String],
        wait: LockWait,
    ) -> Result<bool, StoreError> {
        let row = self
            .act_in_bulk(
                wait,
                "rouse.cancel(j.id)",
                ", rouse.jobs AS j WHERE j.id = $1 AND j.state = ANY ($2::text[]::rouse.state[])",
                &[(&id.0, Type::INT8), (&states, Type::TEXT_ARRAY)],
            )
            .await?;
        Ok(row.is_some_and(|row| row.get(0)))
    }

    /// Makes a queued job due now, as part of a bulk change. False if it is not queued, or waits for something other
    /// than its time: another job, a signal, or the end of a sleep.
    pub async fn run_now(&self, id: JobId, wait: LockWait) -> Result<bool, StoreError> {
        let row = self
            .act_in_bulk(
                wait,
                "rouse.reschedule(j.id)",
                ", rouse.jobs AS j WHERE j.id = $1 AND j.state = 'queued' AND j.wait IS NULL AND j.waits_for IS NULL",
                &[(&id.0, Type::INT8)],
            )
            .await?;
        Ok(row.is_some())
    }

    /// Like [`Self::delete`], as part of a bulk change.
    pub async fn delete_waiting(&self, id: JobId, wait: LockWait) -> Result<(), StoreError> {
        self.act_in_bulk(wait, "rouse.delete($1)", "", &[(&id.0, Type::INT8)])
            .await?;
        Ok(())
    }

    /// Like [`Self::retry`], as part of a bulk change.
    pub async fn retry_waiting(&self, id: JobId, wait: LockWait) -> Result<JobId, StoreError> {
        let row = self
            .act_in_bulk(wait, "rouse.retry($1)", "", &[(&id.0, Type::INT8)])
            .await?;
        let row = row.expect("a scalar function returns one row");
        Ok(JobId(row.get(0)))
    }

    /// Ends the job as succeeded, with this result.
    pub async fn complete(&self, id: JobId, result: JsonText) -> Result<(), StoreError> {
        self.act(
            "rouse.complete($1, $2)",
            &[(&id.0, Type::INT8), (&result, Type::JSONB)],
        )
        .await?;
        Ok(())
    }

    /// Sends a signal to the job. False if it has ended.
    pub async fn signal(
        &self,
        id: JobId,
        name: &str,
        payload: JsonText,
    ) -> Result<bool, StoreError> {
        let row = self
            .act(
                "rouse.signal($1, $2, $3)",
                &[
                    (&id.0, Type::INT8),
                    (&name, Type::TEXT),
                    (&payload, Type::JSONB),
                ],
            )
            .await?;
        Ok(row.get(0))
    }

    /// Ends the job as failed, with this message.
    pub async fn fail(&self, id: JobId, message: &str) -> Result<(), StoreError> {
        self.act(
            "rouse.fail($1, $2)",
            &[(&id.0, Type::INT8), (&message, Type::TEXT)],
        )
        .await?;
        Ok(())
    }

    /// Deletes a queued job.
    pub async fn delete(&self, id: JobId) -> Result<(), StoreError> {
        self.act("rouse.delete($1)", &[(&id.0, Type::INT8)]).await?;
        Ok(())
    }

    /// Creates a new job from one that has ended, or returns the existing retry if one is live.
    pub async fn retry(&self, id: JobId) -> Result<JobId, StoreError> {
        let row = self.act("rouse.retry($1)", &[(&id.0, Type::INT8)]).await?;
        Ok(JobId(row.get(0)))
    }

    /// Changes the priority of a queued job: `high`, `normal` or `low`.
    pub async fn set_priority(&self, id: JobId, priority: &str) -> Result<(), StoreError> {
        self.act(
            "rouse.set_priority($1, $2)",
            &[(&id.0, Type::INT8), (&priority, Type::TEXT)],
        )
        .await?;
        Ok(())
    }

    /// Replaces a queued job by a new one with a different payload, and returns the new job.
    pub async fn replace_payload(&self, id: JobId, payload: JsonText) -> Result<JobId, StoreError> {
        let row = self
            .act(
                "rouse.replace_payload($1, $2)",
                &[(&id.0, Type::INT8), (&payload, Type::JSONB)],
            )
            .await?;
        Ok(JobId(row.get(0)))
    }

    /// Changes when a queued job may start.
    pub async fn reschedule(&self, id: JobId, when: &When) -> Result<(), StoreError> {
        let (at, secs) = match when {
            When::Now => (None, None),
            When::InSecs(secs) => (None, Some(secs)),
            When::At(text) => (Some(text), None),
        };
        self.act(
            "rouse.reschedule($1, coalesce($2::text::timestamptz, clock_timestamp() + $3::float8 * interval '1 second'))",
            &[(&id.0, Type::INT8), (&at, Type::TEXT), (&secs, Type::FLOAT8)],
        )
        .await?;
        Ok(())
    }
}
