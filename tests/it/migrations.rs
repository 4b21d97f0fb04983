//! Migrations of schema `rouse`, from an empty database to the present.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rouse::store::migrate::{self, ALL, MigrateError, Migration, PROTOCOL, Source, Sources};
use rouse::worker::Settings;
use serde_json::json;
use tokio::sync::Barrier;
use tokio_postgres::Client;

use crate::support::database::{connect, migrate as run, migrate_with};
use crate::support::worker::{PATIENCE, TestWorker, ended, enqueue, until_true};
use crate::support::{Host, TestDb};

fn all() -> Vec<String> {
    let names = ALL.migrations.iter().map(|one| one.name);
    names.chain(["functions"]).map(str::to_string).collect()
}

/// The migrations of this host, and one more.
fn and(name: &'static str, sql: &'static str) -> Vec<Migration> {
    let mut migrations = ALL.migrations.to_vec();
    migrations.push(Migration {
        version: 99,
        name,
        sql,
    });
    migrations
}

fn with(migrations: &[Migration]) -> Sources<'_> {
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
        let (status, output) = host.exit(PATIENCE);
        assert!(status.success(), "{output}");
    }
    db.store()
        .check_schema()
        .await
        .expect("the database can be served");
}

#[tokio::test]
async fn a_host_refuses_an_unmigrated_database_and_says_what_to_do() {
    let db = TestDb::unmigrated().await;
    let host = Host::rouse(&["serve", "--http", "off"], &[("DATABASE_URL", &db.url())]);
    let (status, output) = host.exit(PATIENCE);
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

/// Functions of the next release: a settlement has one more field. Both forms of the record are accepted.
const NEXT: Source = Source {
    name: "functions/next",
    sql: "CREATE TYPE rouse.settlement_2 AS (one rouse.settlement, note text);
          CREATE FUNCTION rouse.settle(p_worker bigint, p_key bytea, p_settlements rouse.settlement_2[], p_skip_locked boolean)
          RETURNS TABLE (id bigint, locked boolean) LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
              SELECT * FROM rouse.settle(p_worker, p_key, ARRAY(SELECT (s).one FROM unnest(p_settlements) AS s), p_skip_locked)
          $$",
};

#[tokio::test]
async fn the_next_release_serves_hosts_of_this_protocol_and_the_one_after_refuses_them() {
    let db = TestDb::new().await;
    let functions: Vec<Source> = ALL.functions.iter().copied().chain([NEXT]).collect();
    let migrations = and("0099_adds_a_table", "CREATE TABLE rouse.more ()");
    let next = Sources {
        migrations: &migrations,
        functions: &functions,
        protocols: (PROTOCOL, PROTOCOL + 1),
        // The rights name functions without their parameters.
        rights: &[],
    };
    // A host of this release keeps working while the next release is applied, and afterwards.
    let worker = TestWorker::start(&db, Settings::default()).await;
    let client = db.client().await;
    let before = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, before).await.state, "succeeded");
    migrate_with(&db.url(), next, PATIENCE).await.unwrap();
    client
        .batch_execute("UPDATE rouse.definitions SET release = '{0,999,0}'")
        .await
        .unwrap();
    let after = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, after).await.state, "succeeded");
    // A host of this release can also start afterwards.
    db.store()
        .check_schema()
        .await
        .expect("the host can use the schema");
    worker.drain().await;

    client
        .batch_execute("UPDATE rouse.definitions SET release = '{0,0,9}'")
        .await
        .unwrap();
    let one_after = Sources {
        protocols: (PROTOCOL + 1, PROTOCOL + 2),
        functions: ALL.functions,
        ..next
    };
    migrate_with(&db.url(), one_after, PATIENCE).await.unwrap();
    for error in [
        db.store().check_schema().await.unwrap_err(),
        run(&db.url()).await.unwrap_err(),
    ] {
        assert_eq!(
            error.to_string(),
            "the database serves hosts of protocol 2 and later, and this host has protocol 1; upgrade the host"
        );
    }
}

#[tokio::test]
async fn a_migration_that_fails_leaves_nothing_behind() {
    let db = TestDb::unmigrated().await;
    let client = db.client().await;
    let migrations = and("0099_fails", "CREATE TABLE rouse.half (); SELECT 1 / 0");
    let error = migrate_with(&db.url(), with(&migrations), PATIENCE)
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
    let (status, sql) = host.exit(PATIENCE);
    assert!(status.success());
    admin
        .batch_execute(&sql)
        .await
        .expect("what is printed can be run");
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
    let report = run(&url).await.expect("the user has the rights now");
    assert_eq!(report.applied, all());
    drop(admin);
    tokio::task::spawn_blocking(move || server.stop())
        .await
        .unwrap();
}

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
    let report = tokio::time::timeout(Duration::from_secs(10), waiting)
        .await
        .expect("the host continues");
    assert_eq!(report.unwrap().unwrap().applied, all());
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
    migrate::run(&mut client, &mut keeper, PATIENCE)
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
        SELECT format('trigger %s', pg_get_triggerdef(t.oid)) FROM pg_trigger AS t JOIN pg_class AS c ON c.oid = t.tgrelid
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

