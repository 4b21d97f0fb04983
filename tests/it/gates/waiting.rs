//! How workers wait for gates.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rouse::job::Fence;
use rouse::worker::{
    AttemptInfo, Intervals, Middleware, Next, Override, Overrides, Running, Settings,
};

use crate::support::claims::{orders, rand};
use crate::support::worker::{TestWorker, cancel, ended, until_true};

use super::{enqueue, gate, number, set_gate};

async fn worker(db: &crate::support::TestDb, slots: usize) -> TestWorker {
    let settings = Settings {
        slots,
        ..Settings::default()
    };
    TestWorker::start(db, settings).await
}

const SLEEP: &str = r#", '{"ms": 1}'"#;

/// The end of a job starts the next job of its key at once, and not with the next sweep.
#[tokio::test]
async fn the_end_of_a_job_opens_the_gate_for_the_next_one_of_its_key() {
    let (db, client) = gate("'one', 'max_concurrent', key => '{handler}', max => 1").await;
    for _ in 0..100 {
        for (handler, priority) in [
            ("test.sleep", "normal"),
            ("test.sleep", "low"),
            ("test.race", "normal"),
        ] {
            enqueue(
                &client,
                handler,
                &format!("{SLEEP}, priority => '{priority}'"),
            )
            .await;
        }
    }
    let started = Instant::now();
    let workers = [worker(&db, 4).await, worker(&db, 4).await];
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let took = started.elapsed();
    for worker in workers {
        worker.drain().await;
    }
    // One start per sweep would take 200 s.
    assert!(took < Duration::from_secs(25), "{took:?}");
    let overlapping = "SELECT count(*) FROM rouse.finished AS a JOIN rouse.jobs AS ja USING (id)
        JOIN rouse.finished AS b ON a.id < b.id AND a.started_at < b.finished_at AND b.started_at < a.finished_at
        JOIN rouse.jobs AS jb ON jb.id = b.id AND jb.handler = ja.handler";
    assert_eq!(
        number(&client, overlapping).await,
        0,
        "two ran at the same time"
    );
}

#[tokio::test]
async fn a_throttled_key_continues_when_its_gate_opens() {
    let (db, client) =
        gate("'rate', 'throttle', key => '{tenant}', max => 1, period => '700 ms'").await;
    for n in 0..4 {
        for tenant in 0..50 {
            enqueue(
                &client,
                "test.sleep",
                &format!("{SLEEP}, tenant => 't{tenant}', source => '{n}'"),
            )
            .await;
        }
    }
    let started = Instant::now();
    let worker = worker(&db, 4).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let took = started.elapsed();
    worker.drain().await;
    assert!(
        took > Duration::from_millis(2100),
        "three periods: {took:?}"
    );
    // The sweep alone would take longer. The machine may pause during one of the periods.
    let usual = "SELECT (percentile_cont(0.5) WITHIN GROUP (ORDER BY g.gap) * 1000)::bigint FROM (
        SELECT extract(epoch FROM claimed_at - lag(claimed_at) OVER (PARTITION BY tenant ORDER BY claimed_at))::float8 AS gap
        FROM rouse.jobs) AS g";
    let usual = number(&client, usual).await;
    assert!(usual < 1_500, "{usual} ms");
    // The time between claims, because a gate counts a start when its job is claimed.
    let closest = "SELECT min(extract(epoch FROM gap) * 1000)::bigint FROM (
        SELECT claimed_at - lag(claimed_at) OVER (PARTITION BY tenant ORDER BY claimed_at) AS gap FROM rouse.jobs) AS g";
    assert!(number(&client, closest).await >= 700);
}

#[tokio::test]
async fn throttled_jobs_start_although_the_database_needs_longer_than_a_second_for_each_claim() {
    let (db, client) = gate("'rate', 'throttle', max => 100, period => '1 hour'").await;
    client
        .batch_execute(
            "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_sleep(1.2); RETURN NEW; END $$;
             CREATE TRIGGER slow BEFORE UPDATE ON rouse.job FOR EACH ROW
                 WHEN (OLD.state = 'queued' AND NEW.state = 'running') EXECUTE FUNCTION public.slow()",
        )
        .await
        .unwrap();
    let id = enqueue(&client, "test.sleep", SLEEP).await;
    let worker = worker(&db, 1).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
}

/// The job of another worker ends, and nothing announces this.
#[tokio::test]
async fn a_gate_that_another_worker_has_opened_is_found_by_the_sweep() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    enqueue(&client, "test.sleep", SLEEP).await;
    let other = db.worker().await;
    let job = crate::support::claims::claim_one(&other).await;
    for _ in 0..5 {
        enqueue(&client, "test.sleep", SLEEP).await;
    }
    let worker = worker(&db, 4).await;
    let slept = "SELECT EXISTS (SELECT FROM rouse.sleeper WHERE until > clock_timestamp())";
    until_true(&client, slept).await;
    let done = crate::support::claims::settlement(&job, crate::support::claims::result("1"));
    other
        .settle(&[&done], rouse::store::Locked::Wait)
        .await
        .unwrap();
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
}

