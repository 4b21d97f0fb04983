//! Resource usage of running attempts: reported by their worker, read by observers.

use postgres_types::ToSql;
use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError, count, micros};
use crate::job::{Fence, JobId, Usage};

/// The resources that a running attempt has used so far.
#[derive(Debug, Clone, Copy)]
pub struct RunningUsage {
    /// The job.
    pub id: JobId,
    /// The fence of its claim.
    pub fence: Fence,
    /// The resources used.
    pub usage: Usage,
}

/// The record that `rouse.report_usage` takes.
#[derive(Debug, ToSql)]
#[postgres(name = "attempt_usage")]
struct UsageRecord {
    id: i64,
    fence: i64,
    cpu_us: i64,
    memory_bytes: i64,
    host_calls: i32,
    bytes_in: i64,
    bytes_out: i64,
}

impl From<&RunningUsage> for UsageRecord {
    fn from(running: &RunningUsage) -> Self {
        Self {
            id: running.id.0,
            fence: running.fence.0,
            cpu_us: micros(running.usage.cpu),
            memory_bytes: count(running.usage.memory_bytes_peak),
            host_calls: i32::try_from(running.usage.host_calls).unwrap_or(i32::MAX),
            bytes_in: count(running.usage.bytes_in),
            bytes_out: count(running.usage.bytes_out),
        }
    }
}

/// The running attempts of one worker.
#[derive(Debug, Clone)]
pub struct RunningOn {
    /// The attempts, longest first: `id`, `handler`, `queue`, `tenant`, `attempt`, `claimed_at`, `running_s`.
    pub attempts: Vec<Value>,
    /// The number of running jobs, of all workers, that were examined.
    pub examined_count: i64,
}

impl Store {
    /// Stores the usage of these attempts, and deletes this worker's other rows.
    pub async fn report_usage(&self, running: &[RunningUsage]) -> Result<(), StoreError> {
        let (worker, lists) = (self.identity()?, self.lists().await?);
        let usages: Vec<UsageRecord> = running.iter().map(UsageRecord::from).collect();
        self.query_with_records(
            include_str!("report_usage.sql"),
            &[
                (&worker.incarnation.0, Type::INT8),
                (&worker.key(), Type::BYTEA),
                (&usages, lists.array_type("attempt_usage")),
            ],
        )
        .await?;
        Ok(())
    }

    /// The running attempts of all workers, longest first: the columns of the view `rouse.top`, and `running_s`. `None`
    /// if the login may not read it.
    pub async fn top(&self, limit: i64) -> Result<Option<Vec<Value>>, StoreError> {
        let response = self
            .read(include_str!("top.sql"), &[(&limit, Type::INT8)])
            .await;
        Ok(allowed(response)?.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }

    /// The running attempts of this worker, at most `limit`, found by examining at most `max_examined` running jobs of
    /// all workers. `None` if the login may not read them.
    pub async fn running_on(
        &self,
        worker_id: &str,
        limit: i64,
        max_examined: i64,
    ) -> Result<Option<RunningOn>, StoreError> {
        let response = self
            .read(
                include_str!("running_on.sql"),
                &[
                    (&worker_id, Type::TEXT),
                    (&limit, Type::INT8),
                    (&max_examined, Type::INT8),
                ],
            )
            .await;
        Ok(allowed(response)?.map(|rows| {
            let row = rows.first().expect("the query returns one row");
            RunningOn {
                examined_count: row.get(0),
                attempts: row.get(1),
            }
        }))
    }
}
