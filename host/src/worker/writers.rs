//! Transactions that are in progress while the sweeps look: what they commit later may stand behind the cursors.

use std::collections::HashSet;

/// In so many sweeps the short sweep does not go back yet in a lane that is new to this worker.
const FIRST_SWEEPS: u8 = 3;

/// Which transactions have written and not ended, by their ids.
#[derive(Debug, Default)]
pub(super) struct Writers {
    /// Since a lane was new.
    sweeps: u8,
    /// At the last sweep.
    last: HashSet<i64>,
    /// Those of them that the short sweep does not find: they were in progress at the sweep before, too. A transaction that
    /// was not has taken its turns since, and the next sweep goes back to where the cursors were then.
    late: HashSet<i64>,
}

impl Writers {
    /// A lane is new to this worker: the short sweep has nowhere to go back to.
    pub(super) fn lanes_are_new(&mut self) {
        self.sweeps = 0;
    }

    /// Whether each transaction that the last sweep has seen counts as one that the short sweep does not find.
    pub(super) fn all_are_late(&self) -> bool {
        (1..=FIRST_SWEEPS).contains(&self.sweeps)
    }

    /// Takes in those that a sweep has seen; true where one has ended that the short sweep does not find.
    pub(super) fn seen(&mut self, writers: Vec<i64>) -> bool {
        let writers: HashSet<i64> = writers.into_iter().collect();
        let has_ended = !self.late.is_subset(&writers);
        self.late = match self.sweeps < FIRST_SWEEPS {
            true => writers.clone(),
            false => &writers & &self.last,
        };
        self.last = writers;
        self.sweeps = self.sweeps.saturating_add(1);
        has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_late_that_was_in_progress_at_two_sweeps() {
        let mut writers = Writers::default();
        for _ in 0..FIRST_SWEEPS {
            assert!(!writers.seen(Vec::new()));
        }
        // Short ones, one after the other.
        assert!(!writers.seen(vec![1]));
        assert!(!writers.seen(vec![2, 3]));
        // 3 goes on.
        assert!(!writers.seen(vec![3]));
        assert!(!writers.seen(vec![3, 4]));
        assert!(writers.seen(vec![4]));
        // Told once.
        assert!(!writers.seen(vec![4]));
        assert!(writers.seen(Vec::new()));
        assert!(!writers.seen(Vec::new()));
    }

    #[test]
    fn at_the_start_each_transaction_is_late() {
        let mut writers = Writers::default();
        assert!(!writers.seen(vec![1]));
        assert!(writers.seen(vec![2]));
        assert!(writers.seen(vec![3]));
        assert!(writers.seen(vec![4]));
        assert!(!writers.seen(vec![5]));
    }
}
