//! The path of a batch: one attempt at several jobs of a tenant.
//!
//! The guest gives each job its outcome. If it dies, the jobs without an outcome are run again, one by one, so that one
//! bad job does not make the others fail. Their leases are renewed throughout.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tracing::warn;

use super::super::meters::OutcomeLabel;
use super::{
    AttemptDetails, Claim, Shared, Started, Terms, end_unstarted, input, run_in_sandbox,
    run_traced, settle, start, traced, tries,
};
use crate::job::{AbortReason, Failure, JobId, RunEnd, Usage, decide};
use crate::sandbox::{AbortHandle, Meter, RunReport};
use crate::store::GuestRun;
use crate::traces::AttemptTrace;

/// One job of a batch.
struct Member {
    claim: Claim,
    started: Started,
    /// The CPU time of the check of its payload.
    checked: Duration,
}

/// Takes the jobs of a batch from their claim to the settler. Returns how long the slot has to wait before the next
/// job.
pub(super) async fn run(shared: &Arc<Shared>, claim: Claim) -> Duration {
    let claims = claim.split();
    // Started concurrently, because each may have to wait for the renewal of its lease.
    let starts = join_all(claims.iter().map(|claim| start(shared, claim))).await;
    let mut members: Vec<Member> = Vec::new();
    for (claim, started) in claims.into_iter().zip(starts) {
        let started = match started {
            Ok(started) => started,
            Err(unstarted) => {
                end_unstarted(shared, &claim, unstarted).await;
                continue;
            }
        };
        match check_payload(shared, &claim, &started).await {
            (None, usage) => members.push(Member {
                claim,
                started,
                checked: usage.cpu,
            }),
            (Some(end), usage) => {
                let handler = &started.terms.handler.manifest.name;
                let traced = traced(shared, &claim, handler, false);
                let trace = shared.settings.traces.attempt(&traced);
                settle_end(shared, claim, started, Some(usage), end, trace).await;
            }
        }
        tokio::task::consume_budget().await;
    }
    let mut delay = Duration::ZERO;
    let mut is_again = false;
    // The jobs may not be alike if the module has been replaced since the claim.
    while members.len() > 1 && are_alike(&members) {
        let report = run_together(shared, &members, is_again).await;
        is_again = true;
        // The attempt acted on behalf of the first job; without that job, the others can run together. The first job
        // leaves the batch, so this loop ends.
        let first_leaves = members[0].started.abort.reason().is_some_and(is_of_one_job);
        delay = settle_ended(shared, &mut members, report).await;
        if !first_leaves {
            break;
        }
    }
    let started_at = Instant::now();
    for member in members {
        let Member {
            claim,
            started,
            checked,
        } = member;
        let timeout = started.terms.policy.timeout;
        let handler = &started.terms.handler.manifest.name;
        let traced = traced(shared, &claim, handler, is_again);
        let trace = shared.settings.traces.attempt(&traced);
        if shared.stop.drain.is_cancelled() || started_at.elapsed() > timeout {
            // Other slots, and other workers, can run the job.
            settle_end(shared, claim, started, None, RunEnd::NotStarted, trace).await;
        } else {
            delay = run_traced(shared, claim, started, Some(checked), trace).await;
        }
    }
    delay
}

/// Checks the payload of a job. Returns the end of the job if the handler does not accept the payload, and the usage of
/// the check, which has its own limit for each job.
async fn check_payload(
    shared: &Shared,
    claim: &Claim,
    started: &Started,
) -> (Option<RunEnd>, Usage) {
    let handler = &started.terms.handler;
    let payload = claim.job.payload.0.as_bytes();
    let meter = Arc::<Meter>::default();
    let refused = shared
        .sandbox
        .refuse_payload(handler, payload, &started.abort, &meter)
        .await;
    (refused, meter.usage())
}

/// True if one handler that takes batches runs all of them.
fn are_alike(members: &[Member]) -> bool {
    let first = &members[0].started.terms.handler;
    let mut others = members.iter().map(|it| &it.started.terms.handler);
    first.manifest.takes_batches() && others.all(|handler| Arc::ptr_eq(handler, first))
}

/// True if an abort concerns one job, which the attempt has lost.
fn is_of_one_job(reason: AbortReason) -> bool {
    match reason {
        AbortReason::TakenByAnotherWorker
        | AbortReason::AlreadyCompleted
        | AbortReason::NotFound
        | AbortReason::Cancelled => true,
        AbortReason::Error | AbortReason::Shutdown | AbortReason::TimedOut => false,
    }
}

