//! Tests of the turns.

use super::*;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct LaneId(i64);

const NORMAL: Class = [1, 0];

fn place(queue: &str, key: &str, share: f64) -> Place {
    Place {
        class: NORMAL,
        queue: queue.into(),
        key: key.into(),
        share,
    }
}

/// Makes this many claims of `batch` jobs by turns, from lanes with these numbers of jobs. Returns what they took, in
/// order.
fn run(
    turns: &mut Turns<LaneId>,
    jobs: &mut HashMap<i64, usize>,
    batch: usize,
    claims: usize,
) -> Vec<(i64, usize)> {
    let mut claimed = Vec::new();
    for _ in 0..claims {
        let mut left = batch;
        for Part { lane, max } in turns.divide(batch, 256) {
            let has = jobs.entry(lane.0).or_default();
            let used = max.unwrap_or(left).min(*has).min(left);
            let is_exhausted = used == *has;
            *has -= used;
            left -= used;
            claimed.push((lane.0, used));
            if let Some(max) = max {
                turns.settle(lane, max, used, 1.0);
            }
            if is_exhausted {
                turns.remove(lane);
            }
        }
    }
    claimed
}

fn totals(claimed: &[(i64, usize)]) -> BTreeMap<i64, usize> {
    let mut totals = BTreeMap::new();
    for (lane, jobs) in claimed {
        *totals.entry(*lane).or_default() += jobs;
    }
    totals
}

#[test]
fn a_lane_that_is_alone_gets_everything() {
    let mut turns = Turns::default();
    turns.insert(LaneId(1), place("a", "", 1.0));
    let all = |lane| Part {
        lane: LaneId(lane),
        max: None,
    };
    assert_eq!(turns.divide(500, 256), [all(1)]);
    let other = Place {
        class: [2, 0],
        ..place("a", "", 1.0)
    };
    turns.insert(LaneId(2), other);
    assert_eq!(turns.divide(500, 256), [all(1), all(2)], "of two classes");
    turns.clear();
    assert!(turns.divide(500, 256).is_empty());
}

#[test]
fn queues_share_equally_however_many_lanes_and_jobs_they_have() {
    let mut turns = Turns::default();
    for lane in 1..=9 {
        turns.insert(LaneId(lane), place("long", "", 1.0));
    }
    turns.insert(LaneId(10), place("short", "", 1.0));
    let mut jobs: HashMap<i64, usize> = (1..=10).map(|lane| (lane, 1_000_000)).collect();
    let totals = totals(&run(&mut turns, &mut jobs, 100, 90));
    assert_eq!(totals[&10], 4500);
    assert!((1..=9).all(|lane| totals[&lane] == 500), "{totals:?}");
}

#[test]
fn keys_share_by_weight_regardless_of_the_size_of_claims() {
    for batch in [1, 3, 7, 100] {
        let mut turns = Turns::default();
        turns.insert(LaneId(1), place("q", "a", 3.0));
        turns.insert(LaneId(2), place("q", "b", 1.0));
        turns.insert(LaneId(3), place("q", "c", 0.25));
        let mut jobs: HashMap<i64, usize> = (1..=3).map(|lane| (lane, 1_000_000)).collect();
        let claims = 17_000 / batch;
        let totals = totals(&run(&mut turns, &mut jobs, batch, claims));
        let whole = (claims * batch) as f64;
        for (lane, share) in [(1, 12.0), (2, 4.0), (3, 1.0)] {
            let expected = whole * share / 17.0;
            let off = (totals[&lane] as f64 - expected).abs() / expected;
            assert!(off < 0.01, "claims of {batch}, lane {lane}: {totals:?}");
        }
    }
}

#[test]
fn the_first_key_with_credit_wins_and_pays_one() {
    let mut turns = Turns::default();
    turns.insert(LaneId(2), place("q", "b", 1.0));
    turns.insert(LaneId(1), place("q", "a", 3.0));
    let mut jobs: HashMap<i64, usize> = [(1, 100), (2, 100)].into();
    let order: Vec<i64> = run(&mut turns, &mut jobs, 1, 8)
        .iter()
        .map(|(lane, _)| *lane)
        .collect();
    assert_eq!(order, [1, 2, 1, 1, 2, 1, 1, 1]);
}

