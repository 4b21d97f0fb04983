//! Claims behind gates.

use std::collections::BTreeMap;
use std::time::Duration;

use rouse::job::{Fence, LaneId};
use rouse::store::{
    BoundClaim, BoundSearch, ClaimResult, ClaimedJob, ClosedGate, ClosedLane, Locked, Store,
};

use crate::support::TestDb;
use crate::support::claims::{claim, lock_job, orders, rand, result, settlement};
use crate::support::worker::{SESSION_WAITS, until_true};

use super::{enqueue, gate, number, on_eight_workers, set_gate};

/// Claims on eight workers at the same time.
pub(super) async fn claim_at_once(db: &TestDb) -> Vec<(Store, Vec<ClaimedJob>)> {
    on_eight_workers(db, |store| async move {
        let jobs = claim(&store, 100).await;
        (store, jobs)
    })
    .await
}

/// The number of jobs of each tenant.
pub(super) fn by_tenant(claimed: &[(Store, Vec<ClaimedJob>)]) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    for job in claimed.iter().flat_map(|(_, jobs)| jobs) {
        *counts
            .entry(job.tenant.clone().unwrap_or_default())
            .or_default() += 1;
    }
    counts
}

pub(super) fn counts(expected: &[(&str, usize)]) -> BTreeMap<String, usize> {
    let counts = expected
        .iter()
        .map(|(key, count)| ((*key).to_owned(), *count));
    counts.collect()
}

/// Claims jobs of the source `import` from these lanes.
async fn claim_imports(store: &Store, lanes: &[LaneId]) -> Vec<ClaimedJob> {
    search_imports(store, lanes, &[]).await.jobs
}

/// Claims jobs of the source `import` from these lanes, in each after this turn.
async fn search_imports(store: &Store, lanes: &[LaneId], after: &[i64]) -> BoundClaim {
    let search = BoundSearch {
        lanes,
        sources: &["import".to_owned()],
        after,
        ..BoundSearch::default()
    };
    let lease = Duration::from_secs(60);
    store
        .claim_bound(Fence(rand()), search, lease, 10)
        .await
        .unwrap()
}

/// Claims from all lanes, and returns the jobs and the lanes that are closed.
async fn claim_and_closed(store: &Store, wanted: usize) -> (Vec<ClaimedJob>, Vec<ClosedLane>) {
    let orders = orders(store, 60_000).await;
    match store
        .claim(Fence(rand()), &orders, wanted, None)
        .await
        .unwrap()
    {
        ClaimResult::Jobs(jobs, closed) => (jobs, closed),
        ClaimResult::Orphans(_) => panic!("leases were not checked"),
    }
}

#[tokio::test]
async fn no_more_jobs_of_a_key_run_than_its_limit_on_any_number_of_workers() {
    let (db, client) =
        gate("'few', 'max_concurrent', handler => 'a', key => '{tenant}', max => 3").await;
    for tenant in ["x", "y"] {
        for priority in ["high", "normal"] {
            for _ in 0..10 {
                let arguments = format!(", tenant => '{tenant}', priority => '{priority}'");
                enqueue(&client, "a", &arguments).await;
            }
        }
    }
    for _ in 0..5 {
        enqueue(&client, "a", "").await;
        enqueue(&client, "b", ", tenant => 'x'").await;
    }
    let claimed = claim_at_once(&db).await;
    assert_eq!(
        by_tenant(&claimed),
        counts(&[("", 3), ("x", 8), ("y", 3)]),
        "three of each, jobs without a tenant are one key, and handler b has no gate"
    );
    // Each end lets one more job start.
    for (store, jobs) in &claimed {
        for job in jobs.iter().filter(|job| job.tenant.as_deref() == Some("y")) {
            let done = settlement(job, result("1"));
            store.settle(&[&done], Locked::Wait).await.unwrap();
        }
    }
    assert_eq!(by_tenant(&claim_at_once(&db).await), counts(&[("y", 3)]));
    // A change applies at once.
    set_gate(
        &client,
        "'few', 'max_concurrent', handler => 'a', key => '{tenant}', max => 4",
    )
    .await;
    assert_eq!(
        by_tenant(&claim_at_once(&db).await),
        counts(&[("", 1), ("x", 1), ("y", 1)])
    );
    client
        .batch_execute("SELECT rouse.delete_gate('few')")
        .await
        .unwrap();
    assert_eq!(
        by_tenant(&claim_at_once(&db).await),
        counts(&[("", 1), ("x", 16), ("y", 13)])
    );
}

