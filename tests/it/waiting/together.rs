//! Many waiters of one host cost one look.

use std::time::{Duration, Instant};

use rouse::ends::{Ends, Full, Seen};
use rouse::job::JobId;
use rouse::worker::{Health, Parts, Settings};
use serde_json::json;
use tokio::task::{JoinHandle, JoinSet};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::database::cut_all_others;
use crate::support::proxy::Proxy;
use crate::support::worker::{TIMEOUT, TestWorker, cancel, catalog, enqueue, sandbox};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(3600);

/// Waits until this many callers wait.
async fn until_waiting(ends: &Ends, waiters: usize) {
    let deadline = Instant::now() + TIMEOUT;
    while ends.waiters() != waiters {
        assert!(Instant::now() < deadline, "{ends:?}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

fn row_of(seen: Seen) -> serde_json::Value {
    match seen {
        Seen::Ended(row) | Seen::Live(row) => serde_json::from_slice(&row).unwrap(),
        seen => panic!("{seen:?}"),
    }
}

#[tokio::test]
async fn a_thousand_waiters_cost_one_look_for_all() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    let many = "SELECT array_agg(e.id) FROM rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[1000])) AS e(id)";
    let ids: Vec<i64> = client.query_one(many, &[]).await.unwrap().get(0);
    let pause = Duration::from_millis(100);
    let ends = Ends::with(1000, pause..=pause);
    let looks = tokio::spawn(ends.clone().look_forever(proxy.store()));
    let mut waiters = JoinSet::new();
    let started = Instant::now();
    for id in &ids {
        let (ends, id) = (ends.clone(), JobId(*id));
        waiters.spawn(async move { ends.wait(id, LONG).await.unwrap() });
    }
    until_waiting(&ends, 1000).await;
    assert_eq!(ends.wait(JobId(ids[0]), LONG).await, Err(Full));
    // Ten looks, each of which reads all jobs.
    let looked_at = proxy.sent();
    while proxy.sent() < looked_at + 10 {
        assert!(started.elapsed() < TIMEOUT, "{} statements", proxy.sent());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let most = started.elapsed().as_millis() / pause.as_millis() + 20;
    assert!((proxy.sent() as u128) < most, "{} statements", proxy.sent());

    let (before, cancelled_at) = (proxy.sent(), Instant::now());
    client
        .execute(
            "SELECT rouse.cancel(id) FROM unnest($1::bigint[]) AS j(id)",
            &[&ids],
        )
        .await
        .unwrap();
    let mut ended = Vec::new();
    while let Some(seen) = waiters.join_next().await {
        let row = row_of(seen.unwrap());
        assert_eq!(row["state"], "cancelled");
        ended.push(row["id"].as_i64().unwrap());
    }
    ended.sort_unstable();
    assert_eq!(ended, ids);
    // The outcomes of the jobs are read in batches of 16, between looks.
    let after = proxy.sent();
    let most = 1000 / 16 + 20 + cancelled_at.elapsed().as_millis() / pause.as_millis();
    let statements = after - before;
    assert!((statements as u128) < most, "{statements} statements");
    assert_eq!(ends.waiters(), 0);
    tokio::time::sleep(4 * pause).await;
    assert!(
        proxy.sent() <= after + 1,
        "nobody waits, nothing is looked at"
    );
    looks.abort();
}

#[tokio::test]
async fn waiters_that_give_up_leave_nothing_behind() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = JobId(enqueue(&client, "x", json!(1)).await);
    let ends = Ends::default();
    tokio::spawn(ends.clone().look_forever(db.store()));
    let mut waiters = JoinSet::new();
    for _ in 0..10 {
        let ends = ends.clone();
        waiters.spawn(async move { ends.wait(id, LONG).await });
    }
    until_waiting(&ends, 10).await;
    waiters.shutdown().await;
    assert_eq!(ends.waiters(), 0);
    let seen = ends.wait(id, Duration::ZERO).await.unwrap();
    assert_eq!(row_of(seen)["state"], "queued");
    assert_eq!(ends.waiters(), 0);
}

#[tokio::test]
async fn a_job_that_ends_on_this_host_ends_its_wait_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Polls are too late for this test.
    let ends = Ends::with(10, LONG..=LONG);
    tokio::spawn(ends.clone().look_forever(db.store()));
    let parts = Parts {
        store: db.store(),
        listen_connector: db.connector(),
        sandbox: sandbox(),
        catalog: catalog().await,
        sql_logins: Default::default(),
        middleware: Vec::new(),
    };
    let health = Health {
        ends: ends.clone(),
        ..Health::default()
    };
    let worker = TestWorker::start_with_health(parts, Settings::default(), health);
    let later = "SELECT rouse.enqueue('noop', '{\"n\": 1}', run_at => now() + interval '1 day')";
    let id: i64 = client.query_one(later, &[]).await.unwrap().get(0);
    let other: i64 = client.query_one(later, &[]).await.unwrap().get(0);
    let wait = |id| {
        let ends = ends.clone();
        tokio::spawn(async move { ends.wait(JobId(id), LONG).await.unwrap() })
    };
    let (waiting, others) = (wait(id), wait(other));
    until_waiting(&ends, 2).await;
    // The job was looked at before it ended.
    let seen = ends.wait(JobId(id), Duration::ZERO).await.unwrap();
    assert_eq!(row_of(seen)["state"], "queued");
    client
        .execute("SELECT rouse.reschedule($1)", &[&id])
        .await
        .unwrap();
    let row = row_of(
        tokio::time::timeout(TIMEOUT, waiting)
            .await
            .unwrap()
            .unwrap(),
    );
    assert_eq!(
        (&row["state"], &row["result"]),
        (&json!("succeeded"), &json!({"n": 1}))
    );
    assert!(!others.is_finished());
    worker.drain().await;
}

#[tokio::test]
async fn a_wait_continues_across_an_outage_of_the_database() {
    let db = TestDb::new().await;
    let (client, proxy) = (db.client().await, Proxy::start(&db).await);
    let first = enqueue(&client, "x", json!(1)).await;
    let second = enqueue(&client, "x", json!(2)).await;
    let ends = Ends::default();
    tokio::spawn(ends.clone().look_forever(proxy.store()));
    let wait = |id| {
        let ends = ends.clone();
        tokio::spawn(async move { ends.wait(JobId(id), LONG).await.unwrap() })
    };
    let (waiting, longer) = (wait(first), wait(second));
    until_waiting(&ends, 2).await;
    let seen = ends.wait(JobId(first), Duration::ZERO).await.unwrap();
    assert_eq!(row_of(seen)["state"], "queued");
    // Sessions are cut, then no connection opens.
    cut_all_others(&client).await;
    cancel(&client, first).await;
    let row = row_of(
        tokio::time::timeout(TIMEOUT, waiting)
            .await
            .unwrap()
            .unwrap(),
    );
    assert_eq!(row["state"], "cancelled");
    proxy.go_down();
    proxy.refused_until(|tries| !tries.is_empty()).await;
    cancel(&client, second).await;
    assert_eq!(
        ends.wait(JobId(second), Duration::ZERO).await,
        Ok(Seen::Nothing),
        "the database does not respond"
    );
    assert!(!longer.is_finished());
    proxy.come_up();
    let row = row_of(
        tokio::time::timeout(TIMEOUT, longer)
            .await
            .unwrap()
            .unwrap(),
    );
    assert_eq!(row["state"], "cancelled");
}

/// Reads of the result of job `$1` fail with SQLSTATE `$2`, as if its page were damaged. Its status can be read.
const DAMAGE: &str = "
    CREATE OR REPLACE FUNCTION rouse.outcomes(ids bigint[])
    RETURNS TABLE (id bigint, state rouse.state, ended boolean, attempt integer, result jsonb, error jsonb)
    LANGUAGE plpgsql AS $$
    BEGIN
        IF $1 = ANY (ids) AND current_query() NOT LIKE '%CASE WHEN NOT o.ended%' THEN
            RAISE EXCEPTION 'missing chunk number 0 for toast value 1' USING ERRCODE = '$2';
        END IF;
        RETURN QUERY SELECT o.* FROM rouse._outcomes(ids) AS o;
    END
    $$";

/// Prepares the database for [`damage`], and calls it for the first time.
pub(super) async fn damage_first(client: &Client, id: i64, sqlstate: &str) {
    client
        .batch_execute("ALTER FUNCTION rouse.outcomes(bigint[]) RENAME TO _outcomes")
        .await
        .unwrap();
    damage(client, id, sqlstate).await;
}

async fn damage(client: &Client, id: i64, sqlstate: &str) {
    let sql = DAMAGE
        .replace("$1", &id.to_string())
        .replace("$2", sqlstate);
    client.batch_execute(&sql).await.unwrap();
}

/// Waits for two jobs that have ended. Reading the result of the second fails with this SQLSTATE.
async fn wait_for_a_damaged_job(db: &TestDb, sqlstate: &str) -> (Seen, JoinHandle<Seen>) {
    let client = db.client().await;
    let ids = [
        enqueue(&client, "x", json!(1)).await,
        enqueue(&client, "x", json!(2)).await,
    ];
    for id in ids {
        cancel(&client, id).await;
    }
    damage_first(&client, ids[1], sqlstate).await;
    let ends = Ends::default();
    let [whole, damaged] = ids.map(|id| {
        let ends = ends.clone();
        tokio::spawn(async move { ends.wait(JobId(id), LONG).await.unwrap() })
    });
    // One look reads both.
    until_waiting(&ends, 2).await;
    tokio::spawn(ends.look_forever(db.store()));
    let seen = tokio::time::timeout(TIMEOUT, whole).await.unwrap();
    (seen.unwrap(), damaged)
}

#[tokio::test]
async fn a_result_that_cannot_be_read_is_refused_to_its_own_callers_only() {
    let db = TestDb::new().await;
    let (whole, damaged) = wait_for_a_damaged_job(&db, "XX001").await;
    assert_eq!(row_of(whole)["state"], "cancelled");
    let damaged = tokio::time::timeout(TIMEOUT, damaged).await.unwrap();
    match damaged.unwrap() {
        Seen::Unreadable(why) => assert!(why.contains("missing chunk number 0"), "{why}"),
        seen => panic!("{seen:?}"),
    }
}

#[tokio::test]
async fn a_result_that_may_be_readable_later_delays_its_own_callers_only() {
    let db = TestDb::new().await;
    // An I/O error.
    let (whole, damaged) = wait_for_a_damaged_job(&db, "58030").await;
    assert_eq!(row_of(whole)["state"], "cancelled");
    assert!(!damaged.is_finished());
    // No job has the id 0, so that no read fails any more.
    damage(&db.client().await, 0, "58030").await;
    let seen = tokio::time::timeout(TIMEOUT, damaged).await.unwrap();
    assert_eq!(row_of(seen.unwrap())["state"], "cancelled");
}
