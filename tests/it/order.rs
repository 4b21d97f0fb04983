//! The order in which a worker takes waiting jobs.

mod orphans;

use std::time::Duration;

use rouse::worker::Settings;
use tokio_postgres::Client;

use crate::support::worker::{
    START_ORDER, TIMEOUT, TestWorker, guests_dir, run_all_in_one_slot, until_true,
};
use crate::support::{Host, TestDb, scratch};

#[tokio::test]
async fn high_priority_goes_first_and_within_a_lane_the_oldest_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut expected = Vec::new();
    for priority in ["low", "normal", "high"] {
        let mut ids = Vec::new();
        for handler in ["test.sleep", "test.race", "test.sleep"] {
            let row = client
                .query_one(
                    "SELECT rouse.enqueue($1, '{\"ms\": 20}', priority => $2)",
                    &[&handler, &priority],
                )
                .await
                .unwrap();
            ids.push(row.get::<_, i64>(0));
        }
        expected.splice(0..0, ids);
    }
    run_all_in_one_slot(&db, &client).await;
    let rows = client
        .query(
            &format!(
                "SELECT id, priority::text, handler, claimed_at::text, started_at::text FROM rouse.jobs ORDER BY {START_ORDER}"
            ),
            &[],
        )
        .await
        .unwrap();
    let priorities: Vec<String> = rows.iter().map(|row| row.get(1)).collect();
    let starts: Vec<[String; 4]> = rows
        .iter()
        .map(|row| [1, 2, 3, 4].map(|column| row.get(column)))
        .collect();
    assert_eq!(
        priorities,
        [
            "high", "high", "high", "normal", "normal", "normal", "low", "low", "low"
        ],
        "{starts:#?}"
    );
    let first: i64 = rows[0].get(0);
    assert_eq!(first, expected[0], "{starts:#?}");
    for lane in rows.chunk_by(|one, other| one.get::<_, String>(1) == other.get::<_, String>(1)) {
        for handler in ["test.sleep", "test.race"] {
            let of_lane = lane.iter().filter(|row| row.get::<_, String>(2) == handler);
            assert!(
                of_lane.map(|row| row.get::<_, i64>(0)).is_sorted(),
                "{handler}"
            );
        }
    }
}

/// Queues and handlers do not have to wait for the older jobs of other queues and handlers.
#[tokio::test]
async fn a_short_lane_has_its_turns_alongside_a_long_older_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            r#"SELECT rouse.enqueue_many('test.sleep', array_fill('{"ms": 1}'::jsonb, ARRAY[900]), priority => 'low');
               SELECT rouse.enqueue_many('test.sleep', array_fill('{"ms": 1}'::jsonb, ARRAY[50]), queue => 'other', priority => 'low');
               SELECT rouse.enqueue_many('test.race', array_fill('{}'::jsonb, ARRAY[50]), queue => 'other', priority => 'low');"#,
        )
        .await
        .unwrap();
    run_all_in_one_slot(&db, &client).await;
    // The queues take turns, and within the queue `other`, so do its handlers: every other job is one of this queue,
    // every fourth one of each handler. A claim takes its share of one lane, and then its share of the next lane. The
    // first claims take whole lanes in the order in which they were found.
    let rows = client
        .query(
            &format!(
                "SELECT claimed_at::text, queue, handler FROM rouse.jobs ORDER BY {START_ORDER}"
            ),
            &[],
        )
        .await
        .unwrap();
    let starts: Vec<[String; 3]> = rows
        .iter()
        .map(|row| [0, 1, 2].map(|column| row.get(column)))
        .collect();
    for handler in ["test.sleep", "test.race"] {
        let (mut all, mut own) = (0, 0);
        for claim in starts.chunk_by(|one, other| one[0] == other[0]) {
            all += claim.len();
            own += claim
                .iter()
                .filter(|start| start[1] == "other" && start[2] == handler)
                .count();
            assert!(
                own == 50 || own + 16 >= all / 4,
                "{own} of {all} jobs are of {handler}: {starts:?}"
            );
        }
        assert_eq!(own, 50);
    }
}

/// Enqueues this many jobs of this priority, each of which takes this long.
async fn flood(client: &Client, priority: &str, jobs: i32, ms: i32) {
    client
        .execute(
            "SELECT rouse.enqueue_many('test.sleep', array_fill(jsonb_build_object('ms', $1::int), ARRAY[$2::int]), priority => $3)",
            &[&ms, &jobs, &priority],
        )
        .await
        .unwrap();
}

