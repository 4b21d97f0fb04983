//! Decides when to look for jobs.
//!
//! Correctness depends only on the poll: waits of 5, 10, 20 … ms up to the maximum, which start over after every look
//! that finds a job. A notification only ends a wait early. The claimer requests notifications before its last look,
//! and then polls at short intervals: a job that is committed in between waits for milliseconds, not for the longest
//! wait.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::{debug, info};

use super::Shared;
use super::claims::Found;
use super::look::Looks;
use super::look_plan::Trigger;
use super::poll::Poll;
use super::reach::warn_unless_unreachable;
use super::sleeper::{BUSY_AFTER, Sleeper};
use crate::sandbox::BootTime;
use crate::store::StoreError;
use crate::store::connect::backoff;

/// How often the host's memory is checked while it is short.
const MEMORY_CHECK_EVERY: Duration = Duration::from_millis(50);
/// How often to check whether a heartbeat was answered.
const HEARTBEAT_CHECK_EVERY: Duration = Duration::from_millis(200);

/// The longest pause after a claim that has waited for a lock until its timeout. The next claim waits for the lock in
/// the database, and continues as soon as the lock is free.
const LOCKED_RETRY_AFTER: Duration = Duration::from_secs(1);

struct Claimer<'a> {
    shared: &'a Arc<Shared>,
    looks: Looks<'a>,
    sleeper: Sleeper<'a>,
    poll: Poll,
    /// The number of consecutive looks that have failed.
    failures: u32,
    /// True if a warning has been logged that claims fail.
    warned: bool,
    /// True if memory was short at the last check.
    memory_is_short: bool,
    /// True if the next look claims only the first jobs of lanes that had none, because the line is full.
    is_extra: bool,
}

/// Claims and dispatches until the worker stops.
pub(super) async fn run(shared: &Arc<Shared>) {
    let mut claimer = Claimer {
        shared,
        looks: Looks::new(shared),
        sleeper: Sleeper::new(shared),
        poll: Poll::new(shared.settings.poll_min, shared.settings.poll_max),
        failures: 0,
        warned: false,
        memory_is_short: false,
        is_extra: false,
    };
    claimer.claim_until_stopped().await;
}

