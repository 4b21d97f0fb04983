//! Jobs that have waited too long go ahead of newer ones that would be first (SPEC row H5).
//!
//! They get half of what is claimed, and not all: where the backlog is older than the limit, jobs of high
//! priority would otherwise wait behind all of it. (`docs/decisions/what-waits-too-long-gets-half.md`)

use std::collections::VecDeque;

use crate::job::LaneId;
use crate::store::ClaimedJob;

/// The most jobs of one lane that are known to have waited too long; it is asked again with each short sweep.
pub(super) const KNOWN_MAX: usize = 2_000;

/// What has waited too long, as far as it was known a moment ago.
#[derive(Debug, Default)]
pub(super) struct Overdue {
    /// How many jobs of which lane, the one that has waited longest first.
    lanes: VecDeque<(LaneId, usize)>,
    /// Of an odd number of jobs the larger half goes to them every other time.
    larger_half: bool,
}

impl Overdue {
    /// Takes in what the database says.
    pub(super) fn learn(&mut self, lanes: Vec<(LaneId, usize)>) {
        self.lanes = lanes.into();
    }

    /// Their share of a claim of so many jobs, with the lanes to take it from.
    pub(super) fn share(&mut self, wanted: usize) -> (usize, Vec<LaneId>) {
        let all: usize = self.lanes.iter().map(|(_, jobs)| jobs).sum();
        if all == 0 {
            return (0, Vec::new());
        }
        self.larger_half = !self.larger_half;
        let half = (wanted + usize::from(self.larger_half)) / 2;
        let lanes = self.lanes.iter().map(|(lane, _)| *lane).collect();
        (half.min(all), lanes)
    }

    /// Takes in what a claim of `wanted` of them has found.
    pub(super) fn claimed(&mut self, jobs: &[ClaimedJob], wanted: usize) {
        if jobs.len() < wanted {
            // Somebody else has the others.
            self.lanes.clear();
            return;
        }
        for job in jobs {
            if let Some((_, left)) = self.lanes.iter_mut().find(|(lane, _)| *lane == job.lane) {
                *left = left.saturating_sub(1);
            }
        }
        self.lanes.retain(|(_, left)| *left > 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_waited_too_long_gets_half_of_each_claim_and_every_other_job() {
        let mut overdue = Overdue::default();
        assert_eq!(overdue.share(10), (0, vec![]));
        overdue.learn(vec![(LaneId(1), 3), (LaneId(2), 100)]);
        let lanes = vec![LaneId(1), LaneId(2)];
        assert_eq!(overdue.share(10), (5, lanes.clone()));
        assert_eq!(overdue.share(10), (5, lanes));
        let ones: Vec<usize> = (0..4).map(|_| overdue.share(1).0).collect();
        assert_eq!(ones, [1, 0, 1, 0]);
        assert_eq!(overdue.share(1000).0, 103, "no more than there are");
    }

    #[test]
    fn what_somebody_else_has_taken_is_forgotten() {
        let mut overdue = Overdue::default();
        overdue.learn(vec![(LaneId(1), 3)]);
        overdue.claimed(&[], 1);
        assert_eq!(overdue.share(10), (0, vec![]));
    }
}
