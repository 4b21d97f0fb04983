//! Instances that have served a job, and wait for the next one of the same kind.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Nobody waits for longer than this for a job that may never come.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// Memory of all that wait. It is not in the budget of the attempts, so that it never keeps a fresh
/// one from its memory: it comes on top.
const BYTES_MAX: usize = 64 << 20;

/// What waits, newest last. What is too much goes, oldest first.
pub(in crate::sandbox) struct Idle<K, T> {
    count_max: usize,
    inner: Mutex<Inner<K, T>>,
}

struct Inner<K, T> {
    waiting: VecDeque<Waiting<K, T>>,
    bytes: usize,
    /// A task looks for those that have waited too long.
    swept: bool,
}

struct Waiting<K, T> {
    key: K,
    item: T,
    bytes: usize,
    since: Instant,
}

impl<K, T> Idle<K, T> {
    /// Room for this many; none for 0.
    pub(in crate::sandbox) fn new(count_max: usize) -> Arc<Self> {
        Arc::new(Self {
            count_max,
            inner: Mutex::new(Inner {
                waiting: VecDeque::new(),
                bytes: 0,
                swept: false,
            }),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Inner<K, T>> {
        // Nothing panics while it holds the lock but the allocator.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The newest with such a key: what it last touched is the likeliest to be in the caches.
    pub(in crate::sandbox) fn take(&self, is_it: impl Fn(&K) -> bool) -> Option<(K, T)> {
        let mut inner = self.lock();
        let at = inner.waiting.iter().rposition(|one| is_it(&one.key))?;
        let one = inner.waiting.remove(at)?;
        inner.bytes -= one.bytes;
        Some((one.key, one.item))
    }

    /// Lets one wait. True: [`sweep`](Self::sweep) has to be started.
    #[must_use]
    pub(in crate::sandbox) fn put(&self, key: K, item: T, bytes: usize, now: Instant) -> bool {
        if self.count_max == 0 || bytes > BYTES_MAX {
            return false;
        }
        let mut inner = self.lock();
        let mut too_much = None;
        while inner.waiting.len() >= self.count_max || inner.bytes + bytes > BYTES_MAX {
            // Drops the one before under the lock: only for the last one is there a place, see below.
            too_much = inner.pop_oldest();
        }
        inner.bytes += bytes;
        inner.waiting.push_back(Waiting {
            key,
            item,
            bytes,
            since: now,
        });
        let sweep = !std::mem::replace(&mut inner.swept, true);
        // Dropping it takes its time, so others need not wait for it: whoever puts has a place of his own
        // in the pool until then.
        drop(inner);
        drop(too_much);
        sweep
    }

    /// Drops what has waited too long, until nothing waits.
    pub(in crate::sandbox) async fn sweep(self: Arc<Self>) {
        while let Some(wait) = self.sweep_once(Instant::now()) {
            tokio::time::sleep(wait).await;
        }
    }

    /// How long until the next one has waited too long; none when nothing waits.
    fn sweep_once(&self, now: Instant) -> Option<Duration> {
        let mut inner = self.lock();
        while let Some(oldest) = inner.waiting.front() {
            let left = (oldest.since + IDLE_MAX).saturating_duration_since(now);
            if !left.is_zero() {
                return Some(left);
            }
            // Under the lock: its place in the pool is free before another one waits.
            drop(inner.pop_oldest());
        }
        inner.swept = false;
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
    fn only_what_has_the_key_is_taken_and_the_newest_of_it_first() {
        let (idle, now) = (Idle::new(9), Instant::now());
        assert!(idle.put('a', 1, 1, now), "the first asks for a sweep");
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
    fn the_oldest_make_room() {
        let (idle, now) = (Idle::new(3), Instant::now());
        for item in 1..=5 {
            let _first = idle.put('a', item, 1, now);
        }
        assert_eq!(items(&idle), [3, 4, 5]);
        assert!(!idle.put('a', 6, BYTES_MAX - 1, now));
        assert_eq!(items(&idle), [5, 6]);
        assert!(!idle.put('a', 7, BYTES_MAX + 1, now));
        assert_eq!(items(&idle), [5, 6], "what is too large is not kept");
    }

    /// Counts how many go while others may put theirs.
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
    fn of_many_that_make_room_for_one_all_but_the_last_go_before_anybody_else_may_put() {
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
        // Whoever waits holds on to the line in which it waits.
        drop(idle.take(|_| true));
    }

    #[test]
    fn what_waits_too_long_goes() {
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
    fn without_room_nothing_waits() {
        let idle = Idle::new(0);
        assert!(!idle.put('a', 1, 1, Instant::now()));
        assert_eq!(idle.take(|_| true), None);
    }
}
