//! Bounds that hold for every worker's login, with limits or without.

use std::time::Duration;

use rouse::job::{FairPolicy, Fence, Outcome};
use rouse::store::{JsonText, Listener, Locked, NewFairShare, Notification, WorkerKey};
use serde_json::json;
use tokio_postgres::Client;

use super::{Login, claimed, ids, limit, refusal, serving};
use crate::support::TestDb;
use crate::support::claims::{claim, orders, settlement};
use crate::support::database::{self, connect, registration};
use crate::support::worker::{enqueue, enqueue_sql, show};

#[tokio::test]
async fn leases_of_years_are_capped_at_a_day() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, db.worker().await);
    const YEARS_MS: i64 = i64::MAX;
    const DAYS: &str = "SELECT count(*) FILTER (WHERE lease_until BETWEEN now() + interval '23 hours' AND now() + interval '25 hours'), count(*) \
                        FROM rouse.job";
    let all_of_a_day = async || {
        let row = client.query_one(DAYS, &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), row.get::<_, i64>(1));
    };
    enqueue(&client, "x", json!({})).await;
    let years = orders(&worker, YEARS_MS).await;
    let job = worker
        .claim(Fence(7), &years, 1, None)
        .await
        .unwrap()
        .jobs()
        .remove(0);
    all_of_a_day().await;
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    let adopted = crate::support::claims::adopt(&worker, Fence(8), &years, 1, 3, None)
        .await
        .unwrap();
    assert_eq!(ids(&adopted.claimed), [job.id.0]);
    all_of_a_day().await;
    let renewed = format!(
        "SELECT rouse.renew(incarnation, NULL, '{{{}}}', '{{8}}', '{{{YEARS_MS}}}') FROM rouse.worker",
        job.id.0
    );
    client
        .batch_execute("UPDATE rouse.worker SET key_hash = sha256('k'); UPDATE rouse.job SET lease_until = now() + interval '1 min'")
        .await
        .unwrap();
    client
        .query(&renewed.replace("NULL", "'k'"), &[])
        .await
        .unwrap();
    all_of_a_day().await;
    enqueue_sql(&client, "'x', source => 's'").await;
    worker_with(&client, "k").await;
    let bound = format!(
        "SELECT unnest(c.ids) FROM rouse.worker, rouse.claim_bound(incarnation, 'k', 9, ARRAY(SELECT id FROM rouse.lane), '{{s}}', {YEARS_MS}, 1) AS c"
    );
    assert_eq!(client.query(&bound, &[]).await.unwrap().len(), 1);
    all_of_a_day().await;
}

/// A list that is extended up to the number of the handler would not fit into an array.
#[tokio::test]
async fn a_claim_by_source_does_not_extend_its_list_of_handlers() {
    let db = TestDb::new().await;
    let (client, _worker) = (db.client().await, db.worker().await);
    enqueue_sql(&client, "'x', source => 's'").await;
    worker_with(&client, "k").await;
    let bound = "SELECT unnest(c.ids) FROM rouse.worker,
                     rouse.claim_bound(incarnation, 'k', 9, ARRAY(SELECT id FROM rouse.lane), '{s}', 60000, 1, NULL, '{1000000000}', '{5}') AS c";
    assert_eq!(client.query(bound, &[]).await.unwrap().len(), 1);
}

/// Gives the registered workers this key.
async fn worker_with(client: &Client, key: &str) {
    let sql = format!("UPDATE rouse.worker SET key_hash = sha256('{key}')");
    client.batch_execute(&sql).await.unwrap();
}

#[tokio::test]
async fn a_worker_that_asks_for_no_orphans_gets_none() {
    let db = TestDb::new().await;
    let (client, worker) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    claim(&worker, 1).await;
    worker_with(&client, "k").await;
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    for wanted in ["-1", "NULL"] {
        let sql = format!(
            "SELECT o.id FROM rouse.worker AS w, rouse.orphans(w.incarnation, 'k', ARRAY(SELECT id FROM rouse.lane), NULL, {wanted}, NULL, 3, 10000) AS o"
        );
        let rows = client.query(&sql, &[]).await.unwrap();
        assert_eq!(rows.len(), 0, "{wanted}");
    }
    assert_eq!(show(&client, id).await.state, "running");
}

