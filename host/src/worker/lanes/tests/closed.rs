//! Lanes that gates have closed.

use super::*;

/// A lane of this tenant.
pub(super) fn of_tenant(seq: i64, id: i64, tenant: &str) -> Lane {
    Lane {
        values: [("tenant".to_owned(), tenant.to_owned())].into(),
        ..lane(seq, id, Priority::Normal)
    }
}

/// A lane that these gates have closed: for a time, or until an end.
pub(super) fn closed_by(id: i64, gates: &[(&str, Option<Duration>)]) -> ClosedLane {
    let gate = |(name, wait): &(&str, Option<Duration>)| ClosedGate {
        name: (*name).into(),
        wait: *wait,
    };
    ClosedLane {
        lane: LaneId(id),
        by: gates.iter().map(gate).collect(),
    }
}

fn until_end(id: i64) -> ClosedLane {
    closed_by(id, &[("queue default", None), ("all", None)])
}

/// A lane that is closed by the gate on starts.
fn for_seconds(id: i64, seconds: u64) -> ClosedLane {
    closed_by(id, &[("all", Some(Duration::from_secs(seconds)))])
}

/// The lanes of the next claim.
fn next(lanes: &mut Lanes) -> Vec<i64> {
    let orders = lanes.orders(After::Cursor, WANTED);
    let mut ids: Vec<i64> = orders.iter().map(|order| order.lane.0).collect();
    ids.sort_unstable();
    ids
}

#[test]
fn claims_leave_out_lanes_at_their_limit_until_a_job_of_their_key_has_ended() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn(vec![
        of_tenant(1, 10, "a"),
        of_tenant(2, 20, "a"),
        of_tenant(3, 30, "b"),
    ]);
    lanes.serve(|_| Some(SERVED));
    let orders = lanes.orders(After::Cursor, WANTED);
    let closed = [until_end(10), until_end(20), until_end(30)];
    lanes.claimed(&orders, &[job(10, 100), job(30, 101)], &closed, false);
    assert!(next(&mut lanes).is_empty());
    assert!(lanes.wait_for_ends());
    assert!(!lanes.mark_active(LaneId(20)));
    lanes.wake(LaneId(20), true);
    assert_eq!(lanes.woken().count(), 0);
    assert!(next(&mut lanes).is_empty(), "new jobs wait as well");
    assert_eq!(lanes.all().len(), 3, "orphans do not");
    assert!(lanes.free(LaneId(30)));
    assert_eq!(next(&mut lanes), [30]);
    assert!(!lanes.free(LaneId(30)), "it is open");
    // The lane that was closed first goes first.
    for expected in [10, 20, 10, 20] {
        assert!(lanes.free(LaneId(10)));
        lanes.mark_all_empty();
        let order = lanes
            .all()
            .into_iter()
            .find(|order| order.lane.0 == expected);
        let other = until_end(30 - expected);
        lanes.claimed(
            &[order.unwrap()],
            &[job(expected, 200)],
            &[other, until_end(expected)],
            false,
        );
    }
    assert!(!lanes.free(LaneId(40)), "unknown");
}

#[test]
fn if_a_lane_behind_a_limit_had_room_the_others_open_too() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn((1..30).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    let closed: Vec<ClosedLane> = (1..30).map(until_end).collect();
    let orders = lanes.orders(After::Cursor, WANTED);
    lanes.claimed(&orders, &[], &closed, false);
    assert!(next(&mut lanes).is_empty());
    // The sweep opens some lanes: jobs of other workers may have ended.
    lanes.open_some();
    assert_eq!(next(&mut lanes), [1, 2, 3, 4, 5, 6, 7, 8]);
    let orders: Vec<ClaimOrder> = lanes.orders(After::Cursor, WANTED);
    let order = orders.into_iter().find(|order| order.lane == LaneId(1));
    let left = lanes.claimed(&[order.unwrap()], &[job(1, 100)], &[], false);
    assert!(left.opened, "there may be more");
    assert_eq!(open(&lanes), (1..=16).collect::<Vec<_>>());
}

