//! The partitions of the history, and locks that delay their creation and removal.

use rouse::worker::Settings;
use serde_json::json;
use tokio::time::timeout;

use crate::support::TestDb;
use crate::support::database::{drop_all_partitions, migrate};
use crate::support::worker::{
    TIMEOUT, TestWorker, ended, enqueue, expire_lease, lease, until, until_true,
};

#[tokio::test]
async fn old_partitions_are_dropped_unless_they_are_being_read() {
    let db = TestDb::new().await;
    let (mut reader, client, store) = (db.client().await, db.client().await, db.worker().await);
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             CREATE TABLE rouse.attempt_20200101 PARTITION OF rouse.attempt FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')",
        )
        .await
        .unwrap();
    let transaction = reader.transaction().await.unwrap();
    transaction
        .query("SELECT FROM rouse.finished", &[])
        .await
        .unwrap();
    assert_eq!(
        store.maintain_partitions().await.unwrap(),
        (0, 1),
        "dropped, in use; attempts stay as long as their jobs may"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
    assert_eq!(
        store.maintain_partitions().await.unwrap(),
        (0, 0),
        "recent partitions stay"
    );
    assert_eq!(
        store.prepare_partitions().await.unwrap(),
        0,
        "the partitions exist already"
    );
}

#[tokio::test]
async fn a_partition_in_use_does_not_keep_others_from_being_dropped() {
    let db = TestDb::new().await;
    let (mut reader, client, store) = (db.client().await, db.client().await, db.worker().await);
    for day in 1..=4 {
        let sql = format!(
            "CREATE TABLE rouse.finished_2020010{day} PARTITION OF rouse.finished_default
             FOR VALUES FROM ('2020-01-0{day}') TO ('2020-01-0{}')",
            day + 1
        );
        client.batch_execute(&sql).await.unwrap();
    }
    let transaction = reader.transaction().await.unwrap();
    transaction
        .batch_execute("SELECT FROM rouse.finished_20200102; SELECT FROM rouse.finished_20200103")
        .await
        .unwrap();
    assert_eq!(
        store.maintain_partitions().await.unwrap(),
        (2, 2),
        "the first and the last day"
    );
    assert_eq!(store.maintain_partitions().await.unwrap(), (0, 2));
    transaction.rollback().await.unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (2, 0));
}

#[tokio::test]
async fn a_partition_being_rewritten_does_not_keep_others_from_being_dropped() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    for day in 1..=2 {
        let sql = format!(
            "CREATE TABLE rouse.finished_2020010{day} PARTITION OF rouse.finished_default
             FOR VALUES FROM ('2020-01-0{day}') TO ('2020-01-0{}')",
            day + 1
        );
        client.batch_execute(&sql).await.unwrap();
    }
    let transaction = other.transaction().await.unwrap();
    transaction
        .batch_execute("LOCK TABLE rouse.finished_20200101 IN ACCESS EXCLUSIVE MODE")
        .await
        .unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 1));
    store.maintain_lanes().await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
}

/// If months have 30 days, the first interval is more than one day; by the calendar, its
/// end is in the future.
#[tokio::test]
async fn no_interval_drops_history_younger_than_a_day() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for keep in ["-1200 mons 36001 days", "23 hours", "-1 day"] {
        let sql = format!("SELECT rouse.drop_partitions('{keep}')");
        let error = client.query(&sql, &[]).await.expect_err("it is refused");
        let error = error.as_db_error().expect("an error from the database");
        assert!(
            error.message().contains("keep must be at least one day"),
            "{keep}: {}",
            error.message()
        );
    }
}

#[tokio::test]
async fn partitions_are_made_for_at_most_a_month() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for ahead in ["32", "-1", "NULL"] {
        let sql = format!("SELECT rouse.prepare_partitions({ahead})");
        let error = client.query(&sql, &[]).await.expect_err("it is refused");
        let error = error.as_db_error().expect("an error from the database");
        assert!(
            error.message().contains("ahead must be 0 to 31 days"),
            "{ahead}: {}",
            error.message()
        );
    }
}

#[tokio::test]
async fn advisory_locks_of_other_logins_do_not_block_partition_maintenance() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "SELECT pg_advisory_lock(hashtextextended('rouse.partitions', 0));
             CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02');
             DO $$ BEGIN EXECUTE format('DROP TABLE rouse.log_%s', to_char(now() AT TIME ZONE 'UTC' + interval '7 days', 'YYYYMMDD')); END $$",
        )
        .await
        .unwrap();
    let prepared = timeout(TIMEOUT, store.prepare_partitions()).await;
    assert_eq!(prepared.expect("it does not wait").unwrap(), 1);
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
}

