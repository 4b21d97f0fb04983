//! Tests of the choice of lanes.

mod closed;
mod cursors;
mod elsewhere;
mod several;

use std::collections::BTreeMap;
use std::time::SystemTime;

use super::orders::{MayHaveMore, PROBES_PER_CLAIM};
use super::*;
use crate::job::Priority;
use crate::sandbox::BootTime;
use crate::store::{CATALOG_WINDOW, ClaimedJob, ClosedGate, ClosedLane, OverdueFilter, Peek};
use crate::worker::claim;

fn lane(seq: i64, id: i64, priority: Priority) -> Lane {
    Lane {
        seq,
        id: LaneId(id),
        queue: "default".into(),
        handler: "noop".into(),
        priority,
        tags: Vec::new(),
        values: BTreeMap::new(),
        retired: false,
    }
}

fn none_paused() -> HashSet<String> {
    HashSet::new()
}

/// The queue of all lanes of these tests.
fn paused() -> HashSet<String> {
    ["default".to_owned()].into()
}

/// The lanes that a sweep finds empty, given the lanes with jobs and the paused queues.
fn found_empty(lanes: &Lanes, ready: &[i64], paused: HashSet<String>) -> Vec<LaneId> {
    let peek = Peek {
        ready: ready.iter().copied().map(LaneId).collect(),
        catalog_changed: false,
        orphans: false,
        due: false,
        next_due: None,
        looked_at: SystemTime::UNIX_EPOCH,
        turn: 0,
        paused,
        writers: None,
        releases: false,
        deadlines: false,
    };
    lanes.empty(&lanes.all(), &peek)
}

const SERVED: Serving = Serving {
    lease_ms: 1000,
    queue_index: 0,
    by_source: false,
    orphans_only: false,
    max_at_once: None,
};

/// These lanes, all of which are served.
fn serving(lanes: Vec<Lane>) -> Lanes {
    let mut serving = Lanes::default();
    serving.learn(lanes);
    serving.serve(|_| Some(SERVED));
    serving
}

fn job(lane: i64, turn: i64) -> ClaimedJob {
    ClaimedJob {
        lane: LaneId(lane),
        ..claim::tests::job(turn)
    }
}

/// Settings with which one job of each key of the default queue runs at a time.
fn one_at_a_time() -> HashMap<String, crate::job::FairShare> {
    let share = crate::job::FairShare {
        key: crate::job::FairKey::Tenant,
        quantum: 1,
        weights: HashMap::new(),
        default_weight: 1.0,
        starvation: None,
        max_in_flight: Some(1),
        charges_cpu: false,
    };
    [("default".to_owned(), share)].into()
}

/// The wanted jobs of a claim.
const WANTED: usize = 12;

fn order(lanes: &mut Lanes) -> Vec<(i64, i64)> {
    lanes
        .orders(After::Cursor, WANTED)
        .iter()
        .map(|order| (order.lane.0, order.after))
        .collect()
}

/// The lane and the maximum of each order.
fn parts(orders: &[ClaimOrder]) -> Vec<(i64, Option<usize>)> {
    let parts = orders.iter().map(|order| (order.lane.0, order.max));
    parts.collect()
}

#[test]
fn lanes_go_by_priority_and_those_of_one_priority_share_a_claim() {
    let mut lanes = serving(vec![
        lane(1, 10, Priority::Low),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::Normal),
        lane(4, 40, Priority::High),
    ]);
    let orders = lanes.orders(After::Cursor, WANTED);
    let shared = [(40, None), (20, Some(6)), (30, Some(6)), (10, None)];
    assert_eq!(parts(&orders), shared);
    // The high lane is empty, and lane 20 has only two jobs.
    let jobs: Vec<ClaimedJob> = [20, 20, 30, 30, 30, 30, 30, 30]
        .map(|lane| job(lane, lane))
        .into();
    assert!(
        lanes.claimed(&orders, &jobs, &[], false).used_up,
        "lane 30 may have more"
    );
    let orders = lanes.orders(After::Cursor, WANTED);
    let expected = [(40, None), (20, Some(1)), (30, None), (10, None)];
    assert_eq!(parts(&orders), expected, "lane 20 may have a new job");
    let jobs: Vec<ClaimedJob> = [20, 30, 30].map(|lane| job(lane, lane)).into();
    assert!(
        lanes.claimed(&orders, &jobs, &[], false).used_up,
        "lane 20 has used up its share"
    );
    assert_eq!(lanes.orders(After::Cursor, WANTED)[1].max, Some(6));
}