/// The lanes that are known to have jobs, by id.
pub(super) fn open(lanes: &Lanes) -> Vec<i64> {
    let mut open: Vec<i64> = lanes.with_jobs().iter().map(|order| order.lane.0).collect();
    open.sort_unstable();
    open
}

/// The jobs of the other lanes were cancelled, or run elsewhere.
#[test]
fn if_the_first_lanes_of_a_limit_have_no_more_jobs_the_next_ones_follow_at_once() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn((1..30).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    let closed: Vec<ClosedLane> = (1..30).map(until_end).collect();
    let orders = lanes.orders(After::Cursor, WANTED);
    lanes.claimed(&orders, &[], &closed, false);
    assert!(lanes.free(LaneId(1)));
    assert_eq!(open(&lanes), [1, 2]);
    // Eight lanes for each empty one: a thousand empty lanes cost a few claims.
    for next in [3..=18, 19..=29] {
        let orders = lanes.with_jobs();
        assert!(lanes.claimed(&orders, &[], &[], false).opened);
        assert_eq!(open(&lanes), next.collect::<Vec<_>>());
    }
    let orders = lanes.with_jobs();
    assert_eq!(
        lanes.claimed(&orders, &[], &[], false),
        MayHaveMore::default(),
        "no more lanes wait"
    );
}

/// A look that reads only as many lanes as the number of jobs it wants takes a long time to get past a large number of
/// closed ones.
#[test]
fn after_a_claim_of_closed_lanes_the_next_one_covers_as_many_as_fit() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn((1..=300).map(|n| of_tenant(n, n, &n.to_string())).collect());
    lanes.serve(|_| Some(SERVED));
    let closed = |orders: &[ClaimOrder]| -> Vec<ClosedLane> {
        orders.iter().map(|it| until_end(it.lane.0)).collect()
    };
    let orders = lanes.orders(After::Cursor, WANTED);
    assert_eq!(orders.len(), WANTED);
    lanes.claimed(&orders, &[], &closed(&orders), false);
    let orders = lanes.orders_of_many(After::Cursor);
    assert_eq!(orders.len(), LANES_PER_CLAIM);
    assert!(orders.iter().all(|order| order.max == Some(1)));
    lanes.claimed(&orders, &[], &closed(&orders), false);
    assert_eq!(open(&lanes).len(), 300 - WANTED - LANES_PER_CLAIM);
}

/// Otherwise the same ones would be tried after each sweep, if there are more than the next looks try.
#[test]
fn of_the_lanes_found_by_a_peek_the_last_served_go_last() {
    let mut lanes = Lanes::default();
    let all = (1..=3).map(|n| lane(n, n, Priority::Normal));
    lanes.learn(all.collect());
    lanes.serve(|_| Some(SERVED));
    lanes.advance(LaneId(1), 100);
    lanes.mark_all_empty();
    let peeked: Vec<LaneId> = lanes.all().iter().map(|order| order.lane).collect();
    assert!(lanes.mark_ready(&peeked));
    let orders = lanes.orders(After::Cursor, WANTED);
    let ids: Vec<i64> = orders.iter().map(|order| order.lane.0).collect();
    assert_eq!(ids, [2, 3, 1]);
    assert!(!lanes.mark_ready(&[]));
}

