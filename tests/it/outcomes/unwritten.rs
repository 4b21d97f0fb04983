//! Outcomes that cannot be written at once: they do not block others, and none of them is lost.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rouse::worker::{
    AttemptInfo, Health, Middleware, Next, Parts, Running, Settings, UnsettledMax,
};
use serde_json::json;
use tokio::sync::watch;
use tokio_postgres::Client;

use crate::outages::serve;
use crate::support::database::drop_all_partitions;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    TIMEOUT, TestWorker, catalog, ended, enqueue, lease, sandbox, show, until, until_true,
    until_within,
};
use crate::support::{Host, TestDb, command, folder};

use super::settings;

#[tokio::test]
async fn an_outcome_that_cannot_be_written_does_not_block_others_and_ends_with_its_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let refused = enqueue(&client, "test.echo", json!({})).await;
    let refuse = format!("ALTER TABLE rouse.finished ADD CONSTRAINT no CHECK (id <> {refused})");
    client.batch_execute(&refuse).await.unwrap();
    let short = Settings {
        overrides: crate::support::worker::lease("test.echo", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    until(&client, refused, |job| job.state == "running").await;
    for n in 0..5 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    // The lease is not renewed forever: another attempt starts.
    until(&client, refused, |job| job.attempt > 1).await;
    worker.drain().await;
}

/// From now on, the ends of jobs that match this condition raise this error. `public.tries` counts how often a write
/// was tried.
pub(super) async fn refuse_ends(client: &Client, condition: &str, error: &str) {
    let sql = format!(
        "CREATE SEQUENCE public.tries;
         CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
             -- A sequence keeps its value whatever becomes of the statement.
             PERFORM nextval('public.tries');
             RAISE EXCEPTION {error};
         END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON rouse.finished FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION public.refuse()"
    );
    client.batch_execute(&sql).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_warnings_about_a_refused_outcome_become_rare() {
    let db = TestDb::new().await;
    let client = db.client().await;
    refuse_ends(&client, "true", "'the books are closed'").await;
    let folder = folder("[handlers.\"*\"]\nlease = \"1m\"\n", &["noop.wasm"]);
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    let is_warning = |line: &str| {
        line.contains("cannot settle; trying until the lease expires")
            && line.contains(&format!("job.id={id} "))
    };
    host.line(TIMEOUT, is_warning);
    until_true(&client, "SELECT last_value >= 12 FROM public.tries").await;
    // After 0, 1, 3, 7, 15 s.
    let warnings = host
        .output()
        .lines()
        .filter(|line| is_warning(line))
        .count();
    assert!(warnings <= 5, "{}", host.output());
    accept_ends(&client).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
}

/// From now on the disk has no room for the ends of jobs that match this condition.
async fn fill_disk(client: &Client, condition: &str) {
    let error = "'No space left on device' USING ERRCODE = 'disk_full'";
    refuse_ends(client, condition, error).await;
}

/// Ends what [`refuse_ends`] started. DROP TRIGGER alone locks the partitions before their parent, and readers of the
/// history lock the parent first, so the two would deadlock.
async fn accept_ends(client: &Client) {
    client
        .batch_execute(
            "BEGIN; LOCK TABLE rouse.finished IN ACCESS EXCLUSIVE MODE; DROP TRIGGER refuse ON rouse.finished; COMMIT",
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn an_outcome_that_does_not_fit_on_the_disk_does_not_block_others_and_ends_with_its_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    fill_disk(&client, "NEW.payload ->> 'n' IN ('40', '70')").await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 100) AS n))")
        .await
        .unwrap();
    let short = Settings {
        overrides: crate::support::worker::lease("noop", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    until_true(&client, "SELECT count(*) = 98 FROM rouse.finished").await;
    // Their leases are not renewed forever: other attempts start.
    until_true(&client, "SELECT bool_and(attempt > 1) FROM rouse.job").await;
    accept_ends(&client).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 100 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn on_a_full_disk_settlements_back_off_and_no_outcome_is_lost() {
    let db = TestDb::new().await;
    let client = db.client().await;
    fill_disk(&client, "true").await;
    let worker = TestWorker::start(&db, settings()).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 64) AS n))")
        .await
        .unwrap();
    // By then it waits for 2 s after each try, which makes two statements: one outcome alone, and then all.
    until_true(&client, "SELECT last_value >= 16 FROM public.tries").await;
    let row = client
        .query_one(
            "SELECT last_value, clock_timestamp()::text FROM public.tries",
            &[],
        )
        .await
        .unwrap();
    let (before, at): (i64, String) = (row.get(0), row.get(1));
    let later = format!("SELECT clock_timestamp() > '{at}'::timestamptz + interval '6 s'");
    until_true(&client, &later).await;
    let row = client
        .query_one("SELECT last_value FROM public.tries", &[])
        .await;
    let tries = row.unwrap().get::<_, i64>(0) - before;
    assert!(tries <= 12, "{tries} tries in 6 s");
    accept_ends(&client).await;
    until_true(&client, "SELECT count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1) = 64 FROM rouse.finished").await;
    worker.drain().await;
}