/// As after a suspension of the machine for more than a week, or a jump of the database's clock.
#[tokio::test]
async fn partitions_that_a_running_attempt_needs_are_created_although_no_attempt_ends() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The first maintenance of the worker ends with the removal of this row; the next one follows an hour later.
    client
        .batch_execute("INSERT INTO rouse.schedule_run (schedule, at, outcome) VALUES ('x', now() - interval '400 days', 'missed')")
        .await
        .unwrap();
    let settings = Settings {
        overrides: lease("test.wait-abort", 2),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(
        &client,
        "SELECT NOT EXISTS (SELECT FROM rouse.schedule_run)",
    )
    .await;
    // When the worker starts to listen, it renews all leases, which must not happen in the middle of this test.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;

    // Steps, and the record of an attempt that was lost.
    drop_all_partitions(&client, "step").await;
    let id = enqueue(&client, "test.steps", json!({"between": "ignore-abort"})).await;
    let waiting =
        format!("SELECT coalesce(progress->>'step' = 'waiting', false) FROM rouse.job({id})");
    until_true(&client, &waiting).await;
    drop_all_partitions(&client, "attempt").await;
    expire_lease(&client, id).await;
    until(&client, id, |job| job.attempt == 2).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");

    // Renewals.
    let long = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, long, |job| job.state == "running").await;
    drop_all_partitions(&client, "record").await;
    let renewed = format!(
        "SELECT EXISTS (SELECT FROM rouse.record WHERE job = {long} AND event = 'renewed')"
    );
    until_true(&client, &renewed).await;
    worker.stop_now().await;
}

#[tokio::test]
async fn concurrent_creation_of_partitions_waits_and_concurrent_removal_is_skipped() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    client
        .batch_execute(
            "CREATE TABLE rouse.finished_20200101 PARTITION OF rouse.finished_default FOR VALUES FROM ('2020-01-01') TO ('2020-01-02')",
        )
        .await
        .unwrap();
    let making = other.transaction().await.unwrap();
    making
        .query("SELECT rouse.prepare_partitions(9)", &[])
        .await
        .unwrap();
    assert_eq!(store.maintain_partitions().await.unwrap(), (0, 0));
    let waits = client.query_one("SELECT rouse.prepare_partitions(9)", &[]);
    let done = async {
        tokio::task::yield_now().await;
        making.commit().await.unwrap();
    };
    let (made, ()) = tokio::join!(waits, done);
    assert_eq!(
        made.unwrap().get::<_, i32>(0),
        0,
        "the partitions exist already"
    );
    assert_eq!(store.maintain_partitions().await.unwrap(), (1, 0));
}

#[tokio::test]
async fn tables_are_made_where_the_database_is_whatever_the_defaults_of_the_session() {
    let db = TestDb::unmigrated().await;
    let client = db.client().await;
    // A tablespace in the folder of the server, on which the owner of the schema has no privileges.
    for sql in [
        "SET allow_in_place_tablespaces = on",
        "CREATE TABLESPACE elsewhere LOCATION ''",
        "CREATE ACCESS METHOD other TYPE TABLE HANDLER heap_tableam_handler",
    ] {
        client.batch_execute(sql).await.unwrap();
    }
    for setting in [
        "default_tablespace = elsewhere",
        "default_table_access_method = other",
    ] {
        let sql = format!(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {setting}', current_database()); END $$"
        );
        client.batch_execute(&sql).await.unwrap();
    }
    migrate(&db.url()).await.expect("the tables are made");
    let client = db.client().await;
    let made = client
        .query_one("SELECT rouse.prepare_partitions(9)", &[])
        .await;
    assert!(made.unwrap().get::<_, i32>(0) > 0);
    let sql = "SELECT count(*) FROM pg_class AS c LEFT JOIN pg_am AS a ON a.oid = c.relam
               WHERE c.relnamespace = 'rouse'::regnamespace AND (c.reltablespace <> 0 OR a.amname = 'other')";
    let others: i64 = client.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(others, 0);
    client
        .batch_execute("DROP TABLESPACE elsewhere")
        .await
        .unwrap();
}