/// Functions as an older host may have left them: one with a different body, one with different parameters, one that no longer
/// exists.
const OLD: Source = Source {
    name: "functions/old",
    sql: "CREATE OR REPLACE FUNCTION rouse.cancel(id bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
          CREATE OR REPLACE FUNCTION rouse.retry(id bigint, why text) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint';
          CREATE OR REPLACE FUNCTION rouse.gone() RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint';
          CREATE OR REPLACE VIEW rouse.gone_too AS SELECT rouse.gone() AS one;
          GRANT EXECUTE ON FUNCTION rouse.cancel(bigint), rouse.gone() TO PUBLIC",
};

#[tokio::test]
async fn an_upgraded_database_equals_a_new_one() {
    let (new, upgraded) = (TestDb::new().await, TestDb::unmigrated().await);
    let old = Sources {
        functions: &[ALL.functions[0], ALL.functions[1], OLD],
        rights: &[],
        ..ALL
    };
    migrate_with(&upgraded.url(), old, PATIENCE).await.unwrap();
    let client = upgraded.client().await;
    // Logins of an installation have rights of their own, and keep them.
    client
        .batch_execute("DO $$ BEGIN CREATE ROLE migrations_app; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
                        GRANT EXECUTE ON FUNCTION rouse.retry(bigint, text) TO migrations_app")
        .await
        .unwrap();
    upgraded
        .store()
        .check_schema()
        .await
        .expect_err("this host has other functions");
    let report = run(&upgraded.url()).await.unwrap();
    assert_eq!(report.applied, ["functions"]);
    upgraded.store().check_schema().await.unwrap();
    let kept = client
        .query_one(
            "SELECT has_function_privilege('migrations_app', 'rouse.retry(bigint)', 'EXECUTE')",
            &[],
        )
        .await
        .unwrap();
    assert!(kept.get::<_, bool>(0));
    client
        .batch_execute("REVOKE ALL ON FUNCTION rouse.retry(bigint) FROM migrations_app")
        .await
        .unwrap();
    let expected = catalog(&new.client().await).await;
    let got = catalog(&client).await;
    let differs: Vec<_> = expected
        .iter()
        .filter(|line| !got.contains(line))
        .chain(got.iter().filter(|line| !expected.contains(line)))
        .collect();
    assert!(differs.is_empty(), "{differs:#?}");
}

#[tokio::test]
async fn objects_that_were_dropped_revoked_or_changed_are_named_and_restored() {
    let db = TestDb::new().await;
    let (client, url) = (db.client().await, db.url());
    let before = catalog(&client).await;
    let check =
        async || Host::rouse(&["migrate", "--check"], &[("DATABASE_URL", &url)]).exit(PATIENCE);
    let (status, output) = check().await;
    assert!(status.success(), "{output}");
    for (damage, named) in [
        (
            "DROP OWNED BY rouse_worker",
            "EXECUTE on function rouse.adopt(",
        ),
        (
            "DROP OWNED BY rouse_observer",
            "SELECT on rouse.worker (hostname) for rouse_observer is missing",
        ),
        (
            "DROP FUNCTION rouse.cancel(bigint)",
            "function rouse.cancel(id bigint) is missing",
        ),
        (
            "CREATE OR REPLACE FUNCTION rouse.cancel(id bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false'",
            "function rouse.cancel(id bigint) was changed",
        ),
        (
            "CREATE OR REPLACE VIEW rouse.top AS SELECT * FROM rouse.top_of_all",
            "view rouse.top was changed",
        ),
        (
            "DROP TRIGGER wake ON rouse.job",
            "trigger wake on rouse.job is missing",
        ),
        (
            "GRANT EXECUTE ON FUNCTION rouse.drop_partitions(interval) TO PUBLIC",
            "EXECUTE on function rouse.drop_partitions(keep interval, OUT dropped integer, OUT in_use integer) for PUBLIC was added",
        ),
    ] {
        let damage = damage.replace(
            "SELECT * FROM rouse.top_of_all",
            &top_without_rows(&client).await,
        );
        client.batch_execute(&damage).await.unwrap();
        let mut looking = db.client().await;
        let error = migrate::check_in_force(&mut looking).await.unwrap_err();
        let MigrateError::NotInForce { differences } = &error else {
            panic!("{damage}: {error}");
        };
        assert!(
            differences.iter().any(|one| one.contains(named)),
            "{damage}: {differences:#?}"
        );
        let (status, output) = check().await;
        assert!(!status.success(), "{damage}: {output}");
        assert!(
            output.contains("run `rouse migrate` to restore it"),
            "{output}"
        );
        let report = run(&url).await.unwrap();
        assert_eq!(&report.restored, differences, "{damage}");
        assert_eq!(catalog(&client).await, before, "{damage}");
        let (status, output) = check().await;
        assert!(status.success(), "{damage}: {output}");
    }
}

/// Replaces the view `rouse.top` by one that returns no rows.
async fn top_without_rows(client: &Client) -> String {
    let row = client
        .query_one("SELECT pg_get_viewdef('rouse.top'::regclass)", &[])
        .await
        .unwrap();
    format!(
        "SELECT * FROM ({}) AS t WHERE false",
        row.get::<_, String>(0).trim_end_matches(';')
    )
}

#[tokio::test]
async fn a_dropped_role_is_recreated_with_its_rights() {
    // Roles belong to the whole server.
    let server = tokio::task::spawn_blocking(|| {
        let settings =
            crate::support::postgres_settings(crate::support::scratch("dropped-role").join("pg"));
        rouse::postgres::Server::start(&settings).expect("a server")
    })
    .await
    .unwrap();
    let url = server.url("postgres");
    run(&url).await.unwrap();
    let client = connect(&url).await;
    let before = catalog(&client).await;
    client
        .batch_execute("DROP OWNED BY rouse_observer; DROP ROLE rouse_observer")
        .await
        .unwrap();
    let report = run(&url).await.unwrap();
    assert!(report.restored.len() > 20, "{:#?}", report.restored);
    assert_eq!(catalog(&client).await, before);
    drop(client);
    tokio::task::spawn_blocking(move || server.stop())
        .await
        .unwrap();
}

#[tokio::test]
async fn functions_of_a_later_release_are_used_and_left_unchanged() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("UPDATE rouse.definitions SET sha256 = 'theirs', release = '{0,999,0}'")
        .await
        .unwrap();
    db.store()
        .check_schema()
        .await
        .expect("an upgrade is under way");
    assert_eq!(run(&db.url()).await.unwrap().applied, Vec::<String>::new());
    client
        .batch_execute("UPDATE rouse.definitions SET release = '{0,0,9}'")
        .await
        .unwrap();
    let error = db.store().check_schema().await.unwrap_err();
    assert!(error.to_string().contains("missing: functions"), "{error}");
    assert_eq!(run(&db.url()).await.unwrap().applied, ["functions"]);
}

