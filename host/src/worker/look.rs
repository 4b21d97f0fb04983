//! Looks for jobs: what it asks the database, in which order.

use std::sync::Arc;
use std::time::{Instant, SystemTime};

use tracing::error;

use super::Shared;
use super::claims::{Claims, Found};
use super::events;
use super::lanes::After;
use super::schedule::{Schedule, Step, Sweep, WINDOW_MARGIN};
use super::writers::Writers;
use crate::job::LaneId;
use crate::store::{Looking, StoreError};

/// The most lanes with jobs that one peek names: those of one claim.
const PEEKED_MAX: usize = 256;

/// What a look is for.
#[derive(Debug, Clone, Copy)]
pub(super) enum Why {
    /// The last one found as many jobs as it asked for.
    More,
    /// A notification, or something else that happened here.
    Woken,
    /// It is time.
    Poll,
}

/// What is remembered from one look to the next.
pub(super) struct Looks<'a> {
    shared: &'a Arc<Shared>,
    claims: Claims<'a>,
    schedule: Schedule,
    writers: Writers,
    /// When no lease had ended, by the database's clock; none: not known.
    no_orphans_since: Option<SystemTime>,
    /// The last turn that was given out, at the last two sweeps, the older one first; none: not known, or a queue was paused.
    swept_turns: [Option<i64>; 2],
}

/// What a look has found, and what the peek has said besides.
struct Looked {
    found: Found,
    /// As in [`Peek`](crate::store::Peek).
    turn: Option<i64>,
    /// Transactions that have written and are in progress, where they were asked for.
    writers: Vec<i64>,
    /// The peek has named as many lanes as it may, and perhaps not looked into the others.
    is_cut: bool,
}

