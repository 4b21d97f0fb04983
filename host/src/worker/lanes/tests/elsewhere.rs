//! Lanes from which only other workers claim.

use super::*;

#[test]
fn only_orphans_are_taken_from_the_inbox_of_another_worker() {
    let mut lanes = Lanes::default();
    let of = |seq, worker: &str| Lane {
        values: [("worker".to_owned(), worker.to_owned())].into(),
        ..lane(seq, seq * 10, Priority::Normal)
    };
    lanes.learn(vec![lane(1, 10, Priority::Normal), of(2, "7"), of(3, "8")]);
    let me = |me: i64| {
        move |lane: &Lane| {
            Some(Serving {
                orphans_only: lane.inbox_of().is_some_and(|worker| worker.0 != me),
                ..SERVED
            })
        }
    };
    lanes.serve(me(7));
    let ids = |lanes: &mut Lanes| -> Vec<i64> {
        let mut ids: Vec<i64> = order(lanes).iter().map(|(id, _)| *id).collect();
        ids.sort_unstable();
        ids
    };
    assert_eq!(ids(&mut lanes), [10, 20]);
    assert_eq!(lanes.all().len(), 2);
    assert_eq!(
        (lanes.adoptable(false).len(), lanes.adoptable(true).len()),
        (3, 0)
    );
    assert!(lanes.serves(LaneId(20)) && !lanes.serves(LaneId(30)));
    assert!(!lanes.mark_active(LaneId(30)));
    assert!(lanes.get(LaneId(30)).is_some(), "for an adopted job");
    // A new incarnation inherits nothing.
    lanes.serve(me(9));
    assert_eq!(ids(&mut lanes), [10]);
    // A new lane.
    lanes.learn(vec![
        lane(1, 10, Priority::Normal),
        of(2, "7"),
        of(3, "8"),
        of(4, "9"),
        of(5, "7"),
    ]);
    lanes.serve_new(me(9));
    assert_eq!(ids(&mut lanes), [10, 40]);
}

#[test]
fn shards_are_wanted_only_of_queues_of_which_a_lane_is_served() {
    let mut lanes = Lanes::default();
    let of = |seq, queue: &str| Lane {
        queue: queue.into(),
        ..lane(seq, seq * 10, Priority::Normal)
    };
    let inbox = |seq, queue: &str| Lane {
        values: [("worker".to_owned(), "7".to_owned())].into(),
        ..of(seq, queue)
    };
    let known = [
        of(1, "default"),
        of(2, "q"),
        of(3, "other"),
        inbox(4, "third"),
    ];
    lanes.learn(known.to_vec());
    lanes.set_sharded(["q", "other", "third", "empty"].map(str::to_owned).into());
    lanes.serve(|lane| (lane.queue != "other").then_some(SERVED));
    assert_eq!(*lanes.sharded(), HashSet::from(["q".to_owned()]));
    lanes.learn(known.into_iter().chain([of(5, "third")]).collect());
    lanes.serve_new(|_| Some(SERVED));
    let both = ["q", "third"].map(str::to_owned);
    assert_eq!(*lanes.sharded(), HashSet::from(both));
    lanes.serve(|_| None);
    assert!(lanes.sharded().is_empty());
}

#[test]
fn a_lane_of_a_sharded_queue_is_served_while_its_shard_is_leased() {
    let mut lanes = Lanes::default();
    let sharded = |lane: Lane| Lane {
        queue: "q".into(),
        ..lane
    };
    lanes.learn(vec![
        lane(1, 16, Priority::Normal),
        sharded(lane(2, 17, Priority::Normal)),
        sharded(lane(3, 18, Priority::Normal)),
    ]);
    let served = |lanes: &mut Lanes| {
        lanes.serve(|_| Some(SERVED));
        let mut served: Vec<i64> = lanes.all().iter().map(|order| order.lane.0).collect();
        served.sort_unstable();
        served
    };
    let own = |own: &[u32]| {
        let own = crate::store::LeasedShards {
            queue: "q".into(),
            shards: 16,
            own: own.iter().copied().collect(),
            lease: Duration::from_secs(5),
        };
        Arc::new([own].into_iter().collect::<crate::worker::shards::Own>())
    };
    assert!(!lanes.set_own(own(&[1])), "no queue has shards");
    assert_eq!(served(&mut lanes), [16, 17, 18]);
    assert!(lanes.set_sharded(["q".to_owned()].into()));
    assert_eq!(served(&mut lanes), [16, 17]);
    assert!(!lanes.serves(LaneId(18)) && !lanes.mark_active(LaneId(18)));
    lanes.wake(LaneId(18), true);
    assert_eq!(lanes.woken().count(), 0);
    assert_eq!(lanes.adoptable(false).len(), 3);
    assert!(lanes.get(LaneId(18)).is_some(), "for adopted jobs");
    let orders = lanes.orders(After::Cursor, WANTED);
    lanes.claimed(&orders, &[job(17, 170)], &[], false);
    lanes.mark_all_empty();
    // The lease may have ended since, so that the claim was refused.
    let empty = found_empty(&lanes, &[17], none_paused());
    lanes.swept(&empty, 500);
    let after = [(16, 500), (17, 170)];
    let mut read = order(&mut lanes);
    read.sort_unstable();
    assert_eq!(read, after);
    let leased = own(&[2]);
    assert!(lanes.set_own(leased.clone()));
    assert_eq!(served(&mut lanes), [16, 18]);
    let with_jobs: Vec<(i64, i64)> = lanes
        .with_jobs()
        .iter()
        .map(|order| (order.lane.0, order.after))
        .collect();
    assert_eq!(with_jobs, [(18, i64::MIN)], "it may have jobs");
    assert!(!lanes.set_own(leased));
    // The worker that has had it since may have left jobs before the last turn that was seen here.
    lanes.set_own(own(&[1, 2]));
    assert_eq!(served(&mut lanes), [16, 17, 18]);
    assert!(order(&mut lanes).contains(&(17, i64::MIN)));
    assert!(lanes.set_sharded(HashSet::new()));
    assert_eq!(served(&mut lanes), [16, 17, 18]);
}
