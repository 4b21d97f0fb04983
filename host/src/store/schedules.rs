//! Schedules for the command line: listing them, and actions on them.

use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};

use super::error::is_login_refused_by_function;
use super::json::shown_rows;
use super::{JsonText, Store, StoreError};

/// The arguments of `rouse.schedule` that the command line supports. `None` means the default of the function.
#[derive(Debug, Clone, Default)]
pub struct NewSchedule {
    /// Its name.
    pub name: String,
    /// The handler of its jobs.
    pub handler: String,
    /// Their payload, as JSON.
    pub payload: String,
    /// The cron expression.
    pub cron: String,
    /// Its time zone.
    pub time_zone: Option<String>,
    /// `skip`, `queue`, `allow` or `cancel`.
    pub overlap: Option<String>,
    /// `none`, `one` or `all`.
    pub catch_up: Option<String>,
    /// The age, in seconds, beyond which missed due times get no job.
    pub catch_up_window_secs: Option<f64>,
    /// The longest delay of a job after its due time, in seconds.
    pub jitter_secs: Option<f64>,
    /// The queue of its jobs.
    pub queue: Option<String>,
    /// Their tenant.
    pub tenant: Option<String>,
    /// Their source.
    pub source: Option<String>,
    /// `high`, `normal` or `low`.
    pub priority: Option<String>,
    /// The maximum number of attempts.
    pub max_attempts: Option<i32>,
    /// Tags that their workers must have.
    pub tags: Vec<String>,
    /// Their attenuated grants, as JSON.
    pub grants: Option<String>,
    /// Their lease, in seconds.
    pub lease_secs: Option<f64>,
    /// Their run timeout, in seconds.
    pub timeout_secs: Option<f64>,
    /// Their job timeout: the time within which they have to end, in seconds.
    pub job_timeout_secs: Option<f64>,
    /// The key in the payload that gets the due time.
    pub due_key: Option<String>,
}

impl StoreError {
    /// True if the schedule does not exist.
    pub fn is_unknown_schedule(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }

    /// True if the schedule belongs to another login.
    pub fn is_of_another_login(&self) -> bool {
        matches!(self, Self::Refused(error) if is_login_refused_by_function(error))
    }
}

impl Store {
    /// The schedule of this name, or all in the order of their names: rows of the view `rouse.schedules`.
    pub async fn schedules(&self, name: Option<&str>) -> Result<Vec<Value>, StoreError> {
        let rows = self
            .read(include_str!("schedules.sql"), &[(&name, Type::TEXT)])
            .await?;
        Ok(shown_rows(&rows))
    }

    /// Creates or replaces a schedule. Returns `created`, `replaced` or `unchanged`.
    pub async fn put_schedule(&self, new: &NewSchedule) -> Result<String, StoreError> {
        let payload = JsonText(new.payload.clone());
        let grants = new.grants.clone().map(JsonText);
        let args: [(&(dyn ToSql + Sync), Type); 20] = [
            (&new.name, Type::TEXT),
            (&new.handler, Type::TEXT),
            (&payload, Type::JSONB),
            (&new.cron, Type::TEXT),
            (&new.time_zone, Type::TEXT),
            (&new.overlap, Type::TEXT),
            (&new.catch_up, Type::TEXT),
            (&new.catch_up_window_secs, Type::FLOAT8),
            (&new.jitter_secs, Type::FLOAT8),
            (&new.queue, Type::TEXT),
            (&new.tenant, Type::TEXT),
            (&new.source, Type::TEXT),
            (&new.priority, Type::TEXT),
            (&new.max_attempts, Type::INT4),
            (&new.tags, Type::TEXT_ARRAY),
            (&grants, Type::JSONB),
            (&new.lease_secs, Type::FLOAT8),
            (&new.timeout_secs, Type::FLOAT8),
            (&new.job_timeout_secs, Type::FLOAT8),
            (&new.due_key, Type::TEXT),
        ];
        let row = self.act(include_str!("put_schedule.sql"), &args).await?;
        Ok(row.get(0))
    }

    /// Deletes a schedule; returns whether it existed.
    pub async fn unschedule(&self, name: &str) -> Result<bool, StoreError> {
        let call = "rouse.unschedule($1)";
        let row = self.act(call, &[(&name, Type::TEXT)]).await?;
        Ok(row.get(0))
    }

    /// Pauses a schedule; returns when it was paused, as text.
    pub async fn pause_schedule(&self, name: &str) -> Result<String, StoreError> {
        let call = "to_jsonb(rouse.pause_schedule($1)) #>> '{}'";
        let row = self.act(call, &[(&name, Type::TEXT)]).await?;
        Ok(row.get(0))
    }

    /// Resumes a paused schedule; returns whether it was paused.
    pub async fn resume_schedule(&self, name: &str) -> Result<bool, StoreError> {
        let call = "rouse.resume_schedule($1)";
        let row = self.act(call, &[(&name, Type::TEXT)]).await?;
        Ok(row.get(0))
    }

    /// Enqueues a job of a schedule now; returns its id.
    pub async fn run_schedule(&self, name: &str) -> Result<i64, StoreError> {
        let call = "rouse.run_schedule($1)";
        let row = self.act(call, &[(&name, Type::TEXT)]).await?;
        Ok(row.get(0))
    }

    /// Requests jobs for the due times between these times, as Postgres reads them; returns the id of the backfill.
    pub async fn backfill_schedule(
        &self,
        name: &str,
        since: &str,
        before: &str,
    ) -> Result<i64, StoreError> {
        let row = self
            .act(
                "rouse.backfill_schedule($1, $2::text::timestamptz, $3::text::timestamptz)",
                &[
                    (&name, Type::TEXT),
                    (&since, Type::TEXT),
                    (&before, Type::TEXT),
                ],
            )
            .await?;
        Ok(row.get(0))
    }
}
