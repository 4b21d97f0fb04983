//! Jobs whose source the operator bound to a handler that is not here: they wait for it, and that costs them no attempt.
//!
//! A claim cannot leave them out, so each is given back and stands at the end of its lane again. A lane in which the worker
//! comes round to the same ones, and finds nothing else, rests for a while.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::job::{JobId, LaneId};
use crate::store::ClaimedJob;

/// How long nothing is claimed from such a lane: then another job may have come, or another host may have gone.
const RESTS_FOR: Duration = Duration::from_secs(10);
/// A lane rests after so many in any case: each costs a claim and a settlement.
const ROUND_MAX: usize = 10_000;

/// Which sources are bound to handlers that are not here, and where their jobs were met.
#[derive(Debug, Default)]
pub(super) struct Unbound {
    sources: HashSet<String>,
    lanes: HashMap<LaneId, Round>,
}

/// What was met in one lane.
#[derive(Debug, Default)]
struct Round {
    given_back: HashSet<JobId>,
    rests_until: Option<Instant>,
}

/// What a claim has brought.
pub(super) struct Sorted {
    pub(super) runnable: Vec<ClaimedJob>,
    /// To be given back.
    pub(super) unbound: Vec<ClaimedJob>,
    /// How many of them are news: where none is, there is nothing more to claim for now.
    pub(super) new: usize,
}

impl Unbound {
    /// These are the sources from now on. Nothing rests: what had no handler may have one.
    pub(super) fn set(&mut self, sources: HashSet<String>) {
        *self = Self {
            sources,
            lanes: HashMap::new(),
        };
    }

    /// True where nothing is to be claimed from the lane for now.
    pub(super) fn rests(&self, lane: LaneId, now: Instant) -> bool {
        let until = self.lanes.get(&lane).and_then(|round| round.rests_until);
        until.is_some_and(|until| now < until)
    }

    /// Tells the jobs of a claim apart, and lets lanes rest that gave nothing but what was given back before.
    pub(super) fn sort(&mut self, jobs: Vec<ClaimedJob>, now: Instant) -> Sorted {
        let is_unbound = |job: &ClaimedJob| {
            let source = job.source.as_ref();
            source.is_some_and(|source| self.sources.contains(source))
        };
        let (unbound, runnable): (Vec<_>, Vec<_>) = jobs.into_iter().partition(is_unbound);
        let busy: HashSet<LaneId> = runnable.iter().map(|job| job.lane).collect();
        let mut new = runnable.len();
        for job in &unbound {
            let round = self.lanes.entry(job.lane).or_default();
            if round.rests_until.is_some_and(|until| until <= now) {
                *round = Round::default();
            }
            let is_new = round.given_back.insert(job.id);
            new += usize::from(is_new);
            let is_over = !is_new || round.given_back.len() >= ROUND_MAX;
            if is_over && !busy.contains(&job.lane) {
                round.rests_until = Some(now + RESTS_FOR);
            }
        }
        Sorted {
            runnable,
            unbound,
            new,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::slots::tests::job;
    use super::*;

    const LANE: LaneId = LaneId(1);

    fn unbound() -> Unbound {
        let mut unbound = Unbound::default();
        unbound.set(["legacy".to_string()].into());
        unbound
    }

    fn jobs(ids: std::ops::Range<i64>, source: Option<&str>) -> Vec<ClaimedJob> {
        ids.map(|id| ClaimedJob {
            source: source.map(Into::into),
            ..job(id)
        })
        .collect()
    }

    #[test]
    fn jobs_of_a_source_without_its_handler_are_given_back_and_no_others() {
        let mut unbound = unbound();
        let mut all = jobs(1..3, Some("legacy"));
        all.extend(jobs(3..5, Some("other")));
        all.extend(jobs(5..7, None));
        let sorted = unbound.sort(all, Instant::now());
        let ids = |jobs: &[ClaimedJob]| jobs.iter().map(|job| job.id.0).collect::<Vec<_>>();
        assert_eq!(ids(&sorted.unbound), [1, 2]);
        assert_eq!(ids(&sorted.runnable), [3, 4, 5, 6]);
        assert_eq!(sorted.new, 6);
    }

    #[test]
    fn a_lane_rests_once_it_has_nothing_but_what_was_given_back_before() {
        let (mut unbound, now) = (unbound(), Instant::now());
        for ids in [1..4, 4..7] {
            assert_eq!(unbound.sort(jobs(ids, Some("legacy")), now).new, 3);
            assert!(!unbound.rests(LANE, now), "there may be others behind");
        }
        let mut mixed = jobs(1..4, Some("legacy"));
        mixed.extend(jobs(7..8, None));
        unbound.sort(mixed, now);
        assert!(!unbound.rests(LANE, now), "there are others");
        assert_eq!(unbound.sort(jobs(4..7, Some("legacy")), now).new, 0);
        assert!(unbound.rests(LANE, now));
        assert!(!unbound.rests(LaneId(2), now));
        let later = now + RESTS_FOR;
        assert!(!unbound.rests(LANE, later));
        assert_eq!(unbound.sort(jobs(1..4, Some("legacy")), later).new, 3);
        assert!(!unbound.rests(LANE, later), "a new round");
    }

    #[test]
    fn a_lane_with_very_many_of_them_rests_in_between_and_starts_over_with_other_handlers() {
        let (mut unbound, now) = (unbound(), Instant::now());
        let many = i64::try_from(ROUND_MAX).unwrap();
        unbound.sort(jobs(0..many, Some("legacy")), now);
        assert!(unbound.rests(LANE, now));
        unbound.set(HashSet::new());
        assert!(!unbound.rests(LANE, now));
    }
}
