//! Which instance serves an attempt: a fresh one, or one that has served the same tenant before.

use std::sync::Arc;
use std::time::Instant;

use super::instance::{Instance, Serves};
use super::memory::AttemptLimiter;
use super::state::{AttemptState, OfAttempt};
use crate::job::RunEnd;
use crate::sandbox::{Handler, Sandbox};

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
            kept.next(of)?;
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
        Ok(Instance::new(&self.engine, state, &limits))
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
            if instance.state_mut().limiter.resume() {
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
        let state = instance.state_mut();
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
