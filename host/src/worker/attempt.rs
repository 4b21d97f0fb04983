//! The path of a claimed job: from a slot through the sandbox to the settler.
//!
//! [`run`] takes each claim that a slot has taken from the line (`slots.rs`) through these steps:
//!
//! 1. [`start`] finds the handler, checks that its statements fit the database and that the payload was read, resolves
//!    the policy, attenuates the grants and starts renewing the lease.
//! 2. [`run_in_sandbox`] runs the guest within the middleware, and returns a `RunReport`, which says how the run
//!    ended: a `RunEnd`. After an abort (a cancellation, a lost lease, the run timeout, a shutdown), that is
//!    `RunEnd::Aborted`, whatever the guest returns.
//! 3. [`decide`] turns the `RunEnd` into an `Outcome`, or returns the reason why the attempt has lost its job.
//! 4. [`settle`] passes the `Outcome` to the settler, which writes it behind the fence. The slot does not wait for
//!    that, unless it has to wait for space. A success with effects goes to a task that commits several at a time
//!    (`effects/together.rs`). If the attempt has lost its job, nothing is written.
//!
//! If step 1 fails, [`end_unstarted`] replaces step 2: the reason is a `RunEnd` too, and is decided and settled in the
//! same way. A batch ([`batch::run`]) takes several jobs through step 2 together; if the guest dies, the jobs that
//! have no outcome run again one by one, in the same attempt.

mod batch;

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{Semaphore, mpsc};
use tokio_util::task::TaskTracker;
use tracing::warn;

use super::Shared;
use super::claim::Claim;
use super::effects;
use super::events;
use super::exemplars::Exemplar;
use super::journal::AttemptJournal;
use super::leases::StartedAttempt;
use super::meters::{HandlerMeters, Meters, OutcomeLabel};
use super::middleware::{AttemptInfo, Middleware, Next};
use super::policy::Policy;
use super::repeats::Repeats;
use super::settler::{self, Unsettled};
use super::successes::Success;
use crate::job::{
    AbortReason, JsonText, NewJob, Outcome, OwnLimits, RetryPolicy, RunEnd, Tries, decide,
};
use crate::sandbox::{AbortHandle, Attenuation, DatabaseClock, Handler, JobInput, RunReport};
use crate::store::{ClaimedJob, GuestRun, Settlement};
use crate::traces::{AttemptTrace, TracedJob};

/// The state that all attempts of one worker share.
pub(super) struct Attempts {
    /// The middleware around each attempt, outermost first.
    pub(super) middleware: Vec<Arc<dyn Middleware>>,
    pub(super) meters: Meters,
    /// The channel to the settler.
    pub(super) settlements: mpsc::Sender<Unsettled>,
    /// A permit for each byte of large outcomes that are not settled yet.
    pub(super) space: Arc<Semaphore>,
    /// The running slots, and the claims that are being given back.
    pub(super) tasks: TaskTracker,
}

/// Takes the job of a claim, or the jobs of a batch, from the claim to the settler. Returns how long its slot has to
/// wait before the next claim.
pub(super) async fn run(shared: &Arc<Shared>, claim: Claim) -> Duration {
    match claim.others.is_empty() {
        true => run_one(shared, claim).await,
        false => batch::run(shared, claim).await,
    }
}

async fn run_one(shared: &Arc<Shared>, claim: Claim) -> Duration {
    match start(shared, &claim).await {
        Ok(started) => run_started(shared, claim, started).await,
        Err(unstarted) => {
            end_unstarted(shared, &claim, unstarted).await;
            Duration::ZERO
        }
    }
}

/// Runs a started attempt and passes its outcome on.
async fn run_started(shared: &Arc<Shared>, claim: Claim, started: Started) -> Duration {
    let handler = &started.terms.handler.manifest.name;
    let traced = traced(shared, &claim, handler, false);
    let trace = shared.settings.traces.attempt(&traced);
    run_traced(shared, claim, started, None, trace).await
}

