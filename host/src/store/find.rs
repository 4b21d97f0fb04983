//! Searches jobs by their properties, and retries the matches: one batch per call (`migrations/functions/find.sql`).

use serde_json::Value;
use tokio_postgres::types::Type;

use super::{EXAMINED_MAX, JsonText, LockWait, Params, Store, StoreError, retry_conflicts};

/// The result of one search call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundJobs {
    /// The jobs, newest first.
    pub ids: Vec<i64>,
    /// The number of jobs that were examined.
    pub examined_count: i32,
    /// The id with which to continue; `None` if there are no more jobs.
    pub next_before: Option<i64>,
    /// The id with which to continue, if the search stopped because it had examined [`EXAMINED_MAX`] jobs.
    pub examined_back_to: Option<i64>,
}

/// The result of one retry call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RetriedJobs {
    /// The jobs that were retried.
    pub retried: Vec<i64>,
    /// The new job for each of them.
    pub made: Vec<i64>,
    /// The jobs that were not retried: a live job has their unique key, their payload was removed, or a job that they
    /// wait for has failed.
    pub refused: Vec<i64>,
    /// The jobs that were not retried because another transaction has locked them.
    pub locked: Vec<i64>,
    /// The number of jobs that were examined.
    pub examined_count: i32,
    /// The id with which to continue; `None` if there are no more jobs.
    pub next_before: Option<i64>,
}

impl Store {
    /// Up to `limit` jobs that match the filter, with ids below `before` (`None`: all).
    pub async fn search_jobs(
        &self,
        filter: &Value,
        before: Option<i64>,
        limit: i32,
    ) -> Result<FoundJobs, StoreError> {
        self.search_jobs_among(filter, before, limit, EXAMINED_MAX)
            .await
    }

    /// Like [`search_jobs`](Self::search_jobs), but examines at most `max_examined` jobs. Searches again if Postgres
    /// cancels the search because of a conflict: a standby that replays the changes of its primary does so.
    pub async fn search_jobs_among(
        &self,
        filter: &Value,
        before: Option<i64>,
        limit: i32,
        max_examined: i32,
    ) -> Result<FoundJobs, StoreError> {
        let sql = "SELECT ids, examined_count, next_before, examined_back_to FROM rouse.search_jobs($1, $2, $3, $4)";
        let filter = JsonText(filter.to_string());
        let params: Params<'_> = &[
            (&filter, Type::JSONB),
            (&before, Type::INT8),
            (&limit, Type::INT4),
            (&max_examined, Type::INT4),
        ];
        let found = retry_conflicts(StoreError::is_conflict, || self.query(sql, params));
        let rows = found.await?;
        let row = rows.first().expect("the function returns one row");
        Ok(FoundJobs {
            ids: row.get(0),
            examined_count: row.get(1),
            next_before: row.get(2),
            examined_back_to: row.get(3),
        })
    }

    /// Retries up to `limit` jobs that match the filter, have ids below `before` and were never retried, in one
    /// transaction. Does not wait for locked jobs.
    pub async fn retry_jobs(
        &self,
        filter: &Value,
        before: Option<i64>,
        limit: i32,
    ) -> Result<RetriedJobs, StoreError> {
        let wait = LockWait::default();
        self.retry_jobs_among(filter, before, limit, EXAMINED_MAX, wait)
            .await
    }

    /// Retries this job if it matches the filter and was never retried. No other job is examined, as long as this one
    /// is kept.
    pub async fn retry_job_if_matching(
        &self,
        filter: &Value,
        id: i64,
        wait: LockWait,
    ) -> Result<RetriedJobs, StoreError> {
        self.retry_jobs_among(filter, Some(id + 1), 1, 1, wait)
            .await
    }

    /// Like [`retry_jobs`](Self::retry_jobs), but examines at most `max_examined` jobs.
    async fn retry_jobs_among(
        &self,
        filter: &Value,
        before: Option<i64>,
        limit: i32,
        max_examined: i32,
        wait: LockWait,
    ) -> Result<RetriedJobs, StoreError> {
        let rows = self
            .query(
                "SELECT retried, made, refused, locked, examined_count, next_before
                 FROM rouse.retry_jobs($1, $2, $3, $4, $5::float8 * interval '1 second')",
                &[
                    (&JsonText(filter.to_string()), Type::JSONB),
                    (&before, Type::INT8),
                    (&limit, Type::INT4),
                    (&max_examined, Type::INT4),
                    (&wait.left().as_secs_f64(), Type::FLOAT8),
                ],
            )
            .await?;
        let row = rows.first().expect("the function returns one row");
        Ok(RetriedJobs {
            retried: row.get(0),
            made: row.get(1),
            refused: row.get(2),
            locked: row.get(3),
            examined_count: row.get(4),
            next_before: row.get(5),
        })
    }
}
