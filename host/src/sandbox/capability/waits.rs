//! `rouse:handler/waits`: sleeps, signals and calls. A wait that takes a while ends the attempt: the host records it,
//! and does not return from the call.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::steps::StepStart;
use crate::job::{JobId, NewJobKind, RecordedStep, ReturnedCall, Suspension, Wait, WaitKind};
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::rouse::handler::jobs::JobError;
use crate::sandbox::bindings::rouse::handler::steps::StepError;
use crate::sandbox::bindings::rouse::handler::waits::{Host, NewCall, Returned};

/// A shorter wait keeps its slot: suspending and resuming an attempt costs the database as much as a job.
const IN_PLACE: Duration = Duration::from_secs(2);

/// The maximum duration of a wait: a handler that requests a longer one has confused its units.
const WAIT_MAX: Duration = Duration::from_secs(100 * 365 * 24 * 60 * 60);

/// The maximum length of a signal's name, which people read.
const NAME_CHARS_MAX: usize = 200;

/// The end of an attempt that is suspended. The guest cannot catch it.
#[derive(Debug)]
struct Suspended;

impl std::fmt::Display for Suspended {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the attempt is suspended")
    }
}

impl std::error::Error for Suspended {}

/// The end of a call to the host.
enum Ended<T> {
    /// It returns.
    Returned(T),
    /// It does not return: the attempt is suspended.
    Suspended(Suspension),
}

impl AttemptState {
    /// Runs a wait, unless the attempt has to stop before it is done. A suspension stops the guest.
    async fn wait<T, E>(
        &mut self,
        aborted: E,
        wait: impl AsyncFnOnce(&mut Self) -> Result<Ended<T>, E>,
    ) -> wasmtime::Result<Result<T, E>> {
        self.meter.count_host_call();
        let abort = self.abort.clone();
        let ended = tokio::select! {
            biased;
            () = abort.aborted() => Err(aborted),
            ended = wait(self) => ended,
        };
        match ended {
            Ok(Ended::Returned(value)) => Ok(Ok(value)),
            Ok(Ended::Suspended(suspension)) => {
                self.jobs.keep_calls();
                self.suspension = Some(suspension);
                Err(wasmtime::Error::new(Suspended))
            }
            Err(error) => Ok(Err(error)),
        }
    }

    async fn sleep_to(&mut self, step: String, until: Until) -> Result<Ended<()>, StepError> {
        let earlier = match self.steps.start_wait(&step).await? {
            StepStart::Done(_) => return Ok(Ended::Returned(())),
            StepStart::Waits(earlier) if earlier.kind == WaitKind::Sleep => Some(earlier),
            StepStart::Waits(_) => return Err(other_kind("sleep")),
            StepStart::New => None,
        };
        let now = self.clock.now();
        let until = match earlier.and_then(|earlier| earlier.until) {
            Some(until) => until,
            None => until.from(now),
        };
        let rest = until.duration_since(now).unwrap_or_default();
        if rest < IN_PLACE || self.steps.waits().is_none() {
            // Tokio takes a millisecond for a sleep of zero duration: too long for each of a thousand sleeps that have
            // ended.
            if !rest.is_zero() {
                tokio::time::sleep(rest).await;
            }
            if earlier.is_none() {
                self.steps.complete(step, b"null".to_vec()).await?;
            }
            return Ok(Ended::Returned(()));
        }
        Ok(Ended::Suspended(Suspension {
            step,
            wait: Wait::Sleep { until },
            is_recorded: earlier.is_some(),
        }))
    }