#[test]
fn after_a_claim_that_failed_the_same_lanes_go_first_in_the_same_order() {
    let mut lanes = Lanes::default();
    lanes.learn((1..=5).map(|n| lane(n, n, Priority::Normal)).collect());
    lanes.serve(|_| Some(SERVED));
    let orders = lanes.orders(After::Cursor, 3);
    assert_eq!(orders.len(), 3);
    lanes.give_up_turns(&orders);
    assert_eq!(lanes.orders(After::Cursor, 3), orders);
}

#[test]
fn a_new_lane_does_not_wait_for_the_turns_of_a_claim_that_failed() {
    let lanes_to = |end| (1..=end).map(|n| lane(n, n * 10, Priority::Normal));
    let mut lanes = serving(lanes_to(2).collect());
    let orders = lanes.orders(After::Cursor, 100);
    assert_eq!(orders.len(), 2);
    lanes.give_up_turns(&orders);
    lanes.learn(lanes_to(3).collect());
    lanes.serve_new(|_| Some(SERVED));
    let mut orders = lanes.orders(After::Cursor, 30);
    orders.sort_by_key(|order| order.lane);
    let shared = [(10, Some(10)), (20, Some(10)), (30, Some(10))];
    assert_eq!(parts(&orders), shared);
}

#[test]
fn a_lane_that_is_paused_does_not_collect_the_turns_of_others() {
    let mut lanes = serving(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
    ]);
    for _ in 0..10 {
        let mut orders = lanes.orders(After::Cursor, 64);
        let paused = orders.extract_if(.., |order| order.lane == LaneId(10));
        let paused: Vec<ClaimOrder> = paused.collect();
        lanes.leave_out(&paused);
        assert!(orders[0].max >= Some(31), "{orders:?}");
    }
}

/// Otherwise they would get the first turns of each claim until their pauses end.
#[test]
fn paused_lanes_are_closed_so_that_a_claim_covers_others() {
    let mut lanes = serving((1..=4).map(|n| lane(n, n, Priority::Normal)).collect());
    let ids = |orders: &[ClaimOrder]| -> HashSet<LaneId> {
        orders.iter().map(|order| order.lane).collect()
    };
    let (now, pause) = (BootTime::now(), Duration::from_secs(10));
    let paused = lanes.orders(After::Cursor, 2);
    assert_eq!(paused.len(), 2);
    lanes.leave_out(&paused);
    for order in &paused {
        lanes.close_until(order.lane, now.plus(pause));
    }
    assert!(lanes.are_only_some(&[]));
    let others = lanes.orders(After::Cursor, 2);
    assert_eq!(others.len(), 2);
    assert!(ids(&others).is_disjoint(&ids(&paused)));
    assert!(!lanes.are_only_some(&others));
    // Their cursors stay, like those of lanes that gates have closed.
    assert!(lanes.has_closed() && !lanes.wait_for_ends());
    assert!(!lanes.mark_active(paused[0].lane), "its jobs wait");
    assert!(!lanes.open_due(now));
    assert_eq!(lanes.next_opening(), Some(now.plus(pause)));
    assert!(lanes.open_due(now.plus(pause)));
    assert!(paused.iter().all(|order| lanes.has_jobs(order.lane)));
}

#[test]
fn a_claim_that_lanes_share_leaves_later_classes_alone() {
    let mut lanes = serving(vec![
        lane(1, 10, Priority::Low),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::Normal),
        lane(4, 40, Priority::High),
    ]);
    let mut orders = lanes.orders(After::Cursor, WANTED);
    assert!(lanes.leave_later_classes(&mut orders), "lane 10 waits");
    let shared = [(40, None), (20, Some(6)), (30, Some(6))];
    assert_eq!(parts(&orders), shared);
    // One lane of the class has the turn in a claim of one job, but no job. The other lane goes ahead of later classes.
    let mut orders = lanes.orders(After::Cursor, 1);
    assert!(
        lanes.leave_later_classes(&mut orders),
        "lanes 10 and 30 wait"
    );
    let first = [(40, None), (20, Some(1))];
    assert_eq!(parts(&orders), first);
    lanes.claimed(&orders, &[], &[], false);
    // The last lane of a class is read without a limit.
    let mut orders = lanes.orders(After::Cursor, 1);
    assert!(!lanes.leave_later_classes(&mut orders));
    let last = [(40, None), (20, Some(1)), (30, None), (10, None)];
    assert_eq!(parts(&orders), last);
}