/// Nothing is counted down when a job ends, so nothing can be forgotten: a job counts as long as it is running.
#[tokio::test]
async fn a_crash_leaks_nothing() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    for _ in 0..3 {
        enqueue(&client, "a", "").await;
    }
    let (dead, store) = (db.worker().await, db.worker().await);
    let lost = claim(&dead, 10).await;
    assert_eq!(lost.len(), 1);
    client
        .batch_execute(
            "UPDATE rouse.job SET lease_until = now() - interval '1 s' WHERE state = 'running'",
        )
        .await
        .unwrap();
    assert_eq!(
        claim(&store, 10).await.len(),
        0,
        "it still counts, until it is adopted or fails"
    );
    let orders = orders(&store, 60_000).await;
    let adopted = crate::support::claims::adopt(&store, Fence(7), &orders, 10, 3, None)
        .await
        .unwrap();
    assert_eq!(adopted.claimed.len(), 1);
    assert_eq!(claim(&store, 10).await.len(), 0);
    let done = settlement(&adopted.claimed[0], result("1"));
    store.settle(&[&done], Locked::Wait).await.unwrap();
    assert_eq!(claim(&store, 10).await.len(), 1);
}

#[tokio::test]
async fn a_job_passes_all_gates_or_none() {
    let (db, client) = gate("'few', 'max_concurrent', key => '{tenant}', max => 1").await;
    set_gate(&client, "'rate', 'throttle', max => 3, period => '1 hour'").await;
    for tenant in ["x", "x", "x", "y"] {
        enqueue(&client, "a", &format!(", tenant => '{tenant}'")).await;
    }
    let store = db.worker().await;
    let jobs = claim(&store, 100).await;
    assert_eq!(jobs.len(), 2, "one of each tenant");
    let starts = "SELECT sum(cardinality(starts))::bigint FROM rouse.gate_key";
    assert_eq!(
        number(&client, starts).await,
        2,
        "jobs that had to wait are not charged"
    );
    for job in &jobs {
        let done = settlement(job, result("1"));
        store.settle(&[&done], Locked::Wait).await.unwrap();
    }
    assert_eq!(claim(&store, 100).await.len(), 1);
    assert_eq!(claim(&store, 100).await.len(), 0, "the rate is reached");
    let waiting = "SELECT count(*) FROM rouse.job WHERE state = 'queued'";
    assert_eq!(number(&client, waiting).await, 1);
}

/// The lane in the middle has no free capacity at the second limit, so it does not take any of the capacity of the
/// first. Postgres 16 and later sort the input of aggregates that have an order.
#[tokio::test]
async fn a_lane_without_room_at_one_limit_leaves_that_of_another_to_the_next_lane() {
    let (db, client) = gate("'all', 'max_concurrent', max => 2").await;
    set_gate(
        &client,
        "'each', 'max_concurrent', key => '{handler}', max => 1",
    )
    .await;
    for (handler, queue) in [("a", "first"), ("a", "second"), ("b", "third")] {
        enqueue(&client, handler, &format!(", queue => '{queue}'")).await;
    }
    let store = db.worker().await;
    let mut lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    lanes.sort_by(|a, b| a.queue.cmp(&b.queue));
    let mut orders = orders(&store, 60_000).await;
    orders.sort_by_key(|order| lanes.iter().position(|lane| lane.id == order.lane));
    let claimed = store.claim(Fence(rand()), &orders, 10, None).await;
    let claimed = claimed.unwrap().jobs();
    let queue = |job: &ClaimedJob| {
        let lane = lanes.iter().find(|lane| lane.id == job.lane);
        lane.unwrap().queue.clone()
    };
    let mut queues: Vec<String> = claimed.iter().map(queue).collect();
    queues.sort();
    assert_eq!(queues, ["first", "third"]);
}

