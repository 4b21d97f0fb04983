//! Checks payloads and results against the handler's schemas, in every attempt at a job and in every invocation.
//!
//! Most checks take microseconds and run in the attempt's task. Long checks run on threads of their own, of which each
//! module has a share. A module chooses its schemas and results, so the CPU time of a check counts as CPU time of its
//! attempt, and a check ends with its attempt.

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rouse_schema::Schema;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::job::{AbortReason, JobId, RunEnd};
use crate::sandbox::{AbortHandle, Handler, Meter, Sandbox};

/// The payload of a job that was enqueued without one.
const NO_PAYLOAD: &[u8] = b"{}";

/// How long the outcomes of a batch are checked after the hard stop. Within this time, a thousand ordinary outcomes are
/// checked many times over. A thousand outcomes with a hostile schema take minutes.
const CHECKED_AFTER_STOP: Duration = Duration::from_secs(5);

/// The threads for long checks: one for each core, and at least two.
///
/// A check may take ten seconds, and a module may have as many at once as there are slots. So each module has at most
/// half of the threads, and its checks do not hold up those of another module.
pub(in crate::sandbox) struct Checks {
    /// One permit for each thread.
    threads: Arc<Semaphore>,
    of_module_max: usize,
}

/// The permission for one check. The semaphores are never closed, so both permits are always present.
struct Thread {
    _thread: Option<OwnedSemaphorePermit>,
    _of_module: Option<OwnedSemaphorePermit>,
}

impl Checks {
    pub(in crate::sandbox) fn new(cores: usize) -> Self {
        let threads = cores.max(2);
        Self {
            threads: Arc::new(Semaphore::new(threads)),
            of_module_max: threads / 2,
        }
    }

    /// The share of one module.
    pub(in crate::sandbox) fn share(&self) -> Arc<Semaphore> {
        Arc::new(Semaphore::new(self.of_module_max))
    }

    /// Waits for a thread. The checks of a module wait for its share first, so few of them are in line for the threads.
    async fn thread(&self, share: &Arc<Semaphore>) -> Thread {
        let of_module = Arc::clone(share).acquire_owned().await.ok();
        let thread = Arc::clone(&self.threads).acquire_owned().await.ok();
        Thread {
            _thread: thread,
            _of_module: of_module,
        }
    }
}

/// The attempt that a check belongs to.
#[derive(Clone, Copy)]
struct Attempt<'a> {
    handler: &'a Handler,
    /// Ends the check.
    abort: &'a AbortHandle,
    /// Counts the CPU time of the check.
    meter: &'a Arc<Meter>,
}

/// Why a check has no result.
enum Interrupted {
    Aborted(AbortReason),
    OutOfCpu,
}

impl Interrupted {
    fn end(self, handler: &Handler) -> RunEnd {
        match self {
            Self::Aborted(reason) => RunEnd::Aborted(reason),
            Self::OutOfCpu => RunEnd::OutOfCpu {
                limit: handler.limits.cpu,
            },
        }
    }
}

impl Sandbox {
    /// Checks the payload. Returns the end of the attempt if the payload does not match, or if the attempt was aborted
    /// or used up its CPU time during the check.
    pub async fn refuse_payload(
        &self,
        handler: &Handler,
        payload: &[u8],
        abort: &AbortHandle,
        meter: &Arc<Meter>,
    ) -> Option<RunEnd> {
        let attempt = Attempt {
            handler,
            abort,
            meter,
        };
        let schema = &handler.manifest.input_schema;
        let why = match self.checked(schema, payload, attempt).await {
            Ok(matches) => matches.err()?,
            Err(interrupted) => return Some(interrupted.end(handler)),
        };
        // A handler without a payload declares `null`.
        if payload.trim_ascii() == NO_PAYLOAD {
            match self.checked(schema, b"null", attempt).await {
                Ok(Ok(())) => return None,
                Ok(Err(_)) => {}
                Err(interrupted) => return Some(interrupted.end(handler)),
            }
        }
        Some(RunEnd::PayloadRefused(format!(
            "payload {why}; `rouse handlers show {} --schema` shows the input_schema",
            handler.name
        )))
    }

