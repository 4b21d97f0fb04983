//! Admin actions on a job, for the command line. Programs call the SQL functions themselves
//! (`migrations/functions/admin.sql`); when those refuse, the error includes the job's state.
//!
//! The statements of bulk changes limit the wait for locks, and restore the setting before the commit: commits that
//! send a notification wait for each other.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::{JsonText, LockWait, Store, StoreError};
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

impl Store {
    /// True if the job is cancelled now; false if it has already ended or does not exist.
    pub async fn cancel(&self, id: JobId) -> Result<bool, StoreError> {
        let rows = self
            .query("SELECT rouse.cancel($1)", &[(&id.0, Type::INT8)])
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Like [`Self::cancel`], if the state of the job is one of these; part of a bulk change.
    pub async fn cancel_in(
        &self,
        id: JobId,
        states: &[String],
        wait: LockWait,
    ) -> Result<bool, StoreError> {
        let rows = self
            .query(
                "WITH wait AS MATERIALIZED (SELECT current_setting('lock_timeout') AS was, set_config('lock_timeout', $3, true))
                 SELECT rouse.cancel(j.id), set_config('lock_timeout', wait.was, true) FROM wait, rouse.jobs AS j
                 WHERE j.id = $1 AND j.state = ANY ($2::text[]::rouse.state[])",
                &[
                    (&id.0, Type::INT8),
                    (&states, Type::TEXT_ARRAY),
                    (&wait.lock_timeout(), Type::TEXT),
                ],
            )
            .await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    /// Makes a queued job due now, as part of a bulk change. False if it is not queued, or waits for something other
    /// than its time: another job, a signal, or the end of a sleep.
    pub async fn run_now(&self, id: JobId, wait: LockWait) -> Result<bool, StoreError> {
        let rows = self
            .query(
                "WITH wait AS MATERIALIZED (SELECT current_setting('lock_timeout') AS was, set_config('lock_timeout', $2, true))
                 SELECT rouse.reschedule(j.id), set_config('lock_timeout', wait.was, true) FROM wait, rouse.jobs AS j
                 WHERE j.id = $1 AND j.state = 'queued' AND j.wait IS NULL AND j.waits_for IS NULL",
                &[(&id.0, Type::INT8), (&wait.lock_timeout(), Type::TEXT)],
            )
            .await?;
        Ok(!rows.is_empty())
    }

    /// Like [`Self::delete`], as part of a bulk change.
    pub async fn delete_waiting(&self, id: JobId, wait: LockWait) -> Result<(), StoreError> {
        self.query(
            "WITH wait AS MATERIALIZED (SELECT current_setting('lock_timeout') AS was, set_config('lock_timeout', $2, true))
             SELECT rouse.delete($1), set_config('lock_timeout', wait.was, true) FROM wait",
            &[(&id.0, Type::INT8), (&wait.lock_timeout(), Type::TEXT)],
        )
        .await?;
        Ok(())
    }

    /// Like [`Self::retry`], as part of a bulk change.
    pub async fn retry_waiting(&self, id: JobId, wait: LockWait) -> Result<JobId, StoreError> {
        let rows = self
            .query(
                "WITH wait AS MATERIALIZED (SELECT current_setting('lock_timeout') AS was, set_config('lock_timeout', $2, true))
                 SELECT rouse.retry($1), set_config('lock_timeout', wait.was, true) FROM wait",
                &[(&id.0, Type::INT8), (&wait.lock_timeout(), Type::TEXT)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(JobId(row.get(0)))
    }

    /// Ends the job as succeeded, with this result.
    pub async fn complete(&self, id: JobId, result: JsonText) -> Result<(), StoreError> {
        self.query(
            "SELECT rouse.complete($1, $2)",
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
        let rows = self
            .query(
                "SELECT rouse.signal($1, $2, $3)",
                &[
                    (&id.0, Type::INT8),
                    (&name, Type::TEXT),
                    (&payload, Type::JSONB),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Ends the job as failed, with this message.
    pub async fn fail(&self, id: JobId, message: &str) -> Result<(), StoreError> {
        self.query(
            "SELECT rouse.fail($1, $2)",
            &[(&id.0, Type::INT8), (&message, Type::TEXT)],
        )
        .await?;
        Ok(())
    }

    /// Deletes a queued job.
    pub async fn delete(&self, id: JobId) -> Result<(), StoreError> {
        self.query("SELECT rouse.delete($1)", &[(&id.0, Type::INT8)])
            .await?;
        Ok(())
    }

    /// Creates a new job from one that has ended, or returns the existing retry if one is live.
    pub async fn retry(&self, id: JobId) -> Result<JobId, StoreError> {
        let rows = self
            .query("SELECT rouse.retry($1)", &[(&id.0, Type::INT8)])
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(JobId(row.get(0)))
    }

    /// Changes the priority of a queued job: `high`, `normal` or `low`.
    pub async fn set_priority(&self, id: JobId, priority: &str) -> Result<(), StoreError> {
        self.query(
            "SELECT rouse.set_priority($1, $2)",
            &[(&id.0, Type::INT8), (&priority, Type::TEXT)],
        )
        .await?;
        Ok(())
    }

    /// Replaces a queued job by a new one with a different payload, and returns the new job.
    pub async fn replace_payload(&self, id: JobId, payload: JsonText) -> Result<JobId, StoreError> {
        let rows = self
            .query(
                "SELECT rouse.replace_payload($1, $2)",
                &[(&id.0, Type::INT8), (&payload, Type::JSONB)],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(JobId(row.get(0)))
    }

    /// Changes when a queued job may start.
    pub async fn reschedule(&self, id: JobId, when: &When) -> Result<(), StoreError> {
        let (at, secs) = match when {
            When::Now => (None, None),
            When::InSecs(secs) => (None, Some(secs)),
            When::At(text) => (Some(text), None),
        };
        self.query(
            "SELECT rouse.reschedule($1, coalesce($2::text::timestamptz, clock_timestamp() + $3::float8 * interval '1 second'))",
            &[(&id.0, Type::INT8), (&at, Type::TEXT), (&secs, Type::FLOAT8)],
        )
        .await?;
        Ok(())
    }
}
