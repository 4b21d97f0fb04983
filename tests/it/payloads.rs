//! Large payloads are written once, and found wherever their job is stored.

use std::time::Duration;

use rouse::store::Locked;
use rouse::worker::Settings;
use tokio_postgres::Client;

use crate::support::claims::{claim, result, settlement};
use crate::support::worker::{TIMEOUT, TestWorker, ended, until_true};
use crate::support::{Host, TestDb, command, folder};

/// SQL for a payload that is stored outside its row and contains this number.
pub(crate) fn large(n: i32) -> String {
    format!("jsonb_build_object('n', {n}, 'pad', repeat('x', 4000))")
}

pub(crate) async fn query_number(client: &Client, sql: &str) -> i64 {
    client.query_one(sql, &[]).await.unwrap().get(0)
}

/// The number in the payload of a job, as every reader sees it; `None` if there is no payload.
async fn payload_number(client: &Client, id: i64) -> Option<i64> {
    let sql = "SELECT (payload ->> 'n')::bigint FROM rouse.job($1)";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

/// A live job that refers to its payload of the time `payload_at`. `payloads` are the rows that were written for it, as
/// numbers and times; those of this day of January 2020 have a partition of their own.
async fn old_job(client: &Client, day: u8, payloads: &[(i32, &str)], payload_at: &str) -> i64 {
    let id = query_number(client, "SELECT rouse.enqueue('x')").await;
    let rows: Vec<String> = payloads
        .iter()
        .map(|(n, at)| format!("({id}, '{{\"n\": {n}}}', '{at}')"))
        .collect();
    client
        .batch_execute(&format!(
            "SET ROLE rouse_owner;
             CREATE TABLE rouse.payload_2020010{day} PARTITION OF rouse.payload FOR VALUES FROM ('2020-01-0{day}') TO ('2020-01-0{}');
             INSERT INTO rouse.payload VALUES {};
             UPDATE rouse.job SET payload = NULL, payload_at = '{payload_at}';
             RESET ROLE",
            day + 1,
            rows.join(", ")
        ))
        .await
        .unwrap();
    id
}

#[tokio::test]
async fn a_large_payload_is_written_once_by_every_enqueue_and_a_small_one_stays_in_its_row() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    // In a new lane; in a known one; with a key; with enqueue_many; as a retry of the first.
    let ways = [
        format!("SELECT rouse.enqueue('x', {})", large(1)),
        format!("SELECT rouse.enqueue('x', {})", large(2)),
        format!(
            "SELECT rouse.enqueue('x', {}, lease => '1 minute')",
            large(3)
        ),
        format!(
            "SELECT id FROM rouse.enqueue_unique('x', 'key', {})",
            large(4)
        ),
        format!(
            "SELECT max(id) FROM rouse.enqueue_many('x', ARRAY[{}, '{{\"n\": 0}}', {}]) AS id",
            large(0),
            large(5)
        ),
    ];
    let mut ids = Vec::new();
    for (n, sql) in (1..).zip(&ways) {
        let id = query_number(&client, sql).await;
        assert_eq!(payload_number(&client, id).await, Some(n), "{sql}");
        ids.push(id);
    }
    assert_eq!(
        query_number(&client, "SELECT count(*) FROM rouse.payload").await,
        6
    );
    assert_eq!(
        query_number(
            &client,
            "SELECT count(*) FROM rouse.job WHERE payload IS NOT NULL"
        )
        .await,
        1
    );
    let differs = format!(
        "SELECT cardinality(differs)::bigint FROM rouse.enqueue_unique('x', 'key', {})",
        large(4)
    );
    assert_eq!(query_number(&client, &differs).await, 0, "the same payload");

    let jobs = claim(&store, 10).await;
    let sent: Vec<&str> = jobs
        .iter()
        .filter(|job| ids.contains(&job.id.0))
        .map(|job| &job.payload.0[..7])
        .collect();
    assert_eq!(
        sent,
        [
            "{\"n\": 1",
            "{\"n\": 2",
            "{\"n\": 3",
            "{\"n\": 4",
            "{\"n\": 5"
        ]
    );
    let done: Vec<_> = jobs
        .iter()
        .map(|job| settlement(job, result("1")))
        .collect();
    assert_eq!(
        store
            .settle(&done, Locked::Wait)
            .await
            .unwrap()
            .accepted
            .len(),
        7
    );
    assert_eq!(
        query_number(
            &client,
            "SELECT count(*) FROM rouse.finished WHERE payload IS NULL"
        )
        .await,
        6
    );
    assert_eq!(
        query_number(&client, "SELECT count(*) FROM rouse.payload").await,
        6,
        "nothing was copied"
    );
    for (n, id) in (1..).zip(&ids) {
        assert_eq!(payload_number(&client, *id).await, Some(n));
    }
    let found = "SELECT id FROM rouse.find_jobs('{\"payload\": {\"/n\": 2}}')";
    assert_eq!(query_number(&client, found).await, ids[1]);
    let bytes = "SELECT (detail ->> 'payload_bytes')::bigint FROM rouse.audit(now() - interval '1 h') WHERE job = ";
    assert_eq!(
        query_number(&client, &format!("{bytes} {}", ids[1])).await,
        4019
    );

    let again = query_number(&client, &format!("SELECT rouse.retry({})", ids[0])).await;
    assert_eq!(payload_number(&client, again).await, Some(1));
    assert_eq!(claim(&store, 1).await[0].payload.0.len(), 4019);
    query_number(
        &client,
        &format!(
            "SELECT rouse.enqueue('x', {}, run_at => now() + interval '1 day')",
            large(7)
        ),
    )
    .await;
    let cancelled = "SELECT rouse.cancel(max(id))::integer::bigint FROM rouse.job";
    assert_eq!(query_number(&client, cancelled).await, 1);
    assert_eq!(
        payload_number(
            &client,
            query_number(&client, "SELECT max(id) FROM rouse.finished").await
        )
        .await,
        Some(7)
    );
}

