//! Attempts that end when a test lets them, and not after some time.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rouse::worker::{AttemptInfo, Middleware, Next, Running};
use tokio::sync::watch;

/// Middleware. Some attempts do not end before the test releases them; until then, their jobs are running, and their
/// leases are renewed.
pub(crate) struct HeldEnds {
    /// `None`: those of every handler.
    handler: Option<&'static str>,
    /// The number of these attempts that still end on their own.
    free: AtomicUsize,
    is_released: watch::Sender<bool>,
}

impl HeldEnds {
    /// Holds the attempts of this handler.
    pub(crate) fn of(handler: &'static str) -> Arc<Self> {
        Arc::new(Self {
            handler: Some(handler),
            free: AtomicUsize::new(0),
            is_released: watch::Sender::new(false),
        })
    }

    /// Holds all attempts after this many.
    pub(crate) fn after(attempts: usize) -> Arc<Self> {
        Arc::new(Self {
            handler: None,
            free: AtomicUsize::new(attempts),
            is_released: watch::Sender::new(false),
        })
    }

    /// The middleware of a worker that has no other.
    pub(crate) fn alone(self: &Arc<Self>) -> Vec<Arc<dyn Middleware>> {
        vec![self.clone()]
    }

    /// Lets these attempts end, now and from now on.
    pub(crate) fn release(&self) {
        self.is_released.send_replace(true);
    }

    fn holds(&self, attempt: &AttemptInfo<'_>) -> bool {
        let one_less = |free: usize| free.checked_sub(1);
        self.handler
            .is_none_or(|handler| handler == attempt.handler)
            && self
                .free
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_less)
                .is_err()
    }
}

impl Middleware for HeldEnds {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            let run = next.run().await;
            if self.holds(attempt) {
                let mut released = self.is_released.subscribe();
                // The sender is in this struct.
                let _ = released.wait_for(|released| *released).await;
            }
            run
        })
    }
}
