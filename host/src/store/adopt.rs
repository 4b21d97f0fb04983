//! Takes over jobs whose worker is gone.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::{ClaimOrder, ClaimedJob, Store, StoreError, millis};
use crate::job::Fence;

impl Store {
    /// Claims up to `wanted` jobs of these lanes whose lease has run out. A job that has been lost
    /// `lost_max` times is failed instead. `within`: only leases that ran out in the last so long by
    /// the database's clock are looked at; none: all.
    pub async fn adopt(
        &self,
        fence: Fence,
        orders: &[ClaimOrder],
        wanted: usize,
        lost_max: u32,
        within: Option<Duration>,
    ) -> Result<Vec<ClaimedJob>, StoreError> {
        let me = self.me()?;
        let lanes: Vec<i64> = orders.iter().map(|order| order.lane.0).collect();
        let leases: Vec<i64> = orders.iter().map(|order| order.lease_ms).collect();
        let wanted = i32::try_from(wanted).unwrap_or(i32::MAX);
        let lost_max = i32::try_from(lost_max).unwrap_or(i32::MAX);
        let rows = self
            .query(
                include_str!("adopt.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&fence.0, Type::INT8),
                    (&lanes, Type::INT8_ARRAY),
                    (&leases, Type::INT8_ARRAY),
                    (&wanted, Type::INT4),
                    (&lost_max, Type::INT4),
                    (&within.map(millis), Type::INT8),
                ],
            )
            .await?;
        rows.iter()
            .map(|row| ClaimedJob::from_row(row, fence))
            .collect()
    }
}
