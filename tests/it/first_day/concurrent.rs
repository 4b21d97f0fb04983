//! Subcommands for named jobs, queues, gates, schedules, workers, flows and state, while other transactions change
//! these.

use tokio::task::JoinSet;

use crate::support::worker::{enqueue_sql, show};
use crate::support::{CommandOutput, TestDb, command, run_rouse, scratch};

/// The beginning of the message about a job that another transaction has locked.
fn locked(id: i64) -> String {
    format!(
        "job {id}: canceling statement due to lock timeout. It waited for a transaction that has changed the job"
    )
}

#[tokio::test]
async fn a_job_that_another_transaction_has_locked_is_reported_and_does_not_stop_the_others() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    for (verb, options, done) in [
        ("reschedule", &["--in", "1h"][..], "queued"),
        ("cancel", &[], "cancelled"),
        ("delete", &[], "cancelled"),
    ] {
        let mut ids = Vec::new();
        for _ in 0..3 {
            ids.push(enqueue_sql(&client, "'x'").await);
        }
        let named: Vec<String> = ids.iter().map(i64::to_string).collect();
        let named: Vec<&str> = named.iter().map(String::as_str).collect();
        let transaction = client.transaction().await.unwrap();
        let lock = "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE";
        transaction.query_one(lock, &[&ids[1]]).await.unwrap();
        let changed = run_rouse(&db, &[&["job", verb][..], &named[..], options].concat()).await;
        changed.exits(6).prints(&locked(ids[1]));
        for id in [ids[0], ids[2]] {
            changed.prints(&format!("job {id} is {done}"));
        }
        changed.prints("2 of 3 jobs done, 1 refused");
        // The server has given up too: nothing changes the job once it is free.
        transaction.rollback().await.unwrap();
        assert_eq!(show(&watcher, ids[1]).await.state, "queued", "{verb}");
    }
}

#[tokio::test]
async fn an_ended_job_that_another_transaction_has_locked_does_not_stop_the_retries_of_others() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let mut ids = Vec::new();
    for _ in 0..3 {
        let id = enqueue_sql(&client, "'x'").await;
        let fail = "SELECT rouse.fail($1, 'why')";
        client.query(fail, &[&id]).await.unwrap();
        ids.push(id);
    }
    let named: Vec<String> = ids.iter().map(i64::to_string).collect();
    let named: Vec<&str> = named.iter().map(String::as_str).collect();
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.finished WHERE id = $1 FOR UPDATE";
    transaction.query_one(lock, &[&ids[1]]).await.unwrap();
    let retried = run_rouse(&db, &[&["job", "retry"][..], &named[..]].concat()).await;
    retried.exits(6).prints(&locked(ids[1]));
    retried.prints("2 of 3 jobs done, 1 refused");
    transaction.rollback().await.unwrap();
    let retries = "SELECT array_agg(retried_from ORDER BY id) FROM rouse.job";
    let row = watcher.query_one(retries, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<i64>>(0), [ids[0], ids[2]]);
}

/// Queues, gates, schedules and workers of which the second of three is locked.
const LOCKED: &str = "
    SELECT q::text AS line FROM rouse.queue AS q WHERE q.name LIKE '%-2'
    UNION ALL SELECT g::text FROM rouse.gate AS g WHERE g.name LIKE '%-2'
    UNION ALL SELECT s::text FROM rouse.schedule AS s WHERE s.name LIKE '%-2'
    UNION ALL SELECT w::text FROM rouse.worker AS w WHERE w.worker_id IN ('w-2', 'w-5')";