    async fn signalled(
        &mut self,
        step: String,
        name: String,
        timeout: Option<Duration>,
    ) -> Result<Ended<Option<Vec<u8>>>, StepError> {
        let chars = name.chars().count();
        if chars == 0 || chars > NAME_CHARS_MAX || name.chars().any(char::is_control) {
            return Err(StepError::Refused(format!(
                "the name of a signal must have 1 to {NAME_CHARS_MAX} printable characters"
            )));
        }
        let earlier = match self.steps.start_wait(&step).await? {
            StepStart::Done(result) => return payload(&result).map(Ended::Returned),
            StepStart::Waits(earlier) if earlier.kind == WaitKind::Signal => Some(earlier),
            StepStart::Waits(_) => return Err(other_kind("signal")),
            StepStart::New => None,
        };
        let now = self.clock.now();
        let until = match earlier {
            Some(earlier) => earlier.until,
            None => timeout.map(|timeout| now + timeout.min(WAIT_MAX)),
        };
        self.steps.count_calls(1).map_err(StepError::Refused)?;
        let waits = self.steps.waits().ok_or_else(no_queue)?;
        let taken = waits.take_signal(&step, &name, until).await;
        if let Some(result) = taken.map_err(StepError::Refused)? {
            let payload = payload(&result)?;
            self.steps.note(step, result.len());
            return Ok(Ended::Returned(payload));
        }
        Ok(Ended::Suspended(Suspension {
            step,
            wait: Wait::Signal { name, until },
            is_recorded: earlier.is_some(),
        }))
    }

    async fn called(&mut self, calls: Vec<NewCall>) -> Result<Ended<Vec<Returned>>, JobError> {
        let Some(first) = calls.first().map(|call| call.step.clone()) else {
            return Ok(Ended::Returned(Vec::new()));
        };
        if calls.len() > self.jobs.count_max() {
            return Err(JobError::Refused(format!(
                "an attempt may call at most {} jobs at once (limits.jobs in rouse.toml)",
                self.jobs.count_max()
            )));
        }
        let steps: Vec<String> = calls.iter().map(|call| call.step.clone()).collect();
        let MadeCalls {
            mut returned,
            unread,
        } = self.made_calls(&steps).await?;
        if !unread.is_empty() {
            let counted = self.steps.count_calls(unread.len());
            counted.map_err(JobError::Refused)?;
            let known: usize = returned.values().map(bytes_of).sum();
            let bytes_max = self.steps.bytes_max().saturating_sub(known);
            let waits = self.steps.waits().ok_or_else(no_queue);
            let waits = waits.map_err(refused_job)?;
            let read = waits.returned_calls(&unread, bytes_max).await;
            let read = read.map_err(JobError::Refused)?;
            self.steps.count_read(read.values().map(bytes_of).sum());
            returned.extend(read);
        }
        let known_jobs = self.jobs.len();
        let called = self.call_missing(calls, returned);
        if called.is_err() {
            self.jobs.take_back(known_jobs);
        }
        let (done, pending) = called?;
        if pending.is_empty() && self.jobs.len() == known_jobs {
            return Ok(Ended::Returned(done));
        }
        Ok(Ended::Suspended(Suspension {
            step: first,
            wait: Wait::Calls { jobs: pending },
            is_recorded: true,
        }))
    }

    /// Enqueues the calls that no earlier attempt has made. Returns the ends of the calls that have ended, and the jobs
    /// of those that have not.
    fn call_missing(
        &mut self,
        calls: Vec<NewCall>,
        mut returned: HashMap<String, ReturnedCall>,
    ) -> Result<(Vec<Returned>, Vec<JobId>), JobError> {
        let mut done = Vec::new();
        let mut pending = Vec::new();
        for call in calls {
            match returned.remove(&call.step) {
                Some(ReturnedCall::Pending(job)) => pending.push(job),
                Some(ReturnedCall::Done(result)) => done.push(end_of_call(&result)?),
                None => {
                    let kind = NewJobKind::Call { step: call.step };
                    self.add_job(call.job, kind)?;
                }
            }
        }
        Ok((done, pending))
    }

    /// The calls of these steps that earlier attempts have made.
    async fn made_calls(&mut self, steps: &[String]) -> Result<MadeCalls, JobError> {
        let mut names = HashSet::new();
        let mut made = MadeCalls::default();
        let mut new = 0;
        for step in steps {
            if !names.insert(step) {
                return Err(JobError::Refused(format!("two calls have the name {step}")));
            }
            match self.steps.find(step).await.map_err(refused_job)? {
                None => new += 1,
                Some(RecordedStep::Waits(earlier)) if earlier.kind != WaitKind::Call => {
                    return Err(refused_job(other_kind("call")));
                }
                Some(RecordedStep::Done {
                    result: Some(result),
                    ..
                }) => {
                    let end = ReturnedCall::Done(result.clone());
                    made.returned.insert(step.clone(), end);
                }
                Some(RecordedStep::Done { result: None, .. } | RecordedStep::Waits(_)) => {
                    made.unread.push(step.clone());
                }
            }
        }
        self.steps.require_space(new).map_err(refused_job)?;
        Ok(made)
    }
}

