//! The native replacement for [`Ctx`], for unit tests.

mod batch;
mod declared;
mod flow;
mod job_rules;
mod json;
mod schemas;
mod sql;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::handler::Definition;
use crate::host::{Host, PendingResponse};
use crate::http::{Request, Response};
use crate::native::Abort;
use crate::task::Source;
use crate::{AbortReason, Ctx, Error, Handler, JobInfo, Level};

use batch::BatchState;
use declared::NO_STEPS;
use flow::FlowState;
pub use flow::{Attempt, EnqueuedJob, Wait};
use sql::SqlState;
pub use sql::StatementCall;

/// The host's default.
const MAX_ATTEMPTS: u32 = 20;

/// A line that the handler logged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogLine {
    /// The severity.
    pub level: Level,
    /// The message.
    pub message: String,
}

/// A progress report of the handler.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgressReport {
    /// 0 to 100.
    pub percent: u8,
    /// The current step.
    pub step: String,
}

/// Replaces [`Ctx`] in native tests: records logs and progress, and fires aborts.
///
/// It refuses names, keys and jobs as the host does. It does not apply grants, quotas or the limits of an attempt.
///
/// ```
/// use rouse_sdk::{Ctx, TestCtx};
///
/// fn attempt_number(ctx: &Ctx) -> u32 {
///     ctx.progress(50, "counting");
///     ctx.job().attempt
/// }
///
/// let ctx = TestCtx::for_job(|job| job.attempt = 3);
/// assert_eq!(attempt_number(&ctx), 3);
/// assert_eq!(ctx.progress_reports()[0].percent, 50);
/// ```
pub struct TestCtx {
    ctx: Ctx,
    recorder: Rc<Recorder>,
}

impl TestCtx {
    /// A first attempt at job 1, in queue `default`.
    pub fn new() -> Self {
        Self::for_job(|_| ())
    }

    /// Like [`new`](Self::new), with changes to the job.
    pub fn for_job(change: impl FnOnce(&mut JobInfo)) -> Self {
        Self::with(Recorder::default(), change)
    }

    fn with(recorder: Recorder, change: impl FnOnce(&mut JobInfo)) -> Self {
        let mut job = JobInfo {
            id: 1,
            handler: "test".to_owned(),
            queue: "default".to_owned(),
            tenant: None,
            source: None,
            attempt: 1,
            max_attempts: MAX_ATTEMPTS,
            requested_at_ms: 0,
        };
        change(&mut job);
        let recorder = Rc::new(recorder);
        Self {
            ctx: Ctx::new(job, Rc::clone(&recorder)),
            recorder,
        }
    }

    /// Runs a handler as the host does, from JSON to JSON: `ctx.run::<greet>(json!({…}))`. Payload and result are
    /// checked against the schemas of the handler. Jobs that it has enqueued, and effects, are dropped unless it
    /// succeeds.
    ///
    /// The job has the handler's name, and its `max_attempts` unless [`for_job`](Self::for_job) sets another number.
    /// Calls that do not fit the declaration of the handler are refused, as on a host: statements that it does not
    /// declare, and, if it takes batches, steps, waits, jobs and effects. In a direct call to the function, its
    /// declaration is not known, and these calls are not refused.
    ///
    /// # Errors
    /// - errors of the handler
    /// - kind `invalid_payload`, permanent: the payload does not match the schema, or the input type
    /// - kind `invalid_result`: the result does not match the schema (`NaN` is written as `null`), or Postgres cannot
    ///   store it (NUL characters)
    /// - kind `aborted`: the abort signal has fired. The host drops a result that is returned after it.
    ///
    /// # Panics
    /// If the handler panics, or if a host would refuse the module because of one of the schemas.
    pub fn run<H: Handler>(&self, payload: Value) -> Result<Value, Error> {
        let payload = payload.to_string().into_bytes();
        let result = schemas::check_payload::<H>(&payload)
            .and_then(|()| self.call_handler::<H>(self.job_of::<H>(), &payload))
            .and_then(|result| schemas::read_result::<H>(&result));
        result.inspect_err(|_| self.recorder.drop_outcome())
    }

