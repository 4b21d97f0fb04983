//! Decides when to look for jobs.
//!
//! The poll is the truth: waits of 5, 10, 20 … ms up to the ceiling, and every find starts over. A
//! notification only ends a wait early. Because the claimer asks for notifications before its
//! last look, and then polls at short intervals, a job that slips between the two waits for
//! milliseconds, not for the ceiling.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::{debug, info};

use super::Shared;
use super::claims::Found;
use super::look::{Looks, Why};
use super::poll::Poll;
use super::reach::warn_unless_unreachable;
use super::sleeper::{BUSY_AFTER, Sleeper};
use crate::store::StoreError;
use crate::store::connect::backoff;

/// How often it is looked whether memory has come back.
const MEMORY_AGAIN: Duration = Duration::from_millis(50);

struct Claimer<'a> {
    shared: &'a Arc<Shared>,
    looks: Looks<'a>,
    sleeper: Sleeper<'a>,
    poll: Poll,
    /// Looks that failed since the last one that did not.
    failures: u32,
    /// It was said that claims do not work.
    warned: bool,
    /// Memory was short when it was looked at last.
    short: bool,
}

/// Claims and dispatches until the worker is told to stop.
pub(super) async fn run(shared: &Arc<Shared>) {
    let mut claimer = Claimer {
        shared,
        looks: Looks::new(shared),
        sleeper: Sleeper::new(shared),
        poll: Poll::new(shared.settings.poll_min, shared.settings.poll_max),
        failures: 0,
        warned: false,
        short: false,
    };
    claimer.until_stopped().await;
}

impl Claimer<'_> {
    async fn until_stopped(&mut self) {
        let stop = self.shared.stop.drain.clone();
        let mut why = Why::Poll;
        // Only the waits are cut short by a stop. A claim that were cut off would be made all the
        // same, and nobody would know of it until its lease runs out.
        loop {
            let Some(wanted) = stop.run_until_cancelled(self.wait_for_room()).await else {
                return;
            };
            // Of room and stop that come together, the room is told.
            if stop.is_cancelled() {
                return;
            }
            // An order to stop at once cuts off the look too: the database may be what hangs.
            let now = &self.shared.stop.now;
            let Some(found) = now.run_until_cancelled(self.looks.look(wanted, why)).await else {
                return;
            };
            let again = match found {
                Ok(found) => self.looked(found, wanted, why).await,
                Err(error) => self.failed(&error).await,
            };
            why = match again {
                Some(why) => why,
                None => match stop.run_until_cancelled(self.wait()).await {
                    Some(true) => Why::Woken,
                    Some(false) | None => Why::Poll,
                },
            };
        }
    }

    /// Waits until there is room for a worthwhile claim; returns how many jobs it is for.
    async fn wait_for_room(&mut self) -> usize {
        let slots = &self.shared.slots;
        loop {
            if self.shared.sandbox.memory_is_short() {
                self.memory_is_short().await;
                continue;
            }
            if let Some(room) = slots.room(self.looks.ahead()) {
                return room.min(self.looks.wanted_max());
            }
            slots.freed().await;
        }
    }

    /// Waits a little for attempts that end: others have jobs to spare for this host's.
    async fn memory_is_short(&mut self) {
        if !std::mem::replace(&mut self.short, true) {
            info!("claims pause: the attempts that run use nearly all of this host's memory");
        }
        // Memory comes back when an attempt has ended, which may be an invocation's.
        let _ = tokio::time::timeout(MEMORY_AGAIN, self.shared.slots.freed()).await;
        if !self.shared.sandbox.memory_is_short() {
            self.short = false;
            info!("claims go on");
        }
    }

    /// What follows a look that found this: another one at once, or (none) a wait.
    async fn looked(&mut self, found: Found, wanted: usize, why: Why) -> Option<Why> {
        if self.failures > 0 {
            self.shared.presence.heartbeat_now.notify_one();
        }
        if std::mem::take(&mut self.warned) {
            info!("claims work again");
        }
        self.failures = 0;
        self.shared
            .health
            .database_answers
            .store(true, Ordering::Relaxed);
        if found.jobs > 0 {
            self.poll.reset();
            self.sleeper.found().await;
            // Fewer than asked for: the lanes are empty for now.
            return found.fills(wanted).then_some(Why::More);
        }
        self.sleeper.idles();
        let woken_for_nothing = matches!(why, Why::Woken) && self.looks.behind_the_cursors();
        // Once more, now that producers know: nothing can slip between.
        (woken_for_nothing || self.sleeper.fall_asleep().await).then_some(Why::Poll)
    }

    /// Waits until it makes sense to try again.
    async fn failed(&mut self, error: &StoreError) -> Option<Why> {
        self.shared
            .health
            .database_answers
            .store(false, Ordering::Relaxed);
        self.shared.doubted(error);
        // The first failure may be one broken connection of the pool.
        if self.failures > 0 {
            self.warned |= !error.is_unreachable() && !error.is_cut_off();
            let wait = backoff(self.failures - 1, rand::random());
            let wait_ms = wait.as_millis();
            warn_unless_unreachable!(error, wait_ms, "cannot claim; trying again");
            let back = async {
                tokio::select! {
                    () = self.shared.store.ready(), if error.is_unreachable() => {}
                    // Also while no connection opens: one of the pool's may be free again.
                    () = tokio::time::sleep(wait) => {}
                    // The listening connection stands again: so does the server.
                    () = self.shared.wakeups.rung() => {}
                }
            };
            let _ = self.shared.stop.drain.run_until_cancelled(back).await;
        }
        self.failures += 1;
        // Nothing that is remembered of the database may be trusted.
        self.looks.start_over();
        self.sleeper.start_over();
        Some(Why::Poll)
    }

    /// Waits for a notification, the poll, or the next job that is due, whichever comes first; true
    /// for a notification.
    async fn wait(&mut self) -> bool {
        let started = Instant::now();
        let listening = self.shared.listener.connected.load(Ordering::Relaxed);
        let mut wait = self.poll.wait(listening, rand::random());
        if listening && !self.sleeper.is_asleep() {
            // Producers do not know that this worker waits; the next look tells them if it finds nothing.
            wait = wait.min(BUSY_AFTER);
        }
        if let Some(due) = self.looks.due_at() {
            wait = wait.min(due.saturating_duration_since(started));
        }
        // The timer may not fire before its time: S5 holds by the database's clock anyway.
        let woken = tokio::time::timeout(wait, async {
            loop {
                self.shared.wakeups.rung().await;
                // Jobs of other workers' lanes end no wait.
                if self.shared.wakeups.keep(|lane| self.looks.concern(lane)) {
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
        if started.elapsed() >= BUSY_AFTER {
            self.sleeper.idles();
        }
        woken
    }
}