#[tokio::test]
async fn a_claim_reports_which_lanes_are_closed_and_for_how_long() {
    let (db, client) = gate("'few', 'max_concurrent', handler => 'a', max => 1").await;
    set_gate(
        &client,
        "'rate', 'throttle', handler => 'b', max => 2, period => '1 hour'",
    )
    .await;
    for handler in ["a", "a", "b", "b", "b", "c", "c"] {
        enqueue(&client, handler, "").await;
    }
    let store = db.worker().await;
    let lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    let lane = |handler: &str| {
        lanes
            .iter()
            .find(|lane| lane.handler == handler)
            .unwrap()
            .id
    };
    for wanted in [5, 0] {
        let (jobs, mut closed) = claim_and_closed(&store, 100).await;
        assert_eq!(jobs.len(), wanted);
        closed.sort_by_key(|closed| closed.by[0].wait);
        let waits: Vec<_> = closed
            .iter()
            .map(|closed| (closed.lane, closed.by.len(), closed.by[0].wait.is_some()))
            .collect();
        assert_eq!(waits, [(lane("a"), 1, false), (lane("b"), 1, true)]);
        let wait = closed[1].by[0].wait.unwrap();
        assert!(
            wait > Duration::from_secs(3500) && wait <= Duration::from_secs(3600),
            "{wait:?}"
        );
    }
}

/// A lane behind several gates waits for each of them in its own way.
#[tokio::test]
async fn a_claim_reports_how_long_each_gate_keeps_a_lane_closed() {
    let (db, client) = gate("'few', 'max_concurrent', max => 2").await;
    set_gate(&client, "'all', 'max_concurrent', max => 2").await;
    set_gate(&client, "'hour', 'throttle', max => 2, period => '1 hour'").await;
    let day = "'day', 'throttle', max => 2, period => '1 day', burst => 2";
    set_gate(&client, day).await;
    set_gate(&client, "'open', 'throttle', max => 9, period => '1 s'").await;
    for _ in 0..3 {
        enqueue(&client, "a", "").await;
    }
    let store = db.worker().await;
    for wanted in [2, 0] {
        let (jobs, closed) = claim_and_closed(&store, 100).await;
        assert_eq!((jobs.len(), closed.len()), (wanted, 1));
        let hours = |gate: &ClosedGate| gate.wait.map(|wait| wait.as_secs().div_ceil(3600));
        let by = closed[0].by.iter();
        let by: BTreeMap<&str, _> = by.map(|gate| (gate.name.as_str(), hours(gate))).collect();
        let expected = [
            ("all", None),
            ("day", Some(12)),
            ("few", None),
            ("hour", Some(1)),
        ];
        assert_eq!(by, BTreeMap::from(expected));
    }
}

