//! Chains that other jobs wait for: their retries, their completion, their deletion.

use serde_json::{Value, json};

use super::{enqueue_after, failed, refusal, settle_ready, waits_for};
use crate::support::TestDb;
use crate::support::claims::{claim, result};
use crate::support::worker::{cancel, enqueue, events, forget, show};

#[tokio::test]
async fn a_chain_continues_with_the_retry_of_its_last_job() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    settle_ready(&store, &[failed()]).await;
    let again: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&first])
        .await
        .unwrap()
        .get(0);
    let child = enqueue_after(&client, "x", json!([first])).await;
    assert_eq!(
        waits_for(&client, child).await,
        Some(vec![first]),
        "the chain is live again"
    );
    let chain_result = "SELECT rouse.chain_result($1)";
    let row = client.query_one(chain_result, &[&first]).await.unwrap();
    assert_eq!(row.get::<_, Option<Value>>(0), None);
    settle_ready(&store, &[result("5")]).await;
    for id in [first, again] {
        let row = client.query_one(chain_result, &[&id]).await.unwrap();
        assert_eq!(row.get::<_, Option<Value>>(0), Some(json!(5)));
        let rows = client
            .query("SELECT job, state::text FROM rouse.chain($1)", &[&id])
            .await
            .unwrap();
        let jobs: Vec<(i64, String)> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        assert_eq!(
            jobs,
            [(first, "failed".into()), (again, "succeeded".into())]
        );
    }
    let fresh: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&again])
        .await
        .unwrap()
        .get(0);
    let sql = "SELECT chain FROM rouse.jobs WHERE id = $1";
    let row = client.query_one(sql, &[&fresh]).await.unwrap();
    assert_eq!(
        row.get::<_, i64>(0),
        fresh,
        "a chain that has succeeded is final"
    );
}

/// Failed jobs may be kept for longer than others.
#[tokio::test]
async fn a_failed_job_is_not_the_end_of_its_chain_if_the_retry_of_an_older_one_is_no_longer_kept() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let retry = async |id: i64| -> i64 {
        let row = client.query_one("SELECT rouse.retry($1)", &[&id]).await;
        row.unwrap().get(0)
    };
    let first = enqueue(&client, "x", json!(1)).await;
    settle_ready(&store, &[failed()]).await;
    let second = retry(first).await;
    settle_ready(&store, &[failed()]).await;
    let third = retry(first).await;
    settle_ready(&store, &[result("5")]).await;
    forget(&client, third).await;
    let sql = "SELECT array_agg(job), bool_or(is_last) FROM rouse.chain($1)";
    let row = client.query_one(sql, &[&first]).await.unwrap();
    let (kept, has_last): (Vec<i64>, bool) = (row.get(0), row.get(1));
    assert_eq!((kept, has_last), (vec![first, second], false));
    let fresh = retry(second).await;
    let sql = "SELECT chain FROM rouse.jobs WHERE id = $1";
    let row = client.query_one(sql, &[&fresh]).await.unwrap();
    assert_eq!(
        row.get::<_, i64>(0),
        fresh,
        "a chain that has ended in an unknown way is final"
    );
}

#[tokio::test]
async fn a_chain_is_completed_and_cancelled_through_any_of_its_jobs() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut retries = Vec::new();
    for _ in 0..2 {
        let id = enqueue(&client, "x", json!(1)).await;
        settle_ready(&store, &[failed()]).await;
        let again: i64 = client
            .query_one("SELECT rouse.retry($1)", &[&id])
            .await
            .unwrap()
            .get(0);
        claim(&store, 1).await;
        retries.push((id, again));
    }
    client
        .execute(
            "SELECT rouse.complete_chain($1, '7'), rouse.cancel_chain($2)",
            &[&retries[0].0, &retries[1].0],
        )
        .await
        .unwrap();
    assert_eq!(show(&client, retries[0].1).await.result, Some(json!(7)));
    assert_eq!(show(&client, retries[1].1).await.state, "cancelled");
    let error = client
        .query_one("SELECT rouse.cancel_chain(99999999)", &[])
        .await
        .unwrap_err();
    assert!(
        refusal(&error).starts_with("rouse: job 99999999 does not exist, or is no longer kept")
    );
}

#[tokio::test]
async fn a_chain_is_deleted_only_with_the_jobs_that_wait_for_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let first = enqueue(&client, "x", json!(1)).await;
    let after = json!({"p": {"job": first, "on_failure": "wait"}});
    let child = enqueue_after(&client, "x", after).await;
    let error = client
        .query_one("SELECT rouse.delete_chain($1)", &[&first])
        .await
        .unwrap_err();
    assert_eq!(
        refusal(&error),
        format!(
            "rouse: chain {first} cannot be deleted: job {child} waits for it\nSELECT rouse.delete_chain({first}, cascade => true) cancels them too."
        )
    );
    let many = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint)) FROM generate_series(1, 12)";
    client.execute(many, &[&first]).await.unwrap();
    let error = client
        .query_one("SELECT rouse.delete_chain($1)", &[&first])
        .await
        .unwrap_err();
    assert!(
        refusal(&error).contains("and others wait for it"),
        "{error:?}"
    );
    client
        .execute("SELECT rouse.delete_chain($1, cascade => true)", &[&first])
        .await
        .unwrap();
    assert_eq!(
        events(&client, first).await,
        ["requested", "deleted", "cancelled"]
    );
    let sql = "SELECT count(*) FROM rouse.job";
    assert_eq!(
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0),
        0
    );

    let running = enqueue(&client, "x", json!(1)).await;
    claim(&store, 1).await;
    let error = client
        .query_one("SELECT rouse.delete_chain($1, true)", &[&running])
        .await
        .unwrap_err();
    assert!(refusal(&error).contains("cannot be deleted: it is running"));
}

#[tokio::test]
async fn deleting_a_chain_that_was_cancelled_cancels_the_jobs_that_still_wait() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = enqueue(&client, "x", json!(1)).await;
    let after = json!({"p": {"job": parent, "on_failure": "wait"}});
    let child = enqueue_after(&client, "x", after).await;
    assert!(cancel(&client, parent).await);
    assert_eq!(show(&client, child).await.state, "queued");
    client
        .execute("SELECT rouse.delete_chain($1, cascade => true)", &[&parent])
        .await
        .unwrap();
    assert_eq!(show(&client, child).await.state, "cancelled");
}

#[tokio::test]
async fn a_chain_for_which_many_jobs_wait_is_deleted_in_bounded_calls() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let parent = enqueue(&client, "x", json!(1)).await;
    let many = "SELECT rouse.enqueue('x', after => jsonb_build_object('p', jsonb_build_object(
                    'job', $1::bigint, 'on_failure', (ARRAY['cancel', 'run', 'wait'])[1 + n % 3])))
                FROM generate_series(1, 1500) AS n";
    client.execute(many, &[&parent]).await.unwrap();
    let delete = "SELECT rouse.delete_chain($1, cascade => true)";
    let mut calls = Vec::new();
    for _ in 0..2 {
        let row = client.query_one(delete, &[&parent]).await.unwrap();
        let live = "SELECT count(*) FROM rouse.job";
        let live: i64 = client.query_one(live, &[]).await.unwrap().get(0);
        calls.push((row.get::<_, bool>(0), live));
    }
    assert_eq!(calls, [(false, 501), (true, 0)]);
    let cancelled =
        "SELECT count(*) FROM rouse.record WHERE event = 'cancelled' AND detail ->> 'after' = $1";
    let row = client
        .query_one(cancelled, &[&parent.to_string()])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 1500, "each has a record");
}