/// Runs these jobs as one attempt. `is_again`: they have already run together, with another one.
async fn run_together(shared: &Arc<Shared>, members: &[Member], is_again: bool) -> RunReport {
    let Member {
        claim,
        started: first,
        ..
    } = &members[0];
    let aborts = members.iter().map(|it| it.started.abort.clone());
    let abort = AbortHandle::for_batch(aborts.collect());
    let traced = members.iter().map(|it| {
        let handler = &it.started.terms.handler.manifest.name;
        traced(shared, &it.claim, handler, is_again)
    });
    let trace = shared.settings.traces.batch(&traced.collect::<Vec<_>>());
    let inputs = members.iter().map(|it| {
        // Cloned, because the job may be run again.
        let payload = it.claim.job.payload.0.clone();
        let policy = &it.started.terms.policy;
        input(&it.claim, policy, payload, trace.clone())
    });
    let run = shared.sandbox.run_batch(
        &first.terms.handler,
        inputs.collect(),
        abort.clone(),
        Some(first.journal.clone()),
    );
    let run = run_in_sandbox(shared, claim, first, (&abort, &trace), run);
    let report = tokio::select! {
        biased;
        report = run => report,
        () = abort.follow() => unreachable!("it never returns"),
    };
    let all_succeeded = report
        .of_jobs
        .iter()
        .all(|(_, end)| matches!(end, RunEnd::Returned(_)));
    match &report.end {
        RunEnd::Returned(_) if all_succeeded => trace.end(OutcomeLabel::Succeeded.as_str(), None),
        RunEnd::Aborted(reason) => {
            trace.end(OutcomeLabel::Dropped.as_str(), Some((reason.as_str(), "")));
        }
        _ => trace.end(OutcomeLabel::Failed.as_str(), Some(("batch", ""))),
    }
    report
}

/// Settles the jobs that have an end, and leaves the others. Returns how long the slot has to wait.
async fn settle_ended(
    shared: &Arc<Shared>,
    members: &mut Vec<Member>,
    report: RunReport,
) -> Duration {
    let mut of_jobs: HashMap<JobId, RunEnd> = report.of_jobs.into_iter().collect();
    let count = members.len();
    let of_others = end_of_each(report.end, count - of_jobs.len());
    let mut delay = Duration::ZERO;
    let mut left = Vec::new();
    let usage = report.used.map(|usage| share(usage, count));
    for member in members.drain(..) {
        let own = member.started.abort.reason();
        let settled = of_jobs.remove(&member.claim.job.id);
        let end = match own {
            Some(reason) if is_of_one_job(reason) => Some(RunEnd::Aborted(reason)),
            // An outcome that the guest has given stays. Its settlement is behind the fence.
            own => settled.or(own.map(RunEnd::Aborted)),
        };
        let Some(end) = end.or_else(|| of_others.clone()) else {
            left.push(member);
            continue;
        };
        let Member {
            claim,
            started,
            checked,
        } = member;
        let usage = usage.map(|usage| Usage {
            cpu: usage.cpu + checked,
            ..usage
        });
        delay = (started.terms.policy.job_delay).unwrap_or(shared.settings.job_delay);
        // The trace of the batch ends separately.
        let trace = AttemptTrace::default();
        settle_end(shared, claim, started, usage, end, trace).await;
    }
    if let [first, ..] = &left[..] {
        warn!(
            handler = first.started.terms.handler.manifest.name,
            job.id = first.claim.job.id.0,
            jobs = left.len(),
            "a batch ended before all of its jobs had an outcome; the jobs without one are run again"
        );
    }
    *members = left;
    delay
}

/// Decides and settles a job of a batch, and ends its own trace. `usage`: the job's share of the usage of the attempt,
/// and that of its own check.
async fn settle_end(
    shared: &Shared,
    claim: Claim,
    started: Started,
    usage: Option<Usage>,
    end: RunEnd,
    trace: AttemptTrace,
) {
    let Terms {
        handler, policy, ..
    } = &started.terms;
    let guest_run = usage.map(|usage| GuestRun {
        usage,
        digest: handler.module.digest.0,
    });
    let details = AttemptDetails {
        started_after: started.after,
        guest_run,
        jobs: Vec::new(),
    };
    let tries = tries(&claim.job, &started.terms);
    let outcome = decide(end, tries, &policy.retry, rand::random());
    settle(
        shared,
        &claim,
        started.meters,
        trace,
        Some(details),
        outcome,
    )
    .await;
}

