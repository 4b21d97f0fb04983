//! Jobs that have waited too long go ahead of newer ones that would be first (SPEC row H5).
//!
//! They get half of what is claimed, and not all: where the backlog is older than the limit, jobs of high
//! priority would otherwise wait behind all of it. (`docs/decisions/what-waits-too-long-gets-half.md`)

use std::collections::VecDeque;

use crate::job::LaneId;

/// The most jobs of one lane that are known to have waited too long; it is asked again with each short sweep.
pub(super) const KNOWN_MAX: usize = 500;

/// Half of each claim; of an odd number of jobs the larger half every other time.
#[derive(Debug, Default)]
pub(super) struct Half {
    larger: bool,
}

impl Half {
    pub(super) fn of(&mut self, wanted: usize) -> usize {
        // Where there is nothing to halve it stays whose turn it is: two of these may be asked in turn.
        if wanted % 2 == 1 {
            self.larger = !self.larger;
        }
        (wanted + usize::from(self.larger)) / 2
    }
}

/// What has waited too long, as far as it was known a moment ago.
#[derive(Debug, Default)]
pub(super) struct Overdue {
    /// How many jobs of which lane, the one that has waited longest first.
    lanes: VecDeque<(LaneId, usize)>,
    half: Half,
}

impl Overdue {
    /// Takes in what the database says.
    pub(super) fn learn(&mut self, lanes: Vec<(LaneId, usize)>) {
        self.lanes = lanes.into();
    }

    /// Their share of a claim of so many jobs, with the lane to take it from: no more than have waited too long
    /// there. None: there is nothing for them.
    pub(super) fn share(&mut self, wanted: usize) -> Option<(LaneId, usize)> {
        let (lane, jobs) = *self.lanes.front()?;
        let half = self.half.of(wanted);
        (half > 0).then_some((lane, half.min(jobs)))
    }

    /// Takes in how many of them a claim from the first lane has found; none: somebody else has them.
    pub(super) fn claimed(&mut self, found: usize) {
        if let Some((_, left)) = self.lanes.front_mut() {
            *left = left.saturating_sub(found);
            if found == 0 || *left == 0 {
                self.lanes.pop_front();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_waited_too_long_gets_half_of_each_claim_and_every_other_job() {
        let mut overdue = Overdue::default();
        assert_eq!(overdue.share(10), None);
        overdue.learn(vec![(LaneId(1), 100), (LaneId(2), 3)]);
        assert_eq!(overdue.share(10), Some((LaneId(1), 5)));
        assert_eq!(overdue.share(10), Some((LaneId(1), 5)));
        let ones: Vec<bool> = (0..4).map(|_| overdue.share(1).is_some()).collect();
        assert_eq!(ones, [true, false, true, false]);
        assert_eq!(overdue.share(1000), Some((LaneId(1), 100)), "no newer ones");
    }

    #[test]
    fn of_an_odd_number_each_half_is_the_larger_one_every_other_time() {
        let mut half = Half::default();
        let halves: Vec<usize> = [7, 7, 1, 1, 8, 8, 0, 0]
            .map(|wanted| half.of(wanted))
            .into();
        assert_eq!(halves, [4, 3, 1, 0, 4, 4, 0, 0]);
    }

    #[test]
    fn one_at_a_time_what_waits_too_long_and_what_is_bound_and_the_rest_all_have_their_turns() {
        let (mut overdue, mut bound) = (Half::default(), Half::default());
        let mut turns = [0; 3];
        for _ in 0..1000 {
            let first = overdue.of(1);
            let second = bound.of(1 - first);
            turns[0] += first;
            turns[1] += second;
            turns[2] += 1 - first - second;
        }
        assert_eq!(turns, [500, 250, 250]);
    }

    #[test]
    fn lanes_are_served_one_after_the_other_and_what_somebody_else_has_is_forgotten() {
        let mut overdue = Overdue::default();
        overdue.learn(vec![(LaneId(1), 3), (LaneId(2), 1), (LaneId(3), 1)]);
        overdue.claimed(2);
        assert_eq!(overdue.share(10), Some((LaneId(1), 1)));
        overdue.claimed(1);
        assert_eq!(overdue.share(10), Some((LaneId(2), 1)));
        overdue.claimed(0);
        assert_eq!(overdue.share(10), Some((LaneId(3), 1)));
    }
}