#[tokio::test]
async fn a_locked_queue_gate_schedule_or_worker_is_reported_and_does_not_stop_the_others() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    for number in 1..=6 {
        let worker = db.worker().await;
        if number > 3 {
            worker.unregister().await.unwrap();
        }
    }
    client
        .batch_execute(
            "UPDATE rouse.worker SET timeouts = 1, timed_out_since = now(), timed_out_at = now()
             WHERE stopped_at IS NULL;
             INSERT INTO rouse.queue (name)
             SELECT q || n FROM unnest('{q-,paused-,kept-,large-}'::text[]) AS q, generate_series(1, 3) AS n;
             SELECT rouse.pause_queue('paused-' || n) FROM generate_series(1, 3) AS n;
             SELECT rouse.set_gate('g-' || n, 'max_concurrent', max => 5) FROM generate_series(1, 3) AS n;
             SELECT rouse.schedule(s || n, 'report.make', cron => '0 3 * * *')
             FROM unnest('{s-,paused-,run-,old-}'::text[]) AS s, generate_series(1, 3) AS n;
             SELECT rouse.pause_schedule('paused-' || n) FROM generate_series(1, 3) AS n",
        )
        .await
        .unwrap();
    let all = format!("SELECT array_agg(l.line ORDER BY l.line) FROM ({LOCKED}) AS l");
    let lines = async || {
        let row = watcher.query_one(&all, &[]).await.unwrap();
        row.get::<_, Vec<String>>(0)
    };
    let before = lines().await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .batch_execute(
            "SELECT FROM rouse.queue WHERE name LIKE '%-2' FOR UPDATE;
             SELECT FROM rouse.gate WHERE name LIKE '%-2' FOR UPDATE;
             SELECT FROM rouse.schedule WHERE name LIKE '%-2' FOR UPDATE;
             SELECT FROM rouse.worker WHERE worker_id IN ('w-2', 'w-5') FOR UPDATE",
        )
        .await
        .unwrap();
    let run = |noun: &'static str, args: &str| {
        let args: Vec<&str> = args.split(' ').collect();
        let mut command = command(&db.url(), &args, &scratch("locked"));
        let args = args.join(" ");
        move || (noun, args, CommandOutput::run(&mut command))
    };
    // Each has names of its own, so that none waits for another.
    let mut runs = JoinSet::new();
    for (noun, args) in [
        ("queue", "queue pause q-1 q-2 q-3"),
        ("queue", "queue resume paused-1 paused-2 paused-3"),
        ("queue", "queue set kept-1 kept-2 kept-3 --keep-days 3"),
        (
            "queue",
            "queue set large-1 large-2 large-3 --payload-bytes-max 2048",
        ),
        ("schedule", "schedule pause s-1 s-2 s-3"),
        ("schedule", "schedule resume paused-1 paused-2 paused-3"),
        ("schedule", "schedule run run-2"),
        ("schedule", "schedule delete old-1 old-2 old-3"),
        ("worker", "workers clear w-1 w-2 w-3"),
        ("worker", "workers forget w-4 w-5 w-6"),
    ] {
        runs.spawn_blocking(run(noun, args));
    }
    let mut ran = runs.join_all().await;
    // One after the other: each keeps a lock on all queues and gates while it waits.
    for (noun, args) in [
        ("queue", "queue set q-1 q-2 q-3 --policy drr"),
        ("queue", "queue set q-1 q-2 q-3 --dispatch random"),
        ("queue", "queue set q-1 q-2 q-3 --shards 4"),
        ("gate", "gate delete g-1 g-2 g-3"),
    ] {
        let one = tokio::task::spawn_blocking(run(noun, args));
        ran.push(one.await.unwrap());
    }
    for (noun, args, output) in ran {
        let mut names = args.split(' ');
        let locked = names.find(|name| name.ends_with("-2") || *name == "w-5");
        let locked = locked.unwrap();
        output.exits(6).prints(&format!(
            "{noun} {locked}: canceling statement due to lock timeout. It waited for a transaction that has changed "
        ));
        if args != "schedule run run-2" {
            output.prints(&format!("2 of 3 {noun}s done, 1 refused"));
        }
    }
    // The server has given up too: nothing changes them once they are free.
    transaction.rollback().await.unwrap();
    assert_eq!(lines().await, before);
}