#[tokio::test]
async fn every_public_function_has_a_comment_and_none_is_executable_by_public() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SET search_path = pg_catalog")
        .await
        .unwrap();
    let list = async |sql: &str| -> Vec<String> {
        let rows = client.query(sql, &[]).await.unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    };
    let granted = "SELECT DISTINCT p.oid::regprocedure::text FROM pg_proc AS p
                   CROSS JOIN LATERAL aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a
                   WHERE p.pronamespace = 'rouse'::regnamespace AND a.grantee <> p.proowner";
    assert!(list(granted).await.len() > 50);
    assert_eq!(
        list(&format!("{granted} AND obj_description(p.oid) IS NULL")).await,
        Vec::<String>::new(),
        "functions without a comment"
    );
    assert_eq!(
        list(&format!("{granted} AND a.grantee = 0")).await,
        Vec::<String>::new(),
        "functions that PUBLIC may execute"
    );
    // Internal functions start with _ and trust their caller. One only formats numbers, and one reads what its caller may read.
    assert_eq!(
        list(&format!(
            "{granted} AND starts_with(p.proname, '_') ORDER BY 1"
        ))
        .await,
        [
            "rouse._payload(bigint,jsonb,timestamp with time zone)",
            "rouse._usage(bigint,bigint,integer,bigint,bigint,bytea)"
        ]
    );
    let unused = "SELECT p.oid::regprocedure::text FROM pg_proc AS p
                  WHERE p.pronamespace = 'rouse'::regnamespace AND NOT starts_with(p.proname, '_') AND NOT EXISTS (
                      SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a WHERE a.grantee <> p.proowner)";
    assert_eq!(
        list(unused).await,
        [
            "rouse.drop_partitions(interval)",
            "rouse.unlock_history(text)"
        ],
        "functions for the owner only"
    );
}

