//! `rouse.enqueue` and the functions that producers read: the SQL interface.

mod notices;
mod unique;

use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::commands::run;
use crate::support::TestDb;
use crate::support::database::{drop_all_partitions, refusal};
use crate::support::worker::{cancel, enqueue};

async fn live_jobs(client: &Client) -> i64 {
    let row = client
        .query_one("SELECT count(*) FROM rouse.job", &[])
        .await;
    row.unwrap().get(0)
}

/// The message and the code of the error of a call that must fail.
async fn refused(client: &Client, call: &str) -> String {
    let error = client
        .query(call, &[])
        .await
        .expect_err(&format!("{call} has to be refused"));
    let error = error
        .as_db_error()
        .unwrap_or_else(|| panic!("{call}: {error:?}"));
    format!("{} ({})", error.message(), error.code().code())
}

#[tokio::test]
async fn every_argument_but_the_handler_has_a_default_and_can_be_named() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let enqueue = async |call: &str| -> i64 {
        client
            .query_one(&format!("SELECT {call}"), &[])
            .await
            .unwrap()
            .get(0)
    };
    let id = enqueue("rouse.enqueue('x')").await;
    let row = client
        .query_one(
            "SELECT queue, priority::text, payload, state::text, max_attempts, tenant FROM rouse.job($1)",
            &[&id],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, String>(0), "default");
    assert_eq!(row.get::<_, String>(1), "normal");
    assert_eq!(row.get::<_, Value>(2), json!({}));
    assert_eq!(row.get::<_, String>(3), "queued");
    assert_eq!(row.get::<_, Option<i32>>(4), None);
    assert_eq!(row.get::<_, Option<String>>(5), None);

    let id = enqueue(
        "rouse.enqueue('x', queue => 'mail', tenant => 't', source => 's', priority => 'high', tags => '{b,a,b}',
            max_attempts => 3, unique_key => 'a/b')",
    )
    .await;
    let row = client
        .query_one(
            "SELECT queue, tenant, source, priority::text, tags, max_attempts, unique_key FROM rouse.job($1)",
            &[&id],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, String>(0), "mail");
    assert_eq!(row.get::<_, String>(1), "t");
    assert_eq!(row.get::<_, String>(2), "s");
    assert_eq!(row.get::<_, String>(3), "high");
    assert_eq!(row.get::<_, Vec<String>>(4), ["a", "b"]);
    assert_eq!(row.get::<_, i32>(5), 3);
    assert_eq!(row.get::<_, String>(6), "a/b");
    let queues = client
        .query("SELECT name FROM rouse.queues ORDER BY name", &[])
        .await
        .unwrap();
    let queues: Vec<String> = queues.iter().map(|row| row.get(0)).collect();
    assert_eq!(queues, ["default", "mail"]);
}

