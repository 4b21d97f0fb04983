//! Enqueues a job for the command line. Programs call the SQL function themselves.

use tokio_postgres::types::{ToSql, Type};

use super::{JsonText, Store, StoreError};
use crate::job::JobId;

/// The arguments of `rouse.enqueue` that the command line offers.
#[derive(Debug, Clone, Default)]
pub struct EnqueueRequest {
    /// The handler.
    pub handler: String,
    /// JSON.
    pub payload: String,
    /// The queue; `None` means `default`.
    pub queue: Option<String>,
    /// The tenant that it belongs to.
    pub tenant: Option<String>,
    /// What triggers it.
    pub source: Option<String>,
    /// `high`, `normal` or `low`; `None` means `normal`.
    pub priority: Option<String>,
    /// Seconds from now; `None` means at once.
    pub delay_secs: Option<f64>,
    /// The time at which it becomes due, as Postgres reads it, instead of `delay_secs`.
    pub run_at: Option<String>,
    /// The maximum number of attempts; `None` means the handler's own.
    pub max_attempts: Option<i32>,
    /// Unique among the live jobs of the handler and the tenant.
    pub unique_key: Option<String>,
    /// Tags that its worker must have.
    pub tags: Vec<String>,
    /// The attenuated grants, as JSON; `None` means all grants of the handler.
    pub grants: Option<String>,
    /// The lease of its claims, in seconds; `None` means the handler's own.
    pub lease_secs: Option<f64>,
    /// The run timeout of its attempts, in seconds; `None` means the handler's own.
    pub timeout_secs: Option<f64>,
    /// The job timeout: the time within which it has to end, in seconds; `None` means no limit.
    pub job_timeout_secs: Option<f64>,
    /// The jobs that it waits for, as JSON; `None` means none.
    pub after: Option<String>,
    /// The trace context of the caller, a `traceparent`.
    pub trace: Option<String>,
}

/// The result of an enqueue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnqueueResult {
    /// The job, or the existing job that replaces it: the job with its unique key, or the earlier job with which a gate
    /// has merged it.
    pub id: JobId,
    /// False if that job already existed, and nothing was inserted.
    pub created: bool,
    /// The arguments in which the live job with the key differs, such as `payload`; otherwise empty.
    pub differs: Vec<String>,
}

impl Store {
    /// Enqueues one job, unless a live one has its unique key or a gate merges it with an earlier one.
    pub async fn enqueue(&self, job: &EnqueueRequest) -> Result<EnqueueResult, StoreError> {
        let (payload, grants, after) = (
            JsonText(job.payload.clone()),
            job.grants.clone().map(JsonText),
            job.after.clone().map(JsonText),
        );
        let args: [(&(dyn ToSql + Sync), Type); 17] = [
            (&job.handler, Type::TEXT),
            (&payload, Type::JSONB),
            (&job.queue, Type::TEXT),
            (&job.tenant, Type::TEXT),
            (&job.source, Type::TEXT),
            (&job.priority, Type::TEXT),
            (&job.delay_secs, Type::FLOAT8),
            (&job.max_attempts, Type::INT4),
            (&job.tags, Type::TEXT_ARRAY),
            (&grants, Type::JSONB),
            (&job.lease_secs, Type::FLOAT8),
            (&job.timeout_secs, Type::FLOAT8),
            (&job.job_timeout_secs, Type::FLOAT8),
            (&after, Type::JSONB),
            (&job.trace, Type::TEXT),
            (&job.run_at, Type::TEXT),
            (&job.unique_key, Type::TEXT),
        ];
        let rows = self.query(include_str!("enqueue.sql"), &args).await?;
        let row = rows.first().expect("the function returns one row");
        Ok(EnqueueResult {
            id: JobId(row.get(0)),
            created: row.get(1),
            differs: row.get(2),
        })
    }
}
