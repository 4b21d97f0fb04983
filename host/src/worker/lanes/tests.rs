//! Which lanes are claimed from, and from where on.

use std::time::SystemTime;

use super::*;
use crate::job::{Attempt, Fence, JobId, Priority};
use crate::store::JsonText;

fn lane(seq: i64, id: i64, priority: Priority) -> Lane {
    Lane {
        seq,
        id: LaneId(id),
        queue: "default".into(),
        handler: "noop".into(),
        priority,
        tags: Vec::new(),
        retired: false,
    }
}

const OURS: Serving = Serving {
    lease_ms: 1000,
    queue_place: 0,
    by_source: false,
};

fn job(lane: i64, turn: i64) -> ClaimedJob {
    ClaimedJob {
        id: JobId(turn),
        fence: Fence(1),
        lane: LaneId(lane),
        turn,
        attempt: Attempt(1),
        lost: 0,
        max_attempts: None,
        tenant: None,
        source: None,
        requested_at: SystemTime::UNIX_EPOCH,
        ready_at: None,
        claimed_at: SystemTime::UNIX_EPOCH,
        payload: JsonText("{}".into()),
        memory_bytes: None,
        grants: None,
        lease: None,
        timeout: None,
    }
}

fn order(lanes: &Lanes) -> Vec<(i64, i64)> {
    lanes
        .orders(After::Cursor)
        .iter()
        .map(|order| (order.lane.0, order.after))
        .collect()
}

#[test]
fn high_lanes_go_first_and_within_a_priority_the_one_that_has_come_least_far() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Low),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::Normal),
        lane(4, 40, Priority::High),
    ]);
    lanes.serve(|_| Some(OURS));
    lanes.advance(LaneId(20), 7);
    lanes.advance(LaneId(30), 5);
    lanes.advance(LaneId(40), 99);
    lanes.advance(LaneId(10), 1);
    assert_eq!(order(&lanes), [(40, 99), (30, 5), (20, 7), (10, 1)]);
}

#[test]
fn within_a_priority_queues_go_in_the_order_of_the_settings() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::High),
    ]);
    // The second queue is that of lane 10.
    lanes.serve(|lane| {
        Some(Serving {
            queue_place: usize::from(lane.id.0 == 10),
            ..OURS
        })
    });
    lanes.advance(LaneId(20), 7);
    let ids = |orders: &[ClaimOrder]| orders.iter().map(|it| it.lane.0).collect::<Vec<_>>();
    assert_eq!(ids(&lanes.orders(After::Cursor)), [30, 20, 10]);
    let mut behind = ids(&lanes.behind(After::Reached));
    behind.sort_unstable();
    assert_eq!(behind, [10, 20], "all but those of the first class");
    lanes.claimed(&lanes.orders(After::Cursor), &[job(20, 8)], true);
    assert!(
        lanes.behind(After::Reached).is_empty(),
        "the others have no jobs"
    );
}

#[test]
fn with_strict_queues_the_queue_counts_before_the_priority_and_what_is_promoted_stays_in_its_queue()
{
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
            queue_place: usize::from([10, 40].contains(&lane.id.0)),
            ..OURS
        })
    });
    let ids = |orders: &[ClaimOrder]| orders.iter().map(|it| it.lane.0).collect::<Vec<_>>();
    assert_eq!(ids(&lanes.orders(After::Cursor)), [20, 30, 10, 40]);
    let only = Only {
        most: 3,
        waited: Duration::from_secs(1),
    };
    let promoted = |of: &[i64]| {
        let of: Vec<_> = of.iter().map(|lane| (LaneId(*lane), only)).collect();
        let orders = lanes.promoted(&of);
        let limited = orders.iter().map(|order| order.only.is_some());
        (ids(&orders), limited.collect::<Vec<_>>())
    };
    assert_eq!(promoted(&[40, 30]), (vec![30], vec![true]));
    assert_eq!(
        promoted(&[40]),
        (vec![20, 30, 40], vec![false, false, true]),
        "not before the first queue"
    );
    assert!(promoted(&[]).0.is_empty());
}