/// Runs the attempt, passes its outcome on, and records it in `trace`. `checked`: the CPU time that checking its
/// payload has already taken, if it was checked before.
async fn run_traced(
    shared: &Arc<Shared>,
    mut claim: Claim,
    started: Started,
    checked: Option<Duration>,
    trace: AttemptTrace,
) -> Duration {
    let payload = std::mem::take(&mut claim.job.payload.0);
    let input = JobInput {
        payload_checked: checked,
        ..input(&claim, &started.terms.policy, payload, trace.clone())
    };
    let sandbox = &shared.sandbox;
    let Started { abort, journal, .. } = &started;
    let run = sandbox.run(
        &started.terms.handler,
        input,
        abort.clone(),
        Some(journal.clone()),
    );
    let report = run_in_sandbox(shared, &claim, &started, (abort, &trace), run).await;
    let Terms {
        handler, policy, ..
    } = &started.terms;
    let tries = tries(&claim.job, &started.terms);
    let guest_run = report.used.map(|usage| GuestRun {
        usage,
        digest: handler.module.digest.0,
    });
    let details = AttemptDetails {
        started_after: started.after,
        guest_run,
        jobs: report.jobs,
    };
    let delay = policy.job_delay.unwrap_or(shared.settings.job_delay);
    let outcome = decide(report.end, tries, &policy.retry, rand::random());
    match outcome {
        Ok(outcome @ Outcome::Succeeded(_)) if !report.effects.is_empty() => {
            let one = unsettled(&claim, started.meters, trace, Some(details), outcome);
            let decided_by = (tries, &policy.retry);
            let success = Success::new(shared, handler, one, report.effects, decided_by);
            effects::commit_with_others(success).await;
        }
        outcome => {
            settle(
                shared,
                &claim,
                started.meters,
                trace,
                Some(details),
                outcome,
            )
            .await
        }
    }
    delay
}

/// An attempt that has started: its lease is renewed.
struct Started {
    terms: Terms,
    meters: Arc<HandlerMeters>,
    journal: Arc<AttemptJournal>,
    abort: AbortHandle,
    /// From the arrival of the claim to the start.
    after: Duration,
}

/// The handler of an attempt, and its limits.
struct Terms {
    /// The handler, with the job's attenuation applied.
    handler: Arc<Handler>,
    policy: Policy,
    /// The limits that the job itself sets.
    own: OwnLimits,
}

/// An attempt that did not start.
struct Unstarted {
    meters: Arc<HandlerMeters>,
    /// Why it did not start.
    end: RunEnd,
    /// The tries so far and the backoff, which decide about the next attempt.
    decided_by: (Tries, RetryPolicy),
}

impl Unstarted {
    /// For ends that the settings of the handler do not affect: nothing is counted, or no further attempt is made.
    fn new(job: &ClaimedJob, meters: Arc<HandlerMeters>, end: RunEnd) -> Self {
        Self {
            meters,
            end,
            decided_by: (tries_of_row(job), RetryPolicy::default()),
        }
    }
}

/// Starts the attempt of a claim.
///
/// # Errors
/// The reason why the attempt cannot start.
async fn start(shared: &Arc<Shared>, claim: &Claim) -> Result<Started, Unstarted> {
    let Some(handler) = find_handler(shared, claim) else {
        let meters = shared
            .attempts
            .meters
            .for_handler(handler_name(shared, claim));
        return Err(Unstarted::new(&claim.job, meters, RunEnd::NoHandler));
    };
    let meters = shared.attempts.meters.for_handler(&handler.manifest.name);
    let unstarted = |end| Unstarted::new(&claim.job, meters.clone(), end);
    if shared.sql.is_parked(&handler) {
        return Err(unstarted(RunEnd::Parked));
    }
    require_payload(&claim.job).map_err(unstarted)?;
    let policy = resolve_policy(shared, &claim.job, &handler);
    let terms = attenuate(&claim.job, handler, policy).map_err(unstarted)?;
    if let Some(why) = &claim.job.unread {
        let handler = &*meters.handler;
        warn!(
            job.id = claim.job.id.0,
            handler,
            error = why,
            "cannot read the payload of a job"
        );
        // Producers see the error.
        let end = RunEnd::Unrunnable(
            "the payload cannot be read; the log of the worker contains the cause".to_owned(),
        );
        return Err(Unstarted {
            decided_by: (tries(&claim.job, &terms), terms.policy.retry.clone()),
            ..unstarted(end)
        });
    }
    let (journal, abort) = start_lease(shared, claim, &terms)
        .await
        .map_err(unstarted)?;
    // Here, and not around the run: a batch is one run, and its jobs may run again one by one.
    let waits = &shared.attempts.meters.waits;
    waits.record(&claim.job, &claim.lane.queue);
    events::started(claim.event_context(shared, &meters.handler));
    Ok(Started {
        terms,
        meters,
        journal,
        abort,
        after: claim.received.elapsed(),
    })
}

