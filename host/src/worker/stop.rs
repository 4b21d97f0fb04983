//! The signal to stop.

use tokio_util::sync::CancellationToken;

/// The signal to stop, for everything that runs attempts. Dropping it has no effect.
#[derive(Clone, Default)]
pub struct Stop {
    pub(super) drain: CancellationToken,
    pub(super) now: CancellationToken,
}

impl Stop {
    /// Signals to stop claiming, and to finish the running attempts.
    pub fn drain(&self) {
        self.drain.cancel();
    }

    /// Signals an immediate stop: running attempts are also aborted (with `shutdown`), and their jobs given back.
    pub fn now(&self) {
        self.drain.cancel();
        self.now.cancel();
    }

    /// A signal that follows this one, and can also be given separately.
    pub fn child(&self) -> Self {
        Self {
            drain: self.drain.child_token(),
            now: self.now.child_token(),
        }
    }

    /// Waits for the signal to stop.
    pub async fn stopping(&self) {
        self.drain.cancelled().await;
    }

    /// Waits for the signal to abort running attempts.
    pub async fn aborting(&self) {
        self.now.cancelled().await;
    }

    /// True after the signal to stop.
    pub fn is_stopping(&self) -> bool {
        self.drain.is_cancelled()
    }
}