    /// The lines logged so far. The host drops lines after the abort signal, and so does this context.
    pub fn logs(&self) -> Vec<LogLine> {
        self.recorder.logs.borrow().clone()
    }

    /// The progress reported so far, until the abort signal.
    pub fn progress_reports(&self) -> Vec<ProgressReport> {
        self.recorder.progress.borrow().clone()
    }

    /// The next attempt at the same job. It has the steps that have been recorded so far, the waits that have ended,
    /// signals, parents, the settings, the handler's state, the responses to requests ([`on_http`](Self::on_http)),
    /// calls and queries, and nothing else.
    #[must_use]
    pub fn next_attempt(&self) -> Self {
        let job = self.ctx.job().clone();
        Self::with(self.next_recorder(), |next| {
            *next = job;
            next.attempt += 1;
        })
    }

    /// A recorder with what the attempts at a job share.
    fn next_recorder(&self) -> Recorder {
        Recorder {
            recorded: RefCell::new(self.recorder.recorded.borrow().clone()),
            flow: FlowState::with(self.recorder.flow.record.borrow().clone()),
            uncounted: self.recorder.uncounted,
            ..self.recorder_of_next_job()
        }
    }

    /// A recorder with what the jobs of a handler share.
    fn recorder_of_next_job(&self) -> Recorder {
        Recorder {
            server: RefCell::new(self.recorder.server.borrow().clone()),
            settings: RefCell::new(self.recorder.settings.borrow().clone()),
            state: Rc::clone(&self.recorder.state),
            flow: FlowState::with(self.recorder.flow.record.borrow().of_next_job()),
            sql: self.recorder.sql.next(),
            ..Recorder::default()
        }
    }

    /// The first attempt at the next job for the same handler and tenant. It has the settings and the responses to
    /// requests, calls and queries, and it shares the handler's state with this attempt: both may run concurrently.
    #[must_use]
    pub fn next_job(&self) -> Self {
        let job = self.ctx.job().clone();
        Self::with(self.recorder_of_next_job(), |next| {
            *next = job;
            next.id += 1;
            next.attempt = 1;
            next.max_attempts = next.max_attempts.saturating_sub(self.recorder.uncounted);
        })
    }

    /// The names of the steps whose work this attempt has done, in order.
    pub fn steps_done(&self) -> Vec<String> {
        self.recorder.done.borrow().clone()
    }

    /// Sets the settings that [`Ctx::settings`] reads, in this attempt and in later attempts and jobs that are derived
    /// from it; by default they are an empty object.
    pub fn set_settings(&self, settings: Value) {
        self.recorder.settings.borrow_mut().0 = settings;
    }

    /// Sets the function that answers further requests, in place of servers, in this attempt and in later attempts and
    /// jobs that are derived from it. Without it, each request is an error.
    pub fn on_http(&self, respond: impl FnMut(&Request) -> Result<Response, Error> + 'static) {
        *self.recorder.server.borrow_mut() = Some(Rc::new(RefCell::new(respond)));
    }

    /// The requests sent so far, including each redirect that was followed.
    pub fn requests(&self) -> Vec<Request> {
        self.recorder.requests.borrow().clone()
    }

    /// Fires the abort signal, with a grace of 5 s, the host's default.
    pub fn fire_abort(&self, reason: AbortReason) {
        self.aborter().fire(reason, Duration::from_secs(5));
    }

    /// A handle that fires the abort from another thread, while the handler runs.
    pub fn aborter(&self) -> Aborter {
        Aborter(Arc::clone(&self.recorder.abort))
    }
}

impl Default for TestCtx {
    fn default() -> Self {
        Self::new()
    }
}

impl Deref for TestCtx {
    type Target = Ctx;

    fn deref(&self) -> &Ctx {
        &self.ctx
    }
}

impl fmt::Debug for TestCtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestCtx")
            .field("job", self.ctx.job())
            .field("logs", &self.recorder.logs)
            .field("progress", &self.recorder.progress)
            .finish_non_exhaustive()
    }
}

/// Fires the abort of a [`TestCtx`], from any thread.
#[derive(Clone)]
pub struct Aborter(Arc<Abort>);

