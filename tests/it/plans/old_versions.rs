//! What calls read while a transaction stays open that keeps old versions of rows.

use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::old_versions::{entries_read, keep_versions};

/// Registers a worker, and returns its incarnation with its key, as arguments.
async fn registered(client: &Client) -> String {
    const REGISTER: &str = "SELECT incarnation FROM rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    let worker: i64 = client.query_one(REGISTER, &[]).await.unwrap().get(0);
    format!("{worker}, sha256('key')")
}

#[tokio::test]
async fn a_peek_does_not_read_releases_that_were_continued_long_ago() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _old = keep_versions(&db).await;
    client
        .batch_execute(
            "INSERT INTO rouse.pending_release (chain, succeeded, noted_at, try_at)
             SELECT n, true, now(), now() - interval '1 hour' FROM generate_series(1, 1000) AS n;
             DELETE FROM rouse.pending_release",
        )
        .await
        .unwrap();
    let peek = "SELECT rouse.peek('{}', '{}', 0, 0, now(), now(), NULL)";
    let read = entries_read(&client, &["rouse.pending_release"], peek).await;
    assert!(read < 20, "{read}");
}

/// The host that continues it may die: peeks look at the releases of the last seconds.
#[tokio::test]
async fn a_release_that_is_continued_in_parts_can_be_found_by_another_host() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let who = registered(&client).await;
    let row = client.query_one("SELECT rouse.enqueue('parent')", &[]);
    let parent: i64 = row.await.unwrap().get(0);
    client
        .batch_execute(&format!(
            "SELECT rouse.enqueue('child', after => '[{parent}]') FROM generate_series(1, 3);
             INSERT INTO rouse.pending_release (chain, succeeded, noted_at, try_at)
             VALUES ({parent}, true, now() - interval '1 hour', now() - interval '1 hour')"
        ))
        .await
        .unwrap();
    let part = format!("SELECT rouse.continue_releases({who}, 1)");
    let has_more: bool = client.query_one(&part, &[]).await.unwrap().get(0);
    assert!(has_more);
    let recent = "SELECT try_at > clock_timestamp() - interval '10 s' FROM rouse.pending_release";
    let is_recent: bool = client.query_one(recent, &[]).await.unwrap().get(0);
    assert!(is_recent);
}

#[tokio::test]
async fn a_claim_by_source_starts_after_the_turns_that_were_claimed_before() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let who = registered(&client).await;
    client
        .batch_execute("SELECT rouse.enqueue('x', source => 'other')")
        .await
        .unwrap();
    let _old = keep_versions(&db).await;
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[1000]), source => 'mine');
             DELETE FROM rouse.job;
             SELECT rouse.enqueue('x', source => 'mine'), rouse.enqueue('x', source => 'theirs')",
        )
        .await
        .unwrap();
    let mine = "SELECT turn FROM rouse.job WHERE source = 'mine'";
    let turn: i64 = client.query_one(mine, &[]).await.unwrap().get(0);
    let claim = |mine: i64, theirs: i64| {
        format!(
            "SELECT unnest(ids) FROM rouse.claim_bound({who}, 7, ARRAY[NULL, (SELECT min(id) FROM rouse.lane)], '{{mine,theirs}}', 60000, 10,
                                                       ARRAY[0, 0, {mine}, {theirs}])"
        )
    };
    let read = entries_read(&client, &["rouse.job"], &claim(turn - 1, 0)).await;
    assert!(read < 50, "{read}");
    for (mine, theirs, jobs) in [(turn, turn + 1, 0), (turn, turn, 1), (turn - 1, 0, 1)] {
        let claimed = client.query(&claim(mine, theirs), &[]).await.unwrap();
        assert_eq!(claimed.len(), jobs, "after {mine} and {theirs}");
    }
}

#[tokio::test]
async fn a_settlement_does_not_read_the_dependencies_of_jobs_between_its_own() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let who = registered(&client).await;
    client
        .batch_execute(
            "SELECT setval('rouse.turn_seq', 1), rouse.enqueue('x'), setval('rouse.turn_seq', 100000), rouse.enqueue('x');
             UPDATE rouse.job SET state = 'running', fence = 7, worker = (SELECT max(incarnation) FROM rouse.worker), attempt = 1,
                    claimed_at = now(), lease_until = now() + interval '1 hour'",
        )
        .await
        .unwrap();
    let _old = keep_versions(&db).await;
    client
        .batch_execute(
            "INSERT INTO rouse.dependency (chain, on_failure, job) SELECT n, 'cancel', -n FROM generate_series(1001, 2000) AS n;
             DELETE FROM rouse.dependency",
        )
        .await
        .unwrap();
    let settle = format!(
        "SELECT rouse.settle({who}, ARRAY(
             SELECT ROW(j.id, 7, 'succeeded', 1, '1', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::rouse.settlement
             FROM rouse.job AS j), NULL, false)"
    );
    let read = entries_read(&client, &["rouse.dependency"], &settle).await;
    assert!(read < 20, "{read}");
    let settled = client.query(&settle, &[]).await.unwrap();
    assert_eq!(settled.len(), 2);
}
