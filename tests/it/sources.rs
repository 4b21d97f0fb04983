//! Sources bound to handlers: the handler is chosen by the source that triggered a job, whatever handler its producer
//! named.

use std::time::{Duration, Instant};

use rouse::http::install_metrics;
use rouse::worker::{Health, Intervals, Override, Overrides, Settings};
use serde_json::json;
use tokio_postgres::Client;

use crate::sandbox_guest::{echo, guest_that, manifest};
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    START_ORDER, TestWorker, cancel, catalog, ended, enqueue, enqueue_sql, guests_dir, sandbox,
    show, until, until_in_hand, until_true, watched,
};
use crate::support::{Host, TestDb, command, folder_of};

/// Settings of a consumer that binds these sources to handlers.
fn binding(sources: &[(&str, &str)]) -> Settings {
    let bind = |(source, handler): &(&str, &str)| ((*source).to_owned(), (*handler).to_owned());
    Settings {
        sources: sources.iter().map(bind).collect(),
        ..Settings::default()
    }
}

/// Binds the source `legacy` to a handler of the consumer's own.
const LEGACY: &[(&str, &str)] = &[("legacy", "test.echo")];

/// Enqueues for a handler that no host has.
async fn enqueue_unserved(client: &Client, rest: &str) -> i64 {
    let sql = format!("SELECT rouse.enqueue('producers.own', '{{}}'{rest})");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_consumer_can_bind_a_source_to_its_own_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, binding(LEGACY)).await;
    let job = enqueue_sql(&client, "'noop', source => 'legacy'").await;
    let job = ended(&client, job).await;
    assert_eq!(job.result.unwrap()["handler"], "test.echo");
    worker.drain().await;
}

#[tokio::test]
async fn jobs_bound_to_a_missing_handler_wait_at_little_cost_and_lose_no_attempts() {
    let metrics = install_metrics().unwrap();
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, folder) = watched(&["noop.wasm"]).await;
    let bound = Settings {
        slots: 4,
        ..binding(&[("cron", "text.stats")])
    };
    client
        .execute(
            "SELECT rouse.enqueue_many('noop', array_fill('{\"text\": \"one two\"}'::jsonb, ARRAY[30]), source => 'cron')",
            &[],
        )
        .await
        .unwrap();
    let behind = enqueue(&client, "noop", json!({"n": 1})).await;
    let started = Instant::now();
    let worker = TestWorker::start_on(&db, bound, catalog);
    assert_eq!(ended(&client, behind).await.state, "succeeded");
    // Each of these jobs takes a few looks.
    for _ in 0..50 {
        let other = enqueue_sql(&client, r#"'noop', '{"n": 2}', queue => 'other'"#).await;
        ended(&client, other).await;
    }
    until_true(
        &client,
        "SELECT count(*) FILTER (WHERE state = 'queued' AND attempt = 0) = 30 FROM rouse.job",
    )
    .await;
    let counts = "SELECT (SELECT count(*) FROM rouse.attempt), (SELECT count(*) FROM rouse.record WHERE event = 'released')";
    let row = client.query_one(counts, &[]).await.unwrap();
    let (attempts, released): (i64, i64) = (row.get(0), row.get(1));
    assert_eq!(attempts, 0);
    // On a slow machine, the pause of the lane ends meanwhile, after ten seconds.
    let rounds = i64::try_from(started.elapsed().as_secs() / 10).unwrap() + 1;
    assert!(
        (30..100 * rounds).contains(&released),
        "{released} claims were released"
    );

    let late = folder.path().join("text_stats.wasm");
    std::fs::copy(guests_dir().join("text_stats.wasm"), late).unwrap();
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let row = client
        .query_one(
            "SELECT count(*), max(attempt) FROM rouse.finished WHERE source = 'cron' AND state = 'succeeded' AND result ? 'words'",
            &[],
        )
        .await
        .unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i32>(1)), (30, 1));
    // The metrics name the handler that the operator chose, and not that of the producer.
    let (_, page) = metrics.render(None);
    let counted = "rouse_attempts_total{handler=\"text.stats\",outcome=\"released\"} ";
    let counted = page.lines().find_map(|line| line.strip_prefix(counted));
    let counted: i64 = counted.unwrap().parse().unwrap();
    assert!(counted >= released, "{counted} of {released} in {page}");
}

