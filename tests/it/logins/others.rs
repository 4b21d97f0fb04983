//! What a worker of a limited login cannot do to jobs of other workers.

use std::fmt::Display;

use rouse::job::declared::{Current, DeclaredSchedule};
use rouse::job::declared_gate::{DeclaredGate, During, GateLimit, OnConflict};
use rouse::store::{Registration, Report};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::{Login, limit, serving};
use crate::support::TestDb;
use crate::support::claims::{claim, claim_one, make_due};
use crate::support::worker::{TestWorker, enqueue_sql, until_true};

/// The fence of the intruder's claims.
const FENCE: i64 = 5;

/// A session of a login that is limited to queue mail, with a registered worker.
struct Intruder {
    client: Client,
    worker: i64,
}

impl Intruder {
    async fn enter(db: &TestDb, name: &str) -> Self {
        let login = Login::create(db, name).await;
        let limits = format!("'{name}', '{{w}}', '{{mail}}'");
        let columns = "login, worker_ids, queues";
        limit(&db.client().await, columns, &limits).await;
        let client = login.client().await;
        let register = "SELECT incarnation \
                        FROM rouse.register('w', sha256('k'), 'h', 'p', 'v', '{}', 9, '{mail}', '{}')";
        let worker = client.query_one(register, &[]).await.unwrap().get(0);
        Self { client, worker }
    }

    /// Calls a function with the worker and its key, and returns the first column of the first row, if any.
    async fn call(&self, function: &str, arguments: impl Display) -> Option<i64> {
        let sql = format!(
            "SELECT r::text::bigint FROM rouse.{function}({}, sha256('k'), {arguments}) AS r",
            self.worker
        );
        let rows = self.client.query(&sql, &[]).await.expect(&sql);
        rows.first().and_then(|row| row.get(0))
    }

    /// A job of its queue that it has claimed.
    async fn job(&self, db: &TestDb) -> i64 {
        let id = enqueue_sql(&db.client().await, "'x', queue => 'mail'").await;
        let lanes =
            "ARRAY(SELECT ROW(id, -1, 60000, NULL, NULL)::rouse.claim_order FROM rouse.lane)";
        let claim = format!(
            "SELECT id FROM rouse.claim({}, sha256('k'), {FENCE}, {lanes}, 1) WHERE id IS NOT NULL",
            self.worker
        );
        let claimed: i64 = self.client.query_one(&claim, &[]).await.unwrap().get(0);
        assert_eq!(claimed, id);
        id
    }

    /// Settles a claimed job as queued, with these other fields.
    async fn settle(&self, id: i64, fields: &Value) {
        let own = json!({"id": id, "fence": FENCE, "state": "queued", "started_us": 1});
        let settlement =
            format!("jsonb_populate_record(NULL::rouse.settlement, '{own}'::jsonb || '{fields}')");
        let sql = format!(
            "SELECT id FROM rouse.settle({}, sha256('k'), ARRAY[{settlement}], '{{}}', false)",
            self.worker
        );
        let accepted: i64 = self.client.query_one(&sql, &[]).await.unwrap().get(0);
        assert_eq!(accepted, id);
    }

    async fn run(&self, sql: &str) {
        self.client.batch_execute(sql).await.unwrap();
    }
}

/// The steps of several jobs are read in one call.
#[tokio::test]
async fn a_malformed_wait_does_not_hide_the_steps_of_other_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let intruder = Intruder::enter(&db, "logins_malformed").await;
    let id = intruder.job(&db).await;
    let wait = json!({"kind": "sleep", "step": "s", "until_ms": "soon"});
    intruder.settle(id, &json!({ "result": wait })).await;
    make_due(&client, id).await;
    enqueue_sql(&client, "'x'").await;
    let store = db.worker().await;
    store.promote(None, false).await.unwrap();
    let claims: Vec<_> = claim(&store, 9)
        .await
        .iter()
        .map(|job| (job.id, job.fence))
        .collect();
    assert_eq!(claims.len(), 2);
    let steps = store.recorded_steps(&claims, Vec::new()).await.unwrap();
    assert!(steps.iter().all(Result::is_ok), "{steps:?}");
}

