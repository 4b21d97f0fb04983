//! Locks of migrations: which sessions wait for which, and for how long.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rouse::store::migrate::{MigrateError, Migration};
use serde_json::json;

use super::{all, catalog, sources, with_additional};
use crate::support::TestDb;
use crate::support::database::{connect, migrate as run, migrate_with};
use crate::support::worker::{TIMEOUT, enqueue, until_true};

#[tokio::test]
async fn a_host_that_waits_for_another_migration_continues_when_that_host_dies() {
    let db = TestDb::unmigrated().await;
    let holder = db.client().await;
    holder
        .batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtextextended('rouse.migrate', 0))")
        .await
        .unwrap();
    let url = db.url();
    let waiting = tokio::spawn(async move { run(&url).await });
    let watch = db.client().await;
    until_true(
        &watch,
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory')",
    )
    .await;
    drop(holder);
    let report = tokio::time::timeout(TIMEOUT, waiting)
        .await
        .expect("the host continues");
    assert_eq!(report.unwrap().unwrap().applied, all());
}

/// Enqueues until it is stopped, and returns the durations.
fn producer(url: String) -> (Arc<AtomicBool>, tokio::task::JoinHandle<Vec<Duration>>) {
    let over = Arc::new(AtomicBool::new(false));
    let stop = over.clone();
    let producing = tokio::spawn(async move {
        let client = connect(&url).await;
        let mut took = Vec::new();
        while !stop.load(Ordering::Relaxed) {
            let started = Instant::now();
            enqueue(&client, "x", json!({})).await;
            took.push(started.elapsed());
        }
        took
    });
    (over, producing)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_migration_that_waits_for_a_reader_does_not_block_producers_and_names_the_reader() {
    let db = TestDb::new().await;
    let reader = db.client().await;
    reader
        .batch_execute(
            "SET application_name = 'a slow report'; BEGIN; SELECT count(*) FROM rouse.job",
        )
        .await
        .unwrap();
    let pid: i32 = reader
        .query_one("SELECT pg_backend_pid()", &[])
        .await
        .unwrap()
        .get(0);
    let (stop, producing) = producer(db.url());
    let url = db.url();
    let migrating = tokio::spawn(async move {
        let migrations = with_additional(
            "0099_adds_a_column",
            "ALTER TABLE rouse.job ADD COLUMN more text",
        );
        migrate_with(&url, sources(&migrations), TIMEOUT).await
    });
    // The migration tries at least three times, while jobs are enqueued.
    let watch = db.client().await;
    let jobs = "SELECT count(*) > 10 FROM rouse.job";
    until_true(&watch, jobs).await;
    let is_waiting = "SELECT EXISTS (SELECT FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
                 WHERE d.datname = current_database() AND NOT l.granted AND l.relation = 'rouse.job'::regclass AND l.mode = 'AccessExclusiveLock')";
    for _ in 0..2 {
        until_true(&watch, is_waiting).await;
        until_true(&watch, &format!("SELECT NOT ({is_waiting})")).await;
    }
    until_true(&watch, is_waiting).await;
    reader.batch_execute("COMMIT").await.unwrap();
    let report = tokio::time::timeout(TIMEOUT, migrating)
        .await
        .expect("the migration continues once the reader has ended")
        .unwrap()
        .unwrap();
    stop.store(true, Ordering::Relaxed);
    let mut took = producing.await.unwrap();
    assert_eq!(report.applied, ["0099_adds_a_column", "functions"]);
    let named = format!("process {pid} (");
    assert!(
        report
            .waited_for
            .iter()
            .any(|one| one.starts_with(&named) && one.contains("application a slow report")),
        "{:?}",
        report.waited_for
    );
    // Each try blocks producers for 150 ms; the rest is for applying the functions on a busy machine. A pause of the
    // machine delays one enqueue. If each of the first two tries blocked producers for longer, that would be two.
    took.sort_unstable();
    took.pop();
    let slow = took.last().copied();
    assert!(slow < Some(Duration::from_millis(1500)), "{slow:?}");
}

/// An open transaction holds a lock on each table to which it has written. If applying the functions took locks that
/// conflict with these, it would also block all other writers until it has ended.
#[tokio::test]
async fn functions_are_applied_while_transactions_that_have_written_are_open() {
    let db = TestDb::new().await;
    let (writer, client) = (db.client().await, db.client().await);
    let tables = "SELECT string_agg(c.oid::regclass::text, ', ') FROM pg_class AS c
                  WHERE c.relnamespace = 'rouse'::regnamespace AND c.relkind IN ('r', 'p') AND NOT c.relispartition
                    AND c.relname NOT IN ('migration', 'definitions')";
    let tables: String = client.query_one(tables, &[]).await.unwrap().get(0);
    writer
        .batch_execute(&format!("BEGIN; LOCK TABLE {tables} IN ROW EXCLUSIVE MODE"))
        .await
        .unwrap();
    client
        .batch_execute("DROP FUNCTION rouse.cancel(bigint)")
        .await
        .unwrap();
    let report = run(&db.url()).await.unwrap();
    assert_eq!(report.applied, ["functions"]);
    assert_eq!(report.waited_for, Vec::<String>::new());
}

