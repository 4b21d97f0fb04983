//! Chooses the instance for an attempt: a fresh one, or one that has served the same tenant before.

use std::sync::Arc;
use std::time::Instant;

use super::instance::{Instance, Serves};
use super::memory::AttemptLimiter;
use super::state::{AttemptState, PerAttempt};
use crate::job::RunEnd;
use crate::sandbox::{Handler, Sandbox};

impl Sandbox {
    /// Returns an instance for one attempt: a fresh one, or, if module and operator allow it, one that has served
    /// this tenant before. `memory_bytes` overrides the usual limit.
    ///
    /// # Errors
    /// When a granted directory has never been opened successfully.
    pub(in crate::sandbox) fn instance(
        &self,
        handler: &Arc<Handler>,
        tenant: Option<&str>,
        of: PerAttempt,
        memory_bytes: Option<usize>,
    ) -> Result<Instance, String> {
        // Idle instances have the usual memory limit.
        if memory_bytes.is_none()
            && let Some(mut idle_instance) = self.idle_instance(handler, tenant)
        {
            idle_instance.prepare(of)?;
            return Ok(idle_instance);
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

    /// Takes an idle instance of this tenant, and counts its memory again.
    fn idle_instance(&self, handler: &Arc<Handler>, tenant: Option<&str>) -> Option<Instance> {
        if !handler.reuses {
            return None;
        }
        let matches = |serves: &Serves| {
            Arc::ptr_eq(&serves.handler, handler) && serves.tenant.as_deref() == tenant
        };
        loop {
            let (_, mut instance) = self.idle.take(matches)?;
            // If running attempts need the memory, the instance is dropped.
            if instance.state_mut().limiter.resume() {
                return Some(instance);
            }
        }
    }

    /// Keeps an instance for the next job of this tenant, if it is fit for reuse.
    pub(in crate::sandbox) fn keep(
        &self,
        handler: &Arc<Handler>,
        tenant: Option<String>,
        mut instance: Instance,
        end: &RunEnd,
    ) {
        if !instance.is_reusable(end) {
            return;
        }
        let state = instance.state_mut();
        // Before `pause` releases the memory of this job: hyper may hold bodies that count towards it.
        state.http.unsent.take_away();
        // Before `release`: memory that the state counts from then on no longer belongs to this job.
        state.limiter.pause();
        state.release();
        let bytes = state.limiter.used_bytes();
        let handler = handler.clone();
        let serves = Serves { handler, tenant };
        if self.idle.put(serves, instance, bytes, Instant::now()) {
            self.guests().spawn(self.idle.clone().sweep());
        }
    }
}
