//! Schema `rouse`, from nothing to now.

use std::sync::Arc;
use std::time::Duration;

use rouse::store::migrate::{self, MIGRATIONS, MigrateError, Migration};
use tokio::sync::Barrier;

use crate::support::database::connect;
use crate::support::worker::PATIENCE;
use crate::support::{Host, TestDb};

fn all() -> Vec<String> {
    MIGRATIONS.iter().map(|one| one.name.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_hosts_that_migrate_an_empty_database_at_once_all_succeed() {
    let db = TestDb::unmigrated().await;
    let barrier = Arc::new(Barrier::new(8));
    let mut hosts = Vec::new();
    for _ in 0..8 {
        let mut client = db.client().await;
        let barrier = barrier.clone();
        hosts.push(tokio::spawn(async move {
            barrier.wait().await;
            migrate::run(&mut client).await
        }));
    }
    let mut applied = Vec::new();
    for host in hosts {
        applied.push(host.await.unwrap().expect("each host succeeds").applied);
    }
    applied.retain(|names| !names.is_empty());
    assert_eq!(
        applied,
        [all()],
        "one host applied everything, the others nothing"
    );
    db.store()
        .check_schema()
        .await
        .expect("the database can be served");
}

#[tokio::test]
async fn eight_processes_that_migrate_at_once_all_succeed() {
    let db = TestDb::unmigrated().await;
    let hosts: Vec<Host> = (0..8)
        .map(|_| Host::rouse(&["migrate"], &[("DATABASE_URL", &db.url())]))
        .collect();
    for host in hosts {
        let (status, output) = host.exit(PATIENCE);
        assert!(status.success(), "{output}");
    }
    db.store()
        .check_schema()
        .await
        .expect("the database can be served");
}

#[tokio::test]
async fn a_host_refuses_a_database_that_is_not_migrated_and_says_what_to_do() {
    let db = TestDb::unmigrated().await;
    let host = Host::rouse(&["serve", "--http", "off"], &[("DATABASE_URL", &db.url())]);
    let (status, output) = host.exit(PATIENCE);
    assert!(!status.success());
    assert!(output.contains("run `rouse migrate` first"), "{output}");
}

#[tokio::test]
async fn a_migration_that_was_changed_after_it_was_applied_is_an_error() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    client
        .execute(
            "UPDATE rouse.migration SET sha256 = 'another' WHERE version = 2",
            &[],
        )
        .await
        .unwrap();
    for error in [
        migrate::run(&mut client).await.unwrap_err(),
        db.store().check_schema().await.unwrap_err(),
    ] {
        assert!(
            matches!(&error, MigrateError::Drift { name, .. } if name == "0002_partitions"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_newer_schema_is_served_unless_it_breaks_this_host() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let newer =
        "INSERT INTO rouse.migration (version, name, sha256, breaking) VALUES ($1, $2, 'x', $3)";
    client
        .execute(newer, &[&900_i32, &"0900_adds_a_column", &false])
        .await
        .unwrap();
    db.store()
        .check_schema()
        .await
        .expect("what is only added does not matter");
    client
        .execute(newer, &[&901_i32, &"0901_renames_a_table", &true])
        .await
        .unwrap();
    let error = db.store().check_schema().await.unwrap_err();
    assert!(error.to_string().contains("upgrade the host"), "{error}");
}

#[tokio::test]
async fn a_migration_that_fails_leaves_nothing_behind() {
    let db = TestDb::unmigrated().await;
    let mut client = db.client().await;
    let mut migrations = MIGRATIONS.to_vec();
    migrations.push(Migration {
        version: 99,
        name: "0099_fails",
        sql: "CREATE TABLE rouse.half (); SELECT 1 / 0",
        breaking: false,
    });
    let error = migrate::run_these(&mut client, &migrations)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("0099_fails: division by zero"),
        "{error}"
    );
    let left = client
        .query_one("SELECT to_regnamespace('rouse') IS NULL", &[])
        .await
        .unwrap();
    assert!(left.get::<_, bool>(0), "not even the schema is there");
    migrate::run(&mut client)
        .await
        .expect("the next run succeeds");
}

#[tokio::test]
async fn a_user_who_may_not_create_roles_is_told_and_can_migrate_once_an_administrator_has() {
    // Roles belong to the whole server: this test needs one of its own, without any.
    let server = tokio::task::spawn_blocking(|| {
        let settings =
            crate::support::postgres_settings(crate::support::scratch("plain-user").join("pg"));
        rouse::postgres::Server::start(&settings).expect("a server")
    })
    .await
    .unwrap();
    let admin = connect(&server.url("postgres")).await;
    admin
        .batch_execute("CREATE ROLE plain LOGIN")
        .await
        .unwrap();
    admin
        .batch_execute("CREATE DATABASE app OWNER plain")
        .await
        .unwrap();
    let url = server.url("app").replace("rouse@", "plain@");
    let error = migrate::run(&mut connect(&url).await).await.unwrap_err();
    assert!(matches!(error, MigrateError::NotAllowed(_)), "{error}");
    assert!(
        error.to_string().contains("rouse migrate --roles-sql"),
        "{error}"
    );

    let host = Host::rouse(&["migrate", "--roles-sql"], &[]);
    let (status, sql) = host.exit(PATIENCE);
    assert!(status.success());
    admin
        .batch_execute(&sql)
        .await
        .expect("what is printed can be run");
    // The roles are there, and the user may not act as their owner yet: the error has the statements that allow it.
    let error = migrate::run(&mut connect(&url).await).await.unwrap_err();
    assert!(matches!(error, MigrateError::NotOwner { .. }), "{error}");
    let text = error.to_string();
    let (_, grants) = text.split_once("has to run: ").expect(&text);
    assert_eq!(
        grants,
        "GRANT rouse_owner TO plain; GRANT CREATE ON DATABASE app TO plain, rouse_owner;"
    );
    admin.batch_execute(grants).await.unwrap();
    let report = migrate::run(&mut connect(&url).await)
        .await
        .expect("now it may");
    assert_eq!(report.applied, all());
    drop(admin);
    tokio::task::spawn_blocking(move || server.stop())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_host_that_waits_for_another_ones_migration_goes_on_when_that_one_dies() {
    let db = TestDb::unmigrated().await;
    let (holder, mut waiter) = (db.client().await, db.client().await);
    holder
        .batch_execute("BEGIN; SELECT pg_advisory_xact_lock(hashtextextended('rouse.migrate', 0))")
        .await
        .unwrap();
    let waiting = tokio::spawn(async move { migrate::run(&mut waiter).await });
    let watch = db.client().await;
    crate::support::worker::until_true(
        &watch,
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory')",
    )
    .await;
    drop(holder);
    let report = tokio::time::timeout(Duration::from_secs(10), waiting)
        .await
        .expect("it goes on");
    assert_eq!(report.unwrap().unwrap().applied, all());
}

#[tokio::test]
async fn hosts_migrate_at_once_where_repeatable_read_is_the_databases_default() {
    let db = TestDb::unmigrated().await;
    db.client()
        .await
        .batch_execute(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = ''repeatable read''', current_database()); END $$",
        )
        .await
        .unwrap();
    let hosts = (0..8).map(|_| {
        let url = db.url();
        tokio::spawn(async move { migrate::run(&mut connect(&url).await).await })
    });
    for host in hosts.collect::<Vec<_>>() {
        host.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn partitions_start_at_midnight_utc_whatever_the_session_writes_dates_like() {
    let db = TestDb::unmigrated().await;
    let mut client = db.client().await;
    client
        .batch_execute("SET datestyle = 'Postgres, DMY'; SET timezone = 'Asia/Kolkata'")
        .await
        .unwrap();
    migrate::run(&mut client).await.unwrap();
    client
        .batch_execute("SET datestyle = 'ISO'; SET timezone = 'UTC'")
        .await
        .unwrap();
    let row = client
        .query_one(
            "SELECT count(*) FROM pg_class
             WHERE relispartition AND relkind = 'r' AND pg_get_expr(relpartbound, oid) NOT LIKE '%00:00:00+00%00:00:00+00%'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 0, "misplaced partitions");
}

#[tokio::test]
async fn a_database_that_is_not_in_utf8_is_refused_by_name() {
    let db = TestDb::unmigrated().await;
    let name = format!("ascii_{}", std::process::id());
    db.client()
        .await
        .batch_execute(&format!(
            "CREATE DATABASE {name} TEMPLATE template0 ENCODING 'SQL_ASCII' LOCALE 'C'"
        ))
        .await
        .unwrap();
    let url = db.url();
    let (server, _) = url.rsplit_once('/').unwrap();
    let mut client = connect(&format!("{server}/{name}")).await;
    let error = migrate::run(&mut client).await.unwrap_err();
    assert!(error.to_string().contains("SQL_ASCII"), "{error}");
    assert!(error.to_string().contains("ENCODING 'UTF8'"), "{error}");
}
