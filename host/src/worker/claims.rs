//! Takes jobs from the lanes that this worker serves.

use std::ops::AddAssign;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use metrics::counter;
use tracing::error;

use super::Shared;
use super::ageing::{KNOWN_AHEAD, KNOWN_MAX, Overdue, Share};
use super::attempt;
use super::claim::Claim;
use super::events::{self, EventContext, Since};
use super::lanes::{After, Lanes, Serving};
use super::leases::UnderWay;
use super::policy::Policy;
use super::prefetch::Prefetch;
use super::slots;
use super::unbound::{Sorted, Unbound};
use crate::job::{AfterLoss, Attempt, Fence, LaneId, RunEnd, after_loss};
use crate::sandbox::{BootTime, Handler, HandlerSet};
use crate::store::{
    Adopted, Adoption, ClaimOrder, Claimed, ClaimedJob, Lane, Orphan, StoreError, fills_an_answer,
};

/// A search by source that finds nothing is repeated after this multiple of its duration.
const BY_SOURCE_SHARE: u32 = 20;
/// The longest wait before it is repeated.
const BY_SOURCE_WITHIN: Duration = Duration::from_secs(30);

/// The result of a look or a claim.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The number of jobs found. It leaves out jobs that are given back again and again because their handler is missing.
    pub(super) jobs: usize,
    /// There may be more jobs: an answer ended because of its size, or an adoption found as many jobs as wanted.
    pub(super) is_cut: bool,
    /// The claim found an expired lease, and claimed nothing. Leases were checked up to this time, by the database's clock.
    orphans: Option<SystemTime>,
}

impl Found {
    /// True if there may be more than the `wanted` jobs.
    pub(super) fn fills(self, wanted: usize) -> bool {
        self.is_cut || self.jobs >= wanted
    }
}

impl AddAssign for Found {
    fn add_assign(&mut self, other: Self) {
        self.jobs += other.jobs;
        self.is_cut |= other.is_cut;
        self.orphans = other.orphans.or(self.orphans);
    }
}

/// Claims jobs from lanes, with what it remembers from one claim to the next.
pub(super) struct Claims<'a> {
    shared: &'a Arc<Shared>,
    pub(super) lanes: Lanes,
    /// The handlers by which the served lanes were chosen. `None` if they have to be chosen again.
    handlers: Option<Arc<HandlerSet>>,
    /// Sources that are bound to a handler of this host.
    sources: Vec<String>,
    /// Jobs of sources that are bound to a handler which this host does not have.
    unbound: Unbound,
    /// The last search by source found nothing, and is not repeated before this time, unless a notification announces a job.
    by_source_at: Instant,
    /// The share of each claim for jobs found by their source, so that neither they nor the other jobs starve.
    half: Share,
    prefetch: Prefetch,
    overdue: Overdue,
    /// Leases that ended before this time, by the database's clock, were checked. The next claim checks later ones.
    checked_at: SystemTime,
    /// The last adoption was filled: there may be more orphans.
    orphans_left: bool,
    /// Slots wait after some attempts, so jobs claimed ahead would have to be given back.
    slots_wait: bool,
}

