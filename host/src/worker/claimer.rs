//! Looks for jobs: when, where, and how many.
//!
//! The poll is the truth: waits of 5, 10, 20 … ms up to the ceiling, and every find starts over. A
//! notification only ends a wait early. Because the claimer asks for notifications before its
//! last look, and then polls at short intervals, a job that slips between the two waits for
//! milliseconds, not for the ceiling.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::{debug, error, info, warn};

use super::Shared;
use super::attempt::Claim;
use super::boottime::BootTime;
use super::lanes::{From, Lanes};
use super::policy::Policy;
use super::poll::Poll;
use super::prefetch::Prefetch;
use super::slots;
use super::wakeups::reconnect_after;
use crate::job::Fence;
use crate::sandbox::HandlerSet;
use crate::store::{ClaimedJob, Lane, Looking, StoreError};

/// Turns are given before their jobs are committed, and those of a few milliseconds are committed in any
/// order. Where there is no backlog, looks begin where the cursors were this long ago, or up to twice as long.
const LOOK_BACK: Duration = Duration::from_millis(100);
/// The short sweep: what was committed late is found within about two of these.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// The long sweep re-reads everything. It comes as often, but takes at most this share of the time:
/// re-reading is dear only while somebody's open transaction keeps old rows from being cleaned up.
const RESTART_SHARE: u32 = 100;
/// At the latest after this long everything is re-read, and so is the catalog of lanes.
const RESTART_WITHIN: Duration = Duration::from_secs(30);
/// Due jobs and run-out leases are looked for from this long before the last look that found none.
const WINDOW_MARGIN: Duration = Duration::from_secs(2);
/// The most lanes with jobs that one peek names: those of one claim.
const PEEKED_MAX: usize = 256;
/// A worker that has found jobs at every look for this long, and has not waited so long in between,
/// asks not to be notified any more.
const BUSY_AFTER: Duration = Duration::from_millis(50);
/// The wish to be notified is written again after this long.
const SLEEP_RENEWED_EVERY: Duration = Duration::from_secs(20);

/// What a look is for.
enum Why {
    /// The last one found as many jobs as it asked for.
    More,
    /// A notification, or something else that happened here.
    Woken,
    /// It is time.
    Poll,
}

struct Claimer<'a> {
    shared: &'a Arc<Shared>,
    lanes: Lanes,
    /// The handlers for which the lanes were decided.
    handlers: Option<Arc<HandlerSet>>,
    poll: Poll,
    prefetch: Prefetch,
    sweep_at: Instant,
    restart_at: Instant,
    catalog_at: Instant,
    look_back_at: Instant,
    due_at: Option<Instant>,
    behind_at: Instant,
    /// When nothing was due any more, and no lease had run out; none: not known.
    none_due_since: Option<Instant>,
    no_orphans_since: Option<Instant>,
    /// When the wish to be notified was last written; none: the producers think it is busy.
    asleep_since: Option<Instant>,
    busy_since: Option<Instant>,
}

/// Claims and dispatches until the worker is told to stop.
pub(super) async fn run(shared: &Arc<Shared>) {
    let now = Instant::now();
    let mut claimer = Claimer {
        shared,
        lanes: Lanes::default(),
        handlers: None,
        poll: Poll::new(shared.settings.poll_min, shared.settings.poll_max),
        prefetch: Prefetch::new(now),
        sweep_at: now,
        restart_at: now,
        catalog_at: now,
        look_back_at: now,
        due_at: None,
        behind_at: now,
        none_due_since: None,
        no_orphans_since: None,
        asleep_since: None,
        busy_since: None,
    };
    claimer.until_stopped().await;
}