/// Runs 2,000 high jobs, followed by 20 normal and 20 low ones, until those 40 have run; jobs go ahead after two
/// seconds.
async fn run_flood(db: &TestDb, promote_share: u8) -> Flooded {
    let client = db.client().await;
    flood(&client, "high", 2000, 20).await;
    flood(&client, "normal", 20, 1).await;
    flood(&client, "low", 20, 1).await;
    let patient = Settings {
        slots: 4,
        promote_after: Some(Duration::from_secs(2)),
        promote_share,
        ..Settings::default()
    };
    let worker = TestWorker::start(db, patient).await;
    until_true(
        &client,
        "SELECT NOT EXISTS (SELECT FROM rouse.jobs WHERE priority <> 'high' AND finished_at IS NULL)",
    )
    .await;
    worker.stop_now().await;
    let row = client
        .query_one(
            "WITH others AS (
                 SELECT min(claimed_at) AS first, max(claimed_at) AS last, min(claimed_at - requested_at) AS waited,
                        min(requested_at) + interval '2 s' AS overdue
                 FROM rouse.jobs WHERE priority <> 'high')
             SELECT count(*) FILTER (WHERE claimed_at IS NULL OR claimed_at > others.last),
                    count(*) FILTER (WHERE claimed_at > others.first AND claimed_at < others.last),
                    count(*) FILTER (WHERE claimed_at BETWEEN others.first AND others.last),
                    count(*) FILTER (WHERE claimed_at > others.overdue AND claimed_at < others.first),
                    min(extract(epoch FROM others.waited))::float8
             FROM rouse.jobs, others WHERE priority = 'high'",
            &[],
        )
        .await
        .unwrap();
    let high_left: i64 = row.get(0);
    assert!(high_left > 0, "a job of higher priority was always ready");
    let shortest: f64 = row.get(4);
    assert!(shortest >= 2.0, "none went ahead too early: {shortest}");
    Flooded {
        between: row.get(1),
        beside: row.get(2),
        late: row.get(3),
    }
}

struct Flooded {
    /// High jobs that were claimed among the 40, except those of their first and last claims.
    between: i64,
    /// High jobs that were claimed among the 40 or together with them.
    beside: i64,
    /// High jobs that were claimed before the first of the 40, although that job had waited for two seconds.
    late: i64,
}

#[tokio::test]
async fn a_flood_of_high_jobs_delays_normal_and_low_ones_no_longer_than_the_setting() {
    let db = TestDb::new().await;
    let Flooded { between, late, .. } = run_flood(&db, 100).await;
    assert_eq!(between, 0, "all claims go to overdue jobs");
    // At most as many as two claims take: a worker that checks once a second claims up to 200 jobs before the first
    // check.
    assert!(
        late <= 60,
        "{late} high jobs ran before the first overdue job"
    );
}

#[tokio::test]
async fn with_a_share_of_half_new_high_jobs_run_next_to_overdue_ones() {
    let db = TestDb::new().await;
    // The claims are few and large: without the first and the last claim, half of the jobs may be missing.
    let Flooded { beside, .. } = run_flood(&db, 50).await;
    assert!(
        (20..=3 * 40).contains(&beside),
        "{beside} high jobs ran beside the 40 overdue ones"
    );
}

#[tokio::test]
async fn without_promotion_a_flood_of_high_jobs_delays_all_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    flood(&client, "high", 100, 20).await;
    flood(&client, "low", 1, 1).await;
    client
        .batch_execute("UPDATE rouse.job SET available_at = now() - interval '1 day'")
        .await
        .unwrap();
    let strict = Settings {
        slots: 1,
        promote_after: None,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, strict).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let rows = client
        .query(
            &format!("SELECT priority::text FROM rouse.jobs ORDER BY {START_ORDER}"),
            &[],
        )
        .await
        .unwrap();
    assert_eq!(rows.last().unwrap().get::<_, &str>(0), "low");
}

#[tokio::test]
async fn a_worker_that_cannot_query_overdue_jobs_keeps_working() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE OR REPLACE FUNCTION rouse.overdue(
                 p_lanes bigint[], p_cursors bigint[], p_wait_ms bigint, p_ahead_ms bigint, p_max integer)
             RETURNS TABLE (lane bigint, in_ms bigint, jobs integer) LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not now'; END $$",
        )
        .await
        .unwrap();
    flood(&client, "high", 400, 20).await;
    flood(&client, "low", 1, 1).await;
    let guests = guests_dir();
    let url = db.url();
    let args = ["serve", "--http", "off", "--slots", "1", "--handlers"];
    let args: Vec<&str> = args.into_iter().chain(guests.to_str()).collect();
    let host = Host::rouse(&args, &[("DATABASE_URL", url.as_str())]);
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(TIMEOUT);
    let failures = output.matches("cannot find overdue jobs").count();
    assert!(failures > 1, "{output}");
    assert!(!output.contains("cannot claim"), "{output}");
}

