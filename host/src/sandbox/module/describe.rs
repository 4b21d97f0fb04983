//! Gets the manifest of a new module.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinError;
use tokio::time::timeout;
use wasmtime::Store;

use super::compile::Try;
use super::lines::Lines;
use super::refused::NotLoaded;
use crate::sandbox::attempt::end::{backtrace, is_guests_fault, trap_message};
use crate::sandbox::attempt::memory::{AttemptLimiter, MemoryBudget, PAGE_BYTES};
use crate::sandbox::attempt::meter::{Meter, with_cpu_limit};
use crate::sandbox::attempt::state::{self, AttemptState, PerAttempt};
use crate::sandbox::bindings::ModulePre;
use crate::sandbox::capability::GuestLog;
use crate::sandbox::{Handler, Limits, Manifest, Sandbox, Settings};
use crate::sanitize::line;

/// Added to the initial memory of the module, which contains a whole runtime in some languages. A manifest is built
/// from constants.
const MEMORY_BYTES_MORE: usize = 32 << 20;

/// The limit applies to CPU time, not wall time: on a busy host, a limit on wall time would refuse a good module.
const CPU_MAX: Duration = Duration::from_millis(500);

/// The maximum wall time, for a module that waits instead of using CPU time.
const WALL_MAX: Duration = Duration::from_secs(15);

/// The wall time after which other modules go ahead of this one.
const FIRST_TRY_WALL: Duration = Duration::from_secs(1);

/// The maximum number of frames of a backtrace that a refusal shows: the innermost ones.
const FRAMES_MAX: usize = 12;

/// Calls `describe` in a throwaway instance without grants, with little memory and time. Blocks; do not call it from
/// async code.
///
/// # Errors
/// [`NotLoaded::Retry`] after the first try only.
pub(in crate::sandbox) fn describe(
    sandbox: &Arc<Sandbox>,
    pre: ModulePre<AttemptState>,
    lines: Arc<Lines>,
    which: Try,
) -> Result<String, NotLoaded> {
    let shared = sandbox.clone();
    let task = sandbox.guests().spawn(async move {
        match which {
            Try::First => call(shared, pre, lines, FIRST_TRY_WALL).await,
            Try::Second => {
                let own = shared.clone();
                // One at a time, so that first tries always have a permit left.
                let _slow = own.slow_describes.acquire().await;
                call(shared, pre, lines, WALL_MAX).await
            }
        }
    });
    let described = sandbox.guests().block_on(task);
    match described.unwrap_or_else(|error| Err(could_not(&error))) {
        Ok(manifest) => Ok(manifest),
        Err(failed) => Err(match failed.cause {
            Cause::Waited if which == Try::First => NotLoaded::Retry,
            Cause::Waited | Cause::Module => NotLoaded::Contents(failed.why),
            Cause::Machine => NotLoaded::Transient(failed.why),
        }),
    }
}

/// The reason why a module has not described itself.
struct Failed {
    /// A sentence that starts with "it …".
    why: String,
    cause: Cause,
}

enum Cause {
    Module,
    /// Its wall time had expired.
    Waited,
    /// No instance could be created.
    Machine,
}

impl From<String> for Failed {
    fn from(why: String) -> Self {
        Self {
            why,
            cause: Cause::Module,
        }
    }
}

/// Why the call did not return a manifest.
enum Stop {
    /// The instance failed to start.
    Starting(wasmtime::Error),
    Running(wasmtime::Error),
}

fn could_not(error: &JoinError) -> Failed {
    format!("it could not be described: {error}").into()
}

impl Sandbox {
    /// Instantiates the handler's module once more and gets its manifest, as when it was loaded.
    ///
    /// # Errors
    /// If that fails, or the module no longer declares the same about the handler; a sentence that starts with "it …"
    /// or "its …".
    pub async fn verify(self: &Arc<Self>, handler: &Handler) -> Result<(), String> {
        let task = self.guests().spawn(call(
            self.clone(),
            handler.module.pre.clone(),
            handler.module.lines.clone(),
            WALL_MAX,
        ));
        let described = task.await.unwrap_or_else(|error| Err(could_not(&error)));
        let text = described.map_err(|failed| failed.why)?;
        let manifest = parsed(&text)?;
        match manifest.handlers.contains(&handler.manifest) {
            true => Ok(()),
            false => Err("its manifest has changed since it was loaded".into()),
        }
    }
}

