//! Handlers that enqueue jobs, continue their chain, call others and wait, run by workers.

use std::time::Duration;

use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::worker::{
    TestWorker, ended, enqueue, enqueue_sql, events, events_at_any_speed, until_true,
};

async fn start(db: &TestDb) -> TestWorker {
    TestWorker::start(db, Settings::default()).await
}

/// Runs a job to its end; returns its id, its result and its error.
async fn run(client: &Client, handler: &str, payload: Value) -> (i64, Value, Value) {
    let id = enqueue(client, handler, payload).await;
    let job = ended(client, id).await;
    (
        id,
        job.result.unwrap_or_default(),
        job.error.unwrap_or_default(),
    )
}

async fn count(client: &Client, condition: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM rouse.jobs WHERE {condition}");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

/// Waits until a job is suspended.
async fn until_suspended(client: &Client, id: i64) {
    until_true(
        client,
        &format!("SELECT wait IS NOT NULL FROM rouse.jobs WHERE id = {id}"),
    )
    .await;
}

fn square(n: u32) -> Value {
    json!({"handler": "flow.square", "payload": {"n": n}})
}

#[tokio::test]
async fn children_run_after_a_success_and_never_after_a_failure() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    for (then, children) in [
        ("succeed", 3),
        ("fail-once", 3),
        ("fail", 0),
        ("fail-permanently", 0),
        ("panic", 0),
        ("trap", 0),
    ] {
        let payload = json!({"jobs": [square(1), square(2), square(3)], "then": then});
        let (id, ..) = run(&client, "flow.children", payload).await;
        let made = count(&client, &format!("parent = {id}")).await;
        assert_eq!(made, children, "{then}");
    }
    until_true(
        &client,
        "SELECT NOT EXISTS (SELECT FROM rouse.jobs WHERE handler = 'flow.square' AND state <> 'succeeded')",
    )
    .await;
}

#[tokio::test]
async fn a_suspended_attempt_enqueues_nothing_and_the_one_that_succeeds_does_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let payload = json!({"jobs": [square(1)], "next": square(5), "nap_ms": 2500});
    let id = enqueue(&client, "flow.children", payload).await;
    until_suspended(&client, id).await;
    assert_eq!(count(&client, "handler = 'flow.square'").await, 0);
    let sql = "SELECT rouse.reschedule($1)";
    client.query_one(sql, &[&id]).await.unwrap();
    ended(&client, id).await;
    assert_eq!(count(&client, "handler = 'flow.square'").await, 2);
    until_true(
        &client,
        &format!("SELECT coalesce(rouse.chain_result({id}) = '25', false)"),
    )
    .await;
}

#[tokio::test]
async fn an_aborted_attempt_enqueues_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = start(&db).await;
    let payload = json!({"jobs": [square(1)], "then": "wait"});
    let id = enqueue(&client, "flow.children", payload).await;
    until_true(
        &client,
        &format!("SELECT coalesce(progress->>'step' = 'waiting', false) FROM rouse.job({id})"),
    )
    .await;
    crate::support::worker::cancel(&client, id).await;
    worker.drain().await;
    assert_eq!(count(&client, "handler = 'flow.square'").await, 0);
}

#[tokio::test]
async fn a_handler_gives_its_child_a_job_timeout() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = start(&db).await;
    let child = json!({"handler": "flow.square", "payload": {"n": 1}, "delay_ms": 3_600_000, "job_timeout_ms": 7_200_000});
    let payload = json!({"jobs": [child], "then": "succeed"});
    let (id, ..) = run(&client, "flow.children", payload).await;
    let sql = "SELECT (deadline_at - available_at)::text FROM rouse.jobs WHERE parent = $1";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert_eq!(row.get::<_, String>(0), "02:00:00");
    worker.drain().await;
}

#[tokio::test]
async fn a_chain_of_hops_has_the_result_of_its_last_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let id = enqueue(&client, "flow.hop", json!({"n": 20, "fail_at": 7})).await;
    until_true(
        &client,
        &format!("SELECT coalesce(rouse.chain_result({id}) = '20', false)"),
    )
    .await;
    assert_eq!(count(&client, &format!("chain = {id}")).await, 21);
}

#[tokio::test]
async fn a_job_reads_the_results_and_failures_of_those_that_it_has_waited_for() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let good = enqueue(&client, "flow.square", json!({"n": 3})).await;
    let bad = enqueue(
        &client,
        "flow.fails",
        json!({"kind": "no_stock", "message": "sold out"}),
    )
    .await;
    let after = json!({"stock": {"job": bad, "on_failure": "run"}, "price": good});
    let id = enqueue_sql(
        &client,
        &format!("'flow.results', after => '{after}'::jsonb"),
    )
    .await;
    let result = ended(&client, id).await.result.unwrap();
    assert_eq!(
        (&result[0]["name"], &result[0]["output"]),
        (&json!("price"), &json!(9))
    );
    assert_eq!(
        (&result[1]["end"], &result[1]["failure"]["kind"]),
        (&json!("failed"), &json!("no_stock"))
    );
}