#[tokio::test]
async fn a_large_payload_stays_in_its_row_if_todays_partition_is_missing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "DO $$ BEGIN EXECUTE 'DROP TABLE rouse.payload_' || to_char(now() AT TIME ZONE 'UTC', 'YYYYMMDD'); END $$",
        )
        .await
        .unwrap();
    let id = query_number(&client, &format!("SELECT rouse.enqueue('x', {})", large(1))).await;
    assert_eq!(payload_number(&client, id).await, Some(1));
    let many = format!(
        "SELECT max(id) FROM rouse.enqueue_many('x', ARRAY[{}]) AS id",
        large(2)
    );
    assert_eq!(
        payload_number(&client, query_number(&client, &many).await).await,
        Some(2)
    );
    assert_eq!(
        query_number(
            &client,
            "SELECT count(*) FROM rouse.job WHERE payload IS NOT NULL"
        )
        .await,
        2
    );
}

#[tokio::test]
async fn a_payload_outlives_its_partition_as_long_as_a_job_refers_to_it() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    // One is live; one ended today; one ended back then, in a queue that keeps its jobs for ten years; one is no longer
    // kept.
    let live = query_number(&client, "SELECT rouse.enqueue('x')").await;
    client
        .batch_execute(&format!(
            "SELECT rouse.set_retention('long', 3650);
             SET ROLE rouse_owner;
             CREATE TABLE rouse.payload_20200101 PARTITION OF rouse.payload FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             CREATE TABLE rouse.finished_keep_3650_20200101 PARTITION OF rouse.finished_keep_3650 FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
             INSERT INTO rouse.payload SELECT id, '{{\"n\": 1}}', '2020-01-01 12:00' FROM unnest(ARRAY[{live}, -1, -2, -3]) AS id;
             UPDATE rouse.job SET payload = NULL, payload_at = '2020-01-01 12:00';
             INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, uncounted, state, payload_at, keep_days)
             SELECT f.id, j.lane, f.at, f.at, f.at, 0, 0, 'cancelled', '2020-01-01 12:00', f.keep
             FROM rouse.job AS j, (VALUES (-1, now(), 0), (-2, timestamptz '2020-01-01 13:00', 3650)) AS f(id, at, keep)"
        ))
        .await
        .unwrap();
    // A finished job of the next day may have been enqueued with one of these payloads, and needs no copy.
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200102 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-02') TO ('2020-01-03')",
        )
        .await
        .unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(
        query_number(&client, "SELECT count(*) FROM rouse.payload_20200101").await,
        4
    );
    for dropped in [1, 0] {
        assert_eq!(store.maintain_partitions().await.unwrap(), (dropped, 0));
        for id in [live, -1, -2] {
            assert_eq!(payload_number(&client, id).await, Some(1), "job {id}");
        }
        assert_eq!(
            query_number(&client, "SELECT count(*) FROM rouse.payload").await,
            3
        );
    }
    assert_eq!(claim(&store, 1).await[0].payload.0, "{\"n\": 1}");
}