#[tokio::test]
async fn an_invalid_call_is_refused_with_a_clear_error_and_enqueues_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (call, expected) in [
        ("rouse.enqueue(NULL)", "null is not a handler name (22023)"),
        (
            "rouse.enqueue('Email.Send')",
            "'Email.Send' is not a handler name",
        ),
        ("rouse.enqueue('')", "'' is not a handler name"),
        ("rouse.enqueue('a..b')", "'a..b' is not a handler name"),
        ("rouse.enqueue(repeat('a', 129))", "is not a handler name"),
        ("rouse.enqueue(E'a\\nb')", "is not a handler name"),
        (
            "rouse.enqueue('x', '{\"a\"')",
            "invalid input syntax for type json",
        ),
        (
            "rouse.enqueue('x', '\"\\u0000\"')",
            "unsupported Unicode escape sequence",
        ),
        (
            "rouse.enqueue('x', to_jsonb(repeat('a', 262143)))",
            "the payload is 262145 bytes long; queue default allows 262144 (54000)",
        ),
        // Small in storage, huge when passed to a handler.
        (
            "rouse.enqueue('x', '[1e100000,1e100000,1e100000]')",
            "the payload is 300009 bytes long",
        ),
        (
            "rouse.enqueue('x', queue => 'a b')",
            "'a b' is not a queue name",
        ),
        ("rouse.enqueue('x', queue => '')", "'' is not a queue name"),
        (
            "rouse.enqueue('x', priority => 'urgent')",
            "priority must be high, normal or low, not 'urgent'",
        ),
        (
            "rouse.enqueue('x', run_at => 'infinity')",
            "run_at must be a time, not infinity",
        ),
        (
            "rouse.enqueue('x', run_at => '-infinity')",
            "run_at must be a time, not -infinity",
        ),
        (
            "rouse.enqueue('x', max_attempts => 0)",
            "max_attempts must be between 1 and 1000, not 0",
        ),
        (
            "rouse.enqueue('x', max_attempts => -1)",
            "max_attempts must be between 1 and 1000, not -1",
        ),
        (
            "rouse.enqueue('x', lease => '1 second')",
            "lease must be between 2 seconds and 1 day, not 00:00:01 (22023)",
        ),
        (
            "rouse.enqueue('x', lease => '25 hours', unique_key => 'k')",
            "lease must be between 2 seconds and 1 day, not 25:00:00",
        ),
        (
            "rouse.enqueue_many('x', '{1}', timeout => '0')",
            "timeout must be between 1 millisecond and 30 days, not 00:00:00",
        ),
        (
            "rouse.enqueue_unique('x', 'k', timeout => '31 days')",
            "timeout must be between 1 millisecond and 30 days, not 31 days",
        ),
        (
            "rouse.enqueue('x', tenant => '')",
            "tenant and source must have 1 to 200 characters",
        ),
        (
            "rouse.enqueue('x', source => repeat('s', 201))",
            "tenant and source must have 1 to 200 characters",
        ),
        (
            "rouse.enqueue('x', unique_key => '')",
            "unique_key must have 1 to 512 characters",
        ),
        (
            "rouse.enqueue('x', unique_key => repeat('k', 513))",
            "unique_key must have 1 to 512 characters",
        ),
        (
            "rouse.enqueue('x', unique_key => repeat('€', 342))",
            "at most 1024 bytes",
        ),
        // A key that is null by accident would enqueue each job again.
        (
            "rouse.enqueue_unique('x', NULL)",
            "unique_key must not be null (22023)",
        ),
        (
            "rouse.enqueue_unique('x', 'k', grants => '1')",
            "grants must be an object, or an array of up to 32 objects which all apply, not 1",
        ),
        (
            "rouse.enqueue_unique('x', 'k', to_jsonb(repeat('a', 262143)))",
            "the payload is 262145 bytes long; queue default allows 262144 (54000)",
        ),
        (
            "rouse.enqueue('x', to_jsonb(repeat('a', 262143)), queue => NULL)",
            "the payload is 262145 bytes long; queue default allows 262144 (54000)",
        ),
        (
            "rouse.enqueue('x', tags => ARRAY['a', NULL])",
            "tags must be a list of at most 16 tags",
        ),
        (
            "rouse.enqueue('x', tags => ARRAY['a b'])",
            "tags must be a list of at most 16 tags",
        ),
        (
            "rouse.enqueue('x', tags => ARRAY[ARRAY['a'], ARRAY['b']])",
            "tags must be a list of at most 16 tags",
        ),
        (
            "rouse.enqueue('x', tags => array_fill('a'::text, ARRAY[17]))",
            "tags must be a list of at most 16 tags",
        ),
        (
            "rouse.enqueue('x', nonsense => 1)",
            "does not exist (42883)",
        ),
        (
            "rouse.enqueue_many('x', NULL)",
            "payloads must be an array of JSON values, not null",
        ),
        (
            "rouse.enqueue_many('x', ARRAY['1', NULL]::jsonb[])",
            "payload 2 is null",
        ),
        (
            "rouse.enqueue_many('x', ARRAY[ARRAY['1'], ARRAY['2']]::jsonb[])",
            "not an array of arrays",
        ),
        (
            "rouse.enqueue_many('x', ARRAY['1', to_jsonb(repeat('a', 262143))])",
            "payload 2 is too large",
        ),
        (
            "rouse.enqueue_many('X', ARRAY['1']::jsonb[])",
            "'X' is not a handler name",
        ),
        ("rouse.cancel(NULL)", "id must not be null"),
    ] {
        let message = refused(&client, &format!("SELECT {call}")).await;
        assert!(message.contains(expected), "{call}: {message}");
    }
    assert_eq!(live_jobs(&client).await, 0);
    // The protocol refuses a NUL in an argument before it reaches the function.
    let nul = client.query("SELECT rouse.enqueue($1)", &[&"a\0b"]).await;
    assert!(nul.unwrap_err().to_string().contains("db error"));
    assert_eq!(live_jobs(&client).await, 0);
}

