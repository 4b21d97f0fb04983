//! Puts claimed jobs in line.

use std::time::Instant;

use super::Claims;
use crate::job::{Attempt, RunEnd};
use crate::sandbox::BootTime;
use crate::store::ClaimedJob;
use crate::worker::claim::Claim;
use crate::worker::leases::UnderWay;
use crate::worker::unbound::Sorted;
use crate::worker::{attempt, events, slots};

impl Claims<'_> {
    /// Puts the jobs of a claim in line, and gives back those whose handler is missing. Returns how many jobs count as
    /// found.
    pub(super) async fn dispatch(
        &mut self,
        under_way: UnderWay<'_>,
        jobs: Vec<ClaimedJob>,
        sent: BootTime,
        adopted: bool,
    ) -> usize {
        let received = Instant::now();
        self.shared
            .attempts
            .meters
            .claimed
            .increment(jobs.len() as u64);
        let Sorted {
            runnable,
            unbound,
            new,
        } = self.unbound.sort(jobs, received);
        let unbound_from = runnable.len();
        let jobs = runnable.into_iter().chain(unbound);
        let mut claims: Vec<Claim> = jobs
            .map(|job| {
                let (lane, lease) = self
                    .lanes
                    .get(job.lane)
                    .expect("claims are made from lanes that are served");
                // As in rouse.claim, the job's own lease precedes that of its lane.
                let job_lease = job.lease;
                let claim = Claim {
                    is_capped: self.lanes.is_capped(job.lane),
                    job,
                    lane,
                    sent,
                    received,
                    lease: job_lease.unwrap_or(lease),
                };
                let context = claim.event_context(self.shared, &claim.lane.handler);
                match adopted {
                    true => events::adopted(context, claim.job.uncounted),
                    false => {
                        if claim.job.attempt == Attempt(1) {
                            events::enqueued(context, &claim.lane.queue, claim.job.requested_at);
                        }
                        events::claimed(context);
                    }
                }
                claim
            })
            .collect();
        under_way.arrived(&claims);
        let unbound = claims.split_off(unbound_from);
        slots::start(self.shared, claims);
        for claim in unbound {
            attempt::release_claim(self.shared, &claim, RunEnd::NoHandler).await;
        }
        new
    }
}
