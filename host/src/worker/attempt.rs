//! One job's journey: claim → dispatch → sandbox run → `RunEnd` → `Outcome` → settle.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use metrics::counter;

use super::Shared;
use super::events::{self, Of, Since};
use super::journal::AttemptJournal;
use super::leases::Lease;
use super::meters::{Became, HandlerMeters};
use super::middleware::{AttemptInfo, Next};
use super::policy::Policy;
use super::settler::{Ended, Unsettled};
use crate::job::{
    AttemptError, ErrorKind, Fence, JobId, Outcome, OwnLimits, RetryPolicy, RunEnd, State, Tries,
    decide,
};
use crate::sandbox::{AbortHandle, BootTime, Handler, JobInput, Narrowing, Run};
use crate::store::{ClaimedJob, Fate, JsonText, Lane, Ran, Settlement};

/// A job, as it came from the database.
pub(super) struct Claim {
    pub(super) job: ClaimedJob,
    pub(super) lane: Arc<Lane>,
    /// Before the claim was asked for.
    pub(super) asked: BootTime,
    /// When it had arrived.
    pub(super) received: Instant,
    /// How long it is good for, from `asked` on, without renewal.
    pub(super) lease: Duration,
}

impl Claim {
    /// True when its lease has run out: it stood in line while the machine was suspended, for instance.
    pub(super) fn is_lost(&self, now: BootTime) -> bool {
        self.asked.plus(self.lease) <= now
    }

    /// What events about it tell. `handler`: the one that runs.
    pub(super) fn of<'a>(&self, shared: &'a Shared, handler: &'a str) -> Of<'a> {
        Of {
            worker_id: &shared.settings.worker_id,
            id: self.job.id,
            handler,
            attempt: self.job.attempt,
            since: Since::Asked(self.asked),
        }
    }
}

/// One slot: takes claims through their attempts, one after the other, until none waits.
pub(super) async fn serve(shared: Arc<Shared>) {
    let mut slot = Slot {
        shared: &shared,
        runs: None,
        done: false,
    };
    while let Some(claim) = shared.slots.next(slot.runs.is_some()) {
        slot.runs = Some((claim.job.id, claim.job.fence));
        run(&shared, claim).await;
        // Jobs of a few microseconds would keep the thread from everything else.
        tokio::task::consume_budget().await;
    }
    slot.done = true;
}

/// Frees a slot whose task ends in the middle of an attempt.
struct Slot<'a> {
    shared: &'a Shared,
    runs: Option<(JobId, Fence)>,
    done: bool,
}

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        if let Some((id, fence)) = self.runs {
            // Nobody will settle it. Without renewals its lease runs out, and it is adopted.
            self.shared.leases.remove(id, fence);
        }
        self.shared.slots.broke();
    }
}

/// Takes one claimed job from its claim to its settlement.
async fn run(shared: &Arc<Shared>, mut claim: Claim) {
    // Others may run it by now. Where nobody has it, nothing is lost.
    if claim.is_lost(BootTime::now()) {
        return give_back(shared, &claim).await;
    }
    let handler = match dispatch(shared, &claim) {
        Dispatch::To(handler) => handler,
        Dispatch::Withdrawn => return give_back(shared, &claim).await,
        Dispatch::Unbound(why) => {
            let error = AttemptError::new(ErrorKind::Unrunnable, why);
            let delay = RetryPolicy::default().initial;
            let outcome = Outcome::Retry {
                again: delay.into(),
                error,
            };
            let meters = shared.meters.of(&claim.lane.handler);
            return settle(shared, &claim, meters, None, outcome).await;
        }
    };
    let mut policy = Policy::resolve(&handler.manifest, &shared.settings.overrides);
    let (handler, own) = match narrow(&handler, &claim.job, &mut policy) {
        Ok(narrowed) => narrowed.unwrap_or((handler, OwnLimits::default())),
        Err(why) => {
            let meters = shared.meters.of(&handler.manifest.name);
            let error = AttemptError::new(ErrorKind::Denied, why);
            let state = State::Failed;
            return settle(
                shared,
                &claim,
                meters,
                None,
                Outcome::Ended { state, error },
            )
            .await;
        }
    };
    let meters = shared.meters.of(&handler.manifest.name);
    let started_after = claim.received.elapsed();
    let run = sandbox_run(shared, &mut claim, &handler, &policy, &meters).await;
    let ran = run.used.map(|usage| Ran {
        usage,
        digest: handler.module.digest.0,
    });
    let outcome = outcome(&handler, &claim, run, &policy, own);
    if let Outcome::Retry { error, .. } | Outcome::Ended { error, .. } = &outcome {
        meters.count_error(error.kind);
        if error.kind == ErrorKind::TimedOut {
            shared.tally.timed_out();
        }
    }
    let started = Some(Started {
        after: started_after,
        ran,
    });
    settle(shared, &claim, meters, started, outcome).await;
}

