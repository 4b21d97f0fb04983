//! `rouse.why`: what keeps a job from starting.

use serde_json::{Value, json};
use tokio_postgres::Client;

use rouse::store::{Registration, WorkerKey};

use crate::support::claims::claim;
use crate::support::database::registration;
use crate::support::page::{blocks, run_sql};
use crate::support::worker::enqueue_sql;
use crate::support::{TestDb, run_rouse};

/// The reasons why a job waits, and their sentences.
async fn why(client: &Client, id: i64) -> Vec<(String, String)> {
    let rows = client
        .query("SELECT reason, sentence FROM rouse.why($1)", &[&id])
        .await
        .unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Fails unless the reasons are these, in this order, with these words in their sentences.
async fn assert_why(client: &Client, id: i64, expected: &[(&str, &str)]) {
    let reasons = why(client, id).await;
    let names: Vec<&str> = reasons.iter().map(|(reason, _)| reason.as_str()).collect();
    let wanted: Vec<&str> = expected.iter().map(|(reason, _)| *reason).collect();
    assert_eq!(names, wanted, "{reasons:#?}");
    for ((_, sentence), (_, words)) in reasons.iter().zip(expected) {
        assert!(sentence.contains(words), "{sentence:?} without {words:?}");
    }
}

/// A worker for handler `greet`.
fn greeter() -> Registration {
    Registration {
        capabilities: json!({"greet": {"sha256": "0".repeat(64), "grants": []}}),
        ..registration("one", WorkerKey::random())
    }
}

/// The one reason of a ready job that a worker would take.
const READY: &[(&str, &str)] = &[("ready", "a worker will claim it in a moment")];

#[tokio::test]
async fn for_a_job_that_no_worker_takes_why_names_what_the_workers_lack() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue_sql(&client, "'greet', '{}', queue => 'mail', tags => '{gpu}'").await;
    assert_why(&client, id, &[("no_worker", "No worker is running")]).await;
    let store = db.store();
    store.register(&greeter()).await.unwrap();
    for (change, expected) in [
        (
            "handlers = '{other}', tags = '{gpu}'",
            ("no_handler", "has the handler greet"),
        ),
        (
            "handlers = '{greet}', queues = '{other}'",
            ("no_queue", "serves queue mail"),
        ),
        ("queues = '{}', tags = '{cpu}'", ("no_tag", "has tag gpu")),
        (
            "tags = '{gpu}', draining_at = now()",
            ("draining", "being stopped"),
        ),
        (
            r#"draining_at = NULL, parked = '{greet}', capabilities = '{"greet": {"parked": "permission denied for table orders"}}'"#,
            (
                "parked",
                "because its SQL statements cannot run: permission denied for table orders",
            ),
        ),
        (
            r#"capabilities = '{"greet": {"parked": "its login is gone", "parked_cause": "login"}}'"#,
            (
                "parked",
                "is parked on all workers that could run it: its login is gone.",
            ),
        ),
        (
            "parked = '{}', limited = true",
            ("not_permitted", "do not permit handler greet in queue mail"),
        ),
        (
            "limited = false, seen_at = now() - interval '5 minutes'",
            ("no_worker", "No worker is running"),
        ),
        ("seen_at = now()", READY[0]),
    ] {
        client
            .batch_execute(&format!("UPDATE rouse.worker SET {change}"))
            .await
            .unwrap();
        assert_why(&client, id, &[expected]).await;
    }
    // Even with the handler, a worker would not take the job.
    let nothing = "UPDATE rouse.worker SET handlers = '{other}', queues = '{other}', tags = '{}'";
    client.batch_execute(nothing).await.unwrap();
    let all = [
        ("no_handler", "has the handler greet"),
        ("no_queue", "No running worker serves queue mail"),
        ("no_tag", "No running worker has all of its tags: gpu"),
    ];
    assert_why(&client, id, &all).await;
}