/// Otherwise each sweep would open only the next few of those that others have emptied.
#[test]
fn lanes_that_a_sweep_finds_empty_make_way_for_others_of_their_limit() {
    let mut lanes = Lanes::default();
    lanes.set_gates(vec![gate(crate::job::ClaimLimit::Running)]);
    lanes.learn((1..=500).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    for n in 1..=500 {
        lanes.close(&until_end(n), true, BootTime::now());
    }
    lanes.open_some();
    assert_eq!(open(&lanes), (1..=8).collect::<Vec<_>>());
    // In all other lanes, the jobs of other workers have ended, or were cancelled.
    let empty = found_empty(&lanes, &[400, 499, 500], none_paused());
    lanes.open_empty(&empty);
    lanes.mark_all_empty();
    assert!(!lanes.is_closed(LaneId(9)) && lanes.is_closed(LaneId(400)));
    assert!(open(&lanes).is_empty(), "they are not claimed from");
    lanes.open_some();
    assert_eq!(open(&lanes), [400, 499, 500]);
    assert!(lanes.mark_active(LaneId(9)), "it has a job again");
    // Lanes of a paused queue were not read.
    lanes.close(&until_end(9), true, BootTime::now());
    let empty = found_empty(&lanes, &[], paused());
    lanes.open_empty(&empty);
    assert!(lanes.is_closed(LaneId(9)));
}

/// Otherwise a lane without jobs would repeatedly open those that another limit keeps closed.
#[test]
fn a_lane_that_was_not_known_to_have_jobs_does_not_open_others() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn((1..3).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    lanes.mark_all_empty();
    lanes.close(&until_end(2), true, BootTime::now());
    let orders = lanes.orders(After::Cursor, WANTED);
    assert_eq!(orders[0].lane, LaneId(1), "it is idle");
    assert_eq!(
        lanes.claimed(&orders, &[], &[], false),
        MayHaveMore::default()
    );
    assert!(lanes.is_closed(LaneId(2)));
}

#[test]
fn the_end_of_a_job_opens_lanes_of_each_class() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    let of = |n: i64, priority| Lane {
        priority,
        ..of_tenant(n, n, "a")
    };
    let mut all: Vec<Lane> = (1..10).map(|n| of(n, Priority::Low)).collect();
    all.extend([of(10, Priority::Normal), of(11, Priority::High)]);
    lanes.learn(all);
    lanes.serve(|_| Some(SERVED));
    let closed: Vec<ClosedLane> = (1..12).map(until_end).collect();
    let orders = lanes.orders(After::Cursor, WANTED);
    lanes.claimed(&orders, &[], &closed, false);
    // The job of the highest priority was closed last, and goes first.
    assert!(lanes.free(LaneId(1)));
    assert_eq!(open(&lanes), [1, 2, 10, 11]);
    assert_eq!(lanes.orders(After::Cursor, WANTED)[0].lane, LaneId(11));
}

#[test]
fn a_sweep_opens_at_most_as_many_lanes_as_fit_into_a_claim_and_the_next_one_continues() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn((1..=400).map(|n| of_tenant(n, n, &n.to_string())).collect());
    lanes.serve(|_| Some(SERVED));
    for n in 1..=400 {
        lanes.close(&until_end(n), true, BootTime::now());
    }
    lanes.open_some();
    let first = open(&lanes);
    assert_eq!(first.len(), 256);
    for id in &first {
        lanes.close(&until_end(*id), true, BootTime::now());
    }
    lanes.open_some();
    let second = open(&lanes);
    assert_eq!(second.len(), 256);
    let both = second.iter().filter(|id| first.contains(id)).count();
    assert_eq!(both, 256 - (400 - 256));
}

/// A gate that all lanes share.
pub(super) fn gate(limit: crate::job::ClaimLimit) -> crate::job::ClaimGate {
    crate::job::ClaimGate {
        name: "all".into(),
        queue: None,
        handler: None,
        key: Vec::new(),
        limit,
        settings: "1".into(),
    }
}

