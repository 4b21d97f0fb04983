//! Where a guest spends its time: what stands on its stack at each tick.
//!
//! wasmtime's own `GuestProfiler` knows functions but no lines of their source; the backtraces that it makes of traps know
//! both, so these are what is kept. Only what computes is seen: a tick finds a guest at a function's start or at a turn of a loop, and
//! one that waits for the host when it comes back from there.

mod firefox;
mod samples;

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use wasmtime::{AsContext, WasmBacktrace};

use self::samples::{Samples, Table};
use super::stack::called;
use crate::sandbox::module::lines::Lines;

/// What one attempt was doing, tick by tick.
pub struct Profile(Mutex<Samples>);

impl Profile {
    /// How often a guest should be looked at: the [`tick`](super::Settings::tick) of a sandbox in which attempts are
    /// profiled. A look at a large module takes some 40 ms, in which the guest stands still.
    pub const EVERY: Duration = Duration::from_millis(1);

    /// An empty one, which starts now.
    pub fn start() -> Self {
        Self(Mutex::new(Samples {
            started_at: SystemTime::now(),
            started: Instant::now(),
            looking: Duration::ZERO,
            names: Table::default(),
            functions: Table::default(),
            frames: Table::default(),
            stacks: Table::default(),
            samples: Vec::new(),
        }))
    }

    /// How often the guest was seen.
    pub fn len(&self) -> usize {
        self.lock().samples.len()
    }

    /// True where it was never seen.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// As a file for <https://profiler.firefox.com>. `name`: what was profiled.
    pub fn firefox_json(&self, name: &str) -> serde_json::Value {
        firefox::json(&self.lock(), name, Self::EVERY)
    }

    /// Looks at what the guest is doing.
    pub(in crate::sandbox) fn look(&self, store: impl AsContext, lines: &Lines) {
        let start = Instant::now();
        let stack = called(&WasmBacktrace::force_capture(store), lines);
        let mut samples = self.lock();
        let at = start
            .duration_since(samples.started)
            .saturating_sub(samples.looking);
        samples.add(at, stack);
        samples.looking += start.elapsed();
    }

    fn lock(&self) -> MutexGuard<'_, Samples> {
        // Nothing panics while it holds the lock but the allocator.
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
