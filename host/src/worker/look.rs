//! Looks for jobs: what it asks the database, in which order.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tracing::error;

use super::Shared;
use super::claims::{Claims, Found};
use super::events;
use super::lanes::After;
use super::writers::Writers;
use crate::job::LaneId;
use crate::store::{Looking, StoreError};

/// Turns are given before their jobs are committed, and those of a few milliseconds are committed in any
/// order. Where there is no backlog, looks begin where the cursors were this long ago, or up to twice as long.
const LOOK_BACK: Duration = Duration::from_millis(100);
/// The short sweep: what was committed late is found within about two of these.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// The long sweep re-reads everything. It comes where a transaction has ended whose jobs the short sweep does not find, but takes
/// at most one part in so many of the time: re-reading is dear while somebody's open transaction keeps old rows from being cleaned up.
const RESTART_SHARE: u32 = 20;
/// It waits no longer than this; and after this long the catalog of lanes is re-read.
const RESTART_WITHIN: Duration = Duration::from_secs(30);
/// It also comes without any reason, each [`RESTART_WITHIN`], but takes at most one part in so many of the time then.
const RESTART_ANYWAY_SHARE: u32 = 100;
/// And at the latest after this long: what it has taken may have been a server that was slow once.
const RESTART_ANYWAY_WITHIN: Duration = Duration::from_secs(300);
/// Due jobs and run-out leases are looked for from this long before the last look that found none.
const WINDOW_MARGIN: Duration = Duration::from_secs(2);
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
    look_back_at: Instant,
    sweep_at: Instant,
    /// Somebody has committed late.
    is_behind: bool,
    /// Before then no restart for that reason.
    restart_at: Instant,
    /// From then on one without a reason.
    restart_anyway_at: Instant,
    writers: Writers,
    catalog_at: Instant,
    /// Before then no notification brings a sweep.
    behind_at: Instant,
    /// Before then it is not asked what has waited too long.
    overdue_at: Instant,
    /// From then on it is asked from the start of the lanes once.
    overdue_anew_at: Instant,
    due_at: Option<Instant>,
    /// When nothing was due any more; none: not known.
    none_due_since: Option<Instant>,
    /// When no lease had ended, by the database's clock; none: not known.
    no_orphans_since: Option<SystemTime>,
    /// The last turn that was given out when a look last asked; none: not known, or a queue was paused.
    turn: Option<i64>,
    /// That turn at the last two sweeps, the older one first.
    swept_turns: [Option<i64>; 2],
    /// The last peek has named as many lanes as it may, and perhaps not looked into the others.
    is_cut: bool,
}