#[tokio::test]
async fn the_largest_allowed_payload_is_accepted_and_a_queue_can_allow_more() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let largest = Value::String("a".repeat(262_142));
    enqueue(&client, "x", largest).await;
    let set = ["queue", "set", "wide", "--payload-bytes-max"];
    let (code, output) = run(&db, &[&set[..], &["400000"]].concat());
    assert_eq!(code, 0, "{output}");
    assert!(
        output.contains("payloads of queue wide may be at most 400000 bytes long"),
        "{output}"
    );
    let wide = async |bytes: usize| {
        let payload = Value::String("a".repeat(bytes - 2));
        let sql = "SELECT rouse.enqueue('x', $1, queue => 'wide')";
        client.query_one(sql, &[&payload]).await
    };
    wide(400_000).await.unwrap();
    let why = wide(400_001).await.unwrap_err();
    let why = why.as_db_error().expect("an error from the server").hint();
    assert!(
        why.is_some_and(|hint| hint.contains("rouse.set_payload_limit")),
        "{why:?}"
    );
    assert_eq!(live_jobs(&client).await, 2);
    let record = "SELECT detail FROM rouse.record WHERE event = 'payload_limit_set' AND queue = 'wide' AND who = session_user";
    let detail: Value = client.query_one(record, &[]).await.unwrap().get(0);
    assert_eq!(
        detail,
        json!({"payload_bytes_max": 400_000, "was": 262_144})
    );
    for (bytes, expected) in [("1023", 2), ("67108865", 2), ("1024", 0)] {
        let (code, output) = run(&db, &[&set[..], &[bytes]].concat());
        assert_eq!(code, expected, "{output}");
    }
    for bytes in ["1023", "67108865", "NULL"] {
        let set = format!("SELECT rouse.set_payload_limit('wide', {bytes})");
        let why = refusal(&client, &set).await;
        assert!(why.contains("must be 1024 to 67108864"), "{why}");
    }
}

#[tokio::test]
async fn a_run_at_in_the_past_does_not_count_as_time_waited() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue('x', run_at => '2020-01-01');
             SELECT rouse.enqueue('x', run_at => '2020-01-01');
             SELECT rouse.enqueue_unique('x', 'key', run_at => '2020-01-01');
             SELECT rouse.enqueue_many('x', '{1,2}'::jsonb[], run_at => '2020-01-01')",
        )
        .await
        .unwrap();
    let sql = "SELECT count(*) = 5 AND bool_and(available_at = requested_at AND turn IS NOT NULL) FROM rouse.job";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert!(row.get::<_, bool>(0));
}