/// The error of migrations that another session blocks. On a busy machine, the check for that session may take longer
/// than a migration waits; then the error does not name it.
async fn blocked(db: &TestDb, migrations: &[Migration], by: &str) -> String {
    let until = Instant::now() + TIMEOUT;
    loop {
        let wait = Duration::from_millis(400);
        let error = migrate_with(&db.url(), sources(migrations), wait).await;
        let error = error.unwrap_err();
        assert!(matches!(error, MigrateError::Blocked { .. }), "{error}");
        let text = error.to_string();
        if text.contains(by) {
            return text;
        }
        assert!(Instant::now() < until, "{text}");
    }
}

#[tokio::test]
async fn a_migration_that_cannot_lock_in_time_names_the_holders_and_changes_nothing() {
    let db = TestDb::new().await;
    let (reader, client) = (db.client().await, db.client().await);
    reader
        .batch_execute("SET application_name = 'left open'; BEGIN; SELECT count(*) FROM rouse.job")
        .await
        .unwrap();
    let migrations = with_additional(
        "0099_adds_a_column",
        "CREATE TABLE rouse.half (); ALTER TABLE rouse.job ADD COLUMN more text",
    );
    let before = catalog(&client).await;
    let text = blocked(&db, &migrations, "application left open").await;
    assert!(text.contains("0099_adds_a_column"), "{text}");
    assert!(text.contains("--wait"), "{text}");
    reader.batch_execute("COMMIT").await.unwrap();
    assert_eq!(catalog(&client).await, before);
}

#[tokio::test]
async fn one_host_migrates_while_the_others_wait_up_to_their_timeout() {
    let db = TestDb::new().await;
    let holder = db.client().await;
    holder
        .batch_execute("SET application_name = 'another host'; BEGIN; LOCK TABLE rouse.migration IN SHARE UPDATE EXCLUSIVE MODE")
        .await
        .unwrap();
    // The lock is not needed if there is nothing to apply.
    assert_eq!(run(&db.url()).await.unwrap().applied, Vec::<String>::new());
    let migrations = with_additional("0099_adds_a_table", "CREATE TABLE rouse.more ()");
    blocked(&db, &migrations, "application another host").await;
    drop(holder);
    let report = migrate_with(&db.url(), sources(&migrations), TIMEOUT)
        .await
        .unwrap();
    assert_eq!(report.applied, ["0099_adds_a_table", "functions"]);
}

#[tokio::test]
async fn a_login_without_privileges_cannot_block_migrations() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("DO $$ BEGIN CREATE ROLE migrations_nobody; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
                        SET ROLE migrations_nobody; SELECT pg_advisory_lock(hashtextextended('rouse.migrate', 0))")
        .await
        .unwrap();
    let refused = client
        .batch_execute("LOCK TABLE rouse.migration IN SHARE UPDATE EXCLUSIVE MODE")
        .await;
    assert!(refused.is_err());
    let migrations = with_additional("0099_adds_a_table", "CREATE TABLE rouse.more ()");
    migrate_with(&db.url(), sources(&migrations), TIMEOUT)
        .await
        .expect("the migration takes another lock");
}

#[tokio::test]
async fn a_non_transactional_migration_that_waits_too_long_names_the_blocker() {
    let db = TestDb::new().await;
    let writer = db.client().await;
    writer
        .batch_execute("SET application_name = 'left open'; BEGIN; SELECT rouse.enqueue('x')")
        .await
        .unwrap();
    let migrations = with_additional(
        "0099_indexes_tenants",
        "-- rouse: no transaction\nCREATE INDEX CONCURRENTLY job_tenant ON rouse.job (tenant);\n",
    );
    let error = migrate_with(&db.url(), sources(&migrations), Duration::from_millis(300))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("application left open"),
        "{error}"
    );
}

#[tokio::test]
async fn a_migration_that_loses_its_lock_changes_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let migrations = with_additional(
        "0099_cuts_the_session_that_holds_the_lock",
        "CREATE TABLE rouse.half ();
         RESET ROLE;
         SELECT pg_terminate_backend(l.pid, 60000) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
         WHERE d.datname = current_database() AND l.relation = 'rouse.migration'::regclass AND l.mode = 'ShareUpdateExclusiveLock'
           AND l.pid <> pg_backend_pid();
         SET LOCAL ROLE rouse_owner",
    );
    let before = catalog(&client).await;
    let error = migrate_with(&db.url(), sources(&migrations), TIMEOUT)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("hold the migration lock"),
        "{error}"
    );
    assert_eq!(catalog(&client).await, before);
}

#[tokio::test]
async fn a_transaction_timeout_of_the_database_does_not_end_a_migration() {
    let db = TestDb::new().await;
    // Postgres has this setting from version 17 on.
    db.client()
        .await
        .batch_execute(
            "DO $$ BEGIN
                 IF current_setting('server_version_num')::integer >= 170000 THEN
                     EXECUTE format('ALTER DATABASE %I SET transaction_timeout = ''200ms''', current_database());
                 END IF;
             END $$",
        )
        .await
        .unwrap();
    let mut migrations = with_additional(
        "0099_takes_long",
        "CREATE TABLE rouse.more (); SELECT pg_sleep(0.4)",
    );
    migrations.push(Migration {
        version: 100,
        name: "0100_takes_long_outside",
        sql: "-- rouse: no transaction\nSELECT pg_sleep(0.4);\n",
    });
    let report = migrate_with(&db.url(), sources(&migrations), TIMEOUT)
        .await
        .unwrap();
    // The functions have not changed, so they are not applied again.
    assert_eq!(
        report.applied,
        ["0099_takes_long", "0100_takes_long_outside"]
    );
}
