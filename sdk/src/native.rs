//! Waiting on native targets, for tests: uses the machine's clock and parks threads.

use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Wake, Waker};
use std::thread::Thread;
use std::time::{Duration, Instant};

use crate::AbortReason;

/// An event to wait for.
pub(crate) enum Source {
    /// Ready at this time; `None` is beyond the range of the clock.
    Time(Option<Instant>),
    /// Ready when the abort has fired.
    Abort(Arc<Abort>),
}

impl Source {
    pub(crate) fn after(wait: Duration) -> Self {
        Self::Time(Instant::now().checked_add(wait))
    }

    pub(crate) fn is_ready(&self) -> bool {
        match self {
            Self::Time(at) => at.is_some_and(|at| at <= Instant::now()),
            Self::Abort(abort) => abort.fired().is_some(),
        }
    }
}

/// Waits until one of the sources may be ready, or a waker has been called.
pub(crate) fn park(sources: &[Rc<Source>]) {
    let mut wake_at: Option<Instant> = None;
    for source in sources {
        match &**source {
            Source::Time(None) => {}
            Source::Time(Some(at)) => {
                wake_at = Some(wake_at.map_or(*at, |earliest| earliest.min(*at)));
            }
            Source::Abort(abort) => abort.unpark_when_fired(std::thread::current()),
        }
    }
    match wake_at {
        Some(at) => std::thread::park_timeout(at.saturating_duration_since(Instant::now())),
        None => std::thread::park(),
    }
}

/// A waker for the executor of this thread, with its flag.
pub(crate) fn waker() -> (Waker, Arc<Woken>) {
    let woken = Arc::new(Woken {
        flag: AtomicBool::new(false),
        thread: std::thread::current(),
    });
    (Waker::from(Arc::clone(&woken)), woken)
}

/// True from a wake to the next [`take`](Self::take).
pub(crate) struct Woken {
    flag: AtomicBool,
    thread: Thread,
}

impl Woken {
    pub(crate) fn take(&self) -> bool {
        self.flag.swap(false, Ordering::AcqRel)
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.flag.store(true, Ordering::Release);
        self.thread.unpark();
    }
}

/// An abort that a test can fire, from any thread.
#[derive(Default)]
pub(crate) struct Abort(Mutex<AbortState>);

#[derive(Default)]
struct AbortState {
    fired: Option<Fired>,
    parked: Vec<Thread>,
}

/// Why the abort fired, and when the grace ends; `None` if that is beyond the range of the clock.
#[derive(Clone, Copy)]
pub(crate) struct Fired {
    pub(crate) reason: AbortReason,
    pub(crate) stop_at: Option<Instant>,
}

impl Abort {
    pub(crate) fn fired(&self) -> Option<Fired> {
        self.state(|state| state.fired)
    }

    /// Fires; a second call changes nothing.
    pub(crate) fn fire(&self, reason: AbortReason, grace: Duration) {
        let stop_at = Instant::now().checked_add(grace);
        let parked = self.state(|state| {
            state.fired.get_or_insert(Fired { reason, stop_at });
            std::mem::take(&mut state.parked)
        });
        for thread in parked {
            thread.unpark();
        }
    }

    fn unpark_when_fired(&self, thread: Thread) {
        self.state(|state| {
            if state.fired.is_some() {
                thread.unpark();
            } else if !state.parked.iter().any(|parked| parked.id() == thread.id()) {
                state.parked.push(thread);
            }
        });
    }

    fn state<T>(&self, f: impl FnOnce(&mut AbortState) -> T) -> T {
        // No code that holds this lock panics midway, so the state behind a poisoned lock is consistent.
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
