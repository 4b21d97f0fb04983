//! Reads the states of jobs, for callers that wait for their ends.

use tokio_postgres::types::Type;

use super::{JsonText, Store, StoreError};
use crate::job::JobId;

/// Whether a job has ended.
#[derive(Debug, Clone)]
pub enum JobStatus {
    /// It has not ended: its row of `rouse.outcomes`, as JSON.
    Live(JsonText),
    /// It has ended; [`Store::outcomes`] reads its outcome.
    Ended,
}

impl Store {
    /// The statuses of jobs, without their results, which may be large. Jobs that do not exist are left out.
    pub async fn statuses(&self, ids: &[i64]) -> Result<Vec<(JobId, JobStatus)>, StoreError> {
        let sql =
            "SELECT o.id, CASE WHEN NOT o.ended THEN to_jsonb(o) END FROM rouse.outcomes($1) AS o";
        let rows = self.query(sql, &[(&ids, Type::INT8_ARRAY)]).await?;
        let status = |live: Option<JsonText>| live.map_or(JobStatus::Ended, JobStatus::Live);
        Ok(rows
            .iter()
            .map(|row| (JobId(row.get(0)), status(row.get(1))))
            .collect())
    }

    /// The rows of `rouse.outcomes`, as JSON. Jobs that do not exist are left out.
    pub async fn outcomes(&self, ids: &[i64]) -> Result<Vec<(JobId, JsonText)>, StoreError> {
        let sql = "SELECT o.id, to_jsonb(o) FROM rouse.outcomes($1) AS o";
        let rows = self.query(sql, &[(&ids, Type::INT8_ARRAY)]).await?;
        Ok(rows
            .iter()
            .map(|row| (JobId(row.get(0)), row.get(1)))
            .collect())
    }
}