/// From now on, the ends of jobs that match this condition need a lock. The session that is returned holds it until the
/// end of its transaction. `public.held_up` counts how often they have tried.
async fn hold_up(db: &TestDb, client: &Client, condition: &str) -> Client {
    let other = db.client().await;
    other
        .batch_execute("BEGIN; SELECT pg_advisory_xact_lock(77001)")
        .await
        .unwrap();
    let sql = format!(
        "CREATE SEQUENCE public.held_up;
         CREATE FUNCTION public.take_lock() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
             PERFORM nextval('public.held_up');
             PERFORM pg_advisory_xact_lock(77001);
             RETURN NEW;
         END $$;
         CREATE TRIGGER take_lock BEFORE INSERT ON rouse.finished FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION public.take_lock()"
    );
    client.batch_execute(&sql).await.unwrap();
    other
}

/// For example, attempts that enqueue jobs with the unique key of a job whose producer has not committed yet.
#[tokio::test]
async fn outcomes_that_an_open_transaction_holds_up_do_not_block_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let other = hold_up(&db, &client, "(NEW.payload ->> 'n')::integer >= 1000").await;
    let worker = TestWorker::start(&db, settings()).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(900, 1199) AS n))")
        .await
        .unwrap();
    // Those that were settled together with them.
    until_true(&client, "SELECT count(*) = 100 FROM rouse.finished").await;
    until_true(&client, "SELECT last_value >= 200 FROM public.held_up").await;
    for n in 0..5 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        // Trying each of the 200 outcomes would take 20 s.
        let soon = Duration::from_secs(10);
        until_within(&client, id, soon, |job| job.state == "succeeded").await;
    }
    until_true(&client, "SELECT count(*) = 105 FROM rouse.finished").await;
    other.batch_execute("COMMIT").await.unwrap();
    until_true(&client, "SELECT count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1) = 305 FROM rouse.finished").await;
    worker.drain().await;
}

