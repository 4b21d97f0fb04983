//! Takes over jobs whose worker is gone.

use std::time::{Duration, SystemTime};

use tokio_postgres::types::Type;

use super::{ClaimOrder, ClaimedJob, Store, StoreError};
use crate::job::{Attempt, Fence, JobId, LaneId, State};

/// What has become of jobs whose worker is gone.
#[derive(Debug, Default)]
pub struct Adopted {
    /// Claimed anew.
    pub claimed: Vec<ClaimedJob>,
    /// Not claimed: they were lost before.
    pub lost: Vec<LostJob>,
}

/// A job that was lost, and that nobody has claimed at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostJob {
    /// The job.
    pub id: JobId,
    /// Its lane.
    pub lane: LaneId,
    /// The attempt that was lost.
    pub attempt: Attempt,
    /// How many of its attempts were lost, with this one.
    pub lost: i32,
    /// True: that was too often, and the job has failed. False: it waits for another attempt.
    pub has_failed: bool,
    /// From the claim of the attempt to now, by the database's clock.
    pub after: Duration,
}

impl Store {
    /// Claims up to `wanted` jobs of these lanes whose lease has run out. A job whose workers crashed before
    /// waits instead, and one with `lost_max` crashes is failed. They go by priority, then by id. `since`: only leases
    /// that ended at this time or later, by the database's clock, are looked at; none: all. `sources`: only jobs of
    /// these; none: of any.
    pub async fn adopt(
        &self,
        fence: Fence,
        orders: &[ClaimOrder],
        sources: Option<&[String]>,
        wanted: usize,
        lost_max: u32,
        since: Option<SystemTime>,
    ) -> Result<Adopted, StoreError> {
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
                    (&since, Type::TIMESTAMPTZ),
                    (&sources, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        let (mut ids, mut lost) = (Vec::new(), Vec::new());
        for row in &rows {
            let id: i64 = row.get(0);
            match row.get::<_, Option<&str>>(4) {
                None => ids.push(id),
                Some(became) => lost.push(LostJob {
                    id: JobId(id),
                    lane: LaneId(row.get(1)),
                    attempt: Attempt(row.get(2)),
                    lost: row.get(3),
                    has_failed: became == State::Failed.as_str(),
                    after: Duration::from_millis(row.get::<_, i64>(5).try_into().unwrap_or(0)),
                }),
            }
        }
        let mut claimed = self.claimed(fence, &ids).await?;
        for job in &mut claimed {
            job.ready_at = None;
        }
        Ok(Adopted { claimed, lost })
    }
}