#[test]
fn a_new_key_is_next_but_gets_at_most_its_share_by_coming_back() {
    let mut turns = Turns::default();
    for lane in 1..=100 {
        turns.insert(LaneId(lane), place("q", &lane.to_string(), 1.0));
    }
    let mut jobs: HashMap<i64, usize> = (1..=100).map(|lane| (lane, 1_000_000)).collect();
    run(&mut turns, &mut jobs, 1, 50);
    let mut mine = 0;
    let mut waits = Vec::new();
    let mut since = 0;
    for claim in 0..10_100 {
        // The new key gets another job whenever it has none left.
        if jobs.get(&1000).copied().unwrap_or(0) == 0 {
            jobs.insert(1000, 1);
            since = claim;
        }
        turns.insert(LaneId(1000), place("q", "new", 1.0));
        if run(&mut turns, &mut jobs, 1, 1) == [(1000, 1)] {
            mine += 1;
            waits.push(claim - since);
        }
    }
    assert_eq!(waits[0], 0, "it goes first");
    assert!(
        (99..=102).contains(&mine),
        "{mine} of 10,100 turns of 101 keys"
    );
}

#[test]
fn turns_that_were_not_used_are_given_back() {
    let mut turns = Turns::default();
    turns.insert(LaneId(2), place("q", "b", 1.0));
    turns.insert(LaneId(1), place("q", "a", 1.0));
    // The claim is filled by the first lane each time, because the second one is busy elsewhere.
    let mut used_by_first = 0;
    for _ in 0..10 {
        for Part { lane, max } in turns.divide(10, 256) {
            let max = max.expect("there are two lanes");
            let used = if lane == LaneId(1) { max } else { 0 };
            used_by_first += used;
            turns.settle(lane, max, used, 1.0);
        }
    }
    let mut jobs: HashMap<i64, usize> = [(1, 1000), (2, 1000)].into();
    let totals = totals(&run(&mut turns, &mut jobs, 10, 5));
    let lead = used_by_first + totals[&1] - totals[&2];
    assert!(
        lead <= 1 && used_by_first > 0,
        "it catches up: {used_by_first}, {totals:?}"
    );
}

/// A worker may serve millions of tenants in its life, one after another.
#[test]
fn keys_and_lanes_that_have_left_with_all_their_credit_are_forgotten() {
    let remembered = |turns: &Turns<LaneId>| {
        let keys = turns.of_queue(NORMAL, "q").unwrap();
        let lanes = keys.members.values();
        let lanes = lanes.map(|key| key.child.members.len()).sum::<usize>();
        (keys.members.len(), lanes)
    };
    let mut turns = Turns::default();
    // One at a time: no round ends.
    for n in 0..1000 {
        turns.insert(LaneId(n), place("q", &n.to_string(), 1.0));
        turns.divide(12, 256);
        turns.remove(LaneId(n));
    }
    assert_eq!(turns.rounds("q"), 0);
    assert_eq!(remembered(&turns), (0, 0));
    // Two lanes of each key, with different shares, whose claims are not filled.
    for (n, share) in (0..1000).zip([0.3, 1.0, 2.5].into_iter().cycle()) {
        let lanes = [LaneId(2 * n), LaneId(2 * n + 1)];
        for lane in lanes {
            turns.insert(lane, place("q", &n.to_string(), share));
        }
        for Part { lane, max } in turns.divide(12, 256) {
            turns.settle(lane, max.unwrap(), 1, 1.0);
        }
        for lane in lanes {
            turns.remove(lane);
        }
    }
    let (keys, lanes) = remembered(&turns);
    assert!(keys < 10 && lanes < 20, "{keys} keys, {lanes} lanes");
    // A key that has used credit is remembered with what is left.
    let mut turns = Turns::default();
    for (lane, key) in [(1, "a"), (2, "b")] {
        turns.insert(LaneId(lane), place("q", key, 1.0));
    }
    assert_eq!(turns.divide(1, 256)[0].lane, LaneId(2));
    turns.remove(LaneId(2));
    assert_eq!(remembered(&turns), (2, 2));
    turns.insert(LaneId(2), place("q", "b", 1.0));
    assert_eq!(turns.divide(1, 256)[0].lane, LaneId(1));
}