#[tokio::test]
async fn a_rollback_leaves_nothing_and_a_job_is_invisible_before_its_commit() {
    let db = TestDb::new().await;
    let (mut producer, other) = (db.client().await, db.client().await);
    let transaction = producer.transaction().await.unwrap();
    transaction
        .query(
            "SELECT rouse.enqueue('x'), rouse.enqueue('y', run_at => now() + interval '1 hour')",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(live_jobs(&other).await, 0);
    transaction.rollback().await.unwrap();
    assert_eq!(live_jobs(&other).await, 0);
    let lanes = other.query("SELECT FROM rouse.lane", &[]).await.unwrap();
    assert!(lanes.is_empty());
}

#[tokio::test]
async fn two_producers_of_a_new_lane_do_not_wait_for_each_other() {
    let db = TestDb::new().await;
    let (mut one, mut two) = (db.client().await, db.client().await);
    let first = one.transaction().await.unwrap();
    first
        .query("SELECT rouse.enqueue('new.lane')", &[])
        .await
        .unwrap();
    // The first transaction stays open. If the second waited for it, this would time out.
    let second = two.transaction().await.unwrap();
    second
        .batch_execute("SET LOCAL lock_timeout = '100ms'")
        .await
        .unwrap();
    second
        .query("SELECT rouse.enqueue('new.lane')", &[])
        .await
        .unwrap();
    second.commit().await.unwrap();
    first.commit().await.unwrap();
    let row = two
        .query_one(
            "SELECT count(*), count(DISTINCT id), (SELECT count(DISTINCT lane) FROM rouse.job),
                    (SELECT count(*) FROM rouse.jobs) FROM rouse.lane",
            &[],
        )
        .await
        .unwrap();
    let counts: Vec<i64> = (0..4).map(|n| row.get(n)).collect();
    assert_eq!(
        counts,
        [2, 1, 1, 2],
        "rows, lanes, lanes of jobs, jobs shown"
    );
}

#[tokio::test]
async fn a_null_argument_means_its_default() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let nulls = "queue => NULL, tenant => NULL, source => NULL, priority => NULL, run_at => NULL, max_attempts => NULL,
        tags => NULL, grants => NULL";
    let calls = format!(
        "SELECT rouse.enqueue('x', NULL, unique_key => NULL, {nulls});
         SELECT rouse.enqueue('x', NULL, unique_key => 'k', {nulls});
         SELECT * FROM rouse.enqueue_unique('x', 'l', NULL, {nulls});
         SELECT * FROM rouse.enqueue_and_report('x', NULL, unique_key => NULL, {nulls});
         SELECT rouse.enqueue_many('x', '{{\"{{}}\"}}', {nulls});
         SELECT rouse.enqueue('x')"
    );
    client.batch_execute(&calls).await.unwrap();
    let row = client
        .query_one(
            "SELECT count(*), count(DISTINCT (queue, tenant, source, priority, available_at <= now(), max_attempts, tags, grants, payload)),
                    min(queue), min(priority::text), min(tags), min(payload::text)
             FROM rouse.jobs",
            &[],
        )
        .await
        .unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (6, 1));
    assert_eq!(row.get::<_, &str>(2), "default");
    assert_eq!(row.get::<_, &str>(3), "normal");
    assert!(row.get::<_, Vec<String>>(4).is_empty());
    assert_eq!(row.get::<_, &str>(5), "{}");
}

#[tokio::test]
async fn enqueue_many_keeps_the_order_of_its_payloads() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let payloads: Vec<Value> = (0..500).map(|n| json!({ "n": n })).collect();
    let rows = client
        .query("SELECT rouse.enqueue_many('x', $1)", &[&payloads])
        .await
        .unwrap();
    let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert!(ids.is_sorted());
    let rows = client
        .query(
            "SELECT payload FROM rouse.job WHERE id = ANY ($1) ORDER BY turn",
            &[&ids],
        )
        .await
        .unwrap();
    let stored: Vec<Value> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(stored, payloads);
    let none = client
        .query("SELECT rouse.enqueue_many('x', '{}'::jsonb[])", &[])
        .await
        .unwrap();
    assert!(none.is_empty());
}

