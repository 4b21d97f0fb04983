//! Takes jobs from the lanes that this worker serves.

mod adopt;
mod batches;
mod by_source;
mod choose;
mod dispatch;
mod newest;

use std::collections::{HashMap, HashSet};
use std::ops::AddAssign;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use dispatch::InLine;
use rouse_turns::Prefetch;

use super::Shared;
use super::ageing::{KNOWN_AHEAD, KNOWN_MAX, Overdue, Share};
use super::claim::HostLimit;
use super::lanes::{After, Lanes};
use super::unbound::Unbound;
use crate::job::{Fence, Incarnation, LaneId};
use crate::sandbox::{BootTime, HandlerSet};
use crate::store::{
    CLAIM_BYTES_MAX, COLUMNS_BYTES, ClaimOrder, ClaimResult, ClaimedJob, StoreError,
    fills_a_response,
};

/// The maximum number of claims for queued jobs in one look. Each claim after the first follows one that several lanes
/// shared and that was not filled. It skips the lanes that had fewer jobs than their share, so it soon covers the later
/// classes, too.
const CLAIMS_PER_LOOK: usize = 4;

/// After an adoption that takes longer than this, leases are checked again before queued jobs are claimed.
const SLOW_ADOPTION: Duration = Duration::from_millis(500);

/// A claim within the limits of this host.
struct HostLimits {
    /// The orders, each limited to the free capacity of its lane.
    orders: Vec<ClaimOrder>,
    /// The number of jobs that each lane of a limited handler may take.
    rooms: HashMap<LaneId, usize>,
    /// The lanes that got no capacity.
    full: Vec<LaneId>,
    /// True if other lanes were opened instead.
    opened: bool,
}

/// The result of a look or a claim.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// The number of jobs found; a batch counts as one. It does not include jobs that are repeatedly given back because
    /// their handler is missing.
    pub(super) jobs: usize,
    /// True if there may be more jobs: a response ended because of its size, a lane has used up its share of the claim,
    /// an adoption found as many jobs as wanted, or `has_others` is true.
    pub(super) is_cut: bool,
    /// True if other lanes may have jobs, even if this look has found none. Either some lanes were opened, because
    /// other lanes behind their limits had free capacity or no more jobs; or the last claim has closed lanes or found
    /// no job, and has skipped some lanes that are known to have jobs.
    pub(super) has_others: bool,
    /// The number of lanes that the claims have closed, or found paused.
    closed: usize,
    /// Set if the claim found an expired lease, and therefore claimed nothing: the time up to which leases were checked
    /// (database clock).
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
        self.has_others |= other.has_others;
        self.closed += other.closed;
        self.orphans = other.orphans.or(self.orphans);
    }
}

/// Claims jobs from lanes, and keeps state from one claim to the next.
pub(super) struct Claims<'a> {
    shared: &'a Arc<Shared>,
    pub(super) lanes: Lanes,
    /// The handlers by which the served lanes were chosen, the version of what was known about their statements, and
    /// the incarnation of this worker. `None` if they have to be chosen again.
    chosen_by: Option<(Arc<HandlerSet>, u64, Incarnation)>,
    /// Sources that are bound to a handler of this host.
    sources: Vec<String>,
    /// Jobs of sources that are bound to a handler that this host does not have.
    unbound: Unbound,
    /// After a search by source that found nothing, the time before which it is not retried, unless a notification
    /// announces a job, an attempt of one of `full_handlers` ends, or the handler of another source is loaded.
    by_source_at: Instant,
    reached_by_source: by_source::Reached,
    /// The bound handlers that had no room when the last search by source started, or after it: as many of their
    /// attempts were in hand as this host may run at the same time.
    full_handlers: HashSet<String>,
    /// The handlers whose concurrent attempts this host limits.
    host_limits: HashMap<String, HostLimit>,
    /// The handlers that take batches of jobs.
    take_batches: HashSet<String>,
    /// The share of each claim for jobs found by their source, so that neither they nor the other jobs starve.
    by_source_share: Share,
    prefetch: Prefetch,
    newest: newest::Newest,
    overdue: Overdue,
    /// Leases that ended before this time, by the database's clock, were checked. The next claim checks later ones.
    checked_at: SystemTime,
    /// True if the last adoption was filled: there may be more orphans.
    orphans_left: bool,
    /// True if slots wait after some attempts, so jobs claimed ahead would have to be given back.
    slots_wait: bool,
    /// The time that the response to the last claim of rate-limited jobs took.
    throttled_response: Duration,
}