#[tokio::test]
async fn keys_are_of_tenants_sources_handlers_queues_and_payloads() {
    let (db, client) = gate("'g', 'max_concurrent', key => '{$.user.id,queue}', max => 1").await;
    for payload in [
        r#"{"user": {"id": 1}}"#,
        r#"{"user": {"id": "1"}}"#,
        r#"{"user": {"id": 2}}"#,
        "{}",
        "[1]",
        r#"{"user": 3}"#,
    ] {
        for queue in ["default", "other"] {
            enqueue(&client, "a", &format!(", '{payload}', queue => '{queue}'")).await;
        }
    }
    let long = "ü".repeat(101);
    enqueue(
        &client,
        "a",
        &format!(r#", '{{"user": {{"id": "{long}"}}}}'"#),
    )
    .await;
    let store = db.worker().await;
    assert_eq!(
        claim(&store, 100).await.len(),
        7,
        "1, 2, those without a value and, in one queue, a long one"
    );
    let keys = "SELECT string_agg(l.key, ' ' ORDER BY l.key) FROM (SELECT DISTINCT key FROM rouse.lane) AS l";
    let keys: String = client.query_one(keys, &[]).await.unwrap().get(0);
    assert!(
        keys.contains(r#"{"$.user.id": "1"} {"$.user.id": "2"} {"$.user.id": "sha256:"#),
        "{keys}"
    );
    // The payloads of one call also go to the lanes of their keys.
    let many = r#"SELECT max(e) FROM rouse.enqueue_many('a', ARRAY['{"user": {"id": 8}}', '{"user": {"id": 9}}']::jsonb[]) AS e"#;
    let last = number(&client, many).await;
    let lanes =
        format!("SELECT count(DISTINCT lane) FROM rouse.job WHERE id IN ({last}, {last} - 1)");
    assert_eq!(number(&client, &lanes).await, 2);
}

#[tokio::test]
async fn a_session_may_change_how_it_writes_times_after_it_has_found_no_room_for_a_lane() {
    let (_db, client) = gate("'one', 'max_concurrent', key => '{tenant}', max => 1").await;
    client
        .batch_execute("UPDATE rouse.limits SET keyed_lanes_max = 0; SET datestyle = 'SQL'; SET timezone = 'FOO-3'")
        .await
        .unwrap();
    enqueue(&client, "h", ", tenant => 'a'").await;
    client
        .batch_execute("RESET datestyle; RESET timezone")
        .await
        .unwrap();
    enqueue(&client, "i", ", tenant => 'a'").await;
    let shared = "SELECT count(*) FROM rouse.lane WHERE key = '*'";
    assert_eq!(number(&client, shared).await, 2);
}

#[tokio::test]
async fn keys_beyond_the_maximum_of_lanes_share_one_limit_and_never_exceed_theirs() {
    let (db, client) = gate("'one', 'max_concurrent', key => '{tenant}', max => 1").await;
    client
        .batch_execute("UPDATE rouse.limits SET keyed_lanes_max = 2")
        .await
        .unwrap();
    for tenant in ["a", "b", "c", "d", "a", "c"] {
        enqueue(&client, "h", &format!(", tenant => '{tenant}'")).await;
    }
    // There is free capacity again, but the keys that share a lane stay in it.
    client
        .batch_execute(
            "UPDATE rouse.limits SET keyed_lanes_max = 100; SET rouse.count_keyed_lanes_at = ''",
        )
        .await
        .unwrap();
    for tenant in ["c", "e", "b"] {
        enqueue(&client, "h", &format!(", tenant => '{tenant}'")).await;
    }
    let lanes = "SELECT count(DISTINCT lane) FROM rouse.job WHERE tenant IN ('c', 'd', 'e')";
    assert_eq!(number(&client, lanes).await, 1);
    let store = db.worker().await;
    let mut tenants = Vec::new();
    loop {
        let jobs = claim(&store, 100).await;
        if jobs.is_empty() {
            break;
        }
        assert!(jobs.len() <= 3, "a, b, and one of the others");
        for job in &jobs {
            tenants.push(job.tenant.clone().unwrap());
            let done = settlement(job, result("1"));
            store.settle(&[&done], Locked::Wait).await.unwrap();
        }
    }
    tenants.sort();
    assert_eq!(tenants.concat(), "aabbcccde");
    // Once the shared lane has had no job for a day, its keys get their own lanes.
    client
        .batch_execute("UPDATE rouse.lane SET used_at = used_at - interval '2 days', closed_at = NULL WHERE key = '*'")
        .await
        .unwrap();
    store.maintain_lanes().await.unwrap();
    enqueue(&client, "h", ", tenant => 'c'").await;
    let own = r#"SELECT count(*) FROM rouse.lane WHERE key = '{"tenant": "c"}'"#;
    assert_eq!(number(&client, own).await, 1);
}

#[tokio::test]
async fn jobs_of_bound_sources_pass_the_gates_of_their_lane() {
    let (db, client) = gate("'few', 'max_concurrent', key => '{source}', max => 2").await;
    set_gate(
        &client,
        "'rate', 'throttle', handler => 'b', max => 1, period => '1 hour'",
    )
    .await;
    for handler in ["a", "b"] {
        for _ in 0..3 {
            enqueue(&client, handler, ", source => 'import'").await;
        }
    }
    let store = db.worker().await;
    let bound = async || {
        let lanes: Vec<_> = orders(&store, 1)
            .await
            .iter()
            .map(|order| order.lane)
            .collect();
        claim_imports(&store, &lanes).await
    };
    let mut all = Vec::new();
    loop {
        let jobs = bound().await;
        if jobs.is_empty() {
            break;
        }
        all.extend(jobs);
        assert!(all.len() <= 2, "two of the source run");
    }
    assert_eq!(all.len(), 2);
    for job in &all {
        let done = settlement(job, result("1"));
        store.settle(&[&done], Locked::Wait).await.unwrap();
    }
    let mut rest = Vec::new();
    loop {
        let jobs = bound().await;
        if jobs.is_empty() {
            break;
        }
        for job in &jobs {
            let done = settlement(job, result("1"));
            store.settle(&[&done], Locked::Wait).await.unwrap();
        }
        rest.extend(jobs);
    }
    let started = "SELECT count(*) FROM rouse.jobs WHERE handler = 'b' AND claimed_at IS NOT NULL";
    assert_eq!(number(&client, started).await, 1, "the rate of handler b");
    assert_eq!(all.len() + rest.len(), 4);
}

/// The jobs of other sources do not take up capacity of a key.
#[tokio::test]
async fn a_claim_by_source_gets_the_room_that_jobs_of_other_sources_cannot_use() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    enqueue(&client, "a", ", source => 'other', priority => 'high'").await;
    enqueue(&client, "a", ", source => 'import'").await;
    let store = db.worker().await;
    let mut lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    lanes.sort_by_key(|lane| lane.priority as usize);
    let lanes: Vec<_> = lanes.iter().map(|lane| lane.id).collect();
    assert_eq!(claim_imports(&store, &lanes).await.len(), 1);
}

/// The host would continue after the jobs that the gate keeps waiting.
#[tokio::test]
async fn a_claim_by_source_reports_no_lane_as_empty_because_its_gate_is_closed() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    for _ in 0..2 {
        enqueue(&client, "a", ", source => 'import'").await;
    }
    let store = db.worker().await;
    let lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    let lanes: Vec<_> = lanes.iter().map(|lane| lane.id).collect();
    for is_last in [false, true] {
        let running = search_imports(&store, &lanes, &[]).await;
        assert_eq!((running.jobs.len(), running.is_empty), (1, vec![false]));
        let closed = search_imports(&store, &lanes, &[]).await;
        assert_eq!((closed.jobs.len(), closed.is_empty), (0, vec![is_last]));
        let done = settlement(&running.jobs[0], result("1"));
        store.settle(&[&done], Locked::Wait).await.unwrap();
    }
}

