//! Claims whose jobs start in batches: many jobs in one attempt.

use std::collections::HashMap;

use super::Claims;
use crate::job::LaneId;
use crate::store::{ClaimOrder, ClaimedJob, OverdueFilter};
use crate::worker::claim::Claim;
use crate::worker::turns::Class;

/// The maximum number of jobs in one claim; as in `rouse.claim` (migrations/functions/claim.sql).
const JOBS_MAX: usize = 20_000;

/// Lanes whose jobs start in batches of at most this many (`None`: one by one), in one claim.
type Alike = (Option<usize>, Vec<ClaimOrder>);

/// The orders, with the maximum of each rounded up to whole batches of this size. Without one, it is `wanted` batches.
pub(super) fn whole(orders: &[ClaimOrder], size: usize, wanted: usize) -> Vec<ClaimOrder> {
    let jobs = |batches: usize| batches.clamp(1, wanted).min(JOBS_MAX / size) * size;
    let whole = |order: &ClaimOrder| ClaimOrder {
        max: Some(jobs(order.max.map_or(wanted, |max| max.div_ceil(size)))),
        overdue: order.overdue.map(|filter| OverdueFilter {
            max: jobs(filter.max.div_ceil(size)),
            ..filter
        }),
        ..*order
    };
    orders.iter().map(whole).collect()
}

impl Claims<'_> {
    /// Groups the lanes of a claim by the size of the batches in which their jobs start. Lanes of an earlier class stay
    /// ahead of those of later ones.
    pub(super) fn by_batch(&self, orders: Vec<ClaimOrder>) -> Vec<Alike> {
        let mut alike: Vec<(Option<Class>, Alike)> = Vec::new();
        for order in orders {
            let class = self.lanes.class_of(order.lane);
            let batch = self.lanes.batch(order.lane);
            let batch = batch.filter(|(handler, _)| self.take_batches.contains(*handler));
            let batch = batch.map(|(_, size)| size);
            let last = alike.len().checked_sub(1);
            // The last claim can continue with the next class.
            let joins = |at: &usize| {
                let (of, (size, _)) = &alike[*at];
                *size == batch && (Some(*at) == last || *of == class)
            };
            match (0..alike.len()).rev().find(joins) {
                Some(at) => {
                    let (of, (_, orders)) = &mut alike[at];
                    *of = class;
                    orders.push(order);
                }
                None => alike.push((class, (batch, vec![order]))),
            }
        }
        alike.into_iter().map(|(_, alike)| alike).collect()
    }

    /// The number of batches of each lane that these jobs make.
    pub(super) fn count_batches(&self, jobs: &[ClaimedJob], size: usize) -> HashMap<LaneId, usize> {
        let mut counts = HashMap::new();
        let mut last: Option<(&ClaimedJob, usize)> = None;
        for job in jobs {
            last = match last {
                Some((first, jobs)) if jobs < size && self.join(first, job) => {
                    Some((first, jobs + 1))
                }
                _ => {
                    *counts.entry(job.lane).or_default() += 1;
                    Some((job, 1))
                }
            };
        }
        counts
    }

    /// Groups the jobs that start in the same attempt into batches.
    pub(super) fn in_batches(&self, claims: Vec<Claim>, size: usize) -> Vec<Claim> {
        let mut batches: Vec<Claim> = Vec::new();
        for claim in claims {
            match batches.last_mut() {
                Some(batch)
                    if batch.others.len() + 1 < size && self.join(&batch.job, &claim.job) =>
                {
                    batch.others.push(claim.job);
                }
                _ => batches.push(claim),
            }
        }
        batches
    }

    /// True if two jobs can run in the same attempt: they have the same lane and tenant, and no limits of their own.
    fn join(&self, first: &ClaimedJob, job: &ClaimedJob) -> bool {
        first.lane == job.lane
            && first.tenant == job.tenant
            && !self.is_alone(first)
            && !self.is_alone(job)
    }

    /// True for a job that has limits or grants of its own, may run another handler than the rest of its lane, or has
    /// attempts that do not count, because one that was lost may have crashed its worker. `rouse._batches` counts with
    /// the same rule, except for sources.
    fn is_alone(&self, job: &ClaimedJob) -> bool {
        let source = job.source.as_ref();
        job.grants.is_some()
            || job.memory_bytes.is_some()
            || job.lease.is_some()
            || job.timeout.is_some()
            || job.uncounted > 0
            || source.is_some_and(|source| self.shared.settings.sources.contains_key(source))
    }
}

/// Groups the jobs of a lane by tenant, without changing the order within a tenant. The tenant with the first job goes
/// first.
pub(super) fn by_tenant(jobs: &mut [ClaimedJob]) {
    for lane in jobs.chunk_by_mut(|one, other| one.lane == other.lane) {
        let mut first: HashMap<Option<String>, i64> = HashMap::new();
        for job in lane.iter() {
            let turn = first.entry(job.tenant.clone()).or_insert(job.turn);
            *turn = job.turn.min(*turn);
        }
        if first.len() > 1 {
            lane.sort_by_key(|job| (first[&job.tenant], job.turn));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn orders_are_for_whole_batches() {
        let order = |max| ClaimOrder {
            lane: LaneId(1),
            after: 0,
            lease_ms: 1,
            max,
            overdue: None,
        };
        let max = |max, wanted| whole(&[order(max)], 10, wanted)[0].max;
        assert_eq!(max(None, 3), Some(30));
        assert_eq!(max(Some(1), 3), Some(10));
        assert_eq!(max(Some(0), 3), Some(10));
        assert_eq!(max(Some(11), 3), Some(20));
        assert_eq!(max(Some(99), 3), Some(30));
        assert_eq!(max(None, 9_999), Some(JOBS_MAX));
        let waited = Duration::from_secs(1);
        let filter = Some(OverdueFilter { max: 12, waited });
        let overdue = whole(
            &[ClaimOrder {
                overdue: filter,
                ..order(None)
            }],
            10,
            3,
        );
        assert_eq!(overdue[0].overdue, Some(OverdueFilter { max: 20, waited }));
    }

    #[test]
    fn jobs_of_a_tenant_come_together_in_their_order() {
        use crate::worker::claim::tests::job;

        let of = |id, tenant: &str, lane| ClaimedJob {
            tenant: Some(tenant.into()),
            lane: LaneId(lane),
            ..job(id)
        };
        let mut jobs = vec![
            of(1, "b", 7),
            of(2, "a", 7),
            of(3, "b", 7),
            of(4, "a", 7),
            of(5, "b", 3),
            of(6, "a", 3),
        ];
        by_tenant(&mut jobs);
        let ids: Vec<i64> = jobs.iter().map(|job| job.id.0).collect();
        assert_eq!(ids, [1, 3, 2, 4, 5, 6]);
    }
}
