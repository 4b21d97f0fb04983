//! `rouse.enqueue` and the functions that producers read: the SQL interface.

use std::future::poll_fn;

use serde_json::{Value, json};
use tokio_postgres::error::DbError;
use tokio_postgres::{AsyncMessage, Client, IsolationLevel};

use crate::support::TestDb;
use crate::support::worker::{cancel, enqueue};

async fn live_jobs(client: &Client) -> i64 {
    let row = client
        .query_one("SELECT count(*) FROM rouse.job", &[])
        .await;
    row.unwrap().get(0)
}

/// The message and hint of a call that must fail.
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
    for (call, says) in [
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
            "the payload has 262145 bytes; queue default allows 262144 (54000)",
        ),
        // Small in storage, huge when passed to a handler.
        (
            "rouse.enqueue('x', '[1e100000,1e100000,1e100000]')",
            "the payload has 300009 bytes",
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
        (
            "rouse.enqueue_unique('x', NULL)",
            "unique_key must not be null (22023)",
        ),
        (
            "rouse.enqueue_unique('x', 'k', grants => '1')",
            "grants must be an object, not 1",
        ),
        (
            "rouse.enqueue_unique('x', 'k', to_jsonb(repeat('a', 262143)))",
            "the payload has 262145 bytes; queue default allows 262144 (54000)",
        ),
        (
            "rouse.enqueue('x', to_jsonb(repeat('a', 262143)), queue => NULL)",
            "the payload has 262145 bytes; queue default allows 262144 (54000)",
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
            "payloads must be a list of JSON values, not null",
        ),
        (
            "rouse.enqueue_many('x', ARRAY['1', NULL]::jsonb[])",
            "payload 2 is null",
        ),
        (
            "rouse.enqueue_many('x', ARRAY[ARRAY['1'], ARRAY['2']]::jsonb[])",
            "not a list of lists",
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
        assert!(message.contains(says), "{call}: {message}");
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
    client
        .execute(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 400000)",
            &[],
        )
        .await
        .unwrap();
    let wider = Value::String("a".repeat(399_998));
    client
        .query_one("SELECT rouse.enqueue('x', $1, queue => 'wide')", &[&wider])
        .await
        .unwrap();
    assert_eq!(live_jobs(&client).await, 2);
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
async fn a_unique_key_returns_the_live_job_that_holds_it() {
    let db = TestDb::new().await;
    let (mut one, two) = (db.client().await, db.client().await);
    const CALL: &str = "SELECT rouse.enqueue('x', unique_key => 'k')";
    let first: i64 = two.query_one(CALL, &[]).await.unwrap().get(0);
    let again: i64 = two.query_one(CALL, &[]).await.unwrap().get(0);
    assert_eq!(again, first);
    let other = "SELECT rouse.enqueue('y', unique_key => 'k')";
    assert_ne!(
        two.query_one(other, &[]).await.unwrap().get::<_, i64>(0),
        first
    );
    cancel(&two, first).await;
    let third: i64 = two.query_one(CALL, &[]).await.unwrap().get(0);
    assert_ne!(third, first, "the key is free once the job has ended");
    cancel(&two, third).await;

    // Two concurrent calls: the second waits for the first to commit and gets its id.
    let transaction = one.transaction().await.unwrap();
    let theirs: i64 = transaction.query_one(CALL, &[]).await.unwrap().get(0);
    let waiting =
        tokio::spawn(async move { two.query_one(CALL, &[]).await.unwrap().get::<_, i64>(0) });
    crate::support::worker::until_true(
        &db.client().await,
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')",
    )
    .await;
    transaction.commit().await.unwrap();
    assert_eq!(waiting.await.unwrap(), theirs);
}

#[tokio::test]
async fn a_unique_key_is_scoped_to_one_tenant_or_to_jobs_without_one() {
    let db = TestDb::new().await;
    let (mut one, client) = (db.client().await, db.client().await);
    let transaction = one.transaction().await.unwrap();
    let sql = "SELECT rouse.enqueue('x', unique_key => 'k', tenant => $1)";
    let first: i64 = transaction.query_one(sql, &[&"a"]).await.unwrap().get(0);
    // That transaction stays open. If the other tenant waited for it, this would time out.
    client
        .batch_execute("SET lock_timeout = '100ms'")
        .await
        .unwrap();
    let mut ids = vec![first];
    for tenant in [Some("b"), None] {
        let id: i64 = client.query_one(sql, &[&tenant]).await.unwrap().get(0);
        let again: i64 = client.query_one(sql, &[&tenant]).await.unwrap().get(0);
        assert_eq!(id, again, "{tenant:?}");
        ids.push(id);
    }
    transaction.commit().await.unwrap();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 3);

    // A retry has the key of its own tenant only.
    cancel(&client, first).await;
    let retry = "SELECT rouse.retry($1)";
    let again: i64 = client.query_one(retry, &[&first]).await.unwrap().get(0);
    cancel(&client, again).await;
    let theirs: i64 = client.query_one(sql, &[&"a"]).await.unwrap().get(0);
    let refused = client.query_one(retry, &[&first]).await.unwrap_err();
    let message = refused.as_db_error().unwrap().message().to_owned();
    assert!(
        message.contains(&format!("live job {theirs} has its unique key 'k'")),
        "{message}"
    );

    // The longest possible names fit into the index.
    let longest = "rouse.enqueue_unique(repeat('h', 128), (SELECT string_agg(chr(127000 + n), '') FROM generate_series(1, 256) AS n),
        tenant => (SELECT string_agg(chr(128000 + n), '') FROM generate_series(1, 200) AS n))";
    let created: bool = client
        .query_one(&format!("SELECT created FROM {longest}"), &[])
        .await
        .unwrap()
        .get(0);
    assert!(created);
}