#[test]
fn lanes_without_known_jobs_take_turns_being_probed() {
    let mut lanes = serving((1..=100).map(|n| lane(n, n, Priority::Low)).collect());
    lanes.mark_all_empty();
    lanes.mark_active(LaneId(50));
    let mut probed = HashSet::new();
    for _ in 0..4 {
        let orders = lanes.orders(After::Cursor, WANTED);
        assert_eq!(orders.len(), 100, "all are read if the claim is not filled");
        let (probes, rest) = orders.split_at(PROBES_PER_CLAIM);
        assert!(probes.iter().all(|order| order.max == Some(1)));
        assert_eq!(parts(&rest[..1]), [(50, None)]);
        probed.extend(probes.iter().map(|order| order.lane));
    }
    assert_eq!(probed.len(), 99);
}

#[test]
fn lanes_of_one_priority_go_by_the_order_of_queues_in_the_settings() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::High),
    ]);
    // The second queue is that of lane 10.
    lanes.serve(|lane| {
        Some(Serving {
            queue_index: usize::from(lane.id.0 == 10),
            ..SERVED
        })
    });
    lanes.advance(LaneId(20), 7);
    let ids = |orders: &[ClaimOrder]| {
        let ids = orders.iter().map(|order| order.lane.0);
        ids.collect::<Vec<_>>()
    };
    let orders = lanes.orders(After::Cursor, WANTED);
    assert_eq!(ids(&orders), [30, 20, 10]);
    let mut behind = ids(&lanes.behind(After::Reached));
    behind.sort_unstable();
    assert_eq!(behind, [10, 20], "all except the first class");
    lanes.claimed(&orders, &[job(20, 8)], &[], false);
    assert!(
        lanes.behind(After::Reached).is_empty(),
        "the other lanes have no jobs"
    );
}

#[test]
fn strict_order_puts_the_queue_before_the_priority_also_for_overdue_jobs() {
    let mut lanes = Lanes::new(QueueOrder::Strict);
    lanes.learn(vec![
        lane(1, 10, Priority::High),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::Low),
        lane(4, 40, Priority::Low),
    ]);
    // The second queue is that of lanes 10 and 40.
    lanes.serve(|lane| {
        Some(Serving {
            queue_index: usize::from([10, 40].contains(&lane.id.0)),
            ..SERVED
        })
    });
    let ids = |orders: &[ClaimOrder]| {
        let ids = orders.iter().map(|order| order.lane.0);
        ids.collect::<Vec<_>>()
    };
    assert_eq!(ids(&lanes.orders(After::Cursor, WANTED)), [20, 30, 10, 40]);
    let filter = OverdueFilter {
        max: 3,
        waited: Duration::from_secs(1),
    };
    let mut promoted = |of: &[i64]| {
        let of: Vec<_> = of.iter().map(|lane| (LaneId(*lane), filter)).collect();
        let orders = lanes.promoted(&of, WANTED);
        let limited = orders.iter().map(|order| order.overdue.is_some());
        (ids(&orders), limited.collect::<Vec<_>>())
    };
    assert_eq!(promoted(&[40, 30]), (vec![30], vec![true]));
    assert_eq!(
        promoted(&[40]),
        (vec![20, 30, 40], vec![false, false, true]),
        "not before the first queue"
    );
    assert!(promoted(&[]).0.is_empty());
    // A gate is closed, or the worker's login may not claim from lane 30.
    lanes.close_until(LaneId(30), BootTime::now().plus(Duration::from_secs(30)));
    let orders = lanes.promoted(&[(LaneId(30), filter), (LaneId(40), filter)], WANTED);
    assert_eq!(ids(&orders), [20, 40], "the second queue does not wait");
}

#[test]
fn a_lane_that_is_catalogued_twice_is_one_lane() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 10, Priority::Normal),
    ]);
    lanes.serve(|_| Some(SERVED));
    assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
    assert_eq!(lanes.read_after(), 2 - CATALOG_WINDOW);
}

#[test]
fn the_known_positions_of_the_catalog_are_summed_from_that_of_the_next_reading() {
    let mut lanes = Lanes::default();
    let low = |seqs: std::ops::RangeInclusive<i64>| seqs.map(|n| lane(n, n, Priority::Low));
    assert!(lanes.learn(low(1..=10).collect()).new);
    assert_eq!(
        (lanes.read_after(), lanes.read_sum()),
        (10 - CATALOG_WINDOW, 55)
    );
    let end = CATALOG_WINDOW + 5;
    let again = low(1..=10).chain([lane(end, 1, Priority::Low)]);
    let change = lanes.learn(again.collect());
    assert!(!change.new && !change.removed, "known");
    assert_eq!(
        (lanes.read_after(), lanes.read_sum()),
        (5, 6 + 7 + 8 + 9 + 10 + end)
    );
    // A row that has moved to the end.
    lanes.learn(vec![
        lane(end, 1, Priority::Low),
        lane(end + 1, 10, Priority::Low),
    ]);
    assert_eq!(lanes.read_sum(), end + end + 1);
    lanes.forget_catalog();
    assert_eq!((lanes.read_after(), lanes.read_sum()), (-CATALOG_WINDOW, 0));
    assert!(lanes.knows(LaneId(10)), "only the position is forgotten");
}

