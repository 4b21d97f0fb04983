//! One job's journey: claim → dispatch → sandbox run → `RunEnd` → `Outcome` → settle.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use metrics::counter;

use super::Shared;
use super::events::{self, EventContext, Since};
use super::journal::AttemptJournal;
use super::leases::Begun;
use super::meters::{Became, HandlerMeters};
use super::middleware::{AttemptInfo, Next};
use super::policy::Policy;
use super::settler::{Ended, Unsettled};
use crate::job::{ErrorKind, Fence, JobId, Outcome, OwnLimits, RetryPolicy, RunEnd, Tries, decide};
use crate::sandbox::{AbortHandle, Attenuation, BootTime, Handler, JobInput, Run};
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
    /// What events about it tell. `handler`: the one that runs.
    pub(super) fn event_context<'a>(
        &self,
        shared: &'a Shared,
        handler: &'a str,
    ) -> EventContext<'a> {
        EventContext {
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
        let delay = run(&shared, claim).await;
        if !delay.is_zero() {
            // The slot is taken meanwhile: nothing is claimed for it.
            let _ = shared
                .stop
                .drain
                .run_until_cancelled(tokio::time::sleep(delay))
                .await;
        }
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

/// Takes one claimed job from its claim to its settlement. Returns how long its slot has to wait before the next one.
async fn run(shared: &Arc<Shared>, mut claim: Claim) -> Duration {
    let handlers = shared.catalog.current();
    let source = claim.job.source.as_deref();
    let name = shared.settings.handler_for(source, &claim.lane.handler);
    let Some(handler) = handlers.get(name).cloned() else {
        // It was withdrawn between the claim and now.
        end(shared, &claim, &claim.lane.handler, RunEnd::NoHandler).await;
        return Duration::ZERO;
    };
    let overrides = &shared.settings.overrides;
    if claim.job.payload.0.is_empty() {
        let why = "payload is gone: somebody has removed it from rouse.payload".to_owned();
        end(
            shared,
            &claim,
            &handler.manifest.name,
            RunEnd::PayloadRefused(why),
        )
        .await;
        return Duration::ZERO;
    }
    let policy = Policy::resolve(&handler.manifest, overrides);
    let mut policy = match claim.job.lease.or(claim.job.timeout) {
        None => policy,
        Some(_) => {
            let operator_timeout = overrides.of(&handler.manifest.name).time("timeout");
            policy.of_job(claim.job.lease, claim.job.timeout, operator_timeout)
        }
    };
    let (handler, mut own) = match attenuate(&handler, &claim.job, &mut policy) {
        Ok(attenuated) => attenuated.unwrap_or((handler, OwnLimits::default())),
        Err(why) => {
            let why = RunEnd::GrantsRefused(why);
            end(shared, &claim, &handler.manifest.name, why).await;
            return Duration::ZERO;
        }
    };
    own.enqueued_timeout = claim.job.timeout == Some(policy.timeout);
    let journal = Arc::new(AttemptJournal::new(
        shared.clone(),
        &claim.job,
        handler.clone(),
    ));
    let started = Begun {
        lease: policy.lease,
        grace: policy.grace,
        watched: journal.watched(),
    };
    let leases = &shared.leases;
    let abort = match leases.start(claim.job.id, claim.job.fence, &started).await {
        Ok(abort) => abort,
        Err(why) => {
            end(shared, &claim, &handler.manifest.name, why).await;
            return Duration::ZERO;
        }
    };
    let meters = shared.meters.of(&handler.manifest.name);
    let started_after = claim.received.elapsed();
    let run = sandbox_run(
        shared, &mut claim, &handler, &policy, &meters, journal, abort,
    )
    .await;
    let ran = run.used.map(|usage| Ran {
        usage,
        digest: handler.module.digest.0,
    });
    let tries = Tries {
        max: claim.job.max_attempts.unwrap_or(policy.retry.max_attempts),
        more_memory_bytes: more_memory_bytes(&handler, &claim.job),
        own,
        ..tries(&claim)
    };
    let outcome = decide(run.end, tries, &policy.retry, rand::random());
    let started = Some(Started {
        after: started_after,
        ran,
    });
    settle(shared, &claim, meters, started, outcome).await;
    policy.job_delay.unwrap_or(shared.settings.job_delay)
}

/// Ends an attempt that never started.
async fn end(shared: &Shared, claim: &Claim, handler: &str, end: RunEnd) {
    // What waits to be written needs no lease for longer than it has one.
    shared.leases.give_up(claim.job.id, claim.job.fence);
    let outcome = decide(end, tries(claim), &RetryPolicy::default(), rand::random());
    settle(shared, claim, shared.meters.of(handler), None, outcome).await;
}

/// Gives a claim back that has not started.
pub(super) async fn give_back(shared: &Shared, claim: &Claim, why: RunEnd) {
    end(shared, claim, &claim.lane.handler, why).await;
}

/// How often the job was tried, as far as its row says.
fn tries(claim: &Claim) -> Tries {
    let failed = claim.job.attempt.0 - claim.job.lost;
    Tries {
        failed: u32::try_from(failed).unwrap_or(0),
        max: claim.job.max_attempts.unwrap_or(1),
        more_memory_bytes: None,
        own: OwnLimits::default(),
    }
}

/// The handler with what the job leaves of its grants, limits and time, and which limits are the job's by that; none: all of it.
///
/// # Errors
/// Why nothing of it may run: what this host does not understand may take away anything.
fn attenuate(
    handler: &Handler,
    job: &ClaimedJob,
    policy: &mut Policy,
) -> Result<Option<(Arc<Handler>, OwnLimits)>, String> {
    let Some(JsonText(grants)) = &job.grants else {
        return Ok(None);
    };
    let left = Attenuation::parse(grants)?;
    let attenuated = handler.attenuated(&left);
    let timeout = left.timeout(policy.timeout);
    let memory = |handler: &Handler| handler.limits.memory_bytes_of(memory_bytes(job));
    let own = OwnLimits {
        memory: memory(&attenuated) < memory(handler),
        cpu: attenuated.limits.cpu < handler.limits.cpu,
        timeout: timeout < policy.timeout,
        enqueued_timeout: false,
    };
    policy.timeout = timeout;
    Ok(Some((attenuated, own)))
}

/// When an attempt really started, and what it has used.
struct Started {
    /// From the arrival of its claim on.
    after: Duration,
    ran: Option<Ran>,
}

async fn sandbox_run(
    shared: &Arc<Shared>,
    claim: &mut Claim,
    handler: &Arc<Handler>,
    policy: &Policy,
    meters: &HandlerMeters,
    journal: Arc<AttemptJournal>,
    abort: AbortHandle,
) -> Run {
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
        ready_at: job.ready_at,
        claimed_at: job.claimed_at,
        worker_id: &shared.settings.worker_id,
    };
    let of = claim.event_context(shared, &handler.manifest.name);
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
    if let Outcome::Retry { error, .. } | Outcome::Ended { error, .. } = &outcome {
        meters.count_error(error.kind);
        if error.kind == ErrorKind::TimedOut {
            shared.tally.timed_out();
        }
    }
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
            events::dropped(claim.event_context(shared, &meters.handler), reason);
            meters.count(Became::Dropped);
            shared.leases.remove(job.id, job.fence);
            return;
        }
    };
    let is_bound = started.is_some() && meters.handler != claim.lane.handler;
    let unsettled = Unsettled {
        settlement: Settlement {
            id: job.id,
            fence: job.fence,
            started_after: started.as_ref().map(|started| started.after),
            ran: started.and_then(|started| started.ran),
            handler: is_bound.then(|| meters.handler.clone()),
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