/// The name of the handler that the operator bound to the job's source, or else of the handler that the job names.
fn handler_name<'a>(shared: &'a Shared, claim: &'a Claim) -> &'a str {
    let source = claim.job.source.as_deref();
    shared.settings.handler_for(source, &claim.lane.handler)
}

/// The handler that runs the job. `None` if this host no longer has it: it may have been withdrawn since the claim.
fn find_handler(shared: &Shared, claim: &Claim) -> Option<Arc<Handler>> {
    let name = handler_name(shared, claim);
    shared.catalog.current().get(name).cloned()
}

/// JSON is never empty, so an empty payload that could be read means that its row was deleted.
fn require_payload(job: &ClaimedJob) -> Result<(), RunEnd> {
    match job.payload.0.is_empty() && job.unread.is_none() {
        true => Err(RunEnd::PayloadRefused(
            "the payload is missing: its row was deleted from rouse.payload; enqueue the job again with its payload".to_owned(),
        )),
        false => Ok(()),
    }
}

/// The handler's policy, with the lease and the run timeout that the job was enqueued with, if any.
fn resolve_policy(shared: &Shared, job: &ClaimedJob, handler: &Handler) -> Policy {
    let overrides = &shared.settings.overrides;
    let policy = Policy::resolve(&handler.manifest, overrides);
    match job.lease.or(job.timeout) {
        None => policy,
        Some(_) => {
            let operator_timeout = overrides
                .for_handler(&handler.manifest.name)
                .time("timeout");
            policy.with_job_times(job.lease, job.timeout, operator_timeout)
        }
    }
}

/// Applies the job's attenuation, if any, to the handler's grants and limits and to the run timeout.
///
/// # Errors
/// If this host does not understand the attenuation. Nothing may run then: any grant could be among those that it
/// removes.
fn attenuate(job: &ClaimedJob, handler: Arc<Handler>, policy: Policy) -> Result<Terms, RunEnd> {
    let mut terms = match &job.grants {
        None => Terms {
            handler,
            policy,
            own: OwnLimits::default(),
        },
        Some(JsonText(grants)) => {
            let attenuation = Attenuation::parse(grants).map_err(RunEnd::GrantsRefused)?;
            let attenuated = handler.attenuated(&attenuation);
            let timeout = attenuation.timeout(policy.timeout);
            let memory = |handler: &Handler| handler.limits.memory_bytes_of(memory_bytes(job));
            Terms {
                own: OwnLimits {
                    memory: memory(&attenuated) < memory(&handler),
                    cpu: attenuated.limits.cpu < handler.limits.cpu,
                    timeout: timeout < policy.timeout,
                    enqueued_timeout: false,
                },
                handler: attenuated,
                policy: Policy { timeout, ..policy },
            }
        }
    };
    terms.own.enqueued_timeout = job.timeout == Some(terms.policy.timeout);
    Ok(terms)
}

/// Starts renewing the lease.
///
/// # Errors
/// The job may not start: it has been cancelled or taken over, or the lease is too old.
async fn start_lease(
    shared: &Arc<Shared>,
    claim: &Claim,
    terms: &Terms,
) -> Result<(Arc<AttemptJournal>, AbortHandle), RunEnd> {
    let journal = AttemptJournal::new(shared.clone(), &claim.job, terms.handler.clone());
    let attempt = StartedAttempt {
        lease: terms.policy.lease,
        grace: terms.policy.grace,
        usage: journal.live_usage(),
    };
    let leases = &shared.leases;
    let abort = leases
        .start(claim.job.id, claim.job.fence, &attempt)
        .await?;
    Ok((Arc::new(journal), abort))
}

