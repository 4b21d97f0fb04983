//! Reads one job.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::JobId;

/// One job, as it is shown.
#[derive(Debug, Clone)]
pub struct JobView {
    /// Its state, the word of SPEC row D1.
    pub state: String,
    /// The columns of the view `rouse.jobs`, and `history`.
    pub record: Value,
}

impl Store {
    /// One job with its history; none where there is no such job (any more).
    pub async fn job(&self, id: JobId) -> Result<Option<JobView>, StoreError> {
        let rows = self
            .query(include_str!("read.sql"), &[(&id.0, Type::INT8)])
            .await?;
        Ok(rows.first().map(|row| JobView {
            state: row.get(0),
            record: row.get(1),
        }))
    }
}