impl Aborter {
    /// Fires the abort signal; a second call changes nothing.
    pub fn fire(&self, reason: AbortReason, grace: Duration) {
        self.0.fire(reason, grace);
    }
}

impl fmt::Debug for Aborter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let reason = self.0.fired().map(|fired| fired.reason);
        f.debug_struct("Aborter").field("reason", &reason).finish()
    }
}

/// Answers requests.
type Server = Rc<RefCell<dyn FnMut(&Request) -> Result<Response, Error>>>;

/// State entries with their versions, and the latest version.
#[derive(Default)]
struct StateStore {
    entries: RefCell<BTreeMap<String, (Vec<u8>, i64)>>,
    version: Cell<i64>,
}

impl StateStore {
    fn set(&self, key: &str, value: Vec<u8>) {
        self.version.set(self.version.get() + 1);
        let entry = (value, self.version.get());
        self.entries.borrow_mut().insert(key.to_owned(), entry);
    }

    fn version_of(&self, key: &str) -> Option<i64> {
        self.entries.borrow().get(key).map(|(_, version)| *version)
    }
}

#[derive(Default)]
pub(crate) struct Recorder {
    logs: RefCell<Vec<LogLine>>,
    progress: RefCell<Vec<ProgressReport>>,
    recorded: RefCell<HashMap<String, Vec<u8>>>,
    done: RefCell<Vec<String>>,
    requests: RefCell<Vec<Request>>,
    server: RefCell<Option<Server>>,
    settings: RefCell<Settings>,
    state: Rc<StateStore>,
    flow: FlowState,
    sql: SqlState,
    batch: BatchState,
    /// The handler that [`TestCtx::run`] or [`TestCtx::run_batch`] runs.
    handler: Cell<Option<Definition>>,
    /// The number of suspended attempts, by which the maximum number of attempts has been raised.
    uncounted: u32,
    abort: Arc<Abort>,
}

/// A JSON object.
#[derive(Clone)]
struct Settings(Value);

impl Default for Settings {
    fn default() -> Self {
        Self(Value::Object(serde_json::Map::new()))
    }
}

/// The maximum length of the name of a step or a signal, and of a key of the state, as on the host.
const NAME_CHARS_MAX: usize = 200;

/// Refuses a name with the error of the host.
fn check_name(what: &str, name: &str, kind: &'static str) -> Result<(), Error> {
    let chars = name.chars().count();
    if (1..=NAME_CHARS_MAX).contains(&chars) && !name.chars().any(char::is_control) {
        return Ok(());
    }
    let why = format_args!("{what} must have 1 to {NAME_CHARS_MAX} printable characters");
    Err(Error::permanent(why).kind(kind))
}

fn check_step(name: &str, kind: &'static str) -> Result<(), Error> {
    check_name("the name of a step", name, kind)
}

fn check_key(key: &str) -> Result<(), Error> {
    check_name("a key", key, "state_refused")
}

impl Recorder {
    fn unless_aborted(&self) -> Result<(), Error> {
        match self.abort.fired() {
            None => Ok(()),
            Some(_) => Err(Error::retryable("the attempt has to stop").kind("aborted")),
        }
    }

    /// Drops the jobs and the effects that the host commits only with a success.
    fn drop_outcome(&self) {
        self.flow.clear_jobs();
        self.sql.effects.borrow_mut().clear();
    }
}

impl Host for Recorder {
    fn log(&self, level: Level, message: String) {
        if self.abort.fired().is_none() {
            self.logs.borrow_mut().push(LogLine { level, message });
        }
    }

    fn progress(&self, percent: u8, step: &str) {
        if self.abort.fired().is_none() {
            let step = step.to_owned();
            self.progress
                .borrow_mut()
                .push(ProgressReport { percent, step });
        }
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.abort.fired().map(|fired| fired.reason)
    }

    fn grace_remaining(&self) -> Option<Duration> {
        let stop_at = self.abort.fired()?.stop_at;
        Some(stop_at.map_or(Duration::MAX, |at| {
            at.saturating_duration_since(Instant::now())
        }))
    }