/// The gate permits one job, or one start, at a time, although many are wanted.
#[test]
fn tenants_behind_a_gate_that_they_share_get_their_shares_of_it() {
    let second = Some(Duration::from_secs(1));
    let rates = [("all", second), ("other", second)];
    for (limit, by) in [
        (crate::job::ClaimLimit::Running, &[("all", None)][..]),
        (crate::job::ClaimLimit::Starts, &rates[..1]),
        (crate::job::ClaimLimit::Starts, &rates[..]),
    ] {
        let mut fair = one_at_a_time();
        let share = fair.get_mut("default").unwrap();
        share.max_in_flight = None;
        share.weights = [("c".to_owned(), 3.0)].into();
        let mut lanes = Lanes::default();
        lanes.set_fair(fair);
        let gates = by.iter().map(|(name, _)| crate::job::ClaimGate {
            name: (*name).into(),
            ..gate(limit)
        });
        lanes.set_gates(gates.collect());
        let tenants = ["a", "b", "c"];
        lanes.learn(
            (1..)
                .zip(tenants)
                .map(|(n, it)| of_tenant(n, n, it))
                .collect(),
        );
        lanes.serve(|_| Some(SERVED));
        // A sweep has found jobs of all of them.
        for n in 1..=3 {
            lanes.mark_active(LaneId(n));
        }
        let mut started: HashMap<i64, u32> = HashMap::new();
        let mut now = BootTime::now();
        for turn in 0..200 {
            let orders = lanes.orders(After::Cursor, 16);
            let first = orders[0].lane;
            *started.entry(first.0).or_default() += 1;
            let closed = orders.iter().map(|order| closed_by(order.lane.0, by));
            let closed: Vec<ClosedLane> = closed.collect();
            lanes.claimed(&orders, &[job(first.0, turn)], &closed, false);
            // The time of their starts is that of the claim, a moment ago.
            now = now.plus(Duration::from_secs(2));
            assert!(lanes.open_due(now) || lanes.free(first));
        }
        let started = [1, 2, 3].map(|lane| started.get(&lane).copied().unwrap_or(0));
        assert_eq!(started, [40, 40, 120], "{by:?}");
    }
}

/// Most of the lanes are also behind a gate of their own, which is full.
#[test]
fn lanes_that_another_gate_keeps_closed_do_not_use_up_the_room_of_a_shared_one() {
    let mut lanes = Lanes::default();
    let imports = crate::job::ClaimGate {
        name: "imports".into(),
        handler: Some("import".into()),
        ..gate(crate::job::ClaimLimit::Running)
    };
    lanes.set_gates(vec![gate(crate::job::ClaimLimit::Running), imports]);
    let import = |n: i64| Lane {
        handler: "import".into(),
        ..of_tenant(n, n, "a")
    };
    let mut all: Vec<Lane> = (1..=20).map(import).collect();
    all.push(of_tenant(21, 21, "m"));
    lanes.learn(all);
    lanes.serve(|_| Some(SERVED));
    let by = |id: i64, gates: &[&str]| {
        let gates: Vec<_> = gates.iter().map(|gate| (*gate, None)).collect();
        closed_by(id, &gates)
    };
    let orders = lanes.orders(After::Cursor, WANTED);
    // The mail has taken the last free capacity of both.
    let mut closed: Vec<ClosedLane> = (1..=20).map(|id| by(id, &["all", "imports"])).collect();
    closed.push(by(21, &["all"]));
    lanes.claimed(&orders, &[job(21, 100)], &closed, false);
    assert!(lanes.free(LaneId(21)));
    // The shared gate has free capacity, and none of the first lanes can use it.
    for _ in 0..3 {
        let open: Vec<i64> = open(&lanes);
        if open.contains(&21) {
            break;
        }
        let orders = lanes.with_jobs();
        let closed: Vec<ClosedLane> = open.iter().map(|id| by(*id, &["imports"])).collect();
        assert!(lanes.claimed(&orders, &[], &closed, false).opened);
    }
    assert!(open(&lanes).contains(&21));
    assert!(lanes.wait_for_ends(), "the imports wait for their own");
}

