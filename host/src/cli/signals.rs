//! SIGTERM and SIGINT, for long-running commands.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

use crate::worker::Stop;

/// SIGTERM and SIGINT since [`Signals::install`].
pub(super) struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    /// Installs the handlers. After that, a signal no longer ends the process automatically. A long-running command
    /// calls this before it starts anything, so that it can shut down everything that it has started.
    ///
    /// # Errors
    /// If the system refuses a handler.
    pub(super) fn install() -> anyhow::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next signal.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }

    /// Runs `work` to its end. If a signal comes first, drops it and returns `None`.
    pub(super) async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.next() => None,
            done = work => Some(done),
        }
    }

    /// Drains on the first signal, and stops running attempts on the second.
    pub(super) async fn stop(mut self, stop: Stop) {
        self.next().await;
        info!(
            "stopping: no new attempts start, running ones are finished (a second signal stops them too)"
        );
        stop.drain();
        self.next().await;
        stop.now();
    }
}

/// Logs that a command ended before it started its work.
pub(super) fn stopped_early() {
    info!("stopped before anything was started");
}
