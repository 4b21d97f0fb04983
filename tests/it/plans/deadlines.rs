//! Deadlines among many others.

use crate::support::TestDb;

use super::{BACKLOG, run};

#[tokio::test]
async fn enforcing_deadlines_reads_only_the_jobs_whose_deadline_has_passed() {
    const REGISTER: &str =
        "SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    const ENFORCE: &str = "SELECT handled::bigint FROM rouse.enforce_deadlines((SELECT max(incarnation) FROM rouse.worker), sha256('key'), 1000)";
    let db = TestDb::new().await;
    let (mut client, producer) = (db.client().await, db.client().await);
    client
        .batch_execute("ANALYZE rouse.job, rouse.deadline")
        .await
        .unwrap();
    client.query(REGISTER, &[]).await.unwrap();
    // The session keeps the plans that it makes now, while the tables are empty.
    for passed in [0, 10, 20] {
        producer
            .query(
                "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[$1::integer]), job_timeout => '1 day')",
                &[&BACKLOG],
            )
            .await
            .unwrap();
        // Half of these jobs have ended in time.
        let sql = "UPDATE rouse.deadline SET try_at = clock_timestamp() WHERE job IN (SELECT job FROM rouse.deadline LIMIT $1)";
        producer.execute(sql, &[&passed]).await.unwrap();
        let sql = "SELECT rouse.cancel(job) FROM (SELECT job FROM rouse.deadline WHERE try_at < now() LIMIT $1) AS d";
        producer.query(sql, &[&(passed / 2)]).await.unwrap();
        let (handled, rows) = run(&mut client, ENFORCE, &[]).await;
        assert_eq!(handled, [passed]);
        assert!(rows <= 12 * passed, "{rows} rows for {passed} deadlines");
    }
}

#[tokio::test]
async fn deadlines_handled_long_ago_are_not_read_again_while_a_transaction_is_open() {
    const REGISTER: &str =
        "SELECT rouse.register('w', sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
    let db = TestDb::new().await;
    let (client, old) = (db.client().await, db.client().await);
    client.query(REGISTER, &[]).await.unwrap();
    client
        .batch_execute(
            // Inserted with these times: an update would leave old index entries, which a concurrent test may keep.
            "INSERT INTO rouse.deadline (job, deadline_at, try_at, timeout_ms)
             SELECT n, p.passed_at, p.passed_at, 1000
             FROM generate_series(1, 1000) AS n, (SELECT clock_timestamp() - interval '1 hour') AS p(passed_at)",
        )
        .await
        .unwrap();
    old.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT FROM rouse.deadline LIMIT 1")
        .await
        .unwrap();
    // The number of deadlines that a call has handled, and the number of index entries that it has read.
    let enforce = async |within_ms: Option<i64>| -> (i32, i64) {
        const READ: &str =
            "SELECT idx_tup_read FROM pg_stat_user_indexes WHERE indexrelname = 'deadline_due'";
        const ENFORCE: &str = "SELECT handled, pg_stat_force_next_flush()
            FROM rouse.enforce_deadlines((SELECT max(incarnation) FROM rouse.worker), sha256('key'), 1000, clock_timestamp() - $1::bigint * interval '1 millisecond')";
        let before: i64 = client.query_one(READ, &[]).await.unwrap().get(0);
        let handled = client
            .query_one(ENFORCE, &[&within_ms])
            .await
            .unwrap()
            .get(0);
        let after: i64 = client.query_one(READ, &[]).await.unwrap().get(0);
        (handled, after - before)
    };
    let (handled, _) = enforce(None).await;
    assert_eq!(handled, 1000);
    let (handled, read) = enforce(None).await;
    assert!(
        handled == 0 && read >= 1000,
        "{handled} handled, {read} read"
    );
    let (handled, read) = enforce(Some(60_000)).await;
    assert!(handled == 0 && read <= 10, "{handled} handled, {read} read");
}
