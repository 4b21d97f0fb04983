//! How long finished jobs are kept, by queue and outcome.

use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::database::{drop_all_partitions, raised, refusal};
use crate::support::worker::{TestWorker, cancel, ended, enqueue_sql};
use crate::support::{TestDb, folder, rouse_in, run_rouse};

/// The partition of a finished job, without its day.
async fn partition_of(client: &Client, id: i64) -> String {
    let sql = "SELECT regexp_replace(relname::text, '_[0-9]{8}$', '') FROM rouse.finished AS f JOIN pg_class AS c ON c.oid = f.tableoid WHERE f.id = $1";
    client.query_one(sql, &[&id]).await.unwrap().get(0)
}

async fn exists(client: &Client, table: &str) -> bool {
    let sql = format!("SELECT to_regclass('rouse.{table}') IS NOT NULL");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn each_outcome_of_a_queue_goes_to_the_partition_of_its_retention() {
    let db = TestDb::new().await;
    let client = db.client().await;
    run_rouse(
        &db,
        &[
            "queue",
            "set",
            "reports",
            "--keep-days",
            "1",
            "--keep-failed-days",
            "90",
        ],
    )
    .await
    .exits(0)
    .prints("finished jobs of queue reports are kept for 1 day; failed ones for 90 days");
    let worker = TestWorker::start(&db, Settings::default()).await;
    let reports =
        |handler: &str, payload: &str| format!("'{handler}', '{payload}', queue => 'reports'");
    let fail = r#"{"as": "permanent"}"#;
    let succeeded = enqueue_sql(&client, &reports("noop", "{}")).await;
    let failed = enqueue_sql(&client, &reports("test.fail", fail)).await;
    let default = enqueue_sql(&client, &format!("'test.fail', '{fail}'")).await;
    for id in [succeeded, failed, default] {
        ended(&client, id).await;
    }
    let cancelled = enqueue_sql(&client, &reports("nobody", "{}")).await;
    assert!(cancel(&client, cancelled).await);
    let purged = enqueue_sql(&client, &reports("nobody", "{}")).await;
    client
        .batch_execute("SELECT rouse.purge_queue('reports')")
        .await
        .unwrap();
    let completed = enqueue_sql(&client, &reports("nobody", "{}")).await;
    client
        .execute("SELECT rouse.complete($1)", &[&completed])
        .await
        .unwrap();
    for (id, expected) in [
        (succeeded, "finished_keep_1"),
        (failed, "finished_keep_90"),
        (default, "finished"),
        (cancelled, "finished_keep_1"),
        (purged, "finished_keep_1"),
        (completed, "finished_keep_1"),
    ] {
        assert_eq!(partition_of(&client, id).await, expected, "job {id}");
    }
    // In every partition, jobs are found, can be retried, and are protected from changes.
    let shown = run_rouse(
        &db,
        &[
            "job", "ls", "--state", "failed", "--queue", "reports", "--json",
        ],
    )
    .await;
    assert_eq!(shown.json()["jobs"][0]["id"], json!(failed));
    run_rouse(&db, &["job", "retry", &failed.to_string()])
        .await
        .exits(0);
    for table in ["finished_keep_90", "finished_keep_1"] {
        for sql in [
            format!("DELETE FROM rouse.{table}"),
            format!("TRUNCATE rouse.{table}"),
        ] {
            let why = refusal(&client, &sql).await;
            assert!(
                why.contains("is not allowed: history is immutable"),
                "{sql}: {why}"
            );
        }
    }
    let listed = run_rouse(&db, &["queue", "ls", "--json"]).await.json();
    let queue = listed["queues"]
        .as_array()
        .unwrap()
        .iter()
        .find(|queue| queue["name"] == "reports")
        .unwrap();
    assert_eq!(
        (&queue["keep_days"], &queue["keep_failed_days"]),
        (&json!(1), &json!(90))
    );
    let audited = run_rouse(&db, &["audit", "--json"]).await.json();
    let set = audited["audit"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["event"] == "retention_set")
        .unwrap();
    assert_eq!(
        set["detail"],
        json!({"keep_days": 1, "keep_failed_days": 90})
    );

    run_rouse(&db, &["queue", "set", "reports", "--keep-failed-days", "0"])
        .await
        .exits(0)
        .prints("finished jobs of queue reports are kept for 1 day");
    let failed = enqueue_sql(&client, &reports("test.fail", fail)).await;
    ended(&client, failed).await;
    assert_eq!(
        partition_of(&client, failed).await,
        "finished_keep_1",
        "like the others"
    );
    let set = run_rouse(
        &db,
        &["queue", "set", "reports", "--keep-days", "0", "--json"],
    )
    .await
    .json();
    assert_eq!(
        set,
        json!({"queue": "reports", "keep_days": null, "keep_failed_days": null})
    );
    let failed = enqueue_sql(&client, &reports("test.fail", fail)).await;
    ended(&client, failed).await;
    assert_eq!(partition_of(&client, failed).await, "finished");
    worker.drain().await;
}

#[tokio::test]
async fn old_partitions_are_dropped_by_their_retention_and_records_stay_for_the_longest_one() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "SELECT rouse.set_retention('brief', 1); SELECT rouse.set_retention('long', keep_failed_days => 3650);
             DO $$ DECLARE at date := (now() AT TIME ZONE 'UTC')::date - 3; BEGIN
                 EXECUTE format('CREATE TABLE rouse.finished_%s PARTITION OF rouse.finished_default FOR VALUES FROM (%L) TO (%L)', to_char(at, 'YYYYMMDD'), at, at + 1);
                 EXECUTE format('CREATE TABLE rouse.finished_keep_1_%s PARTITION OF rouse.finished_keep_1 FOR VALUES FROM (%L) TO (%L)', to_char(at, 'YYYYMMDD'), at, at + 1);
             END $$;
             CREATE TABLE rouse.finished_20200105 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-05') TO ('2020-01-06');
             CREATE TABLE rouse.finished_keep_1_20200105 PARTITION OF rouse.finished_keep_1 FOR VALUES FROM ('2020-01-05') TO ('2020-01-06');
             CREATE TABLE rouse.finished_keep_3650_20200101 PARTITION OF rouse.finished_keep_3650 FOR VALUES FROM ('2020-01-01') TO ('2020-02-01');
             CREATE TABLE rouse.finished_keep_3650_20100101 PARTITION OF rouse.finished_keep_3650 FOR VALUES FROM ('2010-01-01') TO ('2010-02-01');
             CREATE TABLE rouse.attempt_20200105 PARTITION OF rouse.attempt FOR VALUES FROM ('2020-01-05') TO ('2020-01-06');
             CREATE TABLE rouse.attempt_20100105 PARTITION OF rouse.attempt FOR VALUES FROM ('2010-01-05') TO ('2010-01-06');
             CREATE TABLE rouse.record_20200105 PARTITION OF rouse.record FOR VALUES FROM ('2020-01-05') TO ('2020-01-06');
             CREATE TABLE rouse.log_20200105 PARTITION OF rouse.log FOR VALUES FROM ('2020-01-05') TO ('2020-01-06')",
        )
        .await
        .unwrap();
    // One that is three days old with a retention of one day; older ones with the default retention; one that was kept
    // for ten years.
    assert_eq!(store.maintain_partitions().await.unwrap(), (5, 0));
    // Records are dropped after the last job to which they may belong.
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    for (table, kept) in [
        ("finished_20200105", false),
        ("finished_keep_1_20200105", false),
        ("finished_keep_3650_20200101", true),
        ("finished_keep_3650_20100101", false),
        ("attempt_20200105", true),
        ("attempt_20100105", false),
        ("record_20200105", true),
        ("log_20200105", false),
    ] {
        assert_eq!(exists(&client, table).await, kept, "{table}");
    }
    let day = "SELECT to_char((now() AT TIME ZONE 'UTC')::date - 3, 'YYYYMMDD')";
    let day: String = client.query_one(day, &[]).await.unwrap().get(0);
    assert!(exists(&client, &format!("finished_{day}")).await);
    assert!(!exists(&client, &format!("finished_keep_1_{day}")).await);
    // Partitions are prepared for the next days, and for the next months with the long retention.
    let made = "SELECT count(*) FILTER (WHERE name LIKE 'finished\\_keep\\_1\\_%') >= 8, count(*) FILTER (WHERE name LIKE 'finished\\_keep\\_3650\\_%') BETWEEN 2 AND 3
                FROM rouse._partitions()";
    let row = client.query_one(made, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0) && row.get::<_, bool>(1));
}