#[test]
fn a_key_that_leaves_keeps_at_most_one_share() {
    let mut turns = Turns::default();
    turns.insert(LaneId(1), place("q", "a", 1.0));
    turns.insert(LaneId(2), place("q", "b", 1.0));
    let parts = turns.divide(1000, 256);
    assert_eq!(
        parts.iter().map(|part| part.max).collect::<Vec<_>>(),
        [Some(500), Some(500)]
    );
    turns.settle(LaneId(1), 500, 500, 1.0);
    turns.settle(LaneId(2), 500, 1, 1.0);
    turns.remove(LaneId(2));
    turns.insert(LaneId(2), place("q", "b", 1.0));
    let mut jobs: HashMap<i64, usize> = [(1, 1000), (2, 1000)].into();
    let totals = totals(&run(&mut turns, &mut jobs, 1, 20));
    assert!((10..=11).contains(&totals[&2]), "{totals:?}");
}

#[test]
fn a_claim_covers_at_most_as_many_lanes_as_fit_and_the_next_one_continues() {
    let mut turns = Turns::default();
    for lane in 0..1000 {
        turns.insert(LaneId(lane), place("q", &lane.to_string(), 1.0));
    }
    let mut seen = std::collections::HashSet::new();
    for _ in 0..4 {
        let parts = turns.divide(5000, 250);
        assert_eq!(parts.len(), 250);
        assert!(parts.iter().all(|part| part.max == Some(8)));
        seen.extend(parts.iter().map(|part| part.lane));
    }
    assert_eq!(seen.len(), 1000);
}

#[test]
fn a_tiny_share_is_served_in_its_time_and_alone_at_once() {
    let mut turns = Turns::default();
    turns.insert(LaneId(1), place("q", "a", 0.001));
    assert_eq!(
        turns.divide(5, 256),
        [Part {
            lane: LaneId(1),
            max: None
        }]
    );
    turns.insert(LaneId(2), place("q", "b", 1.0));
    let mut jobs: HashMap<i64, usize> = [(1, 1000), (2, 100_000)].into();
    let totals = totals(&run(&mut turns, &mut jobs, 100, 100));
    assert!((9..=11).contains(&totals[&1]), "{totals:?}");
}

#[test]
fn a_debt_is_paid_off_by_the_rounds_that_pass_even_if_the_key_is_away() {
    let mut turns = Turns::default();
    for (lane, key) in [(1, "expensive"), (2, "a"), (3, "b")] {
        turns.insert(LaneId(lane), place("q", key, 1.0));
    }
    // One job costs as much as ten others.
    let first = turns.divide(3, 256);
    assert_eq!(first.len(), 3);
    turns.settle(LaneId(1), 1, 1, 10.0);
    assert!((turns.credit("q", "expensive") + 9.0).abs() < 1e-9);
    turns.remove(LaneId(1));
    let others = |turns: &mut Turns<LaneId>, jobs: usize| {
        let parts = turns.divide(jobs, 256);
        assert!(parts.iter().all(|part| part.lane != LaneId(1)));
    };
    others(&mut turns, 10);
    turns.insert(LaneId(1), place("q", "expensive", 1.0));
    assert!(
        (turns.credit("q", "expensive") + 4.0).abs() < 1e-9,
        "five rounds later"
    );
    others(&mut turns, 8);
    turns.remove(LaneId(1));
    others(&mut turns, 20);
    turns.insert(LaneId(1), place("q", "expensive", 1.0));
    assert!(
        (turns.credit("q", "expensive") - 1.0).abs() < 1e-9,
        "and no more than its share"
    );
}

#[test]
fn a_claim_is_divided_by_the_cost_of_jobs() {
    let mut turns = Turns::default();
    for lane in [1, 2] {
        turns.insert(LaneId(lane), place("q", &lane.to_string(), 1.0));
    }
    turns.set_cost(LaneId(1), 3.0);
    for _ in 0..10 {
        let parts = turns.divide(40, 256);
        let max = |id| parts.iter().find(|part| part.lane == LaneId(id));
        let max = [max(1), max(2)].map(|part| part.unwrap().max.unwrap());
        assert!((9..=11).contains(&max[0]), "{max:?}");
        turns.settle(LaneId(1), max[0], max[0], 3.0);
        turns.settle(LaneId(2), max[1], max[1], 1.0);
    }
    // Turns that were not used are given back at the price at which they were taken.
    let before = turns.credit("q", "1");
    let parts = turns.divide(40, 256);
    for part in parts {
        turns.settle(part.lane, part.max.unwrap(), 0, 1.0);
    }
    let rounds = (turns.credit("q", "1") - before).round();
    assert!(rounds >= 0.0 && (turns.credit("q", "1") - before - rounds).abs() < 1e-9);
}

