//! A host's sandbox that loads modules and runs their handlers.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use rouse::job::{AbortReason, Attempt, JobId, RunEnd};
use rouse::sandbox::{AbortHandle, Catalog, DatabaseClock, Handler, JobInput, Sandbox, Settings};
use rouse::traces::AttemptTrace;
use tokio::runtime::Runtime;
use tokio::time::timeout;

/// An attempt that keeps computing is stopped after this time.
const RUNS_FOR: Duration = Duration::from_millis(100);

/// Time from the abort to the end of the attempt.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// A payload with fields for most of the tests' handlers.
const PAYLOAD: &str = r#"{"text": "a b", "name": "a", "n": 7, "as": "details", "bytes": 1000, "depth": 100, "fail_until": 1, "line": "a", "ms": 1, "path": "/a"}"#;

/// What [`Host::run`] returns for a module that is not loaded.
pub(crate) const REFUSED: &str = "refused";

/// A sandbox like that of a host.
pub(crate) struct Host {
    runtime: Runtime,
    sandbox: Arc<Sandbox>,
}

impl Host {
    pub(crate) fn start(rouse: &Path) -> Result<Self> {
        let settings = Settings {
            attempts_max: 2,
            compiler: Some(rouse.to_owned()),
            ..Settings::default()
        };
        Ok(Self {
            runtime: Runtime::new().context("start a runtime")?,
            sandbox: Sandbox::start(settings)?,
        })
    }

    /// Loads the module as a host does, runs one attempt of each of its handlers, and returns how the last one ended.
    pub(crate) fn run(&self, module: &[u8]) -> Result<&'static str> {
        let folder = tempfile::tempdir().context("make a folder")?;
        fs::write(folder.path().join("case.wasm"), module).context("write the module")?;
        self.runtime.block_on(async {
            let catalog = Catalog::open(self.sandbox.clone(), folder.path()).await?;
            let handlers = catalog.current();
            let mut end = REFUSED;
            for name in handlers.names() {
                let handler = handlers.get(&name).context("look up a listed handler")?;
                end = self.attempt(handler).await;
            }
            Ok(end)
        })
    }

    async fn attempt(&self, handler: &Arc<Handler>) -> &'static str {
        let job = JobInput {
            id: JobId(7),
            queue: "default".into(),
            tenant: None,
            source: None,
            attempt: Attempt(1),
            max_attempts: 1,
            requested_at_ms: 0,
            payload: PAYLOAD.into(),
            payload_checked: None,
            memory_bytes: None,
            clock: DatabaseClock::from_host(),
            trace: AttemptTrace::default(),
        };
        let abort = AbortHandle::new();
        let run = self.sandbox.run(handler, job, abort.clone(), None);
        let mut running = self.sandbox.guests().spawn(run);
        let run = match timeout(RUNS_FOR, &mut running).await {
            Ok(run) => run,
            Err(_) => {
                abort.abort(AbortReason::TimedOut, Duration::ZERO);
                let stopped = timeout(STOP_TIMEOUT, running).await;
                stopped.expect("an attempt is stopped")
            }
        };
        name_of(&run.expect("an attempt does not panic").end)
    }
}

fn name_of(end: &RunEnd) -> &'static str {
    match end {
        RunEnd::Returned(_) => "returned",
        RunEnd::Suspended(_) => "suspended",
        RunEnd::Failed(_) => "failed",
        RunEnd::Panicked { .. } => "panicked",
        RunEnd::Trapped { .. } => "trapped",
        RunEnd::StackOverflow { .. } => "stack overflow",
        RunEnd::Denied { .. } => "denied",
        RunEnd::OutOfMemory { .. } => "out of memory",
        RunEnd::OutOfCpu { .. } => "out of cpu",
        RunEnd::OutputTooLarge { .. } => "output too large",
        RunEnd::PayloadRefused(_) => "payload refused",
        RunEnd::ResultRefused(_) => "result refused",
        RunEnd::Aborted(_) => "stopped",
        RunEnd::Unrunnable(_) => "unrunnable",
        // Ends of claims; this program claims nothing.
        RunEnd::NotStarted | RunEnd::NoHandler | RunEnd::GrantsRefused(_) | RunEnd::Parked => {
            "not started"
        }
        RunEnd::EffectFailed(_) => "effect failed",
        RunEnd::SettlementRefused(_) => "settlement refused",
    }
}
