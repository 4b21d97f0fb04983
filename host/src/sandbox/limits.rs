//! What one attempt may use.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wasmtime::{ResourceLimiter, Store};

use super::state::AttemptState;

/// Stack of WebAssembly calls, bytes: wasmtime's own default; deep JSON (128 levels) needs 60 KiB.
pub(super) const WASM_STACK_BYTES_MAX: usize = 512 << 10;

/// Elements of one table. Tables hold functions whose address is taken; large Rust programs have
/// some thousands of them.
pub(super) const TABLE_ELEMENTS_MAX: usize = 20_000;

/// Bytes that one host call may carry from the guest to the host.
const HOSTCALL_BYTES_MAX: usize = 8 << 20;

/// Things of the host (open files, streams, pollables) that a guest holds at once.
const RESOURCES_MAX: usize = 1_024;

/// Handles, its own resources included, that a guest holds at once.
const HANDLES_MAX: usize = 4_096;

/// Bytes of one request for random numbers.
pub(super) const RANDOM_BYTES_MAX: u64 = 1 << 20;

/// Memory that all attempts of a host have together.
#[derive(Debug)]
pub(super) struct MemoryBudget {
    free_bytes: AtomicUsize,
}

impl MemoryBudget {
    pub(super) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            free_bytes: AtomicUsize::new(bytes),
        })
    }

    fn take(&self, bytes: usize) -> bool {
        self.free_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
                free.checked_sub(bytes)
            })
            .is_ok()
    }

    fn give(&self, bytes: usize) {
        self.free_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// Why the newest request for memory was denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Denial {
    /// The attempt has reached its own limit.
    OfAttempt,
    /// The attempts of this host together have reached theirs.
    OfHost,
}

/// Counts all linear memories of one attempt together; wasmtime's own limiter looks at each
/// memory alone.
#[derive(Debug)]
pub(super) struct AttemptLimiter {
    limit_bytes: usize,
    used_bytes: usize,
    budget: Arc<MemoryBudget>,
    /// The budget has its bytes back: nothing runs.
    paused: bool,
    denial: Option<Denial>,
}

impl AttemptLimiter {
    pub(super) fn new(limit_bytes: usize, budget: Arc<MemoryBudget>) -> Self {
        Self {
            limit_bytes,
            used_bytes: 0,
            budget,
            paused: false,
            denial: None,
        }
    }

    pub(super) fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    /// Linear memory never shrinks, so this is the peak too.
    pub(super) fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// Gives the memory back to the attempts that run, as far as the count goes.
    pub(super) fn pause(&mut self) {
        self.budget.give(self.used_bytes);
        self.paused = true;
    }

    /// Takes it again. False when the others need it; then this is good for nothing any more.
    #[must_use]
    pub(super) fn resume(&mut self) -> bool {
        self.paused = !self.budget.take(self.used_bytes);
        !self.paused
    }

    /// Why the newest request was denied; none when it was granted. An old denial that the guest
    /// got over explains nothing.
    pub(super) fn denial(&self) -> Option<Denial> {
        self.denial
    }
}

impl Drop for AttemptLimiter {
    fn drop(&mut self) {
        if !self.paused {
            self.budget.give(self.used_bytes);
        }
    }
}

impl ResourceLimiter for AttemptLimiter {
    fn memory_growing(
        &mut self,
        current: usize,
        desired: usize,
        maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        let more = desired.saturating_sub(current);
        let fits = self.used_bytes.saturating_add(more) <= self.limit_bytes
            && maximum.is_none_or(|maximum| desired <= maximum);
        self.denial = if !fits {
            Some(Denial::OfAttempt)
        } else if !self.budget.take(more) {
            Some(Denial::OfHost)
        } else {
            self.used_bytes += more;
            None
        };
        Ok(self.denial.is_none())
    }

    // Not taken back: a growth that the system refused after it was counted happens next to
    // never, and the whole count is given back with the store.
    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.denial = Some(Denial::OfAttempt);
        Ok(())
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(desired <= TABLE_ELEMENTS_MAX)
    }
}

/// Bytes that one host call may carry from the guest to the host: a result that is allowed
/// passes, and one that is a little too large can still be measured.
pub(super) fn hostcall_bytes_max(result_bytes_max: usize) -> usize {
    HOSTCALL_BYTES_MAX.max(result_bytes_max.saturating_mul(2))
}

/// Sets every limit of a fresh store.
pub(super) fn limit(store: &mut Store<AttemptState>, result_bytes_max: usize) {
    store.limiter(|state| &mut state.limiter);
    store.set_hostcall_fuel(hostcall_bytes_max(result_bytes_max));
    store.set_max_component_handles(HANDLES_MAX);
    store.data_mut().table.set_max_capacity(RESOURCES_MAX);
    begin(store);
    // Every tick, a guest that computes lets the others run, or is stopped.
    store.epoch_deadline_callback(|context| {
        Ok(if context.data().abort.is_killed() {
            wasmtime::UpdateDeadline::Interrupt
        } else {
            wasmtime::UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now()))
        })
    });
}

/// Counts the ticks from now on, at the begin of each job.
pub(super) fn begin(store: &mut Store<AttemptState>) {
    store.set_epoch_deadline(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 64 << 10;

    #[test]
    fn all_memories_of_an_attempt_count_together() {
        let mut limiter = AttemptLimiter::new(4 * PAGE, MemoryBudget::new(100 * PAGE));
        assert!(limiter.memory_growing(0, 3 * PAGE, None).unwrap());
        assert!(!limiter.memory_growing(0, 2 * PAGE, None).unwrap());
        assert_eq!(limiter.denial(), Some(Denial::OfAttempt));
        assert!(limiter.memory_growing(0, PAGE, None).unwrap());
        assert_eq!(limiter.denial(), None, "an old denial explains nothing");
        assert_eq!(limiter.used_bytes(), 4 * PAGE);
    }

    #[test]
    fn a_memory_keeps_to_its_own_maximum() {
        let mut limiter = AttemptLimiter::new(100 * PAGE, MemoryBudget::new(100 * PAGE));
        assert!(!limiter.memory_growing(0, 2 * PAGE, Some(PAGE)).unwrap());
        assert_eq!(limiter.used_bytes(), 0);
    }

    #[test]
    fn the_host_gets_its_memory_back_when_an_attempt_ends() {
        let budget = MemoryBudget::new(3 * PAGE);
        let mut first = AttemptLimiter::new(100 * PAGE, budget.clone());
        let mut second = AttemptLimiter::new(100 * PAGE, budget);
        assert!(first.memory_growing(0, 2 * PAGE, None).unwrap());
        assert!(!second.memory_growing(0, 2 * PAGE, None).unwrap());
        assert_eq!(second.denial(), Some(Denial::OfHost));
        drop(first);
        assert!(second.memory_growing(0, 2 * PAGE, None).unwrap());
    }

    #[test]
    fn what_is_paused_takes_nothing_from_the_others() {
        let budget = MemoryBudget::new(3 * PAGE);
        let mut first = AttemptLimiter::new(100 * PAGE, budget.clone());
        let mut second = AttemptLimiter::new(100 * PAGE, budget.clone());
        assert!(first.memory_growing(0, 2 * PAGE, None).unwrap());
        first.pause();
        assert!(second.memory_growing(0, 2 * PAGE, None).unwrap());
        assert!(!first.resume());
        drop(second);
        assert!(first.resume());
        first.pause();
        drop(first);
        assert!(budget.take(3 * PAGE) && !budget.take(1));
    }
}