#[tokio::test]
async fn a_job_whose_partition_is_missing_is_kept_for_the_default_retention() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.set_retention('brief', 1)")
        .await
        .unwrap();
    drop_all_partitions(&client, "finished_keep_1").await;
    let id = enqueue_sql(&client, "'x', queue => 'brief'").await;
    assert!(cancel(&client, id).await);
    assert_eq!(partition_of(&client, id).await, "finished");
}

#[tokio::test]
async fn an_impossible_retention_is_refused_and_changes_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for days in ["-1", "3651"] {
        let why = refusal(&client, &format!("SELECT rouse.set_retention('q', {days})")).await;
        assert!(why.contains("must be 1 to 3650 days"), "{days}: {why}");
    }
    let why = refusal(&client, "SELECT rouse.set_retention('no queue', 1)").await;
    assert!(why.contains("is not a queue name"), "{why}");
    for days in 1..=4 {
        let sql = format!("SELECT rouse.set_retention('q{days}', {days})");
        client.batch_execute(&sql).await.unwrap();
    }
    let why = refusal(&client, "SELECT rouse.set_retention('q', 9)").await;
    let named = "with queue q, queues would have 5 different retentions; at most 4 are allowed";
    assert!(why.contains(named), "{why}");
    assert!(
        why.contains("Use an existing one: 1, 2, 3, 4 days."),
        "{why}"
    );
    assert!(!exists(&client, "finished_keep_9").await);
    let unset = "SELECT count(*) FROM rouse.queue WHERE name = 'q'";
    assert_eq!(
        client.query_one(unset, &[]).await.unwrap().get::<_, i64>(0),
        0
    );
    client
        .batch_execute("SELECT rouse.set_retention('q', 4)")
        .await
        .unwrap();
    run_rouse(&db, &["queue", "set", "q"])
        .await
        .exits(2)
        .prints("--keep-days");
    run_rouse(&db, &["queue", "set", "q", "--keep-days", "4000"])
        .await
        .exits(2);
    run_rouse(&db, &["queue", "set", "q", "--keep-days", "10"])
        .await
        .exits(1)
        .prints("at most 4 are allowed");
}