/// The jobs of the other lanes were cancelled. A sweep opens a few lanes, and passes over all empty ones at once.
#[tokio::test]
async fn a_sweep_passes_over_hundreds_of_lanes_that_are_empty_by_now() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    client
        .batch_execute("SELECT rouse.set_fair_share('default', policy => 'drr')")
        .await
        .unwrap();
    enqueue(&client, "test.sleep", &format!("{SLEEP}, tenant => 't'")).await;
    let other = db.worker().await;
    let job = crate::support::claims::claim_one(&other).await;
    client
        .batch_execute(
            r#"SELECT rouse.enqueue('test.sleep', '{"ms": 1}', tenant => 't' || n)
               FROM generate_series(1, 300) AS n"#,
        )
        .await
        .unwrap();
    let worker = worker(&db, 4).await;
    until_true(&client, WAITS).await;
    // The lane of the last job is closed after the others.
    let last = enqueue(&client, "test.sleep", &format!("{SLEEP}, tenant => 'last'")).await;
    client
        .batch_execute(
            "SELECT rouse.cancel(id) FROM rouse.jobs WHERE tenant <> 't' AND tenant <> 'last'",
        )
        .await
        .unwrap();
    let done = crate::support::claims::settlement(&job, crate::support::claims::result("1"));
    other
        .settle(&[&done], rouse::store::Locked::Wait)
        .await
        .unwrap();
    let started = Instant::now();
    let ended = format!("SELECT EXISTS (SELECT FROM rouse.finished WHERE id = {last})");
    until_true(&client, &ended).await;
    let took = started.elapsed();
    worker.drain().await;
    // With eight lanes for each sweep, it would take 37 s.
    assert!(took < Duration::from_secs(20), "{took:?}");
}

/// A worker that does not sweep during a test.
pub(super) async fn worker_without_sweeps(db: &crate::support::TestDb) -> TestWorker {
    let settings = Settings {
        slots: 4,
        ..without_sweeps()
    };
    TestWorker::start(db, settings).await
}

/// The settings of such a worker.
fn without_sweeps() -> Settings {
    Settings {
        intervals: Intervals {
            sweep: Duration::from_secs(600),
            restart: Duration::from_secs(600),
            restart_max: Duration::from_secs(600),
            ..Intervals::default()
        },
        ..Settings::default()
    }
}

const RUNS: &str = "SELECT EXISTS (SELECT FROM rouse.job WHERE state = 'running')";
/// The worker has found that there is currently nothing to do.
pub(super) const WAITS: &str =
    "SELECT EXISTS (SELECT FROM rouse.sleeper WHERE until > clock_timestamp())";

#[tokio::test]
async fn a_job_behind_lanes_that_are_empty_by_now_starts_when_its_limit_has_room() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    client
        .batch_execute("SELECT rouse.set_fair_share('default', policy => 'drr')")
        .await
        .unwrap();
    let worker = worker_without_sweeps(&db).await;
    let first = enqueue(&client, "test.wait-abort", ", '{}', tenant => 't'").await;
    until_true(&client, RUNS).await;
    for n in 1..=40 {
        enqueue(&client, "test.sleep", &format!("{SLEEP}, tenant => 't{n}'")).await;
    }
    client
        .batch_execute("DELETE FROM rouse.sleeper")
        .await
        .unwrap();
    until_true(&client, WAITS).await;
    client
        .batch_execute(
            "SELECT rouse.cancel(id) FROM rouse.jobs WHERE tenant <> 't' AND tenant <> 't40'",
        )
        .await
        .unwrap();
    assert!(cancel(&client, first).await);
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let ran = "SELECT count(*) FROM rouse.finished WHERE state = 'succeeded'";
    assert_eq!(number(&client, ran).await, 1);
}

/// This holds no matter how many of the other lanes a claim finds closed.
#[tokio::test]
async fn a_tenant_below_its_rate_does_not_wait_behind_hundreds_that_have_used_theirs_up() {
    let (db, client) =
        gate("'rate', 'throttle', key => '{tenant}', max => 1, period => '1 hour'").await;
    let enqueue_all = r#"SELECT rouse.enqueue('test.sleep', '{"ms": 1}', tenant => 't' || n)
        FROM generate_series(1, 251) AS n"#;
    client.batch_execute(enqueue_all).await.unwrap();
    let other = db.worker().await;
    // Regardless of the order in which lanes are tried, this lane is far from the first.
    let below = "SELECT id FROM rouse.lane WHERE key <> '' ORDER BY id OFFSET 125 LIMIT 1";
    let below = number(&client, below).await;
    let mut others = orders(&other, 3_600_000).await;
    others.retain(|order| order.lane.0 != below);
    let claimed = other
        .claim(Fence(rand()), &others, 251, None)
        .await
        .unwrap();
    assert_eq!(claimed.jobs().len(), 250);
    client.batch_execute(enqueue_all).await.unwrap();
    client
        .batch_execute("SELECT rouse.pause_queue('default')")
        .await
        .unwrap();
    let settings = Settings {
        slots: 1,
        ..without_sweeps()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, WAITS).await;
    let started = Instant::now();
    client
        .batch_execute("SELECT rouse.resume_queue('default')")
        .await
        .unwrap();
    until_true(&client, "SELECT count(*) = 1 FROM rouse.finished").await;
    let took = started.elapsed();
    worker.drain().await;
    // With four lanes a look, and up to 2 s between looks, it would take half a minute.
    assert!(took < Duration::from_secs(15), "{took:?}");
}