impl Claimer<'_> {
    async fn until_stopped(&mut self) {
        let stop = self.shared.stop.drain.clone();
        let mut failures = 0;
        let mut why = Why::Poll;
        // Only the waits are cut short by a stop. A claim that were cut off would be made all the
        // same, and nobody would know of it until its lease runs out.
        loop {
            let Some(wanted) = stop.run_until_cancelled(self.wait_for_room()).await else {
                return;
            };
            // An order to stop at once cuts off the look too: the database may be what hangs.
            let now = &self.shared.stop.now;
            let Some(found) = now.run_until_cancelled(self.look(wanted, &why)).await else {
                return;
            };
            match found {
                Ok(found) => {
                    if failures > 0 {
                        info!("the database answers again");
                    }
                    failures = 0;
                    self.shared.database_answers.store(true, Ordering::Relaxed);
                    if found > 0 {
                        self.poll.reset();
                        self.note_busy().await;
                        // Fewer than asked for: the lanes are empty for now.
                        if found >= wanted {
                            why = Why::More;
                            continue;
                        }
                    } else {
                        self.busy_since = None;
                        if matches!(why, Why::Woken) && self.look_behind_the_cursors() {
                            why = Why::Poll;
                            continue;
                        }
                        if self.fall_asleep().await {
                            // Once more, now that producers know: nothing can slip between.
                            why = Why::Poll;
                            continue;
                        }
                    }
                }
                Err(error) => {
                    self.shared.database_answers.store(false, Ordering::Relaxed);
                    // The first failure may be one broken connection of the pool.
                    if failures > 0 {
                        let wait = reconnect_after(failures - 1, rand::random());
                        warn!(%error, wait_ms = wait.as_millis(), "cannot claim; trying again");
                        // The listening connection stands again: so does the server.
                        let back = tokio::time::timeout(wait, self.shared.wakeups.rung());
                        let _ = stop.run_until_cancelled(back).await;
                    }
                    failures += 1;
                    self.start_over();
                    why = Why::Poll;
                    continue;
                }
            }
            why = match stop.run_until_cancelled(self.wait()).await {
                Some(true) => Why::Woken,
                Some(false) | None => Why::Poll,
            };
        }
    }

    /// Waits until there is room for a worthwhile claim; returns how many jobs it is for.
    async fn wait_for_room(&mut self) -> usize {
        let slots = &self.shared.slots;
        loop {
            let ahead = self.prefetch.jobs(slots.ended(), Instant::now());
            if let Some(room) = slots.room(ahead) {
                return room;
            }
            slots.freed().await;
        }
    }

    /// One look. Returns how many jobs were found.
    async fn look(&mut self, wanted: usize, why: &Why) -> Result<usize, StoreError> {
        let began = Instant::now();
        self.serve();
        if began >= self.look_back_at {
            self.look_back_at = began + LOOK_BACK;
            self.lanes.look_back();
        }
        let noted = matches!(why, Why::Woken) && self.take_notes().await?;
        // A job that somebody says is there comes first, and the sweep with the next look.
        let patience = match why {
            Why::Woken => SWEEP_EVERY,
            Why::More | Why::Poll => Duration::ZERO,
        };
        if began >= self.sweep_at + patience {
            self.sweep_at = began + SWEEP_EVERY;
            let restart = began >= self.restart_at;
            if began >= self.catalog_at {
                self.catalog_at = began + RESTART_WITHIN;
                self.lanes.forget_catalog();
            }
            if restart {
                self.lanes.restart();
                self.none_due_since = None;
                self.no_orphans_since = None;
            } else {
                self.lanes.rewind();
            }
            let idle = !noted && !matches!(why, Why::More);
            let found = self.peek_and_claim(wanted, idle).await?;
            if found < wanted && self.lanes.fit_one_claim() {
                self.lanes.swept();
            }
            if restart {
                let again = began.elapsed() * RESTART_SHARE;
                self.restart_at = Instant::now() + again.min(RESTART_WITHIN);
            }
            return Ok(found);
        }
        match why {
            Why::More => {
                if self.due_at.is_some_and(|due| began >= due) {
                    self.promote().await?;
                }
                self.claim(wanted, From::Cursor).await
            }
            Why::Woken if noted => self.claim(wanted, From::Recent).await,
            Why::Woken | Why::Poll => self.peek_and_claim(wanted, true).await,
        }
    }

    /// Takes in what the notifications say; true where it is known that there is something to claim,
    /// and nothing else.
    async fn take_notes(&mut self) -> Result<bool, StoreError> {
        let Some(lanes) = self.shared.wakeups.take() else {
            return Ok(false);
        };
        if !lanes.iter().all(|lane| self.lanes.knows(*lane)) {
            self.read_catalog().await?;
        }
        let mut served = false;
        for lane in lanes {
            served |= self.lanes.touch(lane);
        }
        Ok(served)
    }

    /// Asks whether there is anything to do at all, in one statement, and does it. Where the last look
    /// was filled, a claim is made in any case.
    async fn peek_and_claim(&mut self, wanted: usize, idle: bool) -> Result<usize, StoreError> {
        let asked = Instant::now();
        let lanes = if idle {
            self.lanes.all()
        } else {
            self.lanes.idle()
        };
        let peek = self
            .shared
            .store
            .peek(&Looking {
                lanes: &lanes,
                catalog_after: self.lanes.read_after(),
                catalog_rows: self.lanes.read_rows(),
                orphaned_within: window(self.no_orphans_since),
                due_within: window(self.none_due_since),
                most: PEEKED_MAX,
            })
            .await?;
        self.due_at = peek.next_due.map(|wait| Instant::now() + wait);
        let mut ready = !peek.ready.is_empty();
        if idle {
            self.lanes.rest();
        }
        for lane in peek.ready {
            self.lanes.touch(lane);
        }
        if peek.catalog_changed {
            ready |= self.read_catalog().await?;
        }
        if peek.due {
            ready |= self.promote().await?;
        } else {
            self.none_due_since = Some(asked);
        }
        let mut found = 0;
        if peek.orphans {
            // An orphan that cannot be adopted must not keep the others from being claimed.
            match self.adopt(wanted).await {
                Ok(adopted) => found += adopted,
                Err(error) if error.is_transient() => return Err(error),
                Err(error) => {
                    error!(%error, "cannot adopt jobs whose worker is gone; trying again in a second")
                }
            }
        } else {
            self.no_orphans_since = Some(asked);
        }
        if found < wanted && (ready || !idle) {
            found += self.claim(wanted - found, From::Recent).await?;
        }
        Ok(found)
    }

    /// Reads what is new in the catalog of lanes; true where there is something.
    async fn read_catalog(&mut self) -> Result<bool, StoreError> {
        let lanes = self
            .shared
            .store
            .lanes_after(self.lanes.read_after())
            .await?;
        let news = self.lanes.learn(lanes);
        if news {
            self.handlers = None;
            self.serve();
        }
        Ok(news)
    }

    /// Gives due jobs their turn; true where there were any.
    async fn promote(&mut self) -> Result<bool, StoreError> {
        let within = window(self.none_due_since);
        let promotion = self.shared.store.promote(within).await?;
        self.due_at = promotion.next_due.map(|wait| Instant::now() + wait);
        Ok(promotion.promoted > 0)
    }

    /// Orphans go first (SPEC row D4): they are claimed before anything queued is looked at.
    async fn adopt(&mut self, wanted: usize) -> Result<usize, StoreError> {
        let shared = self.shared;
        let fence = Fence(rand::random());
        let asked = BootTime::now();
        let jobs = shared
            .store
            .adopt(
                shared.incarnation,
                fence,
                &self.lanes.all(),
                wanted,
                shared.settings.lost_max,
                window(self.no_orphans_since),
            )
            .await?;
        if !jobs.is_empty() {
            info!(jobs = jobs.len(), "adopted jobs whose worker is gone");
        }
        Ok(self.dispatch(jobs, asked))
    }

    async fn claim(&mut self, wanted: usize, from: From) -> Result<usize, StoreError> {
        let shared = self.shared;
        let orders = self.lanes.orders(from);
        if orders.is_empty() {
            return Ok(0);
        }
        let fence = Fence(rand::random());
        let asked = BootTime::now();
        let jobs = shared
            .store
            .claim(shared.incarnation, fence, &orders, wanted)
            .await?;
        self.lanes.claimed(&orders, &jobs, wanted);
        let bytes = jobs.iter().map(|job| job.payload.0.len()).sum();
        self.prefetch.claimed(jobs.len(), bytes);
        Ok(self.dispatch(jobs, asked))
    }

    fn dispatch(&self, jobs: Vec<ClaimedJob>, asked: BootTime) -> usize {
        let received = Instant::now();
        let count = jobs.len();
        self.shared.meters.claimed.increment(count as u64);
        let claims = jobs
            .into_iter()
            .map(|job| {
                let (lane, lease) = self
                    .lanes
                    .get(job.lane)
                    .expect("claims are made from lanes that are served");
                Claim {
                    job,
                    lane,
                    asked,
                    received,
                    lease,
                }
            })
            .collect();
        slots::start(self.shared, claims);
        count
    }

    /// Decides which lanes are served, where that may have changed: handlers that are loaded, queues
    /// and tags of the settings.
    fn serve(&mut self) {
        let handlers = self.shared.catalog.current();
        if self
            .handlers
            .as_ref()
            .is_some_and(|before| Arc::ptr_eq(before, &handlers))
        {
            return;
        }
        let settings = &self.shared.settings;
        self.lanes.serve(|lane: &Lane| {
            let handler = handlers.get(&lane.handler)?;
            let queue = settings.queues.is_empty() || settings.queues.contains(&lane.queue);
            let tags = lane.tags.iter().all(|tag| settings.tags.contains(tag));
            let policy = Policy::resolve(&handler.manifest, &settings.overrides);
            (queue && tags).then(|| i64::try_from(policy.lease.as_millis()).unwrap_or(i64::MAX))
        });
        self.handlers = Some(handlers);
    }

    /// Waits for a notification, the poll, or the next job that is due, whichever comes first; true
    /// for a notification.
    async fn wait(&mut self) -> bool {
        let began = Instant::now();
        let listening = self.shared.listening.load(Ordering::Relaxed);
        let mut wait = self.poll.wait(listening, rand::random());
        if self.asleep_since.is_none() && listening {
            // Producers do not know that this worker waits; the next look tells them if it finds nothing.
            wait = wait.min(BUSY_AFTER);
        }
        if let Some(due) = self.due_at {
            wait = wait.min(due.saturating_duration_since(Instant::now()));
        }
        // The timer may not fire before its time: S5 holds by the database's clock anyway.
        let woken = tokio::time::timeout(wait, async {
            loop {
                self.shared.wakeups.rung().await;
                // Jobs of other workers' lanes end no wait.
                let lanes = &self.lanes;
                if self
                    .shared
                    .wakeups
                    .keep(|lane| !lanes.knows(lane) || lanes.serves(lane))
                {
                    return;
                }
            }
        })
        .await
        .is_ok();
        if woken {
            debug!("woken");
            self.poll.reset();
        }
        if began.elapsed() >= BUSY_AFTER {
            self.busy_since = None;
        }
        woken
    }

    /// Somebody says that there is a job, and it is not where one was looked for: its producer may
    /// have committed late, behind the cursors. At most once for each short sweep.
    fn look_behind_the_cursors(&mut self) -> bool {
        let now = Instant::now();
        if now < self.behind_at {
            return false;
        }
        self.behind_at = now + SWEEP_EVERY;
        self.lanes.restart();
        true
    }

    /// Asks producers for notifications; true when they did not know before.
    async fn fall_asleep(&mut self) -> bool {
        let shared = self.shared;
        if !shared.listening.load(Ordering::Relaxed) {
            self.asleep_since = None;
            return false;
        }
        // The server may have been down in between, and forgets sleepers when it crashes.
        if shared.listens_anew.swap(false, Ordering::Relaxed) {
            self.asleep_since = None;
        }
        let news = self.asleep_since.is_none();
        if self
            .asleep_since
            .is_some_and(|since| since.elapsed() < SLEEP_RENEWED_EVERY)
        {
            return false;
        }
        let any = ["*".to_string()];
        let queues = if shared.settings.queues.is_empty() {
            &any[..]
        } else {
            &shared.settings.queues
        };
        let how_long = shared.settings.poll_max + 3 * SLEEP_RENEWED_EVERY;
        match shared
            .store
            .sleep(shared.incarnation, queues, how_long)
            .await
        {
            Ok(()) => {
                self.asleep_since = Some(Instant::now());
                news
            }
            Err(error) => {
                warn!(%error, "cannot ask for notifications; polling");
                false
            }
        }
    }

    /// Tells producers, once it is clear that this worker does not sleep, to save the NOTIFY.
    async fn note_busy(&mut self) {
        let since = *self.busy_since.get_or_insert_with(Instant::now);
        if self.asleep_since.is_some() && since.elapsed() >= BUSY_AFTER {
            match self.shared.store.awake(self.shared.incarnation).await {
                Ok(()) => self.asleep_since = None,
                Err(error) => debug!(%error, "could not say that this worker is busy"),
            }
        }
    }

    /// After an error nothing that is remembered of the database may be trusted.
    fn start_over(&mut self) {
        let now = Instant::now();
        self.lanes.forget();
        self.sweep_at = now;
        self.restart_at = now;
        self.catalog_at = now;
        self.asleep_since = None;
        self.busy_since = None;
    }
}

/// How far back to look for what was not there `then`; none: everything.
fn window(then: Option<Instant>) -> Option<Duration> {
    then.map(|then| then.elapsed() + WINDOW_MARGIN)
}