/// Runs the guest within its run timeout, and both within the middleware, whose own time does not count towards it.
async fn run_in_sandbox(
    shared: &Shared,
    claim: &Claim,
    started: &Started,
    (abort, trace): (&AbortHandle, &AttemptTrace),
    run: impl Future<Output = RunReport> + Send,
) -> RunReport {
    let Started {
        terms,
        meters,
        journal,
        ..
    } = started;
    let Terms {
        handler, policy, ..
    } = terms;
    let job = &claim.job;
    let info = AttemptInfo {
        id: job.id,
        handler: &handler.manifest.name,
        queue: &claim.lane.queue,
        tenant: job.tenant.as_deref(),
        source: job.source.as_deref(),
        attempt: job.attempt,
        max_attempts: max_attempts(job, policy),
        requested_at: job.requested_at,
        ready_at: job.ready_at,
        claimed_at: job.claimed_at,
        worker_id: &shared.settings.worker_id,
    };
    let context = claim.event_context(shared, &handler.manifest.name);
    let run = Box::pin(policy.run_with_timeout(run, abort));
    let report = Next::new(&shared.attempts.middleware, &info, run)
        .run()
        .await;
    journal.close(matches!(report.end, RunEnd::Suspended(_)));
    if let (RunEnd::Aborted(reason), Some(took)) = (&report.end, abort.aborted_for()) {
        events::aborted(context, *reason, took);
    }
    trace.ran();
    meters.seconds.record(report.wall.as_secs_f64());
    if let Some(trace_id) = trace.recorded_id() {
        let exemplar = Exemplar {
            trace_id,
            seconds: report.wall.as_secs_f64(),
            at: SystemTime::now(),
        };
        shared.health.exemplars.record(&meters.handler, exemplar);
    }
    shared.presence.tally.ran(report.wall);
    report
}

/// The facts about an attempt that starts now, for its trace. `is_again`: an earlier run of the same attempt, as part
/// of a batch, is already in a trace.
fn traced<'a>(
    shared: &'a Shared,
    claim: &'a Claim,
    handler: &'a str,
    is_again: bool,
) -> TracedJob<'a> {
    let job = &claim.job;
    let is_first = match job.attempt.0 {
        1 => true,
        // The worker that has lost the first attempt may not have started it, or may not have exported its spans.
        2 => job.ready_at.is_none(),
        _ => false,
    };
    TracedJob {
        id: job.id.0,
        handler,
        queue: &claim.lane.queue,
        tenant: job.tenant.as_deref(),
        attempt: job.attempt.0,
        requested_at: job.requested_at,
        trace: job.trace.as_deref(),
        worker_id: &shared.settings.worker_id,
        exports_enqueue: is_first && !is_again,
    }
}

fn input(claim: &Claim, policy: &Policy, payload: String, trace: AttemptTrace) -> JobInput {
    let job = &claim.job;
    JobInput {
        id: job.id,
        queue: claim.lane.queue.clone(),
        tenant: job.tenant.clone(),
        source: job.source.clone(),
        attempt: job.attempt,
        max_attempts: max_attempts(job, policy),
        requested_at_ms: unix_ms(job.requested_at),
        payload: payload.into_bytes(),
        payload_checked: None,
        memory_bytes: memory_bytes(job),
        clock: DatabaseClock {
            at: job.claimed_at,
            read: claim.received,
        },
        trace,
    }
}

/// The maximum number of attempts, including those that do not count, because they are numbered too.
fn max_attempts(job: &ClaimedJob, policy: &Policy) -> u32 {
    job.max_attempts.unwrap_or(policy.retry.max_attempts)
        + u32::try_from(job.uncounted).unwrap_or(0)
}

/// The number of attempts that have ended in an error, and the maximum.
fn tries(job: &ClaimedJob, terms: &Terms) -> Tries {
    let max_attempts = terms.policy.retry.max_attempts;
    Tries {
        max: job.max_attempts.unwrap_or(max_attempts),
        more_memory_bytes: more_memory_bytes(&terms.handler, job),
        own: terms.own,
        ..tries_of_row(job)
    }
}

/// The same as `tries`, but from the job's row alone, without the settings of its handler.
fn tries_of_row(job: &ClaimedJob) -> Tries {
    let failed = job.attempt.0 - job.uncounted;
    Tries {
        failed: u32::try_from(failed).unwrap_or(0),
        max: job.max_attempts.unwrap_or(1),
        more_memory_bytes: None,
        own: OwnLimits::default(),
    }
}