#[tokio::test]
async fn a_stop_retries_outcomes_that_cannot_be_written_until_their_leases_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let other = hold_up(&db, &client, "NEW.payload ->> 'n' = '1'").await;
    fill_disk(&client, "NEW.payload ->> 'n' = '2'").await;
    let short = Settings {
        overrides: lease("noop", 2),
        ..settings()
    };
    let worker = TestWorker::start(&db, short).await;
    let held_up = enqueue(&client, "noop", json!({"n": 1})).await;
    until_true(&client, "SELECT last_value >= 3 FROM public.held_up").await;
    let no_room = enqueue(&client, "noop", json!({"n": 2})).await;
    until_true(&client, "SELECT last_value >= 2 FROM public.tries").await;
    // Without an end, their leases would be renewed forever.
    worker.drain().await;
    for id in [held_up, no_room] {
        assert_ne!(show(&client, id).await.state, "succeeded");
    }
    other.batch_execute("ROLLBACK").await.unwrap();
    accept_ends(&client).await;
    let next = TestWorker::start(&db, settings()).await;
    for id in [held_up, no_room] {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    next.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_waits_for_outcomes_that_locks_block_until_the_end_of_the_drain_timeout() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    let other = hold_up(&db, &client, "NEW.payload ->> 'n' = '2'").await;
    let folder = folder(
        "drain_timeout = \"6s\"\n[handlers.\"*\"]\nlease = \"10m\"\n",
        &["noop.wasm", "test_guests.wasm"],
    );
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    let held_up = enqueue(&client, "noop", json!({"n": 2})).await;
    until_true(&client, "SELECT last_value >= 2 FROM public.held_up").await;
    let named = enqueue(&client, "test.sleep", json!({"ms": 4000})).await;
    let name = format!("BEGIN; SELECT rouse.enqueue('test.echo', after => '[{named}]')");
    producer.batch_execute(&name).await.unwrap();
    // A claim that has not started would be released.
    let has_started = format!("SELECT progress IS NOT NULL FROM rouse.job({named})");
    until_true(&client, &has_started).await;
    host.signal(libc::SIGTERM);
    // Long before the leases end.
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
    for id in [named, held_up] {
        let is_given_up = |line: &str| {
            line.contains("another transaction has blocked it until the end of drain_timeout")
                && line.contains(&format!("job.id={id} "))
        };
        assert!(output.lines().any(is_given_up), "{output}");
    }
    producer.batch_execute("ROLLBACK").await.unwrap();
    other.batch_execute("ROLLBACK").await.unwrap();
    let next = TestWorker::start(&db, settings()).await;
    for id in [named, held_up] {
        let job = ended(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    }
    next.drain().await;
}

#[tokio::test]
async fn an_uncommitted_cancellation_does_not_block_other_settlements() {
    let db = TestDb::new().await;
    let (mut other, client) = (db.client().await, db.client().await);
    let worker = TestWorker::start(&db, settings()).await;
    let locked = enqueue(&client, "test.sleep", json!({"ms": 200})).await;
    until(&client, locked, |job| job.state == "running").await;
    let transaction = other.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.cancel($1)", &[&locked])
        .await
        .unwrap();
    for n in 0..5 {
        let id = enqueue(&client, "noop", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    assert_eq!(
        show(&client, locked).await.state,
        "running",
        "as other sessions see it"
    );
    transaction.rollback().await.unwrap();
    assert_eq!(ended(&client, locked).await.state, "succeeded");
    worker.drain().await;
}

/// Locks all jobs until the transaction ends.
const NAME_ALL_JOBS: &str =
    "BEGIN; SELECT rouse.enqueue('test.echo', after => (SELECT jsonb_agg(id) FROM rouse.job))";

/// For example, a producer that names the jobs in `after`, and leaves its transaction open. It does not prevent the
/// worker from renewing their leases.
#[tokio::test]
async fn outcomes_of_many_jobs_that_a_producer_has_locked_do_not_block_others() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 20) AS n))")
        .await
        .unwrap();
    producer.batch_execute(NAME_ALL_JOBS).await.unwrap();
    let few = Settings {
        overrides: lease("noop", 2),
        // Fewer than the locked jobs.
        unsettled_max: UnsettledMax {
            count: 16,
            ..UnsettledMax::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, few).await;
    until_true(
        &client,
        "SELECT count(*) = 20 FROM rouse.job WHERE state = 'running'",
    )
    .await;
    for n in 0..5 {
        let id = enqueue(&client, "test.echo", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    // The others are still locked.
    until_true(&client, "SELECT count(*) = 5 FROM rouse.finished").await;
    producer.batch_execute("ROLLBACK").await.unwrap();
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 25 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}

#[tokio::test]
async fn outcomes_that_stay_locked_take_no_space_of_others_however_long_their_leases_are() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 60) AS n))")
        .await
        .unwrap();
    producer.batch_execute(NAME_ALL_JOBS).await.unwrap();
    let few = Settings {
        slots: 4,
        overrides: lease("noop", 600),
        // The locked jobs fill this space, the way to it, and all slots.
        unsettled_max: UnsettledMax {
            count: 16,
            ..UnsettledMax::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, few).await;
    for n in 0..5 {
        let id = enqueue(&client, "test.echo", json!({ "n": n })).await;
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    until_true(
        &client,
        "SELECT count(*) = 60 FROM rouse.job WHERE state = 'running'",
    )
    .await;
    producer.batch_execute("ROLLBACK").await.unwrap();
    worker.drain().await;
    let next = TestWorker::start(&db, settings()).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 65 FROM rouse.finished",
    )
    .await;
    next.drain().await;
}