/// The first job was committed late: the host has claimed later turns from its lane.
#[tokio::test]
async fn a_claim_by_source_gets_the_room_that_jobs_before_its_positions_cannot_use() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    let late = enqueue(&client, "a", ", source => 'import', priority => 'high'").await;
    let next = enqueue(&client, "a", ", source => 'import'").await;
    let store = db.worker().await;
    let mut lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    lanes.sort_by_key(|lane| lane.priority as usize);
    let lanes: Vec<_> = lanes.iter().map(|lane| lane.id).collect();
    for (after, job) in [([late, i64::MIN], next), ([i64::MIN, next], late)] {
        let claimed = search_imports(&store, &lanes, &after).await.jobs;
        assert_eq!(claimed.len(), 1, "{claimed:?}");
        assert_eq!(claimed[0].id.0, job);
        let done = settlement(&claimed[0], result("1"));
        store.settle(&[&done], Locked::Wait).await.unwrap();
    }
}

/// They may be locked for as long as the transaction of a producer is open.
#[tokio::test]
async fn a_lane_whose_jobs_are_locked_leaves_its_room_to_the_next_lane() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    let locked = enqueue(&client, "a", ", source => 'import', priority => 'high'").await;
    let second = enqueue(&client, "a", ", source => 'import'").await;
    let store = db.worker().await;
    let mut lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    lanes.sort_by_key(|lane| lane.priority as usize);
    let lanes: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
    let mut orders = orders(&store, 60_000).await;
    orders.sort_by_key(|order| lanes.iter().position(|lane| *lane == order.lane));
    let mut producer = db.client().await;
    let holds = producer.transaction().await.unwrap();
    lock_job(&holds, locked).await;
    let claimed = store.claim(Fence(rand()), &orders, 10, None).await;
    let claimed = claimed.unwrap().jobs();
    assert_eq!(claimed.len(), 1, "{claimed:?}");
    assert_eq!(claimed[0].id.0, second);
    let done = settlement(&claimed[0], result("1"));
    store.settle(&[&done], Locked::Wait).await.unwrap();
    let third = enqueue(&client, "a", ", source => 'import'").await;
    let claimed = claim_imports(&store, &lanes).await;
    assert_eq!(claimed.len(), 1, "{claimed:?}");
    assert_eq!(claimed[0].id.0, third);
    let done = settlement(&claimed[0], result("1"));
    store.settle(&[&done], Locked::Wait).await.unwrap();
    holds.rollback().await.unwrap();
    assert_eq!(claim_imports(&store, &lanes).await[0].id.0, locked);
}