#[tokio::test]
async fn values_reported_by_a_worker_are_bounded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_large").await;
    let hostile = login.client().await;
    let register = |hostname: &str,
                    version: &str,
                    capabilities: &str,
                    slots: &str,
                    queues: &str,
                    tags: &str| {
        format!(
            "SELECT rouse.register('w', sha256('k'), {hostname}, 'p', {version}, {capabilities}, {slots}, {queues}, {tags})"
        )
    };
    let many = "array_fill('q'::text, ARRAY[1001])";
    for (sql, why) in [
        (
            register("repeat('x', 50000000)", "'v'", "'{}'", "1", "'{}'", "'{}'"),
            "hostname",
        ),
        (
            register("'h'", "repeat('x', 256)", "'{}'", "1", "'{}'", "'{}'"),
            "version",
        ),
        (
            register(
                "'h'",
                "'v'",
                "jsonb_build_object('x', jsonb_build_object('version', repeat('x', 9000000)))",
                "1",
                "'{}'",
                "'{}'",
            ),
            "bytes",
        ),
        (
            register(
                "'h'",
                "'v'",
                "(SELECT jsonb_object_agg('h' || n, '{}'::jsonb) FROM generate_series(1, 10001) AS n)",
                "1",
                "'{}'",
                "'{}'",
            ),
            "capabilities have 10001 handlers",
        ),
        (
            register("'h'", "'v'", "'{}'", "2000000000", "'{}'", "'{}'"),
            "slots",
        ),
        (
            register("'h'", "'v'", "'{}'", "-1", "'{}'", "'{}'"),
            "slots",
        ),
        (register("'h'", "'v'", "'{}'", "1", many, "'{}'"), "queues"),
        (
            register("'h'", "'v'", "'{}'", "1", "ARRAY[repeat('q', 129)]", "'{}'"),
            "queues",
        ),
        (register("'h'", "'v'", "'{}'", "1", "'{}'", many), "tags"),
        (register("'h'", "'v'", "'{}'", "1", "'{}'", "NULL"), "tags"),
    ] {
        let error_text = refusal(&hostile, &sql).await;
        assert!(
            error_text.starts_with("22023") || error_text.starts_with("54000"),
            "{sql}: {error_text}"
        );
        assert!(error_text.contains(why), "{sql}: {error_text}");
    }
    let row = hostile
        .query_one(&register("'h'", "'v'", "'{}'", "1", "'{}'", "'{}'"), &[])
        .await;
    row.unwrap();
    let incarnation: i64 = client
        .query_one("SELECT incarnation FROM rouse.worker", &[])
        .await
        .unwrap()
        .get(0);
    enqueue_sql(&client, "'x'").await;
    hostile
        .query(&format!("SELECT rouse.claim({incarnation}, sha256('k'), 5, ARRAY(SELECT ROW(id, -1, 1000, NULL, NULL)::rouse.claim_order FROM rouse.lane), 1)"), &[])
        .await
        .unwrap();
    let id: i64 = client
        .query_one("SELECT id FROM rouse.job WHERE state = 'running'", &[])
        .await
        .unwrap()
        .get(0);
    for sql in [
        format!(
            "SELECT rouse.heartbeat({incarnation}, sha256('k'), '{{}}', jsonb_build_object('a', repeat('x', 100000)), false)"
        ),
        format!("SELECT rouse.sleep({incarnation}, sha256('k'), {many}, 1000)"),
        format!("SELECT rouse.sleep({incarnation}, sha256('k'), ARRAY[repeat('q', 5000)], 1000)"),
        format!(
            "SELECT rouse.record_step({incarnation}, sha256('k'), {id}, 5, 's', to_json(repeat('x', 9000000)))"
        ),
        format!(
            "SELECT rouse.answer_challenge({incarnation}, sha256('k'), gen_random_uuid(), to_jsonb(repeat('x', 100000)))"
        ),
        format!(
            "SELECT rouse.settle({incarnation}, sha256('k'), \
             ARRAY[ROW({id}, 5, 'succeeded', 0, to_jsonb(repeat('x', 68000000)), NULL, 0, NULL, NULL, 1, 1, 1, 1, 1, NULL, NULL)::rouse.settlement], '{{}}', false)"
        ),
    ] {
        let error_text = refusal(&hostile, &sql).await;
        assert!(
            error_text.starts_with("22023") || error_text.starts_with("54000"),
            "{sql}: {error_text}"
        );
    }
    // Values with a bound of their own are truncated to it.
    hostile
        .batch_execute(&format!(
            "SELECT rouse.sleep({incarnation}, sha256('k'), '{{*}}', 9223372036854775807);
             SELECT rouse.append_log({incarnation}, sha256('k'), ARRAY[ROW({id}, -1, -1, -9223372036854775807, 'info', repeat('x', 99999))::rouse.log_line], false);
             SELECT rouse.report_usage({incarnation}, sha256('k'), ARRAY[ROW({id}, 5, -1, -2, -3, -4, -5)::rouse.attempt_usage]);
             SELECT rouse.settle({incarnation}, sha256('k'), ARRAY[ROW({id}, 5, 'queued', 9223372036854775807, NULL, '{{}}', 9223372036854775807, NULL,
                                 9223372036854775807, -1, -1, -1, -1, -1, NULL, NULL)::rouse.settlement], '{{}}', false)"
        ))
        .await
        .unwrap();
    for condition in [
        "SELECT until < now() + interval '61 min' FROM rouse.sleeper",
        "SELECT length(text) = 16384 AND at <= now() AND attempt = 1 AND line = 1 FROM rouse.log",
        "SELECT least(cpu_us, memory_bytes, host_calls, bytes_in, bytes_out) > 0 FROM rouse.running",
        "SELECT least(cpu_us, memory_peak_bytes, host_calls, bytes_in, bytes_out) > 0 AND started_at <= ended_at FROM rouse.attempt",
        "SELECT available_at < now() + interval '367 days' AND memory_bytes = 1099511627776 FROM rouse.job",
    ] {
        assert!(
            client
                .query_one(condition, &[])
                .await
                .unwrap()
                .get::<_, bool>(0),
            "{condition}"
        );
    }
}

