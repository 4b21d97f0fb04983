//! The journal of an attempt, written to Postgres behind the fence: results of steps, log lines and progress.
//! `state.rs` has the state of its handler, `suspensions.rs` signals and the ends of other jobs.

use std::collections::HashMap;
use std::future::pending;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::Semaphore;
use tracing::{Level, debug};

use super::Shared;
use super::reach::warn_unless_unreachable;
use super::recorded::recorded;
use super::repeats::Repeats;
use super::suspensions::NextParents;
use crate::job::{Attempt, Fence, JobId, RecordedStep, Usage};
use crate::sandbox::{Handler, Journal, JournalFuture, Meter, SqlStore, StateStore, WaitStore};
use crate::store::{ClaimedJob, LostJob, RecordedSteps, Report, StoreError};

/// The wait after a temporary failure.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// The first wait if another transaction has locked the job, or the state; it doubles up to [`LOCKED_RETRY_MAX`].
const LOCKED_RETRY_AFTER: Duration = Duration::from_millis(20);
const LOCKED_RETRY_MAX: Duration = Duration::from_secs(1);

/// The maximum length of the step in `rouse.progress`, in characters.
const STEP_CHARS_MAX: usize = 200;

/// The maximum number of concurrent calls about steps, and of concurrent calls about state. It leaves some of the
/// worker's few connections to claims, settlements and renewals.
pub(super) const CALLS_MAX: usize = 2;

/// The journal of one attempt. A call that the database does not answer is retried until the worker no longer trusts
/// the lease; then the abort signal ends the wait.
pub(super) struct AttemptJournal {
    pub(super) shared: Arc<Shared>,
    pub(super) id: JobId,
    pub(super) fence: Fence,
    pub(super) handler: Arc<Handler>,
    attempt: Attempt,
    live_usage: Arc<LiveUsage>,
    has_reported: AtomicBool,
    /// The recorded steps that it has read.
    read_steps: Mutex<Option<RecordedSteps>>,
    next_parents: Mutex<NextParents>,
    /// The number of the last line of its log, and that of the previous run: the jobs of a batch that has crashed are
    /// run again one by one.
    lines: [AtomicU32; 2],
}

/// The failed tries of one call.
#[derive(Debug, Default)]
pub(super) struct FailedTries {
    /// The number of tries that a lock has blocked.
    locked: u32,
    /// The warnings about other errors, which may last until the lease ends.
    warnings: Repeats,
}

/// The usage of an attempt while it runs.
pub(super) struct LiveUsage {
    since: Instant,
    /// The meter of the last run. `None` until a guest exists.
    meter: Mutex<Option<Arc<Meter>>>,
}

impl Default for LiveUsage {
    fn default() -> Self {
        Self {
            since: Instant::now(),
            meter: Mutex::new(None),
        }
    }
}

impl LiveUsage {
    /// The usage so far. `None` if the attempt has run for less than `min`, or if there is no guest yet.
    pub(super) fn after(&self, min: Duration) -> Option<Usage> {
        if self.since.elapsed() < min {
            return None;
        }
        self.meter().as_ref().map(|meter| meter.usage())
    }

    fn meter(&self) -> MutexGuard<'_, Option<Arc<Meter>>> {
        // Nothing panics while it holds the lock.
        self.meter.lock().unwrap_or_else(PoisonError::into_inner)
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
            live_usage: Arc::default(),
            has_reported: AtomicBool::new(false),
            read_steps: Mutex::default(),
            next_parents: Mutex::default(),
            lines: Default::default(),
        }
    }

    pub(super) fn attempt(&self) -> Attempt {
        self.attempt
    }

    pub(super) fn live_usage(&self) -> Arc<LiveUsage> {
        self.live_usage.clone()
    }

    /// Notes that the attempt has ended: its progress is deleted. If it is suspended, the next one needs the steps
    /// again.
    pub(super) fn close(&self, is_suspended: bool) {
        if self.has_reported.load(Ordering::Relaxed) {
            self.shared.reports.progress.ended(self.id, self.fence);
        }
        if is_suspended && let Some(recorded) = self.read_steps().take() {
            self.shared.step_cache.keep(self.id, recorded);
        }
    }

    fn read_steps(&self) -> MutexGuard<'_, Option<RecordedSteps>> {
        // Nothing panics while it holds the lock.
        self.read_steps
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn next_parents(&self) -> MutexGuard<'_, NextParents> {
        // Nothing panics while it holds the lock.
        self.next_parents
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Retries a call until the database answers it. `limit`: the maximum number of concurrent calls of this kind.
    ///
    /// # Errors
    /// If the database can never accept the data: a human-readable message.
    pub(super) async fn call<T, F>(
        &self,
        limit: &Semaphore,
        call: impl Fn() -> F,
    ) -> Result<T, String>
    where
        F: Future<Output = Result<Result<T, LostJob>, StoreError>>,
    {
        let mut failed = FailedTries::default();
        loop {
            let permit = limit.acquire().await;
            let response = call().await;
            drop(permit);
            match response {
                Err(error) if error.is_about_data() => return Err(error.to_string()),
                response => {
                    if let Some(response) = self.check_response(response, &mut failed).await {
                        return Ok(response);
                    }
                }
            }
        }
    }

    /// Returns the response of the database, or `None` if the call has to be retried. If the attempt has lost its job,
    /// waits for the abort signal. `failed`: the earlier tries of this call.
    pub(super) async fn check_response<T>(
        &self,
        response: Result<Result<T, LostJob>, StoreError>,
        failed: &mut FailedTries,
    ) -> Option<T> {
        match response {
            Ok(Ok(response)) => Some(response),
            Ok(Err(LostJob(reason))) => {
                self.shared.leases.lose(self.id, self.fence, reason);
                pending().await
            }
            // The next heartbeat aborts the attempt.
            Err(error) if self.shared.has_incarnation_ended(&error) => pending().await,
            // Another transaction has the lock, usually for a short time.
            Err(error) if error.is_locked() => {
                debug!(job.id = self.id.0, %error, "a step or the state is locked; trying again");
                tokio::time::sleep(after_lock(failed.locked)).await;
                failed.locked += 1;
                None
            }
            Err(error) => {
                self.shared.note_missing_partition(&error);
                // In an outage, nothing is logged as a warning.
                let is_outage = error.is_unreachable() || error.is_cut_off();
                if is_outage || failed.warnings.is_logged(Instant::now()) {
                    warn_unless_unreachable!(
                        error,
                        job.id = self.id.0,
                        "could not read or write a step or the state; trying again"
                    );
                }
                tokio::time::sleep(RETRY_AFTER).await;
                None
            }
        }
    }
}

