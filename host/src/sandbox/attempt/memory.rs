//! Limits the memory and the tables of one attempt, and the memory of all attempts of the host together.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use wasmtime::ResourceLimiter;

use super::meter::Meter;
use crate::sandbox::Limits;

/// A WebAssembly page.
pub(in crate::sandbox) const PAGE_BYTES: usize = 64 << 10;

/// The memory budget of all attempts of a host.
#[derive(Debug)]
pub(in crate::sandbox) struct MemoryBudget {
    free_bytes: AtomicUsize,
}

impl MemoryBudget {
    pub(in crate::sandbox) fn new(bytes: usize) -> Arc<Self> {
        Arc::new(Self {
            free_bytes: AtomicUsize::new(bytes),
        })
    }

    /// Free memory, in bytes.
    pub(in crate::sandbox) fn free_bytes(&self) -> usize {
        self.free_bytes.load(Ordering::Relaxed)
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

/// Why the last request for memory was denied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::sandbox) enum Denial {
    /// The attempt reached its own limit.
    Attempt,
    /// All attempts of this host together reached their limit.
    Host,
}

/// Memory that the host holds for one attempt: header fields, request lines, bodies and buffers. It counts towards the
/// host's budget, and has the same limit as the attempt's own memory.
#[derive(Debug)]
pub(in crate::sandbox) struct HostMemory {
    limit_bytes: usize,
    used_bytes: AtomicUsize,
    budget: Arc<MemoryBudget>,
}

impl HostMemory {
    pub(in crate::sandbox) fn new(limit_bytes: usize, budget: Arc<MemoryBudget>) -> Arc<Self> {
        Arc::new(Self {
            limit_bytes,
            used_bytes: AtomicUsize::new(0),
            budget,
        })
    }

    fn take(&self, bytes: usize) -> Result<(), Denial> {
        let add = |used: usize| {
            let all = used.checked_add(bytes);
            all.filter(|all| *all <= self.limit_bytes)
        };
        self.used_bytes
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add)
            .map_err(|_| Denial::Attempt)?;
        if self.budget.take(bytes) {
            return Ok(());
        }
        self.used_bytes.fetch_sub(bytes, Ordering::Relaxed);
        Err(Denial::Host)
    }

    /// Counts bytes until the returned charge is dropped.
    pub(in crate::sandbox) fn charge(self: &Arc<Self>, bytes: usize) -> Result<Charge, Denial> {
        self.take(bytes)?;
        Ok(Charge {
            host_memory: self.clone(),
            bytes,
        })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        self.budget.give(*self.used_bytes.get_mut());
    }
}

/// Counted bytes.
#[derive(Debug)]
#[must_use]
pub(in crate::sandbox) struct Charge {
    host_memory: Arc<HostMemory>,
    bytes: usize,
}

impl Charge {
    /// Counts them until the attempt ends.
    pub(in crate::sandbox) fn keep(mut self) {
        self.bytes = 0;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.host_memory
            .used_bytes
            .fetch_sub(self.bytes, Ordering::Relaxed);
        self.host_memory.budget.give(self.bytes);
    }
}

/// Counts all linear memories of one attempt together; wasmtime's own limiter considers each memory alone.
#[derive(Debug)]
pub(in crate::sandbox) struct AttemptLimiter {
    limit_bytes: usize,
    table_elements: usize,
    used_bytes: usize,
    budget: Arc<MemoryBudget>,
    host_memory: Arc<HostMemory>,
    /// The bytes have been returned to the budget, because nothing is running.
    paused: bool,
    denial: Option<Denial>,
    meter: Arc<Meter>,
}

impl AttemptLimiter {
    pub(in crate::sandbox) fn new(limits: &Limits, budget: Arc<MemoryBudget>) -> Self {
        Self {
            meter: Arc::default(),
            limit_bytes: limits.memory_bytes,
            table_elements: limits.table_elements,
            used_bytes: 0,
            host_memory: HostMemory::new(limits.memory_bytes, budget.clone()),
            budget,
            paused: false,
            denial: None,
        }
    }

    pub(in crate::sandbox) fn limit_bytes(&self) -> usize {
        self.limit_bytes
    }

    /// Linear memory never shrinks, so this is also the peak.
    pub(in crate::sandbox) fn used_bytes(&self) -> usize {
        self.used_bytes
    }

    /// The host's memory for this attempt.
    pub(in crate::sandbox) fn host_memory(&self) -> &Arc<HostMemory> {
        &self.host_memory
    }

    /// Counts bytes that the host holds, until the returned charge is dropped.
    pub(in crate::sandbox) fn charge_host(&mut self, bytes: usize) -> wasmtime::Result<Charge> {
        let charge = self.host_memory.charge(bytes);
        self.denial = charge.as_ref().err().copied();
        charge.map_err(|_| wasmtime::Error::msg("the host holds too much memory for this attempt"))
    }

    /// Reports to this meter from now on.
    pub(in crate::sandbox) fn report_to(&mut self, meter: Arc<Meter>) {
        meter.set_memory(self.used_bytes);
        self.meter = meter;
    }

    /// Returns the memory to the budget of running attempts; the pages stay allocated.
    pub(in crate::sandbox) fn pause(&mut self) {
        self.budget.give(self.used_bytes);
        // The host no longer holds anything for the last job; the next job starts from zero.
        self.host_memory = HostMemory::new(self.limit_bytes, self.budget.clone());
        self.paused = true;
    }

