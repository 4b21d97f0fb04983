//! A claimed job, on its way to a slot.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Shared;
use super::events::{EventContext, Since};
use super::turns::Class;
use crate::sandbox::BootTime;
use crate::store::{ClaimedJob, Lane};

/// A claimed job, or a batch of jobs for one attempt.
pub(super) struct Claim {
    /// The job, or the first one of the batch.
    pub(super) job: ClaimedJob,
    /// The other jobs of the batch, all of the same lane and tenant, in their order. Empty if there is no batch.
    pub(super) others: Vec<ClaimedJob>,
    pub(super) lane: Arc<Lane>,
    /// Its class; `None` if nothing may go ahead of it.
    pub(super) class: Option<Class>,
    /// True if it goes ahead of others of its class in line.
    pub(super) goes_ahead: bool,
    /// True if its CPU time counts towards the share of its key.
    pub(super) is_charged: bool,
    /// True if its end may let other jobs start.
    pub(super) is_limited: bool,
    /// The maximum time from `sent` to its start, if the rate at which such jobs start is limited: the time of the
    /// claim counts as the start.
    pub(super) start_within: Option<Duration>,
    /// Its handler, if this host limits how many of its attempts run at the same time.
    pub(super) host_limit: Option<HostLimit>,
    /// The time just before the claim was sent.
    pub(super) sent: BootTime,
    /// The time at which the response to the claim arrived.
    pub(super) received: Instant,
    /// The time after `sent` for which it is valid without a renewal.
    pub(super) lease: Duration,
}

/// The maximum number of attempts of a handler that run at the same time on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HostLimit {
    pub(super) handler: Arc<str>,
    pub(super) max: usize,
}

impl Claim {
    /// Divides a batch into claims of one job each.
    pub(super) fn split(mut self) -> Vec<Self> {
        let others = std::mem::take(&mut self.others);
        let other = |job| Self {
            job,
            others: Vec::new(),
            lane: self.lane.clone(),
            host_limit: self.host_limit.clone(),
            ..self
        };
        let mut claims: Vec<Self> = others.into_iter().map(other).collect();
        claims.insert(0, self);
        claims
    }

    /// All of its jobs.
    pub(super) fn jobs(&self) -> impl Iterator<Item = &ClaimedJob> {
        std::iter::once(&self.job).chain(&self.others)
    }

    /// The context of its events. `handler`: the handler that runs it.
    pub(super) fn event_context<'a>(
        &self,
        shared: &'a Shared,
        handler: &'a str,
    ) -> EventContext<'a> {
        EventContext {
            worker_id: &shared.settings.worker_id,
            id: self.job.id,
            handler,
            attempt: self.job.attempt,
            since: Since::ClaimSent(self.sent),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::collections::BTreeMap;
    use std::time::SystemTime;

    use super::*;
    use crate::job::{Attempt, Fence, JobId, LaneId, Priority};
    use crate::store::JsonText;

    /// A claimed job of lane 1.
    pub(in super::super) fn job(id: i64) -> ClaimedJob {
        ClaimedJob {
            id: JobId(id),
            fence: Fence(1),
            lane: LaneId(1),
            turn: id,
            attempt: Attempt(1),
            uncounted: 0,
            max_attempts: None,
            tenant: None,
            source: None,
            requested_at: SystemTime::UNIX_EPOCH,
            ready_at: None,
            claimed_at: SystemTime::UNIX_EPOCH,
            payload: JsonText("{}".into()),
            unread: None,
            memory_bytes: None,
            grants: None,
            lease: None,
            timeout: None,
            trace: None,
        }
    }

    /// A claim of this job.
    pub(in super::super) fn claim(id: i64, received: Instant) -> Claim {
        Claim {
            job: job(id),
            others: Vec::new(),
            lane: Arc::new(Lane {
                seq: 1,
                id: LaneId(1),
                queue: "default".into(),
                handler: "noop".into(),
                priority: Priority::Normal,
                tags: Vec::new(),
                values: BTreeMap::new(),
                retired: false,
            }),
            class: Some([1, 0]),
            goes_ahead: false,
            is_charged: false,
            is_limited: false,
            start_within: None,
            host_limit: None,
            sent: BootTime::now(),
            received,
            lease: Duration::from_secs(60),
        }
    }
}