#[tokio::test]
async fn for_a_job_without_a_turn_why_names_what_it_waits_for() {
    let db = TestDb::new().await;
    let client = db.client().await;
    db.store().register(&greeter()).await.unwrap();
    let first = enqueue_sql(
        &client,
        "'greet', '{}', run_at => now() + interval '3 hours'",
    )
    .await;
    assert_why(&client, first, &[("not_due", "it may start in 3 h")]).await;
    let soon = "'greet', '{}', run_at => now() + interval '119 minutes'";
    let soon = enqueue_sql(&client, soon).await;
    assert_why(&client, soon, &[("not_due", "it may start in 2 h")]).await;
    let after = format!("'greet', '{{}}', after => '[{first}]'");
    let second = enqueue_sql(&client, &after).await;
    let waits = format!("the end of job {first}, which is queued");
    assert_why(&client, second, &[("after", &waits)]).await;
    let after = format!(
        "'greet', '{{}}', after => '{{\"a\": {{\"job\": {first}, \"on_failure\": \"wait\"}}}}'"
    );
    let third = enqueue_sql(&client, &after).await;
    let end = format!("SELECT rouse.fail({first}, 'no')");
    client.batch_execute(&end).await.unwrap();
    let waits = format!("waits for job {first}, which has ended as failed, to be retried");
    assert_why(&client, third, &[("after", &waits)]).await;
    assert_why(&client, first, &[("ended", "failed")]).await;
    // The retry is another job of the same chain.
    let retry: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&first])
        .await
        .unwrap()
        .get(0);
    let waits = format!("the end of job {retry}, which is queued");
    assert_why(&client, third, &[("after", &waits)]).await;
    let goes_on = format!("failed. Job {retry} continues its chain.");
    assert_why(&client, first, &[("ended", &goes_on)]).await;
    assert_eq!(why(&client, 999).await, [], "there is no such job");

    let suspended = enqueue_sql(
        &client,
        "'greet', '{}', run_at => now() + interval '3 hours'",
    )
    .await;
    for (wait, words) in [
        (
            json!({"kind": "signal", "step": "s", "name": "approved"}),
            "the job receives signal approved.",
        ),
        (
            json!({"kind": "signal", "step": "s", "name": "approved", "until_ms": 4_102_444_800_000_u64}),
            "the job receives signal approved, for another",
        ),
        (
            json!({"kind": "call", "step": "s", "jobs": [first]}),
            "the jobs that it has called have ended",
        ),
        (
            json!({"kind": "sleep", "step": "s", "until_ms": 4_102_444_800_000_u64}),
            "sleeps for another",
        ),
    ] {
        client
            .execute(
                "UPDATE rouse.job SET wait = $1 WHERE id = $2",
                &[&wait, &suspended],
            )
            .await
            .unwrap();
        assert_why(&client, suspended, &[("suspended", words)]).await;
    }
    let wait = json!({"kind": "signal", "step": "s", "name": "a'; rm -rf b"});
    client
        .execute(
            "UPDATE rouse.job SET wait = $1 WHERE id = $2",
            &[&wait, &suspended],
        )
        .await
        .unwrap();
    let remedy = client
        .query_one("SELECT remedy FROM rouse.why($1)", &[&suspended])
        .await
        .unwrap();
    let quoted = format!(r"`rouse job signal {suspended} 'a'\''; rm -rf b'`");
    assert_eq!(
        remedy.get::<_, String>(0),
        quoted,
        "the signal is one word for a shell"
    );
    let signal = format!("SELECT rouse.signal({suspended}, 'a''; rm -rf b')");
    client.batch_execute(&signal).await.unwrap();
    // The turn of the suspended job comes after that of the retry.
    assert_why(&client, suspended, &[("ahead", "1 job of its handler")]).await;
}

