//! Contents of heartbeats, and failures that must not suppress them.

use std::time::Duration;

use rouse::job::FairPolicy;
use rouse::store::{NewFairShare, WorkerKey};
use rouse::worker::{Intervals, Settings};
use serde_json::{Map, Value, json};

use crate::sandbox_guest::{echo, guest};
use crate::support::TestDb;
use crate::support::database::registration;
use crate::support::old_versions::{entries_read, keep_versions};
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    TestWorker, catalog, catalog_of, ended, enqueue, lease, prompt_heartbeats, until, until_true,
    watched,
};

/// The longest possible name with this number.
fn long_name(number: usize) -> String {
    format!("{number:x>128}")
}

#[tokio::test]
async fn a_folder_serves_ten_thousand_handlers_and_heartbeats_report_them_all() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let module = |file: usize| {
        let of = |n| json!({"name": long_name(file * 1_000 + n), "version": "v".repeat(64)});
        let manifest = json!({"handlers": (0..1_000).map(of).collect::<Vec<_>>()});
        guest(
            &manifest.to_string(),
            "(call $return_ok (local.get $payload) (local.get $payload_len))",
        )
    };
    let modules: Vec<_> = (0..11)
        .map(|file| (format!("{file:02}.wasm"), module(file)))
        .collect();
    let modules: Vec<_> = modules
        .iter()
        .map(|(file, module)| (file.as_str(), module.as_slice()))
        .collect();
    let catalog = catalog_of(&modules).await;
    let set = catalog.current();
    assert_eq!(set.handlers.len(), 10_000);
    let [refused] = &set.refused[..] else {
        panic!("refused: {:?}", set.refused);
    };
    assert!(
        refused.why.contains("has 1000 handlers")
            && refused.why.contains("can serve at most 10000"),
        "{refused:?}"
    );
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    // The text of these modules leaves room for the eight kinds of grants.
    until_true(
        &client,
        "SELECT coalesce((SELECT cardinality(handlers) = 10000 AND octet_length(capabilities::text) BETWEEN 3000000 AND 8388608 - 10000 * 200
                         FROM rouse.workers), false)",
    )
    .await;
    let id = enqueue(&client, &long_name(0), json!(null)).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_heartbeat_without_changes_keeps_the_workers_handlers() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let can = json!({"mail.send": {"version": "1"}});
    let stats = Default::default();
    worker.heartbeat(Some(&can), &stats, false).await.unwrap();
    worker.heartbeat(None, &stats, true).await.unwrap();
    let reported = "SELECT handlers = '{mail.send}' AND capabilities #>> '{mail.send,version}' = '1' AND state = 'draining' FROM rouse.workers";
    until_true(&client, reported).await;
}

#[tokio::test]
async fn a_heartbeat_reports_only_the_handlers_that_have_changed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let stats = Default::default();
    for changes in [
        json!({"mail.keep": {"version": "1"}, "mail.send": {"version": "1"}, "mail.drop": {"version": "1"}}),
        json!({"mail.send": {"version": "2", "parked": "no table"}, "mail.drop": null, "mail.new": {"version": "1"}}),
    ] {
        let beat = worker.heartbeat(Some(&changes), &stats, false).await;
        beat.unwrap();
    }
    until_true(
        &client,
        r#"SELECT handlers @> '{mail.keep,mail.send,mail.new}' AND cardinality(handlers) = 3 AND parked = '{mail.send}'
               AND capabilities = '{"mail.keep": {"version": "1"}, "mail.send": {"version": "2", "parked": "no table"}, "mail.new": {"version": "1"}}'
           FROM rouse.worker"#,
    )
    .await;
}

#[tokio::test]
async fn the_limits_of_capabilities_apply_to_those_of_all_heartbeats_together() {
    let db = TestDb::new().await;
    let worker = db.worker().await;
    let stats = Default::default();
    let handlers = |prefix: &str, capability: &Value| {
        let handler = |n| (format!("{prefix}.{n}"), capability.clone());
        (0..6_000).map(handler).collect::<Map<_, _>>()
    };
    let first = Value::Object(handlers("first", &json!({})));
    worker.heartbeat(Some(&first), &stats, false).await.unwrap();
    let mut second = handlers("second", &json!({}));
    let changes = Value::Object(second.clone());
    let refused = worker.heartbeat(Some(&changes), &stats, false).await;
    let refused = refused.expect_err("too many together");
    assert!(refused.is_about_data(), "{refused}");
    assert!(refused.to_string().contains("12000 handlers"), "{refused}");
    second.extend(handlers("first", &Value::Null));
    let changes = Value::Object(second);
    let beat = worker.heartbeat(Some(&changes), &stats, false).await;
    beat.unwrap();
}