#[tokio::test]
async fn a_call_returns_the_result_and_the_failure_of_the_other_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let (id, result, _) = run(&client, "flow.call", square(7)).await;
    assert_eq!(result, json!(49));
    assert_eq!(
        events_at_any_speed(&client, id).await,
        [
            "requested",
            "started",
            "suspended",
            "started",
            "step",
            "succeeded"
        ]
    );
    let fails =
        json!({"handler": "flow.fails", "payload": {"kind": "late", "message": "too late"}});
    let (_, _, error) = run(&client, "flow.call", fails.clone()).await;
    assert_eq!(error["guest_kind"], "call_failed");
    assert!(error.to_string().contains("too late"), "{error}");
    let payload = json!({"jobs": [square(2), fails], "times": 20, "square": 5});
    let (_, result, _) = run(&client, "flow.call-all", payload).await;
    let ends = result.as_array().unwrap();
    assert_eq!(ends.len(), 41);
    assert_eq!(ends[0], json!({"output": 4}));
    assert_eq!(ends[1]["failed"]["kind"], "late");
    assert_eq!(ends[40], json!({"output": 25}));
}

/// Otherwise, the cost of a job would grow with the square of the number of its calls.
#[tokio::test]
async fn a_resumed_attempt_does_not_read_the_ends_of_its_earlier_calls_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Counts the calls to rouse.returned_calls.
    client
        .batch_execute(
            "CREATE SEQUENCE public.reads;
             ALTER FUNCTION rouse.returned_calls RENAME TO counted_calls;
             CREATE FUNCTION rouse.returned_calls(bigint, bytea, bigint, bigint, text[], bigint)
             RETURNS TABLE (refusal text, step text, result json, job bigint)
             LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
                 PERFORM nextval('public.reads');
                 RETURN QUERY SELECT c.* FROM rouse.counted_calls($1, $2, $3, $4, $5, $6) AS c;
             END $$",
        )
        .await
        .unwrap();
    let _worker = start(&db).await;
    let call = |step: &str, n: u32| {
        let payload = json!({ "n": n }).to_string();
        json!({"call": [[step, {"handler": "flow.square", "payload": payload}]]})
    };
    let calls = json!([call("a", 2), call("b", 3), call("c", 4)]);
    let (id, result, error) = run(&client, "flow.raw", calls).await;
    assert_eq!(result.as_array().map(Vec::len), Some(3), "{error}");
    let row = client
        .query_one("SELECT last_value FROM public.reads", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, i64>(0), 3, "one for each resumption");
    assert_eq!(count(&client, &format!("parent = {id}")).await, 3);
}

/// Otherwise, each page would read and sort the names of all parents.
#[tokio::test]
async fn the_names_of_parents_are_not_listed_again_for_each_page() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Counts the calls to rouse.parent_ends that list the names.
    client
        .batch_execute(
            "CREATE SEQUENCE public.lists;
             ALTER FUNCTION rouse.parent_ends RENAME TO counted_parent_ends;
             CREATE FUNCTION rouse.parent_ends(bigint, bytea, bigint, bigint, text, text[])
             RETURNS TABLE (refusal text, name text, job bigint, state text, output jsonb, is_read boolean)
             LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
                 IF $6 = '{}' THEN
                     PERFORM nextval('public.lists');
                 END IF;
                 RETURN QUERY SELECT p.* FROM rouse.counted_parent_ends($1, $2, $3, $4, $5, $6) AS p;
             END $$",
        )
        .await
        .unwrap();
    // Two ends are more than a page.
    let mut after = serde_json::Map::new();
    for name in ["a", "b", "c", "d", "e", "f"] {
        let parent = enqueue_sql(&client, "'no.such'").await;
        let complete = "SELECT rouse.complete($1, to_jsonb(repeat('x', 600 * 1024)))";
        client.query_one(complete, &[&parent]).await.unwrap();
        after.insert(name.to_owned(), parent.into());
    }
    let calls = json!([{"parents": null}, {"parents": "b"}, {"parents": "d"}, {"parents": "f"}]);
    let sql = "SELECT rouse.enqueue('flow.raw', $1, after => $2)";
    let row = client
        .query_one(sql, &[&calls, &Value::Object(after)])
        .await;
    let id: i64 = row.unwrap().get(0);
    let _worker = start(&db).await;
    let result = ended(&client, id).await.result.unwrap();
    let pages = json!([{"ok": ["a", "b"]}, {"ok": ["c", "d"]}, {"ok": ["e", "f"]}, {"ok": []}]);
    assert_eq!(result, pages);
    let lists = "SELECT last_value FROM public.lists";
    let row = client.query_one(lists, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 2, "for the first page and the last");
}