#[tokio::test]
async fn a_suspension_locks_no_job_that_the_attempt_has_not_called() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let intruder = Intruder::enter(&db, "logins_waiter").await;
    let other = enqueue_sql(&client, "'x', queue => 'billing'").await;
    let id = intruder.job(&db).await;
    let wait = json!({"kind": "call", "step": "s", "jobs": [other]});
    intruder.run("BEGIN").await;
    intruder.settle(id, &json!({ "result": wait })).await;
    client
        .batch_execute(&format!(
            "SET lock_timeout = '5s'; SELECT rouse.cancel({other})"
        ))
        .await
        .expect("the settlement has not locked it");
    intruder.run("COMMIT").await;
    let waits = "SELECT EXISTS (SELECT FROM rouse.dependency)";
    let waits: bool = client.query_one(waits, &[]).await.unwrap().get(0);
    assert!(!waits);
}

#[tokio::test]
async fn a_report_locks_no_progress_of_another_workers_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let intruder = Intruder::enter(&db, "logins_reporter").await;
    let id = enqueue_sql(&client, "'x'").await;
    let store = db.worker().await;
    let job = claim_one(&store).await;
    let report = |percent| Report {
        id: job.id,
        fence: job.fence,
        percent,
        step: "s".into(),
    };
    store.report(&[report(1)], &[]).await.unwrap();
    intruder.run("BEGIN").await;
    for fence in ["1", "NULL"] {
        let arguments = format!(
            "ARRAY[ROW({id}, {fence}, 5, 's')::rouse.progress_report], '{{{id}}}', ARRAY[{fence}]::bigint[]"
        );
        assert_eq!(intruder.call("report", arguments).await, None);
    }
    let accepted = store.report(&[report(2)], &[]).await;
    assert!(accepted.expect("nothing is locked").contains(&job.id));
    intruder.run("COMMIT").await;
}

#[tokio::test]
async fn a_worker_writes_log_lines_only_of_its_own_attempts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let intruder = Intruder::enter(&db, "logins_forger").await;
    let id = intruder.job(&db).await;
    let error = json!({"kind": "guest_error", "message": "no"});
    intruder.settle(id, &json!({ "error": error })).await;
    let store = db.worker().await;
    store.promote(None, false).await.unwrap();
    let job = claim_one(&store).await;
    assert_eq!((job.id.0, job.attempt.0), (id, 2));
    for (attempt, stored) in [(1, 1), (2, 0)] {
        let line =
            format!("ARRAY[ROW({id}, {attempt}, 1, 0, 'info', 'it')::rouse.log_line], false");
        assert_eq!(intruder.call("append_log", line).await, Some(stored));
    }
    let lines = "SELECT count(*) FROM rouse.job_log($1)";
    let lines: i64 = client.query_one(lines, &[&id]).await.unwrap().get(0);
    assert_eq!(lines, 1);
}

fn every_second() -> Current {
    Current {
        version: "1.0.0".into(),
        schedule: DeclaredSchedule {
            cron: "* * * * * *".into(),
            time_zone: "UTC".into(),
        },
    }
}

/// A worker that declares this schedule for handler gated.
fn declaring(id: &str, declared: &Current) -> Registration {
    Registration {
        capabilities: json!({"gated": {
            "version": "1.0.0", "sha256": "ab".repeat(32), "grants": [], "schedule": declared.schedule
        }}),
        ..serving(id, &["default"])
    }
}