#[tokio::test]
async fn a_limited_login_adds_no_more_queues_and_incarnations_than_the_limits_permit() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_many").await;
    limit(
        &client,
        "login, worker_ids, queues",
        "'logins_many', '{*}', '{*}'",
    )
    .await;
    client
        .batch_execute(
            "INSERT INTO rouse.queue (name) VALUES ('mail');
             UPDATE rouse.limits SET incarnations_max = 2, lanes_max = (SELECT count(*) FROM rouse.queue)",
        )
        .await
        .unwrap();
    let share = NewFairShare {
        policy: Some(FairPolicy::Drr),
        ..Default::default()
    };
    let first = login.worker("l-1", &[]).await;
    first.declare_fair_share("mail", &share).await.unwrap();
    let error = first.declare_fair_share("new", &share).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "54000", "{error}");
    let why = "queue 'new' cannot be added";
    assert!(error.to_string().contains(why), "{error}");
    first.unregister().await.unwrap();
    login.worker("l-2", &[]).await;
    // The ended one counts too, because it is still listed.
    let third = login.store();
    let error = third.register(&serving("l-3", &[])).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "54000", "{error}");
    let why = "login logins_many has already registered 2 incarnations of workers";
    assert!(error.to_string().contains(why), "{error}");
    // Other logins do not count.
    db.worker().await;
    client
        .batch_execute("SELECT rouse.forget_worker('l-1')")
        .await
        .unwrap();
    third.register(&serving("l-3", &[])).await.unwrap();
    worker_with(&client, "k").await;
    // The settings of a queue are checked before any of them is written.
    let weights = format!(
        "SELECT rouse.declare_fair_share({}, 'k', 'mail', NULL, NULL, NULL,
                                         (SELECT jsonb_object_agg(n, 1) FROM generate_series(1, 200000) AS n), NULL, NULL, NULL, NULL)",
        third.incarnation().unwrap().0
    );
    let error = refusal(&login.client().await, &weights).await;
    let why = "54000: rouse.declare_fair_share: ";
    assert!(error.starts_with(why), "{error}");
}

/// Text of 8,360,000 bytes that Postgres cannot compress.
const NOISE: &str = "(SELECT string_agg(left(encode(sha512(n::text::bytea), 'base64'), 76), '') FROM generate_series(1, 110000) AS n)";

