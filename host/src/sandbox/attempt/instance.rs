//! One instance of a module, from its start to the end of its last job.

use std::sync::Arc;

use wasmtime::{Engine, Store};

use super::end::{self, Stop};
use super::state::{self, AttemptState, PerAttempt};
use crate::job::RunEnd;
use crate::sandbox::bindings;
use crate::sandbox::bindings::exports::rouse::handler::handlers::JobInfo;
use crate::sandbox::{Handler, Limits};

/// Small leaks of an instance add up; this limits them.
const JOBS_MAX: u32 = 10_000;

/// Memory never shrinks, so after one large job, an instance would keep that much memory for small jobs.
const BYTES_MAX: usize = 16 << 20;

/// One instance of a module, with everything that the host keeps for it.
pub(in crate::sandbox) struct Instance {
    store: Store<AttemptState>,
    /// `None` until it has started.
    exports: Option<bindings::Module>,
    jobs: u32,
}

/// The jobs that an instance may serve: those of one tenant for one version of a handler. Jobs without a tenant count
/// as jobs of one more tenant.
pub(in crate::sandbox) struct Serves {
    pub(in crate::sandbox) handler: Arc<Handler>,
    pub(in crate::sandbox) tenant: Option<String>,
}

impl Instance {
    /// Creates an instance, which starts with its first call.
    pub(in crate::sandbox) fn new(engine: &Engine, state: AttemptState, limits: &Limits) -> Self {
        let mut store = Store::new(engine, state);
        state::limit(&mut store, limits);
        Self {
            store,
            exports: None,
            jobs: 0,
        }
    }

    /// Prepares the instance for its next attempt.
    ///
    /// # Errors
    /// When a granted directory has never been opened successfully.
    pub(in crate::sandbox) fn prepare(&mut self, of: PerAttempt) -> Result<(), String> {
        self.store.data_mut().prepare(of)?;
        state::start(&mut self.store);
        Ok(())
    }

    /// Calls the handler; the first call starts the instance.
    pub(in crate::sandbox) async fn call(
        &mut self,
        handler: &Handler,
        job: &JobInfo,
    ) -> Result<Vec<u8>, Stop> {
        self.jobs += 1;
        let exports = match &mut self.exports {
            Some(exports) => exports,
            none => {
                let pre = &handler.module.pre;
                let exports = pre.instantiate_async(&mut self.store).await;
                none.insert(exports.map_err(Stop::Starting)?)
            }
        };
        let handlers = exports.rouse_handler_handlers();
        handlers
            .call_run(&mut self.store, job)
            .await
            .map_err(Stop::Running)?
            .map_err(Stop::Failed)
    }

    pub(in crate::sandbox) fn state(&self) -> &AttemptState {
        self.store.data()
    }

    pub(in crate::sandbox) fn state_mut(&mut self) -> &mut AttemptState {
        self.store.data_mut()
    }

    /// True if the instance may serve another job: the last one returned normally and left no resources of the host
    /// open, and the instance has neither served too many jobs nor grown too large.
    pub(in crate::sandbox) fn is_reusable(&self, end: &RunEnd) -> bool {
        let state = self.store.data();
        end::returned_normally(end)
            && self.jobs < JOBS_MAX
            && state.limiter.used_bytes() <= BYTES_MAX
            && state.limiter.denial().is_none()
            && state.panic.is_none()
            && state.table.is_empty()
    }
}
