//! A look: one round in which a worker searches for jobs and claims them.
//!
//! A look claims at once if it is known that there are jobs. Otherwise it peeks first: one read that shows whether
//! there is anything to do. At intervals a look is a sweep, which reads behind the cursors (`look_plan.rs` decides
//! when).

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tracing::error;

use super::Shared;
use super::claims::{Claims, Found};
use super::events;
use super::lanes::After;
use super::look_plan::{LookPlan, Step, Sweep, Trigger, WINDOW_MARGIN};
use super::writers::Writers;
use crate::job::LaneId;
use crate::sandbox::BootTime;
use crate::store::{ClaimOrder, Peek, PeekParams, Promotion, StoreError};

/// At most a quarter of the wanted jobs are claimed from lanes that had none until a moment ago. They are claimed
/// separately, in a claim that has to be short.
const FIRST_SHARE: usize = 4;

/// Looks for jobs, and keeps state from one look to the next.
pub(super) struct Looks<'a> {
    shared: &'a Arc<Shared>,
    claims: Claims<'a>,
    plan: LookPlan,
    writers: Writers,
    /// The last time at which no lease had ended, by the database's clock. `None` if unknown.
    no_orphans_since: Option<SystemTime>,
    /// The last assigned turn at the last sweep. `None` if unknown.
    swept_turn: Option<i64>,
    /// True while a restart reads the lanes.
    is_restarting: bool,
    /// The queues that were paused at the last sweep.
    paused: HashSet<String>,
    /// True if the last wakeup announced jobs, or something other than the end of a job.
    is_announced: bool,
}

/// The result of a look with a peek.
struct Peeked {
    found: Found,
    /// As in [`Peek`].
    turn: i64,
    /// As in [`Peek`].
    paused: HashSet<String>,
    /// Transactions that have written and are in progress, if this is a sweep.
    writers: Vec<i64>,
    /// The lanes that it found empty, if this is a sweep that reads all lanes.
    empty: Vec<LaneId>,
}

