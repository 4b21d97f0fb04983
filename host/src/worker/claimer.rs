//! Looks for jobs: when, where, and how many.
//!
//! The poll is the truth: waits of 5, 10, 20 … ms up to the ceiling, and every find starts over. A
//! notification only ends a wait early. Because the claimer asks for notifications before its
//! last look, and then polls at short intervals, a job that slips between the two waits for
//! milliseconds, not for the ceiling.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use metrics::counter;
use tracing::{debug, info, warn};

use super::Shared;
use super::attempt::{self, Claim};
use super::boottime::BootTime;
use super::lanes::Lanes;
use super::policy::Policy;
use super::poll::Poll;
use super::prefetch::Prefetch;
use super::wakeups::reconnect_after;
use crate::job::Fence;
use crate::store::{ClaimedJob, Lane, StoreError};

/// The short sweep: what was committed late is found within about two of these.
const SWEEP_EVERY: Duration = Duration::from_secs(1);
/// The long sweep: finds whatever the short one does not.
const RESTART_EVERY: Duration = Duration::from_secs(30);
/// A worker that has found jobs at every look for this long asks not to be notified any more.
const BUSY_AFTER: Duration = Duration::from_millis(50);
/// The wish to be notified is written again after this long.
const SLEEP_RENEWED_EVERY: Duration = Duration::from_secs(20);

struct Claimer<'a> {
    shared: &'a Arc<Shared>,
    lanes: Lanes,
    poll: Poll,
    prefetch: Prefetch,
    sweep_at: Instant,
    restart_at: Instant,
    due_at: Option<Instant>,
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
        poll: Poll::new(shared.settings.poll_min, shared.settings.poll_max),
        prefetch: Prefetch::new(now),
        sweep_at: now,
        restart_at: now,
        due_at: Some(now),
        asleep_since: None,
        busy_since: None,
    };
    claimer.until_stopped().await;
}