/// Each claim is for a few jobs, and these lanes take turns with others until they are paused.
#[tokio::test]
async fn paused_lanes_of_bound_jobs_leave_the_slots_to_other_lanes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, _folder) = watched(&["noop.wasm"]).await;
    client
        .batch_execute(
            "SELECT rouse.set_fair_share('mail', policy => 'drr');
             SELECT rouse.enqueue('noop', queue => 'mail', tenant => 't' || n, source => 'cron') FROM generate_series(1, 30) AS n;
             SELECT rouse.enqueue_many('noop', array_fill('{\"n\": 1}'::jsonb, ARRAY[500]), queue => 'mail', tenant => 'busy')",
        )
        .await
        .unwrap();
    let bound = Settings {
        slots: 4,
        ..binding(&[("cron", "text.stats")])
    };
    let worker = TestWorker::start_on(&db, bound, catalog);
    until_true(
        &client,
        "SELECT count(*) = 500 FROM rouse.finished WHERE state = 'succeeded' AND tenant = 'busy'",
    )
    .await;
    worker.drain().await;
    let waiting =
        "SELECT count(*) FROM rouse.job WHERE state = 'queued' AND attempt = 0 AND source = 'cron'";
    let waiting: i64 = client.query_one(waiting, &[]).await.unwrap().get(0);
    assert_eq!(waiting, 30);
}

#[tokio::test]
async fn a_starting_host_takes_no_bound_job_before_its_handler_is_loaded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // This module takes a moment to describe itself; by then, the handler that the producer names is already loaded.
    let manifest = manifest("test.bound", "1");
    let describe = format!(
        "(local $n i32)
         (loop $again (br_if $again (i32.ne (i32.const 100000000)
            (local.tee $n (i32.add (local.get $n) (i32.const 1))))))
         (call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    let bound = guest_that(
        &describe,
        &manifest,
        "(call $return_ok (local.get $payload) (local.get $payload_len))",
    );
    let modules = [("a.wasm", echo("test.named", "1")), ("b.wasm", bound)];
    let folder = folder_of("[sources]\nlegacy = \"test.bound\"\n", &modules);
    let job = enqueue_sql(&client, "'test.named', source => 'legacy'").await;
    let url = db.url();
    let _host = Host::spawn(command(&url, &["serve", "--http", "off"], &folder));
    let job = ended(&client, job).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
}

#[tokio::test]
async fn a_bound_job_runs_on_a_host_without_the_handler_that_its_producer_named() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let before = enqueue_unserved(&client, ", source => 'legacy'").await;
    let others = [
        enqueue_unserved(&client, "").await,
        enqueue_unserved(&client, ", source => 'other'").await,
    ];
    let worker = TestWorker::start(&db, binding(LEGACY)).await;
    let later = enqueue_unserved(
        &client,
        ", source => 'legacy', priority => 'high', run_at => now() + interval '1 second'",
    )
    .await;
    for id in [before, later] {
        let job = ended(&client, id).await;
        assert_eq!(job.result.unwrap()["handler"], "test.echo");
    }
    // In a new lane, while the worker sleeps.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let new = enqueue_unserved(&client, ", source => 'legacy', queue => 'new'").await;
    ended(&client, new).await;
    worker.drain().await;
    for id in others {
        let job = show(&client, id).await;
        assert_eq!((job.state.as_str(), job.attempt), ("queued", 0));
    }
}

