//! Children, parents and waits in native tests.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::declared::{NO_JOBS, NO_STEPS};
use super::job_rules::{check_handler, check_options};
use super::{Recorder, TestCtx, check_name, check_step, json};
use crate::host::Flow;
use crate::job::NewJob;
use crate::{End, Error, Parent, Result};

/// Shorter sleeps do not suspend an attempt, as on the host.
const SUSPENDS_FROM: Duration = Duration::from_secs(2);

/// A job that the handler has enqueued, continued with or called.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct EnqueuedJob {
    /// The name of its handler.
    pub handler: String,
    /// The payload.
    pub payload: Value,
    /// The options as the host receives them, for instance `{"queue": "bulk"}`; an empty object if there are none. In
    /// `after`, -1 stands for the first job that the attempt has enqueued.
    pub options: Value,
}

impl EnqueuedJob {
    /// Reads a job, and refuses it as the host does when a handler passes it. `children`: the number of jobs that it
    /// can name in `after`.
    fn from_new(job: &NewJob, children: usize) -> Result<Self> {
        let read = |json: &[u8]| -> Value {
            serde_json::from_slice(json).expect("payload and options were written by serde_json")
        };
        let job = Self {
            handler: job.handler.clone(),
            payload: read(&job.payload),
            options: read(job.options.as_deref().unwrap_or(b"{}")),
        };
        let of_job = |why: String| format!("the job for {}: {why}", job.handler);
        let checked = check_handler(&job.handler)
            .and_then(|()| json::check("payload", &job.payload).map_err(of_job))
            .and_then(|()| json::check("options object", &job.options).map_err(of_job))
            .and_then(|()| check_options(&job.options).map_err(of_job))
            .and_then(|()| job.check_after(children).map_err(of_job));
        match checked {
            Ok(()) => Ok(job),
            Err(why) => Err(Error::permanent(why).kind("job_refused")),
        }
    }

    /// Reads a job that is called.
    fn from_call(job: &NewJob) -> Result<Self> {
        let job = Self::from_new(job, usize::MAX)?;
        if job.options["after"].is_null() {
            return Ok(job);
        }
        let why = format_args!(
            "the job for {}: the options of a call cannot have `after`",
            job.handler
        );
        Err(Error::permanent(why).kind("job_refused"))
    }

    fn check_after(&self, children: usize) -> Result<(), String> {
        let lowest = i64::try_from(children).map_or(i64::MIN, |children| -children);
        let after = self.options["after"].as_object().into_iter().flatten();
        for (name, entry) in after {
            let is_own = |job: i64| (lowest..0).contains(&job);
            if !entry["job"].as_i64().is_some_and(is_own) {
                let numbers: String = match children {
                    0 => "it has enqueued none so far".into(),
                    1 => "-1".into(),
                    _ => format!("-1 to -{children}"),
                };
                return Err(format!(
                    "`after` of the options: {name:?} must be the number of a job that this attempt has enqueued \
                     ({numbers}), not {entry}"
                ));
            }
        }
        Ok(())
    }
}

/// A wait that the handler has requested.
#[derive(Debug, Clone, PartialEq)]
pub enum Wait {
    /// [`Ctx::sleep`](crate::Ctx::sleep).
    Sleep {
        /// The name; the second sleep with this name is `name#2`.
        name: String,
        /// The duration, in whole milliseconds.
        duration: Duration,
    },
    /// [`Ctx::sleep_until`](crate::Ctx::sleep_until).
    SleepUntil {
        /// The name; the second sleep with this name is `name#2`.
        name: String,
        /// When it ends, in whole milliseconds.
        time: SystemTime,
    },
    /// [`Ctx::wait_signal`](crate::Ctx::wait_signal).
    Signal {
        /// The name of the signal.
        name: String,
        /// The timeout, in whole milliseconds.
        timeout: Option<Duration>,
    },
    /// [`Ctx::call`](crate::Ctx::call), [`Ctx::try_call`](crate::Ctx::try_call) and
    /// [`Ctx::call_all`](crate::Ctx::call_all).
    Calls(Vec<EnqueuedJob>),
}

/// The end of an attempt, from [`TestCtx::attempt`].
#[derive(Debug, Clone, PartialEq)]
#[must_use]
pub enum Attempt<T> {
    /// The handler has returned.
    Ended(Result<T>),
    /// A wait has suspended the attempt.
    Suspended(Wait),
}

