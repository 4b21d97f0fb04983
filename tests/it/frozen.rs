//! Hosts that are frozen during a round trip: the server has the statement, and the host does not read the response.

use rouse::worker::Settings;
use serde_json::json;

use crate::support::TestDb;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{TestWorker, cancel, catalog, enqueue, show, until, until_true};

/// Far more than the buffers of a connection can hold: 64 payloads of 64 KiB that do not compress.
const JOBS: i64 = 64;
const ENQUEUE: &str = "
    SELECT count(*) FROM (SELECT rouse.enqueue('test.race', jsonb_build_object('ms', 0, 'pad', (
        SELECT string_agg(md5(random()::text || part), '') FROM generate_series(1, 2048) AS part WHERE n > 0))) FROM generate_series(1, 64) AS n) AS enqueued";

/// Freezes a host before it reads the response of this statement. Its claim is committed and holds no lock: the jobs
/// can be cancelled, and other hosts adopt them when the lease ends.
async fn freeze_a_host_during_the_response_to(statement: &'static str) {
    let db = TestDb::new().await;
    let client = db.client().await;
    // If a frozen host held a row lock, this test would wait forever.
    client
        .batch_execute("SET statement_timeout = '1min'")
        .await
        .unwrap();
    let proxy = Proxy::start(&db).await;
    let frozen = TestWorker::start_through(
        proxy.store(),
        db.connector(),
        Settings::default(),
        catalog().await,
    );
    let small = enqueue(&client, "noop", json!({"n": 1})).await;
    until(&client, small, |job| job.state == "succeeded").await;
    let response = proxy.hold(statement, Side::Response);
    let enqueued: i64 = client.query_one(ENQUEUE, &[]).await.unwrap().get(0);
    assert_eq!(enqueued, JOBS);
    response.caught().await;

    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.job WHERE state = 'running')",
    )
    .await;
    let claimed: i64 = client
        .query_one("SELECT min(id) FROM rouse.job WHERE state = 'running'", &[])
        .await
        .unwrap()
        .get(0);
    assert!(cancel(&client, claimed).await);
    let blocked: i64 = client
        .query_one(
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event = 'ClientWrite' AND backend_xid IS NOT NULL",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(blocked, 0, "no writing transaction waits for the host");

    // The leases end at once: after 15 s, the host would give up the response.
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() WHERE state = 'running'")
        .await
        .unwrap();
    let other = TestWorker::start(&db, Settings::default()).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let run_by_other: i64 = client
        .query_one(
            "SELECT count(*) FROM rouse.jobs WHERE state = 'succeeded' AND handler = 'test.race' AND worker = (SELECT max(incarnation) FROM rouse.worker)",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(run_by_other, JOBS - 1);
    response.release();
    other.drain().await;
    frozen.drain().await;
    assert_eq!(show(&client, claimed).await.state, "cancelled");
}

#[tokio::test]
async fn a_host_frozen_during_the_response_to_its_claim_does_not_block_others() {
    freeze_a_host_during_the_response_to("FROM rouse.claim(").await;
}

#[tokio::test]
async fn a_host_frozen_while_reading_its_claimed_jobs_does_not_block_others() {
    freeze_a_host_during_the_response_to("FROM rouse.claimed(").await;
}
