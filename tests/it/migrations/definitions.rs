//! Functions, views and privileges: applied as a whole, compared with the sources, and restored.

use rouse::store::migrate::{self, ALL, MigrateError, PROTOCOL, Source, Sources};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use super::{all, catalog, with_additional};
use crate::support::database::{connect, migrate as run, migrate_with};
use crate::support::worker::{TIMEOUT, TestWorker, ended, enqueue};
use crate::support::{Host, TestDb, rouse_in, scratch};

/// Functions of the next release: a settlement has one more field. Both forms of the record are accepted.
const NEXT: Source = Source {
    name: "functions/next",
    sql: "CREATE TYPE rouse.settlement_2 AS (one rouse.settlement, note text);
          CREATE FUNCTION rouse.settle(p_worker bigint, p_key bytea, p_settlements rouse.settlement_2[], p_jobs rouse.new_job[], p_skip_locked boolean)
          RETURNS TABLE (id bigint, locked boolean) LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
              SELECT * FROM rouse.settle(p_worker, p_key, ARRAY(SELECT (s).one FROM unnest(p_settlements) AS s), p_jobs, p_skip_locked)
          $$",
};

#[tokio::test]
async fn the_next_release_serves_hosts_of_this_protocol_and_the_one_after_refuses_them() {
    let db = TestDb::new().await;
    let functions: Vec<Source> = ALL.functions.iter().copied().chain([NEXT]).collect();
    let migrations = with_additional("0099_adds_a_table", "CREATE TABLE rouse.more ()");
    let next = Sources {
        migrations: &migrations,
        functions: &functions,
        protocols: (PROTOCOL, PROTOCOL + 1),
        // The privileges name functions without their parameters.
        privileges: &[],
    };
    // A host of this release keeps working while the next release is applied, and afterwards.
    let worker = TestWorker::start(&db, Settings::default()).await;
    let client = db.client().await;
    let before = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, before).await.state, "succeeded");
    migrate_with(&db.url(), next, TIMEOUT).await.unwrap();
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
    migrate_with(&db.url(), one_after, TIMEOUT).await.unwrap();
    for error in [
        db.store().check_schema().await.unwrap_err(),
        run(&db.url()).await.unwrap_err(),
    ] {
        assert_eq!(
            error.to_string(),
            "the database serves hosts of protocol 2 and later, but this host has protocol 1; upgrade the host"
        );
    }
}

/// Functions as an older host may have left them: with a different body, fewer or more parameters, different names of
/// parameters, another result, other columns, or a default that was removed since; and some that no longer exist, with
/// views that call them or whose rows they return. The view `backlog` has had fewer columns.
const OLD: Source = Source {
    name: "functions/old",
    sql: "CREATE OR REPLACE FUNCTION rouse.cancel(id bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false';
          CREATE OR REPLACE FUNCTION rouse.prepare_partitions() RETURNS integer LANGUAGE sql AS 'SELECT 1';
          CREATE OR REPLACE FUNCTION rouse.retry(id bigint, why text) RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint';
          CREATE OR REPLACE FUNCTION rouse.pause_queue(name text) RETURNS timestamptz LANGUAGE sql AS 'SELECT now()';
          CREATE OR REPLACE FUNCTION rouse.unschedule(name text) RETURNS text LANGUAGE sql AS 'SELECT name';
          CREATE OR REPLACE FUNCTION rouse.depth() RETURNS TABLE (queue text, jobs bigint) LANGUAGE sql AS 'SELECT ''a''::text, 1::bigint';
          CREATE OR REPLACE FUNCTION rouse.drop_partitions(keep interval DEFAULT '1 day', OUT dropped integer, OUT in_use integer)
              LANGUAGE sql AS 'SELECT 1, 1';
          CREATE OR REPLACE FUNCTION rouse.gone() RETURNS bigint LANGUAGE sql AS 'SELECT 1::bigint';
          CREATE OR REPLACE VIEW rouse.gone_too AS SELECT rouse.gone() AS one;
          CREATE OR REPLACE FUNCTION rouse.gone_rows() RETURNS SETOF rouse.gone_too LANGUAGE sql AS 'SELECT 1::bigint';
          CREATE OR REPLACE VIEW rouse.gone_last AS SELECT r.one FROM rouse.gone_rows() AS r;
          CREATE OR REPLACE VIEW rouse.backlog AS SELECT d.queue FROM rouse.depth() AS d;
          GRANT EXECUTE ON FUNCTION rouse.cancel(bigint), rouse.gone() TO PUBLIC",
};

/// The sources of that host.
const OLD_SOURCES: Sources<'static> = Sources {
    functions: &[ALL.functions[0], ALL.functions[1], OLD],
    privileges: &[],
    ..ALL
};

