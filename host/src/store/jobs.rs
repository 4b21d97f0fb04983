//! Lists jobs.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::json::shown_rows;
use super::{Store, StoreError};

/// The maximum number of jobs that one search examines: a filter with few matches would otherwise read the whole
/// history.
pub const EXAMINED_MAX: i32 = 100_000;

/// The jobs that a listing contains.
#[derive(Debug, Clone)]
pub struct Listing {
    /// The filter, as `rouse.search_jobs` reads it (`migrations/functions/find.sql`).
    pub filter: Value,
    /// Only jobs with a smaller id; `None` means all.
    pub before: Option<i64>,
    /// The maximum number of jobs; the newest are listed.
    pub limit: i32,
    /// The maximum number of jobs that are examined, for instance [`EXAMINED_MAX`].
    pub max_examined: i32,
}

/// Jobs, and how far back the search went.
#[derive(Debug, Clone)]
pub struct JobList {
    /// Newest first.
    pub jobs: Vec<Value>,
    /// The oldest job that was examined, if there are more that were not.
    pub examined_back_to: Option<i64>,
}

impl Store {
    /// The newest matching jobs, live or finished, among the newest `max_examined`.
    pub async fn jobs(&self, listing: &Listing) -> Result<JobList, StoreError> {
        let found = self
            .search_jobs_among(
                &listing.filter,
                listing.before,
                listing.limit,
                listing.max_examined,
            )
            .await?;
        let rows = self
            .read(include_str!("jobs.sql"), &[(&found.ids, Type::INT8_ARRAY)])
            .await?;
        Ok(JobList {
            jobs: shown_rows(&rows),
            examined_back_to: found.examined_back_to,
        })
    }

    /// When this job was requested, as text; `None` if the job does not exist or is no longer kept.
    pub async fn requested_at(&self, id: i64) -> Result<Option<String>, StoreError> {
        let rows = self
            .read(
                "SELECT to_char(requested_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') FROM rouse.job($1)",
                &[(&id, Type::INT8)],
            )
            .await?;
        Ok(rows.first().map(|row| row.get(0)))
    }
}