/// The larger memory limit that the job received when an earlier attempt ran out of memory. `None` for the usual limit.
fn memory_bytes(job: &ClaimedJob) -> Option<usize> {
    job.memory_bytes
        .map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// The memory limit of the next attempt if this one runs out of memory. It is raised once per job.
fn more_memory_bytes(handler: &Handler, job: &ClaimedJob) -> Option<u64> {
    if job.memory_bytes.is_some() {
        return None;
    }
    u64::try_from(handler.limits.more_memory()?).ok()
}

/// Gives back a claim that has not started. It is counted for the handler that would have run it, not for the one that
/// the job names: producers can name any handler.
pub(super) async fn release_claim(shared: &Shared, claim: &Claim, why: RunEnd) {
    let name = handler_name(shared, claim);
    let meters = shared.attempts.meters.for_handler(name);
    // The claim has left the line.
    if let Some(limit) = &claim.host_limit {
        shared.wakeups.freed_handler(&limit.handler);
    }
    end_unstarted(shared, claim, Unstarted::new(&claim.job, meters, why)).await;
}

/// Decides and settles an attempt that never started. If it counts, it has a span.
async fn end_unstarted(shared: &Shared, claim: &Claim, unstarted: Unstarted) {
    // The lease is not renewed while the outcome waits for its settlement: nothing runs.
    shared.leases.give_up(claim.job.id, claim.job.fence);
    let Unstarted {
        meters,
        end,
        decided_by: (tries, retry),
    } = unstarted;
    let outcome = decide(end, tries, &retry, rand::random());
    let counts = outcome.as_ref().is_ok_and(|it| it.error().is_some());
    let trace = match counts {
        true => {
            let traced = traced(shared, claim, &meters.handler, false);
            shared.settings.traces.attempt(&traced)
        }
        // The next attempt gets the same number, or the job is lost.
        false => AttemptTrace::default(),
    };
    settle(shared, claim, meters, trace, None, outcome).await;
}

/// What the settlement of a started attempt contains besides its outcome.
#[derive(Clone)]
struct AttemptDetails {
    /// From the arrival of the claim to the start.
    started_after: Duration,
    /// `None` if no guest ran.
    guest_run: Option<GuestRun>,
    /// The jobs that it enqueues.
    jobs: Vec<NewJob>,
}

/// Passes the outcome to the settler, which writes it behind the fence. If the attempt has lost its job, nothing may be
/// written.
async fn settle(
    shared: &Shared,
    claim: &Claim,
    meters: Arc<HandlerMeters>,
    trace: AttemptTrace,
    details: Option<AttemptDetails>,
    outcome: Result<Outcome, AbortReason>,
) {
    let job = &claim.job;
    // If no guest ran, the span ends here.
    trace.ran();
    match outcome {
        Ok(outcome) => {
            settler::send(shared, unsettled(claim, meters, trace, details, outcome)).await;
        }
        Err(reason) => {
            trace.end(OutcomeLabel::Dropped.as_str(), Some((reason.as_str(), "")));
            let context = claim.event_context(shared, &meters.handler);
            settler::drop_attempt(shared, (job.id, job.fence), &meters, context, reason);
            settler::free(shared, claim.is_limited.then_some(job.lane));
        }
    }
}

/// An outcome that is to be settled.
fn unsettled(
    claim: &Claim,
    meters: Arc<HandlerMeters>,
    trace: AttemptTrace,
    mut details: Option<AttemptDetails>,
    outcome: Outcome,
) -> Unsettled {
    let job = &claim.job;
    let is_bound = details.is_some() && meters.handler != claim.lane.handler;
    // A guest that has succeeded may still fail, without its jobs: its result may not be JSON, or middleware may have
    // changed the end of the run.
    let jobs = details
        .as_mut()
        .filter(|_| outcome.enqueues())
        .map_or_else(Vec::new, |details| std::mem::take(&mut details.jobs));
    let settlement = Settlement {
        id: job.id,
        fence: job.fence,
        started_after: details.as_ref().map(|details| details.started_after),
        guest_run: details.as_ref().and_then(|details| details.guest_run),
        handler: is_bound.then(|| meters.handler.clone()),
        outcome,
        trace: if jobs.is_empty() {
            None
        } else {
            trace.traceparent().map(str::to_owned)
        },
        jobs,
    };
    Unsettled {
        bytes: settler::bytes_of(&settlement),
        settlement,
        meters,
        attempt: job.attempt,
        claim_sent: claim.sent,
        frees: claim.is_limited.then_some(job.lane),
        charged: claim.is_charged.then(|| claim.lane.clone()),
        replaced: false,
        unanswered: false,
        blocked_at: None,
        refusals: Repeats::default(),
        trace,
        space: None,
    }
}

/// Milliseconds since 1970; negative for earlier times.
fn unix_ms(at: SystemTime) -> i64 {
    match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_millis()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_millis()).unwrap_or(i64::MAX),
    }
}
