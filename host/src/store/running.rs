//! What running attempts have used so far: told by their worker, and read by whoever looks.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError, micros};
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

impl Store {
    /// Writes down what these attempts have used, and forgets the others of this worker.
    pub async fn report_usage(&self, running: &[RunningUsage]) -> Result<(), StoreError> {
        let me = self.me()?;
        let count = |of: fn(&Usage) -> u64| -> Vec<i64> {
            let count = |one: &RunningUsage| i64::try_from(of(&one.usage)).unwrap_or(i64::MAX);
            running.iter().map(count).collect()
        };
        let ids: Vec<i64> = running.iter().map(|one| one.id.0).collect();
        let fences: Vec<i64> = running.iter().map(|one| one.fence.0).collect();
        let cpu_us: Vec<i64> = running.iter().map(|one| micros(one.usage.cpu)).collect();
        let calls: Vec<i32> = running
            .iter()
            .map(|one| i32::try_from(one.usage.host_calls).unwrap_or(i32::MAX))
            .collect();
        self.query(
            include_str!("report_usage.sql"),
            &[
                (&me.incarnation.0, Type::INT8),
                (&me.key(), Type::BYTEA),
                (&ids, Type::INT8_ARRAY),
                (&fences, Type::INT8_ARRAY),
                (&cpu_us, Type::INT8_ARRAY),
                (&count(|usage| usage.memory_bytes_peak), Type::INT8_ARRAY),
                (&calls, Type::INT4_ARRAY),
                (&count(|usage| usage.bytes_in), Type::INT8_ARRAY),
                (&count(|usage| usage.bytes_out), Type::INT8_ARRAY),
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
