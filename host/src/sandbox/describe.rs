//! Asking a new module for its manifest.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::timeout;
use wasmtime::Store;

use super::bindings::ModulePre;
use super::capability::{GuestLog, HandlerState, Http, Speaker, Steps};
use super::end::trap_message;
use super::limits;
use super::memory::{AttemptLimiter, MemoryBudget};
use super::meter::{Meter, within_cpu};
use super::state::{AttemptState, OfAttempt};
use super::{AbortHandle, Handler, Limits, Manifest, Sandbox};
use crate::harmless::line;

/// A manifest is put together from constants.
const MEMORY_BYTES_MAX: usize = 32 << 20;

/// Processor time. Not wall time: on a busy host a good module would be refused.
const CPU_MAX: Duration = Duration::from_millis(500);

/// For a module that waits instead of computing.
const WALL_MAX: Duration = Duration::from_secs(15);

/// Calls `describe` in a throwaway instance that has no grants, little memory and little time.
/// Blocks; not for async code.
///
/// # Errors
/// A sentence that begins with "it …".
pub(super) fn describe(
    sandbox: &Arc<Sandbox>,
    pre: ModulePre<AttemptState>,
) -> Result<String, String> {
    let task = sandbox.guests().spawn(call(sandbox.clone(), pre));
    sandbox
        .guests()
        .block_on(task)
        .unwrap_or_else(|error| Err(format!("it could not be described: {error}")))
}

impl Sandbox {
    /// Instantiates the module of this handler once more and asks it for its manifest, as when it was loaded.
    ///
    /// # Errors
    /// Where that fails, or the module does not say the same of the handler any more; a sentence that begins with
    /// "it …".
    pub async fn verify(self: &Arc<Self>, handler: &Handler) -> Result<(), String> {
        let task = self
            .guests()
            .spawn(call(self.clone(), handler.module.pre.clone()));
        let text = task
            .await
            .unwrap_or_else(|error| Err(format!("it could not be described: {error}")))?;
        let manifest = Manifest::parse(&text)?;
        match manifest.handlers.contains(&handler.manifest) {
            true => Ok(()),
            false => Err("it describes itself otherwise than when it was loaded".into()),
        }
    }
}

async fn call(sandbox: Arc<Sandbox>, pre: ModulePre<AttemptState>) -> Result<String, String> {
    let _permit = sandbox.describes.acquire().await;
    let _ticking = sandbox.ticker.tick();

    let abort = AbortHandle::new();
    let log = Arc::new(GuestLog::new(
        Speaker::Module,
        abort.clone(),
        &Limits::default(),
        None,
    ));
    let http = Http::new(None, &Limits::default(), abort.clone(), Arc::default());
    let of = OfAttempt {
        meter: Arc::default(),
        abort,
        log,
        steps: Steps::default(),
        handler_state: HandlerState::default(),
        http,
        profile: None,
    };
    let limits = Limits {
        memory_bytes: MEMORY_BYTES_MAX,
        ..Limits::default()
    };
    // A budget of its own: a busy host is no reason to refuse a module.
    let limiter = AttemptLimiter::new(&limits, MemoryBudget::new(MEMORY_BYTES_MAX));
    let state = AttemptState::new(Arc::default(), Arc::default(), &limits, limiter, of)?;
    let mut store = Store::new(&sandbox.engine, state);
    limits::limit(&mut store, &limits);

    let called = {
        let call = pin!(async {
            let instance = pre.instantiate_async(&mut store).await?;
            let handlers = instance.rouse_handler_handlers();
            handlers.call_describe(&mut store).await
        });
        timeout(WALL_MAX, within_cpu(call, &Meter::default(), CPU_MAX)).await
    };
    match called {
        Ok(Some(Ok(manifest))) => Ok(manifest),
        Ok(None) => Err("it computes for more than 500 ms instead of describing itself".into()),
        Err(_) => Err("it takes more than 15 s to describe itself".into()),
        Ok(Some(Err(_))) if store.data().limiter.denial().is_some() => {
            Err("it needs more than 32 MiB of memory to describe itself".into())
        }
        Ok(Some(Err(error))) => Err(match &store.data().panic {
            Some(panic) => format!(
                "it panics when it describes itself: {} at {}",
                line(&panic.message),
                panic.location
            ),
            None => format!(
                "it fails when it describes itself: {}",
                trap_message(&error)
            ),
        }),
    }
}