/// Each of the large results takes more than a third of the space.
#[tokio::test]
async fn large_outcomes_that_stay_locked_take_no_space_of_others() {
    let db = TestDb::new().await;
    let (client, producer) = (db.client().await, db.client().await);
    let little = enqueue(&client, "noop", json!({"n": 1})).await;
    let mut named = Vec::new();
    for _ in 0..8 {
        named.push(enqueue(&client, "test.big-result", json!({"bytes": 400_000})).await);
    }
    producer.batch_execute(NAME_ALL_JOBS).await.unwrap();
    let small = Settings {
        slots: 4,
        unsettled_max: UnsettledMax {
            bytes: 1 << 20,
            ..UnsettledMax::default()
        },
        ..settings()
    };
    let worker = TestWorker::start(&db, small).await;
    let other = enqueue(&client, "test.echo", json!("small")).await;
    assert_eq!(ended(&client, other).await.state, "succeeded");
    producer.batch_execute("ROLLBACK").await.unwrap();
    // It took no space, so it was not given up.
    let job = ended(&client, little).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
    let next = TestWorker::start(&db, settings()).await;
    for id in named {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    next.drain().await;
}

#[tokio::test]
async fn an_outcome_can_be_settled_if_todays_partition_is_missing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, settings()).await;
    let first = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, first).await;
    drop_all_partitions(&client, "finished_default").await;
    let second = enqueue(&client, "noop", json!({"n": 2})).await;
    assert_eq!(ended(&client, second).await.state, "succeeded");
    worker.drain().await;
}

/// No call creates it.
#[tokio::test]
async fn an_outcome_whose_partition_stays_missing_does_not_block_others_and_is_tried_after_pauses()
{
    let db = TestDb::new().await;
    let client = db.client().await;
    let missing = "'no partition found' USING ERRCODE = 'check_violation', SCHEMA = 'rouse', TABLE = 'finished'";
    refuse_ends(&client, "NEW.payload ->> 'n' = '7'", missing).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 20) AS n))")
        .await
        .unwrap();
    let worker = TestWorker::start(&db, settings()).await;
    until_true(&client, "SELECT count(*) = 19 FROM rouse.finished").await;
    let tries = "SELECT last_value FROM public.tries";
    let before: i64 = client.query_one(tries, &[]).await.unwrap().get(0);
    let started_at = Instant::now();
    let more = format!("SELECT last_value >= {} FROM public.tries", before + 10);
    until_true(&client, &more).await;
    // Each time it makes two tries, one of them after the creation of partitions, and waits for 0.2 s.
    let took = started_at.elapsed();
    assert!(took > Duration::from_millis(500), "{took:?}");
    accept_ends(&client).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 20 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}

/// For example, a result so large that it ends the server process.
#[tokio::test]
async fn an_outcome_whose_settlement_always_cuts_its_connection_does_not_block_others_or_a_stop() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let settings = Settings {
        overrides: lease("test.echo", 3),
        ..settings()
    };
    let worker =
        TestWorker::start_through(proxy.store(), db.connector(), settings, catalog().await);
    let cutting = proxy.hold("cuts it", Side::Cut);
    let cut = enqueue(&client, "test.echo", json!("cuts it")).await;
    cutting.caught_times(3).await;
    let other = enqueue(&client, "test.echo", json!("arrives")).await;
    assert_eq!(ended(&client, other).await.state, "succeeded");
    assert_eq!(show(&client, cut).await.state, "running");
    tokio::time::timeout(TIMEOUT, worker.drain())
        .await
        .expect("the worker stops");
}

