//! Changes a job from outside, for the command line. Programs call the SQL functions themselves
//! (`migrations/functions/admin.sql`); what they refuse says what the job is.

use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::{JsonText, Store, StoreError};
use crate::job::JobId;

/// When a job is to be ready.
#[derive(Debug, Clone, PartialEq)]
pub enum When {
    /// At once.
    Now,
    /// So many seconds from now, by the database's clock.
    InSecs(f64),
    /// Then, as Postgres reads it.
    At(String),
}

impl StoreError {
    /// True where there is no such job (any more).
    pub fn is_unknown_job(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }

    /// True where the job is not in a state for what was asked.
    pub fn is_refused_by_state(&self) -> bool {
        self.code() == Some(&SqlState::OBJECT_NOT_IN_PREREQUISITE_STATE)
    }
}

impl Store {
    /// True where the job is cancelled now; false where it has ended otherwise, or there is none.
    pub async fn cancel(&self, id: JobId) -> Result<bool, StoreError> {
        let rows = self
            .query("SELECT rouse.cancel($1)", &[(&id.0, Type::INT8)])
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
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

    /// Ends the job as failed, with this message.
    pub async fn fail(&self, id: JobId, message: &str) -> Result<(), StoreError> {
        self.query(
            "SELECT rouse.fail($1, $2)",
            &[(&id.0, Type::INT8), (&message, Type::TEXT)],
        )
        .await?;
        Ok(())
    }

    /// Takes a queued job away.
    pub async fn delete(&self, id: JobId) -> Result<(), StoreError> {
        self.query("SELECT rouse.delete($1)", &[(&id.0, Type::INT8)])
            .await?;
        Ok(())
    }

    /// Makes a new job of one that has ended; the one that is live where there is such a retry.
    pub async fn retry(&self, id: JobId) -> Result<JobId, StoreError> {
        let rows = self
            .query("SELECT rouse.retry($1)", &[(&id.0, Type::INT8)])
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
