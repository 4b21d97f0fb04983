//! Runs one attempt at one job, or at the jobs of a batch.

use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::clocks::DatabaseClock;
use super::end;
use super::meter::{Meter, with_cpu_limit};
use super::state::PerAttempt;
use crate::job::{Attempt, JobId, NewJob, RunEnd, SqlCall, Usage};
use crate::sandbox::bindings::exports::rouse::handler::handlers::JobInfo;
use crate::sandbox::capability::{
    Batch, GuestLog, Http, LogSource, NewJobs, Sql, Steps, open_granted,
};
use crate::sandbox::{AbortHandle, Handler, Journal, Profile, Sandbox};
use crate::traces::AttemptTrace;

/// A job, as the input of an attempt: what the guest receives about it (except for the handler's name), and what the
/// host needs to run it.
#[derive(Debug, Clone)]
pub struct JobInput {
    /// The job.
    pub id: JobId,
    /// The queue it came from.
    pub queue: String,
    /// The job's tenant.
    pub tenant: Option<String>,
    /// The job's source: what triggered it.
    pub source: Option<String>,
    /// The number of this attempt: 1 for the first.
    pub attempt: Attempt,
    /// The maximum number of attempts.
    pub max_attempts: u32,
    /// When it was enqueued, in milliseconds since 1970-01-01 UTC, according to the database's clock.
    pub requested_at_ms: i64,
    /// UTF-8 JSON.
    pub payload: Vec<u8>,
    /// The CPU time of the check of the payload, if the caller has checked it ([`Sandbox::refuse_payload`]). It counts
    /// as that of the attempt, which does not check the payload again. A batch ignores it.
    pub payload_checked: Option<Duration>,
    /// The memory that the attempt may use, in bytes; `None` means the usual limit.
    pub memory_bytes: Option<usize>,
    /// The database's clock.
    pub clock: DatabaseClock,
    /// The trace of the attempt.
    pub trace: AttemptTrace,
}

/// The end of a run, with its usage and the data for its settlement.
#[derive(Debug, Clone, PartialEq)]
pub struct RunReport {
    /// How it ended.
    pub end: RunEnd,
    /// The time that the run took, without that of the middleware around it. Zero if there was no run.
    pub wall: Duration,
    /// The resources that it used; `None` if it ended before its payload was checked.
    pub used: Option<Usage>,
    /// The jobs that it enqueues, if it has succeeded or calls them.
    pub jobs: Vec<NewJob>,
    /// Its effects, if it has succeeded.
    pub effects: Vec<SqlCall>,
    /// The ends of those jobs of a batch that have an end of their own.
    pub of_jobs: Vec<(JobId, RunEnd)>,
}