#[test]
fn what_waits_behind_others_is_asked_for_from_where_claims_have_come_whatever_a_sweep_does() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::High),
        lane(2, 20, Priority::Low),
    ]);
    lanes.serve(|_| Some(OURS));
    let after = |lanes: &Lanes, after| lanes.behind(after)[0].after;
    assert_eq!(after(&lanes, After::Reached), i64::MIN);
    lanes.advance(LaneId(20), 7);
    lanes.restart();
    assert_eq!(after(&lanes, After::Reached), 7);
    assert_eq!(after(&lanes, After::Recent), i64::MIN, "from the start");
}

#[test]
fn a_sweep_goes_back_two_sweeps_and_a_restart_goes_back_to_the_start() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.serve(|_| Some(OURS));
    lanes.advance(LaneId(10), 100);
    lanes.rewind(i64::MAX);
    lanes.advance(LaneId(10), 200);
    lanes.rewind(i64::MAX);
    assert_eq!(
        order(&lanes),
        [(10, 200)],
        "there were no two sweeps before"
    );
    lanes.advance(LaneId(10), 300);
    lanes.rewind(i64::MAX);
    assert_eq!(order(&lanes), [(10, 100)]);
    lanes.restart();
    assert_eq!(order(&lanes), [(10, i64::MIN)]);
}

#[test]
fn a_sweep_that_had_no_two_before_goes_back_to_a_turn() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.serve(|_| Some(OURS));
    lanes.advance(LaneId(10), 100);
    lanes.rewind(60);
    assert_eq!(order(&lanes), [(10, 60)]);
    lanes.advance(LaneId(10), 100);
    lanes.rewind(i64::MIN);
    assert_eq!(order(&lanes), [(10, i64::MIN)], "no turn is known");
}

#[test]
fn after_a_restart_no_sweep_goes_forward_in_a_lane_that_still_has_jobs() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.serve(|_| Some(OURS));
    for turn in [1_000, 2_000, 3_000] {
        lanes.advance(LaneId(10), turn);
        lanes.rewind(i64::MAX);
    }
    lanes.restart();
    // A claim of jobs that were committed late; there are more of them.
    lanes.advance(LaneId(10), 50);
    lanes.rewind(i64::MAX);
    assert_eq!(order(&lanes), [(10, 50)]);
    lanes.advance(LaneId(10), 60);
    lanes.rewind(i64::MAX);
    assert_eq!(order(&lanes), [(10, 60)]);
    lanes.rewind(i64::MAX);
    assert_eq!(order(&lanes), [(10, 50)], "two sweeps ago");
    lanes.restart();
    // The restart has found nothing in it.
    lanes.rest();
    lanes.rewind(i64::MAX);
    assert_eq!(order(&lanes), [(10, 60)]);
}

#[test]
fn a_lane_that_a_sweep_has_found_empty_is_read_from_there_on_and_one_with_jobs_is_not() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
        lane(3, 30, Priority::Normal),
    ]);
    lanes.serve(|lane| (lane.id != LaneId(30)).then_some(OURS));
    lanes.rest();
    lanes.touch(LaneId(20));
    lanes.swept(Some(500));
    assert_eq!(order(&lanes), [(20, i64::MIN), (10, 500)]);
    lanes.advance(LaneId(10), 700);
    lanes.swept(Some(600));
    assert_eq!(order(&lanes)[1], (10, 700), "it never goes back by that");
    lanes.serve(|_| Some(OURS));
    assert!(
        order(&lanes).contains(&(30, i64::MIN)),
        "nobody has looked there"
    );
    lanes.restart();
    assert!(
        order(&lanes).contains(&(10, i64::MIN)),
        "the long sweep reads everything"
    );
    lanes.forget();
    lanes.rest();
    lanes.swept(None);
    assert!(
        order(&lanes).contains(&(10, i64::MIN)),
        "of another database nothing is known"
    );
}

#[test]
fn a_sweep_changes_from_where_the_lanes_are_read_and_not_their_order() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
    ]);
    lanes.serve(|_| Some(OURS));
    lanes.advance(LaneId(10), 7);
    lanes.advance(LaneId(20), 5);
    lanes.restart();
    assert_eq!(order(&lanes), [(20, i64::MIN), (10, i64::MIN)]);
    lanes.advance(LaneId(20), 6);
    lanes.rewind(i64::MAX);
    assert_eq!(order(&lanes), [(20, 6), (10, i64::MIN)]);
    lanes.advance(LaneId(20), 8);
    assert_eq!(order(&lanes), [(10, i64::MIN), (20, 8)]);
}