#[tokio::test]
async fn a_claim_by_source_limits_each_lane_by_its_own_gates() {
    let (db, client) = gate("'one', 'max_concurrent', handler => 'a', max => 1").await;
    set_gate(&client, "'all', 'max_concurrent', max => 3").await;
    for handler in ["a", "b"] {
        for _ in 0..3 {
            enqueue(&client, handler, ", source => 'import'").await;
        }
    }
    let store = db.worker().await;
    let mut lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    lanes.sort_by(|a, b| a.handler.cmp(&b.handler));
    let lanes: Vec<_> = lanes.iter().map(|lane| lane.id).collect();
    let claimed = claim_imports(&store, &lanes).await;
    let of = |lane| claimed.iter().filter(|job| job.lane == lane).count();
    assert_eq!((of(lanes[0]), of(lanes[1])), (1, 2));
}

/// A claim that has waited for another claim sees what has happened during the wait: its time is the time after the
/// wait.
#[tokio::test]
async fn a_claim_that_has_waited_for_a_gate_sees_what_was_paused_or_orphaned_meanwhile() {
    let (db, client) = gate("'many', 'max_concurrent', max => 100").await;
    for _ in 0..3 {
        enqueue(&client, "a", "").await;
    }
    let lost = claim(&db.worker().await, 1).await.remove(0);
    let locker = db.client().await;
    for meanwhile in [
        format!(
            "UPDATE rouse.job SET lease_until = clock_timestamp() WHERE id = {}",
            lost.id
        ),
        "SELECT rouse.pause_queue('default')".to_owned(),
    ] {
        locker
            .batch_execute("BEGIN; SELECT rouse._lock('gate', 'many')")
            .await
            .unwrap();
        let store = db.worker().await;
        let claims = tokio::spawn(async move {
            let orders = orders(&store, 60_000).await;
            let checked_at = Some(std::time::SystemTime::UNIX_EPOCH);
            let claimed = store.claim(Fence(rand()), &orders, 10, checked_at).await;
            match claimed.unwrap() {
                ClaimResult::Jobs(jobs, _) => jobs.len(),
                ClaimResult::Orphans(_) => usize::MAX,
            }
        });
        until_true(&client, SESSION_WAITS).await;
        client.batch_execute(&meanwhile).await.unwrap();
        locker.batch_execute("COMMIT").await.unwrap();
        let claimed = claims.await.unwrap();
        if meanwhile.starts_with("UPDATE") {
            assert_eq!(claimed, usize::MAX, "the orphan goes first");
            client
                .batch_execute("UPDATE rouse.job SET lease_until = clock_timestamp() + interval '1 hour' WHERE state = 'running'")
                .await
                .unwrap();
        } else {
            assert_eq!(claimed, 0, "the queue is paused");
        }
    }
}

/// The transaction of an operator may stay open.
#[tokio::test]
async fn a_claim_waits_some_seconds_for_a_change_of_its_gate_and_names_it() {
    let (db, client) =
        gate("'calm', 'throttle', max => 100, period => '1 hour', burst => 10").await;
    for _ in 0..2 {
        enqueue(&client, "a", "").await;
    }
    let store = db.worker().await;
    // The key of the throttle has a row from now on.
    assert_eq!(claim(&store, 1).await.len(), 1);
    let operator = db.client().await;
    operator
        .batch_execute(
            "BEGIN; SELECT rouse.set_gate('calm', 'throttle', max => 50, period => '1 hour', burst => 10)",
        )
        .await
        .unwrap();
    let orders = orders(&store, 60_000).await;
    let claimed = store.claim(Fence(rand()), &orders, 1, None).await;
    let error = claimed.expect_err("the gate is being changed");
    assert_eq!(
        error.waits_for(),
        Some("a transaction that has changed a queue or a gate and is still open"),
        "{error}"
    );
    let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    assert_eq!(number(&client, waits).await, 0);
    operator.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(claim(&store, 1).await.len(), 1);
}