/// A gate that merges jobs writes the payload of the newer job in addition to that of the older one. An enqueue that
/// started first may be the last to pass.
#[tokio::test]
async fn a_merged_job_keeps_its_last_payload_when_the_partition_is_dropped() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let payloads = [
        (1, "2020-01-01 11:00"),
        (3, "2020-01-01 13:00"),
        (2, "2020-01-01 12:00"),
    ];
    let id = old_job(&client, 1, &payloads, "2020-01-01 12:00").await;
    assert_eq!(payload_number(&client, id).await, Some(2));
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(payload_number(&client, id).await, Some(2));
    let rows = "SELECT count(*) FROM rouse.payload";
    assert_eq!(query_number(&client, rows).await, 1);
    assert_eq!(claim(&store, 1).await[0].payload.0, "{\"n\": 2}");
}

/// The last enqueue that passed the gate had started before midnight, and the one before it after midnight: the payload
/// that was replaced is in the later partition.
#[tokio::test]
async fn a_payload_that_was_replaced_after_midnight_is_not_read_when_the_day_before_is_dropped() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let payloads = [(2, "2020-01-01 23:59"), (1, "now")];
    let id = old_job(&client, 1, &payloads, "2020-01-01 23:59").await;
    assert_eq!(payload_number(&client, id).await, Some(2));
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(payload_number(&client, id).await, Some(2));
    assert_eq!(claim(&store, 1).await[0].payload.0, "{\"n\": 2}");
}

/// The partition of its day was dropped, and that of the copy also contains a payload that was replaced.
#[tokio::test]
async fn a_copy_of_a_payload_is_copied_again_and_a_replaced_one_is_not() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let payloads = [(1, "2020-01-02 00:01"), (2, "2020-01-02 12:00")];
    let id = old_job(&client, 2, &payloads, "2020-01-01 23:59").await;
    assert_eq!(payload_number(&client, id).await, Some(2));
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(payload_number(&client, id).await, Some(2));
    let rows = "SELECT count(*) FROM rouse.payload";
    assert_eq!(query_number(&client, rows).await, 1);
}

#[tokio::test]
async fn a_job_with_a_removed_payload_fails_without_affecting_its_claim() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let many = format!(
        "SELECT min(id) FROM rouse.enqueue_many('noop', ARRAY[{}, {}]) AS id",
        large(1),
        large(2)
    );
    let gone = query_number(&client, &many).await;
    client
        .batch_execute(&format!(
            "BEGIN; SELECT rouse.unlock_history('a test'); DELETE FROM rouse.payload WHERE job = {gone}; COMMIT"
        ))
        .await
        .unwrap();
    let worker = TestWorker::start(&db, Settings::default()).await;
    let job = ended(&client, gone).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1));
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "invalid_payload");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("its row was deleted from rouse.payload"),
        "{error}"
    );
    assert_eq!(ended(&client, gone + 1).await.state, "succeeded");
    worker.drain().await;
}