#[test]
fn a_lane_of_very_cheap_jobs_takes_some_turns_of_each_claim_and_has_its_share_in_the_end() {
    let mut turns = Turns::default();
    for lane in [1, 2] {
        turns.insert(LaneId(lane), place("q", &lane.to_string(), 1.0));
    }
    turns.set_cost(LaneId(1), 0.0001);
    let mut claimed: HashMap<i64, usize> = HashMap::new();
    while claimed.get(&1).copied().unwrap_or(0) < 100_000 {
        let parts = turns.divide(1000, 256);
        for Part { lane, max } in parts {
            let max = max.expect("there are two lanes");
            assert!(max <= 100, "{max} of lane {lane:?}");
            turns.settle(lane, max, max, if lane == LaneId(1) { 0.0001 } else { 1.0 });
            *claimed.entry(lane.0).or_default() += max;
        }
    }
    // One job of the other lane costs as much as 10,000 of these.
    assert!((10..=13).contains(&claimed[&2]), "{claimed:?}");
}

#[test]
fn a_lane_of_very_expensive_jobs_has_its_share_of_long_claims() {
    let mut turns = Turns::default();
    for lane in [1, 2] {
        turns.insert(LaneId(lane), place("q", &lane.to_string(), 1.0));
    }
    turns.set_cost(LaneId(1), 10_000.0);
    let mut claimed: HashMap<i64, usize> = HashMap::new();
    for _ in 0..50 {
        for Part { lane, max } in turns.divide(1000, 256) {
            let max = max.expect("there are two lanes");
            let cost = if lane == LaneId(1) { 10_000.0 } else { 1.0 };
            turns.settle(lane, max, max, cost);
            *claimed.entry(lane.0).or_default() += max;
        }
    }
    assert!((5..=6).contains(&claimed[&1]), "{claimed:?}");
}

#[test]
fn a_queue_pays_for_jobs_and_not_for_their_cost() {
    let mut turns = Turns::default();
    turns.insert(LaneId(1), place("videos", "a", 1.0));
    turns.insert(LaneId(2), place("videos", "b", 1.0));
    turns.insert(LaneId(3), place("mail", "", 1.0));
    turns.set_cost(LaneId(1), 10.0);
    turns.set_cost(LaneId(2), 10.0);
    let mut claimed: HashMap<i64, usize> = HashMap::new();
    for _ in 0..50 {
        for Part { lane, max } in turns.divide(20, 256) {
            let max = max.unwrap();
            let cost = if lane == LaneId(3) { 1.0 } else { 10.0 };
            turns.settle(lane, max, max, cost);
            *claimed.entry(lane.0).or_default() += max;
        }
    }
    assert_eq!((claimed[&1] + claimed[&2], claimed[&3]), (500, 500));
    assert!(claimed[&1].abs_diff(claimed[&2]) <= 1, "{claimed:?}");
}

#[test]
fn each_of_very_many_lanes_takes_several_turns_at_once_and_has_its_share_in_the_end() {
    let mut turns = Turns::default();
    let mut jobs = HashMap::new();
    for lane in 0..2048 {
        let share = if lane % 2 == 0 { 1.0 } else { 3.0 };
        turns.insert(LaneId(lane), place("a", &lane.to_string(), share));
        jobs.insert(lane, 1_000);
    }
    let parts = turns.divide(512, 256);
    assert!(parts.len() == 64 && parts.iter().all(|part| part.max == Some(8)));
    let parts = turns.divide(100, 256);
    assert!(
        parts.len() == 100 && parts.iter().all(|part| part.max == Some(1)),
        "a small claim"
    );
    let claimed = run(&mut turns, &mut jobs, 512, 2048 * 80 / 512);
    let totals = totals(&claimed);
    let of = |odd: i64| {
        let lanes = totals.iter().filter(move |(lane, _)| *lane % 2 == odd);
        lanes.map(|(_, jobs)| *jobs)
    };
    // 160 jobs for each pair of lanes: 40 and 120.
    assert!(
        of(0).all(|jobs| (32..=48).contains(&jobs)),
        "{:?}",
        of(0).max()
    );
    assert!(
        of(1).all(|jobs| (104..=136).contains(&jobs)),
        "{:?}",
        of(1).min()
    );
}

