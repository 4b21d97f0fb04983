//! One instance of a module, from its start to the end of its last job.

use std::sync::Arc;
use std::time::Instant;

use wasmtime::Store;

use super::end::{self, Stop};
use super::limits;
use super::memory::AttemptLimiter;
use super::state::{AttemptState, OfAttempt};
use crate::job::RunEnd;
use crate::sandbox::bindings;
use crate::sandbox::bindings::exports::rouse::handler::handlers::JobInfo;
use crate::sandbox::{Handler, Sandbox};

/// What little an instance forgets or lets slip adds up; this is where it ends.
const JOBS_MAX: u32 = 10_000;

/// Memory never shrinks: one large job is no reason to keep so much for the small ones.
const BYTES_MAX: usize = 16 << 20;

/// One instance of a module, with all that the host keeps for it.
pub(in crate::sandbox) struct Instance {
    store: Store<AttemptState>,
    /// None until it has come up.
    exports: Option<bindings::Module>,
    jobs: u32,
}

/// Whom an instance may serve: the jobs of one tenant for one handler in one version. No tenant is
/// one of its own.
pub(in crate::sandbox) struct Serves {
    handler: Arc<Handler>,
    tenant: Option<String>,
}

impl Sandbox {
    /// An instance for one attempt: a fresh one, or, where module and operator agree, one that has
    /// served this tenant before. `memory_bytes`: instead of the usual limit.
    ///
    /// # Errors
    /// When a granted directory was never there.
    pub(in crate::sandbox) fn instance(
        &self,
        handler: &Arc<Handler>,
        tenant: Option<&str>,
        of: OfAttempt,
        memory_bytes: Option<usize>,
    ) -> Result<Instance, String> {
        // One that was kept has the usual memory.
        if memory_bytes.is_none()
            && let Some(mut kept) = self.kept(handler, tenant)
        {
            let state = kept.store.data_mut();
            state.next(of)?;
            limits::start(&mut kept.store);
            return Ok(kept);
        }
        let mut limits = handler.limits.clone();
        limits.memory_bytes = limits.memory_bytes_of(memory_bytes);
        let limiter = AttemptLimiter::new(&limits, self.budget.clone());
        let state = AttemptState::new(
            handler.granted.clone(),
            handler.module.lines.clone(),
            &limits,
            limiter,
            of,
        )?;
        let mut store = Store::new(&self.engine, state);
        limits::limit(&mut store, &limits);
        Ok(Instance {
            store,
            exports: None,
            jobs: 0,
        })
    }

    /// An instance that was kept for this tenant, with its memory counted again.
    fn kept(&self, handler: &Arc<Handler>, tenant: Option<&str>) -> Option<Instance> {
        if !handler.reuses {
            return None;
        }
        let is_it = |serves: &Serves| {
            Arc::ptr_eq(&serves.handler, handler) && serves.tenant.as_deref() == tenant
        };
        loop {
            let (_, mut instance) = self.idle.take(is_it)?;
            // Where the attempts that run need the memory, it goes.
            if instance.store.data_mut().limiter.resume() {
                return Some(instance);
            }
        }
    }

    /// Keeps an instance for the next job of this tenant, if it is fit for one.
    pub(in crate::sandbox) fn keep(
        &self,
        handler: &Arc<Handler>,
        tenant: Option<String>,
        mut instance: Instance,
        end: &RunEnd,
    ) {
        if !instance.is_fit(end) {
            return;
        }
        // The memory first: what the state counts from then on is not the last job's.
        let state = instance.store.data_mut();
        state.limiter.pause();
        state.rest();
        let bytes = state.limiter.used_bytes();
        let handler = handler.clone();
        let serves = Serves { handler, tenant };
        if self.idle.put(serves, instance, bytes, Instant::now()) {
            self.guests().spawn(self.idle.clone().sweep());
        }
    }
}

impl Instance {
    /// Calls the handler, after the module's start where it has not come up yet.
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

    /// True when the last job left it in order, and with nothing of the host in its hands.
    fn is_fit(&self, end: &RunEnd) -> bool {
        let state = self.store.data();
        end::left_in_order(end)
            && self.jobs < JOBS_MAX
            && state.limiter.used_bytes() <= BYTES_MAX
            && state.limiter.denial().is_none()
            && state.panic.is_none()
            && state.table.is_empty()
    }
}
