//! Jobs whose source the operator has bound to a handler that this host does not have. They wait for it, without using
//! up an attempt.
//!
//! A claim cannot exclude them, so each is given back and goes to the end of its lane. If the worker claims only the
//! same jobs again in a lane, it pauses the lane for a while.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::job::{JobId, LaneId};
use crate::store::ClaimedJob;

/// The time for which nothing is claimed from a paused lane. By then, jobs that this host can run may have been
/// enqueued, or another host that ran such jobs may have stopped.
const PAUSED_FOR: Duration = Duration::from_secs(10);
/// A lane is paused after this many jobs in any case: each costs a claim and a settlement.
const ROUND_MAX: usize = 10_000;

/// The sources that are bound to missing handlers, and the lanes in which their jobs were claimed.
#[derive(Debug, Default)]
pub(super) struct Unbound {
    sources: HashSet<String>,
    lanes: HashMap<LaneId, Round>,
}

/// The jobs that were given back in one lane since it was last paused.
#[derive(Debug, Default)]
struct Round {
    given_back: HashSet<JobId>,
    paused_until: Option<Instant>,
}

/// The jobs of a claim.
pub(super) struct Sorted {
    pub(super) runnable: Vec<ClaimedJob>,
    /// Jobs to give back.
    pub(super) unbound: Vec<ClaimedJob>,
    /// The number of jobs of both kinds that have not been given back in this round. If it is 0, there is nothing more
    /// to claim for now.
    pub(super) new: usize,
}

impl Unbound {
    /// Replaces the sources. If they have changed, all pauses end: a missing handler may be loaded now. The same ones
    /// are set whenever there are new lanes, which may be several times a second.
    pub(super) fn set(&mut self, sources: HashSet<String>) {
        if self.sources != sources {
            self.sources = sources;
            self.lanes.clear();
        }
    }

    /// Forgets the lanes for which `keep` returns false.
    pub(super) fn retain(&mut self, keep: impl Fn(LaneId) -> bool) {
        self.lanes.retain(|lane, _| keep(*lane));
    }

    /// True while nothing is claimed from the lane.
    pub(super) fn is_paused(&self, lane: LaneId, now: Instant) -> bool {
        self.paused_for(lane, now).is_some()
    }

    /// The remaining time for which nothing is claimed from the lane. `None` if it is not paused.
    pub(super) fn paused_for(&self, lane: LaneId, now: Instant) -> Option<Duration> {
        let until = self.lanes.get(&lane)?.paused_until?;
        let rest = until.saturating_duration_since(now);
        (!rest.is_zero()).then_some(rest)
    }

    /// Separates the jobs of a claim, and pauses lanes that returned only jobs which were given back before.
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
            if round.paused_until.is_some_and(|until| until <= now) {
                *round = Round::default();
            }
            let is_new = round.given_back.insert(job.id);
            new += usize::from(is_new);
            let is_over = !is_new && !busy.contains(&job.lane);
            if is_over || round.given_back.len() >= ROUND_MAX {
                round.paused_until = Some(now + PAUSED_FOR);
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
    use super::super::claim::tests::job;
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
    fn only_jobs_whose_bound_handler_is_missing_are_given_back() {
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
    fn a_lane_is_paused_once_it_returns_only_jobs_that_were_given_back_before() {
        let (mut unbound, now) = (unbound(), Instant::now());
        for ids in [1..4, 4..7] {
            assert_eq!(unbound.sort(jobs(ids, Some("legacy")), now).new, 3);
            assert!(!unbound.is_paused(LANE, now), "other jobs may follow");
        }
        let mut mixed = jobs(1..4, Some("legacy"));
        mixed.extend(jobs(7..8, None));
        unbound.sort(mixed, now);
        assert!(!unbound.is_paused(LANE, now), "there are other jobs");
        assert_eq!(unbound.sort(jobs(4..7, Some("legacy")), now).new, 0);
        assert!(unbound.is_paused(LANE, now));
        assert!(!unbound.is_paused(LaneId(2), now));
        let later = now + PAUSED_FOR;
        assert!(!unbound.is_paused(LANE, later));
        assert_eq!(unbound.sort(jobs(1..4, Some("legacy")), later).new, 3);
        assert!(!unbound.is_paused(LANE, later), "a new round");
    }

    #[test]
    fn a_lane_with_very_many_unbound_jobs_is_paused_until_the_handlers_change() {
        let (mut unbound, now) = (unbound(), Instant::now());
        let many = i64::try_from(ROUND_MAX).unwrap();
        unbound.sort(jobs(0..many, Some("legacy")), now);
        assert!(unbound.is_paused(LANE, now));
        unbound.set(HashSet::new());
        assert!(!unbound.is_paused(LANE, now));
    }

    /// Otherwise the worker would claim all of them again whenever a tenant of a fair queue gets its first job.
    #[test]
    fn a_pause_does_not_end_if_the_same_sources_are_set_again() {
        let (mut unbound, now) = (unbound(), Instant::now());
        for new in [1, 0] {
            assert_eq!(unbound.sort(jobs(1..2, Some("legacy")), now).new, new);
        }
        unbound.set(["legacy".to_string()].into());
        assert_eq!(unbound.paused_for(LANE, now), Some(PAUSED_FOR));
        assert_eq!(unbound.paused_for(LANE, now + PAUSED_FOR), None);
        unbound.retain(|lane| lane != LANE);
        assert!(unbound.lanes.is_empty());
    }

    #[test]
    fn a_lane_with_very_many_unbound_jobs_is_paused_even_if_it_has_other_jobs() {
        let (mut unbound, now) = (unbound(), Instant::now());
        let many = i64::try_from(ROUND_MAX).unwrap();
        let mut all = jobs(0..many, Some("legacy"));
        all.extend(jobs(many..many + 1, None));
        assert_eq!(unbound.sort(all, now).runnable.len(), 1);
        assert!(unbound.is_paused(LANE, now));
    }
}