#[tokio::test]
async fn steps_before_a_sleep_are_not_done_again_however_often_the_job_is_suspended() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let id = enqueue(&client, "flow.naps", json!({"n": 10, "ms": 3_600_000})).await;
    for _ in 0..10 {
        until_suspended(&client, id).await;
        let sql = "SELECT rouse.reschedule($1)";
        client.query_one(sql, &[&id]).await.unwrap();
    }
    let job = ended(&client, id).await;
    // Each attempt before a sleep has done one step; suspended attempts do not count against the one that is allowed.
    assert_eq!(job.result, Some(json!(vec![1; 10])), "{:?}", job.error);
    assert_eq!(job.attempt, 11);
    let sql = "SELECT count(*) FROM rouse.job_log($1) WHERE text LIKE 'work %'";
    until_true(
        &client,
        &sql.replace("$1", &id.to_string())
            .replace("count(*)", "count(*) = 10"),
    )
    .await;
}

#[tokio::test]
async fn short_sleeps_keep_their_slot_and_are_not_repeated() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let payload = json!({"ms": [0, 10, 20], "fail": true});
    let (id, result, _) = run(&client, "flow.sleeps", payload).await;
    assert_eq!(result, json!(2));
    let steps = "SELECT count(*) = 3 AND bool_and(attempt = 1) FROM rouse.step WHERE job = ";
    until_true(&client, &format!("{steps}{id}")).await;
    let (id, result, _) = run(&client, "flow.sleep-until", json!({"unix_ms": 17})).await;
    assert_eq!(result, json!(1), "the time has passed");
    assert!(!events(&client, id).await.contains(&"suspended".into()));
}

#[tokio::test]
async fn signals_sent_before_or_after_a_wait_starts_end_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "flow.signals", json!({"name": "go", "times": 3})).await;
    let send = async |payload: Value| {
        let sql = "SELECT rouse.signal($1, 'go', $2)";
        let row = client.query_one(sql, &[&id, &payload]).await.unwrap();
        assert!(row.get::<_, bool>(0));
    };
    send(json!("early")).await;
    let _worker = start(&db).await;
    until_suspended(&client, id).await;
    // No digit is lost.
    send(json!({"n": 12_345_678_901_234_567_890_u64})).await;
    send(json!(null)).await;
    let result = ended(&client, id).await.result.unwrap();
    assert_eq!(
        result,
        json!([{"got": "early"}, {"got": {"n": 12_345_678_901_234_567_890_u64}}, {"got": null}])
    );
    let payload = json!({"name": "never", "timeout_ms": 50});
    let (_, result, _) = run(&client, "flow.signals", payload).await;
    assert_eq!(result, json!([null]), "the timeout");
}

#[tokio::test]
async fn a_suspended_job_resumes_on_another_worker() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = start(&db).await;
    let id = enqueue(&client, "flow.signals", json!({"name": "go"})).await;
    until_suspended(&client, id).await;
    first.drain().await;
    let sql = "SELECT rouse.signal($1, 'go', '7')";
    client.query_one(sql, &[&id]).await.unwrap();
    let _second = start(&db).await;
    let job = ended(&client, id).await;
    assert_eq!(job.result, Some(json!([{"got": 7}])));
}

#[tokio::test]
async fn jobs_for_handlers_that_are_not_granted_are_denied_with_the_lines_to_paste() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let foreign = json!({"handler": "billing.refund", "payload": {}});
    for (handler, payload) in [
        ("flow.children", json!({"jobs": [foreign]})),
        ("flow.next", json!({"next": foreign})),
        ("flow.call", foreign.clone()),
    ] {
        let (id, _, error) = run(&client, handler, payload).await;
        assert_eq!(error["kind"], "denied", "{handler}: {error}");
        let message = error["message"].as_str().unwrap();
        let line = "enqueue = [\"billing.refund\"]";
        assert!(message.contains(line), "{message}");
        assert_eq!(count(&client, &format!("parent = {id}")).await, 0);
    }
    // If one of several calls is not granted, none of them is made, even if the handler continues.
    let calls = json!([{"call": [["a", {"handler": "flow.square", "payload": "{}"}],
                                 ["b", {"handler": "billing.refund", "payload": "{}"}]]}]);
    let (id, ..) = run(&client, "flow.raw", calls).await;
    assert_eq!(count(&client, &format!("parent = {id}")).await, 0);
    let payload = json!({"jobs": [square(1)]});
    let sql = format!("'flow.children', '{payload}', grants => '{{\"enqueue\": [\"flow.hop\"]}}'");
    let id = enqueue_sql(&client, &sql).await;
    let error = ended(&client, id).await.error.unwrap();
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("grants of this job"), "{message}");
}