impl<T> Attempt<T> {
    /// The return value of the handler.
    ///
    /// # Panics
    /// If the attempt is suspended.
    pub fn ended(self) -> Result<T> {
        match self {
            Self::Ended(result) => result,
            Self::Suspended(wait) => panic!("the attempt is suspended: {wait:?}"),
        }
    }

    /// The wait that has suspended the attempt.
    ///
    /// # Panics
    /// If the handler has returned.
    pub fn suspended(self) -> Wait {
        match self {
            Self::Suspended(wait) => wait,
            Self::Ended(Ok(_)) => panic!("the attempt is not suspended: the handler has succeeded"),
            Self::Ended(Err(error)) => panic!("the attempt is not suspended: it failed: {error:?}"),
        }
    }
}

/// Returns the ends of called jobs.
type CallResponder = Rc<RefCell<dyn FnMut(&EnqueuedJob) -> Result<Value>>>;

/// The data that outlives an attempt: the parents, signals and waits of its job.
#[derive(Clone, Default)]
pub(super) struct JobRecord {
    parents: BTreeMap<String, Parent>,
    signals: Vec<(String, Vec<u8>)>,
    responder: Option<CallResponder>,
    /// All waits so far, with their steps.
    waits: Vec<(Vec<String>, Wait)>,
    /// The return values of the waits that have ended, by their steps.
    ended: BTreeMap<String, WaitEnd>,
}

impl JobRecord {
    /// For the next job: only the responses to calls.
    pub(super) fn of_next_job(&self) -> Self {
        Self {
            responder: self.responder.clone(),
            ..Self::default()
        }
    }

    /// Takes the oldest signal with this name.
    fn take_signal(&mut self, name: &str) -> Option<Vec<u8>> {
        let at = self.signals.iter().position(|(sent, _)| sent == name)?;
        Some(self.signals.remove(at).1)
    }
}

#[derive(Clone)]
enum WaitEnd {
    Slept,
    Signal(Option<Vec<u8>>),
    Call(Result<Vec<u8>, Vec<u8>>),
}

/// The jobs and the waits of one attempt.
#[derive(Default)]
pub(super) struct FlowState {
    pub(super) record: RefCell<JobRecord>,
    enqueued: RefCell<Vec<EnqueuedJob>>,
    continued_with: RefCell<Option<EnqueuedJob>>,
    /// True within [`TestCtx::attempt`].
    suspends: Cell<bool>,
    /// The steps of the wait that has suspended the attempt.
    suspended: RefCell<Option<(Vec<String>, Wait)>>,
}

impl FlowState {
    pub(super) fn with(record: JobRecord) -> Self {
        Self {
            record: RefCell::new(record),
            ..Self::default()
        }
    }

    /// Drops all jobs: an attempt that does not succeed enqueues nothing.
    pub(super) fn clear_jobs(&self) {
        self.enqueued.borrow_mut().clear();
        self.continued_with.borrow_mut().take();
    }

    /// Records a wait. Does not return if the wait suspends the attempt.
    fn wait(&self, steps: Vec<String>, wait: Wait) {
        let is_recorded = |(recorded, _): &(Vec<String>, Wait)| *recorded == steps;
        if !self.record.borrow().waits.iter().any(is_recorded) {
            let wait = (steps.clone(), wait.clone());
            self.record.borrow_mut().waits.push(wait);
        }
        if self.suspends.get() {
            *self.suspended.borrow_mut() = Some((steps, wait));
            // Without the panic hook: nothing is printed.
            resume_unwind(Box::new(Suspension));
        }
    }

    fn sleep(&self, step: &str, wait: Wait, is_short: bool) -> Result<()> {
        if !self.record.borrow().ended.contains_key(step) {
            if !is_short {
                self.wait(vec![step.to_owned()], wait);
            }
            let mut record = self.record.borrow_mut();
            record.ended.insert(step.to_owned(), WaitEnd::Slept);
        }
        Ok(())
    }

    fn respond(&self, job: &EnqueuedJob) -> Option<Result<Vec<u8>, Vec<u8>>> {
        let responder = self.record.borrow().responder.clone()?;
        let result = (responder.borrow_mut())(job);
        Some(match result {
            Ok(result) => Ok(result.to_string().into_bytes()),
            Err(error) => Err(error_of(&error).to_string().into_bytes()),
        })
    }