    /// Takes the memory again. Returns false if others need it; then the instance can no longer be used.
    #[must_use]
    pub(in crate::sandbox) fn resume(&mut self) -> bool {
        self.paused = !self.budget.take(self.used_bytes);
        !self.paused
    }

    /// Why the last request was denied; `None` if it was granted. An earlier denial that the guest
    /// survived does not count.
    pub(in crate::sandbox) fn denial(&self) -> Option<Denial> {
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
            Some(Denial::Attempt)
        } else if !self.budget.take(more) {
            Some(Denial::Host)
        } else {
            self.used_bytes += more;
            self.meter.set_memory(self.used_bytes);
            None
        };
        Ok(self.denial.is_none())
    }

    // The count is not rolled back: the system almost never refuses a growth that was counted, and the whole count is
    // returned when the store is dropped.
    fn memory_grow_failed(&mut self, _error: wasmtime::Error) -> wasmtime::Result<()> {
        self.denial = Some(Denial::Attempt);
        Ok(())
    }

    fn table_growing(
        &mut self,
        _current: usize,
        desired: usize,
        _maximum: Option<usize>,
    ) -> wasmtime::Result<bool> {
        Ok(desired <= self.table_elements)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: usize = 64 << 10;

    fn limiter(bytes: usize, budget: &Arc<MemoryBudget>) -> AttemptLimiter {
        let limits = Limits {
            memory_bytes: bytes,
            table_elements: 10,
            ..Limits::default()
        };
        AttemptLimiter::new(&limits, budget.clone())
    }

    #[test]
    fn all_memories_of_an_attempt_count_together() {
        let mut limiter = limiter(4 * PAGE, &MemoryBudget::new(100 * PAGE));
        assert!(limiter.memory_growing(0, 3 * PAGE, None).unwrap());
        assert!(!limiter.memory_growing(0, 2 * PAGE, None).unwrap());
        assert_eq!(limiter.denial(), Some(Denial::Attempt));
        assert!(limiter.memory_growing(0, PAGE, None).unwrap());
        assert_eq!(limiter.denial(), None, "an earlier denial does not count");
        assert_eq!(limiter.used_bytes(), 4 * PAGE);
    }

    #[test]
    fn a_memory_has_its_own_maximum() {
        let mut limiter = limiter(100 * PAGE, &MemoryBudget::new(100 * PAGE));
        assert!(!limiter.memory_growing(0, 2 * PAGE, Some(PAGE)).unwrap());
        assert_eq!(limiter.used_bytes(), 0);
    }

    #[test]
    fn an_attempt_that_ends_returns_its_memory_to_the_host() {
        let budget = MemoryBudget::new(3 * PAGE);
        let mut first = limiter(100 * PAGE, &budget);
        let mut second = limiter(100 * PAGE, &budget);
        assert!(first.memory_growing(0, 2 * PAGE, None).unwrap());
        assert!(!second.memory_growing(0, 2 * PAGE, None).unwrap());
        assert_eq!(second.denial(), Some(Denial::Host));
        drop(first);
        assert!(second.memory_growing(0, 2 * PAGE, None).unwrap());
    }

    #[test]
    fn a_paused_instance_leaves_its_memory_to_others() {
        let budget = MemoryBudget::new(3 * PAGE);
        let mut first = limiter(100 * PAGE, &budget);
        let mut second = limiter(100 * PAGE, &budget);
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

    #[test]
    fn host_memory_of_an_attempt_counts_towards_its_limit_and_the_budget() {
        let budget = MemoryBudget::new(3 * PAGE);
        let mut first = limiter(2 * PAGE, &budget);
        let mut second = limiter(2 * PAGE, &budget);
        first.charge_host(PAGE).unwrap().keep();
        let charge = first.host_memory().charge(PAGE).unwrap();
        assert_eq!(
            first.host_memory().charge(1).map(drop),
            Err(Denial::Attempt)
        );
        assert!(first.charge_host(1).is_err());
        assert_eq!(first.denial(), Some(Denial::Attempt));
        // The guest's own memory counts separately.
        assert!(first.memory_growing(0, PAGE, None).unwrap());
        assert!(second.charge_host(1).is_err());
        assert_eq!(second.denial(), Some(Denial::Host));

        drop(charge);
        drop(second.charge_host(PAGE).unwrap());
        assert_eq!(budget.free_bytes(), PAGE, "failed charges are not counted");
        second.charge_host(PAGE).unwrap().keep();
        first.pause();
        assert_eq!(budget.free_bytes(), 2 * PAGE);
        drop((first, second));
        assert_eq!(budget.free_bytes(), 3 * PAGE);
    }

    #[test]
    fn a_charge_counts_until_it_is_dropped_even_after_its_attempt() {
        let budget = MemoryBudget::new(PAGE);
        let attempt = limiter(PAGE, &budget);
        let charge = attempt.host_memory().charge(PAGE).unwrap();
        drop(attempt);
        assert_eq!(budget.free_bytes(), 0);
        drop(charge);
        assert_eq!(budget.free_bytes(), PAGE);
    }

    #[test]
    fn limit_the_size_of_tables() {
        let mut limiter = limiter(PAGE, &MemoryBudget::new(PAGE));
        assert!(limiter.table_growing(0, 10, None).unwrap());
        assert!(!limiter.table_growing(10, 11, None).unwrap());
    }
}
