//! Whether producers are to notify this worker.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::debug;

use super::Shared;
use super::reach::warn_unless_unreachable;

/// A worker that has found jobs at every look for this long, and has not waited so long in between,
/// asks not to be notified any more.
pub(super) const BUSY_AFTER: Duration = Duration::from_millis(50);
/// The wish to be notified is written again after this long.
const RENEWED_EVERY: Duration = Duration::from_secs(20);

/// What this worker has told the producers.
pub(super) struct Sleeper<'a> {
    shared: &'a Arc<Shared>,
    /// When the wish to be notified was last written; none: the producers think it is busy.
    asleep_since: Option<Instant>,
    busy_since: Option<Instant>,
}

impl<'a> Sleeper<'a> {
    pub(super) fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            asleep_since: None,
            busy_since: None,
        }
    }

    /// True where producers have been asked to notify.
    pub(super) fn is_asleep(&self) -> bool {
        self.asleep_since.is_some()
    }

    /// Asks producers for notifications; true when they did not know before.
    pub(super) async fn fall_asleep(&mut self) -> bool {
        let shared = self.shared;
        if !shared.listener.connected.load(Ordering::Relaxed) {
            self.asleep_since = None;
            return false;
        }
        // The server may have been down in between, and forgets sleepers when it crashes.
        if shared.listener.reconnected.swap(false, Ordering::Relaxed) {
            self.asleep_since = None;
        }
        let news = self.asleep_since.is_none();
        if self
            .asleep_since
            .is_some_and(|since| since.elapsed() < RENEWED_EVERY)
        {
            return false;
        }
        let any = ["*".to_string()];
        let queues = if shared.settings.queues.is_empty() {
            &any[..]
        } else {
            &shared.settings.queues
        };
        let how_long = shared.settings.poll_max + 3 * RENEWED_EVERY;
        match shared.store.sleep(queues, how_long).await {
            Ok(()) => {
                self.asleep_since = Some(Instant::now());
                news
            }
            Err(error) => {
                warn_unless_unreachable!(error, "cannot ask for notifications; polling");
                false
            }
        }
    }

    /// A look has found something. Once it is clear that this worker does not sleep, producers are
    /// told to save the NOTIFY.
    pub(super) async fn found(&mut self) {
        let since = *self.busy_since.get_or_insert_with(Instant::now);
        if self.is_asleep() && since.elapsed() >= BUSY_AFTER {
            match self.shared.store.awake().await {
                Ok(()) => self.asleep_since = None,
                Err(error) => debug!(%error, "could not say that this worker is busy"),
            }
        }
    }

    /// There was nothing to do for a while.
    pub(super) fn idles(&mut self) {
        self.busy_since = None;
    }

    /// After an error it is not known what the producers know.
    pub(super) fn start_over(&mut self) {
        self.asleep_since = None;
        self.busy_since = None;
    }
}
