//! Asks which lanes have waited too long.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::{ClaimOrder, Store, StoreError, millis};
use crate::job::LaneId;

impl Store {
    /// Of these lanes, those whose next job has waited for so long, the one that has waited longest first; with
    /// how many of their next `most` jobs have. One read.
    pub async fn overdue(
        &self,
        lanes: &[ClaimOrder],
        wait: Duration,
        most: usize,
    ) -> Result<Vec<(LaneId, usize)>, StoreError> {
        let ids: Vec<i64> = lanes.iter().map(|order| order.lane.0).collect();
        let cursors: Vec<i64> = lanes.iter().map(|order| order.after).collect();
        let rows = self
            .query(
                include_str!("overdue.sql"),
                &[
                    (&ids, Type::INT8_ARRAY),
                    (&cursors, Type::INT8_ARRAY),
                    (&millis(wait), Type::INT8),
                    (&i32::try_from(most).unwrap_or(i32::MAX), Type::INT4),
                ],
            )
            .await?;
        Ok(rows
            .iter()
            .map(|row| {
                let jobs: i32 = row.get(1);
                (LaneId(row.get(0)), usize::try_from(jobs).unwrap_or(0))
            })
            .collect())
    }
}