#[test]
fn the_same_lane_catalogued_twice_is_one_lane() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 10, Priority::Normal),
    ]);
    lanes.serve(|_| Some(OURS));
    assert_eq!(order(&lanes), [(10, i64::MIN)]);
    assert_eq!(lanes.read_after(), 2 - CATALOG_WINDOW);
}

#[test]
fn where_jobs_are_being_committed_now_the_cursor_lags_a_moment_behind() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.serve(|_| Some(OURS));
    let recent = |lanes: &Lanes| lanes.orders(After::Recent)[0].after;
    for (turn, before) in [(100, i64::MIN), (200, i64::MIN), (300, 100), (400, 200)] {
        lanes.advance(LaneId(10), turn);
        assert_eq!(recent(&lanes), before, "at turn {turn}");
        assert_eq!(lanes.idle().len(), 0, "it has jobs");
        assert_eq!(order(&lanes), [(10, turn)]);
        lanes.look_back();
    }
    lanes.restart();
    assert_eq!(recent(&lanes), i64::MIN);
    lanes.swept(None);
    assert_eq!(recent(&lanes), 300, "what there was has been found");
    lanes.forget();
    lanes.swept(None);
    assert_eq!(recent(&lanes), i64::MIN);
}

#[test]
fn the_rows_of_the_catalog_that_were_read_are_counted_from_the_place_where_it_is_read_next() {
    let mut lanes = Lanes::default();
    let low = |seqs: std::ops::RangeInclusive<i64>| seqs.map(|n| lane(n, n, Priority::Low));
    assert!(lanes.learn(low(1..=10).collect()).new);
    assert_eq!(
        (lanes.read_after(), lanes.read_rows()),
        (10 - CATALOG_WINDOW, 10)
    );
    let end = CATALOG_WINDOW + 5;
    let again = low(1..=10).chain([lane(end, 1, Priority::Low)]);
    let news = lanes.learn(again.collect());
    assert!(!news.new && !news.changed, "known");
    assert_eq!((lanes.read_after(), lanes.read_rows()), (5, 6));
    lanes.forget_catalog();
    assert_eq!(
        (lanes.read_after(), lanes.read_rows()),
        (-CATALOG_WINDOW, 0)
    );
    assert!(
        lanes.knows(LaneId(10)),
        "only how far it was read is forgotten"
    );
}

#[test]
fn a_lane_that_the_whole_catalog_has_no_more_is_looked_at_no_more() {
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
    lanes.serve(|_| Some(OURS));
    // What stands before the window is not read, and says nothing of its lane.
    let news = lanes.learn(vec![lane(end, end, Priority::Low)]);
    assert!(!news.changed && lanes.knows(LaneId(1)));
    lanes.forget_catalog();
    // The second is gone, the third retired, the fourth retired and catalogued anew.
    let read = vec![
        lane(1, 1, Priority::Low),
        retired(3, 3),
        retired(4, 4),
        lane(end, end, Priority::Low),
        lane(end + 1, 4, Priority::Low),
    ];
    let rows = i64::try_from(read.len()).unwrap();
    let news = lanes.learn(read);
    assert!(news.changed && !news.new);
    lanes.serve(|_| Some(OURS));
    let mut ids: Vec<i64> = order(&lanes).iter().map(|(id, _)| *id).collect();
    ids.sort_unstable();
    assert_eq!(ids, [1, 4, end]);
    // Those of the window, the retired ones too: the peek counts them all.
    assert_eq!((rows, lanes.read_rows()), (5, 2));
}

#[test]
fn a_claim_is_good_for_the_lease_that_its_lane_was_served_with() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 20, Priority::Normal),
        lane(2, 10, Priority::Low),
    ]);
    lanes.serve(|lane| {
        (lane.id.0 == 20).then_some(Serving {
            lease_ms: 3000,
            ..OURS
        })
    });
    let lease = lanes.get(LaneId(20)).map(|(_, lease)| lease);
    assert_eq!(lease, Some(Duration::from_secs(3)));
    assert!(lanes.get(LaneId(10)).is_none(), "it is not served");
}

/// More lanes than a claim looks at, low ones, of which none has jobs; their number.
fn many_idle() -> (Lanes, i64) {
    let mut lanes = Lanes::default();
    let many = i64::try_from(LANES_PER_CLAIM).unwrap() + 10;
    lanes.learn((1..=many).map(|n| lane(n, n, Priority::Low)).collect());
    lanes.serve(|_| Some(OURS));
    while let orders @ [_, ..] = &*lanes.orders(After::Cursor) {
        lanes.claimed(orders, &[], true);
    }
    (lanes, many)
}

