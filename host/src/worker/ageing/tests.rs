//! What goes ahead, and how much of it.

use super::*;
use crate::worker::slots::tests::job;

const WAIT: Duration = Duration::from_secs(900);

/// So many jobs of a lane, the first of which has waited too long after so many milliseconds.
fn lane(lane: i64, after_ms: u64, jobs: usize) -> OverdueLane {
    OverdueLane {
        lane: LaneId(lane),
        after: Duration::from_millis(after_ms),
        jobs,
    }
}

/// What was known at `start`, with half of each claim for it.
fn known(lanes: &[OverdueLane], start: Instant) -> Overdue {
    let mut overdue = Overdue::new(Share::new(50));
    overdue.learn(lanes, start);
    overdue
}

fn lanes_of(asked: &[(LaneId, Only)]) -> Vec<(i64, usize)> {
    asked
        .iter()
        .map(|(lane, only)| (lane.0, only.most))
        .collect()
}

fn orders(asked: &[(LaneId, Only)]) -> Vec<ClaimOrder> {
    let order = |&(lane, only): &(LaneId, Only)| ClaimOrder {
        lane,
        after: 0,
        lease_ms: 1000,
        only: Some(only),
    };
    asked.iter().map(order).collect()
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
fn all_of_a_claim_is_all_of_it_and_half_of_an_odd_number_is_the_larger_half_every_other_time() {
    let mut all = Share::new(100);
    assert_eq!(
        [7, 1, 0, 1000].map(|wanted| all.of(wanted)),
        [7, 1, 0, 1000]
    );
    let mut half = Share::new(50);
    let halves = [7, 7, 1, 1, 8, 8, 0, 0].map(|wanted| half.of(wanted));
    assert_eq!(halves, [4, 3, 1, 0, 4, 4, 0, 0]);
    let mut tenth = Share::new(10);
    assert_eq!((0..1000).map(|_| tenth.of(1)).sum::<usize>(), 100);
}

#[test]
fn one_at_a_time_what_waits_too_long_and_what_is_bound_and_the_rest_all_have_their_turns() {
    let (mut overdue, mut bound) = (Share::new(50), Share::new(50));
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
fn a_lane_is_asked_once_its_next_job_has_waited_too_long_and_those_that_have_waited_longest_first()
{
    let start = Instant::now();
    let mut overdue = known(&[lane(1, 0, 3), lane(2, 0, 100), lane(3, 500, 1)], start);
    let (asked, share) = overdue.claim(10, WAIT, start);
    assert_eq!((lanes_of(&asked), share), (vec![(1, 3), (2, 100)], 5));
    assert_eq!(asked[0].1.waited, WAIT);
    let later = start + Duration::from_millis(500);
    let (asked, _) = overdue.claim(10, WAIT, later);
    assert_eq!(lanes_of(&asked), [(1, 3), (2, 100), (3, 1)]);
    let mut none = known(&[lane(3, 500, 1)], start);
    let (asked, share) = none.claim(10, WAIT, start);
    assert_eq!((asked.len(), share), (0, 0), "nothing has waited too long");
}

#[test]
fn what_a_claim_did_not_reach_stays_and_what_somebody_else_has_is_forgotten() {
    let start = Instant::now();
    let mut overdue = known(
        &[lane(1, 0, 2), lane(2, 0, 9), lane(3, 0, 4), lane(4, 0, 1)],
        start,
    );
    let (asked, _) = overdue.claim(10, WAIT, start);
    // Filled: 2 of lane 1, nothing of lane 2, 3 of lane 3.
    overdue.claimed(&orders(&asked), &jobs(&[(1, 2), (3, 3)]), false, start);
    let (asked, _) = overdue.claim(10, WAIT, start);
    assert_eq!(lanes_of(&asked), [(3, 1), (4, 1)]);
}

#[test]
fn a_lane_that_has_given_all_that_has_waited_too_long_is_asked_again_a_moment_later() {
    let start = Instant::now();
    let mut overdue = known(&[lane(1, 0, 9)], start);
    let (asked, _) = overdue.claim(10, WAIT, start);
    overdue.claimed(&orders(&asked), &jobs(&[(1, 2)]), true, start);
    assert!(overdue.claim(10, WAIT, start).0.is_empty());
    let (asked, _) = overdue.claim(10, WAIT, start + AGAIN);
    assert_eq!(lanes_of(&asked), [(1, 7)]);
    overdue.claimed(&orders(&asked), &[], true, start + AGAIN);
    assert!(overdue.claim(10, WAIT, start + 2 * AGAIN).0.is_empty());
}