impl Claimer<'_> {
    async fn claim_until_stopped(&mut self) {
        let stop = self.shared.stop.drain.clone();
        let mut trigger = Trigger::Poll;
        // A stop interrupts only the waits. Postgres would still execute an interrupted claim, and its jobs would wait
        // until their leases expire.
        loop {
            let wanted = async {
                self.wait_for_heartbeat().await;
                self.wait_for_capacity().await
            };
            let Some(wanted) = stop.run_until_cancelled(wanted).await else {
                return;
            };
            // `run_until_cancelled` returns the capacity if both happen together.
            if stop.is_cancelled() {
                return;
            }
            // An immediate stop interrupts the look, too: the database may be hanging.
            let now = &self.shared.stop.now;
            let look = async {
                match self.is_extra {
                    true => self.looks.claim_first(wanted).await,
                    false => self.looks.look(wanted, trigger).await,
                }
            };
            let Some(found) = now.run_until_cancelled(look).await else {
                return;
            };
            let again = match found {
                Ok(found) => self.handle_found(found, wanted, trigger).await,
                Err(error) => self.handle_failure(&error).await,
            };
            trigger = match again {
                Some(trigger) => trigger,
                None => match stop.run_until_cancelled(self.wait()).await {
                    Some(true) => Trigger::Wakeup,
                    Some(false) | None => Trigger::Poll,
                },
            };
        }
    }

    /// After a long silence, waits until a heartbeat is answered: until then, no claimed job would be started.
    async fn wait_for_heartbeat(&self) {
        while self.shared.leases.are_distrusted(BootTime::now()) {
            self.shared.presence.heartbeat_now.notify_one();
            tokio::time::sleep(HEARTBEAT_CHECK_EVERY).await;
        }
    }

    /// Waits until enough slots are free for a worthwhile claim. Returns the number of jobs to claim.
    async fn wait_for_capacity(&mut self) -> usize {
        let slots = &self.shared.slots;
        loop {
            if self.shared.sandbox.memory_is_short() {
                self.wait_for_memory().await;
                continue;
            }
            let ahead = self.looks.ahead();
            if let Some(capacity) = slots.capacity(ahead) {
                return capacity.min(self.looks.wanted_max());
            }
            // Jobs of other keys can be claimed before the line is half empty.
            match self.looks.next_search().filter(|_| ahead > 0) {
                None => slots.freed().await,
                Some(at) => {
                    if tokio::time::timeout_at(at.into(), slots.freed())
                        .await
                        .is_ok()
                    {
                        continue;
                    }
                    let room = slots.extra(ahead);
                    match room {
                        0 => slots.freed().await,
                        _ => match self.looks.find_new().await {
                            Ok(0) => {}
                            Ok(lanes) => {
                                self.is_extra = true;
                                return lanes.min(room).min(self.looks.wanted_max());
                            }
                            // The next look will encounter and report the same error.
                            Err(_) => slots.freed().await,
                        },
                    }
                }
            }
        }
    }

    /// Waits briefly for memory; other hosts can claim the jobs in the meantime.
    async fn wait_for_memory(&mut self) {
        if !std::mem::replace(&mut self.memory_is_short, true) {
            info!("claims paused: running attempts use nearly all of this host's memory");
        }
        // Memory is freed when an attempt ends. The attempt may be an invocation, which does not free a slot.
        let _ = tokio::time::timeout(MEMORY_CHECK_EVERY, self.shared.slots.freed()).await;
        if !self.shared.sandbox.memory_is_short() {
            self.memory_is_short = false;
            info!("claims resumed");
        }
    }

    /// Handles the result of a look. Returns the trigger of the next look if it follows at once, `None` if a wait comes
    /// first.
    async fn handle_found(
        &mut self,
        found: Found,
        wanted: usize,
        trigger: Trigger,
    ) -> Option<Trigger> {
        if self.failures > 0 {
            self.shared.presence.heartbeat_now.notify_one();
        }
        if std::mem::take(&mut self.warned) {
            info!("claims succeed again");
        }
        self.failures = 0;
        let is_extra = std::mem::take(&mut self.is_extra);
        self.shared
            .health
            .database_responds
            .store(true, Ordering::Relaxed);
        if is_extra {
            // This look read only lanes that had no jobs before: nothing is known about the others.
            return Some(Trigger::More);
        }
        if found.jobs > 0 {
            self.poll.reset();
            self.sleeper.found().await;
            // With fewer jobs than wanted, the lanes are empty for now.
            return found.fills(wanted).then_some(Trigger::More);
        }
        if found.has_others {
            return Some(Trigger::More);
        }
        self.sleeper.idles();
        let restarts =
            matches!(trigger, Trigger::Wakeup) && self.looks.restart_after_empty_wakeup();
        // One more look after notifications were requested: it finds jobs that were committed before the request.
        (restarts || self.sleeper.fall_asleep().await).then_some(Trigger::Poll)
    }

    /// Handles a failed look: waits until another try makes sense.
    async fn handle_failure(&mut self, error: &StoreError) -> Option<Trigger> {
        self.is_extra = false;
        self.shared
            .health
            .database_responds
            .store(false, Ordering::Relaxed);
        // Called because it triggers a heartbeat; its result does not matter here.
        self.shared.has_incarnation_ended(error);
        // The first failure may be due to one broken connection in the pool.
        if self.failures > 0 {
            self.warned |= !error.is_unreachable() && !error.is_cut_off();
            let mut wait = backoff(self.failures - 1, rand::random());
            if error.is_locked() {
                wait = wait.min(LOCKED_RETRY_AFTER);
            }
            let wait_ms = wait.as_millis();
            warn_unless_unreachable!(
                error,
                wait_ms,
                waits_for = error.waits_for(),
                "cannot claim jobs; trying again"
            );
            let retry = async {
                tokio::select! {
                    () = self.shared.store.ready(), if error.is_unreachable() => {}
                    // Even if no new connection can be opened, one in the pool may be free again.
                    () = tokio::time::sleep(wait) => {}
                    // If the listening connection is open again, the server is reachable.
                    () = self.shared.wakeups.notified() => {}
                }
            };
            let _ = self.shared.stop.drain.run_until_cancelled(retry).await;
        }
        self.failures += 1;
        match error.is_silence() && self.looks.was_restarting() {
            // Another restart would be just as slow.
            true => self.looks.restart_failed(),
            // The remembered state of the database may be wrong.
            false => self.looks.start_over(),
        }
        self.sleeper.start_over();
        Some(Trigger::Poll)
    }

    /// Waits for a notification, for the next poll, due job or opening of a lane, or until a restart that has had to
    /// wait is permitted, whichever comes first. True for a notification.
    async fn wait(&mut self) -> bool {
        let started = Instant::now();
        let listening = self.shared.listener.connected.load(Ordering::Relaxed);
        let mut wait = self.poll.wait(listening, rand::random());
        if listening && !self.sleeper.is_asleep() {
            // Producers do not notify this worker yet. The next look requests that if it finds nothing.
            wait = wait.min(BUSY_AFTER);
        }
        let times = [self.looks.due_at(), self.looks.restart_at()];
        let times = times.map(|at| at.map(|at| at.saturating_duration_since(started)));
        let waits = [self.looks.opens_in(), self.looks.announced_in()];
        for next in times.into_iter().chain(waits).flatten() {
            wait = wait.min(next);
        }
        // It does no harm if the timer fires early: jobs become due by the database's clock.
        let woken = tokio::time::timeout(wait, async {
            loop {
                self.shared.wakeups.notified().await;
                // A job in a lane that this worker does not serve does not end the wait.
                if self
                    .shared
                    .wakeups
                    .retain(|lane| self.looks.may_serve(lane))
                {
                    return;
                }
            }
        })
        .await
        .is_ok();
        if woken {
            debug!("woken by a notification");
            self.poll.reset();
        }
        if started.elapsed() >= BUSY_AFTER {
            self.sleeper.idles();
        }
        woken
    }
}