#[test]
fn among_more_lanes_than_a_claim_looks_at_it_goes_to_those_that_have_jobs() {
    let (mut lanes, many) = many_idle();
    assert_eq!(lanes.idle().len(), usize::try_from(many).unwrap());
    assert!(lanes.touch(LaneId(7)));
    assert!(!lanes.touch(LaneId(many + 1)), "it is not known");
    lanes.learn(vec![lane(many + 1, many + 1, Priority::High)]);
    lanes.serve(|_| Some(OURS));
    let ids = |lanes: &Lanes| order(lanes).iter().map(|(id, _)| *id).collect::<Vec<_>>();
    assert_eq!(
        ids(&lanes),
        [many + 1, 7],
        "a new lane has jobs, and priority holds"
    );
    let orders = lanes.orders(After::Cursor);
    lanes.claimed(&orders, &[job(7, 70)], true);
    assert_eq!(order(&lanes), [(7, 70)], "the other one gave nothing");
}

#[test]
fn a_claim_that_was_filled_says_nothing_of_the_lanes_behind() {
    let (mut lanes, _) = many_idle();
    for id in [1, 2, 3] {
        lanes.touch(LaneId(id));
    }
    let orders = lanes.orders(After::Cursor);
    lanes.claimed(&orders, &[job(2, 5)], false);
    assert_eq!(order(&lanes), [(3, i64::MIN), (2, 5)]);
}

#[test]
fn of_a_lane_that_is_served_by_source_nothing_else_is_claimed() {
    let mut lanes = Lanes::default();
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Low),
        lane(3, 30, Priority::High),
    ]);
    let by_source = Serving {
        by_source: true,
        ..OURS
    };
    lanes.serve(|lane| {
        let is_ours = lane.id.0 == 10;
        Some(if is_ours { OURS } else { by_source })
    });
    assert_eq!(order(&lanes), [(10, i64::MIN)]);
    assert_eq!(lanes.all().len(), 1);
    for _ in 0..3 {
        assert_eq!(lanes.by_source(), [LaneId(30), LaneId(20)], "by priority");
    }
    assert_eq!(lanes.all_by_source().len(), 2);
    assert!(lanes.serves(LaneId(20)) && lanes.touch(LaneId(20)));
    assert_eq!(order(&lanes), [(10, i64::MIN)]);
    assert!(lanes.get(LaneId(30)).is_some());
    // The handler comes.
    lanes.serve(|_| Some(OURS));
    assert!(lanes.by_source().is_empty());
    assert_eq!(order(&lanes).len(), 3);
}

#[test]
fn of_more_lanes_that_are_served_by_source_than_fit_a_claim_each_has_its_turn() {
    let (mut lanes, many) = many_idle();
    lanes.serve(|_| {
        Some(Serving {
            by_source: true,
            ..OURS
        })
    });
    let by_source = Serving {
        by_source: true,
        ..OURS
    };
    let mut asked = lanes.by_source();
    assert_eq!(asked.len(), LANES_PER_CLAIM);
    // A lane that comes meanwhile does not start all anew.
    lanes.learn(vec![lane(many + 1, many + 1, Priority::Low)]);
    lanes.serve(|_| Some(by_source));
    let next = lanes.by_source();
    assert!(next.contains(&LaneId(many + 1)), "it has jobs");
    asked.extend(next);
    let asked: HashSet<LaneId> = asked.into_iter().collect();
    assert_eq!(asked.len(), usize::try_from(many + 1).unwrap());
    // One that somebody names is asked next.
    let waits = *lanes.by_source.back().unwrap();
    assert!(lanes.touch(waits));
    assert!(lanes.by_source().contains(&waits));
}

#[test]
fn of_lanes_of_one_class_that_are_served_by_source_another_one_goes_first_each_time() {
    let mut lanes = Lanes::default();
    lanes.learn((1..=3).map(|n| lane(n, n, Priority::Low)).collect());
    lanes.serve(|_| {
        Some(Serving {
            by_source: true,
            ..OURS
        })
    });
    let first: HashSet<LaneId> = (0..3).map(|_| lanes.by_source()[0]).collect();
    assert_eq!(first.len(), 3);
}
