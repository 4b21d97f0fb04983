//! Enqueues a job for the command line. Programs call the SQL function themselves.

use tokio_postgres::types::Type;

use super::{JsonText, Store, StoreError};
use crate::job::JobId;

/// The arguments of `rouse.enqueue` that the command line offers.
#[derive(Debug, Clone, Default)]
pub struct Enqueue {
    /// The handler.
    pub handler: String,
    /// JSON.
    pub payload: String,
    /// The queue; none: `default`.
    pub queue: Option<String>,
    /// Whose job it is.
    pub tenant: Option<String>,
    /// What triggers it.
    pub source: Option<String>,
    /// `high`, `normal` or `low`; none: `normal`.
    pub priority: Option<String>,
    /// Seconds from now; none: at once.
    pub delay_secs: Option<f64>,
    /// How often it is tried in all; none: the handler's own.
    pub max_attempts: Option<i32>,
    /// Unique among the live jobs of the handler.
    pub unique_key: Option<String>,
    /// Tags that its worker must have.
    pub tags: Vec<String>,
    /// What it leaves of the grants of its handler, JSON; none: all.
    pub grants: Option<String>,
}

impl Store {
    /// Enqueues one job and returns its id.
    pub async fn enqueue(&self, job: &Enqueue) -> Result<JobId, StoreError> {
        let queue = job.queue.as_deref().unwrap_or("default");
        let priority = job.priority.as_deref().unwrap_or("normal");
        let rows = self
            .query(
                include_str!("enqueue.sql"),
                &[
                    (&job.handler, Type::TEXT),
                    (&JsonText(job.payload.clone()), Type::JSONB),
                    (&queue, Type::TEXT),
                    (&job.tenant, Type::TEXT),
                    (&job.source, Type::TEXT),
                    (&priority, Type::TEXT),
                    (&job.delay_secs, Type::FLOAT8),
                    (&job.max_attempts, Type::INT4),
                    (&job.unique_key, Type::TEXT),
                    (&job.tags, Type::TEXT_ARRAY),
                    (&job.grants.clone().map(JsonText), Type::JSONB),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(JobId(row.get(0)))
    }
}
