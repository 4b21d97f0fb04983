//! Tests of the gates.

use super::*;

const MS: i64 = 1000;

fn sliding(max: i32, period_ms: i64) -> Rate {
    Rate {
        max,
        period_ms,
        burst: None,
    }
}

fn bucket(max: i32, period_ms: i64, burst: i32) -> Rate {
    Rate {
        burst: Some(burst),
        ..sliding(max, period_ms)
    }
}

fn key(gate: usize, key: u32) -> Key {
    Key { gate, key }
}

fn order(lane: u32) -> Order {
    Order { lane, max: None }
}

/// Claims, with these numbers of ready jobs in the lanes, and returns how many were taken from each, and which lanes
/// are closed.
fn claim(
    gates: &mut Gates,
    keys: &[Vec<Key>],
    ready: &[usize],
    wanted: usize,
    at: i64,
) -> (Vec<usize>, Vec<ClosedLane>) {
    let lanes = 0..u32::try_from(keys.len()).unwrap();
    let mut orders: Vec<Order> = lanes.map(order).collect();
    let of = |lane: u32| keys[lane as usize].as_slice();
    let gated = gates.restrict(&mut orders, wanted, at, of, |lane| ready[lane as usize]);
    let mut left = wanted;
    let mut taken = HashMap::new();
    for order in &orders {
        let jobs = order.max.unwrap_or(left).min(left);
        let jobs = jobs.min(ready[order.lane as usize]);
        left -= jobs;
        if jobs > 0 {
            taken.insert(order.lane, jobs);
        }
        for _ in 0..jobs {
            of(order.lane).iter().for_each(|of| gates.started(*of));
        }
    }
    let closed = gates.charge(&gated, &taken, at);
    let taken = (0..keys.len()).map(|lane| taken.get(&(lane as u32)).copied().unwrap_or(0));
    (taken.collect(), closed)
}

fn until_end(lane: u32, by: Key) -> ClosedLane {
    ClosedLane {
        lane,
        by: vec![(by, None)],
    }
}

fn for_ms(lane: u32, ms: i64, by: Key) -> ClosedLane {
    ClosedLane {
        lane,
        by: vec![(by, Some(ms))],
    }
}

#[test]
fn a_window_permits_what_is_left_of_it_and_opens_when_its_first_start_leaves() {
    let rate = sliding(2, 1000);
    assert_eq!(tokens(rate, &[], None, 0), (2, None));
    assert_eq!(tokens(rate, &[0], None, 999 * MS), (1, None));
    assert_eq!(tokens(rate, &[0, 10 * MS], None, 999 * MS), (0, Some(1)));
    assert_eq!(tokens(rate, &[0, 10 * MS], None, 400 * MS), (0, Some(600)));
    assert_eq!(tokens(rate, &[0, 10 * MS], None, 1000 * MS), (1, None));
    assert_eq!(
        tokens(rate, &[0, 1, 2], None, 3),
        (0, Some(1000)),
        "more starts than are permitted now"
    );
}

#[test]
fn a_bucket_fills_evenly_up_to_its_burst() {
    let rate = bucket(10, 1000, 3);
    assert_eq!(tokens(rate, &[], None, 0), (3, None));
    assert_eq!(tokens(rate, &[], Some(300 * MS), 0), (0, Some(100)));
    assert_eq!(tokens(rate, &[], Some(300 * MS), 99 * MS), (0, Some(1)));
    assert_eq!(tokens(rate, &[], Some(300 * MS), 100 * MS), (1, None));
    assert_eq!(tokens(rate, &[], Some(300 * MS), 5000 * MS), (3, None));
    assert_eq!(tokens(rate, &[], Some(600 * MS), 0), (0, Some(400)));
    assert_eq!(
        tokens(rate, &[], Some(601 * MS), 0),
        (3, None),
        "the clock has been set back"
    );
}