#[tokio::test]
async fn enqueue_unique_reports_whether_it_created_the_job_and_how_the_live_one_differs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let unique = async |args: &str| -> (i64, bool, Vec<String>) {
        let sql =
            format!("SELECT id, created, differs FROM rouse.enqueue_unique('x', 'k', {args})");
        let row = client.query_one(&sql, &[]).await.unwrap();
        (row.get(0), row.get(1), row.get(2))
    };
    let (id, created, differs) = unique("'{\"n\": 1}', tags => '{a,b}'").await;
    assert!(created && differs.is_empty(), "{differs:?}");
    // The same tags in another order make the same lane.
    let same = unique("'{\"n\": 1.0}', tags => '{b,a}', run_at => now() + interval '1 day'").await;
    assert_eq!(same, (id, false, vec![]));
    let other = "'{\"n\": 2}', queue => 'q', source => 's', priority => 'low', max_attempts => 2, grants => '{\"memory_mb\": 9}',
                 lease => '1 minute', timeout => '1 minute'";
    let all = [
        "payload",
        "queue",
        "source",
        "priority",
        "max_attempts",
        "tags",
        "grants",
        "lease",
        "timeout",
    ];
    assert_eq!(
        unique(other).await,
        (id, false, all.map(String::from).to_vec())
    );
    assert_eq!(live_jobs(&client).await, 1, "nothing was added");
    let (other, created, _) = unique("tenant => 't'").await;
    assert!(created && other != id);
    cancel(&client, id).await;
    let (next, created, _) = unique("'{}'").await;
    assert!(created && next != id, "the key is free again");
}

#[tokio::test]
async fn a_key_taken_after_the_snapshot_is_a_serialization_failure() {
    let db = TestDb::new().await;
    let (mut one, other) = (db.client().await, db.client().await);
    let transaction = one
        .build_transaction()
        .isolation_level(IsolationLevel::RepeatableRead)
        .start()
        .await
        .unwrap();
    transaction.query("SELECT 1", &[]).await.unwrap();
    const CALL: &str = "SELECT rouse.enqueue('x', unique_key => 'k')";
    other.query(CALL, &[]).await.unwrap();
    let refused = transaction.query(CALL, &[]).await.unwrap_err();
    assert_eq!(refused.code().unwrap().code(), "40001");
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
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (5, 1));
    assert_eq!(row.get::<_, &str>(2), "default");
    assert_eq!(row.get::<_, &str>(3), "normal");
    assert!(row.get::<_, Vec<String>>(4).is_empty());
    assert_eq!(row.get::<_, &str>(5), "{}");
}

/// The messages of the notices that these statements raise.
async fn notices(db: &TestDb, statements: &str) -> Vec<String> {
    let raised = raised(db, statements).await;
    raised.iter().map(|it| it.message().to_owned()).collect()
}

/// The notices that these statements raise.
async fn raised(db: &TestDb, statements: &str) -> Vec<DbError> {
    let (client, mut connection) = tokio_postgres::connect(&db.url(), tokio_postgres::NoTls)
        .await
        .unwrap();
    let reading = tokio::spawn(async move {
        let mut notices = Vec::new();
        while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notice(notice) = message.unwrap() {
                notices.push(notice);
            }
        }
        notices
    });
    client.batch_execute(statements).await.unwrap();
    drop(client);
    reading.await.unwrap()
}

