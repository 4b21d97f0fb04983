//! Queries the lanes whose jobs have waited too long.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::{ClaimOrder, Store, StoreError, millis};
use crate::job::LaneId;

/// A lane whose next job has waited too long, or soon will have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverdueLane {
    /// The lane.
    pub lane: LaneId,
    /// The time until its next job will have waited too long, by the database's clock; zero if it already has.
    pub after: Duration,
    /// The number of its next jobs that have waited too long, or soon will have.
    pub jobs: usize,
}

impl Store {
    /// The lanes whose next job has waited for `wait`, or will have within `ahead`, the longest wait first. Counts at
    /// most `max` jobs of each lane. One read.
    pub async fn overdue(
        &self,
        lanes: &[ClaimOrder],
        wait: Duration,
        ahead: Duration,
        max: usize,
    ) -> Result<Vec<OverdueLane>, StoreError> {
        let ids: Vec<i64> = lanes.iter().map(|order| order.lane.0).collect();
        let cursors: Vec<i64> = lanes.iter().map(|order| order.after).collect();
        let rows = self
            .query(
                include_str!("overdue.sql"),
                &[
                    (&ids, Type::INT8_ARRAY),
                    (&cursors, Type::INT8_ARRAY),
                    (&millis(wait), Type::INT8),
                    (&millis(ahead), Type::INT8),
                    (&i32::try_from(max).unwrap_or(i32::MAX), Type::INT4),
                ],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| {
                let (in_ms, jobs): (i64, i32) = (row.get(1), row.get(2));
                OverdueLane {
                    lane: LaneId(row.get(0)),
                    after: Duration::from_millis(u64::try_from(in_ms).unwrap_or(0)),
                    jobs: usize::try_from(jobs).unwrap_or(0),
                }
            })
            .collect())
    }
}