#[tokio::test]
async fn the_log_lines_of_an_attempt_are_bounded() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for _ in 0..2 {
        enqueue(&client, "x", json!({})).await;
    }
    let claimed = claim(&store, 2).await;
    let [full, other] = [0, 1].map(|n| claimed[n].id.0);
    worker_with(&client, "k").await;
    let worker = store.incarnation().unwrap().0;
    let fill = async |rows: i32| {
        let sql = format!(
            "INSERT INTO rouse.log (job, attempt, line, worker, at, level, text)
             SELECT {full}, 1, n, {worker}, now(), 'info', v.text
             FROM generate_series(1, {rows}) AS n CROSS JOIN (SELECT {NOISE} AS text OFFSET 0) AS v"
        );
        client.batch_execute(&sql).await.unwrap();
    };
    // A call that adds 4 MiB always counts the stored bytes.
    let append = format!(
        "SELECT rouse.append_log({worker}, 'k', ARRAY(
             SELECT ROW({full}, 1, n, 0, 'info', repeat('x', 16384))::rouse.log_line FROM generate_series(1, 256) AS n)
             || ROW({other}, 1, 1, 0, 'info', 'x')::rouse.log_line, false)"
    );
    let stored = async || -> i32 { client.query_one(&append, &[]).await.unwrap().get(0) };
    fill(7).await;
    assert_eq!(stored().await, 257);
    fill(1).await;
    assert_eq!(stored().await, 1, "only the line of the other attempt");
    fill(1).await;
    // Of the calls that add one line of the maximum length, about one in 250 counts them.
    let one_each = format!(
        "SELECT count(*) FILTER (WHERE stored = 0), count(*) FILTER (WHERE stored = 1)
         FROM generate_series(1, 4000) AS n
         CROSS JOIN LATERAL rouse.append_log({worker}, 'k', ARRAY[ROW({full}, 1, n, 0, 'info', repeat('x', 16384))::rouse.log_line], false) AS stored"
    );
    let row = client.query_one(&one_each, &[]).await.unwrap();
    let (refused, accepted): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(refused + accepted, 4000);
    assert!(refused > 0 && accepted > 0, "{refused} were refused");
}

#[tokio::test]
async fn the_recorded_steps_of_a_job_are_bounded() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let ids = [
        enqueue(&client, "x", json!({})).await,
        enqueue(&client, "x", json!({})).await,
    ];
    let claimed = claim(&store, 2).await;
    assert_eq!(claimed.len(), ids.len());
    worker_with(&client, "k").await;
    let worker = store.incarnation().unwrap().0;
    let [many, large] = [0, 1].map(|n| (claimed[n].id.0, claimed[n].fence.0));
    // A call that adds a mebibyte always counts the rows and bytes that are recorded.
    let record = |(id, fence): (i64, i64), name: &str| {
        format!(
            "SELECT rouse.record_step({worker}, 'k', {id}, {fence}, '{name}', to_json(repeat('x', 1048576)))"
        )
    };
    let add = |(id, _): (i64, i64), rows: i64, result: &str| {
        format!(
            "INSERT INTO rouse.step (job, name, result, attempt, worker, at, kept_at)
             SELECT {id}, 's' || n, v.result, 1, {worker}, now(), now()
             FROM generate_series(1, {rows}) AS n CROSS JOIN (SELECT {result} AS result OFFSET 0) AS v"
        )
    };
    client
        .batch_execute(&add(many, 249_999, "json '1'"))
        .await
        .unwrap();
    client.query_one(&record(many, "last"), &[]).await.unwrap();
    let error = refusal(&client, &record(many, "one too many")).await;
    let why = format!(
        "54000: rouse: job {} has 250000 rows of recorded steps",
        many.0
    );
    assert!(error.starts_with(&why), "{error}");
    // Of the small calls, about one in 1,000 counts them.
    let (id, fence) = many;
    for sql in [
        format!(
            "SELECT count(rouse.record_step({worker}, 'k', {id}, {fence}, 'small' || n, '1')) FROM generate_series(1, 20000) AS n"
        ),
        format!(
            "SELECT count(*) FROM generate_series(1, 20000) AS n
             CROSS JOIN LATERAL rouse.take_signal({worker}, 'k', {id}, {fence}, 'wait' || n, 'name', '-infinity')"
        ),
        format!(
            r#"SELECT rouse.settle({worker}, 'k', ARRAY[jsonb_populate_record(NULL::rouse.settlement, jsonb_build_object(
                   'id', {id}, 'fence', {fence}, 'state', 'queued',
                   'result', jsonb_build_object('kind', 'signal', 'step', 's', 'name', repeat('x', 9000000))))], '{{}}', false)"#
        ),
    ] {
        let error = refusal(&client, &sql).await;
        assert!(error.starts_with("54000"), "{sql}: {error}");
    }
    let noise = format!("to_json({NOISE})");
    client.batch_execute(&add(large, 7, &noise)).await.unwrap();
    client.query_one(&record(large, "last"), &[]).await.unwrap();
    client
        .batch_execute(&add(large, 2, &noise).replace("'s' || n", "'t' || n"))
        .await
        .unwrap();
    let error = refusal(&client, &record(large, "one too many")).await;
    let why = format!(
        "54000: rouse: job {} has 10 rows of recorded steps",
        large.0
    );
    assert!(error.starts_with(&why), "{error}");
}