#[tokio::test]
async fn a_worker_whose_handlers_are_refused_by_the_database_stays_alive() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, folder) = watched(&["noop.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    until_true(
        &client,
        "SELECT coalesce((SELECT handlers = '{noop}' FROM rouse.workers), false)",
    )
    .await;
    client
        .batch_execute(
            "CREATE OR REPLACE FUNCTION rouse._check_capabilities(p_capabilities jsonb) RETURNS void LANGUAGE plpgsql AS $$
             BEGIN RAISE EXCEPTION 'too many' USING ERRCODE = 'program_limit_exceeded'; END $$;
             UPDATE rouse.worker SET seen_at = now() - interval '80 s', stats_at = NULL",
        )
        .await
        .unwrap();
    // A change to its handlers is reported at once.
    std::fs::write(folder.path().join("echo.wasm"), echo("test.echo", "1")).unwrap();
    until_true(
        &client,
        "SELECT seen_at > now() - interval '60 s' AND stats_at IS NOT NULL FROM rouse.worker",
    )
    .await;
    let row = client
        .query_one("SELECT handlers, state FROM rouse.workers", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, Vec<String>>(0), ["noop"]);
    assert_eq!(row.get::<_, String>(1), "active");
    let id = enqueue(&client, "test.echo", json!(1)).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
}

/// A failover may lose a heartbeat that the old server has committed, and none of the worker's calls fails because of
/// it.
#[tokio::test]
async fn a_worker_sends_capabilities_again_that_the_database_has_lost() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, folder) = watched(&["noop.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    std::fs::write(folder.path().join("echo.wasm"), echo("test.echo", "1")).unwrap();
    let has_all =
        "SELECT handlers @> '{noop,test.echo}' AND capabilities ? 'test.echo' FROM rouse.worker";
    until_true(&client, has_all).await;
    client
        .batch_execute(
            "UPDATE rouse.worker SET handlers = '{noop}', capabilities = capabilities - 'test.echo', changes = changes - 1",
        )
        .await
        .unwrap();
    prompt_heartbeats(&client).await;
    until_true(&client, has_all).await;
    worker.drain().await;
}

/// The leases last for an hour. The database would wait until they end, because it does not count the worker as dead.
#[tokio::test]
async fn a_worker_that_has_been_silent_gives_up_its_attempts_and_starts_over() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        // The heartbeats are 30 s apart.
        intervals: Intervals {
            silence: Duration::from_secs(3),
            ..Intervals::default()
        },
        overrides: lease("test.wait-abort", 3600),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.attempt >= 2).await;
    until_true(
        &client,
        "SELECT bool_and(dead_at IS NULL) AND bool_or(stopped_at IS NOT NULL) FROM rouse.worker",
    )
    .await;
    worker.stop_now().await;
}

/// The row is locked as by `rouse.clear_timeouts`, in a transaction that stays open.
#[tokio::test]
async fn a_heartbeat_waits_some_seconds_for_the_row_of_its_worker() {
    let db = TestDb::new().await;
    let worker = db.worker().await;
    let operator = db.client().await;
    let lock = "BEGIN; SELECT FROM rouse.worker FOR NO KEY UPDATE";
    operator.batch_execute(lock).await.unwrap();
    let stats = Default::default();
    let refused = worker.heartbeat(None, &stats, false).await;
    let error = refused.map(drop).expect_err("the row is locked");
    assert!(error.is_locked(), "{error}");
    operator.batch_execute("ROLLBACK").await.unwrap();
    worker.heartbeat(None, &stats, false).await.unwrap();
}