/// The searches by source start after the jobs that were claimed before.
#[tokio::test]
async fn a_bound_job_that_is_committed_late_is_found_without_a_notification() {
    let db = TestDb::new().await;
    let (mut producer, client) = (db.client().await, db.client().await);
    let transaction = producer.transaction().await.unwrap();
    let late = "SELECT rouse.enqueue('producers.own', '{}', source => 'legacy')";
    let late: i64 = transaction.query_one(late, &[]).await.unwrap().get(0);
    let settings = Settings {
        notify: false,
        ..binding(LEGACY)
    };
    let worker = TestWorker::start(&db, settings).await;
    for _ in 0..2 {
        let job = enqueue_unserved(&client, ", source => 'legacy'").await;
        ended(&client, job).await;
    }
    transaction.commit().await.unwrap();
    ended(&client, late).await;
    worker.drain().await;
}

/// The searches have found no job of the source in its lane, and continue after a turn that is later than that of the
/// job.
#[tokio::test]
async fn a_bound_job_that_is_committed_late_is_found_where_its_source_had_no_job() {
    let db = TestDb::new().await;
    let (mut producer, client) = (db.client().await, db.client().await);
    let other = enqueue_unserved(&client, ", source => 'other', queue => 'late'").await;
    let transaction = producer.transaction().await.unwrap();
    let late = "SELECT rouse.enqueue('producers.own', '{}', source => 'legacy', queue => 'late')";
    let late: i64 = transaction.query_one(late, &[]).await.unwrap().get(0);
    let settings = Settings {
        notify: false,
        intervals: Intervals {
            sweep: Duration::from_millis(5),
            ..Intervals::default()
        },
        ..binding(LEGACY)
    };
    let worker = TestWorker::start(&db, settings).await;
    // Each of these jobs takes a few looks.
    for _ in 0..5 {
        let job = enqueue_unserved(&client, ", source => 'legacy'").await;
        ended(&client, job).await;
    }
    transaction.commit().await.unwrap();
    ended(&client, late).await;
    worker.drain().await;
    assert_eq!(show(&client, other).await.state, "queued");
}

/// Nothing but notifications wakes the worker. The last search from the start of the lanes was a moment ago.
#[tokio::test]
async fn a_bound_job_that_is_committed_late_is_found_by_its_notification() {
    let db = TestDb::new().await;
    let (mut producer, client) = (db.client().await, db.client().await);
    let transaction = producer.transaction().await.unwrap();
    let late = "SELECT rouse.enqueue('producers.own', '{}', source => 'legacy')";
    let late: i64 = transaction.query_one(late, &[]).await.unwrap().get(0);
    let worker = TestWorker::start(&db, one_at_a_time(LEGACY)).await;
    until_true(&client, WORKER_SLEEPS).await;
    let later = enqueue_unserved(&client, ", source => 'legacy'").await;
    ended(&client, later).await;
    until_true(&client, WORKER_SLEEPS).await;
    transaction.commit().await.unwrap();
    ended(&client, late).await;
    worker.drain().await;
}

#[tokio::test]
async fn bound_jobs_of_a_paused_queue_or_with_missing_tags_wait() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.pause_queue('mail')")
        .await
        .unwrap();
    let paused = enqueue_unserved(&client, ", source => 'legacy', queue => 'mail'").await;
    let tagged = enqueue_unserved(&client, ", source => 'legacy', tags => '{gpu}'").await;
    let free = enqueue_unserved(&client, ", source => 'legacy'").await;
    let worker = TestWorker::start(&db, binding(LEGACY)).await;
    ended(&client, free).await;
    assert_eq!(show(&client, paused).await.attempt, 0);
    client
        .batch_execute("SELECT rouse.resume_queue('mail')")
        .await
        .unwrap();
    ended(&client, paused).await;
    worker.drain().await;
    assert_eq!(show(&client, tagged).await.attempt, 0);
}

