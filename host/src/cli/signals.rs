//! SIGTERM and SIGINT, for the commands that stay.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

use crate::worker::Stop;

/// SIGTERM and SIGINT, from the moment on at which it was made.
pub(super) struct Signals {
    term: Signal,
    int: Signal,
}

impl Signals {
    /// From here on a signal does not end the process by itself any more. A command that stays calls this before it starts
    /// anything, so that whatever it has started by the time of a signal is stopped in order.
    ///
    /// # Errors
    /// When the system refuses a handler.
    pub(super) fn install() -> anyhow::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    /// Waits for the next one.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }

    /// Runs this to its end, unless a signal comes first: then it is dropped, and there is no result.
    pub(super) async fn unless<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.next() => None,
            done = work => Some(done),
        }
    }

    /// The first one drains, the second one stops what runs.
    pub(super) async fn stop(mut self, stop: Stop) {
        self.next().await;
        info!(
            "stopping: nothing more is started, what runs is finished (a second signal stops that too)"
        );
        stop.drain();
        self.next().await;
        stop.now();
    }
}

/// Logs that a command ended before it had started its work.
pub(super) fn stopped_early() {
    info!("stopped before it had started anything");
}
