//! Outcomes that are blocked by a lock of another transaction, other than the lock of their own job: for example the
//! lock of a unique key that both use for a job that they enqueue.
//!
//! Such a lock cannot be skipped, so one outcome blocks all that are settled with it. Their halves are tried, down to
//! the outcomes that need the lock; these are tried again at growing intervals. Each try may wait for the lock, so the
//! settler makes a few at a time, between batches of new outcomes.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use super::retry_after;

/// The time for which the settler tries blocked parts before it looks for new outcomes.
pub(super) const TRIED_FOR: Duration = Duration::from_millis(200);

/// After this many tries the pause no longer grows, and the outcomes take turns.
const TIMES_MAX: u32 = 4;

/// The blocked parts of batches.
pub(super) struct HeldUp<T> {
    parts: Vec<Part<T>>,
}

/// One or more outcomes that are tried together.
pub(super) struct Part<T> {
    pub(super) outcomes: Vec<T>,
    /// The number of times that its only outcome was blocked alone.
    pub(super) times: u32,
    retry_at: Instant,
}

impl<T> HeldUp<T> {
    pub(super) fn new() -> Self {
        Self { parts: Vec::new() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// The number of outcomes.
    pub(super) fn count(&self) -> usize {
        self.parts.iter().map(|part| part.outcomes.len()).sum()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &T> {
        self.parts.iter().flat_map(|part| &part.outcomes)
    }

    /// Adds outcomes that were blocked together. `times`: as in the part that they formed.
    pub(super) fn add(&mut self, mut outcomes: Vec<T>, times: u32, now: Instant) {
        if outcomes.len() == 1 {
            self.parts.push(Part {
                outcomes,
                times: (times + 1).min(TIMES_MAX),
                retry_at: now + retry_after(times),
            });
            return;
        }
        let half = outcomes.split_off(outcomes.len() / 2);
        for outcomes in [outcomes, half] {
            self.parts.push(Part {
                outcomes,
                times: 0,
                retry_at: now,
            });
        }
    }

    /// Takes the next part that is due. Outcomes that were blocked less often go first, so that new ones do not wait
    /// for those that may be blocked for a long time.
    pub(super) fn take_due(&mut self, now: Instant) -> Option<Part<T>> {
        let parts = self.parts.iter().enumerate();
        let due = parts.filter(|(_, part)| part.retry_at <= now);
        let (index, _) = due.min_by_key(|(_, part)| (part.times, part.retry_at))?;
        Some(self.parts.swap_remove(index))
    }

    /// The excess over this maximum: those that were tried most often.
    pub(super) fn beyond(&self, max: usize) -> impl Iterator<Item = &T> {
        let excess = self.count().saturating_sub(max);
        let mut parts: Vec<&Part<T>> = Vec::new();
        if excess > 0 {
            parts.extend(&self.parts);
            parts.sort_unstable_by_key(|part| (Reverse(part.times), part.retry_at));
        }
        parts
            .into_iter()
            .flat_map(|part| &part.outcomes)
            .take(excess)
    }

    /// When the next part is due.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.parts.iter().map(|part| part.retry_at).min()
    }

    /// Keeps these outcomes only.
    pub(super) fn retain(&mut self, mut is_kept: impl FnMut(&T) -> bool) {
        self.parts.retain_mut(|part| {
            part.outcomes.retain(&mut is_kept);
            !part.outcomes.is_empty()
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The times, in milliseconds, at which each of these outcomes was settled or tried alone, in a minute.
    fn tried_at(count: usize, is_locked: impl Fn(usize) -> bool) -> Vec<Vec<u128>> {
        let started_at = Instant::now();
        let mut held_up = HeldUp::new();
        held_up.add((0..count).collect(), 0, started_at);
        let mut tried = vec![Vec::new(); count];
        let mut now = started_at;
        while now < started_at + Duration::from_secs(60) {
            let Some(part) = held_up.take_due(now) else {
                now = held_up.next_at().expect("some are locked");
                continue;
            };
            let is_held_up = part.outcomes.iter().any(|one| is_locked(*one));
            if part.outcomes.len() == 1 || !is_held_up {
                for one in &part.outcomes {
                    tried[*one].push((now - started_at).as_millis());
                }
            }
            now += Duration::from_millis(match (is_held_up, part.outcomes.len()) {
                (false, _) => 1,
                (true, 1) => 100,
                (true, _) => 20,
            });
            if is_held_up {
                held_up.add(part.outcomes, part.times, now);
            }
        }
        tried
    }

    #[test]
    fn outcomes_that_a_lock_blocks_are_found_by_bisection_and_tried_again_after_growing_pauses() {
        let tried = tried_at(1000, |one| one == 700);
        for (one, tried) in tried.iter().enumerate() {
            if one == 700 {
                let pauses: Vec<u128> = tried.windows(2).map(|two| two[1] - two[0]).collect();
                // Each pause includes the try itself.
                assert_eq!(pauses[..6], [300, 500, 900, 1700, 2100, 2100]);
            } else {
                assert!(tried.len() == 1 && tried[0] < 400, "{one}: {tried:?}");
            }
        }
    }

    #[test]
    fn more_outcomes_than_can_be_tried_in_the_longest_pause_take_turns() {
        let tried = tried_at(100, |one| one % 2 == 0);
        for (one, tried) in tried.iter().enumerate() {
            match one % 2 {
                // 50 × 100 ms.
                0 => assert!(tried.len() >= 10, "{one}: {tried:?}"),
                _ => assert_eq!(tried.len(), 1, "{one}: {tried:?}"),
            }
        }
    }

    #[test]
    fn new_outcomes_do_not_wait_for_those_that_are_blocked_for_a_long_time() {
        let started_at = Instant::now();
        let later = started_at + Duration::from_secs(1);
        let mut held_up = HeldUp::new();
        for one in 0..100 {
            held_up.add(vec![one], 1, started_at);
        }
        held_up.add(vec![100, 101], 0, later);
        let next = held_up.take_due(later).map(|part| part.outcomes);
        assert_eq!(next, Some(vec![100]));
        held_up.retain(|one| *one < 3);
        assert_eq!(held_up.count(), 3);
        assert_eq!(held_up.beyond(3).count(), 0);
        held_up.add(vec![7, 8], 0, later);
        let max: Vec<usize> = held_up.beyond(3).copied().collect();
        assert!(max.len() == 2 && max.iter().all(|one| *one < 3), "{max:?}");
    }
}