#[tokio::test]
async fn a_queued_job_can_be_cancelled_and_its_history_records_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({})).await;
    assert!(cancel(&client, id).await);
    assert!(
        cancel(&client, id).await,
        "cancelling again changes nothing"
    );
    assert!(!cancel(&client, id + 1000).await, "the job does not exist");
    let rows = client
        .query("SELECT event FROM rouse.history($1)", &[&id])
        .await
        .unwrap();
    let events: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(events, ["requested", "cancelled"]);
    let result: Option<Value> = client
        .query_one("SELECT rouse.result($1)", &[&id])
        .await
        .unwrap()
        .get(0);
    assert_eq!(result, None);
}

#[tokio::test]
async fn a_job_can_be_cancelled_if_todays_partition_is_missing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({})).await;
    drop_all_partitions(&client, "finished_default").await;
    let done = cancel(&client, id).await;
    assert!(done);
}

#[tokio::test]
async fn the_schema_refuses_rows_that_break_its_invariants() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({})).await;
    for change in [
        "state = 'succeeded'",
        "state = 'running'",
        "fence = 1",
        "worker = 1",
        "lease_until = now()",
        "uncounted = 1",
        "attempt = -1",
        "max_attempts = 0",
        "available_at = 'infinity'",
    ] {
        let sql = format!("UPDATE rouse.job SET {change} WHERE id = {id}");
        assert!(refused(&client, &sql).await.contains("(23514)"), "{change}");
    }
    for (state, result, error) in [
        ("succeeded", "NULL", "NULL"),
        ("failed", "NULL", "NULL"),
        ("failed", "'1'", "'{}'"),
        ("running", "NULL", "NULL"),
    ] {
        let sql = format!(
            "INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, uncounted, state, payload, result, error)
             VALUES (1, 1, now(), now(), now(), 1, 0, '{state}', '{{}}', {result}, {error})"
        );
        assert!(refused(&client, &sql).await.contains("(23514)"), "{state}");
    }
}

#[tokio::test]
async fn names_are_checked_regardless_of_standard_conforming_strings() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SET standard_conforming_strings = off")
        .await
        .unwrap();
    for name in ["a b", "a/b", "a\nb"] {
        let enqueued = client.query_one("SELECT rouse.enqueue($1)", &[&name]).await;
        assert!(enqueued.is_err(), "{name:?} is not a handler name");
    }
}

#[tokio::test]
async fn functions_do_not_depend_on_standard_conforming_strings() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Functions with a backslash in a plain string; those in comments do not matter.
    let sql = r"SELECT coalesce(array_agg(p.proname::text), '{}') FROM pg_proc AS p
                WHERE p.pronamespace = 'rouse'::regnamespace AND strpos(regexp_replace(
                    regexp_replace(p.prosrc, '--[^\n]*', '', 'g'), 'E''([^''\\]|''''|\\.)*''', '', 'g'), '\') > 0";
    let found: Vec<String> = client.query_one(sql, &[]).await.unwrap().get(0);
    assert_eq!(found, [""; 0]);
    client
        .batch_execute(
            r#"SET standard_conforming_strings = off;
               SELECT rouse.signal(rouse.enqueue('x'), 'go');
               SELECT rouse.schedule('s', 'x', cron => '0 3 * * *');
               SELECT rouse.set_state('x', NULL, 'k', 'v');
               SELECT rouse.enqueue('x', grants => '{"http": ["10.0.0.1", "[::ffff:1.2.3.4]"]}')"#,
        )
        .await
        .unwrap();
    let invalid = r#"SELECT rouse.enqueue('x', grants => '{"http": ["999.0.0.1"]}')"#;
    let message = refused(&client, invalid).await;
    assert!(message.contains("must be an array of hosts"), "{message}");
    // A word for a shell.
    let quoted = "SELECT rouse._shell_word('it''s; rm')";
    let quoted: String = client.query_one(quoted, &[]).await.unwrap().get(0);
    assert_eq!(quoted, r"'it'\''s; rm'");
}