impl<'a> Looks<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        let now = Instant::now();
        Self {
            shared,
            claims: Claims::new(shared),
            look_back_at: now,
            sweep_at: now,
            is_behind: false,
            restart_at: now,
            restart_anyway_at: now,
            writers: Writers::default(),
            catalog_at: now,
            behind_at: now,
            overdue_at: now,
            overdue_anew_at: now,
            due_at: None,
            none_due_since: None,
            no_orphans_since: None,
            turn: None,
            swept_turns: [None; 2],
            is_cut: false,
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
        self.due_at
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
        self.restart_now();
    }

    /// Makes the next look that is no answer to a notification a sweep from the start.
    fn restart_now(&mut self) {
        let now = Instant::now();
        self.sweep_at = now;
        self.is_behind = true;
        self.restart_at = now;
    }

    /// Somebody says that there is a job, and it is not where one was looked for: its producer may
    /// have committed late, behind the cursors, or after it was due. True: the next look is to be
    /// made at once, and is a sweep from the start. At most once for each short sweep.
    pub(super) fn behind_the_cursors(&mut self) -> bool {
        let now = Instant::now();
        if now < self.behind_at {
            return false;
        }
        self.behind_at = now + SWEEP_EVERY;
        self.restart_now();
        true
    }

    /// One look.
    pub(super) async fn look(&mut self, wanted: usize, why: Why) -> Result<Found, StoreError> {
        let began = Instant::now();
        if self.claims.serve() {
            self.writers.lanes_are_new();
        }
        if began >= self.look_back_at {
            self.look_back_at = began + LOOK_BACK;
            self.claims.lanes.look_back();
        }
        // Whether it is known that there is something to claim, and how long a sweep may wait for it.
        let (known, patience) = match why {
            Why::More => (true, Duration::ZERO),
            // A job that somebody says is there comes first, and the sweep with the next look.
            Why::Woken => (self.take_notes().await?, SWEEP_EVERY),
            Why::Poll => (false, Duration::ZERO),
        };
        if began >= self.sweep_at + patience {
            return self.sweep(began, wanted, known).await;
        }
        if !known {
            return Ok(self.peek_and_claim(wanted, false, false).await?.0);
        }
        if self.due_at.is_some_and(|due| began >= due) {
            self.promote().await?;
        }
        let after = match why {
            Why::More => After::Cursor,
            Why::Woken | Why::Poll => After::Recent,
        };
        self.claims.claim(wanted, after).await
    }

    /// A look that goes back behind the cursors: a little, or to the start.
    async fn sweep(
        &mut self,
        began: Instant,
        wanted: usize,
        known: bool,
    ) -> Result<Found, StoreError> {
        self.sweep_at = began + SWEEP_EVERY;
        let restart = began >= self.restart_anyway_at || self.is_behind && began >= self.restart_at;
        if began >= self.catalog_at {
            self.catalog_at = began + RESTART_WITHIN;
            self.claims.lanes.forget_catalog();
        }
        if restart {
            self.is_behind = false;
            self.claims.lanes.restart();
            self.none_due_since = None;
            self.no_orphans_since = None;
        } else {
            // What was numbered before then and was not committed at the last sweep is a transaction that it has seen.
            let [older, newer] = self.swept_turns;
            let begins_at = if self.writers.all_are_late() {
                newer
            } else {
                older
            };
            self.claims.lanes.rewind(begins_at.unwrap_or(i64::MIN));
        }
        // Of the sweep before: what was numbered since may not be committed yet.
        let empty_to = self.swept_turns[1];
        let (found, writers) = self.peek_and_claim(wanted, known, true).await?;
        self.swept_turns = [empty_to, self.turn];
        if self.writers.seen(writers) {
            self.is_behind = true;
            // After a restart the next one comes with the next sweep.
            if !restart {
                self.sweep_at = Instant::now();
            }
        }
        // A restart that has not looked into all lanes is none.
        self.is_behind |= restart && self.is_cut;
        if !found.fills(wanted) && self.claims.lanes.fit_one_claim() {
            self.claims.lanes.swept(empty_to.min(self.turn));
        }
        if found.fills(wanted) && Instant::now() >= self.overdue_at {
            // Some lanes were not reached, and may not be for long.
            self.look_for_overdue(restart).await;
        }
        if restart {
            let (now, took) = (Instant::now(), began.elapsed());
            self.restart_at = now + (took * RESTART_SHARE).min(RESTART_WITHIN);
            let anyway = (took * RESTART_ANYWAY_SHARE).clamp(RESTART_WITHIN, RESTART_ANYWAY_WITHIN);
            self.restart_anyway_at = now + anyway;
        }
        Ok(found)
    }

    /// Asks what has waited too long. What was found is found, whatever comes of that; and where an open transaction keeps many
    /// dead rows it is dear, as a restart is, and takes as small a share of the time.
    async fn look_for_overdue(&mut self, restart: bool) {
        let asked = Instant::now();
        let after = match restart && asked >= self.overdue_anew_at {
            true => {
                self.overdue_anew_at = asked + RESTART_WITHIN;
                After::Recent
            }
            false => After::Reached,
        };
        if let Err(error) = self.claims.look_for_overdue(after).await {
            error!(%error, "cannot ask which jobs have waited too long; they keep their place until that is answered");
        }
        let again = asked.elapsed() * RESTART_SHARE;
        self.overdue_at = Instant::now() + again.min(RESTART_WITHIN);
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
    /// that there is something to claim, a claim is made in any case. Of a sweep, returns the transactions that have written and are in
    /// progress, too.
    async fn peek_and_claim(
        &mut self,
        wanted: usize,
        known: bool,
        is_sweep: bool,
    ) -> Result<(Found, Vec<i64>), StoreError> {
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
                due_within: window(self.none_due_since),
                most: PEEKED_MAX,
                with_writers: is_sweep,
            })
            .await?;
        self.turn = peek.turn;
        self.is_cut = peek.ready.len() >= PEEKED_MAX;
        self.due_at = peek.next_due.map(|wait| Instant::now() + wait);
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
            self.none_due_since = Some(asked);
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
        Ok((found, peek.writers.unwrap_or_default()))
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
        let within = window(self.none_due_since);
        let tell = events::all_are_heard();
        let promotion = self.shared.store.promote(within, tell).await?;
        for id in &promotion.ids {
            events::promoted(&self.shared.settings.worker_id, *id);
        }
        self.due_at = promotion.next_due.map(|wait| Instant::now() + wait);
        Ok(promotion.promoted > 0)
    }
}

/// How far back to look for what was not there `then`; none: everything.
fn window(then: Option<Instant>) -> Option<Duration> {
    then.map(|then| then.elapsed() + WINDOW_MARGIN)
}