    fn start_step(&self, name: &str) -> Result<Option<Vec<u8>>, Error> {
        self.unless_aborted()?;
        self.require_one_job(NO_STEPS, "step_refused")?;
        check_step(name, "step_refused")?;
        Ok(self.recorded.borrow().get(name).cloned())
    }

    fn complete_step(&self, name: &str, output: Vec<u8>) -> Result<(), Error> {
        self.unless_aborted()?;
        self.done.borrow_mut().push(name.to_owned());
        self.recorded.borrow_mut().insert(name.to_owned(), output);
        Ok(())
    }

    fn secret(&self, name: &str) -> Result<String, Error> {
        Ok(format!("rouse-secret-{name}"))
    }

    fn settings(&self) -> Vec<u8> {
        self.settings.borrow().0.to_string().into_bytes()
    }

    fn state_get(&self, key: &str) -> Result<Option<(Vec<u8>, i64)>, Error> {
        self.unless_aborted()?;
        check_key(key)?;
        Ok(self.state.entries.borrow().get(key).cloned())
    }

    fn state_keys(&self, prefix: &str, after: Option<&str>) -> Result<Vec<String>, Error> {
        self.unless_aborted()?;
        if !prefix.is_empty() {
            check_key(prefix)?;
        }
        let entries = self.state.entries.borrow();
        let keys = entries.keys().filter(|key| {
            key.starts_with(prefix) && after.is_none_or(|after| key.as_str() > after)
        });
        Ok(keys.cloned().collect())
    }

    fn state_set(&self, key: &str, value: Vec<u8>) -> Result<(), Error> {
        self.unless_aborted()?;
        check_key(key)?;
        self.state.set(key, value);
        Ok(())
    }

    fn state_compare_and_set(
        &self,
        key: &str,
        version: Option<i64>,
        value: Vec<u8>,
    ) -> Result<bool, Error> {
        self.unless_aborted()?;
        check_key(key)?;
        // Versions are above 0; 0 means that there is no value.
        let is_there = self.state.version_of(key).unwrap_or(0) == version.unwrap_or(0);
        if is_there {
            self.state.set(key, value);
        }
        Ok(is_there)
    }

    fn state_delete(&self, key: &str) -> Result<bool, Error> {
        self.unless_aborted()?;
        check_key(key)?;
        Ok(self.state.entries.borrow_mut().remove(key).is_some())
    }

    fn hmac_sha256(&self, name: &str, message: &[u8]) -> Result<Vec<u8>, Error> {
        let part = |nth: u64| {
            let mut hasher = DefaultHasher::new();
            (nth, name, message).hash(&mut hasher);
            hasher.finish().to_le_bytes()
        };
        Ok((0..4).flat_map(part).collect())
    }

    fn http<'a>(&'a self, request: &'a Request) -> PendingResponse<'a> {
        Box::pin(async move {
            self.unless_aborted()?;
            self.requests.borrow_mut().push(request.clone());
            let server = self.server.borrow().clone();
            match server {
                Some(respond) => {
                    let mut response = (respond.borrow_mut())(request)?;
                    response.is_truncated = request.fit(&mut response.body)?;
                    Ok(response)
                }
                None => {
                    let label = request.label();
                    let why = format_args!(
                        "{label}: this test does not answer requests; set a response with TestCtx::on_http"
                    );
                    Err(Error::permanent(why).kind("denied"))
                }
            }
        })
    }

    fn abort_source(&self) -> Source {
        Source::Abort(Arc::clone(&self.abort))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_0_means_no_value_as_on_the_host() {
        let ctx = TestCtx::new();
        let set = |version: Option<i64>| {
            let set = ctx
                .recorder
                .state_compare_and_set("k", version, b"1".to_vec());
            set.expect("the attempt may continue")
        };
        assert!(!set(Some(1)) && set(Some(0)));
        assert!(!set(Some(0)) && !set(None) && !set(Some(-1)));
        let entry = ctx
            .recorder
            .state_get("k")
            .expect("the attempt may continue");
        let (_, version) = entry.expect("the key exists");
        assert!(version > 0 && set(Some(version)) && !set(Some(version)));
        ctx.state().delete("k").expect("the attempt may continue");
        assert!(set(None));
    }
}