#[test]
fn no_more_jobs_of_a_key_run_than_its_limit_and_an_end_makes_room() {
    let mut gates = Gates::new(vec![Limit::Running { max: 3 }]);
    let keys = [vec![key(0, 0)], vec![key(0, 1)], vec![]];
    let first = claim(&mut gates, &keys, &[10, 2, 1], 100, 0);
    assert_eq!(first, (vec![3, 2, 1], vec![until_end(0, key(0, 0))]));
    let second = claim(&mut gates, &keys, &[7, 0, 0], 100, 0);
    assert_eq!(second, (vec![0, 0, 0], vec![until_end(0, key(0, 0))]));
    gates.ended(key(0, 0));
    let third = claim(&mut gates, &keys, &[7, 5, 0], 100, 0);
    let full = vec![until_end(0, key(0, 0)), until_end(1, key(0, 1))];
    assert_eq!(third, (vec![1, 1, 0], full));
}

#[test]
fn lanes_with_the_same_key_share_its_room_and_those_without_jobs_take_none() {
    let mut gates = Gates::new(vec![Limit::Running { max: 4 }]);
    let keys = vec![vec![key(0, 0)]; 3];
    let (taken, closed) = claim(&mut gates, &keys, &[0, 3, 9], 100, 0);
    assert_eq!(taken, [0, 3, 1]);
    // The first two lanes had room for four when they had their turns.
    assert_eq!(closed, [until_end(2, key(0, 0))]);
}

#[test]
fn a_job_passes_all_of_its_gates_or_none() {
    let limits = vec![
        Limit::Running { max: 5 },
        Limit::Starts(sliding(2, 1000)),
        Limit::Starts(bucket(10, 1000, 3)),
    ];
    let mut gates = Gates::new(limits);
    let keys = [vec![key(0, 0), key(1, 0), key(2, 0)]];
    let for_ms = |ms| vec![for_ms(0, ms, key(1, 0))];
    let (taken, closed) = claim(&mut gates, &keys, &[9], 100, 0);
    assert_eq!((taken, closed), (vec![2], for_ms(1000)));
    let (taken, closed) = claim(&mut gates, &keys, &[7], 100, 500 * MS);
    assert_eq!((taken, closed), (vec![0], for_ms(500)));
    let (taken, closed) = claim(&mut gates, &keys, &[7], 100, 1000 * MS);
    assert_eq!((taken, closed), (vec![2], for_ms(1000)));
    // Four jobs run, so there is room for one.
    let (taken, closed) = claim(&mut gates, &keys, &[5], 100, 2000 * MS);
    assert_eq!((taken, closed), (vec![1], vec![until_end(0, key(0, 0))]));
    assert_eq!(
        gates.room(key(1, 0), 2000 * MS),
        (1, None),
        "charged for one"
    );
    // The next job uses up the room of two of its gates.
    gates.ended(key(0, 0));
    let two = vec![keys[0][..2].to_vec(); 2];
    let (taken, closed) = claim(&mut gates, &two, &[3, 9], 100, 2000 * MS);
    assert_eq!(taken, [1, 0]);
    let by = vec![(key(0, 0), None), (key(1, 0), Some(1000))];
    let closed_by_both = |lane| ClosedLane {
        lane,
        by: by.clone(),
    };
    assert_eq!(closed, [closed_by_both(0), closed_by_both(1)]);
}

#[test]
fn no_period_has_more_starts_than_the_limit_however_often_jobs_are_claimed() {
    let mut gates = Gates::new(vec![Limit::Starts(sliding(7, 100))]);
    let keys = [vec![key(0, 0)]];
    let mut starts: Vec<i64> = Vec::new();
    for step in 0..5000 {
        let at = step * 1300;
        let (taken, _) = claim(&mut gates, &keys, &[1 + step as usize % 5], 3, at);
        starts.extend(std::iter::repeat_n(at, taken[0]));
    }
    assert!(
        starts
            .windows(8)
            .all(|eight| eight[7] - eight[0] >= 100 * MS)
    );
    assert!(starts.len() >= 7 * 60, "too few starts: {}", starts.len());
}