#[tokio::test]
async fn another_login_can_neither_write_as_a_worker_nor_take_its_id_even_with_the_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (owner, intruder) = (
        Login::create(&db, "logins_owner").await,
        Login::create(&db, "logins_thief").await,
    );
    let key = WorkerKey::new([7; 32]);
    let (mine, theirs) = (owner.store(), intruder.store());
    mine.register(&registration("w", key.clone()))
        .await
        .unwrap();
    enqueue(&client, "x", json!({})).await;
    let job = claim(&mine, 1).await.remove(0);
    let error = theirs
        .register(&registration("w", key.clone()))
        .await
        .unwrap_err();
    assert!(error.is_taken(), "{error}");
    let hostile = intruder.client().await;
    let me = mine.incarnation().unwrap().0;
    let sql = format!("SELECT rouse.unregister({me}, '\\x{}')", "07".repeat(32));
    let error_text = refusal(&hostile, &sql).await;
    assert!(error_text.starts_with("RW004"), "{error_text}");
    let done = settlement(&job, Outcome::Succeeded(JsonText("1".into())));
    let settled = mine.settle(&[done], Locked::Wait).await.unwrap();
    assert!(settled.accepted.contains(&job.id));
    // The login that owns the id can take it over at once.
    owner
        .store()
        .register(&registration("w", key))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_workers_login_cannot_read_a_job_by_its_id() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let login = Login::create(&db, "logins_reader").await;
    let id = enqueue_sql(&client, "'x', '{\"card\": 4711}'").await;
    let hostile = login.client().await;
    for call in ["job", "result", "history", "job_log"] {
        let error_text = refusal(&hostile, &format!("SELECT * FROM rouse.{call}({id})")).await;
        assert!(error_text.starts_with("42501"), "{error_text}");
    }
}

/// The keys of the advisory locks that functions of Rouse once took: any login of the database can hold them.
#[tokio::test]
async fn advisory_locks_held_by_a_login_without_roles_do_not_block_rouse() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("CREATE ROLE logins_nobody LOGIN")
        .await
        .unwrap();
    let no_roles = connect(&db.url().replace("rouse@", "logins_nobody@")).await;
    enqueue_sql(&client, "'x'").await;
    no_roles
        .batch_execute(
            "SELECT pg_advisory_lock(hashtextextended(key, 0))
             FROM unnest(ARRAY['rouse.register w', 'rouse.state x/', 'rouse.partitions', 'rouse.migrate']) AS key",
        )
        .await
        .unwrap();
    for table in ["lock", "wake_salt", "worker", "worker_login"] {
        let sql = format!("DO $$ BEGIN LOCK TABLE rouse.{table} IN ACCESS SHARE MODE; END $$");
        let error_text = refusal(&no_roles, &sql).await;
        assert!(error_text.starts_with("42501"), "{error_text}");
    }
    client
        .batch_execute("SET lock_timeout = '10s'; SELECT rouse.set_state('x', NULL, 'k', 'v')")
        .await
        .unwrap();
    let store = db.store();
    store
        .register(&registration("w", WorkerKey::random()))
        .await
        .unwrap();
    store.unregister().await.unwrap();
    client
        .batch_execute("SELECT rouse.forget_worker('w')")
        .await
        .unwrap();
    database::migrate(&db.url()).await.unwrap();
}

#[tokio::test]
async fn a_full_notification_queue_stops_notifications_and_nothing_else() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let sleeper = worker.incarnation().unwrap();
    let mut listener = Listener::start(&db.connector(), sleeper).await.unwrap();
    client
        .batch_execute("CREATE OR REPLACE FUNCTION rouse._may_notify() RETURNS boolean LANGUAGE sql AS 'SELECT false'")
        .await
        .unwrap();
    worker
        .sleep(&["*".to_string()], Duration::from_secs(60))
        .await
        .unwrap();
    let id = enqueue_sql(&client, "'x'").await;
    assert_eq!(claimed(&worker).await, [id]);
    client
        .batch_execute(&format!(
            "SELECT rouse.cancel({id}); SELECT rouse.challenge('w-1', 'x'); SELECT rouse.pause_queue('q'); SELECT rouse.resume_queue('q');
             SELECT pg_notify('rouse_wake', 'the-end')"
        ))
        .await
        .unwrap();
    let Some(Notification::Wakeup(first)) = listener.next().await else {
        panic!("the first notification is the test's own");
    };
    assert_eq!(first.queue, "the-end");
    let usage = worker
        .database_metrics()
        .await
        .unwrap()
        .notification_queue_usage;
    assert!((0.0..0.5).contains(&usage), "{usage}");
}