#[tokio::test]
async fn for_a_job_behind_gates_why_names_the_closed_ones() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.store();
    let slots = 9;
    worker
        .register(&Registration { slots, ..greeter() })
        .await
        .unwrap();
    client
        .batch_execute(
            "SELECT rouse.set_gate('few', 'max_concurrent', handler => 'greet', key => '{tenant}', max => 1);
             SELECT rouse.set_gate('rate', 'throttle', handler => 'greet', key => '{tenant}', max => 1, period => '1 minute');
             SELECT rouse.set_fair_share('mail', policy => 'drr', max_in_flight => 1)",
        )
        .await
        .unwrap();
    let enqueue = "'greet', '{}', queue => 'mail', tenant => 'acme'";
    let first = enqueue_sql(&client, enqueue).await;
    let second = enqueue_sql(&client, enqueue).await;
    assert_why(&client, first, READY).await;
    assert_eq!(claim(&worker, 2).await.len(), 1);
    let closed = [
        (
            "max_concurrent",
            "Jobs of tenant acme have been at their limit, 1 of 1 running",
        ),
        ("max_in_flight", "(fair share of queue mail)"),
        (
            "throttle",
            "Jobs of tenant acme are at their rate, 1 in 60 s",
        ),
    ];
    assert_why(&client, second, &closed).await;
    assert_why(&client, first, &[("running", "worker one")]).await;
    let other = enqueue.replace("acme", "other");
    let other = enqueue_sql(&client, &other).await;
    assert_why(&client, other, READY).await;

    let batch = "SELECT rouse.set_gate('many', 'batch', handler => 'greet', max => 3, period => '1 hour'), rouse.delete_gate('few'), rouse.delete_gate('rate')";
    client.batch_execute(batch).await.unwrap();
    assert_why(&client, other, &[("batch", "in batches of 3")]).await;
}

#[tokio::test]
async fn for_a_ready_job_why_names_what_goes_first() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.store();
    worker.register(&greeter()).await.unwrap();
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('greet', array_fill('{}'::jsonb, ARRAY[10020]));
             SELECT rouse.enqueue('other', '{}', priority => 'high');
             SELECT rouse.enqueue('greet', '{}', priority => 'high')",
        )
        .await
        .unwrap();
    let low = "'greet', '{}', priority => 'low'";
    let first = enqueue_sql(&client, low).await;
    let second = enqueue_sql(&client, low).await;
    assert_eq!(claim(&worker, 1).await.len(), 1);
    // A job of a handler that this worker does not have does not go first.
    let expected = [
        ("ahead", "1 job of its handler, queue and priority is ahead"),
        ("priority", "1 job has priority high, and goes first"),
        ("priority", "more than 10,000 jobs have priority normal"),
        (
            "busy",
            "The worker that can run it has 1 slot, and holds 1 job",
        ),
    ];
    assert_why(&client, second, &expected).await;
    assert_why(&client, first, &expected[1..]).await;
    // A job of a paused queue does not go first either.
    client
        .batch_execute(
            "SELECT rouse.cancel(id) FROM rouse.jobs WHERE priority = 'high' AND handler = 'greet';
             SELECT rouse.enqueue('greet', '{}', priority => 'high', queue => 'paused'), rouse.pause_queue('paused')",
        )
        .await
        .unwrap();
    assert_why(&client, first, &expected[2..]).await;
}

#[tokio::test]
async fn for_a_job_that_its_hosts_keep_for_later_why_says_so() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = |name: &str, queues: &[&str]| Registration {
        capabilities: json!({"greet": {"sha256": "0".repeat(64), "grants": [], "concurrency": 2}}),
        queues: queues.iter().map(|&queue| queue.to_owned()).collect(),
        slots: 8,
        ..registration(name, WorkerKey::random())
    };
    let store = db.store();
    store
        .register(&worker("one", &["first", "mail"]))
        .await
        .unwrap();
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('greet', array_fill('{}'::jsonb, ARRAY[4]), queue => 'first');
             SELECT rouse.enqueue('greet', '{}', queue => 'first', priority => 'low');
             SELECT rouse.enqueue('greet', '{}', queue => 'third')",
        )
        .await
        .unwrap();
    let id = enqueue_sql(&client, "'greet', '{}', queue => 'mail'").await;
    let first = "of queue first, which the workers serve before queue mail, go first";
    assert_why(&client, id, &[("queue_order", first)]).await;
    assert_eq!(claim(&store, 2).await.len(), 2);
    let full = (
        "concurrency",
        "has as many jobs of handler greet as may run at a time there: 2.",
    );
    assert_why(&client, id, &[("queue_order", first), full]).await;
    // Another worker has its own order of queues, and has room.
    let other = db.store();
    other
        .register(&worker("two", &["mail", "first"]))
        .await
        .unwrap();
    assert_why(&client, id, READY).await;
    client
        .batch_execute("UPDATE rouse.worker SET capabilities = capabilities #- '{greet,concurrency}' WHERE worker_id = 'two'")
        .await
        .unwrap();
    assert_eq!(claim(&other, 2).await.len(), 2);
    assert_why(&client, id, READY).await;
}

