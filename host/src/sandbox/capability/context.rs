//! `rouse:handler/context`, `retry` and `settings`: what a guest learns about its attempt, and what it reports.

use wasmtime::component::Resource;
use wasmtime_wasi::async_trait;
use wasmtime_wasi::p2::{DynPollable, Pollable, subscribe};

use crate::job;
use crate::sandbox::AbortHandle;
use crate::sandbox::attempt::state::{AttemptState, Panic};
use crate::sandbox::bindings::rouse::handler::context::{Host, HostAbortSignal};
use crate::sandbox::bindings::rouse::handler::types::{self, AbortReason, Level};
use crate::sandbox::bindings::rouse::handler::{retry, settings};
use crate::sanitize::{paragraphs, printable};

/// The maximum size of a panic message, which is stored with the attempt; longer messages are truncated.
const PANIC_BYTES_MAX: usize = 4 << 10;

/// The maximum size of the step in a progress report, which is one line of a listing.
const STEP_BYTES_MAX: usize = 200;

/// Becomes ready when the attempt has to stop.
struct Aborted(AbortHandle);

#[async_trait]
impl Pollable for Aborted {
    async fn ready(&mut self) {
        self.0.aborted().await;
    }
}

impl types::Host for AttemptState {}

impl Host for AttemptState {
    fn abort(&mut self) -> wasmtime::Result<Resource<AbortHandle>> {
        self.meter.count_host_call();
        Ok(self.table.push(self.abort.clone())?)
    }

    fn log(&mut self, level: Level, message: String) -> wasmtime::Result<()> {
        self.meter.count_host_call();
        let level = match level {
            Level::Trace => tracing::Level::TRACE,
            Level::Debug => tracing::Level::DEBUG,
            Level::Info => tracing::Level::INFO,
            Level::Warn => tracing::Level::WARN,
            Level::Error => tracing::Level::ERROR,
        };
        self.log.message(level, &message);
        Ok(())
    }

    fn progress(&mut self, percent: u8, step: String) -> wasmtime::Result<()> {
        self.meter.count_host_call();
        let step = printable(&step, STEP_BYTES_MAX);
        let percent = percent.min(100);
        self.log.progress(percent, &step);
        if let Some(journal) = self.steps.journal()
            && self.abort.reason().is_none()
        {
            journal.progress(percent, &step);
        }
        Ok(())
    }

    // Also accepted after an abort, because it gives the host the reason for the trap that follows.
    fn panicked(&mut self, message: String, location: String) -> wasmtime::Result<()> {
        self.meter.count_host_call();
        self.panic = Some(Panic {
            message: paragraphs(&message, PANIC_BYTES_MAX),
            location: printable(&location, PANIC_BYTES_MAX),
        });
        Ok(())
    }
}

impl HostAbortSignal for AttemptState {
    fn reason(&mut self, signal: Resource<AbortHandle>) -> wasmtime::Result<Option<AbortReason>> {
        self.meter.count_host_call();
        let reason = self.table.get(&signal)?.reason();
        Ok(reason.map(|reason| match reason {
            job::AbortReason::TakenByAnotherWorker => AbortReason::TakenByAnotherWorker,
            job::AbortReason::AlreadyCompleted => AbortReason::AlreadyCompleted,
            job::AbortReason::NotFound => AbortReason::NotFound,
            job::AbortReason::Error => AbortReason::Error,
            job::AbortReason::TimedOut => AbortReason::TimedOut,
            job::AbortReason::Cancelled => AbortReason::Cancelled,
            job::AbortReason::Shutdown => AbortReason::Shutdown,
        }))
    }

    fn grace_remaining_ms(
        &mut self,
        signal: Resource<AbortHandle>,
    ) -> wasmtime::Result<Option<u64>> {
        self.meter.count_host_call();
        let remaining = self.table.get(&signal)?.grace_remaining();
        Ok(remaining.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)))
    }

    fn subscribe(
        &mut self,
        signal: Resource<AbortHandle>,
    ) -> wasmtime::Result<Resource<DynPollable>> {
        self.meter.count_host_call();
        let aborted = Aborted(self.table.get(&signal)?.clone());
        let aborted = self.table.push(aborted)?;
        subscribe(&mut self.table, aborted)
    }

    fn drop(&mut self, signal: Resource<AbortHandle>) -> wasmtime::Result<()> {
        self.meter.count_host_call();
        self.table.delete(signal)?;
        Ok(())
    }
}

impl retry::Host for AttemptState {
    fn at(&mut self, unix_ms: i64) -> wasmtime::Result<()> {
        self.meter.count_host_call();
        self.retry_at_ms = Some(unix_ms);
        Ok(())
    }
}

impl settings::Host for AttemptState {
    fn all(&mut self) -> wasmtime::Result<Vec<u8>> {
        self.meter.count_host_call();
        let settings = self.granted.settings.as_deref();
        Ok(settings.unwrap_or("{}").into())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::sandbox::Limits;
    use crate::sandbox::attempt::memory::{AttemptLimiter, MemoryBudget};
    use crate::sandbox::attempt::state::PerAttempt;

    #[tokio::test]
    async fn every_call_counts_as_a_host_call() {
        let limits = Limits::default();
        let limiter = AttemptLimiter::new(&limits, MemoryBudget::new(0));
        let of = PerAttempt::placeholder();
        let state = AttemptState::new(Arc::default(), Arc::default(), &limits, limiter, of);
        let state = &mut state.expect("it has no directories");
        let signal = Host::abort(state).unwrap();
        let borrowed = || Resource::new_borrow(signal.rep());
        Host::log(state, Level::Info, "text".into()).unwrap();
        Host::progress(state, 50, "half".into()).unwrap();
        Host::panicked(state, "message".into(), "a.rs:1:1".into()).unwrap();
        HostAbortSignal::reason(state, borrowed()).unwrap();
        HostAbortSignal::grace_remaining_ms(state, borrowed()).unwrap();
        HostAbortSignal::subscribe(state, borrowed()).unwrap();
        HostAbortSignal::drop(state, signal).unwrap();
        retry::Host::at(state, 0).unwrap();
        settings::Host::all(state).unwrap();
        assert_eq!(state.meter.usage().host_calls, 10);
    }
}
