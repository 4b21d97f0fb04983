//! Migrations of schema `rouse`, from an empty database to the current version.

mod definitions;
mod locks;

use std::sync::Arc;

use rouse::store::migrate::{self, ALL, MigrateError, Migration, Sources};
use rouse::worker::Settings;
use serde_json::json;
use tokio::sync::Barrier;
use tokio_postgres::Client;

use crate::support::database::{connect, migrate as run, migrate_with};
use crate::support::worker::{TIMEOUT, TestWorker, ended, enqueue};
use crate::support::{Host, TestDb};

fn all() -> Vec<String> {
    let names = ALL.migrations.iter().map(|one| one.name);
    names.chain(["functions"]).map(str::to_string).collect()
}

/// The migrations of this host, and one additional migration.
fn with_additional(name: &'static str, sql: &'static str) -> Vec<Migration> {
    let mut migrations = ALL.migrations.to_vec();
    migrations.push(Migration {
        version: 99,
        name,
        sql,
    });
    migrations
}

fn sources(migrations: &[Migration]) -> Sources<'_> {
    Sources { migrations, ..ALL }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_hosts_that_migrate_an_empty_database_concurrently_all_succeed() {
    let db = TestDb::unmigrated().await;
    let barrier = Arc::new(Barrier::new(8));
    let mut hosts = Vec::new();
    for _ in 0..8 {
        let url = db.url();
        let barrier = barrier.clone();
        hosts.push(tokio::spawn(async move {
            barrier.wait().await;
            run(&url).await
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
async fn eight_processes_that_migrate_concurrently_all_succeed() {
    let db = TestDb::unmigrated().await;
    let hosts: Vec<Host> = (0..8)
        .map(|_| Host::rouse(&["migrate"], &[("DATABASE_URL", &db.url())]))
        .collect();
    for host in hosts {
        let (status, output) = host.exit(TIMEOUT);
        assert!(status.success(), "{output}");
    }
    db.store()
        .check_schema()
        .await
        .expect("the database can be served");
}

#[tokio::test]
async fn a_host_refuses_an_unmigrated_database_and_names_the_remedy() {
    let db = TestDb::unmigrated().await;
    let host = Host::rouse(&["serve", "--http", "off"], &[("DATABASE_URL", &db.url())]);
    let (status, output) = host.exit(TIMEOUT);
    assert!(!status.success());
    assert!(output.contains("run `rouse migrate` first"), "{output}");
}

#[tokio::test]
async fn a_migration_that_was_changed_after_it_was_applied_is_an_error() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .execute(
            "UPDATE rouse.migration SET sha256 = 'another' WHERE version = 1",
            &[],
        )
        .await
        .unwrap();
    for error in [
        run(&db.url()).await.unwrap_err(),
        db.store().check_schema().await.unwrap_err(),
    ] {
        assert!(
            matches!(&error, MigrateError::Drift { name, .. } if name == "0001_schema"),
            "{error}"
        );
    }
}

#[tokio::test]
async fn a_migration_that_fails_leaves_nothing_behind() {
    let db = TestDb::unmigrated().await;
    let client = db.client().await;
    let migrations = with_additional("0099_fails", "CREATE TABLE rouse.half (); SELECT 1 / 0");
    let error = migrate_with(&db.url(), sources(&migrations), TIMEOUT)
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
    assert!(left.get::<_, bool>(0), "the schema was not created");
    run(&db.url()).await.expect("the next run succeeds");
}

#[tokio::test]
async fn a_user_without_createrole_gets_the_statements_for_an_administrator_and_can_then_migrate() {
    // Roles belong to the whole server: this test needs a server of its own without them.
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
    let error = run(&url).await.unwrap_err();
    assert!(matches!(error, MigrateError::NotAllowed(_)), "{error}");
    assert!(
        error.to_string().contains("rouse migrate --roles-sql"),
        "{error}"
    );

    let host = Host::rouse(&["migrate", "--roles-sql"], &[]);
    let (status, sql) = host.exit(TIMEOUT);
    assert!(status.success());
    admin
        .batch_execute(&sql)
        .await
        .expect("the printed statements run");
    // The roles exist, but the user cannot act as their owner yet: the error contains the statements that allow it.
    let error = run(&url).await.unwrap_err();
    assert!(matches!(error, MigrateError::NotOwner { .. }), "{error}");
    let text = error.to_string();
    let (_, grants) = text.split_once("has to run: ").expect(&text);
    assert_eq!(
        grants,
        "GRANT rouse_owner TO plain; GRANT CREATE ON DATABASE app TO plain, rouse_owner;"
    );
    admin.batch_execute(grants).await.unwrap();
    let report = run(&url).await.expect("the user has the privileges now");
    assert_eq!(report.applied, all());
    drop(admin);
    tokio::task::spawn_blocking(move || server.stop())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_user_who_may_not_upgrade_gets_the_statements_for_an_administrator_and_can_then_upgrade()
{
    let db = TestDb::new().await;
    let admin = db.client().await;
    admin
        .batch_execute("DO $$ BEGIN CREATE ROLE migrations_plain LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$")
        .await
        .unwrap();
    let address = db.address();
    let own = format!("postgres://{}@", address.user);
    let url = db.url().replace(&own, "postgres://migrations_plain@");
    let migrations = with_additional("0099_adds_a_table", "CREATE TABLE rouse.more ()");
    let upgrade = async || migrate_with(&url, sources(&migrations), TIMEOUT).await;
    let wanted = format!(
        "GRANT rouse_owner TO migrations_plain; GRANT CREATE ON DATABASE {} TO migrations_plain, rouse_owner;",
        address.database
    );
    // Without a role, the user cannot read the ledger; with the role of a worker, it can.
    for role in ["", "GRANT rouse_worker TO migrations_plain"] {
        admin.batch_execute(role).await.unwrap();
        let error = upgrade().await.unwrap_err();
        assert!(matches!(error, MigrateError::NotOwner { .. }), "{error}");
        let text = error.to_string();
        let (refusal, grants) = text.split_once("has to run: ").expect(&text);
        assert_eq!(grants, wanted);
        assert!(!refusal.contains("GRANT"), "{refusal}");
    }
    admin.batch_execute(&wanted).await.unwrap();
    let report = upgrade().await.expect("the user has the privileges now");
    assert_eq!(report.applied, ["0099_adds_a_table", "functions"]);
}

#[tokio::test]
async fn hosts_migrate_concurrently_under_repeatable_read() {
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
        tokio::spawn(async move { run(&url).await })
    });
    for host in hosts.collect::<Vec<_>>() {
        host.await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn partitions_start_at_midnight_utc_regardless_of_datestyle() {
    let db = TestDb::unmigrated().await;
    let (mut client, mut keeper) = (db.client().await, db.client().await);
    client
        .batch_execute("SET datestyle = 'Postgres, DMY'; SET timezone = 'Asia/Kolkata'")
        .await
        .unwrap();
    migrate::run(&mut client, &mut keeper, TIMEOUT)
        .await
        .unwrap();
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
async fn a_database_that_is_not_in_utf8_is_refused() {
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
    let error = run(&format!("{server}/{name}")).await.unwrap_err();
    assert!(error.to_string().contains("SQL_ASCII"), "{error}");
    assert!(error.to_string().contains("ENCODING 'UTF8'"), "{error}");
}

/// Everything that the catalog contains about schema `rouse`, one line per object.
async fn catalog(client: &Client) -> Vec<String> {
    client
        .batch_execute("SET search_path = pg_catalog")
        .await
        .unwrap();
    let sql = "
        SELECT format('function %s %s %s', pg_get_functiondef(p.oid), p.proacl, obj_description(p.oid)) FROM pg_proc AS p
        WHERE p.pronamespace = 'rouse'::regnamespace
        UNION ALL
        SELECT format('relation %s %s %s %s %s %s', c.oid::regclass, c.relkind, c.relpersistence, c.relacl, c.reloptions, pg_get_userbyid(c.relowner))
        FROM pg_class AS c WHERE c.relnamespace = 'rouse'::regnamespace
        UNION ALL
        SELECT format('view %s %s', c.oid::regclass, pg_get_viewdef(c.oid)) FROM pg_class AS c
        WHERE c.relnamespace = 'rouse'::regnamespace AND c.relkind = 'v'
        UNION ALL
        SELECT format('column %s %s %s %s %s %s', a.attrelid::regclass, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attacl,
                      pg_get_expr(d.adbin, d.adrelid))
        FROM pg_attribute AS a JOIN pg_class AS c ON c.oid = a.attrelid
        LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
        WHERE c.relnamespace = 'rouse'::regnamespace AND a.attnum > 0 AND NOT a.attisdropped
        UNION ALL
        SELECT format('index %s', pg_get_indexdef(i.indexrelid)) FROM pg_index AS i JOIN pg_class AS c ON c.oid = i.indexrelid
        WHERE c.relnamespace = 'rouse'::regnamespace
        UNION ALL
        SELECT format('constraint %s %s %s', n.conrelid::regclass, n.conname, pg_get_constraintdef(n.oid)) FROM pg_constraint AS n
        WHERE n.connamespace = 'rouse'::regnamespace
        UNION ALL
        SELECT format('trigger %s %s', pg_get_triggerdef(t.oid), t.tgenabled) FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
        WHERE c.relnamespace = 'rouse'::regnamespace AND NOT t.tgisinternal
        UNION ALL
        SELECT format('type %s %s', e.enumtypid::regtype, string_agg(e.enumlabel, ' ' ORDER BY e.enumsortorder)) FROM pg_enum AS e GROUP BY e.enumtypid
        UNION ALL
        SELECT format('schema %s', n.nspacl) FROM pg_namespace AS n WHERE n.nspname = 'rouse'
        ORDER BY 1";
    let rows = client.query(sql, &[]).await.unwrap();
    let catalog: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert!(catalog.len() > 400, "{}", catalog.len());
    catalog
}

#[tokio::test]
async fn a_migration_can_run_outside_a_transaction_and_be_resumed_after_a_failure() {
    let db = TestDb::unmigrated().await;
    let client = db.client().await;
    const SQL: &str = "-- rouse: no transaction
-- An index of a live table.
DROP INDEX CONCURRENTLY IF EXISTS rouse.job_tenant;
CREATE UNIQUE INDEX CONCURRENTLY job_tenant
    ON rouse.job (tenant);
";
    let mut migrations = with_additional("0099_indexes_tenants", SQL);
    migrations.push(Migration {
        version: 100,
        name: "0100_adds_a_table",
        sql: "CREATE TABLE rouse.more ()",
    });
    run(&db.url()).await.unwrap();
    for _ in 0..2 {
        client
            .execute("SELECT rouse.enqueue('x', tenant => 'one')", &[])
            .await
            .unwrap();
    }
    let error = migrate_with(&db.url(), sources(&migrations), TIMEOUT)
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("0099_indexes_tenants"),
        "{error}"
    );
    let index = "SELECT i.indisvalid FROM pg_index AS i WHERE i.indexrelid = to_regclass('rouse.job_tenant')";
    let left: bool = client.query_one(index, &[]).await.unwrap().get(0);
    assert!(!left, "Postgres leaves an invalid index");
    client
        .execute("DELETE FROM rouse.job WHERE tenant = 'one'", &[])
        .await
        .unwrap();
    let report = migrate_with(&db.url(), sources(&migrations), TIMEOUT)
        .await
        .unwrap();
    assert_eq!(
        report.applied,
        ["0099_indexes_tenants", "0100_adds_a_table", "functions"]
    );
    let valid: bool = client.query_one(index, &[]).await.unwrap().get(0);
    assert!(valid);
    // From an empty database, in one run.
    let new = TestDb::unmigrated().await;
    let report = migrate_with(&new.url(), sources(&migrations), TIMEOUT)
        .await
        .unwrap();
    assert_eq!(
        report.applied,
        [
            "0001_schema",
            "0099_indexes_tenants",
            "0100_adds_a_table",
            "functions"
        ]
    );
}

#[tokio::test]
async fn a_worker_continues_after_its_record_types_were_recreated() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let before = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, before).await.state, "succeeded");
    // This also drops the functions that take these types.
    client
        .batch_execute("DROP TYPE rouse.claim_order, rouse.settlement CASCADE")
        .await
        .unwrap();
    assert_eq!(run(&db.url()).await.unwrap().applied, ["functions"]);
    let after = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, after).await.state, "succeeded");
    worker.drain().await;
}