impl Sandbox {
    /// Runs one attempt in the task that awaits it, and reports how it ended. Never fails and never panics: each
    /// outcome is a [`RunEnd`].
    ///
    /// The task must run on [`guests`](Self::guests), because the guest runs in it.
    ///
    /// Steps, progress, state and log lines go to the `journal`, which also receives the meter. Without a journal,
    /// every step runs, there is no state, and everything else goes only to the host's log.
    ///
    /// After an abort, the end is [`RunEnd::Aborted`], even if the guest returned something within its grace. The
    /// caller applies the run timeout, through `abort`.
    ///
    /// Cancel-safe: dropping the future ends the guest. A CPU-bound guest yields at its next tick, so that the task can
    /// be dropped.
    pub fn run(
        self: &Arc<Self>,
        handler: &Arc<Handler>,
        job: JobInput,
        abort: AbortHandle,
        journal: Option<Arc<dyn Journal>>,
    ) -> impl Future<Output = RunReport> + Send + 'static + use<> {
        self.run_watched(handler, (job, Vec::new()), abort, journal, None)
    }

    /// [`run`](Self::run) for a batch: one attempt at one or more jobs of a tenant. The journal is that of the first
    /// job. The caller has checked the payloads ([`refuse_payload`](Self::refuse_payload)). [`RunReport::of_jobs`]
    /// contains the ends that the guest reported for individual jobs.
    pub fn run_batch(
        self: &Arc<Self>,
        handler: &Arc<Handler>,
        mut jobs: Vec<JobInput>,
        abort: AbortHandle,
        journal: Option<Arc<dyn Journal>>,
    ) -> impl Future<Output = RunReport> + Send + 'static + use<> {
        let first = jobs.remove(0);
        self.run_watched(handler, (first, jobs), abort, journal, None)
    }

    /// [`run`](Self::run) without a journal; the guest's stack is sampled into the profile, if there is one.
    pub fn run_profiled(
        self: &Arc<Self>,
        handler: &Arc<Handler>,
        job: JobInput,
        abort: AbortHandle,
        profile: Option<Arc<Profile>>,
    ) -> impl Future<Output = RunReport> + Send + 'static + use<> {
        self.run_watched(handler, (job, Vec::new()), abort, None, profile)
    }

    fn run_watched(
        self: &Arc<Self>,
        handler: &Arc<Handler>,
        jobs: (JobInput, Vec<JobInput>),
        abort: AbortHandle,
        journal: Option<Arc<dyn Journal>>,
        profile: Option<Arc<Profile>>,
    ) -> impl Future<Output = RunReport> + Send + 'static + use<> {
        let sandbox = self.clone();
        let handler = handler.clone();
        async move {
            // Here, because middleware may take time before it starts the run.
            let started = Instant::now();
            let attempt = sandbox.attempt(&handler, jobs, abort, journal, profile);
            let mut report = catch_panic(attempt)
                .await
                .unwrap_or_else(RunReport::after_panic);
            report.wall = started.elapsed();
            report
        }
    }

    async fn attempt(
        &self,
        handler: &Arc<Handler>,
        (job, others): (JobInput, Vec<JobInput>),
        abort: AbortHandle,
        journal: Option<Arc<dyn Journal>>,
        profile: Option<Arc<Profile>>,
    ) -> RunReport {
        // A worker that respects `attempts_max` gets a permit immediately.
        let permit = match self.attempts.try_acquire() {
            Ok(permit) => Some(permit),
            Err(_) => tokio::select! {
                biased;
                () = abort.aborted() => None,
                permit = self.attempts.acquire() => permit.ok(),
            },
        };
        if let Some(reason) = abort.reason() {
            return RunReport::without_guest(RunEnd::Aborted(reason));
        }
        let _permit = permit;
        let meter = Arc::new(Meter::default());
        let refused = match job.payload_checked {
            // The caller has checked the payloads of a batch, and counts the CPU time of each with its job.
            _ if !others.is_empty() => None,
            Some(cpu) => {
                meter.add_cpu(cpu);
                None
            }
            None => {
                let payload = &job.payload;
                self.refuse_payload(handler, payload, &abort, &meter).await
            }
        };
        if let Some(end) = refused {
            return RunReport {
                used: Some(meter.usage()),
                ..RunReport::without_guest(end)
            };
        }
        if let Some(end) = open_granted(&handler.granted, &abort, &meter).await {
            return RunReport::without_guest(end);
        }
        let _ticking = self.ticker.tick();

        let source = LogSource::Attempt {
            job: job.id,
            handler: handler.name.clone(),
            attempt: job.attempt,
        };
        let limits = &handler.limits;
        let log =
            GuestLog::new(source, abort.clone(), limits, journal.clone()).traced(job.trace.clone());
        let takes_batches = handler.manifest.takes_batches();
        if let Some(journal) = &journal {
            journal.meter(meter.clone());
        }
        let of = PerAttempt {
            meter: meter.clone(),
            abort: abort.clone(),
            log: Arc::new(log),
            steps: Steps::new(journal.clone(), limits).unless_batches(takes_batches),
            handler_state: handler.state_for(journal.clone()),
            jobs: NewJobs::new(journal.is_some(), limits).unless_batches(takes_batches),
            sql: Sql::new(handler.sql.clone(), journal.clone(), limits)
                .unless_batches(takes_batches),
            batch: batch(handler, &job, others),
            clock: job.clock,
            http: Http::new(
                Some(handler.http.clone()),
                &handler.limits,
                abort.clone(),
                meter.clone(),
            )
            .traced(job.trace.clone()),
            trace: job.trace.clone(),
            profile,
        };
        let tenant = job.tenant.as_deref();
        let memory_bytes = job.memory_bytes;
        let mut instance = match self.instance(handler, tenant, of, memory_bytes) {
            Ok(instance) => instance,
            Err(why) => return RunReport::without_guest(RunEnd::Unrunnable(why)),
        };
        // An instance with more memory than usual is not reused.
        let reuses = handler.reuses && memory_bytes.is_none();
        let tenant = reuses.then(|| job.tenant.clone());
        let job = job_info(handler, job);

        let called = {
            let call = pin!(instance.call(handler, &job));
            // Dropping the call ends a guest that waits in a host call; the epoch interrupts a CPU-bound guest. Most
            // calls are done at once, and then nothing is set up for the hard stop.
            tokio::select! {
                biased;
                done = with_cpu_limit(call, &meter, limits.cpu) => Ok(done),
                reason = abort.hard_stopped() => Err(reason),
            }
        };

        let jobs = instance.state_mut().jobs.take();
        let effects = instance.state_mut().sql.take();
        let settled = instance.state_mut().batch.take();
        let state = instance.state();
        state.log.finish();
        let closings = state.closings();
        let end = match (called, abort.reason()) {
            (Err(reason), _) | (Ok(_), Some(reason)) => RunEnd::Aborted(reason),
            (Ok(Some(done)), None) => end::classify(done, state, limits),
            (Ok(None), None) => RunEnd::OutOfCpu { limit: limits.cpu },
        };
        match tenant {
            Some(tenant) => self.keep(handler, tenant, instance, &end),
            None => drop(instance),
        }
        // A network file system may send what the guest wrote only when the file is closed.
        let unclosed = match closings {
            Some(closings) => closings.ended_or_stopped(&abort).await,
            None => None,
        };
        let end = self.check_result(handler, end, &abort, &meter).await;
        let (of_jobs, interrupted) = self.check_outcomes(handler, settled, &abort, &meter).await;
        let end = unclosed.or(interrupted).map_or(end, RunEnd::Aborted);
        let has_jobs = matches!(end, RunEnd::Returned(_) | RunEnd::Suspended(_));
        let jobs = if has_jobs { jobs } else { Vec::new() };
        let has_effects = matches!(end, RunEnd::Returned(_));
        let effects = if has_effects { effects } else { Vec::new() };
        RunReport {
            end,
            wall: Duration::ZERO,
            used: Some(meter.usage()),
            jobs,
            effects,
            of_jobs,
        }
    }
}