    /// Ends a wait with its return value. Without a timeout, the wait for a signal that has not been sent continues.
    fn end(&self, steps: &[String], wait: &Wait) {
        let ended: Vec<WaitEnd> = match wait {
            Wait::Sleep { .. } | Wait::SleepUntil { .. } => vec![WaitEnd::Slept],
            Wait::Signal { name, timeout } => {
                let signal = self.record.borrow_mut().take_signal(name);
                let has_ended = signal.is_some() || timeout.is_some();
                has_ended
                    .then_some(WaitEnd::Signal(signal))
                    .into_iter()
                    .collect()
            }
            Wait::Calls(jobs) => {
                let results = jobs.iter().map(|job| self.respond(job).expect(NO_RESULT));
                results.map(WaitEnd::Call).collect()
            }
        };
        let mut record = self.record.borrow_mut();
        record.ended.extend(steps.iter().cloned().zip(ended));
    }
}

const NO_RESULT: &str = "this test does not answer calls: set a result with TestCtx::on_call";

/// Unwinds the handler of an attempt that is suspended.
struct Suspension;

/// The error of a job, as the host stores it.
fn error_of(error: &Error) -> Value {
    let mut stored = json!({
        "kind": "guest_error",
        "guest_kind": error.kind,
        "message": error.message,
    });
    if let Some(details) = &error.details {
        stored["details"] = details.clone();
    }
    stored
}

/// # Jobs and waits
/// If a test calls the handler itself, or with [`run`](Self::run), time passes at once: sleeps return, and the wait for
/// a signal that was not sent times out. With [`attempt`](Self::attempt), waits suspend the attempt as on a host, and
/// [`resumed`](Self::resumed) is the next attempt.
impl TestCtx {
    /// Runs one attempt of a handler: a wait suspends it, unless it has already ended, is a sleep of less than two
    /// seconds, or is for a signal with a timeout of zero. Jobs that were enqueued, and effects, are dropped unless the
    /// handler succeeds. If the abort signal has fired, the attempt ends with an error of kind `aborted` instead of a
    /// result, because the host drops it.
    ///
    /// ```
    /// use std::time::Duration;
    /// use rouse_sdk::{Ctx, Result, TestCtx, Wait};
    ///
    /// fn trial(ctx: &Ctx) -> Result<&'static str> {
    ///     ctx.step("welcome", || Ok(()))?;
    ///     ctx.sleep("the trial", Duration::from_secs(14 * 24 * 3600))?;
    ///     ctx.step("invoice", || Ok(()))?;
    ///     Ok("invoiced")
    /// }
    ///
    /// let ctx = TestCtx::new();
    /// assert!(matches!(ctx.attempt(|ctx| trial(ctx)).suspended(), Wait::Sleep { .. }));
    /// assert_eq!(ctx.steps_done(), ["welcome"]);
    ///
    /// let ctx = ctx.resumed();
    /// assert_eq!(ctx.attempt(|ctx| trial(ctx)).ended().unwrap(), "invoiced");
    /// assert_eq!(ctx.steps_done(), ["invoice"]);
    /// ```
    ///
    /// The handler is unwound when it is suspended. On a host, the handler just stops: its destructors do not run.
    ///
    /// # Panics
    /// If the handler panics.
    pub fn attempt<T>(&self, handler: impl FnOnce(&Self) -> Result<T>) -> Attempt<T> {
        let flow = &self.recorder.flow;
        let outer = flow.suspends.replace(true);
        let end = catch_unwind(AssertUnwindSafe(|| handler(self)));
        flow.suspends.set(outer);
        let attempt = match end {
            Ok(result) => {
                let kept = |result| self.recorder.unless_aborted().map(|()| result);
                Attempt::Ended(result.and_then(kept))
            }
            Err(panic) => Attempt::Suspended(self.suspension(panic)),
        };
        if !matches!(attempt, Attempt::Ended(Ok(_))) {
            self.recorder.drop_outcome();
        }
        attempt
    }

    /// Resumes the panic if it is not a suspension.
    fn suspension(&self, panic: Box<dyn Any + Send>) -> Wait {
        let suspended = self.recorder.flow.suspended.borrow();
        match &*suspended {
            Some((_, wait)) if panic.is::<Suspension>() => wait.clone(),
            _ => resume_unwind(panic),
        }
    }