/// The manifest that `describe` has returned.
///
/// # Errors
/// A sentence that starts with "its manifest …".
pub(super) fn parsed(described: &str) -> Result<Manifest, String> {
    Manifest::parse(described).map_err(|why| format!("its manifest (describe) {why}"))
}

async fn call(
    sandbox: Arc<Sandbox>,
    pre: ModulePre<AttemptState>,
    lines: Arc<Lines>,
    wall_max: Duration,
) -> Result<String, Failed> {
    let _permit = sandbox.describes.acquire().await;
    let _ticking = sandbox.ticker.tick();

    let memory_bytes = memory_bytes(&pre, sandbox.settings());
    let limits = Limits {
        memory_bytes,
        ..Limits::default()
    };
    // The instance has its own budget, so that a busy host does not refuse a module.
    let limiter = AttemptLimiter::new(&limits, MemoryBudget::new(memory_bytes));
    let of = PerAttempt::placeholder();
    let own = AttemptState::new(Arc::default(), lines, &limits, limiter, of)?;
    let mut store = Store::new(&sandbox.engine, own);
    state::limit(&mut store, &limits);

    let called = {
        let call = pin!(async {
            let instance = pre.instantiate_async(&mut store).await;
            let instance = instance.map_err(Stop::Starting)?;
            let handlers = instance.rouse_handler_handlers();
            let described = handlers.call_describe(&mut store).await;
            described.map_err(Stop::Running)
        });
        timeout(wall_max, with_cpu_limit(call, &Meter::default(), CPU_MAX)).await
    };
    let state = store.data();
    let log = &state.log;
    match called {
        Ok(Some(Ok(manifest))) => Ok(manifest),
        Ok(None) => Err(format!(
            "it used more than {} ms of CPU time to describe itself{}",
            CPU_MAX.as_millis(),
            evidence(log, &[])
        )
        .into()),
        Err(_) => Err(Failed {
            why: format!(
                "it took more than {} s to describe itself{}",
                wall_max.as_secs(),
                evidence(log, &[])
            ),
            cause: Cause::Waited,
        }),
        Ok(Some(Err(Stop::Starting(error))))
            if state.limiter.denial().is_none() && !is_guests_fault(&error) =>
        {
            Err(Failed {
                why: format!(
                    "it could not be described, because no instance could be created: {error:#}"
                ),
                cause: Cause::Machine,
            })
        }
        Ok(Some(Err(Stop::Starting(error) | Stop::Running(error)))) => {
            let why = match (state.limiter.denial(), &state.panic) {
                (Some(_), _) => format!(
                    "it needed more than {} MiB of memory to describe itself",
                    memory_bytes >> 20
                ),
                (None, Some(panic)) => format!(
                    "it panicked while it described itself: {} at {}",
                    line(&panic.message),
                    panic.location
                ),
                (None, None) => format!(
                    "it failed while it described itself: {}",
                    trap_message(&error, &limits)
                ),
            };
            Err((why + &evidence(log, &backtrace(&error, &state.lines))).into())
        }
    }
}

/// The module's initial memory, plus [`MEMORY_BYTES_MORE`]. The initial memory counts only up to the maximum of any
/// attempt: if that is too little, attempts could not run either.
fn memory_bytes(pre: &ModulePre<AttemptState>, settings: &Settings) -> usize {
    let resources = pre.instance_pre().component().resources_required();
    let initial = resources.map_or(0, |it| {
        let pages = u64::from(it.num_memories) * it.max_initial_memory_size.unwrap_or(0);
        usize::try_from(pages).map_or(usize::MAX, |pages| pages.saturating_mul(PAGE_BYTES))
    });
    initial.min(settings.memory_bytes_max()) + MEMORY_BYTES_MORE
}

/// Evidence for the author: the last lines of standard error, where most languages report errors, and the backtrace.
fn evidence(log: &GuestLog, backtrace: &[String]) -> String {
    let stderr = log.last_errors();
    let frames = &backtrace[..backtrace.len().min(FRAMES_MAX)];
    let mut text = String::new();
    for (title, lines) in [("standard error", &stderr[..]), ("backtrace", frames)] {
        if !lines.is_empty() {
            text += &format!("; {title}: {}", lines.join(" | "));
        }
    }
    text
}