/// The handler with what the job leaves of its grants, limits and time, and which limits are the job's by that; none: all of it.
///
/// # Errors
/// Why nothing of it may run: what this host does not understand may take away anything.
fn narrow(
    handler: &Handler,
    job: &ClaimedJob,
    policy: &mut Policy,
) -> Result<Option<(Arc<Handler>, OwnLimits)>, String> {
    let Some(JsonText(grants)) = &job.grants else {
        return Ok(None);
    };
    let left = Narrowing::parse(grants)?;
    let narrowed = handler.narrowed(&left);
    let timeout = left.timeout(policy.timeout);
    let memory = |handler: &Handler| handler.limits.memory_bytes_of(memory_bytes(job));
    let own = OwnLimits {
        memory: memory(&narrowed) < memory(handler),
        cpu: narrowed.limits.cpu < handler.limits.cpu,
        timeout: timeout < policy.timeout,
    };
    policy.timeout = timeout;
    Ok(Some((narrowed, own)))
}

/// When an attempt really started, and what it has used.
struct Started {
    /// From the arrival of its claim on.
    after: Duration,
    ran: Option<Ran>,
}

/// Gives a claim back that has not started.
pub(super) async fn give_back(shared: &Shared, claim: &Claim) {
    let meters = shared.meters.of(&claim.lane.handler);
    settle(shared, claim, meters, None, Outcome::Released).await;
}

/// Where a claimed job goes.
enum Dispatch {
    To(Arc<Handler>),
    /// The handler was withdrawn between the claim and now.
    Withdrawn,
    /// The operator bound the job's source to a handler that is not there.
    Unbound(String),
}

/// The handler for the job: the one that the operator bound to its source, else the one that its
/// producer named.
fn dispatch(shared: &Shared, claim: &Claim) -> Dispatch {
    let handlers = shared.catalog.current();
    let source = claim.job.source.as_ref();
    let bound = source.and_then(|source| shared.settings.sources.get(source));
    let name = bound.unwrap_or(&claim.lane.handler);
    match (handlers.get(name), bound) {
        (Some(handler), _) => Dispatch::To(handler.clone()),
        (None, None) => Dispatch::Withdrawn,
        (None, Some(bound)) => Dispatch::Unbound(format!(
            "rouse.toml binds the source of this job to the handler {bound}, which this host does not have"
        )),
    }
}

async fn sandbox_run(
    shared: &Arc<Shared>,
    claim: &mut Claim,
    handler: &Arc<Handler>,
    policy: &Policy,
    meters: &HandlerMeters,
) -> Run {
    let abort = AbortHandle::new();
    let journal = Arc::new(AttemptJournal::new(
        shared.clone(),
        &claim.job,
        handler.clone(),
    ));
    shared.leases.insert(
        claim.job.id,
        Lease {
            fence: claim.job.fence,
            lease: policy.lease,
            grace: policy.grace,
            abort: abort.clone(),
            watched: journal.watched(),
            // What the claim was made for, which a new version of the handler, or one that the
            // operator bound to the source, need not agree with.
            trusted_until: claim.asked.plus(claim.lease),
            over: false,
            doubted: false,
        },
    );
    let input = input(claim, policy);
    let job = &claim.job;
    let about = AttemptInfo {
        id: job.id,
        handler: &handler.manifest.name,
        queue: &claim.lane.queue,
        tenant: job.tenant.as_deref(),
        source: job.source.as_deref(),
        attempt: job.attempt,
        max_attempts: input.max_attempts,
        requested_at: job.requested_at,
        claimed_at: job.claimed_at,
        worker_id: &shared.settings.worker_id,
    };
    let of = claim.of(shared, &handler.manifest.name);
    events::started(of);
    let run = shared
        .sandbox
        .run(handler, input, abort.clone(), Some(journal.clone()));
    let run = Box::pin(policy.within(run, &abort));
    let run = Next::new(&shared.middlewares, &about, run).run().await;
    journal.close();
    if let (RunEnd::Aborted(reason), Some(took)) = (&run.end, abort.turned_for()) {
        events::aborted(of, *reason, took);
    }
    meters.seconds.record(run.wall.as_secs_f64());
    shared.tally.ran(run.wall);
    run
}