#[tokio::test]
async fn a_guest_that_asks_for_too_much_or_for_nonsense_is_refused() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let (_, result, _) = run(&client, "flow.many-children", json!({"count": 2000})).await;
    assert_eq!(result["done"], 1000);
    assert!(
        result["error"]["message"]
            .as_str()
            .unwrap()
            .contains("limits.jobs")
    );
    let large = json!({"count": 100, "bytes": 200_000});
    let (_, result, _) = run(&client, "flow.many-children", large).await;
    assert_eq!(result["done"], 41, "{result}");
    let (_, result, _) = run(&client, "flow.many-waits", json!({"count": 2000})).await;
    assert_eq!(result["done"], 1000, "{result}");
    for what in ["enqueue", "continue-with", "sleep", "signal", "call"] {
        let (id, result, _) = run(&client, "flow.in-step", json!(what)).await;
        assert_eq!(result["kind"], "in_step", "{what}");
        assert_eq!(count(&client, &format!("parent = {id}")).await, 0);
    }
    let twice = json!({"next": square(1), "times": 2});
    let (_, _, error) = run(&client, "flow.next", twice).await;
    assert!(error.to_string().contains("one job only"), "{error}");
    let job = |options: &str| json!({"handler": "flow.square", "payload": "{\"n\": 1}", "options": options});
    let calls = json!([
        {"enqueue": job("{\"after\": [17]}")},
        {"enqueue": job("{\"after\": {\"x\": 17}}")},
        {"enqueue": job("{\"tenant\": \"other\"}")},
        {"enqueue": job("{\"max_attempts\": 1001}")},
        {"enqueue": job("{\"queue\": \"no queue\"}")},
        {"enqueue": {"handler": "flow.square", "payload": [255, 254]}},
        {"sleep": ["", 0]},
        {"sleep": ["x\u{7}", 0]},
        {"signal": ["s", "", 0]},
        {"signal": ["s".repeat(201), "x", 0]},
        {"call": [["a", job("{}")], ["a", job("{}")]]},
        {"call": [["b", job("{\"after\": {}}")]]},
        {"step": ["done", "1"]},
        {"sleep": ["done", 0]},
        {"parents": null},
    ]);
    let (_, result, error) = run(&client, "flow.raw", calls).await;
    let responses = result.as_array().unwrap_or_else(|| panic!("{error}"));
    for (n, response) in responses[..12].iter().enumerate() {
        assert!(response["refused"].is_string(), "{n}: {response}");
    }
    assert_eq!(responses[14], json!({"ok": []}));
}

#[tokio::test]
async fn an_option_that_postgres_refuses_fails_the_job_after_its_attempt_and_enqueues_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let _worker = start(&db).await;
    let job = |options: &str| json!({"enqueue": {"handler": "flow.square", "payload": "{\"n\": 1}", "options": options}});
    for (options, why) in [
        ("{\"lease\": \"1 second\"}", "between 2 seconds"),
        (
            "{\"grants\": {\"memory_mb\": 0}}",
            "memory_mb of grants must be",
        ),
        ("{\"after\": {\"\": -1}}", "of after must be a job id"),
    ] {
        let calls = json!([job("{}"), job(options)]);
        let (id, _, error) = run(&client, "flow.raw", calls).await;
        assert_eq!(error["kind"], "invalid_result", "{error}");
        assert!(error.to_string().contains(why), "{error}");
        assert_eq!(count(&client, &format!("parent = {id}")).await, 0);
    }
}

#[tokio::test]
async fn a_tree_of_jobs_stops_at_its_limit() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let limits = "UPDATE rouse.limits SET descendants_max = 20";
    client.batch_execute(limits).await.unwrap();
    let _worker = start(&db).await;
    run(&client, "flow.tree", json!({"depth": 9, "width": 2})).await;
    until_true(
        &client,
        "SELECT NOT EXISTS (SELECT FROM rouse.jobs WHERE state IN ('queued', 'running'))",
    )
    .await;
    assert!(count(&client, "true").await <= 21);
    let sql = "SELECT error->>'message' FROM rouse.jobs WHERE state = 'failed' LIMIT 1";
    let message: String = client.query_one(sql, &[]).await.unwrap().get(0);
    assert!(message.contains("more descendants"), "{message}");
}

#[tokio::test]
async fn a_stopping_worker_releases_a_short_sleep_and_does_not_wait_for_a_long_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = start(&db).await;
    let id = enqueue(&client, "flow.sleeps", json!({"ms": [3_600_000]})).await;
    until_suspended(&client, id).await;
    let stopped = tokio::time::timeout(Duration::from_secs(10), worker.drain()).await;
    assert!(stopped.is_ok());
    assert_eq!(count(&client, "wait IS NOT NULL").await, 1);
}
