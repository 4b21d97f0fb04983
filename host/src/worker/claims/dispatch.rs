//! Puts claimed jobs in line.

use std::collections::HashSet;
use std::time::Instant;

use rouse_turns::throttled_within;

use super::Claims;
use crate::job::{Attempt, LaneId, RunEnd};
use crate::sandbox::BootTime;
use crate::store::ClaimedJob;
use crate::worker::claim::{Claim, HostLimit};
use crate::worker::leases::ClaimInFlight;
use crate::worker::unbound::Sorted;
use crate::worker::{attempt, events, slots};

/// The place in line that the jobs of a claim get.
#[derive(Debug, Clone, Copy)]
pub(super) enum InLine<'a> {
    /// Adopted jobs: at the end. Nothing goes ahead of them.
    Adopted,
    /// Queued jobs: at the end. The first job of each of these lanes, which had none until now, goes ahead of others of
    /// its class.
    Queued(&'a [LaneId]),
}

impl Claims<'_> {
    /// The limit of the handler that runs a job.
    fn host_limit(&self, job: &ClaimedJob, named: &str) -> Option<HostLimit> {
        if self.host_limits.is_empty() {
            return None;
        }
        let handler = self
            .shared
            .settings
            .handler_for(job.source.as_deref(), named);
        self.host_limits.get(handler).cloned()
    }

    /// Puts the jobs of a claim in line, and gives back those whose handler is missing. `batch`: the maximum number of
    /// jobs of a batch, if they start in batches. Returns how many jobs, or batches, count as found.
    pub(super) async fn dispatch(
        &mut self,
        in_flight: ClaimInFlight<'_>,
        jobs: Vec<ClaimedJob>,
        sent: BootTime,
        line: InLine<'_>,
        batch: Option<usize>,
    ) -> usize {
        let received = Instant::now();
        let response = BootTime::now().since(sent);
        let start_within = throttled_within(self.throttled_response);
        let mut first: HashSet<LaneId> = match line {
            InLine::Adopted => HashSet::new(),
            InLine::Queued(lanes) => lanes.iter().copied().collect(),
        };
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
                let served = self
                    .lanes
                    .get(job.lane)
                    .expect("claims are made from lanes that are served");
                // As in rouse.claim, the job's own lease takes precedence over that of its lane.
                let job_lease = job.lease;
                let claim = Claim {
                    is_charged: served.is_charged,
                    is_limited: served.is_limited,
                    start_within: served.is_throttled.then_some(start_within),
                    host_limit: self.host_limit(&job, &served.lane.handler),
                    class: match line {
                        InLine::Adopted => None,
                        InLine::Queued(_) => Some(served.class),
                    },
                    goes_ahead: first.remove(&job.lane),
                    job,
                    others: Vec::new(),
                    lane: served.lane,
                    sent,
                    received,
                    lease: job_lease.unwrap_or(served.lease),
                };
                let context = claim.event_context(self.shared, &claim.lane.handler);
                match line {
                    InLine::Adopted => events::adopted(context, claim.job.uncounted),
                    InLine::Queued(_) => {
                        if claim.job.attempt == Attempt(1) {
                            events::enqueued(context, &claim.lane.queue, claim.job.requested_at);
                        }
                        events::claimed(context);
                    }
                }
                claim
            })
            .collect();
        in_flight.arrived(&claims);
        if claims.iter().any(|claim| claim.start_within.is_some()) {
            self.throttled_response = response;
        }
        let unbound = claims.split_off(unbound_from);
        let found = match batch {
            None => new,
            Some(size) => {
                claims = self.in_batches(claims, size);
                claims.len()
            }
        };
        slots::start(self.shared, claims);
        for claim in unbound {
            attempt::release_claim(self.shared, &claim, RunEnd::NoHandler).await;
        }
        found
    }
}