#[test]
fn a_lane_that_is_missing_from_the_whole_catalog_is_forgotten() {
    let mut lanes = Lanes::default();
    let end = CATALOG_WINDOW + 5;
    let retired = |seq, id| Lane {
        retired: true,
        ..lane(seq, id, Priority::Low)
    };
    lanes.learn(
        (1..=4)
            .chain([end])
            .map(|n| lane(n, n, Priority::Low))
            .collect(),
    );
    lanes.serve(|_| Some(SERVED));
    // Rows before the window are not read, so their lanes stay.
    let change = lanes.learn(vec![lane(end, end, Priority::Low)]);
    assert!(!change.removed && lanes.knows(LaneId(1)));
    lanes.forget_catalog();
    // Lane 2 was removed, lane 3 is retired, lane 4 is retired and catalogued again.
    let read = vec![
        lane(1, 1, Priority::Low),
        retired(3, 3),
        retired(4, 4),
        lane(end, end, Priority::Low),
        lane(end + 1, 4, Priority::Low),
    ];
    let change = lanes.learn(read);
    assert!(change.removed && !change.new);
    lanes.serve(|_| Some(SERVED));
    let mut ids: Vec<i64> = order(&mut lanes).iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 4, end]);
    // The rows in the window, including retired ones, as the peek sums them.
    assert_eq!(lanes.read_sum(), end + end + 1);
}

#[test]
fn a_claim_has_the_lease_with_which_its_lane_is_served() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 20, Priority::Normal),
        lane(2, 10, Priority::Low),
    ]);
    lanes.serve(|lane| {
        (lane.id.0 == 20).then_some(Serving {
            lease_ms: 3000,
            ..SERVED
        })
    });
    let lease = lanes.get(LaneId(20)).map(|served| served.lease);
    assert_eq!(lease, Some(Duration::from_secs(3)));
    assert!(lanes.get(LaneId(10)).is_none(), "it is not served");
}

/// More lanes than fit into one claim, of low priority and without jobs; and their number.
fn many_idle() -> (Lanes, i64) {
    let mut lanes = Lanes::default();
    let many = i64::try_from(LANES_PER_CLAIM).unwrap() + 10;
    lanes.learn((1..=many).map(|n| lane(n, n, Priority::Low)).collect());
    lanes.serve(|_| Some(SERVED));
    lanes.mark_all_empty();
    (lanes, many)
}

#[test]
fn if_there_are_more_lanes_than_fit_a_claim_it_covers_those_with_jobs() {
    let (mut lanes, many) = many_idle();
    assert_eq!(lanes.idle().len(), usize::try_from(many).unwrap());
    assert!(lanes.mark_active(LaneId(7)));
    assert!(!lanes.mark_active(LaneId(many + 1)), "it is not known");
    lanes.learn(vec![lane(many + 1, many + 1, Priority::High)]);
    lanes.serve(|_| Some(SERVED));
    let orders = lanes.orders(After::Cursor, WANTED);
    let expected = [(many + 1, None), (7, None)];
    assert_eq!(
        parts(&orders),
        expected,
        "a new lane has jobs, and priority holds"
    );
    lanes.claimed(&orders, &[job(7, 70)], &[], false);
    assert_eq!(order(&mut lanes), [(7, 70)], "the other lane is empty");
}

#[test]
fn a_filled_claim_does_not_mark_later_lanes_as_empty() {
    let (mut lanes, _) = many_idle();
    for id in [1, 2, 3] {
        lanes.mark_active(LaneId(id));
    }
    let orders = lanes.orders(After::Cursor, WANTED);
    assert_eq!(parts(&orders), [(3, Some(4)), (2, Some(4)), (1, Some(4))]);
    let jobs: Vec<ClaimedJob> = (5..9).map(|turn| job(2, turn)).collect();
    assert!(!lanes.claimed(&orders, &jobs, &[], true).used_up);
    assert_eq!(
        order(&mut lanes),
        [(1, i64::MIN), (2, 8)],
        "lane 3 was read, and is empty"
    );
}

