//! The module's side of the contract: imports, exports, panics, pollables.

mod batch;
mod flow;
mod http;
mod sql;

use std::cell::OnceCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::time::Duration;

use crate::handler::Entry;
use crate::host::{Host, PendingResponse};
use crate::job::milliseconds;
use crate::{AbortReason, Ctx, Error, Level};

#[expect(missing_docs, reason = "generated from the contract")]
pub mod bindings {
    wit_bindgen::generate!({
        inline: "
            package rouse:sdk;

            /// The contract, with the clock that `sleep` needs, and requests.
            world guest {
                include rouse:handler/module@0.1.0;
                import wasi:clocks/monotonic-clock@0.2.0;
                import wasi:http/outgoing-handler@0.2.0;
            }
        ",
        path: "wit",
        generate_all,
        export_macro_name: "__export",
        pub_export_macro: true,
        default_bindings_module: "rouse_sdk::__private::bindings",
        runtime_path: "rouse_sdk::__private::rt",
    });
}

pub use bindings::exports::rouse::handler::handlers::{Failure, Guest, JobInfo};
use bindings::rouse::handler::{context, retry, secrets, settings, state, steps};
use bindings::wasi::clocks::monotonic_clock;
use bindings::wasi::io::poll::{self, Pollable};

/// Implements `describe`.
pub fn describe(entries: &[Entry]) -> String {
    report_panics();
    crate::manifest::manifest(entries).to_string()
}

/// Implements `run`.
pub fn run(entries: &[Entry], job: JobInfo) -> Result<Vec<u8>, Failure> {
    report_panics();
    let Some(entry) = entries
        .iter()
        .find(|entry| entry.definition.name == job.handler)
    else {
        let error = Error::permanent(format!("this module has no handler {}", job.handler));
        return Err(failure(error.kind("unknown_handler")));
    };
    let (job, payload) = job_info(job);
    let ctx = Ctx::new(job, Rc::new(Imports(OnceCell::new())));
    (entry.run)(&ctx, &payload).map_err(failure)
}

/// A job of the contract, and its payload.
fn job_info(job: JobInfo) -> (crate::JobInfo, Vec<u8>) {
    let info = crate::JobInfo {
        id: job.id,
        handler: job.handler,
        queue: job.queue,
        tenant: job.tenant,
        source: job.source,
        attempt: job.attempt,
        max_attempts: job.max_attempts,
        requested_at_ms: job.requested_at_ms,
    };
    (info, job.payload)
}

fn failure(error: Error) -> Failure {
    if let Some(at) = error.retry_at.filter(|_| !error.permanent) {
        retry::at(crate::job::unix_ms(at));
    }
    Failure {
        kind: error.kind.into_owned(),
        message: error.message,
        details: details(error.details),
        permanent: error.permanent,
        retry_after_ms: error.retry_after.map(milliseconds),
    }
}

fn details(details: Option<serde_json::Value>) -> Option<Vec<u8>> {
    details.map(|details| details.to_string().into_bytes())
}

fn aborted() -> Error {
    Error::retryable("the attempt has to stop").kind("aborted")
}

/// Converts an error of steps.
fn step_error(error: steps::StepError) -> Error {
    match error {
        steps::StepError::Aborted => aborted(),
        steps::StepError::Refused(why) => Error::permanent(why).kind("step_refused"),
    }
}

/// Converts an error of state.
fn state_error(error: state::StateError) -> Error {
    match error {
        state::StateError::Aborted => aborted(),
        state::StateError::NotGranted(why) => Error::permanent(why).kind("denied"),
        state::StateError::Refused(why) => Error::permanent(why).kind("state_refused"),
    }
}

/// Converts an error of secrets.
fn secret_error(error: secrets::SecretError) -> Error {
    let secrets::SecretError::NotGranted(why) = error;
    Error::permanent(why).kind("denied")
}

/// Reports the message and the location of a panic to the host, before the trap that follows.
fn report_panics() {
    std::panic::set_hook(Box::new(|info| {
        let message = info.payload_as_str().unwrap_or("a panic without a message");
        let location = info.location().map(ToString::to_string);
        context::panicked(message, location.as_deref().unwrap_or("unknown"));
    }));
}

/// The host's imports, for one attempt. The abort signal is requested on first use: most handlers never need it.
pub(crate) struct Imports(OnceCell<Rc<context::AbortSignal>>);

impl Imports {
    fn signal(&self) -> &Rc<context::AbortSignal> {
        self.0.get_or_init(|| Rc::new(context::abort()))
    }
}