#[tokio::test]
async fn an_upgraded_database_equals_a_new_one() {
    let (new, upgraded) = (TestDb::new().await, TestDb::unmigrated().await);
    migrate_with(&upgraded.url(), OLD_SOURCES, TIMEOUT)
        .await
        .unwrap();
    let client = upgraded.client().await;
    // Logins of an installation have privileges of their own, and keep them.
    client
        .batch_execute("DO $$ BEGIN CREATE ROLE migrations_app; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
                        GRANT EXECUTE ON FUNCTION rouse.retry(bigint, text), rouse.unschedule(text) TO migrations_app")
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
            "SELECT has_function_privilege('migrations_app', 'rouse.retry(bigint)', 'EXECUTE')
                    AND has_function_privilege('migrations_app', 'rouse.unschedule(text)', 'EXECUTE')",
            &[],
        )
        .await
        .unwrap();
    assert!(kept.get::<_, bool>(0));
    client
        .batch_execute("REVOKE ALL ON FUNCTION rouse.retry(bigint), rouse.unschedule(text) FROM migrations_app")
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
async fn a_users_view_of_a_function_that_changes_is_named_and_never_dropped() {
    let db = TestDb::unmigrated().await;
    migrate_with(&db.url(), OLD_SOURCES, TIMEOUT).await.unwrap();
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE SCHEMA mine;
             CREATE VIEW mine.queues AS SELECT b.queue FROM rouse.backlog AS b;
             CREATE VIEW mine.depth AS SELECT d.queue FROM rouse.depth() AS d",
        )
        .await
        .unwrap();
    let error = run(&db.url()).await.unwrap_err().to_string();
    assert!(
        error.contains("view mine.depth depends on function rouse.depth(). Drop these objects"),
        "{error}"
    );
    assert!(!error.contains("mine.queues"), "{error}");
    let sql = "SELECT queue FROM mine.depth";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "a", "nothing was changed");
    client.batch_execute("DROP VIEW mine.depth").await.unwrap();
    assert_eq!(run(&db.url()).await.unwrap().applied, ["functions"]);
    // The view that it reads has more columns now, which come from the new function.
    let rows = client.query("SELECT queue FROM mine.queues", &[]).await;
    assert_eq!(rows.unwrap().len(), 0);
}

#[tokio::test]
async fn a_users_view_of_a_view_that_vanishes_is_named_and_never_dropped() {
    let db = TestDb::unmigrated().await;
    migrate_with(&db.url(), OLD_SOURCES, TIMEOUT).await.unwrap();
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE SCHEMA mine; CREATE VIEW mine.ones AS SELECT g.one FROM rouse.gone_last AS g",
        )
        .await
        .unwrap();
    let error = run(&db.url()).await.unwrap_err().to_string();
    assert!(error.contains("view mine.ones"), "{error}");
    let sql = "SELECT one FROM mine.ones";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 1, "nothing was changed");
    client.batch_execute("DROP VIEW mine.ones").await.unwrap();
    assert_eq!(run(&db.url()).await.unwrap().applied, ["functions"]);
}

#[tokio::test]
async fn a_function_of_another_owner_is_replaced() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let before = catalog(&client).await;
    client
        .batch_execute(
            "ALTER FUNCTION rouse.cancel(bigint) OWNER TO CURRENT_USER;
             CREATE FUNCTION rouse.cancel(id bigint, why text) RETURNS boolean LANGUAGE sql AS 'SELECT false'",
        )
        .await
        .unwrap();
    assert_eq!(run(&db.url()).await.unwrap().applied, ["functions"]);
    assert_eq!(catalog(&client).await, before);
}

#[tokio::test]
async fn objects_that_were_dropped_revoked_or_changed_are_named_and_restored() {
    let db = TestDb::new().await;
    let (client, url) = (db.client().await, db.url());
    let before = catalog(&client).await;
    let check =
        async || Host::rouse(&["migrate", "--check"], &[("DATABASE_URL", &url)]).exit(TIMEOUT);
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
            "ALTER TABLE rouse.job DISABLE TRIGGER wake",
            "trigger wake on rouse.job was changed",
        ),
        (
            "DROP TRIGGER gate_changed ON rouse.gate",
            "trigger gate_changed on rouse.gate is missing",
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

#[tokio::test]
async fn a_check_prints_its_findings_as_json() {
    let check = async |db: &TestDb| {
        let ran = rouse_in(db, &["migrate", "--check", "--json"], &scratch("check")).await;
        (ran.code, ran.json())
    };
    let db = TestDb::new().await;
    let nothing = json!({"up_to_date": true, "missing": [], "differences": []});
    assert_eq!(check(&db).await, (0, nothing));
    let client = db.client().await;
    client
        .batch_execute("DROP TRIGGER wake ON rouse.job")
        .await
        .unwrap();
    let changed = json!({"up_to_date": false, "missing": [], "differences": ["trigger wake on rouse.job is missing"]});
    assert_eq!(check(&db).await, (1, changed));
    let (code, found) = check(&TestDb::unmigrated().await).await;
    let missing = json!({"up_to_date": false, "missing": all(), "differences": []});
    assert_eq!((code, found), (1, missing));
}

/// The query of the view `rouse.top`, changed so that it returns no rows.
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
async fn a_dropped_role_is_recreated_with_its_privileges() {
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
    // Internal functions start with _ and trust their caller. Two only format values, and two read what their
    // callers may read.
    assert_eq!(
        list(&format!(
            "{granted} AND starts_with(p.proname, '_') ORDER BY 1"
        ))
        .await,
        [
            "rouse._by(text,text)",
            "rouse._count_flow(bigint)",
            "rouse._payload(bigint,jsonb,timestamp with time zone)",
            "rouse._usage(bigint,bigint,integer,bigint,bigint,bytea)"
        ]
    );
    let unused = "SELECT p.oid::regprocedure::text FROM pg_proc AS p
                  WHERE p.pronamespace = 'rouse'::regnamespace AND NOT starts_with(p.proname, '_') AND NOT EXISTS (
                      SELECT FROM aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) AS a WHERE a.grantee <> p.proowner)
                  ORDER BY 1";
    assert_eq!(
        list(unused).await,
        [
            "rouse.delete_contracts(text[])",
            "rouse.drop_partitions(interval)",
            "rouse.publish_contracts(jsonb,name,boolean)",
            "rouse.unlock_history(text)"
        ],
        "functions for the owner only"
    );
}