/// Reads of the payload of job `$1` fail, as if its page were damaged.
pub(crate) const DAMAGE: &str = "
    ALTER FUNCTION rouse.claimed(bigint, bytea, bigint, bigint[], boolean) RENAME TO _claimed;
    CREATE FUNCTION rouse.claimed(p_worker bigint, p_key bytea, p_fence bigint, p_ids bigint[], p_payloads boolean)
    RETURNS TABLE (id bigint, lane bigint, turn bigint, attempt integer, uncounted integer, max_attempts integer, tenant text, source text,
                   requested_at timestamptz, available_at timestamptz, claimed_at timestamptz, payload text, memory_bytes bigint, grants text,
                   lease_ms bigint, timeout_ms bigint, trace text)
    LANGUAGE plpgsql AS $$
    BEGIN
        IF p_payloads AND $1 = ANY (p_ids) THEN
            RAISE EXCEPTION 'missing chunk number 0 for toast value 1' USING ERRCODE = 'data_corrupted';
        END IF;
        RETURN QUERY SELECT * FROM rouse._claimed(p_worker, p_key, p_fence, p_ids, p_payloads);
    END
    $$";
/// Ends the effect of [`DAMAGE`].
pub(crate) const REPAIR: &str = "
    DROP FUNCTION rouse.claimed;
    ALTER FUNCTION rouse._claimed(bigint, bytea, bigint, bigint[], boolean) RENAME TO claimed";

#[tokio::test]
async fn a_job_whose_payload_cannot_be_read_is_retried_without_affecting_its_claim() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let many = format!(
        "SELECT min(id) FROM rouse.enqueue_many('noop', ARRAY[{}, {}, {}]) AS id",
        large(1),
        large(2),
        large(3)
    );
    let first = query_number(&client, &many).await;
    let damaged = first + 1;
    client
        .batch_execute(&DAMAGE.replace("$1", &damaged.to_string()))
        .await
        .unwrap();
    let folder = folder("", &["noop.wasm"]);
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    assert_eq!(ended(&client, first).await.state, "succeeded");
    assert_eq!(ended(&client, first + 2).await.state, "succeeded");
    let line = host.line(TIMEOUT, |line| {
        line.contains("cannot read the payload of a job")
    });
    assert!(line.contains("missing chunk number 0"), "{line}");
    assert!(line.contains(&format!("job.id={damaged} ")), "{line}");
    let failed = format!(
        "SELECT EXISTS (SELECT FROM rouse.attempt AS a
             WHERE a.job = {damaged} AND a.attempt = 1 AND a.error ->> 'kind' = 'unrunnable'
               AND a.error ->> 'message' = 'the payload cannot be read; the log of the worker contains the cause')"
    );
    until_true(&client, &failed).await;
    client.batch_execute(REPAIR).await.unwrap();
    client
        .execute("SELECT rouse.reschedule($1, now())", &[&damaged])
        .await
        .unwrap();
    let job = ended(&client, damaged).await;
    assert_eq!(job.state, "succeeded");
    assert!(job.attempt > 1, "{}", job.attempt);
    host.kill();
}

/// The payloads of several jobs cannot be read together, and one of them takes the whole time.
#[tokio::test]
async fn slow_reads_of_payloads_end_after_a_while_and_leave_the_rest_to_the_leases() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let store = store.reading_payloads_for(Duration::from_secs(2));
    let payloads: Vec<String> = (0..4).map(large).collect();
    let many = format!(
        "SELECT min(id) FROM rouse.enqueue_many('noop', ARRAY[{}]) AS id",
        payloads.join(", ")
    );
    query_number(&client, &many).await;
    let slow = DAMAGE
        .replace("$1 = ANY (p_ids)", "cardinality(p_ids) > 1")
        .replace(
            "RETURN QUERY",
            "IF p_payloads AND nextval('public.reads') = 2 THEN
                 PERFORM pg_sleep(2.1);
             END IF;
             RETURN QUERY",
        );
    let slow = format!("CREATE SEQUENCE public.reads; {slow}");
    client.batch_execute(&slow).await.unwrap();
    let jobs = claim(&store, 4).await;
    assert_eq!(jobs.len(), 2, "{jobs:?}");
    assert!(jobs.iter().all(|job| job.unread.is_none()), "{jobs:?}");
}

