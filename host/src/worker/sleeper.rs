//! Requests notifications from producers while this worker is idle.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tracing::debug;

use super::Shared;
use super::reach::warn_unless_unreachable;

/// A worker that has found jobs at every look for this long, without a wait of this length in between, withdraws its
/// request for notifications.
pub(super) const BUSY_AFTER: Duration = Duration::from_millis(50);
/// The request for notifications is renewed after this long.
const RENEWED_EVERY: Duration = Duration::from_secs(20);

/// The state of the request for notifications. A worker that has requested them is asleep.
pub(super) struct Sleeper<'a> {
    shared: &'a Arc<Shared>,
    /// When the request was last written. `None` if there is none, so producers do not notify.
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

    /// True if notifications are requested.
    pub(super) fn is_asleep(&self) -> bool {
        self.asleep_since.is_some()
    }

    /// Requests notifications. True if they were not requested before.
    pub(super) async fn fall_asleep(&mut self) -> bool {
        let shared = self.shared;
        if !shared.listener.connected.load(Ordering::Relaxed) {
            self.asleep_since = None;
            return false;
        }
        // The server may have been down in the meantime, and it loses the requests if it crashes.
        if shared.listener.reconnected.swap(false, Ordering::Relaxed) {
            self.asleep_since = None;
        }
        let is_new = self.asleep_since.is_none();
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
        let valid_for = shared.settings.poll_max + 3 * RENEWED_EVERY;
        match shared.store.sleep(queues, valid_for).await {
            Ok(()) => {
                self.asleep_since = Some(Instant::now());
                is_new
            }
            Err(error) => {
                warn_unless_unreachable!(error, "cannot request notifications; polling");
                false
            }
        }
    }

    /// Notes that a look has found jobs. Once this worker is busy, it withdraws the request, which saves producers the
    /// NOTIFY.
    pub(super) async fn found(&mut self) {
        let since = *self.busy_since.get_or_insert_with(Instant::now);
        if self.is_asleep() && since.elapsed() >= BUSY_AFTER {
            match self.shared.store.awake().await {
                Ok(()) => self.asleep_since = None,
                Err(error) => debug!(%error, "could not withdraw the request for notifications"),
            }
        }
    }

    /// Notes that the worker is not busy: it found nothing, or waited.
    pub(super) fn idles(&mut self) {
        self.busy_since = None;
    }

    /// Called after an error, when it is unknown whether the request was written.
    pub(super) fn start_over(&mut self) {
        self.asleep_since = None;
        self.busy_since = None;
    }
}