/// Otherwise a worker would keep a count for each tenant that it has ever served.
#[test]
fn the_use_of_limits_by_removed_tenants_is_forgotten() {
    let mut lanes = Lanes::default();
    let own = crate::job::ClaimGate {
        key: vec!["tenant".to_owned()],
        ..gate(crate::job::ClaimLimit::Running)
    };
    lanes.set_gates(vec![own]);
    for round in 0..10 {
        // A thousand tenants, two lanes of each.
        let ids = 2_000 * round + 1..=2_000 * (round + 1);
        let all = ids.clone().map(|n| of_tenant(n, n, &(n / 2).to_string()));
        lanes.forget_catalog();
        let change = lanes.learn(all.collect());
        assert_eq!(change.removed, round > 0);
        lanes.serve(|_| Some(SERVED));
        let orders = lanes.all();
        let jobs: Vec<ClaimedJob> = ids.map(|n| job(n, n)).collect();
        lanes.claimed(&orders, &jobs, &[], false);
        assert!(lanes.gates.shared_limits() >= 1_000);
        lanes.serve(|_| Some(SERVED));
        assert!(lanes.gates.shared_limits() <= 1_001);
    }
}

/// Otherwise a gate that earlier classes use up would keep them closed forever.
#[test]
fn closed_lanes_are_searched_for_overdue_jobs_and_those_that_have_some_open_first() {
    let mut lanes = Lanes::default();
    lanes.set_gates(vec![gate(crate::job::ClaimLimit::Running)]);
    let of = |n: i64, priority| Lane {
        priority,
        ..of_tenant(n, n, "a")
    };
    let mut all: Vec<Lane> = (1..=300).map(|n| of(n, Priority::Low)).collect();
    all.push(of(400, Priority::High));
    lanes.learn(all);
    lanes.serve(|_| Some(SERVED));
    for n in (1..=300).chain([400]) {
        lanes.close(&until_end(n), true, BootTime::now());
    }
    assert!(lanes.has_closed());
    let searched = |lanes: &mut Lanes| -> Vec<i64> {
        let orders = lanes.behind(After::Reached);
        orders.iter().map(|order| order.lane.0).collect()
    };
    let first = searched(&mut lanes);
    assert_eq!(first, (1..=256).collect::<Vec<_>>());
    let rest: Vec<i64> = (257..=300).chain(1..=212).collect();
    assert_eq!(searched(&mut lanes), rest, "the others are not left out");
    lanes.go_first([LaneId(299)]);
    assert!(lanes.free(LaneId(1)));
    assert_eq!(open(&lanes), [1, 299, 400]);
    let filter = OverdueFilter {
        max: 1,
        waited: Duration::from_secs(900),
    };
    let promoted = lanes.promoted(&[(LaneId(300), filter), (LaneId(299), filter)], 10);
    let promoted: Vec<i64> = promoted.iter().map(|order| order.lane.0).collect();
    assert_eq!(promoted, [299], "the other is closed");
}

#[test]
fn a_lane_at_its_rate_opens_when_its_wait_ends() {
    let mut lanes = Lanes::default();
    let gate = crate::job::ClaimGate {
        key: vec!["tenant".to_owned()],
        ..gate(crate::job::ClaimLimit::Starts)
    };
    assert!(lanes.set_gates(vec![gate.clone()]));
    assert!(!lanes.set_gates(vec![gate.clone()]));
    lanes.learn(vec![of_tenant(1, 10, "a"), of_tenant(2, 20, "b")]);
    lanes.serve(|_| Some(SERVED));
    let now = BootTime::now();
    lanes.close(&for_seconds(10, 9), true, now);
    lanes.close(&for_seconds(20, 2), true, now);
    lanes.close(&for_seconds(20, 5), true, now);
    assert!(next(&mut lanes).is_empty() && !lanes.wait_for_ends());
    assert!(!lanes.free(LaneId(10)), "the end of a job opens nothing");
    assert_eq!(lanes.next_opening(), Some(now.plus(Duration::from_secs(5))));
    assert!(!lanes.open_due(now.plus(Duration::from_secs(4))));
    assert!(lanes.open_due(now.plus(Duration::from_secs(5))));
    assert_eq!(next(&mut lanes), [20]);
    // A change to the gates opens them all. A lane that was closed without known jobs still has none.
    lanes.close(&for_seconds(20, 5), false, now);
    let settings = "2".into();
    assert!(lanes.set_gates(vec![crate::job::ClaimGate { settings, ..gate }]));
    lanes.serve(|_| Some(SERVED));
    assert_eq!(next(&mut lanes), [10, 20]);
    assert_eq!(open(&lanes), [10]);
    assert_eq!(lanes.next_opening(), None);
}