#[tokio::test]
async fn a_claim_that_waits_for_the_drop_of_a_payload_reads_the_copy() {
    let db = TestDb::new().await;
    let (mut owner, client, store) = (db.client().await, db.client().await, db.worker().await);
    let payloads = [(1, "2020-01-01 12:00")];
    old_job(&client, 1, &payloads, "2020-01-01 12:00").await;
    let drop = owner.transaction().await.unwrap();
    drop.query("SELECT rouse.drop_partitions('7 days')", &[])
        .await
        .unwrap();
    let claiming = tokio::spawn(async move { claim(&store, 1).await });
    let is_waiting = "SELECT EXISTS (SELECT FROM pg_stat_activity
                 WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%rouse.claimed(%')";
    until_true(&client, is_waiting).await;
    drop.commit().await.unwrap();
    assert_eq!(claiming.await.unwrap()[0].payload.0, "{\"n\": 1}");
}

#[tokio::test]
async fn a_read_of_payloads_whose_session_is_terminated_is_repeated_in_another_session() {
    let db = TestDb::new().await;
    let (mut owner, client, store) = (db.client().await, db.client().await, db.worker().await);
    let payloads = [(1, "2020-01-01 12:00")];
    old_job(&client, 1, &payloads, "2020-01-01 12:00").await;
    let lock = owner.transaction().await.unwrap();
    lock.batch_execute("LOCK rouse.payload").await.unwrap();
    let claiming = tokio::spawn(async move { claim(&store, 1).await });
    let waiting = "pg_stat_activity
        WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%rouse.claimed(%'";
    let is_waiting = format!("SELECT EXISTS (SELECT FROM {waiting})");
    until_true(&client, &is_waiting).await;
    let terminate = format!("SELECT pg_terminate_backend(pid, 10000) FROM {waiting}");
    let terminated = client.query(&terminate, &[]).await.unwrap();
    assert_eq!(terminated.len(), 1);
    until_true(&client, &is_waiting).await;
    lock.rollback().await.unwrap();
    assert_eq!(claiming.await.unwrap()[0].payload.0, "{\"n\": 1}");
}

#[tokio::test]
async fn a_job_without_its_payload_is_not_retried_and_does_not_stop_the_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let many = format!(
        "SELECT min(id) FROM rouse.enqueue_many('x', ARRAY[{}, {}]) AS id",
        large(1),
        large(2)
    );
    let gone = query_number(&client, &many).await;
    client
        .batch_execute(&format!(
            "SELECT rouse.fail({gone}, 'x'), rouse.fail({gone} + 1, 'x');
             BEGIN; SELECT rouse.unlock_history('a test'); DELETE FROM rouse.payload WHERE job = {gone}; COMMIT"
        ))
        .await
        .unwrap();
    let error = client
        .query(&format!("SELECT rouse.retry({gone})"), &[])
        .await
        .unwrap_err();
    assert_eq!(
        error.as_db_error().unwrap().message(),
        format!("rouse: job {gone} cannot be retried: its payload was removed")
    );
    let row = client
        .query_one(
            "SELECT retried, refused FROM rouse.retry_jobs('{\"state\": \"failed\"}')",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(
        (row.get::<_, Vec<i64>>(0), row.get::<_, Vec<i64>>(1)),
        (vec![gone + 1], vec![gone])
    );
}