/// The end of a job opens the gate, no matter what ended the job.
#[tokio::test]
async fn a_cancelled_job_opens_the_gate_for_the_next_one() {
    let (db, client) = gate("'one', 'max_concurrent', max => 1").await;
    let worker = worker_without_sweeps(&db).await;
    let first = enqueue(&client, "test.wait-abort", ", '{}'").await;
    until_true(&client, RUNS).await;
    enqueue(&client, "test.sleep", SLEEP).await;
    client
        .batch_execute("DELETE FROM rouse.sleeper")
        .await
        .unwrap();
    until_true(&client, WAITS).await;
    assert!(cancel(&client, first).await);
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
}

#[tokio::test]
async fn a_change_to_a_gate_opens_lanes_that_it_had_closed_for_a_long_time() {
    let (db, client) = gate("'rate', 'throttle', max => 1, period => '1 hour'").await;
    for _ in 0..5 {
        enqueue(&client, "test.sleep", SLEEP).await;
    }
    let worker = worker(&db, 4).await;
    until_true(&client, "SELECT count(*) = 1 FROM rouse.finished").await;
    set_gate(&client, "'rate', 'throttle', max => 1000, period => '1 s'").await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
}

/// The time from the first start of a job to the last end, in milliseconds.
const RAN_FOR_MS: &str = "SELECT (extract(epoch FROM max(f.finished_at) - min(f.started_at)) * 1000)::bigint FROM rouse.finished AS f";

/// Counts the attempts of `test.sleep` that run at the same time.
#[derive(Default)]
struct Counter {
    running: AtomicUsize,
    most: AtomicUsize,
}

impl Middleware for Counter {
    fn around<'a>(&'a self, attempt: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            if attempt.handler != "test.sleep" {
                return next.run().await;
            }
            let running = self.running.fetch_add(1, Ordering::Relaxed) + 1;
            self.most.fetch_max(running, Ordering::Relaxed);
            let run = next.run().await;
            self.running.fetch_sub(1, Ordering::Relaxed);
            run
        })
    }
}

/// `concurrency` of a handler: on each host, regardless of the keys of its jobs.
#[tokio::test]
async fn a_host_runs_no_more_attempts_of_a_handler_than_its_concurrency() {
    let (db, client) = gate("'wide', 'max_concurrent', key => '{tenant}', max => 5").await;
    for tenant in 0..3 {
        for _ in 0..10 {
            enqueue(
                &client,
                "test.sleep",
                &format!(r#", '{{"ms": 50}}', tenant => 't{tenant}'"#),
            )
            .await;
            enqueue(
                &client,
                "test.race",
                &format!("{SLEEP}, tenant => 't{tenant}'"),
            )
            .await;
        }
    }
    let two = Override::default().with("concurrency", 2_u32);
    let settings = Settings {
        slots: 8,
        overrides: Overrides([("test.sleep".to_owned(), two)].into()),
        ..Settings::default()
    };
    let counter = Arc::<Counter>::default();
    let worker = TestWorker::start_with_middlewares(&db, settings, vec![counter.clone()]).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    assert_eq!(counter.most.load(Ordering::Relaxed), 2);
    // A job that waits in line for longer than a second is released. The next one starts at the end of another. The
    // time counts from the first start: before that, the worker compiles its modules.
    let took = number(&client, RAN_FOR_MS).await;
    assert!(took < 15_000, "30 jobs of 50 ms, two at a time: {took} ms");
    let released = "SELECT count(*) FROM rouse.record WHERE event = 'released'";
    assert_eq!(number(&client, released).await, 0);
}

/// An attempt counts as running until the job delay has passed, which is after the end of its job.
#[tokio::test]
async fn the_next_attempt_of_a_limited_handler_starts_when_the_job_delay_has_passed() {
    let (db, client) = gate("'wide', 'max_concurrent', key => '{tenant}', max => 5").await;
    for n in 0..20 {
        let tenant = n % 2;
        enqueue(
            &client,
            "test.sleep",
            &format!("{SLEEP}, tenant => 't{tenant}'"),
        )
        .await;
    }
    let one = Override::default()
        .with("concurrency", 1_u32)
        .with("job_delay", Duration::from_millis(100));
    // The sweep would find each of them after a second or two.
    let settings = Settings {
        slots: 4,
        overrides: Overrides([("test.sleep".to_owned(), one)].into()),
        ..without_sweeps()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let ran = "SELECT count(*) FROM rouse.finished WHERE state = 'succeeded'";
    assert_eq!(number(&client, ran).await, 20);
    let took = number(&client, RAN_FOR_MS).await;
    assert!((1_900..15_000).contains(&took), "19 delays: {took} ms");
}
