//! What running attempts have used so far: told by their worker, and read by whoever looks.

use postgres_types::ToSql;
use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError, count, micros};
use crate::job::{Fence, JobId, Usage};

/// What one running attempt has used so far.
#[derive(Debug, Clone, Copy)]
pub struct RunningUsage {
    /// The job.
    pub id: JobId,
    /// The number that its claim drew.
    pub fence: Fence,
    /// What it has used.
    pub usage: Usage,
}

/// As `rouse.report_usage` takes it.
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
    fn from(one: &RunningUsage) -> Self {
        Self {
            id: one.id.0,
            fence: one.fence.0,
            cpu_us: micros(one.usage.cpu),
            memory_bytes: count(one.usage.memory_bytes_peak),
            host_calls: i32::try_from(one.usage.host_calls).unwrap_or(i32::MAX),
            bytes_in: count(one.usage.bytes_in),
            bytes_out: count(one.usage.bytes_out),
        }
    }
}

impl Store {
    /// Writes down what these attempts have used, and forgets the others of this worker.
    pub async fn report_usage(&self, running: &[RunningUsage]) -> Result<(), StoreError> {
        let (me, lists) = (self.me()?, self.lists().await?);
        let usages: Vec<UsageRecord> = running.iter().map(UsageRecord::from).collect();
        self.query_with_records(
            include_str!("report_usage.sql"),
            &[
                (&me.incarnation.0, Type::INT8),
                (&me.key(), Type::BYTEA),
                (&usages, lists.of("attempt_usage")),
            ],
        )
        .await?;
        Ok(())
    }

    /// What runs now, the longest first: the columns of the view `rouse.top`, and `running_s`. None where the login may
    /// not see it.
    pub async fn top(&self, most: i64) -> Result<Option<Vec<Value>>, StoreError> {
        let asked = self
            .query(include_str!("top.sql"), &[(&most, Type::INT8)])
            .await;
        Ok(allowed(asked)?.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }
}