impl<'a> Looks<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            claims: Claims::new(shared),
            schedule: Schedule::new(Instant::now(), shared.settings.intervals),
            writers: Writers::default(),
            no_orphans_since: None,
            swept_turns: [None; 2],
        }
    }

    /// How many jobs to claim beyond the free slots.
    pub(super) fn ahead(&mut self) -> usize {
        self.claims.ahead()
    }

    /// The most that one look is for.
    pub(super) fn wanted_max(&self) -> usize {
        self.claims.claim_max()
    }

    /// When the next scheduled job or retry is due; none: none is known.
    pub(super) fn due_at(&self) -> Option<Instant> {
        self.schedule.due_at()
    }

    /// False where it is known that this worker does not serve the lane.
    pub(super) fn concern(&self, lane: LaneId) -> bool {
        !self.claims.lanes.knows(lane) || self.claims.lanes.serves(lane)
    }

    /// After an error nothing that is remembered of the database may be trusted.
    pub(super) fn start_over(&mut self) {
        self.claims.start_over();
        self.swept_turns = [None; 2];
        self.writers = Writers::default();
        self.schedule.start_over(Instant::now());
    }

    /// A notification has brought a look, and that has found nothing. True: the next look is to be made at once, and is a sweep from the
    /// start.
    pub(super) fn behind_the_cursors(&mut self) -> bool {
        self.schedule.is_behind(Instant::now())
    }

    /// One look.
    pub(super) async fn look(&mut self, wanted: usize, why: Why) -> Result<Found, StoreError> {
        let started = Instant::now();
        if self.claims.serve() {
            self.writers.lanes_are_new();
        }
        if self.schedule.looks_back(started) {
            self.claims.lanes.look_back();
        }
        // Whether it is known that there is something to claim.
        let known = match why {
            Why::More => true,
            Why::Woken => self.take_notes().await?,
            Why::Poll => false,
        };
        match self.schedule.next(started, why, known) {
            Step::Sweep(sweep) => self.sweep(sweep, wanted, known).await,
            Step::Peek => Ok(self.peek_and_claim(wanted, false, false).await?.found),
            Step::Claim { after, promote } => {
                if promote {
                    self.promote().await?;
                }
                self.claims.claim(wanted, after).await
            }
        }
    }

    /// A look that goes back behind the cursors.
    async fn sweep(
        &mut self,
        sweep: Sweep,
        wanted: usize,
        known: bool,
    ) -> Result<Found, StoreError> {
        if sweep.rereads_catalog {
            self.claims.lanes.forget_catalog();
        }
        let [older, newer] = self.swept_turns;
        if sweep.restart {
            self.claims.lanes.restart();
            self.no_orphans_since = None;
        } else {
            // What was numbered before then and was not committed at the last sweep is a transaction that it has seen.
            let starts_at = if self.writers.all_are_late() {
                newer
            } else {
                older
            };
            self.claims.lanes.rewind(starts_at.unwrap_or(i64::MIN));
        }
        let looked = self.peek_and_claim(wanted, known, true).await?;
        self.swept_turns = [newer, looked.turn];
        let is_late = self.writers.seen(looked.writers);
        let found = looked.found;
        if !found.fills(wanted) && self.claims.lanes.fit_one_claim() {
            // Not further than at the sweep before: what was numbered since may not be committed yet.
            self.claims.lanes.swept(newer.min(looked.turn));
        }
        // Some lanes were perhaps not reached, and may not be for long.
        if found.fills(wanted)
            && let Some(after) = self.schedule.asks_overdue(Instant::now(), sweep)
        {
            self.look_for_overdue(after).await;
        }
        self.schedule
            .swept(Instant::now(), sweep, is_late, looked.is_cut);
        Ok(found)
    }

    /// Asks what has waited too long. What was found is found, whatever comes of that.
    async fn look_for_overdue(&mut self, after: After) {
        let asked = Instant::now();
        if let Err(error) = self.claims.look_for_overdue(after).await {
            error!(%error, "cannot ask which jobs have waited too long; they keep their place until that is answered");
        }
        self.schedule.asked_overdue(asked, Instant::now());
    }

    /// Takes in what the notifications say; true where it is known that there is something to claim,
    /// and nothing else.
    async fn take_notes(&mut self) -> Result<bool, StoreError> {
        let Some(lanes) = self.shared.wakeups.take() else {
            return Ok(false);
        };
        if !lanes.iter().all(|lane| self.claims.lanes.knows(*lane)) {
            self.read_catalog().await?;
        }
        let mut served = false;
        for lane in lanes {
            served |= self.claims.touch(lane);
        }
        Ok(served)
    }

    /// Asks whether there is anything to do at all, in one statement, and does it. Where it is known
    /// that there is something to claim, a claim is made in any case. A sweep asks for the transactions that write, too.
    async fn peek_and_claim(
        &mut self,
        wanted: usize,
        known: bool,
        is_sweep: bool,
    ) -> Result<Looked, StoreError> {
        let asked = Instant::now();
        let lanes = &self.claims.lanes;
        let looked_at = if known { lanes.idle() } else { lanes.all() };
        let orphaned_since = self.no_orphans_since.map(|then| then - WINDOW_MARGIN);
        let peek = self
            .shared
            .store
            .peek(&Looking {
                lanes: &looked_at,
                catalog_after: lanes.read_after(),
                catalog_rows: lanes.read_rows(),
                orphaned_since,
                due_within: self.schedule.due_within(asked),
                most: PEEKED_MAX,
                with_writers: is_sweep,
            })
            .await?;
        let is_cut = peek.ready.len() >= PEEKED_MAX;
        self.schedule.next_due(Instant::now(), peek.next_due);
        let mut ready = known || !peek.ready.is_empty();
        if !known {
            self.claims.lanes.rest();
        }
        for lane in peek.ready {
            self.claims.lanes.touch(lane);
        }
        if peek.catalog_changed {
            ready |= self.read_catalog().await?;
        }
        if peek.due {
            ready |= self.promote().await?;
        } else {
            self.schedule.none_was_due(asked);
        }
        let mut found = Found::default();
        if peek.orphans {
            found += self
                .claims
                .adopt(wanted, orphaned_since, peek.looked_at)
                .await?;
        } else {
            self.no_orphans_since = Some(peek.looked_at);
            self.claims.without_orphans(peek.looked_at);
        }
        // No queued jobs before the orphans that a cut adoption has left.
        if !found.is_cut && found.jobs < wanted {
            let rest = wanted - found.jobs;
            found += match ready {
                true => self.claims.claim(rest, After::Recent).await?,
                // The peek does not see what is found by its source.
                false => self.claims.claim_by_source(rest).await?,
            };
        }
        Ok(Looked {
            found,
            turn: peek.turn,
            writers: peek.writers.unwrap_or_default(),
            is_cut,
        })
    }

    /// Reads what is new in the catalog of lanes; true where there is something.
    async fn read_catalog(&mut self) -> Result<bool, StoreError> {
        let is_new = self.claims.read_catalog().await?;
        if is_new {
            self.writers.lanes_are_new();
        }
        Ok(is_new)
    }

    /// Gives due jobs their turn; true where there were any.
    async fn promote(&mut self) -> Result<bool, StoreError> {
        let within = self.schedule.due_within(Instant::now());
        let tell = events::all_are_logged();
        let promotion = self.shared.store.promote(within, tell).await?;
        for id in &promotion.ids {
            events::promoted(&self.shared.settings.worker_id, *id);
        }
        self.schedule.next_due(Instant::now(), promotion.next_due);
        Ok(promotion.promoted > 0)
    }
}