#[tokio::test]
async fn bound_jobs_and_other_jobs_do_not_starve_each_other() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let flood = async |handler: &str, source: Option<&str>| {
        client
            .execute(
                "SELECT rouse.enqueue_many($1, array_fill('{\"ms\": 5}'::jsonb, ARRAY[300]), source => $2)",
                &[&handler, &source],
            )
            .await
            .unwrap();
    };
    flood("test.sleep", None).await;
    flood("producers.own", Some("legacy")).await;
    let settings = Settings {
        slots: 1,
        ..binding(&[("legacy", "test.sleep")])
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT count(*) > 200 FROM rouse.finished").await;
    worker.stop_now().await;
    let row = client
        .query_one(
            "SELECT count(*) FILTER (WHERE source IS NULL), count(*) FILTER (WHERE source = 'legacy')
             FROM (SELECT source FROM rouse.finished ORDER BY started_at LIMIT 200) AS first",
            &[],
        )
        .await
        .unwrap();
    let (own, bound): (i64, i64) = (row.get(0), row.get(1));
    assert!(own > 50 && bound > 50, "{own} own, {bound} bound");
}

#[tokio::test]
async fn bound_jobs_respect_priorities_and_sources_do_not_starve_each_other() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('producers.own', array_fill('{\"ms\": 5}'::jsonb, ARRAY[200]), source => 'flood');
             SELECT rouse.enqueue_many('producers.own', array_fill('{\"ms\": 5}'::jsonb, ARRAY[3]), source => 'rare');
             SELECT rouse.enqueue_many('producers.own', array_fill('{\"ms\": 5}'::jsonb, ARRAY[3]), source => 'rare', priority => 'high')",
        )
        .await
        .unwrap();
    let settings = Settings {
        slots: 1,
        ..binding(&[("flood", "test.sleep"), ("rare", "test.sleep")])
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT count(*) > 100 FROM rouse.finished").await;
    worker.stop_now().await;
    let row = client
        .query_one(
            &format!(
                "SELECT max(place) FILTER (WHERE priority = 'high'), max(place) FILTER (WHERE source = 'rare'), count(*) FILTER (WHERE source = 'rare')
                 FROM (SELECT priority, source, row_number() OVER (ORDER BY {START_ORDER}) AS place FROM rouse.jobs WHERE started_at IS NOT NULL) AS j"
            ),
            &[],
        )
        .await
        .unwrap();
    let (high, rare, count): (i64, i64, i64) = (row.get(0), row.get(1), row.get(2));
    assert_eq!((high, count), (3, 6));
    assert!(
        rare <= 60,
        "the last job of the rare source was number {rare}"
    );
}

#[tokio::test]
async fn only_the_bound_job_in_the_lane_of_a_dead_worker_is_adopted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let bound = enqueue_unserved(&client, ", source => 'legacy'").await;
    let unbound = enqueue_unserved(&client, ", source => 'other'").await;
    // A crashed worker leaves them in this state.
    client
        .execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1,
                claimed_at = now() - interval '2 min', lease_until = now() - interval '1 min'",
            &[],
        )
        .await
        .unwrap();
    let worker = TestWorker::start(&db, binding(LEGACY)).await;
    let job = ended(&client, bound).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    let after = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, after).await;
    worker.drain().await;
    let job = show(&client, unbound).await;
    assert_eq!((job.state.as_str(), job.attempt), ("running", 1));
}

#[tokio::test]
async fn a_lost_job_is_counted_for_the_handler_to_which_its_source_is_bound() {
    let metrics = install_metrics().unwrap();
    let db = TestDb::new().await;
    let client = db.client().await;
    let lost = enqueue_sql(&client, "'producers.lost', source => 'legacy'").await;
    // A crashed worker leaves it in this state.
    client
        .execute(
            "UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = -1,
                claimed_at = now() - interval '2 min', lease_until = now() - interval '1 min'",
            &[],
        )
        .await
        .unwrap();
    let settings = Settings {
        lost_max: 1,
        ..binding(&[("legacy", "test.sleep")])
    };
    let worker = TestWorker::start(&db, settings).await;
    assert_eq!(ended(&client, lost).await.state, "failed");
    worker.drain().await;
    let (_, page) = metrics.render(None);
    let counted = "rouse_jobs_lost_total{handler=\"test.sleep\",next=\"failed\"} ";
    assert!(page.contains(counted), "{page}");
    let invented = "rouse_jobs_lost_total{handler=\"producers.lost\"";
    assert!(!page.contains(invented), "{page}");
}