impl<'a> Claims<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            lanes: Lanes::new(shared.settings.queue_order),
            chosen_by: None,
            sources: Vec::new(),
            unbound: Unbound::default(),
            by_source_at: Instant::now(),
            reached_by_source: by_source::Reached::new(Instant::now()),
            full_handlers: HashSet::new(),
            host_limits: HashMap::new(),
            take_batches: HashSet::new(),
            by_source_share: Share::new(50),
            prefetch: Prefetch::new(
                Instant::now(),
                shared.settings.slots,
                CLAIM_BYTES_MAX,
                COLUMNS_BYTES,
            ),
            newest: newest::Newest::new(Instant::now()),
            overdue: Overdue::new(Share::new(shared.settings.promote_share)),
            checked_at: SystemTime::UNIX_EPOCH,
            orphans_left: false,
            slots_wait: shared.settings.has_job_delay(),
            throttled_response: Duration::ZERO,
        }
    }

    /// Forgets the remembered state of the database: after an error it may be wrong.
    pub(super) fn start_over(&mut self) {
        self.lanes.forget();
        self.reached_by_source = by_source::Reached::new(Instant::now());
        self.newest = newest::Newest::new(Instant::now());
        // The next server may have a different clock.
        self.checked_at = SystemTime::UNIX_EPOCH;
    }

    /// The number of jobs to claim beyond the free slots. Zero while there are orphans: queued jobs may not precede
    /// them, and orphans do not wait in line ([`Self::adopt`]). Also zero if slots wait between jobs.
    pub(super) fn ahead(&mut self) -> usize {
        let now = Instant::now();
        let (ended, taken) = self.shared.slots.ended(now);
        let ahead = self.prefetch.jobs(ended, taken, now);
        match self.orphans_left || self.slots_wait {
            true => 0,
            false => ahead,
        }
    }

    /// The maximum number of jobs for one claim.
    pub(super) fn claim_max(&self) -> usize {
        self.prefetch.claim_max()
    }

    /// Queries the overdue jobs of lanes that wait behind other lanes, and of keys of fair queues, starting after
    /// `after` in each.
    pub(super) async fn find_overdue(&mut self, after: After) -> Result<(), StoreError> {
        let mut requested = self.lanes.starving(after);
        if let Some(wait) = self.shared.settings.promote_after {
            requested.insert(0, (wait, self.lanes.behind(after)));
        }
        let store = &self.shared.store;
        let mut counts = Vec::new();
        for (wait, lanes) in requested {
            if !lanes.is_empty() {
                let overdue = store.overdue(&lanes, wait, KNOWN_AHEAD, KNOWN_MAX).await?;
                counts.push((wait, overdue));
            }
        }
        self.overdue.learn(&counts, Instant::now());
        let lanes = counts.iter().flat_map(|(_, lanes)| lanes);
        self.lanes.go_first(lanes.map(|overdue| overdue.lane));
        Ok(())
    }

    /// Claims from the lanes: first orphans, then queued jobs if no orphans are left.
    pub(super) async fn claim(&mut self, wanted: usize, after: After) -> Result<Found, StoreError> {
        let mut found = self.claim_queued(wanted, after, true).await?;
        for is_last in [false, true] {
            let Some(until) = found.orphans.take() else {
                break;
            };
            let (since, started_at) = (self.checked_at, BootTime::now());
            let rest = wanted.saturating_sub(found.jobs);
            found += self.adopt(rest, Some(since), until).await?;
            let rest = wanted.saturating_sub(found.jobs);
            if found.is_cut || rest == 0 {
                break;
            }
            // This claim does not check for expired leases: if leases keep expiring in lanes from which only other
            // workers may adopt, this worker would otherwise never claim anything. The next claim finds the leases that
            // have expired since. After a slow adoption, which a freeze may have interrupted, there may be many of
            // these, so the check is repeated once.
            let check = !is_last && BootTime::now().since(started_at) > SLOW_ADOPTION;
            found += self.claim_queued(rest, after, check).await?;
        }
        Ok(found)
    }

    /// Claims queued jobs: first the share of overdue jobs, then half of the rest by source, then from the lanes in
    /// their order. `check`: claims nothing if a lease has expired.
    async fn claim_queued(
        &mut self,
        wanted: usize,
        after: After,
        check: bool,
    ) -> Result<Found, StoreError> {
        let mut found = Found::default();
        let (overdue, share) = self.overdue.claim(wanted, Instant::now());
        if share > 0 {
            let orders = self.lanes.promoted(&overdue, share);
            (found, _) = self.claim_from(orders, share, check).await?;
        }
        if found.orphans.is_some() {
            return Ok(found);
        }
        let share = match self.finds_by_source() {
            true => self.by_source_share.take(wanted.saturating_sub(found.jobs)),
            false => 0,
        };
        let by_source = self.claim_by_source(share).await?;
        found += by_source;
        let mut finds_none = false;
        let mut has_others = false;
        for _ in 0..CLAIMS_PER_LOOK {
            let rest = wanted.saturating_sub(found.jobs);
            if rest == 0 {
                break;
            }
            let orders = match finds_none {
                true => self.lanes.orders_of_many(after),
                false => self.lanes.orders(after, rest),
            };
            let (claimed, is_partial) = self.claim_from(orders, rest, check).await?;
            found += claimed;
            // The lanes are closed, or their jobs are locked: then the next peek finds the same lanes again.
            finds_none = claimed.jobs == 0;
            // If so, the next look follows at once. This cannot go on forever, because each such claim closes a lane,
            // or none of its lanes counts as having jobs any longer.
            has_others =
                is_partial && claimed.orphans.is_none() && (claimed.closed > 0 || finds_none);
            if !is_partial || claimed.is_cut || found.orphans.is_some() {
                break;
            }
        }
        found.is_cut |= has_others;
        found.has_others |= has_others;
        // There may be more bound jobs than their share, and too few others.
        if by_source.jobs == share && found.orphans.is_none() {
            let rest = wanted.saturating_sub(found.jobs);
            found += self.claim_by_source(rest).await?;
        }
        Ok(found)
    }

    /// Claims from those of the lanes that are not paused, and whose handlers may start another attempt: with one
    /// claim, unless there are lanes whose jobs start in batches. Also returns whether lanes that are known to have
    /// jobs were skipped, because others share the claim.
    async fn claim_from(
        &mut self,
        mut orders: Vec<ClaimOrder>,
        wanted: usize,
        check: bool,
    ) -> Result<(Found, bool), StoreError> {
        let paused = self.close_paused(&mut orders);
        let is_partial = self.lanes.leave_later_classes(&mut orders)
            || paused > 0 && self.lanes.are_only_some(&orders);
        let mut found = match self.take_batches.is_empty() {
            true => self.claim_alike(orders, wanted, None, check).await?,
            false => self.claim_each_alike(orders, wanted, check).await?,
        };
        found.closed += paused;
        Ok((found, is_partial))
    }

    /// Removes the paused lanes from a claim, and closes them until their pauses end. Returns their number.
    fn close_paused(&mut self, orders: &mut Vec<ClaimOrder>) -> usize {
        let now = Instant::now();
        let paused = orders.extract_if(.., |order| self.unbound.is_paused(order.lane, now));
        let paused: Vec<ClaimOrder> = paused.collect();
        self.lanes.leave_out(&paused);
        for order in &paused {
            if let Some(rest) = self.unbound.paused_for(order.lane, now) {
                self.lanes
                    .close_until(order.lane, BootTime::now().plus(rest));
            }
        }
        paused.len()
    }

    /// Sends a claim for the lanes whose jobs start in batches of the same size, and one for the others.
    async fn claim_each_alike(
        &mut self,
        orders: Vec<ClaimOrder>,
        wanted: usize,
        check: bool,
    ) -> Result<Found, StoreError> {
        let mut found = Found::default();
        let mut claims = self.by_batch(orders).into_iter();
        while let Some((batch, orders)) = claims.next() {
            let rest = wanted.saturating_sub(found.jobs);
            if rest == 0 || found.orphans.is_some() {
                self.lanes.give_up_turns(&orders);
                found.is_cut |= found.orphans.is_none();
                continue;
            }
            match self.claim_alike(orders, rest, batch, check).await {
                Ok(claimed) => found += claimed,
                Err(error) => {
                    for (_, orders) in claims.rev() {
                        self.lanes.give_up_turns(&orders);
                    }
                    return Err(error);
                }
            }
        }
        Ok(found)
    }

    /// Sends one claim. `batch`: the maximum number of jobs of a batch, if the jobs of all these lanes start in
    /// batches.
    async fn claim_alike(
        &mut self,
        mut orders: Vec<ClaimOrder>,
        wanted: usize,
        batch: Option<usize>,
        check: bool,
    ) -> Result<Found, StoreError> {
        let limits = self.keep_host_limits(&mut orders, BootTime::now());
        let opened = limits.as_ref().is_some_and(|limits| limits.opened);
        let full = limits.as_ref().map_or(0, |limits| limits.full.len());
        if orders.is_empty() {
            return Ok(Found {
                is_cut: opened,
                has_others: opened,
                closed: full,
                ..Found::default()
            });
        }
        let shared = self.shared;
        let fence = Fence(rand::random());
        let sent = BootTime::now();
        let in_flight = shared.leases.claiming();
        let checked_at = check.then_some(self.checked_at);
        let store = &shared.store;
        let requested = limits.as_ref().map_or(&orders, |limits| &limits.orders);
        let claimed = match batch {
            None => store.claim(fence, requested, wanted, checked_at).await,
            Some(size) => {
                let requested = batches::whole(requested, size, wanted);
                store
                    .claim_batches(fence, &requested, wanted, checked_at)
                    .await
            }
        };
        // If the claim was committed after all, its jobs are adopted, and adoptions take no turns.
        let claimed = claimed.inspect_err(|_| self.lanes.give_up_turns(&orders))?;
        let (mut jobs, closed) = match claimed {
            ClaimResult::Jobs(jobs, closed) => (jobs, closed),
            ClaimResult::Orphans(until) => {
                self.lanes.give_up_turns(&orders);
                return Ok(Found {
                    orphans: Some(until),
                    ..Found::default()
                });
            }
        };
        if check {
            self.orphans_left = false;
            // Without a job, the time of the response is unknown.
            self.checked_at = jobs.first().map_or(self.checked_at, |job| job.claimed_at);
        }
        let is_cut = self.record_size(&jobs);
        let batches = batch.map(|size| {
            batches::by_tenant(&mut jobs);
            self.count_batches(&jobs, size)
        });
        let attempts = |batches: &HashMap<LaneId, usize>| batches.values().sum();
        let attempts: usize = batches.as_ref().map_or(jobs.len(), attempts);
        let is_filled = attempts >= wanted || is_cut;
        let first = self.lanes.take_woken(&jobs);
        self.set_costs(&jobs);
        let mut may_have_more = self.lanes.claimed(&orders, &jobs, &closed, is_filled);
        if let Some(limits) = limits {
            may_have_more.opened |= self.open_with_room(&limits, &jobs, batches);
        }
        self.overdue
            .claimed(&orders, &jobs, !is_filled, Instant::now());
        let jobs = self
            .dispatch(in_flight, jobs, sent, InLine::Queued(&first), batch)
            .await;
        Ok(Found {
            jobs,
            is_cut: is_cut || may_have_more.used_up || may_have_more.opened || opened,
            has_others: may_have_more.opened || opened,
            closed: closed.len() + full,
            orphans: None,
        })
    }

    /// Restricts a claim to the number of jobs of each handler that may start on this host. Lanes whose handler has no
    /// free capacity are closed until one of its attempts has ended. `None` if no handler is limited.
    fn keep_host_limits(
        &mut self,
        orders: &mut Vec<ClaimOrder>,
        now: BootTime,
    ) -> Option<HostLimits> {
        if self.host_limits.is_empty() {
            return None;
        }
        let mut left: HashMap<String, usize> = HashMap::new();
        let mut rooms: HashMap<LaneId, usize> = HashMap::new();
        let mut full = Vec::new();
        // Lanes that are known to have jobs go first: the others may have none.
        let (known, idle): (Vec<&ClaimOrder>, Vec<&ClaimOrder>) = orders
            .iter()
            .partition(|order| self.lanes.has_jobs(order.lane));
        let known_count = known.len();
        for (index, order) in known.into_iter().chain(idle).enumerate() {
            let Some((handler, max)) = self.lanes.host_limit(order.lane) else {
                continue;
            };
            let slots = &self.shared.slots;
            let room = left
                .entry(handler.to_owned())
                .or_insert_with(|| max.saturating_sub(slots.in_hand_of(handler)));
            let max = order.max.map_or(*room, |max| max.min(*room));
            *room -= max;
            rooms.insert(order.lane, max);
            if max == 0 && index < known_count {
                full.push(*order);
            }
        }
        orders.retain(|order| rooms.get(&order.lane) != Some(&0));
        let limited = orders.iter().map(|order| ClaimOrder {
            max: rooms.get(&order.lane).copied().or(order.max),
            ..*order
        });
        let limited = limited.collect();
        self.lanes.not_claimed(&full);
        let mut opened = false;
        for order in &full {
            opened |= self.lanes.close_for_handler(order.lane, now);
        }
        Some(HostLimits {
            opened,
            orders: limited,
            rooms,
            full: full.iter().map(|order| order.lane).collect(),
        })
    }

    /// Updates the lanes after a claim within these limits: lanes that used up their capacity may have more jobs, and
    /// lanes that got none are opened if others have left some. `batches`: the number of batches that each lane has
    /// taken, if jobs start in batches. True if any lane was opened.
    fn open_with_room(
        &mut self,
        limits: &HostLimits,
        jobs: &[ClaimedJob],
        batches: Option<HashMap<LaneId, usize>>,
    ) -> bool {
        let of_lanes = batches.unwrap_or_else(|| {
            let mut of_lanes: HashMap<LaneId, usize> = HashMap::new();
            for job in jobs {
                *of_lanes.entry(job.lane).or_default() += 1;
            }
            of_lanes
        });
        for (lane, claimed) in &of_lanes {
            if limits.rooms.get(lane) == Some(claimed) {
                self.lanes.mark_active(*lane);
            }
        }
        let mut by_handler: HashMap<String, usize> = HashMap::new();
        for (lane, claimed) in of_lanes {
            if let Some((handler, _)) = self.lanes.host_limit(lane) {
                *by_handler.entry(handler.to_owned()).or_default() += claimed;
            }
        }
        let slots = &self.shared.slots;
        let mut is_any = false;
        for lane in &limits.full {
            let has_room = self.lanes.host_limit(*lane).is_some_and(|(handler, max)| {
                let claimed = by_handler.get(handler).copied().unwrap_or(0);
                slots.in_hand_of(handler) + claimed < max
            });
            is_any |= has_room && self.lanes.open(*lane);
        }
        is_any
    }

    /// Sets the cost of the jobs of these lanes, if their queues charge CPU time.
    fn set_costs(&mut self, jobs: &[ClaimedJob]) {
        if !self.lanes.serves_fair() {
            return;
        }
        let lanes: HashSet<LaneId> = jobs.iter().map(|job| job.lane).collect();
        for lane in lanes {
            if let Some(queue) = self.lanes.charged_queue(lane) {
                let cost = self.shared.costs.cost(queue, lane);
                self.lanes.set_cost(lane, cost);
            }
        }
    }

    /// Updates the estimate of the size of jobs; true if the claim ended because of its size.
    fn record_size(&mut self, jobs: &[ClaimedJob]) -> bool {
        let bytes = jobs.iter().map(ClaimedJob::bytes).sum();
        self.prefetch.claimed(jobs.len(), bytes);
        fills_a_response(jobs.len(), bytes)
    }
}