#[tokio::test]
async fn a_retention_that_needs_many_locks_is_warned_of_when_it_is_set() {
    let db = TestDb::new().await;
    for (set, locks) in [
        (
            "SELECT rouse.set_retention('a', 30), rouse.set_retention('b', 3650)",
            25_550,
        ),
        ("SELECT rouse.set_default_retention(3650)", 51_100),
    ] {
        let warnings = raised(&db, set).await;
        let messages: Vec<&str> = warnings.iter().map(|it| it.message()).collect();
        let [message] = messages[..] else {
            panic!("{messages:?}");
        };
        let wanted =
            format!("with 3650 days of history, the lookup of a job needs about {locks} of the ");
        assert!(message.contains(&wanted), "{message}");
    }
}

/// A partition of jobs that ended some days ago.
async fn partition_of_the_past(client: &Client, days: i32) -> String {
    let name =
        "SELECT 'finished_' || to_char((now() AT TIME ZONE 'UTC')::date - $1::int4, 'YYYYMMDD')";
    let name: String = client.query_one(name, &[&days]).await.unwrap().get(0);
    let sql = format!(
        "DO $$ DECLARE at date := (now() AT TIME ZONE 'UTC')::date - {days}; BEGIN
             EXECUTE format('CREATE TABLE rouse.{name} PARTITION OF rouse.finished_default FOR VALUES FROM (%L) TO (%L)', at, at + 1);
         END $$"
    );
    client.batch_execute(&sql).await.unwrap();
    name
}

#[tokio::test]
async fn only_the_database_decides_how_long_jobs_are_kept_by_default() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    run_rouse(&db, &["queue", "set", "--default", "--keep-days", "90"])
        .await
        .exits(0)
        .prints("finished jobs are kept for 90 days (previously 7 days)");
    let kept = partition_of_the_past(&client, 80).await;
    let dropped = partition_of_the_past(&client, 100).await;
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert!(exists(&client, &kept).await);
    assert!(!exists(&client, &dropped).await);
    // A host without settings, and a drain, which is also a worker.
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue_sql(&client, "'noop', '{}'").await;
    ended(&client, id).await;
    worker.drain().await;
    enqueue_sql(&client, "'noop', '{}', queue => 'drained'").await;
    let folder = folder("", &["noop.wasm"]);
    rouse_in(&db, &["queue", "drain", "drained"], &folder)
        .await
        .exits(0);
    assert!(exists(&client, &kept).await);

    let shorter = ["queue", "set", "--default", "--keep-days", "30", "--json"];
    let refused = run_rouse(&db, &shorter).await;
    refused
        .exits(2)
        .prints("this permanently deletes jobs that ended more than 30 days ago")
        .prints("now they are kept for 90 days")
        .prints("confirm it with --confirm");
    assert_eq!(store.maintain_partitions().await.unwrap(), (0, 0));
    assert!(exists(&client, &kept).await, "nothing was done");
    let set = run_rouse(&db, &[&shorter[..], &["--confirm"]].concat()).await;
    assert_eq!(set.json(), json!({"keep_days": 30, "was": 90}));
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert!(!exists(&client, &kept).await);
    let audited = run_rouse(&db, &["audit", "--json"]).await.json();
    let set = audited["audit"]
        .as_array()
        .unwrap()
        .iter()
        .find(|row| row["event"] == "default_retention_set")
        .unwrap();
    assert_eq!(set["detail"], json!({"keep_days": 30, "was": 90}));
    for days in ["0", "3651", "NULL"] {
        let why = refusal(
            &client,
            &format!("SELECT rouse.set_default_retention({days})"),
        )
        .await;
        assert!(why.contains("must be 1 to 3650 days"), "{days}: {why}");
    }
    for args in [
        &["--default", "--keep-failed-days", "3"][..],
        &["--default", "--keep-days", "3", "mail"],
        &["--default", "--keep-days", "3", "--keep-failed-days", "3"],
        &["mail", "--keep-days", "3", "--confirm"],
    ] {
        run_rouse(&db, &[&["queue", "set"][..], args].concat())
            .await
            .exits(2);
    }
}
