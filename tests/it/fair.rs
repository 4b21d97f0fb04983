//! Fair queues: keys share a queue by weight, whatever the number of their jobs.

mod lanes;
mod limits;
mod operators;
mod simulated;

use std::collections::BTreeMap;
use std::time::Duration;

use rouse::worker::{Intervals, Settings};
use tokio_postgres::Client;

use crate::support::database::refusal;
use crate::support::worker::{
    START_ORDER, TestWorker, guests_dir, run_all_in_one_slot, until_true,
};
use crate::support::{Host, TestDb};

/// Enqueues this many jobs of a tenant.
async fn enqueue(client: &Client, queue: &str, tenant: &str, handler: &str, ms: i32, jobs: i32) {
    client
        .execute(
            "SELECT rouse.enqueue_many($1, array_fill(jsonb_build_object('ms', $2::int), ARRAY[$3::int]), queue => $4, tenant => $5)",
            &[&handler, &ms, &jobs, &queue, &tenant],
        )
        .await
        .unwrap();
}

/// The tenants of the jobs that have started, in order.
async fn started(client: &Client) -> Vec<String> {
    let started = format!(
        "SELECT coalesce(tenant, '') FROM rouse.jobs WHERE claimed_at IS NOT NULL ORDER BY {START_ORDER}"
    );
    let rows = client.query(&started, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

fn count(tenants: &[String]) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    for tenant in tenants {
        *counts.entry(tenant.as_str()).or_default() += 1;
    }
    counts
}

/// A database in which queue `mail` is fair, with these further settings, and a client.
async fn fair(settings: &str) -> (TestDb, Client) {
    let db = TestDb::new().await;
    let client = db.client().await;
    let set = format!("SELECT rouse.set_fair_share('mail', policy => 'drr'{settings})");
    client.batch_execute(&set).await.unwrap();
    (db, client)
}

/// A worker with this many slots.
async fn worker(db: &TestDb, slots: usize) -> TestWorker {
    let settings = Settings {
        slots,
        ..Settings::default()
    };
    TestWorker::start(db, settings).await
}

#[tokio::test]
async fn a_tenant_has_its_turns_alongside_one_with_a_long_older_backlog() {
    let (db, client) = fair("").await;
    enqueue(&client, "mail", "long", "test.sleep", 1, 800).await;
    enqueue(&client, "mail", "short", "test.sleep", 1, 40).await;
    // The handlers of a tenant share its turns.
    enqueue(&client, "mail", "short", "test.race", 1, 40).await;
    run_all_in_one_slot(&db, &client).await;
    let started = started(&client).await;
    let places = started
        .iter()
        .enumerate()
        .filter(|(_, tenant)| *tenant == "short");
    for (n, (place, _)) in places.enumerate() {
        assert!(
            place <= 2 * n + 60,
            "job {n} of the tenant started as number {place}"
        );
    }
}

#[tokio::test]
async fn keys_share_by_weight_and_a_change_needs_no_restart() {
    let (db, client) = fair(r#", weights => '{"a": 3}'"#).await;
    for tenant in ["a", "b"] {
        enqueue(&client, "mail", tenant, "test.sleep", 5, 4000).await;
    }
    let worker = worker(&db, 2).await;
    until_true(&client, "SELECT count(*) >= 600 FROM rouse.finished").await;
    let before = started(&client).await;
    let counts = count(&before[100..500]);
    assert!((290..=310).contains(&counts["a"]), "3:1 of 400: {counts:?}");
    client
        .batch_execute(r#"SELECT rouse.set_fair_share('mail', weights => '{"b": 4}')"#)
        .await
        .unwrap();
    // Until the change shows: of 40 jobs, the first tenant had 30 before, and has 8 after it.
    loop {
        let started = started(&client).await;
        let last = &started[started.len() - 40..];
        if count(last).get("a").is_none_or(|jobs| *jobs <= 12) {
            break;
        }
        assert!(started.len() < 4500, "the change had no effect");
        tokio::task::yield_now().await;
    }
    let from = started(&client).await.len();
    until_true(
        &client,
        &format!("SELECT count(*) >= {from} + 450 FROM rouse.jobs WHERE claimed_at IS NOT NULL"),
    )
    .await;
    worker.stop_now().await;
    let after = started(&client).await;
    let counts = count(&after[from + 100..from + 400]);
    assert!((230..=250).contains(&counts["b"]), "4:1 of 300: {counts:?}");
}

#[tokio::test]
async fn the_shares_are_kept_on_three_hosts_and_after_one_of_them_has_died() {
    let (db, client) = fair(r#", weights => '{"a": 3}'"#).await;
    let guests = guests_dir();
    let args = ["serve", "--http", "off", "--slots", "2", "--handlers"];
    let args: Vec<&str> = args.into_iter().chain(guests.to_str()).collect();
    let mut hosts: Vec<Host> = (0..3)
        .map(|_| Host::rouse(&args, &[("DATABASE_URL", &db.url())]))
        .collect();
    until_true(
        &client,
        "SELECT count(DISTINCT worker_id) = 3 FROM rouse.handlers WHERE handler = 'test.sleep'",
    )
    .await;
    // All jobs are enqueued at once: hosts that see only the first tenant give it everything.
    client.batch_execute("BEGIN").await.unwrap();
    for tenant in ["a", "b"] {
        enqueue(&client, "mail", tenant, "test.sleep", 5, 4000).await;
    }
    client.batch_execute("COMMIT").await.unwrap();
    until_true(&client, "SELECT count(*) >= 1200 FROM rouse.finished").await;
    hosts.remove(0).kill();
    let from = started(&client).await.len();
    until_true(
        &client,
        &format!("SELECT count(*) >= {from} + 1000 FROM rouse.jobs WHERE claimed_at IS NOT NULL"),
    )
    .await;
    for host in hosts {
        host.kill();
    }
    let started = started(&client).await;
    for part in [&started[300..1100], &started[from..from + 800]] {
        let counts = count(part);
        assert!((570..=630).contains(&counts["a"]), "3:1 of 800: {counts:?}");
    }
}

#[tokio::test]
async fn keys_share_the_cpu_if_the_queue_charges_it() {
    let (db, client) = fair(r#", charge => 'cpu', weights => '{"light": 2}'"#).await;
    for (tenant, rounds, jobs) in [("heavy", 4_000_000_i64, 400), ("light", 1_000_000, 3000)] {
        client
            .execute(
                "SELECT rouse.enqueue_many('test.burn', array_fill(jsonb_build_object('rounds', $1::bigint), ARRAY[$2::int]), queue => 'mail', tenant => $3)",
                &[&rounds, &jobs, &tenant],
            )
            .await
            .unwrap();
    }
    let worker = worker(&db, 1).await;
    until_true(&client, "SELECT count(*) >= 2200 FROM rouse.finished").await;
    worker.stop_now().await;
    let used = "SELECT sum(cpu_us) FILTER (WHERE tenant = 'light')::float8 / sum(cpu_us) FILTER (WHERE tenant = 'heavy')::float8,
                       count(*) FILTER (WHERE tenant = 'heavy')
                FROM (SELECT * FROM rouse.finished WHERE cpu_us IS NOT NULL ORDER BY claimed_at, id OFFSET 100 LIMIT 2000) AS f";
    let row = client.query_one(used, &[]).await.unwrap();
    let (ratio, heavy): (f64, i64) = (row.get(0), row.get(1));
    // Counted by jobs, it would be 2:4.
    assert!(
        (1.8..2.2).contains(&ratio),
        "{ratio} with {heavy} heavy jobs of 2000"
    );
}

/// Nobody notifies a busy worker: it finds the first job of a tenant by searching the newest jobs.
#[tokio::test]
async fn the_first_job_of_a_tenant_starts_soon_while_another_tenant_floods_the_queue() {
    let (db, client) = fair("").await;
    enqueue(&client, "mail", "flood", "test.sleep", 5, 3000).await;
    let worker = worker(&db, 2).await;
    until_true(&client, "SELECT count(*) >= 200 FROM rouse.finished").await;
    for nth in 0..8 {
        // In the second half of these rounds, the lane is known, and empty.
        enqueue(
            &client,
            "mail",
            &format!("cold{}", nth % 4),
            "test.sleep",
            5,
            1,
        )
        .await;
        let ended =
            format!("SELECT count(*) > {nth} FROM rouse.finished WHERE tenant LIKE 'cold%'");
        until_true(&client, &ended).await;
    }
    worker.stop_now().await;
    // For each job, the number of jobs of the flood that started between its enqueue and its start.
    let overtaken = "
        SELECT count(f.id) FROM rouse.jobs AS c
        LEFT JOIN rouse.jobs AS f ON f.tenant = 'flood' AND f.started_at BETWEEN c.requested_at AND c.started_at
        WHERE c.tenant LIKE 'cold%' GROUP BY c.id ORDER BY c.id";
    let rows = client.query(overtaken, &[]).await.unwrap();
    let counts: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(counts.len(), 8);
    // About 400 jobs of the flood start within a second, after which the sweep would find the job, and about 40 wait in
    // line. One job of every four may have been delayed by a busy machine.
    for lanes in counts.chunks(4) {
        let late = lanes.iter().filter(|count| **count >= 60).count();
        assert!(late <= 1, "{counts:?}");
    }
}

/// The id of the job is assigned long before the job is visible.
#[tokio::test]
async fn the_first_job_of_a_tenant_starts_soon_if_its_transaction_was_open_during_many_searches() {
    let (db, client) = fair("").await;
    let mut producer = db.client().await;
    enqueue(&client, "mail", "flood", "test.sleep", 5, 4000).await;
    let settings = Settings {
        slots: 2,
        intervals: Intervals {
            look_back: Duration::from_secs(60),
            // The sweep is too rare to find the job.
            sweep: Duration::from_secs(600),
            ..Intervals::default()
        },
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let finished = async |jobs: i32| {
        let finished = format!("SELECT count(*) >= {jobs} FROM rouse.finished");
        until_true(&client, &finished).await;
    };
    finished(200).await;
    let transaction = producer.transaction().await.unwrap();
    let enqueue =
        "SELECT rouse.enqueue('test.sleep', '{\"ms\": 5}', queue => 'mail', tenant => 'cold')";
    transaction.execute(enqueue, &[]).await.unwrap();
    finished(400).await;
    transaction.commit().await.unwrap();
    let ended = "SELECT EXISTS (SELECT FROM rouse.finished WHERE tenant = 'cold')";
    until_true(&client, ended).await;
    let flood = "SELECT count(*) FROM rouse.finished WHERE tenant = 'flood'";
    let before: i64 = client.query_one(flood, &[]).await.unwrap().get(0);
    worker.stop_now().await;
    assert!(before < 2000, "after {before} jobs of the flood");
}

/// A claim covers about as many lanes as it wants jobs. A peek finds the locked jobs again and again.
#[tokio::test]
async fn the_jobs_of_a_tenant_start_although_those_of_many_others_are_locked() {
    let (db, client) = fair("").await;
    let tenants =
        "SELECT rouse.enqueue('noop', '{\"n\": 1}', queue => 'mail', tenant => $1::text || n)
                   FROM generate_series(1, $2::integer) AS n";
    for (prefix, count) in [("locked", 200), ("free", 12)] {
        client.execute(tenants, &[&prefix, &count]).await.unwrap();
    }
    let locker = db.client().await;
    locker
        .batch_execute("BEGIN; SELECT FROM rouse.job WHERE tenant LIKE 'locked%' FOR UPDATE")
        .await
        .unwrap();
    let worker = worker(&db, 2).await;
    until_true(
        &client,
        "SELECT count(*) = 12 FROM rouse.finished WHERE tenant LIKE 'free%'",
    )
    .await;
    locker.batch_execute("ROLLBACK").await.unwrap();
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
}

#[tokio::test]
async fn past_the_starvation_age_the_oldest_job_goes_first() {
    let (db, client) = fair(r#", weights => '{"slow": 0.001}', starvation => '1 minute'"#).await;
    enqueue(&client, "mail", "slow", "test.sleep", 1, 30).await;
    for tenant in ["fast", "faster"] {
        enqueue(&client, "mail", tenant, "test.sleep", 5, 1500).await;
    }
    let worker = worker(&db, 1).await;
    let wait_for = async |jobs: i32, slow: bool| {
        let ended = format!(
            "SELECT count(*) >= {jobs} FROM rouse.finished WHERE (tenant = 'slow') = {slow}"
        );
        until_true(&client, &ended).await;
    };
    wait_for(100, false).await;
    let before = started(&client).await;
    let slow = count(&before).get("slow").copied().unwrap_or(0);
    assert!(
        slow <= 2,
        "without promotion the others take the turns: {slow} jobs"
    );
    client
        .batch_execute(
            "UPDATE rouse.job SET available_at = available_at - interval '1 hour' WHERE tenant = 'slow' AND state = 'queued'",
        )
        .await
        .unwrap();
    wait_for(30, true).await;
    worker.stop_now().await;
    let others = started(&client).await.len() - 30;
    assert!(others < 1500, "{others} others went ahead");
}

#[tokio::test]
async fn settings_of_a_fair_queue_are_checked_and_recorded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (arguments, reason) in [
        ("policy => 'lifo'", "policy must be fifo or drr, not 'lifo'"),
        (
            "key => 'queue'",
            "key must be tenant, handler, source or tenant-and-handler, not 'queue'",
        ),
        ("quantum => 0", "quantum must be 1 to 1000, not 0"),
        (
            "weights => '[1]'",
            r#"weights must be an object such as {"acme": 3}, not [1]"#,
        ),
        (
            "default_weight => 0",
            "default_weight must be 0.001 to 1000, not 0",
        ),
        (
            "default_weight => 'NaN'",
            "default_weight must be 0.001 to 1000, not NaN",
        ),
        (
            "starvation => '-1 s'",
            "starvation must be 0 to 365 days, not -00:00:01",
        ),
        (
            "max_in_flight => -1",
            "max_in_flight must be 0 to 1000000, not -1",
        ),
    ] {
        let why = refusal(
            &client,
            &format!("SELECT rouse.set_fair_share('q', {arguments})"),
        )
        .await;
        assert!(
            why.contains(&format!("rouse.set_fair_share: {reason}")),
            "{arguments}: {why}"
        );
    }
    for weights in [
        r#"{"a": 0}"#,
        r#"{"a": "3"}"#,
        r#"{"a": 1001}"#,
        r#"{"a": null}"#,
        r#"{"": 1}"#,
    ] {
        let why = refusal(
            &client,
            &format!("SELECT rouse.set_fair_share('q', weights => '{weights}')"),
        )
        .await;
        assert!(
            why.contains("a number from 0.001 to 1000 for each key"),
            "{weights}: {why}"
        );
    }
    let why = refusal(&client, "SELECT rouse.set_fair_share('no queue')").await;
    assert!(why.contains("'no queue' is not a queue name"), "{why}");
    let set = "SELECT policy, key, quantum, weights::text, default_weight, starvation::text, max_in_flight FROM rouse.set_fair_share(";
    let row = client
        .query_one(
            &format!("{set}'q', 'drr', weights => '{{\"a\": 0.5}}', starvation => '90 s')"),
            &[],
        )
        .await
        .unwrap();
    let settings = |row: &tokio_postgres::Row| {
        (
            row.get::<_, String>(0),
            row.get::<_, String>(1),
            row.get::<_, i32>(2),
            row.get::<_, String>(3),
            row.get::<_, f64>(4),
            row.get::<_, String>(5),
            row.get::<_, i32>(6),
        )
    };
    let expected = |max_in_flight| {
        (
            "drr".into(),
            "tenant".into(),
            1,
            r#"{"a": 0.5}"#.into(),
            1.0,
            "00:01:30".into(),
            max_in_flight,
        )
    };
    assert_eq!(settings(&row), expected(0));
    let row = client
        .query_one(&format!("{set}'q', max_in_flight => 7)"), &[])
        .await
        .unwrap();
    assert_eq!(settings(&row), expected(7), "the others stay");
    client
        .batch_execute("SELECT rouse.set_fair_share('q')")
        .await
        .unwrap();
    let records: i64 = client
        .query_one(
            "SELECT count(*) FROM rouse.record WHERE event = 'fair_share_set' AND queue = 'q'",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(records, 2, "the last call has changed nothing");
    let shown: String = client
        .query_one(
            "SELECT fair_share ->> 'max_in_flight' FROM rouse.queues WHERE name = 'q'",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(shown, "7");
}