impl Claimer<'_> {
    async fn until_stopped(&mut self) {
        let stop = self.shared.stop.drain.clone();
        let mut failures = 0;
        // True after a wait: something may have changed outside.
        let mut fresh = true;
        // Only the waits are cut short by a stop. A claim that were cut off would be made all the
        // same, and nobody would know of it until its lease runs out.
        loop {
            let Some(wanted) = stop.run_until_cancelled(self.wait_for_room()).await else {
                return;
            };
            match self.look(wanted, fresh).await {
                Ok(found) => {
                    if failures > 0 {
                        info!("the database answers again");
                    }
                    failures = 0;
                    self.shared.database_answers.store(true, Ordering::Relaxed);
                    if found > 0 {
                        self.poll.reset();
                        self.note_busy().await;
                        fresh = false;
                        // Fewer than asked for: the lanes are empty for now.
                        if found >= wanted {
                            continue;
                        }
                    } else {
                        self.busy_since = None;
                        if self.fall_asleep().await {
                            // Once more, now that producers know: nothing can slip between.
                            fresh = true;
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
                        let _ = stop.run_until_cancelled(tokio::time::sleep(wait)).await;
                    }
                    failures += 1;
                    self.start_over();
                    fresh = true;
                    continue;
                }
            }
            let _ = stop.run_until_cancelled(self.wait()).await;
            fresh = true;
        }
    }

    /// Waits until there is room for a worthwhile claim; returns how many jobs it is for.
    async fn wait_for_room(&mut self) -> usize {
        loop {
            let freed = self.shared.freed.notified();
            let ended = self.shared.ended.load(Ordering::Relaxed);
            let ahead = self.prefetch.jobs(ended, Instant::now());
            let in_hand = self.shared.in_hand.load(Ordering::Relaxed);
            let room = (self.shared.settings.slots + ahead).saturating_sub(in_hand);
            if room >= (ahead / 2).max(1) {
                return room;
            }
            freed.await;
        }
    }

    /// One look: sweeps where they are due, then a claim. Returns how many jobs were found.
    async fn look(&mut self, wanted: usize, fresh: bool) -> Result<usize, StoreError> {
        let now = Instant::now();
        let mut found = 0;
        let sweep = now >= self.sweep_at;
        if sweep {
            self.sweep_at = now + SWEEP_EVERY;
            if now >= self.restart_at {
                self.restart_at = now + RESTART_EVERY;
                self.lanes.restart();
            } else {
                self.lanes.rewind();
            }
        }
        if sweep || fresh {
            let lanes = self.shared.store.lanes_after(self.lanes.read_after());
            let (lanes, promotion) = tokio::try_join!(lanes, self.shared.store.promote())?;
            self.due_at = promotion.next_due.map(|wait| Instant::now() + wait);
            self.lanes.learn(lanes);
            self.serve();
        } else if self.due_at.is_some_and(|due| now >= due) {
            let promotion = self.shared.store.promote().await?;
            self.due_at = promotion.next_due.map(|wait| Instant::now() + wait);
        }
        if sweep && self.lanes.rounds() > 0 {
            found += self.adopt(wanted).await?;
        }
        for _ in 0..self.lanes.rounds() {
            if found >= wanted {
                break;
            }
            found += self.claim(wanted - found).await?;
        }
        Ok(found)
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
            )
            .await?;
        if !jobs.is_empty() {
            info!(jobs = jobs.len(), "adopted jobs whose worker is gone");
        }
        Ok(self.dispatch(jobs, asked))
    }

    async fn claim(&mut self, wanted: usize) -> Result<usize, StoreError> {
        let shared = self.shared;
        let orders = self.lanes.orders();
        let fence = Fence(rand::random());
        let asked = BootTime::now();
        let jobs = shared
            .store
            .claim(shared.incarnation, fence, &orders, wanted)
            .await?;
        for job in &jobs {
            self.lanes.advance(job.lane, job.turn);
        }
        Ok(self.dispatch(jobs, asked))
    }

    fn dispatch(&self, jobs: Vec<ClaimedJob>, asked: BootTime) -> usize {
        let received = Instant::now();
        let count = jobs.len();
        self.shared.in_hand.fetch_add(count, Ordering::Relaxed);
        counter!("rouse_jobs_claimed_total").increment(count as u64);
        for job in jobs {
            let (lane, lease) = self
                .lanes
                .get(job.lane)
                .expect("claims are made from lanes that are served");
            let claim = Claim {
                job,
                lane,
                asked,
                received,
                lease,
            };
            self.shared
                .attempts
                .spawn(attempt::run(self.shared.clone(), claim));
        }
        count
    }

    /// Decides which lanes are served: handlers that are loaded, queues and tags of the settings.
    fn serve(&mut self) {
        let handlers = self.shared.catalog.current();
        let settings = &self.shared.settings;
        self.lanes.serve(|lane: &Lane| {
            let handler = handlers.get(&lane.handler)?;
            let queue = settings.queues.is_empty() || settings.queues.contains(&lane.queue);
            let tags = lane.tags.iter().all(|tag| settings.tags.contains(tag));
            let policy = Policy::resolve(&handler.manifest, &settings.overrides);
            (queue && tags).then(|| i64::try_from(policy.lease.as_millis()).unwrap_or(i64::MAX))
        });
    }

    /// Waits for a notification, the poll, or the next job that is due, whichever comes first.
    async fn wait(&mut self) {
        let mut wait = self.poll.wait(rand::random());
        if let Some(due) = self.due_at {
            wait = wait.min(due.saturating_duration_since(Instant::now()));
        }
        // The timer may not fire before its time: S5 holds by the database's clock anyway.
        if tokio::time::timeout(wait, self.shared.look.notified())
            .await
            .is_ok()
        {
            debug!("woken");
            self.poll.reset();
        }
    }

    /// Asks producers for notifications; true when they did not know before.
    async fn fall_asleep(&mut self) -> bool {
        let shared = self.shared;
        if !shared.listening.load(Ordering::Relaxed) {
            self.asleep_since = None;
            return false;
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
        self.sweep_at = now;
        self.restart_at = now;
        self.due_at = Some(now);
        self.asleep_since = None;
        self.busy_since = None;
    }
}