#[tokio::test]
async fn the_first_job_for_an_unserved_handler_raises_a_notice() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let nobody: Vec<String> = notices(&db, "SELECT rouse.enqueue('email.sned')").await;
    assert_eq!(nobody, Vec::<String>::new(), "no worker is alive");
    let (_alive, _gone) = (db.worker().await, db.worker().await);
    client
        .batch_execute(
            "UPDATE rouse.worker SET handlers = '{email.send}' WHERE worker_id = 'w-1';
             UPDATE rouse.worker SET handlers = '{email.sned2}', dead_at = now() WHERE worker_id = 'w-2'",
        )
        .await
        .unwrap();
    let loads = "UPDATE rouse.worker SET stats = jsonb_build_object('loading', $1::boolean) WHERE worker_id = 'w-1'";
    client.execute(loads, &[&true]).await.unwrap();
    let soon = notices(&db, "SELECT rouse.enqueue('email.soon')").await;
    assert_eq!(
        soon,
        Vec::<String>::new(),
        "a worker is loading its modules"
    );
    client.execute(loads, &[&false]).await.unwrap();
    let told = notices(
        &db,
        "SELECT rouse.enqueue('email.send'); SELECT rouse.enqueue('email.sned2'); SELECT rouse.enqueue('email.sned2');
         SELECT rouse.enqueue('bound', source => 'legacy'); SELECT rouse.enqueue_many('email.sned3', '{1}')",
    )
    .await;
    let [first, second] = told.as_slice() else {
        panic!("{told:?}");
    };
    assert!(
        first.contains("no live worker has the handler email.sned2"),
        "{first}"
    );
    assert!(
        second.contains("no live worker has the handler email.sned3"),
        "{second}"
    );
}

#[tokio::test]
async fn the_first_job_of_a_lane_raises_a_notice_if_no_live_worker_knows_a_tag_key() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (_one, _other, _silent) = (db.worker().await, db.worker().await, db.worker().await);
    client
        .batch_execute(
            r#"UPDATE rouse.worker SET handlers = '{text.stats}', capabilities = '{"text.stats": {"payload_keys": ["text", "top"]}}'
               WHERE worker_id IN ('w-1', 'w-2');
               UPDATE rouse.worker SET handlers = '{text.open}', capabilities = '{"text.open": {}}' WHERE worker_id = 'w-3'"#,
        )
        .await
        .unwrap();
    let told = notices(
        &db,
        r#"SELECT rouse.enqueue('text.stats', '{"text": "a", "tpo": 3}'); SELECT rouse.enqueue('text.stats', '{"tpo": 3}');
           SELECT rouse.enqueue_unique('text.stats', 'k', '{"txt": "a"}', queue => 'a');
           SELECT rouse.enqueue_many('text.stats', ARRAY['{"tetx": 1}', '{}']::jsonb[], queue => 'b');
           SELECT rouse.enqueue('text.stats', '{"top": 3}', queue => 'c'); SELECT rouse.enqueue('text.stats', '[1]', queue => 'd');
           SELECT rouse.enqueue('text.stats', NULL, queue => 'e'); SELECT rouse.enqueue('text.open', '{"any": 1}')"#,
    )
    .await;
    let of = |key: &str| {
        format!("rouse.enqueue: no live worker knows '{key}' in a payload of text.stats")
    };
    assert_eq!(told, [of("tpo"), of("txt"), of("tetx")]);

    // A worker's text reaches a producer's terminal.
    client
        .batch_execute(
            r#"UPDATE rouse.worker SET capabilities = '{"text.stats": {"payload_keys": ["text", "\u001b]0;title", "a\nb", "\u202eab", "größe"]}}'
               WHERE worker_id IN ('w-1', 'w-2')"#,
        )
        .await
        .unwrap();
    let again = r#"SELECT rouse.enqueue('text.stats', '{"tpo": 3}', queue => 'f')"#;
    let hint = raised(&db, again).await.remove(0);
    assert_eq!(hint.hint(), Some("Check the key. Known keys: größe, text."));
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
    client
        .batch_execute(
            "DO $$ DECLARE t text; BEGIN
                FOR t IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'rouse.finished_default'::regclass LOOP
                    EXECUTE 'DROP TABLE ' || t;
                END LOOP;
            END $$",
        )
        .await
        .unwrap();
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
        "lost = 1",
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
            "INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, lost, state, payload, result, error)
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
