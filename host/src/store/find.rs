//! Finds jobs by what they are, and retries what was found: a batch with each call (`migrations/functions/find.sql`).

use serde_json::Value;
use tokio_postgres::types::Type;

use super::{JsonText, LOOKED_AT_MAX, Store, StoreError};

/// What one call of a search has found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundJobs {
    /// The jobs, the newest first.
    pub ids: Vec<i64>,
    /// How many were looked at.
    pub looked_at: i32,
    /// With which id the next call goes on; none: there are no more.
    pub next_before: Option<i64>,
    /// The same, where the search has stopped because it had looked at [`LOOKED_AT_MAX`] jobs.
    pub looked_back_to: Option<i64>,
}

/// What one call has retried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetriedJobs {
    /// Those that were retried.
    pub retried: Vec<i64>,
    /// The new job of each.
    pub made: Vec<i64>,
    /// Those that were not: a live job has their unique key.
    pub refused: Vec<i64>,
    /// How many were looked at.
    pub looked_at: i32,
    /// With which id the next call goes on; none: there are no more.
    pub next_before: Option<i64>,
}

impl Store {
    /// Up to `most` jobs below this id (none: of all) that fit the filter.
    pub async fn search_jobs(
        &self,
        filter: &Value,
        before: Option<i64>,
        most: i32,
    ) -> Result<FoundJobs, StoreError> {
        let rows = self
            .query(
                "SELECT ids, looked_at, next_before, looked_back_to FROM rouse.search_jobs($1, $2, $3, $4)",
                &[
                    (&JsonText(filter.to_string()), Type::JSONB),
                    (&before, Type::INT8),
                    (&most, Type::INT4),
                    (&LOOKED_AT_MAX, Type::INT4),
                ],
            )
            .await?;
        let row = rows.first().expect("the function returns one row");
        Ok(FoundJobs {
            ids: row.get(0),
            looked_at: row.get(1),
            next_before: row.get(2),
            looked_back_to: row.get(3),
        })
    }

    /// Retries up to `most` jobs below this id that fit the filter and were never retried, in one transaction.
    pub async fn retry_jobs(
        &self,
        filter: &Value,
        before: Option<i64>,
        most: i32,
    ) -> Result<RetriedJobs, StoreError> {
        let rows = self
            .query(
                "SELECT retried, made, refused, looked_at, next_before FROM rouse.retry_jobs($1, $2, $3, $4)",
                &[
                    (&JsonText(filter.to_string()), Type::JSONB),
                    (&before, Type::INT8),
                    (&most, Type::INT4),
                    (&LOOKED_AT_MAX, Type::INT4),
                ],
            )
            .await?;
        let row = rows.first().expect("the function returns one row");
        Ok(RetriedJobs {
            retried: row.get(0),
            made: row.get(1),
            refused: row.get(2),
            looked_at: row.get(3),
            next_before: row.get(4),
        })
    }
}