    /// Checks the result of a run. Returns how the run ended, which differs from `end` if the result does not match, or
    /// if the check was interrupted.
    pub(in crate::sandbox) async fn check_result(
        &self,
        handler: &Handler,
        end: RunEnd,
        abort: &AbortHandle,
        meter: &Arc<Meter>,
    ) -> RunEnd {
        let RunEnd::Returned(result) = &end else {
            return end;
        };
        let attempt = Attempt {
            handler,
            abort,
            meter,
        };
        let schema = &handler.manifest.output_schema;
        match self.checked(schema, result, attempt).await {
            Ok(Ok(())) => end,
            Ok(Err(why)) => RunEnd::ResultRefused(format!(
                "result {why}; `rouse handlers show {} --schema` shows the output_schema",
                handler.name
            )),
            Err(interrupted) => interrupted.end(handler),
        }
    }

    /// Checks the outcomes that a guest has given to the jobs of a batch. They count regardless of what has happened to
    /// the attempt since, so an abort does not end these checks; the hard stop ends long ones, a few seconds later.
    /// Returns the outcomes that were checked, and the abort reason if some were not: their jobs have no outcome.
    pub(in crate::sandbox) async fn check_outcomes(
        &self,
        handler: &Handler,
        outcomes: Vec<(JobId, RunEnd)>,
        abort: &AbortHandle,
        meter: &Arc<Meter>,
    ) -> (Vec<(JobId, RunEnd)>, Option<AbortReason>) {
        if outcomes.is_empty() {
            return (outcomes, None);
        }
        let checks = AbortHandle::new();
        let end_after_stop = async {
            let reason = abort.hard_stopped().await;
            tokio::time::sleep(CHECKED_AFTER_STOP).await;
            checks.abort(reason, Duration::ZERO);
            pending::<()>().await;
        };
        let check_all = async {
            let mut checked = Vec::with_capacity(outcomes.len());
            let mut interrupted = None;
            for (job, end) in outcomes {
                match self.check_result(handler, end, &checks, meter).await {
                    RunEnd::Aborted(reason) => interrupted = Some(reason),
                    end => checked.push((job, end)),
                }
                tokio::task::consume_budget().await;
            }
            (checked, interrupted)
        };
        tokio::select! {
            biased;
            () = end_after_stop => unreachable!("it never returns"),
            checked = check_all => checked,
        }
    }

    /// Returns the outcome of a check, or why there is none.
    async fn checked(
        &self,
        schema: &Schema,
        text: &[u8],
        attempt: Attempt<'_>,
    ) -> Result<Result<(), String>, Interrupted> {
        let started = Instant::now();
        let quick = schema.check_quickly(text);
        // At most a few milliseconds. Reading the thread's CPU time would take longer than most checks.
        attempt.meter.add_cpu(started.elapsed());
        if let Some(checked) = quick {
            return Ok(checked);
        }
        let share = &attempt.handler.module.checks;
        let (schema, signal, meter) = (
            schema.clone(),
            attempt.abort.clone(),
            Arc::clone(attempt.meter),
        );
        let cpu_max = attempt.handler.limits.cpu;
        let check = async move {
            let thread = self.checks.thread(share).await;
            // Copied only now, so that a check that waits for its thread has no copy.
            let text = text.to_vec();
            let check = tokio::task::spawn_blocking(move || {
                let _thread = thread;
                meter.measure_within(cpu_max, |is_used_up| {
                    let is_over = || is_used_up() || signal.reason().is_some();
                    schema.check_while(&text, &is_over)
                })
            });
            check.await.unwrap_or_else(|_panic| {
                Err("cannot be checked against the schema: the check panicked".into())
            })
        };
        let checked = tokio::select! {
            biased;
            () = attempt.abort.aborted() => Ok(()),
            checked = check => checked,
        };
        match attempt.abort.reason() {
            Some(reason) => Err(Interrupted::Aborted(reason)),
            None if attempt.meter.cpu() > cpu_max => Err(Interrupted::OutOfCpu),
            None => Ok(checked),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn the_checks_of_one_module_leave_threads_for_those_of_others() {
        for cores in [1, 2, 5] {
            let checks = Checks::new(cores);
            let (hostile, other) = (checks.share(), checks.share());
            let mut taken = Vec::new();
            while let Some(thread) = checks.thread(&hostile).now_or_never() {
                taken.push(thread);
            }
            assert_eq!(taken.len(), cores.max(2) / 2);
            let mut waits = pin!(checks.thread(&hostile));
            assert!(waits.as_mut().now_or_never().is_none());
            let thread = checks.thread(&other).now_or_never();
            assert!(thread.is_some(), "{cores}");
            taken.pop();
            assert!(waits.now_or_never().is_some(), "{cores}");
        }
    }
}
