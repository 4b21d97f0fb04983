//! One call to a handler, and its outcome.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::value::RawValue;

use crate::job::{
    AbortReason, Attempt, AttemptError, JobId, Outcome, OwnLimits, RunEnd, State, Tries, Usage,
    decide,
};
use crate::sandbox::{AbortHandle, DatabaseClock, Handler, JobInput, Profile, Sandbox};
use crate::traces::AttemptTrace;
use crate::worker::Policy;

/// An invocation is not retried.
const TRIES: u32 = 1;

/// The input of a call.
#[derive(Debug, Clone)]
pub struct Call {
    /// UTF-8 JSON.
    pub payload: Vec<u8>,
    /// The queue name that the guest sees.
    pub queue: String,
    /// The tenant on whose behalf the handler runs.
    pub tenant: Option<String>,
    /// The profile to record the handler's CPU use in.
    pub profile: Option<Arc<Profile>>,
}

/// The result of a call.
#[derive(Debug)]
pub struct Invoked {
    /// The outcome.
    pub outcome: InvokeOutcome,
    /// Time from the call to the end.
    pub wall: Duration,
    /// The resources that it used; `None` if no guest ran.
    pub used: Option<Usage>,
}

/// An [`Outcome`], reduced to what matters to a caller who waits for it.
#[derive(Debug)]
pub enum InvokeOutcome {
    /// The handler's result.
    Succeeded(Box<RawValue>),
    /// The handler failed, or could not be run.
    Failed(AttemptError),
    /// It exceeded its run timeout.
    TimedOut(AttemptError),
    /// It was stopped, by the caller or because the host is shutting down.
    Stopped(AbortReason),
}

impl InvokeOutcome {
    /// The word for logs, metrics and listings.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Succeeded(_) => State::Succeeded.as_str(),
            Self::Failed(_) => State::Failed.as_str(),
            Self::TimedOut(_) => State::TimedOut.as_str(),
            Self::Stopped(reason) => reason.as_str(),
        }
    }
}

impl From<Outcome> for InvokeOutcome {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Succeeded(result) => {
                let result = RawValue::from_string(result.0);
                Self::Succeeded(result.expect("a result is JSON"))
            }
            // There is no second attempt; the caller may call again.
            Outcome::Retry { error, .. } => Self::Failed(error),
            Outcome::Failed(error) => Self::Failed(error),
            Outcome::TimedOut(error) => Self::TimedOut(error),
            // Without the queue, no wait suspends an attempt.
            Outcome::Suspended(_) | Outcome::Released => Self::Stopped(AbortReason::Shutdown),
        }
    }
}

/// Runs the handler once. Await it in a task of [`Sandbox::guests`]: the guest computes in that task.
pub async fn once(
    sandbox: &Arc<Sandbox>,
    handler: &Arc<Handler>,
    policy: &Policy,
    call: Call,
    abort: AbortHandle,
) -> Invoked {
    let input = JobInput {
        id: call_id(),
        queue: call.queue,
        tenant: call.tenant,
        source: None,
        attempt: Attempt(1),
        max_attempts: TRIES,
        requested_at_ms: now_ms(),
        payload: call.payload,
        payload_checked: None,
        memory_bytes: None,
        clock: DatabaseClock::from_host(),
        trace: AttemptTrace::default(),
    };
    // Steps are not recorded, because no later attempt could use them; progress goes to the log. State is refused,
    // because it would be lost: an error is better than a handler that relies on state that was never saved.
    let run = sandbox.run_profiled(handler, input, abort.clone(), call.profile);
    let report = policy.run_with_timeout(run, &abort).await;
    Invoked {
        outcome: decide_outcome(report.end, policy),
        wall: report.wall,
        used: report.used,
    }
}

fn decide_outcome(end: RunEnd, policy: &Policy) -> InvokeOutcome {
    let tries = Tries {
        failed: TRIES,
        max: TRIES,
        more_memory_bytes: None,
        own: OwnLimits::default(),
    };
    // The last argument randomizes the delay before a retry, and an invocation is not retried.
    match decide(end, tries, &policy.retry, 0.0) {
        Ok(outcome) => outcome.into(),
        Err(reason) => InvokeOutcome::Stopped(reason),
    }
}

/// A random id below 0. There is no job, but handlers derive idempotency keys from its id, so each call has an id of
/// its own. The database assigns positive ids only.
fn call_id() -> JobId {
    JobId(rand::random_range(i64::MIN..0))
}

/// Milliseconds since 1970 by this machine's clock: there is no database to query, and no decision depends on the time.
fn now_ms() -> i64 {
    SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .ok()
        .and_then(|since| i64::try_from(since.as_millis()).ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::job::{Failure, RetryPolicy};

    fn word(end: RunEnd) -> &'static str {
        let policy = Policy {
            lease: Duration::from_secs(60),
            timeout: Duration::from_secs(60),
            grace: Duration::from_secs(5),
            retry: RetryPolicy::default(),
            concurrency: None,
            job_delay: None,
        };
        decide_outcome(end, &policy).word()
    }

    #[test]
    fn each_call_has_a_unique_id_that_no_job_has() {
        let ids: HashSet<JobId> = (0..1000).map(|_| call_id()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.0 < 0));
    }

    #[test]
    fn the_outcome_of_an_invocation_is_that_of_the_last_attempt_of_a_job() {
        assert_eq!(word(RunEnd::Returned(b"{}".to_vec())), "succeeded");
        assert_eq!(word(RunEnd::Returned(b"{".to_vec())), "failed");
        let retryable = Failure {
            kind: "busy".into(),
            message: "later".into(),
            details: None,
            permanent: false,
            retry_after: Some(Duration::from_secs(1)),
            retry_at: None,
        };
        assert_eq!(word(RunEnd::Failed(retryable)), "failed");
        assert_eq!(word(RunEnd::Aborted(AbortReason::TimedOut)), "timed_out");
        assert_eq!(word(RunEnd::Aborted(AbortReason::Shutdown)), "shutdown");
        assert_eq!(word(RunEnd::Aborted(AbortReason::Cancelled)), "cancelled");
    }
}