/// The wait before the next try of a call that a lock has blocked this many times before: 20, 40, 80 … ms, up to a
/// second.
fn after_lock(times: u32) -> Duration {
    (LOCKED_RETRY_AFTER * (1 << times.min(8))).min(LOCKED_RETRY_MAX)
}

impl Journal for AttemptJournal {
    fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, RecordedStep>>> {
        Box::pin(async {
            // Only started attempts record steps, and a started attempt keeps its number.
            if self.attempt == Attempt(1) {
                return Arc::default();
            }
            let mut failed = FailedTries::default();
            loop {
                let response = recorded(&self.shared, (self.id, self.fence)).await;
                if let Some(recorded) = self.check_response(response, &mut failed).await {
                    let steps = recorded.steps.clone();
                    *self.read_steps() = Some(recorded);
                    return steps;
                }
            }
        })
    }

    fn result<'a>(&'a self, step: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
        Box::pin(async move {
            let store = &self.shared.store;
            let mut failed = FailedTries::default();
            loop {
                let call = self.shared.calls.steps.acquire().await;
                let response = store.recorded_step(self.id, self.fence, step).await;
                drop(call);
                if let Some(result) = self.check_response(response, &mut failed).await {
                    let gone =
                        || format!("the recorded result of the step {step} no longer exists");
                    return result.ok_or_else(gone);
                }
            }
        })
    }

    fn record<'a>(
        &'a self,
        step: &'a str,
        output: &'a [u8],
    ) -> JournalFuture<'a, Result<(), String>> {
        Box::pin(async move {
            let output = str::from_utf8(output).map_err(|error| error.to_string())?;
            let store = &self.shared.store;
            let record = || store.record_step(self.id, self.fence, step, output);
            self.call(&self.shared.calls.steps, record).await
        })
    }

    fn meter(&self, meter: Arc<Meter>) {
        *self.live_usage.meter() = Some(meter);
        let [last, before] = &self.lines;
        before.store(last.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    fn log_line(&self, line: u32, level: Level, text: &str) {
        let [last, before] = &self.lines;
        let line = before.load(Ordering::Relaxed) + line;
        last.fetch_max(line, Ordering::Relaxed);
        self.shared
            .reports
            .logs
            .push(self.id, self.attempt, line, level, text);
    }

    fn state(&self) -> Option<&dyn StateStore> {
        Some(self)
    }

    fn sql(&self) -> Option<&dyn SqlStore> {
        Some(self)
    }

    fn waits(&self) -> Option<&dyn WaitStore> {
        Some(self)
    }

    fn progress(&self, percent: u8, step: &str) {
        self.has_reported.store(true, Ordering::Relaxed);
        self.shared.reports.progress.report(Report {
            id: self.id,
            fence: self.fence,
            percent,
            // Escaping control characters may have made the text longer than the guest's limit.
            step: step.chars().take(STEP_CHARS_MAX).collect(),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_waits_for_a_lock_grow_up_to_a_second() {
        let waits = [0, 1, 2, 5, 6, 99].map(|times| after_lock(times).as_millis());
        assert_eq!(waits, [20, 40, 80, 640, 1000, 1000]);
    }
}