/// The calls that earlier attempts have made.
#[derive(Default)]
struct MadeCalls {
    /// Those whose end was read with the other steps. It is final, so it is not read again: otherwise an attempt that
    /// is resumed for the hundredth time would first make 99 calls to the database.
    returned: HashMap<String, ReturnedCall>,
    /// The steps of the others.
    unread: Vec<String>,
}

/// The size of the end of a call.
fn bytes_of(end: &ReturnedCall) -> usize {
    match end {
        ReturnedCall::Done(result) => result.len(),
        ReturnedCall::Pending(_) => 0,
    }
}

/// The end of a sleep.
enum Until {
    After(Duration),
    At(i64),
}

impl Until {
    fn from(&self, now: SystemTime) -> SystemTime {
        match *self {
            Self::After(wait) => now + wait.min(WAIT_MAX),
            Self::At(unix_ms) => {
                let ms = u64::try_from(unix_ms).unwrap_or(0);
                let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
                at.map_or(now + WAIT_MAX, |at| at.min(now + WAIT_MAX))
            }
        }
    }
}

impl Host for AttemptState {
    async fn sleep(
        &mut self,
        step: String,
        duration_ms: u64,
    ) -> wasmtime::Result<Result<(), StepError>> {
        let until = Until::After(Duration::from_millis(duration_ms));
        self.wait(StepError::Aborted, async |it| {
            it.sleep_to(step, until).await
        })
        .await
    }

    async fn sleep_until(
        &mut self,
        step: String,
        unix_ms: i64,
    ) -> wasmtime::Result<Result<(), StepError>> {
        let until = Until::At(unix_ms);
        self.wait(StepError::Aborted, async |it| {
            it.sleep_to(step, until).await
        })
        .await
    }

    async fn signal(
        &mut self,
        step: String,
        name: String,
        timeout_ms: Option<u64>,
    ) -> wasmtime::Result<Result<Option<Vec<u8>>, StepError>> {
        let timeout = timeout_ms.map(Duration::from_millis);
        self.wait(StepError::Aborted, async |it| {
            it.signalled(step, name, timeout).await
        })
        .await
    }

    async fn call(
        &mut self,
        calls: Vec<NewCall>,
    ) -> wasmtime::Result<Result<Vec<Returned>, JobError>> {
        self.wait(JobError::Aborted, async |it| it.called(calls).await)
            .await
    }
}

/// The result of a step that waited for a signal.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum SignalEnd<'a> {
    #[serde(borrow)]
    Payload(&'a RawValue),
    TimedOut(IgnoredAny),
}

