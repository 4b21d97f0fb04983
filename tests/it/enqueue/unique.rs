//! Unique keys: at most one live job per key and tenant.

use tokio_postgres::IsolationLevel;

use super::live_jobs;
use crate::support::TestDb;
use crate::support::worker::{SESSION_WAITS, cancel, until_true};

#[tokio::test]
async fn a_unique_key_returns_the_live_job_that_holds_it() {
    let db = TestDb::new().await;
    let (mut one, two) = (db.client().await, db.client().await);
    const CALL: &str = "SELECT rouse.enqueue('x', unique_key => 'k')";
    let first: i64 = two.query_one(CALL, &[]).await.unwrap().get(0);
    let again: i64 = two.query_one(CALL, &[]).await.unwrap().get(0);
    assert_eq!(again, first);
    let other = "SELECT rouse.enqueue('y', unique_key => 'k')";
    assert_ne!(
        two.query_one(other, &[]).await.unwrap().get::<_, i64>(0),
        first
    );
    cancel(&two, first).await;
    let third: i64 = two.query_one(CALL, &[]).await.unwrap().get(0);
    assert_ne!(third, first, "the key is free once the job has ended");
    cancel(&two, third).await;

    // Two concurrent calls: the second waits for the first to commit and gets its id.
    let transaction = one.transaction().await.unwrap();
    let live: i64 = transaction.query_one(CALL, &[]).await.unwrap().get(0);
    let waiting =
        tokio::spawn(async move { two.query_one(CALL, &[]).await.unwrap().get::<_, i64>(0) });
    until_true(&db.client().await, SESSION_WAITS).await;
    transaction.commit().await.unwrap();
    assert_eq!(waiting.await.unwrap(), live);
}

#[tokio::test]
async fn a_unique_key_is_scoped_to_one_tenant_or_to_jobs_without_one() {
    let db = TestDb::new().await;
    let (mut one, client) = (db.client().await, db.client().await);
    let transaction = one.transaction().await.unwrap();
    let sql = "SELECT rouse.enqueue('x', unique_key => 'k', tenant => $1)";
    let first: i64 = transaction.query_one(sql, &[&"a"]).await.unwrap().get(0);
    // That transaction stays open. If the other tenant waited for it, this would time out.
    client
        .batch_execute("SET lock_timeout = '100ms'")
        .await
        .unwrap();
    let mut ids = vec![first];
    for tenant in [Some("b"), None] {
        let id: i64 = client.query_one(sql, &[&tenant]).await.unwrap().get(0);
        let again: i64 = client.query_one(sql, &[&tenant]).await.unwrap().get(0);
        assert_eq!(id, again, "{tenant:?}");
        ids.push(id);
    }
    transaction.commit().await.unwrap();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3);

    // A retry has the key of its own tenant only.
    cancel(&client, first).await;
    let retry = "SELECT rouse.retry($1)";
    let again: i64 = client.query_one(retry, &[&first]).await.unwrap().get(0);
    cancel(&client, again).await;
    let live: i64 = client.query_one(sql, &[&"a"]).await.unwrap().get(0);
    let refused = client.query_one(retry, &[&first]).await.unwrap_err();
    let message = refused.as_db_error().unwrap().message().to_owned();
    assert!(
        message.contains(&format!("live job {live} has its unique key 'k'")),
        "{message}"
    );

    // The longest possible names fit into the index.
    let longest = "rouse.enqueue_unique(repeat('h', 128), (SELECT string_agg(chr(127000 + n), '') FROM generate_series(1, 256) AS n),
        tenant => (SELECT string_agg(chr(128000 + n), '') FROM generate_series(1, 200) AS n))";
    let created: bool = client
        .query_one(&format!("SELECT created FROM {longest}"), &[])
        .await
        .unwrap()
        .get(0);
    assert!(created);
}

#[tokio::test]
async fn enqueue_unique_reports_whether_it_created_the_job_and_how_the_live_one_differs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let unique = async |args: &str| -> (i64, bool, Vec<String>) {
        let sql =
            format!("SELECT id, created, differs FROM rouse.enqueue_unique('x', 'k', {args})");
        let row = client.query_one(&sql, &[]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    let (id, created, differs) = unique("'{\"n\": 1}', tags => '{a,b}'").await;
    assert!(created && differs.is_empty(), "{differs:?}");
    // The same tags in another order make the same lane.
    let same = unique("'{\"n\": 1.0}', tags => '{b,a}', run_at => now() + interval '1 day'").await;
    assert_eq!(same, (id, false, vec![]));
    let other = "'{\"n\": 2}', queue => 'q', source => 's', priority => 'low', max_attempts => 2, grants => '{\"memory_mb\": 9}',
                 lease => '1 minute', timeout => '1 minute', job_timeout => '1 hour'";
    let all = [
        "payload",
        "queue",
        "source",
        "priority",
        "max_attempts",
        "tags",
        "grants",
        "lease",
        "timeout",
        "job_timeout",
    ];
    assert_eq!(
        unique(other).await,
        (id, false, all.map(String::from).to_vec())
    );
    assert_eq!(live_jobs(&client).await, 1, "nothing was added");
    let (other, created, _) = unique("tenant => 't'").await;
    assert!(created && other != id);
    cancel(&client, id).await;
    let (next, created, _) = unique("'{}'").await;
    assert!(created && next != id, "the key is free again");
}

#[tokio::test]
async fn a_key_taken_after_the_snapshot_is_a_serialization_failure() {
    let db = TestDb::new().await;
    let (mut one, other) = (db.client().await, db.client().await);
    let transaction = one
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .start()
        .await
        .unwrap();
    transaction.query("SELECT 1", &[]).await.unwrap();
    const CALL: &str = "SELECT rouse.enqueue('x', unique_key => 'k')";
    other.query(CALL, &[]).await.unwrap();
    let refused = transaction.query(CALL, &[]).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "40001");
}