/// Otherwise the rate would be unused until the next sweep.
#[test]
fn lanes_whose_handler_has_no_room_on_this_host_leave_a_shared_rate_to_others() {
    let mut lanes = Lanes::default();
    lanes.set_gates(vec![gate(crate::job::ClaimLimit::Starts)]);
    lanes.learn((1..=4).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    let now = BootTime::now();
    for n in 1..=4 {
        lanes.close(&for_seconds(n, 1), true, now);
    }
    assert!(lanes.open_due(now.plus(Duration::from_secs(1))));
    assert_eq!(open(&lanes), [1, 2]);
    assert!(lanes.close_for_handler(LaneId(1), now));
    assert_eq!(open(&lanes), [2, 3, 4]);
}

/// Regardless of the lane of its job: the source of the job may be bound to the handler.
#[test]
fn the_end_of_an_attempt_opens_lanes_whose_handler_had_no_room_on_this_host() {
    let mut lanes = Lanes::default();
    lanes.learn((1..=3).map(|n| of_tenant(n, n, "a")).collect());
    let limited = Serving {
        max_at_once: Some(1),
        ..SERVED
    };
    lanes.serve(|_| Some(limited));
    for n in 1..=3 {
        lanes.close_for_handler(LaneId(n), BootTime::now());
    }
    assert!(open(&lanes).is_empty() && lanes.wait_for_ends());
    assert!(!lanes.free(LaneId(1)), "its attempt may still count");
    assert!(!lanes.free_handler("other"));
    assert!(lanes.free_handler("noop"));
    assert_eq!(open(&lanes), [1, 2]);
}

/// The claims that have closed them reported different times.
#[test]
fn lanes_at_a_rate_that_they_share_open_by_their_shares_when_it_permits_a_start() {
    let mut lanes = Lanes::default();
    lanes.set_gates(vec![gate(crate::job::ClaimLimit::Starts)]);
    lanes.learn((1..=5).map(|n| of_tenant(n, n, "a")).collect());
    lanes.serve(|_| Some(SERVED));
    let now = BootTime::now();
    let orders = lanes.orders(After::Cursor, WANTED);
    let jobs = [job(1, 100), job(2, 101), job(3, 102)];
    let closed: Vec<ClosedLane> = (1..)
        .zip([1, 2, 3, 4, 9])
        .map(|(n, s)| for_seconds(n, s))
        .collect();
    lanes.claimed(&orders, &jobs, &closed, false);
    // The lanes from which the claim has taken jobs were closed last, for up to 3 s.
    assert!(!lanes.open_due(now.plus(Duration::from_secs(1))));
    assert!(lanes.open_due(BootTime::now().plus(Duration::from_secs(3))));
    assert_eq!(open(&lanes), [4, 5], "they had nothing yet");
    // One of them is empty, and the other has a job: there is capacity for more.
    let orders = lanes.with_jobs();
    assert!(lanes.claimed(&orders, &[job(4, 103)], &[], false).opened);
    assert_eq!(open(&lanes), [1, 2, 3, 4]);
}

#[test]
fn the_first_job_of_a_lane_is_claimed_first_and_goes_ahead_whether_or_not_the_lane_is_new() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn(vec![lane(1, 10, Priority::Normal)]);
    lanes.serve(|_| Some(SERVED));
    let woken = |lanes: &Lanes| lanes.woken().collect::<Vec<_>>();
    lanes.wake(LaneId(10), true);
    assert_eq!(woken(&lanes), [], "it counts as active");
    // The search of the newest jobs names a lane that the catalog has just got, too.
    lanes.learn(vec![lane(2, 20, Priority::Normal)]);
    lanes.serve_new(|_| Some(SERVED));
    lanes.wake(LaneId(20), false);
    assert_eq!(woken(&lanes), [LaneId(20)]);
    assert!(lanes.first_orders(0).is_empty());
    let orders = lanes.first_orders(9);
    assert_eq!(orders.len(), 1);
    assert_eq!((orders[0].lane, orders[0].max), (LaneId(20), Some(1)));
    let jobs = [job(20, 20)];
    assert_eq!(lanes.take_woken(&jobs), [LaneId(20)]);
    lanes.claimed(&orders, &jobs, &[], true);
    // Later it is like any other.
    assert_eq!(woken(&lanes), []);
    let orders = lanes.orders(After::Recent, WANTED);
    lanes.claimed(&orders, &[], &[], false);
    lanes.wake(LaneId(20), true);
    assert_eq!(woken(&lanes), [LaneId(20)]);
    // Another worker was faster.
    let orders = lanes.first_orders(9);
    lanes.claimed(&orders, &[], &[], false);
    assert_eq!(woken(&lanes), []);
}