/// What the guest is told of its job.
fn input(claim: &mut Claim, policy: &Policy) -> JobInput {
    let job = &mut claim.job;
    JobInput {
        id: job.id,
        queue: claim.lane.queue.clone(),
        tenant: job.tenant.clone(),
        source: job.source.clone(),
        attempt: job.attempt,
        max_attempts: job.max_attempts.unwrap_or(policy.retry.max_attempts),
        requested_at_ms: unix_ms(job.requested_at),
        payload: std::mem::take(&mut job.payload.0).into_bytes(),
        memory_bytes: memory_bytes(job),
    }
}

/// The decision about the job, which is pure; see [`decide`].
fn outcome(handler: &Handler, claim: &Claim, run: Run, policy: &Policy, own: OwnLimits) -> Outcome {
    let failed = claim.job.attempt.0 - claim.job.lost;
    let tries = Tries {
        failed: u32::try_from(failed).unwrap_or(0),
        max: claim.job.max_attempts.unwrap_or(policy.retry.max_attempts),
        more_memory_bytes: more_memory_bytes(handler, &claim.job),
        own,
    };
    decide(run.end, tries, &policy.retry, rand::random())
}

/// The memory that an earlier attempt has asked for, by running out of its own.
fn memory_bytes(job: &ClaimedJob) -> Option<usize> {
    job.memory_bytes
        .map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX))
}

/// What the next attempt may have if this one ran out of memory: once in the life of a job there is more.
fn more_memory_bytes(handler: &Handler, job: &ClaimedJob) -> Option<u64> {
    if job.memory_bytes.is_some() {
        return None;
    }
    u64::try_from(handler.limits.more_memory()?).ok()
}

/// Hands the outcome to the settler, which writes it behind the fence.
async fn settle(
    shared: &Shared,
    claim: &Claim,
    meters: Arc<HandlerMeters>,
    started: Option<Started>,
    outcome: Outcome,
) {
    let job = &claim.job;
    let fate = match outcome {
        Outcome::Succeeded(result) => {
            let text: Box<str> = result.into();
            Fate::Succeeded(JsonText(text.into()))
        }
        Outcome::Retry { again, error } => Fate::Retry(again, JsonText(error.to_json())),
        Outcome::Ended { state, error } => Fate::Ended(state, JsonText(error.to_json())),
        Outcome::Released => Fate::Released,
        Outcome::Dropped(reason) => {
            counter!("rouse_lease_losses_total", "reason" => reason.as_str()).increment(1);
            events::dropped(claim.of(shared, &meters.handler), reason);
            meters.count(Became::Dropped);
            shared.leases.remove(job.id, job.fence);
            return;
        }
    };
    let unsettled = Unsettled {
        settlement: Settlement {
            id: job.id,
            fence: job.fence,
            started_after: started.as_ref().map(|started| started.after),
            ran: started.and_then(|started| started.ran),
            fate,
        },
        meters,
        attempt: job.attempt,
        asked: claim.asked,
        replaced: false,
    };
    // The settler outlives every attempt. Were it gone, the lease must run out, so that the job is
    // adopted.
    if shared
        .settlements
        .send(Ended::Settle(unsettled))
        .await
        .is_err()
    {
        shared.leases.remove(job.id, job.fence);
    }
}

/// Milliseconds since 1970; negative before.
fn unix_ms(at: SystemTime) -> i64 {
    match at.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_millis()).unwrap_or(i64::MAX),
        Err(before) => -i64::try_from(before.duration().as_millis()).unwrap_or(i64::MAX),
    }
}
