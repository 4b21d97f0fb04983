//! Transactions that have written and are still in progress during a sweep: jobs that they commit later may have turns
//! behind the cursors.

use std::collections::HashSet;

/// The ids of transactions that have written and not ended.
#[derive(Debug, Default)]
pub(super) struct Writers {
    /// All writing transactions at the last sweep, in any order.
    last: Vec<i64>,
    /// The late ones. They were in progress at the previous sweep, too, so the short sweep misses their jobs.
    /// Any other transaction has taken its turns since that sweep, and the next sweep goes back to the cursors of that
    /// time.
    late: HashSet<i64>,
}

impl Writers {
    /// All writing transactions at the last sweep.
    pub(super) fn last(&self) -> &[i64] {
        &self.last
    }

    /// Updates the transactions after a sweep. True if a late one has ended.
    pub(super) fn update(&mut self, writers: Vec<i64>) -> bool {
        let now: HashSet<i64> = writers.iter().copied().collect();
        let has_ended = !self.late.is_subset(&now);
        self.late = self
            .last
            .iter()
            .copied()
            .filter(|id| now.contains(id))
            .collect();
        self.last = writers;
        has_ended
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transaction_is_late_if_it_was_in_progress_at_two_sweeps() {
        let mut writers = Writers::default();
        // Short transactions, one after another.
        assert!(!writers.update(vec![1]));
        assert!(!writers.update(vec![2, 3]));
        // Transaction 3 stays open.
        assert!(!writers.update(vec![3]));
        assert!(!writers.update(vec![3, 4]));
        assert!(writers.update(vec![4]));
        // The end of transaction 3 is reported once.
        assert!(!writers.update(vec![4]));
        assert!(writers.update(Vec::new()));
        assert!(!writers.update(Vec::new()));
    }
}