#[test]
fn a_lane_that_is_served_by_source_is_left_out_of_other_claims() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Low),
        lane(3, 30, Priority::High),
    ]);
    let by_source = Serving {
        by_source: true,
        ..SERVED
    };
    lanes.serve(|lane| {
        let has_handler = lane.id.0 == 10;
        Some(if has_handler { SERVED } else { by_source })
    });
    assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
    assert_eq!(lanes.all().len(), 1);
    for _ in 0..3 {
        assert_eq!(
            lanes.by_source(LANES_PER_CLAIM),
            [LaneId(30), LaneId(20)],
            "by priority"
        );
    }
    assert_eq!(lanes.adoptable(true).len(), 2);
    assert!(lanes.serves(LaneId(20)) && lanes.mark_active(LaneId(20)));
    assert_eq!(order(&mut lanes), [(10, i64::MIN)]);
    assert!(lanes.get(LaneId(30)).is_some());
    // The handler is loaded.
    lanes.serve(|_| Some(SERVED));
    assert!(lanes.by_source(LANES_PER_CLAIM).is_empty());
    assert_eq!(order(&mut lanes).len(), 3);
}

#[test]
fn lanes_served_by_source_take_turns_if_they_do_not_fit_one_claim() {
    let (mut lanes, many) = many_idle();
    lanes.serve(|_| {
        Some(Serving {
            by_source: true,
            ..SERVED
        })
    });
    let by_source = Serving {
        by_source: true,
        ..SERVED
    };
    let mut claimed = lanes.by_source(LANES_PER_CLAIM);
    assert_eq!(claimed.len(), LANES_PER_CLAIM);
    // A new lane does not reset the rotation.
    lanes.learn(vec![lane(many + 1, many + 1, Priority::Low)]);
    lanes.serve(|_| Some(by_source));
    let next = lanes.by_source(LANES_PER_CLAIM);
    assert!(next.contains(&LaneId(many + 1)), "it has jobs");
    claimed.extend(next);
    let claimed: HashSet<LaneId> = claimed.into_iter().collect();
    assert_eq!(claimed.len(), usize::try_from(many + 1).unwrap());
    // A lane that a notification names is next.
    let last = *lanes.by_source.back().unwrap();
    assert!(lanes.mark_active(last));
    assert!(lanes.by_source(LANES_PER_CLAIM).contains(&last));
}

#[test]
fn lanes_of_one_class_served_by_source_take_turns_going_first() {
    let mut lanes = Lanes::default();
    lanes.learn((1..=3).map(|n| lane(n, n, Priority::Low)).collect());
    lanes.serve(|_| {
        Some(Serving {
            by_source: true,
            ..SERVED
        })
    });
    let first: HashSet<LaneId> = (0..3)
        .map(|_| lanes.by_source(LANES_PER_CLAIM)[0])
        .collect();
    assert_eq!(first.len(), 3);
    // Only two of them fit.
    let of_two: HashSet<LaneId> = (0..2).flat_map(|_| lanes.by_source(2)).collect();
    assert_eq!(of_two.len(), 3);
}

/// The catalog has many more lanes than this worker serves.
#[test]
fn only_lanes_that_are_served_now_are_in_claims_and_peeks() {
    let catalog = || (1..=6).map(|n| lane(n, n, Priority::Normal)).collect();
    let mut lanes = Lanes::default();
    lanes.learn(catalog());
    let some = |first: i64| move |lane: &Lane| (lane.id.0 >= first).then_some(SERVED);
    let read = |lanes: &mut Lanes| {
        lanes.mark_all_empty();
        let claimed = lanes.orders(After::Cursor, 10);
        let read = [lanes.all(), lanes.idle(), claimed];
        read.map(|orders| {
            let mut ids: Vec<i64> = orders.iter().map(|order| order.lane.0).collect();
            ids.sort_unstable();
            ids
        })
    };
    lanes.serve(some(3));
    assert_eq!(read(&mut lanes), [[3, 4, 5, 6]; 3]);
    lanes.serve(some(5));
    assert_eq!(read(&mut lanes), [[5, 6]; 3]);
    // Lane 6 leaves the catalog, and comes back.
    lanes.forget_catalog();
    lanes.learn((1..=5).map(|n| lane(n, n, Priority::Normal)).collect());
    assert_eq!(read(&mut lanes), [[5]; 3]);
    lanes.forget_catalog();
    lanes.learn(catalog());
    assert_eq!(read(&mut lanes), [[5]; 3], "it was not chosen yet");
    lanes.serve_new(some(1));
    assert_eq!(read(&mut lanes), [[5, 6]; 3]);
    assert!(lanes.fit_one_claim());
}
