//! Records what each connection is doing, and closes one to make room for another.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// A connection that has not read from its response, or not sent the whole body of its request, for this long may be
/// closed.
const STUCK_MIN: Duration = Duration::from_secs(1);

/// The connections that are open.
#[derive(Clone, Default)]
pub(super) struct Open {
    known: Arc<Mutex<HashMap<u64, Activity>>>,
    numbers: Arc<AtomicU64>,
}

/// The state of one connection.
struct Activity {
    /// From the head of a request until the server has handed on the whole response.
    has_request: bool,
    /// The client has not yet read the whole response.
    is_behind: bool,
    /// The time since which its next request has been awaited, or since which it has not read from its response.
    silent_since: Option<Instant>,
    /// The time since which the body of its request has been awaited. Parts that arrive do not count: a client could
    /// send a byte per second.
    body_awaited_since: Option<Instant>,
    close: CancellationToken,
}

impl Open {
    /// Closes the connection without a request that has been silent for longest, or, if there is none, the one that has
    /// not read its response, or not sent its whole body, for longest.
    pub(super) fn close_one(&self) {
        let mut known = self.lock();
        let now = Instant::now();
        let longest = known
            .iter()
            .filter_map(|(number, activity)| {
                let is_busy = activity.has_request || activity.is_behind;
                let since = activity.body_awaited_since.or(activity.silent_since)?;
                Some((is_busy, since, *number))
            })
            .filter(|(is_busy, since, _)| !is_busy || now.duration_since(*since) >= STUCK_MIN)
            .min();
        if let Some((.., number)) = longest
            && let Some(activity) = known.remove(&number)
        {
            activity.close.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Activity>> {
        // Only the allocator can panic while the lock is held.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open connection. It counts as silent from the moment at which it was opened.
pub(super) struct Connected {
    number: u64,
    open: Open,
    close: CancellationToken,
}

impl Connected {
    pub(super) fn new(open: &Open) -> Self {
        let connected = Self {
            number: open.numbers.fetch_add(1, Ordering::Relaxed),
            open: open.clone(),
            close: CancellationToken::new(),
        };
        let activity = Activity {
            has_request: false,
            is_behind: false,
            silent_since: Some(Instant::now()),
            body_awaited_since: None,
            close: connected.close.clone(),
        };
        open.lock().insert(connected.number, activity);
        connected
    }

    /// Completes when the connection must close.
    pub(super) async fn must_close(&self) {
        self.close.cancelled().await;
    }

    /// Records a request. False if the connection must close instead of responding.
    pub(super) fn start_request(&self) -> bool {
        self.update(|activity| {
            activity.has_request = true;
            activity.is_behind = false;
            activity.silent_since = None;
        })
    }

    /// Records that the rest of the body is awaited.
    pub(super) fn await_body(&self) {
        self.update(|activity| {
            activity.body_awaited_since.get_or_insert_with(Instant::now);
        });
    }

    /// Records that the body has arrived, or is not needed.
    pub(super) fn finish_body(&self) {
        self.update(|activity| activity.body_awaited_since = None);
    }

    /// Records that the whole response was handed on.
    pub(super) fn finish_response(&self) {
        self.update(|activity| {
            activity.has_request = false;
            activity.silent_since.get_or_insert_with(Instant::now);
        });
    }

    /// Records whether more data could be sent to the client; if not, nothing more can be written until it reads.
    pub(super) fn record_write(&self, is_accepted: bool) {
        self.update(|activity| {
            if is_accepted || !activity.is_behind {
                let is_silent = !is_accepted || !activity.has_request;
                activity.silent_since = is_silent.then(Instant::now);
            }
            activity.is_behind = !is_accepted;
        });
    }

    /// Updates the state; false if the connection was closed.
    fn update(&self, change: impl FnOnce(&mut Activity)) -> bool {
        self.open.lock().get_mut(&self.number).map(change).is_some()
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        self.open.lock().remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gone(all: &[&Connected]) -> Vec<bool> {
        all.iter()
            .map(|connected| connected.close.is_cancelled())
            .collect()
    }

    /// A time since which a connection may be silent without being stuck, however slow the test is.
    fn just_now() -> Option<Instant> {
        Some(Instant::now() + 3600 * STUCK_MIN)
    }

    fn long_ago() -> Option<Instant> {
        Instant::now().checked_sub(2 * STUCK_MIN)
    }

    #[test]
    fn the_connection_that_was_silent_for_longest_is_closed_first() {
        let open = Open::default();
        let all = [(); 3].map(|()| Connected::new(&open));
        let [first, second, third] = &all;
        assert!(first.start_request());
        open.close_one();
        assert_eq!(gone(&[first, second, third]), [false, true, false]);
        assert!(!second.start_request(), "it is too late");
        first.finish_response();
        open.close_one();
        assert_eq!(gone(&[first, second, third]), [false, true, true]);
        open.close_one();
        assert_eq!(gone(&[first, second, third]), [true, true, true]);
        open.close_one();
    }

    #[test]
    fn a_connection_stays_open_while_it_reads_its_response() {
        let open = Open::default();
        let all = [(); 2].map(|()| Connected::new(&open));
        let [reads, stuck] = &all;
        assert!(reads.start_request() && stuck.start_request());
        let silent_since = |connected: &Connected, since: Option<Instant>| {
            let mut known = open.lock();
            let activity = known.get_mut(&connected.number).unwrap();
            assert!(activity.silent_since.is_some() && since.is_some());
            activity.silent_since = since;
        };
        stuck.record_write(false);
        silent_since(stuck, just_now());
        open.close_one();
        assert_eq!(gone(&[reads, stuck]), [false, false], "it may still read");
        silent_since(stuck, long_ago());
        // The response is handed on, but not read yet.
        reads.record_write(false);
        reads.finish_response();
        silent_since(reads, just_now());
        open.close_one();
        open.close_one();
        assert_eq!(gone(&[reads, stuck]), [false, true]);
        reads.record_write(true);
        open.close_one();
        assert_eq!(gone(&[reads, stuck]), [true, true]);
        drop(all);
        assert!(open.lock().is_empty());
    }

    #[test]
    fn a_connection_that_does_not_send_its_whole_body_may_be_closed() {
        let open = Open::default();
        let all = [(); 2].map(|()| Connected::new(&open));
        let [sends, stuck] = &all;
        assert!(sends.start_request() && stuck.start_request());
        sends.await_body();
        stuck.await_body();
        let both_await_since = |since: Option<Instant>| {
            for activity in open.lock().values_mut() {
                assert!(activity.body_awaited_since.is_some() && since.is_some());
                activity.body_awaited_since = since;
            }
        };
        both_await_since(just_now());
        open.close_one();
        assert_eq!(gone(&[sends, stuck]), [false, false], "it may still send");
        both_await_since(long_ago());
        sends.finish_body();
        // `100 Continue`, and a part of the body.
        stuck.record_write(true);
        stuck.await_body();
        open.close_one();
        open.close_one();
        assert_eq!(gone(&[sends, stuck]), [false, true]);
    }
}