#[test]
fn lanes_that_are_no_longer_served_are_not_remembered_as_woken() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        lane(2, 20, Priority::Normal),
    ]);
    lanes.serve(|_| Some(SERVED));
    lanes.mark_all_empty();
    lanes.wake(LaneId(10), true);
    lanes.wake(LaneId(20), true);
    lanes.serve(|lane| (lane.id.0 == 20).then_some(SERVED));
    assert_eq!(lanes.woken, HashSet::from([LaneId(20)]));
}

#[test]
fn the_first_job_of_a_lane_does_not_precede_a_class_that_goes_before_it() {
    let mut lanes = Lanes::default();
    lanes.set_fair(one_at_a_time());
    lanes.learn(vec![
        lane(1, 10, Priority::High),
        lane(2, 20, Priority::Normal),
    ]);
    lanes.serve(|_| Some(SERVED));
    lanes.mark_all_empty();
    lanes.mark_active(LaneId(10));
    lanes.wake(LaneId(20), true);
    assert!(lanes.first_orders(9).is_empty());
    let orders = lanes.orders(After::Cursor, WANTED);
    lanes.claimed(&orders[..1], &[], &[], false);
    assert_eq!(lanes.first_orders(9)[0].lane, LaneId(20));
}

/// There are so many that a claim covers only some of them.
#[test]
fn lanes_that_the_login_may_not_claim_from_are_left_out_for_half_a_minute() {
    let mut lanes = Lanes::default();
    let many = i64::try_from(LANES_PER_CLAIM).unwrap() * 4;
    lanes.learn((1..=many).map(|n| lane(n, n, Priority::Normal)).collect());
    lanes.serve(|_| Some(SERVED));
    let now = BootTime::now();
    let forbidden = |order: &ClaimOrder| {
        let wait = Some(Duration::from_secs(30));
        closed_by(order.lane.0, &[("the login", wait)])
    };
    let claim = |lanes: &mut Lanes| {
        let mut claims = 0;
        loop {
            let orders = lanes.orders_of_many(After::Cursor);
            if orders.is_empty() {
                break claims;
            }
            let closed: Vec<ClosedLane> = orders.iter().map(forbidden).collect();
            lanes.claimed_at(&orders, &[], &closed, false, now);
            claims += 1;
        }
    };
    assert!(claim(&mut lanes) >= 4);
    // Each sweep finds their jobs again.
    let ready: Vec<LaneId> = (1..=many).map(LaneId).collect();
    assert!(!lanes.mark_ready(&ready));
    lanes.open_some();
    assert_eq!(claim(&mut lanes), 0);
    assert!(lanes.open_due(now.plus(Duration::from_secs(30))));
    assert!(claim(&mut lanes) >= 4);
}