/// For example, a large result over a slow network: the host waits 15 s for a settlement, and its message never arrives
/// completely.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_whose_settlement_never_arrives_does_not_block_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let worker =
        TestWorker::start_through(proxy.store(), db.connector(), settings(), catalog().await);
    let (caught, mut is_caught) = watch::channel(false);
    let holding = tokio::spawn(async move {
        let mut held = Vec::new();
        loop {
            let hold = proxy.hold("never arrives", Side::Statement);
            hold.caught().await;
            held.push(hold);
            caught.send_replace(true);
        }
    });
    let hanging = enqueue(&client, "test.echo", json!("never arrives")).await;
    is_caught.wait_for(|is_caught| *is_caught).await.unwrap();
    let other = enqueue(&client, "test.echo", json!("arrives")).await;
    assert_eq!(ended(&client, other).await.state, "succeeded");
    assert_eq!(show(&client, hanging).await.state, "running");
    holding.abort();
    let job = ended(&client, hanging).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outcome_whose_response_is_lost_with_its_connection_is_logged_as_unconfirmed() {
    let db = TestDb::new().await;
    let proxy = Proxy::start(&db).await;
    let client = db.client().await;
    let host = serve(proxy.url());
    let response = proxy.hold("rouse.settle(", Side::Response);
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    response.caught().await;
    // The database has written the outcome, and the host does not learn it.
    assert_eq!(ended(&client, id).await.state, "succeeded");
    proxy.go_down();
    host.line(TIMEOUT, |line| line.contains("the database is unreachable"));
    proxy.come_up();
    let line = host.line(TIMEOUT, |line| {
        line.contains("outcome unconfirmed: the response to its settlement was lost")
    });
    assert!(line.contains(&format!("job.id={id} ")), "{line}");
    let job = show(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    drop(response);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_waits_five_seconds_for_an_unconfirmed_outcome_and_names_its_job() {
    let db = TestDb::new().await;
    let proxy = Proxy::start(&db).await;
    let client = db.client().await;
    let host = serve(proxy.url());
    let settling = proxy.hold("rouse.settle(", Side::Statement);
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    settling.caught().await;
    host.signal(libc::SIGTERM);
    host.line(TIMEOUT, |line| line.contains("stopping"));
    let signalled_at = Instant::now();
    host.signal(libc::SIGTERM);
    let (status, output) = host.exit(TIMEOUT);
    assert!(status.success(), "{output}");
    // The host would wait 15 s for the settlement itself.
    assert!(signalled_at.elapsed() < Duration::from_secs(14), "{output}");
    let named = output
        .lines()
        .find(|line| line.contains("could not write the last outcomes in time"));
    assert!(
        named.is_some_and(|line| line.contains(&format!("job.ids=[{id}]"))),
        "{output}"
    );
    settling.release();
}

/// Counts the attempts whose guest has ended.
struct Counting(watch::Sender<usize>);

impl Middleware for Counting {
    fn around<'a>(&'a self, _attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            let run = next.run().await;
            self.0.send_modify(|ran| *ran += 1);
            run
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_a_full_disk_attempts_keep_their_slots_once_too_many_outcomes_wait() {
    let db = TestDb::new().await;
    let client = db.client().await;
    fill_disk(&client, "true").await;
    let (ran, has_run) = watch::channel(0);
    let small = Settings {
        slots: 2,
        unsettled_max: UnsettledMax {
            count: 10,
            ..UnsettledMax::default()
        },
        ..settings()
    };
    let counting: Vec<Arc<dyn Middleware>> = vec![Arc::new(Counting(ran))];
    let worker = TestWorker::start_with_middlewares(&db, small, counting).await;
    client
        .batch_execute("SELECT rouse.enqueue_many('noop', ARRAY(SELECT jsonb_build_object('n', n) FROM generate_series(1, 300) AS n))")
        .await
        .unwrap();
    // By then it has waited for several seconds, in which all could have run.
    until_true(&client, "SELECT last_value >= 12 FROM public.tries").await;
    let ran = *has_run.borrow();
    assert!(
        ran <= 10 + 10 + 2,
        "{ran} have run: those that were tried, those that wait and those in slots"
    );
    accept_ends(&client).await;
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'succeeded') = 300 FROM rouse.finished",
    )
    .await;
    worker.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attempts_keep_their_slots_while_too_many_bytes_wait_for_their_settlement() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let (ran, mut has_run) = watch::channel(0);
    let parts = Parts {
        store: proxy.store(),
        listen_at: db.connector(),
        sandbox: sandbox(),
        catalog: catalog().await,
        sql_logins: BTreeMap::new(),
        middlewares: vec![Arc::new(Counting(ran))],
    };
    let small = Settings {
        slots: 4,
        unsettled_max: UnsettledMax {
            bytes: 1 << 20,
            ..UnsettledMax::default()
        },
        ..settings()
    };
    let health = Health::default();
    let worker = TestWorker::start_sharing(parts, small, health.clone());
    let settling = proxy.hold("rouse.settle(", Side::Statement);
    // One of the outcomes fits.
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(enqueue(&client, "test.big-result", json!({"bytes": 600_000})).await);
    }
    settling.caught().await;
    has_run.wait_for(|ran| *ran == 3).await.unwrap();
    // Small outcomes still fit.
    ids.push(enqueue(&client, "noop", json!({"n": 1})).await);
    has_run.wait_for(|ran| *ran == 4).await.unwrap();
    let deadline = Instant::now() + TIMEOUT;
    while health.in_hand.load(Ordering::Relaxed) != 2 {
        assert!(
            Instant::now() < deadline,
            "the two others do not keep their slots"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    settling.release();
    for id in ids {
        assert_eq!(ended(&client, id).await.state, "succeeded");
    }
    worker.drain().await;
}