#[tokio::test]
async fn a_worker_serves_its_queues_in_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for queue in ["third", "second", "first"] {
        for handler in ["test.sleep", "test.race"] {
            client
                .query(
                    "SELECT rouse.enqueue($1, '{\"ms\": 20}', queue => $2)",
                    &[&handler, &queue],
                )
                .await
                .unwrap();
        }
    }
    let ordered = Settings {
        slots: 1,
        queues: ["first", "second", "third"].map(String::from).to_vec(),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, ordered).await;
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
    let rows = client
        .query(
            &format!("SELECT queue FROM rouse.jobs ORDER BY {START_ORDER}"),
            &[],
        )
        .await
        .unwrap();
    let queues: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
    assert_eq!(
        queues,
        ["first", "first", "second", "second", "third", "third"]
    );
}

/// Overdue jobs go ahead of jobs of their own queue only.
#[tokio::test]
async fn with_strict_queues_an_earlier_queue_goes_first_regardless_of_priorities() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (queue, priority, jobs) in [
        ("second", "high", 20),
        ("first", "low", 300),
        ("first", "normal", 20),
    ] {
        client
            .execute(
                "SELECT rouse.enqueue_many('test.sleep', array_fill('{\"ms\": 5}'::jsonb, ARRAY[$3::int]), queue => $1, priority => $2)",
                &[&queue, &priority, &jobs],
            )
            .await
            .unwrap();
    }
    let folder = scratch("strict");
    std::fs::write(folder.join("rouse.toml"), "promote_after = \"500ms\"\n").unwrap();
    let (guests, url) = (guests_dir(), db.url());
    let config = folder.join("rouse.toml");
    let args = [
        "serve", "--http", "off", "--slots", "1", "--queue", "first", "--queue", "second",
    ];
    let more = [
        "--queue-order",
        "strict",
        "--config",
        config.to_str().unwrap(),
        "--handlers",
    ];
    let args: Vec<&str> = args
        .into_iter()
        .chain(more)
        .chain(guests.to_str())
        .collect();
    let host = Host::rouse(&args, &[("DATABASE_URL", url.as_str())]);
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    host.signal(libc::SIGTERM);
    host.exit(TIMEOUT);
    let row = client
        .query_one(
            "WITH first AS (SELECT max(claimed_at) FILTER (WHERE priority = 'normal') AS normal, max(claimed_at) AS last,
                                   max(claimed_at - requested_at) AS waited
                            FROM rouse.jobs WHERE queue = 'first')
             SELECT count(*) FILTER (WHERE queue = 'second' AND claimed_at < first.last),
                    count(*) FILTER (WHERE queue = 'first' AND priority = 'low' AND claimed_at < first.normal
                                     AND claimed_at - requested_at < interval '500 ms'),
                    bool_and(first.waited > interval '1 s')
             FROM rouse.jobs, first",
            &[],
        )
        .await
        .unwrap();
    let (overtaken, low_first, is_long): (i64, i64, bool) = (row.get(0), row.get(1), row.get(2));
    assert!(is_long, "jobs of the second queue became overdue meanwhile");
    assert_eq!(
        overtaken, 0,
        "no job of the second queue runs before the last of the first"
    );
    assert_eq!(low_first, 0, "by priority within a queue");
}

#[tokio::test]
async fn overdue_jobs_go_ahead_of_jobs_so_large_that_a_few_fill_a_claim() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 8388608);
             SELECT rouse.enqueue_many('test.sleep', array_fill(jsonb_build_object('ms', 200, 'pad', repeat('x', 1048576)), ARRAY[300]),
                 queue => 'wide', priority => 'high')",
        )
        .await
        .unwrap();
    flood(&client, "low", 1, 1).await;
    let patient = Settings {
        slots: 16,
        promote_after: Some(Duration::from_secs(1)),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, patient).await;
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.finished AS f JOIN rouse.lane AS l ON l.id = f.lane WHERE l.priority = 'low')",
    )
    .await;
    worker.stop_now().await;
    let left: i64 = client
        .query_one(
            "SELECT count(*) FILTER (WHERE j.claimed_at IS NULL OR j.claimed_at > low.claimed_at)
             FROM rouse.jobs AS j, (SELECT claimed_at FROM rouse.jobs WHERE priority = 'low') AS low
             WHERE j.priority = 'high'",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert!(left > 16, "it ran with {left} high jobs left");
}