/// The result of a step that called a job.
#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum CallEnd<'a> {
    #[serde(borrow)]
    Output(&'a RawValue),
    #[serde(borrow)]
    Failed(&'a RawValue),
}

/// The payload of a taken signal, from the result of its step; `None` after the timeout.
fn payload(result: &[u8]) -> Result<Option<Vec<u8>>, StepError> {
    match serde_json::from_slice(result) {
        Ok(SignalEnd::Payload(payload)) => Ok(Some(payload.get().as_bytes().to_vec())),
        Ok(SignalEnd::TimedOut(_)) => Ok(None),
        Err(_) => Err(other_kind("signal")),
    }
}

/// The end of a call, from the result of its step.
fn end_of_call(result: &[u8]) -> Result<Returned, JobError> {
    let bytes = |json: &RawValue| json.get().as_bytes().to_vec();
    match serde_json::from_slice(result) {
        Ok(CallEnd::Output(output)) => Ok(Returned::Output(bytes(output))),
        Ok(CallEnd::Failed(error)) => Ok(Returned::Failed(bytes(error))),
        Err(_) => Err(refused_job(other_kind("call"))),
    }
}

/// The recorded step of this name is not a wait of this kind.
fn other_kind(wanted: &str) -> StepError {
    StepError::Refused(format!(
        "an earlier attempt has recorded this step, and it was not a {wanted}: names of steps must not change their meaning"
    ))
}

fn no_queue() -> StepError {
    StepError::Refused(
        "a handler that is invoked without the queue cannot wait; enqueue a job for it instead"
            .into(),
    )
}

fn refused_job(error: StepError) -> JobError {
    match error {
        StepError::Aborted => JobError::Aborted,
        StepError::Refused(why) => JobError::Refused(why),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::job::ParentEnd;
    use crate::sandbox::attempt::memory::{AttemptLimiter, MemoryBudget};
    use crate::sandbox::attempt::state::PerAttempt;
    use crate::sandbox::bindings::rouse::handler::jobs::NewJob;
    use crate::sandbox::capability::{NewJobs, Steps};
    use crate::sandbox::{Journal, JournalFuture, Limits, WaitStore};

    /// A job with one call, which has ended. Its result was not read with the other steps.
    struct OneCall(Vec<u8>);

    impl Journal for OneCall {
        fn recorded(&self) -> JournalFuture<'_, Arc<HashMap<String, RecordedStep>>> {
            let done = RecordedStep::Done {
                bytes: self.0.len(),
                result: None,
            };
            let recorded = Arc::new(HashMap::from([("x".to_owned(), done)]));
            Box::pin(async move { recorded })
        }

        fn result<'a>(&'a self, _: &'a str) -> JournalFuture<'a, Result<Vec<u8>, String>> {
            Box::pin(async move { Ok(self.0.clone()) })
        }

        fn record<'a>(&'a self, _: &'a str, _: &'a [u8]) -> JournalFuture<'a, Result<(), String>> {
            Box::pin(async { Ok(()) })
        }

        fn progress(&self, _: u8, _: &str) {}

        fn waits(&self) -> Option<&dyn WaitStore> {
            Some(self)
        }
    }

    impl WaitStore for OneCall {
        fn take_signal<'a>(
            &'a self,
            _: &'a str,
            _: &'a str,
            _: Option<SystemTime>,
        ) -> JournalFuture<'a, Result<Option<Vec<u8>>, String>> {
            Box::pin(async { Ok(None) })
        }

        fn returned_calls<'a>(
            &'a self,
            steps: &'a [String],
            _: usize,
        ) -> JournalFuture<'a, Result<HashMap<String, ReturnedCall>, String>> {
            let done = |step: &String| (step.clone(), ReturnedCall::Done(self.0.clone()));
            let ends: HashMap<String, ReturnedCall> = steps.iter().map(done).collect();
            Box::pin(async move { Ok(ends) })
        }

        fn parents<'a>(
            &'a self,
            _: Option<&'a str>,
        ) -> JournalFuture<'a, Result<Vec<ParentEnd>, String>> {
            Box::pin(async { Ok(Vec::new()) })
        }
    }

    #[tokio::test]
    async fn an_attempt_reads_a_limited_number_of_bytes_of_its_calls() {
        let result = format!(r#"{{"output": "{}"}}"#, "x".repeat(1_000));
        let limits = Limits {
            steps_bytes: result.len(),
            ..Limits::default()
        };
        let journal: Arc<dyn Journal> = Arc::new(OneCall(result.into_bytes()));
        let of = PerAttempt {
            steps: Steps::new(Some(journal), &limits),
            jobs: NewJobs::new(true, &limits),
            ..PerAttempt::placeholder()
        };
        let limiter = AttemptLimiter::new(&limits, MemoryBudget::new(0));
        let state = AttemptState::new(Arc::default(), Arc::default(), &limits, limiter, of);
        let mut state = state.expect("it has no directories");
        let call = || NewCall {
            step: "x".into(),
            job: NewJob {
                handler: "a".into(),
                payload: b"1".to_vec(),
                options: None,
            },
        };
        let mut reads = 0;
        let why = loop {
            match state.called(vec![call()]).await {
                Ok(Ended::Returned(ends)) => assert_eq!(ends.len(), 1),
                Ok(Ended::Suspended(_)) => panic!("the call has ended"),
                Err(JobError::Refused(why)) => break why,
                Err(_) => panic!("it is not refused"),
            }
            reads += 1;
        };
        assert!(why.contains("limits.steps_bytes"), "{why}");
        assert_eq!(reads, 128);
    }
}
