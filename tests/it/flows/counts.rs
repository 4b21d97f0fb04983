//! The counts of `rouse.flows`.

use serde_json::json;
use tokio_postgres::Client;

use super::{enqueue_flow, job_of, order, settle_ready};
use crate::support::TestDb;
use crate::support::claims::claim;

/// The number of all jobs of a flow, and of those that wait, are scheduled, ready, running, succeeded, failed,
/// cancelled and stuck.
async fn counts(client: &Client, flow: i64) -> Vec<i64> {
    let counted = "SELECT ARRAY[jobs, waiting, scheduled, ready, running, succeeded, failed, cancelled, stuck]
         FROM rouse.flows WHERE id = $1";
    let listed = "SELECT ARRAY[count(*), count(*) FILTER (WHERE waits_for IS NOT NULL),
             count(*) FILTER (WHERE state = 'queued' AND waits_for IS NULL AND available_at > now()),
             count(*) FILTER (WHERE state = 'queued' AND waits_for IS NULL AND available_at <= now()),
             count(*) FILTER (WHERE state = 'running'), count(*) FILTER (WHERE state = 'succeeded'),
             count(*) FILTER (WHERE state = 'failed'), count(*) FILTER (WHERE state = 'cancelled'), count(*) FILTER (WHERE is_stuck)]
         FROM rouse.flow($1)";
    let row = client.query_one(counted, &[&flow]).await.unwrap();
    let counted: Vec<i64> = row.get(0);
    let row = client.query_one(listed, &[&flow]).await.unwrap();
    assert_eq!(counted, row.get::<_, Vec<i64>>(0), "as rouse.flow");
    counted
}

#[tokio::test]
async fn the_counts_of_a_flow_are_those_of_the_latest_job_of_each_name() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut jobs = order();
    let later = json!({"name": "later", "handler": "x", "run_at": "2999-01-01T00:00:00Z"});
    jobs.as_array_mut().unwrap().push(later);
    let flow = enqueue_flow(&client, jobs).await;
    assert_eq!(counts(&client, flow).await, [5, 2, 1, 2, 0, 0, 0, 0, 0]);
    let (charge, reserve) = (
        job_of(&client, flow, "charge").await,
        job_of(&client, flow, "reserve").await,
    );
    settle_ready(&store, &[charge]).await;
    assert_eq!(counts(&client, flow).await, [5, 1, 1, 0, 0, 1, 1, 1, 1]);
    // The retry of a job that has succeeded starts a chain of its own.
    let retry = "SELECT rouse.retry($1)";
    client.query_one(retry, &[&reserve]).await.unwrap();
    assert_eq!(counts(&client, flow).await, [5, 1, 1, 1, 0, 0, 1, 1, 1]);
    assert_eq!(claim(&store, 9).await.len(), 1);
    assert_eq!(counts(&client, flow).await, [5, 1, 1, 0, 1, 0, 1, 1, 1]);
}

#[tokio::test]
async fn counting_and_listing_a_flow_reads_each_of_its_jobs_once() {
    const JOBS: i64 = 300;
    // The rows that this session has read since it last reported to the server.
    const READ: &str = "SELECT coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0)
         FROM pg_stat_xact_user_tables WHERE relid = 'rouse.job'::regclass";
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let mut jobs = vec![json!({"name": "first", "handler": "x"})];
    jobs.extend(
        (1..JOBS).map(|n| json!({"name": n.to_string(), "handler": "x", "after": ["first"]})),
    );
    let flow = enqueue_flow(&client, json!(jobs)).await;
    let transaction = client.transaction().await.unwrap();
    for sql in [
        "SELECT waiting FROM rouse.flows WHERE id = $1",
        "SELECT count(*) FILTER (WHERE waits_for IS NOT NULL AND NOT is_stuck) FROM rouse.flow($1)",
    ] {
        let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
        let row = transaction.query_one(sql, &[&flow]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), JOBS - 1, "{sql}");
        let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
        let read = after - before;
        assert!((JOBS..JOBS + 10).contains(&read), "{sql}: {read}");
    }
}

#[tokio::test]
async fn the_pages_of_a_flow_are_its_jobs_in_order_and_each_looks_up_only_its_own() {
    const JOBS: usize = 300;
    const READ: &str = "SELECT coalesce(idx_tup_fetch, 0) FROM pg_stat_xact_user_tables WHERE relid = 'rouse.dependency'::regclass";
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.store());
    let mut jobs = vec![json!({"name": "first", "handler": "x"})];
    jobs.extend(
        (1..JOBS).map(|n| json!({"name": n.to_string(), "handler": "x", "after": ["first"]})),
    );
    let flow = enqueue_flow(&client, json!(jobs)).await;
    let whole = store.flow(flow).await.unwrap().unwrap();
    let (mut listed, mut after) = (Vec::new(), None);
    loop {
        let page = store.flow_page(flow, after, 70).await.unwrap().unwrap();
        assert_eq!(
            (&page["jobs"], &page["waiting"]),
            (&json!(JOBS), &json!(JOBS - 1))
        );
        let part = page["listed"].as_array().unwrap().clone();
        let Some(last) = part.last() else { break };
        assert!(part.len() <= 70);
        after = last["chain"].as_i64();
        listed.extend(part);
    }
    assert_eq!(json!(listed), whole["jobs"]);
    let transaction = client.transaction().await.unwrap();
    let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    let sql = "SELECT count(*) FROM rouse.flow($1, NULL, 10)";
    let row = transaction.query_one(sql, &[&flow]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 10);
    let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    assert!(after - before <= 20, "{}", after - before);
}