/// The end of each of the `jobs` without an outcome, after this end of the attempt. `None` if these jobs are run again,
/// because one of them may have caused the end of the attempt, or has to be left out.
fn end_of_each(end: RunEnd, jobs: usize) -> Option<RunEnd> {
    match end {
        RunEnd::Returned(_) => Some(RunEnd::Failed(Failure {
            kind: "no_outcome".into(),
            message: "the handler returned without an outcome for this job of a batch".into(),
            details: None,
            permanent: false,
            retry_after: None,
            retry_at: None,
        })),
        RunEnd::Denied { denial, then } => end_of_each(*then, jobs).map(|then| RunEnd::Denied {
            denial,
            then: Box::new(then),
        }),
        // Jobs that the attempt has lost have an end of their own.
        RunEnd::Aborted(AbortReason::Error) => None,
        RunEnd::Aborted(reason) if is_of_one_job(reason) => None,
        guilty @ (RunEnd::Panicked { .. }
        | RunEnd::Trapped { .. }
        | RunEnd::StackOverflow { .. }
        | RunEnd::OutOfMemory { .. }
        | RunEnd::OutOfCpu { .. }
        | RunEnd::OutputTooLarge { .. }
        | RunEnd::Aborted(AbortReason::TimedOut)) => (jobs == 1).then_some(guilty),
        all @ (RunEnd::Failed(_)
        | RunEnd::Aborted(_)
        | RunEnd::Suspended(_)
        | RunEnd::PayloadRefused(_)
        | RunEnd::ResultRefused(_)
        | RunEnd::SettlementRefused(_)
        | RunEnd::NotStarted
        | RunEnd::NoHandler
        | RunEnd::GrantsRefused(_)
        | RunEnd::EffectFailed(_)
        | RunEnd::Parked
        | RunEnd::Unrunnable(_)) => Some(all),
    }
}

/// The usage of each of this many jobs. The peak memory is not divided: it is that of all of them together.
fn share(usage: Usage, jobs: usize) -> Usage {
    let jobs = u32::try_from(jobs).unwrap_or(u32::MAX).max(1);
    Usage {
        cpu: usage.cpu / jobs,
        host_calls: usage.host_calls / jobs,
        bytes_in: usage.bytes_in / u64::from(jobs),
        bytes_out: usage.bytes_out / u64::from(jobs),
        ..usage
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_the_whole_batch_applies_to_each_job_and_a_crash_to_none() {
        let failure = Failure {
            kind: "error".into(),
            message: "down".into(),
            details: None,
            permanent: false,
            retry_after: None,
            retry_at: None,
        };
        let failed = RunEnd::Failed(failure);
        assert_eq!(end_of_each(failed.clone(), 3), Some(failed.clone()));
        let denied = |then| RunEnd::Denied {
            denial: "no".into(),
            then: Box::new(then),
        };
        assert_eq!(end_of_each(denied(failed.clone()), 3), Some(denied(failed)));
        let memory = RunEnd::OutOfMemory { limit_bytes: 1 };
        assert_eq!(end_of_each(denied(memory.clone()), 3), None);
        assert_eq!(end_of_each(denied(memory.clone()), 1), Some(denied(memory)));
        let shutdown = RunEnd::Aborted(AbortReason::Shutdown);
        assert_eq!(end_of_each(shutdown.clone(), 3), Some(shutdown));
        let timed_out = RunEnd::Aborted(AbortReason::TimedOut);
        assert_eq!(end_of_each(timed_out.clone(), 3), None);
        assert_eq!(end_of_each(timed_out.clone(), 1), Some(timed_out));
        let cancelled = RunEnd::Aborted(AbortReason::Cancelled);
        assert_eq!(end_of_each(cancelled, 1), None, "it is the first job's");
        match end_of_each(RunEnd::Returned(Vec::new()), 1) {
            Some(RunEnd::Failed(failure)) => assert_eq!(failure.kind, "no_outcome"),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn usage_is_shared_among_the_jobs() {
        let usage = Usage {
            cpu: Duration::from_millis(10),
            memory_bytes_peak: 7,
            host_calls: 9,
            bytes_in: 100,
            bytes_out: 3,
        };
        let shared = Usage {
            cpu: Duration::from_millis(5),
            memory_bytes_peak: 7,
            host_calls: 4,
            bytes_in: 50,
            bytes_out: 1,
        };
        assert_eq!(share(usage, 2), shared);
    }
}