    /// The attempt that follows a suspension, when the wait has ended: a sleep has passed, calls have ended
    /// ([`on_call`](Self::on_call) answers them), the signal has been sent, or its timeout has passed. (Without either,
    /// the next attempt waits again.) The new attempt has the steps, settings and responses of the suspended attempt,
    /// and the handler's state. As on a host, it has the next number, and the maximum number of attempts is one higher,
    /// because the suspended attempt does not count.
    ///
    /// # Panics
    /// If the attempt is not suspended, or nothing answers its calls.
    #[must_use]
    pub fn resumed(&self) -> Self {
        let suspended = self.recorder.flow.suspended.borrow().clone();
        let (steps, wait) =
            suspended.expect("the attempt is not suspended: run it with TestCtx::attempt");
        let mut next = self.next_recorder();
        next.flow.end(&steps, &wait);
        next.uncounted += 1;
        let job = self.ctx.job().clone();
        Self::with(next, |next| {
            *next = job;
            next.attempt += 1;
            next.max_attempts += 1;
        })
    }

    /// The jobs that this attempt has enqueued, in order. [`run`](Self::run) and [`attempt`](Self::attempt) drop them
    /// unless the handler succeeds.
    pub fn enqueued(&self) -> Vec<EnqueuedJob> {
        self.recorder.flow.enqueued.borrow().clone()
    }

    /// The job with which this attempt continues its chain; dropped like those of [`enqueued`](Self::enqueued).
    pub fn continued_with(&self) -> Option<EnqueuedJob> {
        self.recorder.flow.continued_with.borrow().clone()
    }

    /// All waits of the job so far, in order, except sleeps of less than two seconds, and waits for signals that ended
    /// at once.
    pub fn waits(&self) -> Vec<Wait> {
        let record = self.recorder.flow.record.borrow();
        record.waits.iter().map(|(_, wait)| wait.clone()).collect()
    }

    /// Sends a signal to the job. It is kept until a wait takes it, in this attempt or in later ones that are derived
    /// from it.
    pub fn send_signal(&self, name: impl Into<String>, payload: Value) {
        let signal = (name.into(), payload.to_string().into_bytes());
        self.recorder.flow.record.borrow_mut().signals.push(signal);
    }

    /// Sets the function that answers calls, in this attempt and in later attempts and jobs that are derived from it.
    /// Without it, each call is an error (kind `denied`).
    pub fn on_call(&self, respond: impl FnMut(&EnqueuedJob) -> Result<Value> + 'static) {
        let responder: CallResponder = Rc::new(RefCell::new(respond));
        self.recorder.flow.record.borrow_mut().responder = Some(responder);
    }

    /// Adds a chain that the job has waited for, or changes its end. `output` is the result, or the error:
    ///
    /// ```
    /// use rouse_sdk::{End, TestCtx, serde_json::json};
    ///
    /// let ctx = TestCtx::new();
    /// ctx.set_parent("charge", End::Succeeded, json!("paid 17"));
    /// let error = json!({"kind": "guest_error", "guest_kind": "no_stock", "message": "none left"});
    /// ctx.set_parent("reserve", End::Failed, error);
    ///
    /// let parents = ctx.results().unwrap();
    /// assert_eq!(parents.get::<String>("charge").unwrap(), "paid 17");
    /// let failure = parents.parent("reserve").and_then(|parent| parent.failure()).unwrap();
    /// assert_eq!(failure.kind, "no_stock");
    /// ```
    pub fn set_parent(&self, name: impl Into<String>, end: End, output: Value) {
        let name = name.into();
        let mut record = self.recorder.flow.record.borrow_mut();
        let number = i64::try_from(record.parents.len()).unwrap_or(i64::MAX - 1_000_000);
        let parent = Parent {
            name: name.clone(),
            job: match end {
                End::Deleted => 0,
                _ => 1_000_000 + number,
            },
            end,
            output: (!output.is_null() || end == End::Succeeded)
                .then(|| output.to_string().into_bytes()),
        };
        record.parents.insert(name, parent);
    }
}

impl Flow for Recorder {
    fn enqueue(&self, job: NewJob) -> Result<i64> {
        self.unless_aborted()?;
        self.require_one_job(NO_JOBS, "job_refused")?;
        let mut enqueued = self.flow.enqueued.borrow_mut();
        let job = EnqueuedJob::from_new(&job, enqueued.len())?;
        enqueued.push(job);
        Ok(i64::try_from(enqueued.len()).map_or(i64::MIN, |number| -number))
    }

    fn continue_with(&self, job: NewJob) -> Result<()> {
        self.unless_aborted()?;
        self.require_one_job(NO_JOBS, "job_refused")?;
        let mut continued_with = self.flow.continued_with.borrow_mut();
        if let Some(next) = &*continued_with {
            let why = format_args!("the attempt already continues with {}", next.handler);
            return Err(Error::permanent(why).kind("job_refused"));
        }
        let children = self.flow.enqueued.borrow().len();
        *continued_with = Some(EnqueuedJob::from_new(&job, children)?);
        Ok(())
    }