#[tokio::test]
async fn a_flow_with_a_locked_job_is_changed_up_to_that_job() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let ids = "SELECT array_agg(job ORDER BY job) FROM rouse.flow($1)";
    let states = "SELECT array_agg(state::text ORDER BY job) FROM rouse.flow($1)";
    for (verb, locked, lock, changed, after) in [
        (
            "cancel",
            1,
            "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE",
            Some("cancelled"),
            ["cancelled", "queued", "cancelled"],
        ),
        (
            "retry",
            2,
            "SELECT FROM rouse.finished WHERE id = $1 FOR UPDATE",
            Some("retried"),
            ["cancelled", "queued", "queued"],
        ),
        (
            "delete",
            1,
            "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE",
            None,
            ["queued", "queued", "queued"],
        ),
    ] {
        let enqueue =
            "SELECT rouse.enqueue_flow(jsonb_agg(jsonb_build_object('name', n, 'handler', 'x')))
             FROM unnest('{a,b,c}'::text[]) AS n";
        let flow: i64 = client.query_one(enqueue, &[]).await.unwrap().get(0);
        let jobs: Vec<i64> = client.query_one(ids, &[&flow]).await.unwrap().get(0);
        if verb == "retry" {
            let cancel = "SELECT rouse.cancel_flow($1)";
            client.query_one(cancel, &[&flow]).await.unwrap();
        }
        let transaction = client.transaction().await.unwrap();
        transaction.query_one(lock, &[&jobs[locked]]).await.unwrap();
        let output = run_rouse(&db, &["flow", verb, &flow.to_string()]).await;
        output.exits(6).prints(&format!(
            "flow {flow}: canceling statement due to lock timeout. It waited for a transaction that has changed a job"
        ));
        if let Some(changed) = changed {
            output.prints(&format!(
                "2 jobs of flow {flow} are {changed}; others are left"
            ));
        }
        // The server has given up too: nothing changes the job once it is free.
        transaction.rollback().await.unwrap();
        let shown: Vec<String> = watcher.query_one(states, &[&flow]).await.unwrap().get(0);
        assert_eq!(shown, after, "{verb}");
    }
}

#[tokio::test]
async fn locked_state_is_not_changed_later() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let set = "SELECT rouse.set_state('a.b', NULL, 'k', '1')";
    client.query(set, &[]).await.unwrap();
    let transaction = client.transaction().await.unwrap();
    transaction.query(set, &[]).await.unwrap();
    for args in [
        &["state", "set", "a.b", "k", "2"][..],
        &["state", "delete", "a.b", "k", "--confirm"],
    ] {
        run_rouse(&db, args).await.exits(6).prints(
            "key k of handler a.b for jobs without a tenant: canceling statement due to lock timeout. \
             It waited for a transaction that has changed the state of the handler",
        );
    }
    transaction.rollback().await.unwrap();
    let value = "SELECT convert_from(value, 'UTF8') FROM rouse.handler_state";
    let row = watcher.query_one(value, &[]).await.unwrap();
    assert_eq!(row.get::<_, &str>(0), "1");
}

#[tokio::test]
async fn an_edit_of_a_locked_job_is_refused() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let id = enqueue_sql(&client, "'x'").await;
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.job WHERE id = $1 FOR UPDATE";
    transaction.query_one(lock, &[&id]).await.unwrap();
    let named = id.to_string();
    for (option, value) in [("--priority", "high"), ("--payload", "1")] {
        let args = ["job", "edit", named.as_str(), option, value];
        let edited = run_rouse(&db, &args).await;
        edited.exits(6).prints(&locked(id));
    }
    transaction.rollback().await.unwrap();
}

#[tokio::test]
async fn an_edit_that_is_tried_again_changes_the_priority_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue_sql(&client, "'x'").await;
    // The first new job meets another transaction. A sequence keeps its value when a transaction is rolled back.
    client
        .batch_execute(
            "CREATE SEQUENCE public.tries;
             CREATE FUNCTION public.meet() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
             BEGIN
                 IF nextval('public.tries') < 2 THEN
                     RAISE EXCEPTION 'in use' USING ERRCODE = 'serialization_failure';
                 END IF;
                 RETURN NEW;
             END
             $$;
             CREATE TRIGGER meet BEFORE INSERT ON rouse.job FOR EACH ROW EXECUTE FUNCTION public.meet()",
        )
        .await
        .unwrap();
    let named = id.to_string();
    let args = [
        "job",
        "edit",
        named.as_str(),
        "--priority",
        "high",
        "--payload",
        "1",
    ];
    let edited = run_rouse(&db, &args).await;
    let line = format!("rouse: job {id} has the priority high");
    let printed = edited.exits(0).stderr.lines();
    assert_eq!(
        printed.filter(|it| *it == line).count(),
        1,
        "{}",
        edited.text()
    );
    let tries = "SELECT last_value FROM public.tries";
    let row = client.query_one(tries, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 2);
}
