//! Idle instances, which wait for their next job.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The maximum time for which an instance may stay idle.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// The maximum memory of all idle instances. It comes in addition to the attempts' budget, so that it never takes
/// memory from a fresh instance.
const BYTES_MAX: usize = 64 << 20;

/// The idle items, newest last. Items in excess are dropped, oldest first.
pub(in crate::sandbox) struct Idle<K, T> {
    count_max: usize,
    inner: Mutex<Inner<K, T>>,
}

struct Inner<K, T> {
    waiting: VecDeque<Waiting<K, T>>,
    bytes: usize,
    /// A sweep task is running.
    is_swept: bool,
}

struct Waiting<K, T> {
    key: K,
    item: T,
    bytes: usize,
    since: Instant,
}

impl<K, T> Idle<K, T> {
    /// Creates a store for this many items; with 0, the store does not keep any.
    pub(in crate::sandbox) fn new(count_max: usize) -> Arc<Self> {
        Arc::new(Self {
            count_max,
            inner: Mutex::new(Inner {
                waiting: VecDeque::new(),
                bytes: 0,
                is_swept: false,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner<K, T>> {
        // Only the allocator can panic while the lock is held.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the newest item with a matching key: its memory is the most likely to be in the CPU caches.
    pub(in crate::sandbox) fn take(&self, matches: impl Fn(&K) -> bool) -> Option<(K, T)> {
        let mut inner = self.lock();
        let at = inner
            .waiting
            .iter()
            .rposition(|waiting| matches(&waiting.key))?;
        let taken = inner.waiting.remove(at)?;
        inner.bytes -= taken.bytes;
        Some((taken.key, taken.item))
    }

    /// Adds an item. If it returns true, the caller must start [`sweep`](Self::sweep).
    #[must_use]
    pub(in crate::sandbox) fn put(&self, key: K, item: T, bytes: usize, now: Instant) -> bool {
        if self.count_max == 0 || bytes > BYTES_MAX {
            return false;
        }
        let mut inner = self.lock();
        let mut last_excess = None;
        while inner.waiting.len() >= self.count_max || inner.bytes + bytes > BYTES_MAX {
            // The previous excess item is dropped here, under the lock: only the last one may keep its pool slot for
            // longer, see below.
            last_excess = inner.pop_oldest();
        }
        inner.bytes += bytes;
        inner.waiting.push_back(Waiting {
            key,
            item,
            bytes,
            since: now,
        });
        let sweep = !std::mem::replace(&mut inner.is_swept, true);
        // Dropped outside the lock, because that takes time. Until then, the item has the pool slot of the caller's
        // attempt, which no longer needs it.
        drop(inner);
        drop(last_excess);
        sweep
    }

    /// Drops items that have been idle for too long, until no items are left.
    pub(in crate::sandbox) async fn sweep(self: Arc<Self>) {
        while let Some(wait) = self.sweep_once(Instant::now()) {
            tokio::time::sleep(wait).await;
        }
    }

    /// Drops expired items. Returns the time until the next one expires; `None` if no items are left.
    fn sweep_once(&self, now: Instant) -> Option<Duration> {
        let mut inner = self.lock();
        while let Some(oldest) = inner.waiting.front() {
            let left = (oldest.since + IDLE_MAX).saturating_duration_since(now);
            if !left.is_zero() {
                return Some(left);
            }
            // Dropped under the lock, so that its pool slot is free before another item is added.
            drop(inner.pop_oldest());
        }
        inner.is_swept = false;
        None
    }
}

impl<K, T> Inner<K, T> {
    fn pop_oldest(&mut self) -> Option<T> {
        let oldest = self.waiting.pop_front()?;
        self.bytes -= oldest.bytes;
        Some(oldest.item)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn items(idle: &Idle<char, u32>) -> Vec<u32> {
        idle.lock().waiting.iter().map(|one| one.item).collect()
    }

    #[test]
    fn take_the_newest_item_with_the_key() {
        let (idle, now) = (Idle::new(9), Instant::now());
        assert!(idle.put('a', 1, 1, now), "the first item needs a sweep");
        for (key, item) in [('b', 2), ('a', 3)] {
            assert!(!idle.put(key, item, 1, now));
        }
        assert_eq!(idle.take(|key| *key == 'c'), None);
        assert_eq!(idle.take(|key| *key == 'a'), Some(('a', 3)));
        assert_eq!(idle.take(|key| *key == 'a'), Some(('a', 1)));
        assert_eq!(idle.take(|key| *key == 'a'), None);
        assert_eq!(items(&idle), [2]);
    }

    #[test]
    fn drop_the_oldest_items_in_excess() {
        let (idle, now) = (Idle::new(3), Instant::now());
        for item in 1..=5 {
            let _first = idle.put('a', item, 1, now);
        }
        assert_eq!(items(&idle), [3, 4, 5]);
        assert!(!idle.put('a', 6, BYTES_MAX - 1, now));
        assert_eq!(items(&idle), [5, 6]);
        assert!(!idle.put('a', 7, BYTES_MAX + 1, now));
        assert_eq!(
            items(&idle),
            [5, 6],
            "an item that is too large is not kept"
        );
    }

    /// Counts items that are dropped while the lock is free.
    struct Watched {
        idle: Arc<Idle<char, Watched>>,
        unlocked: Arc<AtomicUsize>,
    }

    impl Drop for Watched {
        fn drop(&mut self) {
            if self.idle.inner.try_lock().is_ok() {
                self.unlocked.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    #[test]
    fn drop_all_but_the_last_excess_item_under_the_lock() {
        let (idle, now) = (Idle::new(9), Instant::now());
        let unlocked = Arc::new(AtomicUsize::new(0));
        let one = || Watched {
            idle: idle.clone(),
            unlocked: unlocked.clone(),
        };
        for _ in 0..5 {
            let _first = idle.put('a', one(), BYTES_MAX / 5, now);
        }
        assert!(!idle.put('a', one(), BYTES_MAX, now));
        assert_eq!(idle.lock().waiting.len(), 1);
        assert_eq!(unlocked.load(Ordering::Relaxed), 1);
        // The waiting item keeps the store alive.
        drop(idle.take(|_| true));
    }

    #[test]
    fn drop_items_that_are_idle_for_too_long() {
        let (idle, start) = (Idle::new(9), Instant::now());
        let second = Duration::from_secs(1);
        let _first = idle.put('a', 1, 1, start);
        let _first = idle.put('a', 2, 1, start + second);
        assert_eq!(idle.sweep_once(start + second), Some(IDLE_MAX - second));
        assert_eq!(idle.sweep_once(start + IDLE_MAX), Some(second));
        assert_eq!(items(&idle), [2]);
        assert_eq!(idle.sweep_once(start + IDLE_MAX + second), None);
        assert_eq!(idle.lock().bytes, 0);
        assert!(idle.put('a', 3, 1, start), "the sweep has ended");
    }

    #[test]
    fn keep_nothing_if_the_maximum_is_0() {
        let idle = Idle::new(0);
        assert!(!idle.put('a', 1, 1, Instant::now()));
        assert_eq!(idle.take(|_| true), None);
    }
}