#[tokio::test]
async fn why_names_all_three_reasons_of_a_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue_sql(
        &client,
        "'greet', '{}', queue => 'mail', run_at => now() + interval '3 days'",
    )
    .await;
    client
        .batch_execute("SELECT rouse.pause_queue('mail')")
        .await
        .unwrap();
    let who: String = client
        .query_one("SELECT session_user::text", &[])
        .await
        .unwrap()
        .get(0);
    let by = format!(", by {who}.");
    let reasons = [
        ("not_due", "it may start in 3 days"),
        ("paused", by.as_str()),
        ("no_worker", "No worker is running"),
    ];
    assert_why(&client, id, &reasons).await;
    let text = id.to_string();
    let json = run_rouse(&db, &["why", &text, "--json"]).await;
    let found = &json.json()["why"];
    assert_eq!(found[1]["reason"], "paused");
    assert!(
        found[1]["since"].is_string() && found[0]["until"].is_string(),
        "{found}"
    );
    assert_eq!(found[2]["until"], Value::Null);
    let shown = run_rouse(&db, &["why", &text]).await;
    shown.exits(0).prints("it may start in 3 days");
    shown.prints("→ `rouse queue resume mail`");
    run_rouse(&db, &["job", &text])
        .await
        .exits(0)
        .prints("why it waits")
        .prints("→ `rouse queue resume mail`");
    // The commands of the first two remedies remove their reasons.
    for reason in &found.as_array().unwrap()[..2] {
        let remedy = reason["remedy"].as_str().unwrap();
        let args: Vec<&str> = remedy.trim_matches('`').split(' ').collect();
        run_rouse(&db, &args[1..]).await.exits(0);
    }
    assert_why(&client, id, &reasons[2..]).await;
    run_rouse(&db, &["why", "999"])
        .await
        .exits(3)
        .prints("no job 999");
}

#[tokio::test]
async fn for_an_orphan_and_a_job_in_the_inbox_of_a_stopped_worker_why_says_so() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.store();
    worker.register(&greeter()).await.unwrap();
    let id = enqueue_sql(&client, "'greet'").await;
    assert_eq!(claim(&worker, 1).await.len(), 1);
    client
        .batch_execute(
            "UPDATE rouse.job SET lease_until = now() - interval '1 minute' WHERE state = 'running';
             SELECT rouse.set_dispatch('direct', 'hash'), rouse.set_shards('sharded', 4)",
        )
        .await
        .unwrap();
    assert_why(
        &client,
        id,
        &[("orphaned", "Worker one, which had it, has been gone for")],
    )
    .await;
    let sent = enqueue_sql(&client, "'greet', queue => 'direct', tenant => 'a'").await;
    assert_eq!(why(&client, sent).await[0].0, "busy");
    let sharded = enqueue_sql(&client, "'greet', queue => 'sharded'").await;
    assert_why(&client, sharded, &[("shard", "of 4 of queue sharded")]).await;
    client
        .batch_execute("UPDATE rouse.worker SET draining_at = now()")
        .await
        .unwrap();
    let expected = [
        ("draining", "being stopped"),
        (
            "inbox",
            "It was sent to worker one, which no longer takes it",
        ),
    ];
    assert_why(&client, sent, &expected).await;
}

#[tokio::test]
async fn the_sql_on_the_page_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let blocks = blocks("docs/guides/why.md");
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert_eq!(sql.len(), 1);
    for block in sql {
        run_sql(&client, block).await;
    }
}