impl RunReport {
    fn after_panic() -> Self {
        tracing::error!("the host panicked while it ran a guest; this is a bug in Rouse");
        Self::without_guest(RunEnd::Unrunnable(
            "the host panicked while it ran the handler".into(),
        ))
    }

    /// An attempt that ended before a guest ran.
    pub(crate) fn without_guest(end: RunEnd) -> Self {
        Self {
            end,
            wall: Duration::ZERO,
            used: None,
            jobs: Vec::new(),
            effects: Vec::new(),
            of_jobs: Vec::new(),
        }
    }
}

/// Awaits a future; `None` if it panics. Of all the data that the attempt touched, only atomics and locks that recover
/// from a panic are used afterwards, so it is safe to continue.
async fn catch_panic<F: Future>(future: F) -> Option<F::Output> {
    let mut future = pin!(future);
    poll_fn(|context| {
        let poll = AssertUnwindSafe(|| future.as_mut().poll(context).map(Some));
        catch_unwind(poll).unwrap_or(Poll::Ready(None))
    })
    .await
}

/// The jobs of an attempt at several jobs, as the guest sees them.
fn batch(handler: &Handler, job: &JobInput, others: Vec<JobInput>) -> Batch {
    if others.is_empty() {
        return Batch::default();
    }
    let all = std::iter::once(job.clone()).chain(others);
    let all = all.map(|job| job_info(handler, job)).collect();
    Batch::new(all, handler.limits.result_bytes)
}

/// The job as the guest sees it.
fn job_info(handler: &Handler, job: JobInput) -> JobInfo {
    JobInfo {
        id: job.id.0,
        handler: handler.manifest.name.clone(),
        queue: job.queue,
        tenant: job.tenant,
        source: job.source,
        attempt: u32::try_from(job.attempt.0).unwrap_or(0),
        max_attempts: job.max_attempts,
        requested_at_ms: job.requested_at_ms,
        payload: job.payload,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_host_panic_ends_only_its_attempt() {
        assert_eq!(catch_panic(async { 7 }).await, Some(7));
        let panics = async {
            tokio::task::yield_now().await;
            panic!("a bug in Rouse");
        };
        assert_eq!(catch_panic(panics).await, None::<()>);
    }
}