/// Enqueues until it is stopped, and returns the count and the slowest duration.
fn producer(url: String) -> (Arc<AtomicBool>, tokio::task::JoinHandle<(u32, Duration)>) {
    let over = Arc::new(AtomicBool::new(false));
    let stop = over.clone();
    let producing = tokio::spawn(async move {
        let client = connect(&url).await;
        let (mut jobs, mut slowest) = (0, Duration::ZERO);
        while !stop.load(Ordering::Relaxed) {
            let started = Instant::now();
            enqueue(&client, "x", json!({})).await;
            slowest = slowest.max(started.elapsed());
            jobs += 1;
        }
        (jobs, slowest)
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
    let (over, producing) = producer(db.url());
    let url = db.url();
    let migrating = tokio::spawn(async move {
        let migrations = and(
            "0099_adds_a_column",
            "ALTER TABLE rouse.job ADD COLUMN more text",
        );
        migrate_with(&url, with(&migrations), PATIENCE).await
    });
    // It tries at least twice.
    let watch = db.client().await;
    let waits = "SELECT EXISTS (SELECT FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
                 WHERE d.datname = current_database() AND NOT l.granted AND l.relation = 'rouse.job'::regclass AND l.mode = 'AccessExclusiveLock')";
    for waiting in [
        waits.to_string(),
        format!("SELECT NOT ({waits})"),
        waits.to_string(),
    ] {
        until_true(&watch, &waiting).await;
    }
    reader.batch_execute("COMMIT").await.unwrap();
    let report = tokio::time::timeout(PATIENCE, migrating)
        .await
        .expect("the migration continues once the reader has ended")
        .unwrap()
        .unwrap();
    over.store(true, Ordering::Relaxed);
    let (jobs, slowest) = producing.await.unwrap();
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
    // A try blocks for 150 ms; then comes the time to apply the functions, on a machine with other load.
    assert!(slowest < Duration::from_millis(1500), "{slowest:?}");
    assert!(jobs > 10, "{jobs}");
}

#[tokio::test]
async fn a_migration_without_its_locks_in_time_names_their_holders_and_changes_nothing() {
    let db = TestDb::new().await;
    let (reader, client) = (db.client().await, db.client().await);
    reader
        .batch_execute("SET application_name = 'left open'; BEGIN; SELECT count(*) FROM rouse.job")
        .await
        .unwrap();
    let migrations = and(
        "0099_adds_a_column",
        "CREATE TABLE rouse.half (); ALTER TABLE rouse.job ADD COLUMN more text",
    );
    let before = catalog(&client).await;
    let error = migrate_with(&db.url(), with(&migrations), Duration::from_millis(400))
        .await
        .unwrap_err();
    assert!(matches!(error, MigrateError::Blocked { .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("0099_adds_a_column"), "{text}");
    assert!(text.contains("application left open"), "{text}");
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
    let migrations = and("0099_adds_a_table", "CREATE TABLE rouse.more ()");
    let error = migrate_with(&db.url(), with(&migrations), Duration::from_millis(300))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("application another host"),
        "{error}"
    );
    drop(holder);
    let report = migrate_with(&db.url(), with(&migrations), PATIENCE)
        .await
        .unwrap();
    assert_eq!(report.applied, ["0099_adds_a_table", "functions"]);
}

#[tokio::test]
async fn a_login_without_rights_cannot_block_migrations() {
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
    let migrations = and("0099_adds_a_table", "CREATE TABLE rouse.more ()");
    migrate_with(&db.url(), with(&migrations), Duration::from_secs(5))
        .await
        .expect("the migration takes another lock");
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
    let mut migrations = and("0099_indexes_tenants", SQL);
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
    let error = migrate_with(&db.url(), with(&migrations), PATIENCE)
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
    let report = migrate_with(&db.url(), with(&migrations), PATIENCE)
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
    let report = migrate_with(&new.url(), with(&migrations), PATIENCE)
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
async fn a_migration_outside_a_transaction_that_waits_too_long_names_the_blocker() {
    let db = TestDb::new().await;
    let writer = db.client().await;
    writer
        .batch_execute("SET application_name = 'left open'; BEGIN; SELECT rouse.enqueue('x')")
        .await
        .unwrap();
    let migrations = and(
        "0099_indexes_tenants",
        "-- rouse: no transaction\nCREATE INDEX CONCURRENTLY job_tenant ON rouse.job (tenant);\n",
    );
    let error = migrate_with(&db.url(), with(&migrations), Duration::from_millis(300))
        .await
        .unwrap_err();
    assert!(
        error.to_string().contains("application left open"),
        "{error}"
    );
}

#[tokio::test]
async fn a_worker_continues_after_its_record_types_were_recreated() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let before = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, before).await.state, "succeeded");
    // Together with the functions that take them.
    client
        .batch_execute("DROP TYPE rouse.claim_order, rouse.settlement CASCADE")
        .await
        .unwrap();
    assert_eq!(run(&db.url()).await.unwrap().applied, ["functions"]);
    let after = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, after).await.state, "succeeded");
    worker.drain().await;
}
