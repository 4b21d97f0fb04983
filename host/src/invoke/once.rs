//! One call of a handler, and its answer.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde_json::value::RawValue;

use crate::job::{
    AbortReason, Attempt, AttemptError, JobId, Outcome, OwnLimits, RunEnd, State, Tries, Usage,
    decide,
};
use crate::sandbox::{AbortHandle, Handler, JobInput, Profile, Sandbox};
use crate::worker::Policy;

/// Nothing waits to try again.
const TRIES: u32 = 1;

/// What a handler is called with.
#[derive(Debug, Clone)]
pub struct Call {
    /// UTF-8 JSON.
    pub payload: Vec<u8>,
    /// The queue that the guest is told of.
    pub queue: String,
    /// Whose call it is.
    pub tenant: Option<String>,
    /// Where what the handler does is noted.
    pub profile: Option<Arc<Profile>>,
}

/// What has come of it.
#[derive(Debug)]
pub struct Invoked {
    /// The answer.
    pub answer: Answer,
    /// Time from the call to the end.
    pub wall: Duration,
    /// What it has used; none where there was no guest.
    pub used: Option<Usage>,
}

/// An [`Outcome`], as far as it means anything to somebody who waits for it.
#[derive(Debug)]
pub enum Answer {
    /// The handler's result.
    Succeeded(Box<RawValue>),
    /// The handler failed, or could not be run.
    Failed(AttemptError),
    /// It ran longer than it may.
    TimedOut(AttemptError),
    /// It was told to stop: by whoever asked, or because the host ends.
    Stopped(AbortReason),
}

impl Answer {
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

impl From<Outcome> for Answer {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Succeeded(result) => {
                let result = RawValue::from_string(result.0);
                Self::Succeeded(result.expect("a result is JSON"))
            }
            // Of one try none is left; whoever asked may call again.
            Outcome::Retry { error, .. } => Self::Failed(error),
            Outcome::Failed(error) => Self::Failed(error),
            Outcome::TimedOut(error) => Self::TimedOut(error),
            Outcome::Released => Self::Stopped(AbortReason::Shutdown),
        }
    }
}

/// Runs the handler once. It has to be awaited in a task of [`Sandbox::guests`]: the guest computes
/// in it.
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
        memory_bytes: None,
    };
    // Steps are not recorded, as there is no later attempt that could use them; progress goes to the log. State is refused:
    // a handler that took what is lost for kept would be worse off than one that is told.
    let run = sandbox.run_profiled(handler, input, abort.clone(), call.profile);
    let run = policy.within(run, &abort).await;
    Invoked {
        answer: answer(run.end, policy),
        wall: run.wall,
        used: run.used,
    }
}

fn answer(end: RunEnd, policy: &Policy) -> Answer {
    let tries = Tries {
        failed: TRIES,
        max: TRIES,
        more_memory_bytes: None,
        own: OwnLimits::default(),
    };
    // The last figure is for the wait before another try, and there is none.
    match decide(end, tries, &policy.retry, 0.0) {
        Ok(outcome) => outcome.into(),
        Err(reason) => Answer::Stopped(reason),
    }
}

/// There is no job, but handlers make keys of its id by which others tell two jobs from each other: so each call has
/// a number of its own. The database gives positive ones only.
fn call_id() -> JobId {
    JobId(rand::random_range(i64::MIN..0))
}

/// By this machine's clock: there is no database to ask, and nothing is decided by it.
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
            job_delay: None,
        };
        answer(end, &policy).word()
    }

    #[test]
    fn every_call_has_an_id_of_its_own_that_no_job_has() {
        let ids: HashSet<JobId> = (0..1000).map(|_| call_id()).collect();
        assert_eq!(ids.len(), 1000);
        assert!(ids.iter().all(|id| id.0 < 0));
    }

    #[test]
    fn an_invocation_is_judged_like_the_last_attempt_of_a_job() {
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
