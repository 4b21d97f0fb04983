//! What each connection is doing, and which of them gives way to others.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Whoever has taken nothing of an answer for so long may give way.
const STUCK_MIN: Duration = Duration::from_secs(1);

/// The connections that are open.
#[derive(Clone, Default)]
pub(super) struct Open {
    known: Arc<Mutex<HashMap<u64, Doing>>>,
    numbers: Arc<AtomicU64>,
}

/// What one of them does.
struct Doing {
    /// From a request's head until the server has nothing to add to its answer.
    is_asking: bool,
    /// There is more of an answer than it has taken.
    is_behind: bool,
    /// Its next request is awaited, or it has taken nothing of its answer, since then.
    silent_since: Option<Instant>,
    give_way: CancellationToken,
}

impl Open {
    /// Makes one give way: of those that ask nothing the one that has been silent for longest, else of those that do not take
    /// their answer; none where there is neither.
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
        // Nothing panics while it holds the lock but the allocator.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One of them, silent from its start.
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

    /// Awaits the moment in which it has to go.
    pub(super) async fn gives_way(&self) {
        self.give_way.cancelled().await;
    }

    /// A request has come; false where it has to go instead of being answered.
    pub(super) fn asks(&self) -> bool {
        self.now(|doing| {
            doing.is_asking = true;
            doing.is_behind = false;
            doing.silent_since = None;
        })
    }

    /// The server has nothing to add to its answer.
    pub(super) fn is_answered(&self) {
        self.now(|doing| {
            doing.is_asking = false;
            doing.silent_since.get_or_insert_with(Instant::now);
        });
    }

    /// It has taken something, or (false) there is no room for more until it does.
    pub(super) fn takes(&self, takes: bool) {
        self.now(|doing| {
            if takes || !doing.is_behind {
                let is_silent = !takes || !doing.is_asking;
                doing.silent_since = is_silent.then(Instant::now);
            }
            doing.is_behind = !takes;
        });
    }

    /// Notes what it does now; false where it has given way.
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
        all.iter().map(|one| one.give_way.is_cancelled()).collect()
    }

    #[test]
    fn of_those_that_ask_nothing_the_one_that_was_silent_for_longest_gives_way() {
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
    fn who_is_being_answered_stays_unless_nothing_of_the_answer_is_taken() {
        let open = Open::default();
        let all = [(); 2].map(|()| Connected::new(&open));
        let [reads, stuck] = &all;
        assert!(reads.asks() && stuck.asks());
        stuck.takes(false);
        open.one_gives_way();
        assert_eq!(gone(&[reads, stuck]), [false, false], "it may yet");
        let long_ago = Instant::now().checked_sub(2 * STUCK_MIN).unwrap();
        open.lock().get_mut(&stuck.number).unwrap().silent_since = Some(long_ago);
        // All is handed on, and not taken yet.
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