impl Host for Imports {
    fn log(&self, level: Level, message: String) {
        let level = match level {
            Level::Trace => context::Level::Trace,
            Level::Debug => context::Level::Debug,
            Level::Info => context::Level::Info,
            Level::Warn => context::Level::Warn,
            Level::Error => context::Level::Error,
        };
        context::log(level, &message);
    }

    fn progress(&self, percent: u8, step: &str) {
        context::progress(percent, step);
    }

    fn abort_reason(&self) -> Option<AbortReason> {
        self.signal().reason().map(|reason| match reason {
            context::AbortReason::TakenByAnotherWorker => AbortReason::TakenByAnotherWorker,
            context::AbortReason::AlreadyCompleted => AbortReason::AlreadyCompleted,
            context::AbortReason::NotFound => AbortReason::NotFound,
            context::AbortReason::Error => AbortReason::Error,
            context::AbortReason::TimedOut => AbortReason::TimedOut,
            context::AbortReason::Cancelled => AbortReason::Cancelled,
            context::AbortReason::Shutdown => AbortReason::Shutdown,
        })
    }

    fn grace_remaining(&self) -> Option<Duration> {
        self.signal()
            .grace_remaining_ms()
            .map(Duration::from_millis)
    }

    fn start_step(&self, name: &str) -> crate::Result<Option<Vec<u8>>> {
        steps::start(name).map_err(step_error)
    }

    fn complete_step(&self, name: &str, output: Vec<u8>) -> crate::Result<()> {
        steps::complete(name, &output).map_err(step_error)
    }

    fn secret(&self, name: &str) -> crate::Result<String> {
        secrets::get(name).map_err(secret_error)
    }

    fn hmac_sha256(&self, name: &str, message: &[u8]) -> crate::Result<Vec<u8>> {
        secrets::hmac_sha256(name, message).map_err(secret_error)
    }

    fn settings(&self) -> Vec<u8> {
        settings::all()
    }

    fn state_get(&self, key: &str) -> crate::Result<Option<(Vec<u8>, i64)>> {
        let entry = state::get(key).map_err(state_error)?;
        Ok(entry.map(|entry| (entry.value, entry.version)))
    }

    fn state_keys(&self, prefix: &str, after: Option<&str>) -> crate::Result<Vec<String>> {
        state::keys(prefix, after).map_err(state_error)
    }

    fn state_set(&self, key: &str, value: Vec<u8>) -> crate::Result<()> {
        state::set(key, &value).map_err(state_error)
    }

    fn state_compare_and_set(
        &self,
        key: &str,
        version: Option<i64>,
        value: Vec<u8>,
    ) -> crate::Result<bool> {
        state::compare_and_set(key, version, &value).map_err(state_error)
    }

    fn state_delete(&self, key: &str) -> crate::Result<bool> {
        state::delete(key).map_err(state_error)
    }

    fn http<'a>(&'a self, request: &'a crate::http::Request) -> PendingResponse<'a> {
        Box::pin(http::send(request))
    }

    fn abort_source(&self) -> Source {
        Source {
            pollable: self.signal().subscribe(),
            _owner: Some(Rc::clone(self.signal())),
        }
    }
}

/// An event to wait for.
pub(crate) struct Source {
    pollable: Pollable,
    /// Dropped after the pollable: a resource must not be dropped before its pollables.
    _owner: Option<Rc<context::AbortSignal>>,
}

impl Source {
    pub(crate) fn after(wait: Duration) -> Self {
        let nanoseconds = u64::try_from(wait.as_nanos()).unwrap_or(u64::MAX);
        Self {
            pollable: monotonic_clock::subscribe_duration(nanoseconds),
            _owner: None,
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.pollable.ready()
    }
}

/// Waits until one of the sources is ready.
pub(crate) fn park(sources: &[Rc<Source>]) {
    assert!(
        !sources.is_empty(),
        "the handler waits, and nothing can wake it"
    );
    let pollables: Vec<&Pollable> = sources.iter().map(|source| &source.pollable).collect();
    poll::poll(&pollables);
}

/// A waker for the executor, with its flag.
pub(crate) fn waker() -> (Waker, Arc<Woken>) {
    let woken = Arc::new(Woken(AtomicBool::new(false)));
    (Waker::from(Arc::clone(&woken)), woken)
}

/// True from a wake to the next [`take`](Self::take).
pub(crate) struct Woken(AtomicBool);

impl Woken {
    pub(crate) fn take(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}