/// Settings of a worker that runs at most one `test.wait-abort` and one `test.race`, and is woken only by notifications
/// and ends of jobs.
fn one_at_a_time(sources: &[(&str, &str)]) -> Settings {
    let never = Duration::from_secs(600);
    let one = |handler: &str| {
        let one = Override::default().with("concurrency", 1_u32);
        (handler.to_owned(), one)
    };
    Settings {
        slots: 4,
        overrides: Overrides([one("test.wait-abort"), one("test.race")].into()),
        poll_min: never,
        poll_max: never,
        intervals: Intervals {
            sweep: never,
            restart: never,
            restart_max: never,
            ..Intervals::default()
        },
        ..binding(sources)
    }
}

/// Whether a worker has found that there is currently nothing to do, for [`until_true`].
const WORKER_SLEEPS: &str =
    "SELECT EXISTS (SELECT FROM rouse.sleeper WHERE until > clock_timestamp())";

/// Whether a statement has waited for a lock for a second, for [`until_true`].
const HAS_WAITED: &str =
    "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
     AND wait_event_type = 'Lock' AND query_start < clock_timestamp() - interval '1 second')";

/// A database with a gate, and a client.
async fn with_gate() -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT rouse.set_gate('many', 'max_concurrent', max => 100)")
        .await
        .unwrap();
    (db, client)
}

/// Enqueues this job while another transaction has locked the gate of [`with_gate`], and returns once a search has
/// waited for the gate for a second, and can continue.
async fn enqueue_during_a_long_search(db: &TestDb, job: &str) -> i64 {
    let (locker, client) = (db.client().await, db.client().await);
    locker
        .batch_execute("BEGIN; SELECT rouse._lock('gate', 'many')")
        .await
        .unwrap();
    let id = enqueue_sql(&client, job).await;
    until_true(&client, HAS_WAITED).await;
    locker.batch_execute("COMMIT").await.unwrap();
    id
}

/// The handler to which their source is bound has a `concurrency`, and its own jobs share that. The lane of the first
/// job is that of another handler. Nothing but the end of the first job wakes the worker.
#[tokio::test]
async fn the_end_of_a_bound_job_lets_the_next_one_of_its_handler_start() {
    for next in [
        "'producers.own', '{}', source => 'legacy'",
        "'test.wait-abort', '{}'",
    ] {
        let db = TestDb::new().await;
        let client = db.client().await;
        let first = enqueue_unserved(&client, ", source => 'legacy'").await;
        let next = enqueue_sql(&client, next).await;
        let settings = one_at_a_time(&[("legacy", "test.wait-abort")]);
        let worker = TestWorker::start(&db, settings).await;
        until(&client, first, |job| job.state == "running").await;
        until_true(&client, WORKER_SLEEPS).await;
        assert_eq!(show(&client, next).await.state, "queued");
        assert!(cancel(&client, first).await);
        until(&client, next, |job| job.state == "running").await;
        assert!(cancel(&client, next).await);
        worker.drain().await;
    }
}

/// The other handler may run one job and has none; may run one, and one runs while another is queued; or may run two,
/// and one runs.
#[tokio::test]
async fn a_handler_with_little_room_does_not_limit_the_claims_for_others() {
    let few = r#"'producers.own', '{"ms": 600000}', source => 'few'"#;
    for (concurrency, jobs) in [(1_u32, 0), (1, 2), (2, 1)] {
        let db = TestDb::new().await;
        let client = db.client().await;
        for _ in 0..jobs {
            enqueue_sql(&client, few).await;
        }
        let limit = Override::default().with("concurrency", concurrency);
        let settings = Settings {
            slots: 20,
            overrides: Overrides([("test.race".to_owned(), limit)].into()),
            ..binding(&[("few", "test.race"), ("many", "test.wait-abort")])
        };
        let worker = TestWorker::start(&db, settings).await;
        until_true(&client, WORKER_SLEEPS).await;
        let running = jobs.min(1);
        let running_of = |source: &str, count: i32| {
            format!(
                "SELECT count(*) = {count} FROM rouse.job WHERE state = 'running' AND source = '{source}'"
            )
        };
        until_true(&client, &running_of("few", running)).await;
        client
            .batch_execute(
                "SELECT rouse.enqueue_many('producers.own', array_fill('{}'::jsonb, ARRAY[20]), source => 'many')",
            )
            .await
            .unwrap();
        until_true(&client, &running_of("many", 20 - running)).await;
        // The jobs of a claim have the same time. A look that may find other jobs, too, sends two claims by source.
        let claims = "SELECT count(DISTINCT claimed_at) FROM rouse.job WHERE state = 'running' AND source = 'many'";
        let claims: i64 = client.query_one(claims, &[]).await.unwrap().get(0);
        assert!(claims <= 5, "{claims} claims for 20 jobs");
        until_true(&client, &running_of("few", running)).await;
        worker.stop_now().await;
    }
}

