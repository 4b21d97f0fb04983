//! Lists jobs.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// The most jobs that one search looks at: filters that match little would read all that is kept.
pub const LOOKED_AT_MAX: i32 = 100_000;

/// Which jobs.
#[derive(Debug, Clone)]
pub struct Listing {
    /// As `rouse.search_jobs` reads it (`migrations/functions/find.sql`).
    pub filter: Value,
    /// Only jobs with a smaller id; none: all.
    pub before: Option<i64>,
    /// At most so many, the newest.
    pub limit: i32,
}

/// Jobs, and where the search for them ended.
#[derive(Debug, Clone)]
pub struct Listed {
    /// The newest first.
    pub jobs: Vec<Value>,
    /// The last of the jobs that were looked at, where there are more that were not.
    pub looked_back_to: Option<i64>,
}

impl Store {
    /// The newest jobs that fit, live or finished, of the [`LOOKED_AT_MAX`] newest.
    pub async fn jobs(&self, listing: &Listing) -> Result<Listed, StoreError> {
        let found = self
            .search_jobs(&listing.filter, listing.before, listing.limit)
            .await?;
        let rows = self
            .query(include_str!("jobs.sql"), &[(&found.ids, Type::INT8_ARRAY)])
            .await?;
        Ok(Listed {
            jobs: rows.iter().map(|row| row.get(0)).collect(),
            looked_back_to: found.looked_back_to,
        })
    }

    /// When this job was requested, for people; none where there is no such job (any more).
    pub async fn requested_at(&self, id: i64) -> Result<Option<String>, StoreError> {
        let rows = self
            .query(
                "SELECT to_char(requested_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS\"Z\"') FROM rouse.job($1)",
                &[(&id, Type::INT8)],
            )
            .await?;
        Ok(rows.first().map(|row| row.get(0)))
    }
}
