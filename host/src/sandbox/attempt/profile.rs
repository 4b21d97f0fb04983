//! Samples the stack of a guest at each tick, to show where it spends its time.
//!
//! Wasmtime's own `GuestProfiler` reports functions but not source lines. The backtraces that wasmtime captures for
//! traps have both, so a sample is such a backtrace. Only CPU time is sampled: a tick interrupts a guest at the start
//! of a function or at a loop's back edge; a guest that waits for the host is interrupted only when the host call has
//! returned.

mod firefox;
mod samples;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use wasmtime::{AsContext, WasmBacktrace};

use self::samples::{Samples, Table};
use super::stack::stack_frames;
use crate::sandbox::module::lines::Lines;

/// The stack samples of one attempt.
pub struct Profile(Mutex<Samples>);

impl Profile {
    /// The recommended sampling interval: the [`tick`](crate::sandbox::Settings::tick) of a sandbox in which attempts
    /// are profiled. Sampling a large module takes about 40 ms, during which the guest is paused.
    pub const EVERY: Duration = Duration::from_millis(1);

    /// An empty profile that starts now.
    pub fn start() -> Self {
        Self(Mutex::new(Samples {
            started_at: SystemTime::now(),
            started: Instant::now(),
            sampling_time: Duration::ZERO,
            names: Table::default(),
            functions: Table::default(),
            frames: Table::default(),
            stacks: Table::default(),
            samples: Vec::new(),
        }))
    }

    /// The number of samples.
    pub fn len(&self) -> usize {
        self.lock().samples.len()
    }

    /// True if there are no samples.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The profile as a file for <https://profiler.firefox.com>. `name`: what was profiled.
    pub fn firefox_json(&self, name: &str) -> serde_json::Value {
        firefox::json(&self.lock(), name, Self::EVERY)
    }

    /// Takes a sample of the guest's stack.
    pub(in crate::sandbox) fn sample(&self, store: impl AsContext, lines: &Lines) {
        let start = Instant::now();
        let stack = stack_frames(&WasmBacktrace::force_capture(store), lines);
        let mut samples = self.lock();
        let at = start
            .duration_since(samples.started)
            .saturating_sub(samples.sampling_time);
        samples.add(at, stack);
        samples.sampling_time += start.elapsed();
    }

    fn lock(&self) -> MutexGuard<'_, Samples> {
        // Only the allocator can panic while the lock is held.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Profile").field("len", &self.len()).finish()
    }
}

#[cfg(test)]
mod tests;
