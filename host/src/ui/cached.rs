//! A value from the database that many requests need, but only one of them reads.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use tokio::sync::Mutex;

/// A value is fresh for at least this long.
const FRESH_MIN: Duration = Duration::from_secs(2);
/// A value is also fresh for this multiple of the time that reading it took, so that it costs the database less than
/// 0.7 % of a core.
const FRESH_TIMES: u32 = 150;
/// A value that is no longer fresh is shown for this multiple of the time that reading it takes: nobody should wait for
/// a slow read, or get an old value for a fast one.
const SHOWN_TIMES: u32 = 1000;
/// The maximum of this time.
const SHOWN_MAX: Duration = Duration::from_secs(60);

/// One value.
pub(super) struct Cached<T> {
    known: ArcSwapOption<Known<T>>,
    /// When the last read failed, and how long it took.
    failed: ArcSwapOption<(Instant, Duration)>,
    reading: Mutex<()>,
    /// The number of times that it was forgotten.
    generation: AtomicU64,
}

struct Known<T> {
    value: Arc<T>,
    at: Instant,
    took: Duration,
}

impl<T> Known<T> {
    fn is_fresh(&self) -> bool {
        self.at.elapsed() < pause(self.took)
    }

    fn is_shown(&self) -> bool {
        self.at.elapsed() < pause(self.took) * 2 + SHOWN_MAX.min(self.took * SHOWN_TIMES)
    }
}

/// The pause after a read that took this long.
pub(super) fn pause(took: Duration) -> Duration {
    FRESH_MIN.max(took * FRESH_TIMES)
}

impl<T> Default for Cached<T> {
    fn default() -> Self {
        Self {
            known: ArcSwapOption::empty(),
            failed: ArcSwapOption::empty(),
            reading: Mutex::new(()),
            generation: AtomicU64::new(0),
        }
    }
}

impl<T: Send + Sync + 'static> Cached<T> {
    /// Returns the value, at once if a recent one is known; if that value is no longer fresh, a new one is read in the
    /// background.
    pub(super) async fn get<F, R, E>(self: &Arc<Self>, read: F) -> Result<Arc<T>, E>
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future<Output = Result<T, E>> + Send,
        E: Send + 'static,
    {
        match self.known.load_full() {
            Some(known) if known.is_fresh() => return Ok(known.value.clone()),
            Some(known) if known.is_shown() => {
                self.refresh(read);
                return Ok(known.value.clone());
            }
            _ => {}
        }
        let _reading = self.reading.lock().await;
        match self.known.load_full() {
            // Another request has just read it.
            Some(known) if known.is_fresh() => Ok(known.value.clone()),
            _ => self.read(read).await,
        }
    }

    /// The value if a recent one is known, without waiting; if it is not fresh, a new one is read in the background.
    pub(super) fn known<F, R, E>(self: &Arc<Self>, read: F) -> Option<Arc<T>>
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future<Output = Result<T, E>> + Send,
        E: Send + 'static,
    {
        let known = self.known.load_full();
        if !known.as_ref().is_some_and(|known| known.is_fresh()) {
            self.refresh(read);
        }
        let known = known.filter(|known| known.is_shown());
        known.map(|known| known.value.clone())
    }

    /// Reads in the background, unless another read is in progress, or one has failed recently.
    fn refresh<F, R, E>(self: &Arc<Self>, read: F)
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future<Output = Result<T, E>> + Send,
        E: Send + 'static,
    {
        if let Some(failed) = self.failed.load_full()
            && failed.0.elapsed() < pause(failed.1)
        {
            return;
        }
        let this = self.clone();
        tokio::spawn(async move {
            // If it fails, the value grows old, and the next caller of `get` gets the error.
            if let Ok(_reading) = this.reading.try_lock() {
                let _ = this.read(read).await;
            }
        });
    }

    async fn read<F, R, E>(&self, read: F) -> Result<Arc<T>, E>
    where
        F: FnOnce() -> R,
        R: Future<Output = Result<T, E>>,
    {
        let (at, generation) = (Instant::now(), self.generation.load(Ordering::SeqCst));
        let value = match read().await {
            Ok(value) => Arc::new(value),
            Err(error) => {
                let failed = (Instant::now(), at.elapsed());
                self.failed.store(Some(Arc::new(failed)));
                return Err(error);
            }
        };
        self.failed.store(None);
        // A read that started before the value was forgotten may not have seen the change.
        if generation == self.generation.load(Ordering::SeqCst) {
            self.known.store(Some(Arc::new(Known {
                value: value.clone(),
                at: Instant::now(),
                took: at.elapsed(),
            })));
        }
        Ok(value)
    }

    /// Forgets the value, because somebody has just changed something.
    pub(super) fn forget(&self) {
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.known.store(None);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// Keeps the last read from growing old, however slow the test is: it seems to be one of the future.
    fn keep_recent(cached: &Cached<u32>) {
        let later = Instant::now() + Duration::from_secs(3600);
        let known = cached.known.load_full().map(|known| Known {
            value: known.value.clone(),
            at: later,
            took: known.took,
        });
        cached.known.store(known.map(Arc::new));
        let failed = cached.failed.load_full().map(|failed| (later, failed.1));
        cached.failed.store(failed.map(Arc::new));
    }

    #[tokio::test]
    async fn users_share_one_read_until_it_is_forgotten() {
        let cached = Arc::new(Cached::<u32>::default());
        let reads = Arc::new(AtomicU32::new(0));
        let get = || {
            let reads = reads.clone();
            cached.get(async move || Ok::<_, ()>(reads.fetch_add(1, Ordering::Relaxed) + 1))
        };
        let (a, b) = tokio::join!(get(), get());
        assert_eq!((*a.unwrap(), *b.unwrap()), (1, 1));
        cached.forget();
        assert_eq!(*get().await.unwrap(), 2);
    }

    #[tokio::test]
    async fn a_value_that_is_not_waited_for_is_read_once_even_if_that_fails() {
        let cached = Arc::new(Cached::<u32>::default());
        let reads = Arc::new(AtomicU32::new(0));
        let known = || {
            let reads = reads.clone();
            cached.known(async move || match reads.fetch_add(1, Ordering::Relaxed) {
                0 => Err(()),
                nth => Ok(nth),
            })
        };
        for _ in 0..3 {
            assert_eq!(known(), None);
            tokio::task::yield_now().await;
            keep_recent(&cached);
        }
        assert_eq!(reads.load(Ordering::Relaxed), 1);
        assert_eq!(cached.get(async || Ok::<_, ()>(7)).await.as_deref(), Ok(&7));
        keep_recent(&cached);
        assert_eq!(known().as_deref(), Some(&7));
    }

    #[test]
    fn a_slow_read_is_repeated_less_often() {
        assert_eq!(pause(Duration::from_millis(1)), FRESH_MIN);
        assert_eq!(pause(Duration::from_millis(200)), Duration::from_secs(30));
    }
}
