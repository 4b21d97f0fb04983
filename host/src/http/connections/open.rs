//! What each connection is doing, and which one is closed to make room.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// A connection that has not read from its response for this long may be closed.
const STUCK_MIN: Duration = Duration::from_secs(1);

/// The connections that are open.
#[derive(Clone, Default)]
pub(super) struct Open {
    known: Arc<Mutex<HashMap<u64, Doing>>>,
    numbers: Arc<AtomicU64>,
}

/// The state of one connection.
struct Doing {
    /// From the head of a request until the server has handed on the whole response.
    is_asking: bool,
    /// The response is not read completely yet.
    is_behind: bool,
    /// Since when its next request is awaited, or it has not read from its response.
    silent_since: Option<Instant>,
    give_way: CancellationToken,
}

impl Open {
    /// Closes the connection without a request that has been silent for longest, else the one that has not read its
    /// response for longest, if there is either.
    pub(super) fn one_gives_way(&self) {
        let mut known = self.lock();
        let now = Instant::now();
        let longest = known
            .iter()
            .filter_map(|(number, doing)| {
                let is_answered = doing.is_asking || doing.is_behind;
                Some((is_answered, doing.silent_since?, *number))
            })
            .filter(|(is_answered, since, _)| {
                !is_answered || now.duration_since(*since) >= STUCK_MIN
            })
            .min();
        if let Some((.., number)) = longest
            && let Some(doing) = known.remove(&number)
        {
            doing.give_way.cancel();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Doing>> {
        // Only the allocator can panic while the lock is held.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An open connection. It counts as silent from its start.
pub(super) struct Connected {
    number: u64,
    open: Open,
    give_way: CancellationToken,
}

impl Connected {
    pub(super) fn new(open: &Open) -> Self {
        let connected = Self {
            number: open.numbers.fetch_add(1, Ordering::Relaxed),
            open: open.clone(),
            give_way: CancellationToken::new(),
        };
        let doing = Doing {
            is_asking: false,
            is_behind: false,
            silent_since: Some(Instant::now()),
            give_way: connected.give_way.clone(),
        };
        open.lock().insert(connected.number, doing);
        connected
    }

    /// Completes when the connection must close.
    pub(super) async fn gives_way(&self) {
        self.give_way.cancelled().await;
    }

    /// Records a request. False if the connection must close instead of responding.
    pub(super) fn asks(&self) -> bool {
        self.now(|doing| {
            doing.is_asking = true;
            doing.is_behind = false;
            doing.silent_since = None;
        })
    }

    /// Records that the whole response was handed on.
    pub(super) fn is_answered(&self) {
        self.now(|doing| {
            doing.is_asking = false;
            doing.silent_since.get_or_insert_with(Instant::now);
        });
    }

    /// Records that the client has read something, or (false) that nothing more can be written until it does.
    pub(super) fn takes(&self, takes: bool) {
        self.now(|doing| {
            if takes || !doing.is_behind {
                let is_silent = !takes || !doing.is_asking;
                doing.silent_since = is_silent.then(Instant::now);
            }
            doing.is_behind = !takes;
        });
    }

    /// Updates the state; false if the connection was closed.
    fn now(&self, note: impl FnOnce(&mut Doing)) -> bool {
        self.open.lock().get_mut(&self.number).map(note).is_some()
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
            .map(|connected| connected.give_way.is_cancelled())
            .collect()
    }

    #[test]
    fn the_connection_that_was_silent_for_longest_is_closed_first() {
        let open = Open::default();
        let all = [(); 3].map(|()| Connected::new(&open));
        let [first, second, third] = &all;
        assert!(first.asks());
        open.one_gives_way();
        assert_eq!(gone(&[first, second, third]), [false, true, false]);
        assert!(!second.asks(), "it is too late");
        first.is_answered();
        open.one_gives_way();
        assert_eq!(gone(&[first, second, third]), [false, true, true]);
        open.one_gives_way();
        assert_eq!(gone(&[first, second, third]), [true, true, true]);
        open.one_gives_way();
    }

    #[test]
    fn a_connection_stays_open_while_it_reads_its_response() {
        let open = Open::default();
        let all = [(); 2].map(|()| Connected::new(&open));
        let [reads, stuck] = &all;
        assert!(reads.asks() && stuck.asks());
        stuck.takes(false);
        open.one_gives_way();
        assert_eq!(gone(&[reads, stuck]), [false, false], "it may yet");
        let long_ago = Instant::now().checked_sub(2 * STUCK_MIN).unwrap();
        open.lock().get_mut(&stuck.number).unwrap().silent_since = Some(long_ago);
        // The response is handed on, but not read yet.
        reads.takes(false);
        reads.is_answered();
        open.one_gives_way();
        open.one_gives_way();
        assert_eq!(gone(&[reads, stuck]), [false, true]);
        reads.takes(true);
        open.one_gives_way();
        assert_eq!(gone(&[reads, stuck]), [true, true]);
        drop(all);
        assert!(open.lock().is_empty());
    }
}