    fn parents(&self, after: Option<&str>) -> Result<Vec<Parent>> {
        self.unless_aborted()?;
        self.require_one_job(NO_STEPS, "results_refused")?;
        let record = self.flow.record.borrow();
        let parents = record.parents.values();
        let page = parents.filter(|parent| after.is_none_or(|after| parent.name.as_str() > after));
        Ok(page.cloned().collect())
    }

    fn sleep(&self, step: &str, duration_ms: u64) -> Result<()> {
        self.unless_aborted()?;
        self.require_one_job(NO_STEPS, "wait_refused")?;
        check_step(step, "wait_refused")?;
        let duration = Duration::from_millis(duration_ms);
        let wait = Wait::Sleep {
            name: named(step),
            duration,
        };
        self.flow.sleep(step, wait, duration < SUSPENDS_FROM)
    }

    fn sleep_until(&self, step: &str, unix_ms: i64) -> Result<()> {
        self.unless_aborted()?;
        self.require_one_job(NO_STEPS, "wait_refused")?;
        check_step(step, "wait_refused")?;
        let since = Duration::from_millis(u64::try_from(unix_ms).unwrap_or_default());
        let time = SystemTime::UNIX_EPOCH + since;
        let is_short = time < SystemTime::now() + SUSPENDS_FROM;
        let wait = Wait::SleepUntil {
            name: named(step),
            time,
        };
        self.flow.sleep(step, wait, is_short)
    }

    fn signal(&self, step: &str, name: &str, timeout_ms: Option<u64>) -> Result<Option<Vec<u8>>> {
        self.unless_aborted()?;
        check_name("the name of a signal", name, "wait_refused")?;
        self.require_one_job(NO_STEPS, "wait_refused")?;
        check_step(step, "wait_refused")?;
        let ended = self.flow.record.borrow().ended.get(step).cloned();
        if let Some(WaitEnd::Signal(payload)) = ended {
            return Ok(payload);
        }
        let wait = Wait::Signal {
            name: name.to_owned(),
            timeout: timeout_ms.map(Duration::from_millis),
        };
        let steps = vec![step.to_owned()];
        let signal = self.flow.record.borrow_mut().take_signal(name);
        // As on a host, a wait with a timeout of zero ends at once.
        if signal.is_none() && timeout_ms != Some(0) {
            self.flow.wait(steps, wait);
            assert!(
                timeout_ms.is_some(),
                "the handler waits for the signal {name:?} without a timeout: send it with TestCtx::send_signal, or run the handler with TestCtx::attempt"
            );
        }
        let ended = WaitEnd::Signal(signal.clone());
        let mut record = self.flow.record.borrow_mut();
        record.ended.insert(step.to_owned(), ended);
        Ok(signal)
    }

    fn call(&self, calls: Vec<(String, NewJob)>) -> Result<Vec<Result<Vec<u8>, Vec<u8>>>> {
        self.unless_aborted()?;
        self.require_one_job(NO_STEPS, "job_refused")?;
        for (step, _) in &calls {
            check_step(step, "job_refused")?;
        }
        let (mut steps, mut jobs) = (Vec::new(), Vec::new());
        for (step, job) in &calls {
            if !self.flow.record.borrow().ended.contains_key(step) {
                steps.push(step.clone());
                jobs.push(EnqueuedJob::from_call(job)?);
            }
        }
        if !steps.is_empty() {
            let wait = Wait::Calls(jobs);
            self.flow.wait(steps.clone(), wait.clone());
            if self.flow.record.borrow().responder.is_none() {
                return Err(Error::permanent(NO_RESULT).kind("denied"));
            }
            self.flow.end(&steps, &wait);
        }
        let record = self.flow.record.borrow();
        let ends = calls.iter().map(|(step, _)| match record.ended.get(step) {
            Some(WaitEnd::Call(end)) => Ok(end.clone()),
            _ => {
                let why =
                    format_args!("the step {step} was a different wait in an earlier attempt");
                Err(Error::permanent(why).kind("job_refused"))
            }
        });
        ends.collect()
    }
}

/// The name in the step of a wait.
fn named(step: &str) -> String {
    step.split_once(':')
        .map_or(step, |(_, name)| name)
        .to_owned()
}