/// A transaction that is open all day keeps one for each heartbeat.
#[tokio::test]
async fn workers_read_no_old_versions_of_their_rows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut worker = 0_i64;
    for id in ["other", "w"] {
        let register = "SELECT incarnation FROM rouse.register($1, sha256('key'), 'here', 'linux', '0', '{}', 1, '{}', '{}')";
        worker = client.query_one(register, &[&id]).await.unwrap().get(0);
    }
    let _old = keep_versions(&db).await;
    for _ in 0..200 {
        // A value as long as the statistics of a host.
        let heartbeats = "UPDATE rouse.worker SET seen_at = clock_timestamp(), stats = jsonb_build_object('text', repeat('x', 1000))";
        client.batch_execute(heartbeats).await.unwrap();
    }
    for statistics in ["SELECT", "ANALYZE rouse.worker, rouse.live_worker"] {
        client.batch_execute(statistics).await.unwrap();
        for call in [
            format!("SELECT rouse.challenges({worker}, sha256('key'))"),
            format!("SELECT rouse.heartbeat({worker}, sha256('key'), NULL, '{{}}', false)"),
            format!("SELECT rouse.module_schedules({worker}, sha256('key'))"),
            // With the settings of the functions that call these.
            format!(
                "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SELECT rouse._limits_of({worker})"
            ),
            format!(
                "SET LOCAL enable_bitmapscan = off; SELECT rouse._crashes(1, {worker}, now(), now())"
            ),
            "SELECT rouse.enqueue('unknown')".to_owned(),
        ] {
            let read = entries_read(&client, &["rouse.worker", "rouse.live_worker"], &call).await;
            assert!(read < 50, "{call}, after {statistics}: {read}");
        }
    }
}

/// Otherwise, its id would be taken for 90 s.
#[tokio::test]
async fn a_worker_whose_registration_got_no_response_registers_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let response = proxy.hold("rouse.register(", Side::Response);
    let settings = Settings {
        worker_id: "mail".into(),
        ..Settings::default()
    };
    let worker =
        TestWorker::start_through(proxy.store(), db.connector(), settings, catalog().await);
    response.caught().await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.worker)").await;
    proxy.go_down();
    proxy.come_up();
    response.release();
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    let twice = "SELECT count(*) >= 2 FROM rouse.worker WHERE worker_id = 'mail'";
    until_true(&client, twice).await;
    worker.drain().await;
}

/// The locks are those that `rouse.forget_worker`, `rouse.clear_timeouts` and `rouse.set_fair_share` take.
#[tokio::test]
async fn a_host_that_starts_waits_a_few_seconds_for_locks_and_names_what_it_waits_for() {
    let db = TestDb::new().await;
    let (dead, live, new) = (db.worker().await, db.worker().await, db.store());
    let operator = db.client().await;
    let expire = "UPDATE rouse.worker SET dead_at = now() WHERE worker_id = 'w-1'";
    operator.batch_execute(expire).await.unwrap();
    operator
        .batch_execute(
            "BEGIN;
             SELECT rouse._lock('register', 'w-3'), rouse._lock('register', 'mail');
             SELECT FROM rouse.worker WHERE worker_id = 'w-1' FOR NO KEY UPDATE;
             SELECT rouse.set_fair_share('mail', 'drr')",
        )
        .await
        .unwrap();
    let share = NewFairShare {
        policy: Some(FairPolicy::Drr),
        ..NewFairShare::default()
    };
    let settings = Settings {
        worker_id: "mail".into(),
        ..Settings::default()
    };
    let starting = TestWorker::start(&db, settings).await;
    let registered = registration("w-3", WorkerKey::random());
    let (outlived, declared, registration, failed) = tokio::join!(
        dead.outlived(),
        live.declare_fair_share("mail", &share),
        new.register(&registered),
        starting.failed(),
    );
    let worker = "a transaction that has changed a worker and is still open";
    let queue = "a transaction that has changed a queue or a gate and is still open";
    for (response, what) in [
        (outlived, worker),
        (declared, queue),
        (registration.map(drop), worker),
    ] {
        let error = response.expect_err(what);
        assert_eq!(error.waits_for(), Some(what), "{error}");
    }
    assert!(
        failed.starts_with("register the worker")
            && failed.contains(&format!(
                "It waited for {worker}: commit it, or end its session"
            )),
        "{failed}"
    );
    operator.batch_execute("ROLLBACK").await.unwrap();
    dead.outlived().await.unwrap();
    live.declare_fair_share("mail", &share).await.unwrap();
    new.register(&registered).await.unwrap();
}
