//! What an attempt leaves behind, in Postgres behind the fence: results of steps, and its progress. What its handler keeps:
//! `state.rs`.

use std::collections::HashMap;
use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tracing::{Level, debug};

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::job::{Attempt, Fence, JobId, Usage};
use crate::sandbox::{Handler, Journal, Meter, StateKeeper, Waiting};
use crate::store::{ClaimedJob, NotMine, Report, StoreError};

/// The wait after a failure that may pass.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// After one that has waited for a lock in vain: while it waits, others cannot ask.
const LOCKED_RETRY_AFTER: Duration = Duration::from_secs(1);

/// As `rouse.progress` has it.
const STEP_CHARS_MAX: usize = 200;

/// Calls for steps at the same time, and as many for state: of the few connections of a worker, some are left for claims, settlements and
/// renewals, however many attempts record.
pub(super) const CALLS_MAX: usize = 2;

/// The journal of one attempt. While the database does not answer it is asked again, until the worker
/// trusts the lease no more: the abort signal ends the wait.
pub(super) struct AttemptJournal {
    pub(super) shared: Arc<Shared>,
    pub(super) id: JobId,
    pub(super) fence: Fence,
    pub(super) handler: Arc<Handler>,
    attempt: Attempt,
    watched: Arc<Watched>,
    has_reported: AtomicBool,
}

/// What an attempt uses while it runs.
pub(super) struct Watched {
    since: Instant,
    /// None until there is a guest.
    meter: OnceLock<Arc<Meter>>,
}

impl Default for Watched {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            meter: OnceLock::new(),
        }
    }
}

impl Watched {
    /// What it has used so far, if it has run for so long.
    pub(super) fn usage(&self, runs_for: Duration) -> Option<Usage> {
        if self.since.elapsed() < runs_for {
            return None;
        }
        self.meter.get().map(|meter| meter.usage())
    }
}

impl AttemptJournal {
    pub(super) fn new(shared: Arc<Shared>, job: &ClaimedJob, handler: Arc<Handler>) -> Self {
        Self {
            shared,
            id: job.id,
            fence: job.fence,
            handler,
            attempt: job.attempt,
            watched: Arc::default(),
            has_reported: AtomicBool::new(false),
        }
    }

    /// What it uses, for whoever looks while it runs.
    pub(super) fn watched(&self) -> Arc<Watched> {
        self.watched.clone()
    }

    /// The attempt has ended.
    pub(super) fn close(&self) {
        if self.has_reported.load(Ordering::Relaxed) {
            self.shared.reports.progress.ended(self.id, self.fence);
        }
    }

    /// What the database said in the end; none: nothing yet, ask again.
    pub(super) async fn answer<T>(
        &self,
        answer: Result<Result<T, NotMine>, StoreError>,
    ) -> Option<T> {
        match answer {
            Ok(Ok(said)) => Some(said),
            Ok(Err(NotMine(reason))) => {
                self.shared.leases.lose(self.id, self.fence, reason);
                pending().await
            }
            // This life of the worker is over, which will end the attempt.
            Err(error) if self.shared.doubted(&error) => pending().await,
            // Somebody else has it in hand: no fault of anybody, unless it lasts.
            Err(error) if error.is_locked() => {
                debug!(job.id = self.id.0, %error, "a step or the state is locked; trying again");
                tokio::time::sleep(LOCKED_RETRY_AFTER).await;
                None
            }
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    job.id = self.id.0,
                    "could not read or write a step or the state; trying again"
                );
                tokio::time::sleep(RETRY_AFTER).await;
                None
            }
        }
    }
}

impl Journal for AttemptJournal {
    fn recorded(&self) -> Waiting<'_, HashMap<String, usize>> {
        Box::pin(async {
            loop {
                let call = self.shared.calls.steps.acquire().await;
                let answer = self.shared.store.recorded_steps(self.id, self.fence).await;
                drop(call);
                if let Some(recorded) = self.answer(answer).await {
                    return recorded;
                }
            }
        })
    }

    fn result<'a>(&'a self, step: &'a str) -> Waiting<'a, Result<Vec<u8>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            loop {
                let call = self.shared.calls.steps.acquire().await;
                let answer = store.recorded_step(self.id, self.fence, step).await;
                drop(call);
                if let Some(result) = self.answer(answer).await {
                    let gone = || format!("the recorded result of the step {step} is gone");
                    return result.ok_or_else(gone);
                }
            }
        })
    }

    fn record<'a>(&'a self, step: &'a str, output: &'a [u8]) -> Waiting<'a, Result<(), String>> {
        Box::pin(async move {
            let output = str::from_utf8(output).map_err(|error| error.to_string())?;
            let store = &self.shared.store;
            loop {
                let call = self.shared.calls.steps.acquire().await;
                let answer = store.record_step(self.id, self.fence, step, output).await;
                drop(call);
                match answer {
                    Err(error) if error.is_about_data() => return Err(error.to_string()),
                    answer => {
                        if let Some(()) = self.answer(answer).await {
                            return Ok(());
                        }
                    }
                }
            }
        })
    }

    fn meter(&self, meter: Arc<Meter>) {
        // Called once.
        let _ = self.watched.meter.set(meter);
    }

    fn say(&self, line: u32, level: Level, text: &str) {
        self.shared
            .reports
            .logs
            .say(self.id, self.attempt, line, level, text);
    }

    fn state(&self) -> Option<&dyn StateKeeper> {
        Some(self)
    }

    fn progress(&self, percent: u8, step: &str) {
        self.has_reported.store(true, Ordering::Relaxed);
        self.shared.reports.progress.say(Report {
            id: self.id,
            fence: self.fence,
            percent,
            // What stands for characters that cannot be shown makes a text longer than the guest's was.
            step: step.chars().take(STEP_CHARS_MAX).collect(),
        });
    }
}