#[test]
fn a_claim_of_one_job_of_each_lane_covers_as_many_as_fit() {
    let mut turns = Turns::default();
    for n in 0..300 {
        turns.insert(LaneId(n), place("a", &n.to_string(), 3.0));
    }
    let parts = turns.one_each(256);
    assert!(parts.iter().all(|part| part.max == Some(1)));
    let mut covered: Vec<i64> = parts.iter().map(|part| part.lane.0).collect();
    covered.sort_unstable();
    covered.dedup();
    assert_eq!(covered.len(), 256, "each of them once");
    // A gate has closed them all.
    for id in covered {
        turns.remove(LaneId(id));
    }
    let parts = turns.one_each(256);
    assert_eq!(parts.len(), 44, "those that were left out");
    for part in parts {
        turns.settle(part.lane, 1, 0, 1.0);
        assert!(turns.credit("a", &part.lane.0.to_string()) >= 3.0);
    }
}

#[test]
fn a_turn_that_is_taken_early_is_not_taken_again() {
    let mut turns = Turns::default();
    for (lane, key) in [(1, "x"), (2, "y")] {
        turns.insert(LaneId(lane), place("a", key, 1.0));
    }
    let next = |turns: &mut Turns<LaneId>| -> Vec<(i64, Option<usize>)> {
        let parts = turns.divide(3, 256);
        parts.iter().map(|part| (part.lane.0, part.max)).collect()
    };
    turns.take(LaneId(1));
    turns.settle(LaneId(1), 1, 1, 1.0);
    assert_eq!(next(&mut turns), [(2, Some(2)), (1, Some(1))]);
    // The turn is given back: no lane is ahead.
    turns.take(LaneId(1));
    turns.settle(LaneId(1), 1, 0, 1.0);
    let both: usize = next(&mut turns).iter().filter_map(|(_, max)| *max).sum();
    assert_eq!(both, 3);
}

#[test]
fn the_first_class_is_that_of_a_lane() {
    let mut turns = Turns::default();
    assert_eq!(turns.first_class(), None);
    for (lane, class) in [(1, [2, 0]), (2, NORMAL)] {
        let place = Place {
            class,
            ..place("a", "", 1.0)
        };
        turns.insert(LaneId(lane), place);
    }
    assert_eq!(turns.first_class(), Some(NORMAL));
    turns.remove(LaneId(2));
    assert_eq!(turns.first_class(), Some([2, 0]));
}

/// Each claim also divides a class behind a busy one, although that class gets nothing.
#[test]
fn turns_that_were_given_back_do_not_delay_lanes_that_come_later() {
    let mut turns = Turns::default();
    let high = Place {
        class: [0, 0],
        ..place("a", "h", 1.0)
    };
    turns.insert(LaneId(9), high);
    for (lane, key, share) in [(1, "x", 1.0), (2, "y", 3.0)] {
        turns.insert(LaneId(lane), place("a", key, share));
    }
    for _ in 0..5 {
        let parts = turns.divide(64, 256);
        let of_later: Vec<_> = parts.iter().filter(|part| part.lane != LaneId(9)).collect();
        assert_eq!(of_later.len(), 2);
        for part in &of_later {
            turns.settle(part.lane, part.max.unwrap_or(0), 0, 1.0);
        }
        for part in &of_later {
            turns.forfeit(part.lane);
        }
    }
    turns.remove(LaneId(9));
    turns.insert(LaneId(3), place("a", "z", 1.0));
    let parts = turns.divide(10, 256);
    let mut max: Vec<_> = parts.iter().map(|part| (part.lane.0, part.max)).collect();
    max.sort_unstable();
    assert_eq!(max, [(1, Some(2)), (2, Some(6)), (3, Some(2))]);
}