/// A search that finds nothing is not repeated for 20 times as long as it took. This one waits for a gate for a second.
#[tokio::test]
async fn a_long_search_for_other_sources_does_not_delay_the_next_job_of_a_full_handler() {
    let (db, client) = with_gate().await;
    let first = enqueue_unserved(&client, ", source => 'legacy'").await;
    let settings = one_at_a_time(&[("legacy", "test.wait-abort"), ("other", "test.echo")]);
    let worker = TestWorker::start(&db, settings).await;
    until(&client, first, |job| job.state == "running").await;
    until_true(&client, WORKER_SLEEPS).await;
    let next = "'producers.own', '{}', source => 'legacy'";
    let next = enqueue_during_a_long_search(&db, next).await;
    assert!(cancel(&client, first).await);
    until(&client, next, |job| job.state == "running").await;
    assert!(cancel(&client, next).await);
    worker.drain().await;
}

/// The search for the other source follows the end of that source's own job. It leaves out the source of the first job,
/// which ends during the search.
#[tokio::test]
async fn the_end_of_a_bound_job_during_a_search_for_other_sources_lets_the_next_one_start() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = enqueue_unserved(&client, ", source => 'legacy'").await;
    let other = r#"'producers.own', '{"ms": 600000}', source => 'other'"#;
    let other = enqueue_sql(&client, other).await;
    let next = enqueue_unserved(&client, ", source => 'legacy'").await;
    let proxy = Proxy::start(&db).await;
    let parts = proxy.parts(&db, sandbox(), catalog().await);
    let settings = one_at_a_time(&[("legacy", "test.wait-abort"), ("other", "test.race")]);
    let health = Health::default();
    let worker = TestWorker::start_with_health(parts, settings, health.clone());
    for id in [first, other] {
        until(&client, id, |job| job.state == "running").await;
    }
    // While the handlers of both sources are full, there is no search.
    until_true(&client, WORKER_SLEEPS).await;
    let search = proxy.hold("rouse.claim_bound(", Side::Statement);
    assert!(cancel(&client, other).await);
    search.caught().await;
    assert!(cancel(&client, first).await);
    until_in_hand(&health, 0).await;
    search.release();
    until(&client, next, |job| job.state == "running").await;
    assert!(cancel(&client, next).await);
    worker.drain().await;
}

/// The search for the other source waits for a gate for a second. Nothing but the new module wakes the worker.
#[tokio::test]
async fn a_long_search_for_other_sources_does_not_delay_the_jobs_of_a_new_handler() {
    let (db, client) = with_gate().await;
    let (catalog, folder) = watched(&["noop.wasm"]).await;
    let settings = one_at_a_time(&[("legacy", "text.stats"), ("other", "noop")]);
    let worker = TestWorker::start_on(&db, settings, catalog);
    until_true(&client, WORKER_SLEEPS).await;
    let text = r#"'producers.own', '{"text": "one two"}', source => 'legacy'"#;
    let bound = enqueue_during_a_long_search(&db, text).await;
    assert_eq!(show(&client, bound).await.state, "queued");
    let late = folder.path().join("text_stats.wasm");
    std::fs::copy(guests_dir().join("text_stats.wasm"), late).unwrap();
    let job = ended(&client, bound).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    worker.drain().await;
}