/// Any host creates and fires such a schedule, even one whose login has no limits.
#[tokio::test]
async fn a_declared_schedule_replaces_no_job_outside_the_limits_of_the_login_that_declares_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_declarer").await;
    limit(
        &client,
        "login, worker_ids, queues, handlers",
        "'logins_declarer', '{w}', '{default}', '{gated}'",
    )
    .await;
    let declared = every_second();
    let worker = db.worker().await;
    let put = worker.put_module_schedule("gated", &declared).await;
    assert_eq!(put.unwrap(), "undeclared");
    let limited = login.store();
    limited.register(&declaring("w", &declared)).await.unwrap();
    let gate = DeclaredGate {
        limit: GateLimit::Singleton {
            during: During::Queued,
            period_ms: None,
            on_conflict: OnConflict::Replace,
        },
        key: Vec::new(),
    };
    assert!(limited.declare_gates("gated", &[gate]).await.unwrap());
    let other = enqueue_sql(&client, "'gated', '{\"n\": 1}', queue => 'billing'").await;
    client
        .batch_execute(
            "SELECT rouse.schedule('tick', 'noop', cron => '* * * * * *', overlap => 'allow')",
        )
        .await
        .unwrap();
    let host = TestWorker::start(&db, Settings::default()).await;
    // The refusals do not stop the other schedule.
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE schedule = 'gated' AND outcome = 'refused') >= 2
                AND count(*) FILTER (WHERE schedule = 'tick' AND outcome = 'enqueued') >= 2
         FROM rouse.schedule_run",
    )
    .await;
    let shown = "SELECT state, login::text, error FROM rouse.schedules WHERE name = 'gated'";
    let shown = client.query_one(shown, &[]).await.unwrap();
    assert_eq!((shown.get(0), shown.get(1)), ("error", "logins_declarer"));
    let why = format!(
        "rouse: login logins_declarer may not use job {other}, with which a gate would merge a job for handler 'gated'; \
         it is in queue 'billing'"
    );
    let error: &str = shown.get(2);
    assert!(error.contains(&why), "{error}");

    // The limits also apply while no worker declares the schedule.
    limited.unregister().await.unwrap();
    let refusals = "SELECT count(*) FROM rouse.schedule_run WHERE outcome = 'refused'";
    let before: i64 = client.query_one(refusals, &[]).await.unwrap().get(0);
    // One of the refused firings may have started before the worker was unregistered.
    let later = format!("SELECT ({refusals}) >= {}", before + 2);
    until_true(&client, &later).await;
    let kept = "SELECT queue = 'billing' AND payload = '{\"n\": 1}' FROM rouse.jobs WHERE id = $1";
    let kept: bool = client.query_one(kept, &[&other]).await.unwrap().get(0);
    assert!(kept, "the job is as it was enqueued");

    // A worker whose login has no limits declares it too.
    let free = db.store();
    free.register(&declaring("free", &declared)).await.unwrap();
    until_true(
        &client,
        &format!(
            "SELECT queue = 'default' AND payload = '{{}}' FROM rouse.jobs WHERE id = {other}"
        ),
    )
    .await;
    until_true(
        &client,
        "SELECT state = 'active' FROM rouse.schedules WHERE name = 'gated'",
    )
    .await;
    host.drain().await;
}

/// The capabilities of a worker may take megabytes.
#[tokio::test]
async fn the_login_of_a_declared_schedule_is_found_without_reading_all_capabilities() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let login = Login::create(&db, "logins_declares").await;
    limit(
        &client,
        "login, worker_ids, queues, handlers",
        "'logins_declares', '{w}', '{default}', '{gated}'",
    )
    .await;
    let declared = every_second();
    let (worker, limited, free) = (db.worker().await, login.store(), db.store());
    limited.register(&declaring("w", &declared)).await.unwrap();
    let put = worker.put_module_schedule("gated", &declared).await;
    assert_eq!(put.unwrap(), "created");
    free.register(&declaring("free", &declared)).await.unwrap();
    client
        .batch_execute(
            "INSERT INTO rouse.worker (worker_id, hostname, version, handlers, key_hash, capabilities)
             SELECT 'other-' || n, '', '', '{}', sha256('other'),
                    jsonb_build_object('x', (SELECT string_agg(md5(n || '.' || m), '') FROM generate_series(1, 1000) AS m))
             FROM generate_series(1, 5) AS n",
        )
        .await
        .unwrap();
    assert_eq!(
        declaring_login(&mut client).await,
        ("logins_declares".into(), 0)
    );

    // The schedule belongs to a login without limits, if one declares it.
    let put = worker.put_module_schedule("gated", &declared).await;
    assert_eq!(put.unwrap(), "unchanged");
    let of_session = "SELECT login = session_user FROM rouse.schedule";
    let of_session: bool = client.query_one(of_session, &[]).await.unwrap().get(0);
    assert!(of_session);

    free.unregister().await.unwrap();
    let (found, read) = declaring_login(&mut client).await;
    assert_eq!(found, "logins_declares");
    assert!(read > 0, "the other workers of its login are read first");
}

/// The login that declares the only schedule, and how many parts of large capabilities were read to find it.
async fn declaring_login(client: &mut Client) -> (String, i64) {
    const READ: &str = "SELECT coalesce(sum(idx_tup_fetch), 0)::bigint FROM pg_stat_xact_all_tables
         WHERE relid = (SELECT c.reltoastrelid FROM pg_class AS c WHERE c.oid = 'rouse.worker'::regclass)";
    const FIND: &str = "SELECT rouse._declaring_login(s)::text FROM rouse.schedule AS s";
    let transaction = client.transaction().await.unwrap();
    let before: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    let found = transaction.query_one(FIND, &[]).await.unwrap().get(0);
    let after: i64 = transaction.query_one(READ, &[]).await.unwrap().get(0);
    transaction.commit().await.unwrap();
    (found, after - before)
}