impl<'a> Claims<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            lanes: Lanes::new(shared.settings.queue_order),
            handlers: None,
            sources: Vec::new(),
            unbound: Unbound::default(),
            by_source_at: Instant::now(),
            half: Share::new(50),
            prefetch: Prefetch::new(Instant::now()),
            overdue: Overdue::new(Share::new(shared.settings.promote_share)),
            checked_at: SystemTime::UNIX_EPOCH,
            orphans_left: false,
            slots_wait: shared.settings.has_job_delay(),
        }
    }

    /// Forgets what is remembered about the database: after an error it may be wrong.
    pub(super) fn start_over(&mut self) {
        self.lanes.forget();
        // The next server may have a different clock.
        self.checked_at = SystemTime::UNIX_EPOCH;
    }

    /// There were no orphans at this time, by the database's clock.
    pub(super) fn had_no_orphans(&mut self, at: SystemTime) {
        self.checked_at = at;
        self.orphans_left = false;
    }

    /// Chooses the lanes to serve, by the loaded handlers and by the queues and tags of the settings. True if the handlers have changed
    /// since the last choice.
    pub(super) fn serve(&mut self) -> bool {
        let handlers = self.shared.catalog.current();
        if self
            .handlers
            .as_ref()
            .is_some_and(|before| Arc::ptr_eq(before, &handlers))
        {
            return false;
        }
        let settings = &self.shared.settings;
        let lease_ms = |handler: &Handler| {
            let policy = Policy::resolve(&handler.manifest, &settings.overrides);
            i64::try_from(policy.lease.as_millis()).unwrap_or(i64::MAX)
        };
        let bound: Vec<(&String, &Arc<Handler>)> = settings
            .sources
            .iter()
            .filter_map(|(source, name)| Some((source, handlers.get(name)?)))
            .collect();
        // Which of them runs is not known before the claim.
        let bound_lease_ms = bound.iter().map(|(_, handler)| lease_ms(handler)).max();
        self.sources = bound.iter().map(|(source, _)| (*source).clone()).collect();
        let unbound = settings.sources.iter();
        let unbound = unbound.filter(|(_, name)| handlers.get(name).is_none());
        self.unbound
            .set(unbound.map(|(source, _)| source.clone()).collect());
        self.lanes.serve(|lane: &Lane| {
            let queue_place = match settings.queues.as_slice() {
                [] => 0,
                queues => queues.iter().position(|queue| *queue == lane.queue)?,
            };
            if !lane.tags.iter().all(|tag| settings.tags.contains(tag)) {
                return None;
            }
            let handler = handlers.get(&lane.handler);
            Some(Serving {
                lease_ms: handler
                    .map(|handler| lease_ms(handler))
                    .or(bound_lease_ms)?,
                queue_place,
                by_source: handler.is_none(),
            })
        });
        self.handlers = Some(handlers);
        true
    }

    /// Reads new lanes from the catalog. True if there are any.
    pub(super) async fn read_catalog(&mut self) -> Result<bool, StoreError> {
        let lanes = self
            .shared
            .store
            .lanes_after(self.lanes.read_after())
            .await?;
        let news = self.lanes.learn(lanes);
        if news.changed {
            self.handlers = None;
            self.serve();
        }
        Ok(news.new)
    }

    /// How many jobs to claim beyond the free slots. Zero while there are orphans: queued jobs may not precede them, and orphans do not
    /// wait in line ([`Self::adopt`]). Also zero if slots wait between jobs.
    pub(super) fn ahead(&mut self) -> usize {
        let ended = self.shared.slots.ended();
        let ahead = self.prefetch.jobs(ended, Instant::now());
        match self.orphans_left || self.slots_wait {
            true => 0,
            false => ahead,
        }
    }

    /// The maximum number of jobs for one claim.
    pub(super) fn claim_max(&self) -> usize {
        self.prefetch.claim_max()
    }

    /// Adopts jobs whose lease has ended at `since` or later, by the database's clock. The leases were checked up to `until`; the next
    /// claims check those that end later.
    ///
    /// It adopts no more jobs than can run at once: if one of them kills this host too, all jobs in line behind it are lost once more, and
    /// a job may be lost only a few times.
    pub(super) async fn adopt(
        &mut self,
        wanted: usize,
        since: Option<SystemTime>,
        until: SystemTime,
    ) -> Result<Found, StoreError> {
        let wanted = wanted.min(self.shared.settings.slots);
        let found = match self.adopt_from_all(wanted, since).await {
            Ok(found) => found,
            Err(error) if error.is_transient() => return Err(error),
            // An orphan that cannot be adopted must not block the other claims.
            Err(error) => {
                error!(%error, "cannot adopt jobs whose worker is gone; trying again within seconds");
                Found::default()
            }
        };
        self.orphans_left = found.is_cut;
        self.checked_at = match found.is_cut {
            true => self.checked_at.min(since.unwrap_or(SystemTime::UNIX_EPOCH)),
            false => until,
        };
        Ok(found)
    }

    async fn adopt_from_all(
        &mut self,
        wanted: usize,
        since: Option<SystemTime>,
    ) -> Result<Found, StoreError> {
        let lanes = self.lanes.all();
        let mut found = self.adopt_from(&lanes, None, wanted, since).await?;
        if !found.is_cut && self.finds_by_source() {
            let lanes = self.lanes.all_by_source();
            let sources = self.sources.clone();
            let rest = wanted.saturating_sub(found.jobs);
            found += self.adopt_from(&lanes, Some(&sources), rest, since).await?;
        }
        Ok(found)
    }

    async fn adopt_from(
        &mut self,
        orders: &[ClaimOrder],
        sources: Option<&[String]>,
        wanted: usize,
        since: Option<SystemTime>,
    ) -> Result<Found, StoreError> {
        let shared = self.shared;
        let lanes: Vec<LaneId> = orders.iter().map(|order| order.lane).collect();
        let orphans = shared.store.orphans(&lanes, sources, wanted, since).await?;
        let is_filled = orphans.len() >= wanted;
        let crashes_max = shared.settings.lost_max;
        let adoptions: Vec<Adoption> = orphans
            .into_iter()
            .map(|orphan| Adoption {
                orphan,
                next: after_loss(orphan.crashes, crashes_max),
                lease: self.lane_of(orphan).1,
            })
            .collect();
        let fence = Fence(rand::random());
        let sent = BootTime::now();
        let under_way = shared.leases.claiming();
        let Adopted { claimed, lost } = shared.store.adopt(fence, &adoptions).await?;
        counter!("rouse_jobs_adopted_total").increment(claimed.len() as u64);
        for adoption in &lost {
            self.report_lost(adoption);
        }
        let bytes = claimed.iter().map(ClaimedJob::bytes).sum();
        let is_cut = is_filled || fills_an_answer(claimed.len(), bytes);
        let jobs = self.dispatch(under_way, claimed, sent, true).await;
        Ok(Found {
            jobs,
            is_cut,
            orphans: None,
        })
    }

    fn lane_of(&self, orphan: Orphan) -> (Arc<Lane>, Duration) {
        let lane = self.lanes.get(orphan.lane);
        lane.expect("jobs are adopted from lanes that are served")
    }

    /// Reports a lost job that is not claimed now: it waits, or has failed.
    fn report_lost(&self, adoption: &Adoption) {
        let Adoption { orphan, next, .. } = *adoption;
        let (lane, _) = self.lane_of(orphan);
        let has_failed = next == AfterLoss::Fail;
        let next = match has_failed {
            true => "failed",
            false => "queued",
        };
        let handler = lane.handler.clone();
        counter!("rouse_jobs_lost_total", "handler" => handler, "next" => next).increment(1);
        let context = EventContext {
            worker_id: &self.shared.settings.worker_id,
            id: orphan.id,
            handler: &lane.handler,
            attempt: orphan.attempt,
            since: Since::ClaimedElsewhere(orphan.after),
        };
        events::lost(context, orphan.lost, has_failed);
    }

    /// Queries the overdue jobs of lanes that wait behind other lanes, from `after` on in each.
    pub(super) async fn find_overdue(&mut self, after: After) -> Result<(), StoreError> {
        let Some(wait) = self.shared.settings.promote_after else {
            return Ok(());
        };
        let behind = self.lanes.behind(after);
        let store = &self.shared.store;
        let overdue = match behind.is_empty() {
            true => Vec::new(),
            false => store.overdue(&behind, wait, KNOWN_AHEAD, KNOWN_MAX).await?,
        };
        self.overdue.learn(&overdue, Instant::now());
        Ok(())
    }

    /// True if this worker may run jobs of a lane whose own handler it does not have, because their source is bound.
    fn finds_by_source(&self) -> bool {
        !self.sources.is_empty() && self.lanes.serves_by_source()
    }

    /// Claims from the lanes: first orphans, then queued jobs if no orphans are left.
    pub(super) async fn claim(&mut self, wanted: usize, after: After) -> Result<Found, StoreError> {
        let mut found = self.claim_queued(wanted, after, true).await?;
        if let Some(until) = found.orphans.take() {
            let since = self.checked_at;
            let rest = wanted.saturating_sub(found.jobs);
            found += self.adopt(rest, Some(since), until).await?;
            let rest = wanted.saturating_sub(found.jobs);
            if !found.is_cut && rest > 0 {
                // Without the check: if leases of lanes that only others may adopt from expire continually, this worker would otherwise
                // never claim anything. Leases that have expired since are found by the next claim.
                found += self.claim_queued(rest, after, false).await?;
            }
        }
        Ok(found)
    }

    /// Claims queued jobs: first the share of overdue jobs, then half of the rest by source. `check`: claims nothing if a lease has
    /// expired.
    async fn claim_queued(
        &mut self,
        wanted: usize,
        after: After,
        check: bool,
    ) -> Result<Found, StoreError> {
        let mut found = Found::default();
        if let Some(wait) = self.shared.settings.promote_after {
            let (overdue, share) = self.overdue.claim(wanted, wait, Instant::now());
            if share > 0 {
                let orders = self.lanes.promoted(&overdue);
                found = self.claim_from(orders, share, check).await?;
            }
            if found.orphans.is_some() {
                return Ok(found);
            }
        }
        let share = match self.finds_by_source() {
            true => self.half.of(wanted.saturating_sub(found.jobs)),
            false => 0,
        };
        let by_source = self.claim_by_source(share).await?;
        found += by_source;
        if found.jobs < wanted {
            let orders = self.lanes.orders(after);
            found += self.claim_from(orders, wanted - found.jobs, check).await?;
        }
        // There may be more bound jobs than their share, and too few others.
        if by_source.jobs == share && found.orphans.is_none() {
            let rest = wanted.saturating_sub(found.jobs);
            found += self.claim_by_source(rest).await?;
        }
        Ok(found)
    }

    /// Claims jobs of bound sources from lanes whose own handler this host does not have. Without such lanes it sends no query.
    pub(super) async fn claim_by_source(&mut self, wanted: usize) -> Result<Found, StoreError> {
        let started = Instant::now();
        let lanes = match wanted > 0 && self.finds_by_source() && started >= self.by_source_at {
            true => self.lanes.by_source(),
            false => Vec::new(),
        };
        // Any of them will do: they have the same lease.
        let Some((_, lease)) = lanes.first().and_then(|lane| self.lanes.get(*lane)) else {
            return Ok(Found::default());
        };
        let fence = Fence(rand::random());
        let sent = BootTime::now();
        let shared = self.shared;
        let store = &shared.store;
        let under_way = shared.leases.claiming();
        let jobs = store
            .claim_bound(fence, &lanes, &self.sources, lease, wanted)
            .await?;
        // The search is expensive if it covers many lanes or passes dead rows.
        self.by_source_at = match jobs.is_empty() {
            true => started + pause_after(started.elapsed()),
            false => started,
        };
        // The sources take turns in being the first.
        self.sources.rotate_left(1);
        let is_cut = self.weigh(&jobs);
        let jobs = self.dispatch(under_way, jobs, sent, false).await;
        Ok(Found {
            jobs,
            is_cut,
            orphans: None,
        })
    }

    /// Notes that there may be a job in this lane. True if the lane is served.
    pub(super) fn mark_active(&mut self, lane: LaneId) -> bool {
        if self.lanes.is_served_by_source(lane) {
            self.by_source_at = Instant::now();
        }
        self.lanes.mark_active(lane)
    }

    /// Sends one claim, for those of the lanes that are not paused.
    async fn claim_from(
        &mut self,
        mut orders: Vec<ClaimOrder>,
        wanted: usize,
        check: bool,
    ) -> Result<Found, StoreError> {
        let now = Instant::now();
        orders.retain(|order| !self.unbound.is_paused(order.lane, now));
        if orders.is_empty() {
            return Ok(Found::default());
        }
        let shared = self.shared;
        let fence = Fence(rand::random());
        let sent = BootTime::now();
        let under_way = shared.leases.claiming();
        let checked_at = check.then_some(self.checked_at);
        let store = &shared.store;
        let jobs = match store.claim(fence, &orders, wanted, checked_at).await? {
            Claimed::Jobs(jobs) => jobs,
            Claimed::Orphans(until) => {
                return Ok(Found {
                    orphans: Some(until),
                    ..Found::default()
                });
            }
        };
        if check {
            self.orphans_left = false;
            // Without a job, the time of the answer is unknown.
            self.checked_at = jobs.first().map_or(self.checked_at, |job| job.claimed_at);
        }
        let is_cut = self.weigh(&jobs);
        let is_all = jobs.len() < wanted && !is_cut;
        self.lanes.claimed(&orders, &jobs, is_all);
        self.overdue.claimed(&orders, &jobs, is_all, Instant::now());
        let jobs = self.dispatch(under_way, jobs, sent, false).await;
        Ok(Found {
            jobs,
            is_cut,
            orphans: None,
        })
    }

    /// Updates the estimate of the size of jobs; true if the claim ended because of its size.
    fn weigh(&mut self, jobs: &[ClaimedJob]) -> bool {
        let bytes = jobs.iter().map(ClaimedJob::bytes).sum();
        self.prefetch.claimed(jobs.len(), bytes);
        fills_an_answer(jobs.len(), bytes)
    }

    /// Puts the jobs of a claim in line, and gives back those whose handler is missing. Returns how many jobs count as found.
    async fn dispatch(
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
                    job,
                    lane,
                    sent,
                    received,
                    lease: job_lease.unwrap_or(lease),
                };
                let context = claim.event_context(self.shared, &claim.lane.handler);
                match adopted {
                    true => events::adopted(context, claim.job.lost),
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
            attempt::give_back(self.shared, &claim, RunEnd::NoHandler).await;
        }
        new
    }
}

/// The pause after a search by source that found nothing.
fn pause_after(took: Duration) -> Duration {
    (took * BY_SOURCE_SHARE).min(BY_SOURCE_WITHIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expensive_search_by_source_is_repeated_rarely_but_always_within_thirty_seconds() {
        let pauses = [0, 1, 100, 1_500, 60_000]
            .map(Duration::from_millis)
            .map(pause_after);
        let expected = [0, 20, 2_000, 30_000, 30_000].map(Duration::from_millis);
        assert_eq!(pauses, expected);
    }
}