impl<'a> Looks<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            claims: Claims::new(shared),
            plan: LookPlan::new(Instant::now(), shared.settings.intervals),
            writers: Writers::default(),
            no_orphans_since: None,
            swept_turn: None,
            is_restarting: false,
            paused: HashSet::new(),
            is_announced: false,
        }
    }

    /// The number of jobs to claim beyond the free slots.
    pub(super) fn ahead(&mut self) -> usize {
        self.claims.ahead()
    }

    /// The maximum number of jobs for one look.
    pub(super) fn wanted_max(&self) -> usize {
        self.claims.claim_max()
    }

    /// When the next scheduled job or retry is due. `None` if none is known.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.plan.due_at()
    }

    /// When the restart because of an empty wakeup is permitted. `None` if none waits for that.
    pub(super) fn restart_at(&self) -> Option<Instant> {
        self.plan.restart_at()
    }

    /// The time until the next lane opens that a gate has closed for a while. `None` if there is none.
    pub(super) fn opens_in(&self) -> Option<Duration> {
        let at = self.claims.lanes.next_opening()?;
        Some(at.since(BootTime::now()))
    }

    /// The time until the next search by source, if it is to find a job that was announced. `None` if there is none.
    pub(super) fn announced_in(&self) -> Option<Duration> {
        let at = self.claims.announced_search()?;
        Some(at.saturating_duration_since(Instant::now()))
    }

    /// When the newest jobs are searched next, while slots are taken. `None` if only a few lanes, and no fair queue,
    /// are served.
    pub(super) fn next_search(&self) -> Option<Instant> {
        self.claims.next_search()
    }

    /// Searches the newest jobs, if it is time. Returns the number of lanes whose first jobs are to be claimed.
    pub(super) async fn find_new(&mut self) -> Result<usize, StoreError> {
        self.claims.find_new().await?;
        Ok(self.claims.lanes.woken().count())
    }

    /// Claims the first jobs of at most `wanted` lanes that had none until a moment ago.
    pub(super) async fn claim_first(&mut self, wanted: usize) -> Result<Found, StoreError> {
        self.prepare(Instant::now());
        self.claims.claim_first(wanted).await
    }

    /// False if this worker is known not to serve the lane.
    pub(super) fn may_serve(&self, lane: LaneId) -> bool {
        !self.claims.lanes.knows(lane) || self.claims.lanes.serves(lane)
    }

    /// True if the last look has failed in the read of a restart.
    pub(super) fn was_restarting(&self) -> bool {
        self.is_restarting
    }

    /// Notes that the read of a restart got no response in time: the server is slow, but has not been replaced.
    pub(super) fn restart_failed(&mut self) {
        self.claims.lanes.undo_restart();
        self.plan.restart_failed(Instant::now());
    }

    /// Forgets the remembered state of the database: after an error it may be wrong.
    pub(super) fn start_over(&mut self) {
        self.claims.start_over();
        self.swept_turn = None;
        self.writers = Writers::default();
        self.plan.start_over(Instant::now());
    }

    /// Called after a look that a notification triggered and that found nothing. True if the next look has to follow at
    /// once; it is a restart.
    pub(super) fn restart_after_empty_wakeup(&mut self) -> bool {
        self.is_announced && self.plan.restart_after_empty_wakeup(Instant::now())
    }

    /// Runs one look.
    pub(super) async fn look(
        &mut self,
        wanted: usize,
        trigger: Trigger,
    ) -> Result<Found, StoreError> {
        let found = self.look_for(wanted, trigger).await;
        let wait_for_ends = self.claims.lanes.wait_for_ends() || self.claims.sources_wait();
        self.shared.wakeups.wait_for_ends(wait_for_ends);
        found
    }

    /// Chooses the lanes to serve, and opens those whose gates may have opened. True if it has opened any.
    fn prepare(&mut self, now: Instant) -> bool {
        self.claims.choose_lanes();
        if self.plan.looks_back(now) {
            self.claims.lanes.look_back();
        }
        let mut is_freed = self.claims.lanes.open_due(BootTime::now());
        let (lanes, handlers) = self.shared.wakeups.take_freed();
        for lane in lanes {
            is_freed |= self.claims.lanes.free(lane);
        }
        for (handler, ends) in handlers {
            self.claims.free_sources(&handler);
            let lanes = &mut self.claims.lanes;
            is_freed |= (0..ends)
                .take_while(|_| lanes.free_handler(&handler))
                .count()
                > 0;
        }
        is_freed
    }

    async fn look_for(&mut self, wanted: usize, trigger: Trigger) -> Result<Found, StoreError> {
        let started = Instant::now();
        let is_freed = self.prepare(started);
        self.is_restarting = false;
        let mut found = Found::default();
        // True if there are jobs to claim, as far as is known.
        let known = match trigger {
            Trigger::More => {
                self.claims.find_new().await?;
                found = self.claims.claim_first(wanted / FIRST_SHARE).await?;
                true
            }
            Trigger::Wakeup => self.take_wakeups().await? || is_freed,
            Trigger::Poll => is_freed,
        };
        let rest = wanted.saturating_sub(found.jobs);
        found += match self.plan.next(started, trigger, known) {
            Step::Sweep(sweep) => self.sweep(sweep, rest, known).await?,
            Step::Peek => self.peek_and_claim(rest, false, false).await?.found,
            Step::Claim { after, promote } => {
                if promote {
                    self.promote().await?;
                }
                self.claims.claim(rest, after).await?
            }
        };
        Ok(found)
    }

    /// A look that reads behind the cursors.
    async fn sweep(
        &mut self,
        sweep: Sweep,
        wanted: usize,
        known: bool,
    ) -> Result<Found, StoreError> {
        if sweep.rereads_catalog {
            self.claims.lanes.forget_catalog();
        }
        if sweep.restart {
            self.is_restarting = true;
            self.claims.lanes.restart();
            self.no_orphans_since = None;
        } else {
            self.claims.lanes.rewind(&self.paused);
        }
        self.claims.lanes.open_some();
        let peeked = self.peek_and_claim(wanted, known, true).await?;
        let before = self.swept_turn.replace(peeked.turn);
        self.paused = peeked.paused;
        let is_late = self.writers.update(peeked.writers);
        self.shared
            .fairness
            .store(self.claims.lanes.fairness().into());
        let found = peeked.found;
        // No further than the last turn at the previous sweep: later turns may not be committed yet.
        let empty_to = before.map_or(i64::MIN, |before| before.min(peeked.turn));
        self.claims.set_empty_to(empty_to);
        if !found.fills(wanted) {
            self.claims.lanes.swept(&peeked.empty, empty_to);
        }
        // Filled claims may skip lanes for a long time; so may a gate, whose capacity goes to earlier lanes.
        if (found.fills(wanted) || self.claims.lanes.has_closed())
            && let Some(after) = self.plan.checks_overdue(Instant::now(), sweep)
        {
            self.find_overdue(after).await;
        }
        self.plan.swept(Instant::now(), sweep, is_late);
        Ok(found)
    }

    /// Finds overdue jobs. An error does not fail the look, which has already claimed jobs.
    async fn find_overdue(&mut self, after: After) {
        let started = Instant::now();
        if let Err(error) = self.claims.find_overdue(after).await {
            error!(%error, "cannot find overdue jobs; they do not go ahead of others until the next try");
        }
        self.plan.checked_overdue(started, Instant::now());
    }

    /// Takes the lanes that notifications named. True if it is certain that one of them is served; false if none is, or
    /// if something other than a job may have changed.
    async fn take_wakeups(&mut self) -> Result<bool, StoreError> {
        let mut lanes = self.shared.wakeups.take();
        // The jobs in closed lanes are found when these open.
        if let Some(lanes) = &mut lanes {
            lanes.retain(|lane| !self.claims.lanes.note_in_closed(*lane));
        }
        self.is_announced = lanes.as_ref().is_none_or(|lanes| !lanes.is_empty());
        let Some(lanes) = lanes else {
            return Ok(false);
        };
        if !lanes.iter().all(|lane| self.claims.lanes.knows(*lane)) {
            self.claims.read_catalog().await?;
        }
        let mut served = false;
        for lane in lanes {
            served |= self.claims.mark_active(lane);
        }
        Ok(served)
    }

    /// Peeks, and does the work that the peek found. `known`: jobs are known to exist, so a claim is sent regardless of
    /// what the peek finds. A sweep also queries the writing transactions.
    async fn peek_and_claim(
        &mut self,
        wanted: usize,
        known: bool,
        is_sweep: bool,
    ) -> Result<Peeked, StoreError> {
        if !is_sweep && !self.claims.lanes.fit_one_claim() {
            self.claims.find_new().await?;
        }
        let orphaned_since = self.no_orphans_since.map(|then| then - WINDOW_MARGIN);
        let peeked = self.peeked_lanes(known, is_sweep);
        let peek = self.peek(&peeked, orphaned_since, is_sweep).await?;
        self.is_restarting = false;
        let empty = match is_sweep {
            true => self.claims.lanes.empty(&peeked, &peek),
            false => Vec::new(),
        };
        self.claims.lanes.open_empty(&empty);
        let is_ready = self.prepare_claims(&peek, known).await?;
        let mut found = self.adopt(wanted, orphaned_since, &peek).await?;
        // Orphans that remain after an incomplete adoption precede queued jobs.
        if !found.is_cut && found.jobs < wanted {
            let rest = wanted - found.jobs;
            found += match is_ready {
                true => self.claims.claim(rest, After::Recent).await?,
                // The peek does not cover jobs that are found by their source.
                false => self.claims.claim_by_source(rest).await?,
            };
        }
        Ok(Peeked {
            found,
            turn: peek.turn,
            paused: peek.paused,
            writers: peek.writers.unwrap_or_default(),
            empty,
        })
    }

    /// The lanes that a peek reads.
    fn peeked_lanes(&self, known: bool, is_sweep: bool) -> Vec<ClaimOrder> {
        let lanes = &self.claims.lanes;
        match (known, is_sweep || lanes.fit_one_claim()) {
            (true, true) => lanes.idle(),
            (false, true) => lanes.all(),
            // Each lane costs an index lookup, so only sweeps read all lanes if there are a large number of them. Other
            // looks search the newest jobs.
            (true, false) => Vec::new(),
            (false, false) => lanes.with_jobs(),
        }
    }

    async fn peek(
        &self,
        peeked: &[ClaimOrder],
        orphaned_since: Option<SystemTime>,
        is_sweep: bool,
    ) -> Result<Peek, StoreError> {
        let lanes = &self.claims.lanes;
        self.shared
            .store
            .peek(&PeekParams {
                lanes: peeked,
                catalog_after: lanes.read_after(),
                catalog_sum: lanes.read_sum(),
                orphaned_since,
                due_since: self.plan.due_since(),
                writers: is_sweep.then_some(self.writers.last()),
            })
            .await
    }

    /// Marks the lanes with jobs, reads new lanes, and promotes due jobs. True if there are jobs to claim.
    async fn prepare_claims(&mut self, peek: &Peek, known: bool) -> Result<bool, StoreError> {
        self.plan.next_due(Instant::now(), peek.next_due);
        if peek.releases {
            self.shared.releases.notify_one();
        }
        if peek.deadlines {
            self.shared.deadlines.notify_one();
        }
        let mut is_ready = known;
        if !known {
            self.claims.lanes.mark_all_empty();
        }
        is_ready |= self.claims.lanes.mark_ready(&peek.ready);
        if peek.catalog_changed {
            is_ready |= self.claims.read_catalog().await?;
        }
        if peek.due {
            let promotion = self.promote().await?;
            is_ready |= promotion.promoted > 0;
            match promotion.left_at {
                None if promotion.is_complete() => self.plan.none_due(peek.looked_at),
                // Each look would otherwise read the entries of the promoted jobs, as long as the lock is held.
                Some(due_at) if promotion.promoted > 0 => {
                    let now = Instant::now();
                    self.plan.left_locked(now, due_at, peek.looked_at);
                }
                None | Some(_) => {}
            }
        } else {
            self.plan.none_due(peek.looked_at);
        }
        Ok(is_ready)
    }

    /// Adopts orphans if the peek found any.
    async fn adopt(
        &mut self,
        wanted: usize,
        orphaned_since: Option<SystemTime>,
        peek: &Peek,
    ) -> Result<Found, StoreError> {
        if !peek.orphans {
            self.no_orphans_since = Some(peek.looked_at);
            self.claims.had_no_orphans(peek.looked_at);
            return Ok(Found::default());
        }
        self.claims
            .adopt(wanted, orphaned_since, peek.looked_at)
            .await
    }

    /// Promotes due jobs.
    async fn promote(&mut self) -> Result<Promotion, StoreError> {
        let since = self.plan.due_since();
        let with_ids = events::routine_events_are_logged();
        let promotion = self.shared.store.promote(since, with_ids).await?;
        for id in &promotion.ids {
            events::promoted(&self.shared.settings.worker_id, *id);
        }
        self.plan.next_due(Instant::now(), promotion.next_due);
        Ok(promotion)
    }
}
