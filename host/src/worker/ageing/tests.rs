//! Tests of which overdue jobs go ahead, and how many.

use super::*;
use crate::worker::claim::tests::job;

const WAIT: Duration = Duration::from_secs(900);

/// A lane with this many jobs, the first of which becomes overdue after this many milliseconds.
fn lane(lane: i64, after_ms: u64, jobs: usize) -> OverdueLane {
    OverdueLane {
        lane: LaneId(lane),
        after: Duration::from_millis(after_ms),
        jobs,
    }
}

/// These lanes as counted at `start`, with half of each claim as their share.
fn known(lanes: &[OverdueLane], start: Instant) -> Overdue {
    let mut overdue = Overdue::new(Share::new(50));
    overdue.learn(&[(WAIT, lanes.to_vec())], start);
    overdue
}

fn lanes_of(lanes: &[(LaneId, OverdueFilter)]) -> Vec<(i64, usize)> {
    lanes
        .iter()
        .map(|(lane, filter)| (lane.0, filter.max))
        .collect()
}

fn orders(lanes: &[(LaneId, OverdueFilter)]) -> Vec<ClaimOrder> {
    let order = |&(lane, filter): &(LaneId, OverdueFilter)| ClaimOrder {
        lane,
        after: 0,
        lease_ms: 1000,
        max: None,
        overdue: Some(filter),
    };
    lanes.iter().map(order).collect()
}

fn jobs(of: &[(i64, usize)]) -> Vec<ClaimedJob> {
    let of_lane = |&(lane, count): &(i64, usize)| {
        (0..count).map(move |_| ClaimedJob {
            lane: LaneId(lane),
            ..job(1)
        })
    };
    of.iter().flat_map(of_lane).collect()
}

#[test]
fn shares_are_exact_over_many_claims() {
    let mut all = Share::new(100);
    assert_eq!(
        [7, 1, 0, 1000].map(|wanted| all.take(wanted)),
        [7, 1, 0, 1000]
    );
    let mut half = Share::new(50);
    let halves = [7, 7, 1, 1, 8, 8, 0, 0].map(|wanted| half.take(wanted));
    assert_eq!(halves, [4, 3, 1, 0, 4, 4, 0, 0]);
    let mut tenth = Share::new(10);
    assert_eq!((0..1000).map(|_| tenth.take(1)).sum::<usize>(), 100);
}

#[test]
fn claims_of_one_job_each_serve_overdue_jobs_bound_jobs_and_others_in_turn() {
    let (mut overdue, mut bound) = (Share::new(50), Share::new(50));
    let mut turns = [0; 3];
    for _ in 0..1000 {
        let first = overdue.take(1);
        let second = bound.take(1 - first);
        turns[0] += first;
        turns[1] += second;
        turns[2] += 1 - first - second;
    }
    assert_eq!(turns, [500, 250, 250]);
}

#[test]
fn a_lane_is_claimed_from_once_its_next_job_is_overdue_longest_wait_first() {
    let start = Instant::now();
    let mut overdue = known(&[lane(1, 0, 3), lane(2, 0, 100), lane(3, 500, 1)], start);
    let (due, share) = overdue.claim(10, start);
    assert_eq!((lanes_of(&due), share), (vec![(1, 3), (2, 100)], 5));
    assert_eq!(due[0].1.waited, WAIT);
    let later = start + Duration::from_millis(500);
    let (due, _) = overdue.claim(10, later);
    assert_eq!(lanes_of(&due), [(1, 3), (2, 100), (3, 1)]);
    let mut none = known(&[lane(3, 500, 1)], start);
    let (due, share) = none.claim(10, start);
    assert_eq!((due.len(), share), (0, 0), "no job is overdue");
}

#[test]
fn lanes_that_a_claim_did_not_reach_stay_and_empty_ones_are_forgotten() {
    let start = Instant::now();
    let mut overdue = known(
        &[lane(1, 0, 2), lane(2, 0, 9), lane(3, 0, 4), lane(4, 0, 1)],
        start,
    );
    let (due, _) = overdue.claim(10, start);
    // A filled claim: 2 jobs of lane 1, none of lane 2, 3 of lane 3.
    overdue.claimed(&orders(&due), &jobs(&[(1, 2), (3, 3)]), false, start);
    let (due, _) = overdue.claim(10, start);
    assert_eq!(lanes_of(&due), [(3, 1), (4, 1)]);
}

#[test]
fn a_lane_without_more_overdue_jobs_is_retried_after_a_pause() {
    let start = Instant::now();
    let mut overdue = known(&[lane(1, 0, 9)], start);
    let (due, _) = overdue.claim(10, start);
    overdue.claimed(&orders(&due), &jobs(&[(1, 2)]), true, start);
    assert!(overdue.claim(10, start).0.is_empty());
    let (due, _) = overdue.claim(10, start + RETRY_AFTER);
    assert_eq!(lanes_of(&due), [(1, 7)]);
    overdue.claimed(&orders(&due), &[], true, start + RETRY_AFTER);
    assert!(overdue.claim(10, start + 2 * RETRY_AFTER).0.is_empty());
}
