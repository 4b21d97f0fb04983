//! The size of one claim, and how its result is sent.

use std::time::Duration;

use rouse::job::{Fence, LaneId};
use rouse::store::{BoundSearch, ClaimOrder, ClaimedJob, Locked, Store, WorkerKey};
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, lock_job, orders, rand, result, settlement};
use crate::support::database::registration;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{enqueue, enqueue_sql, until_true};

/// Makes four claims of at most 400 jobs each, and returns how many jobs each took. The first 20 jobs have this
/// payload, and the rest a small one.
async fn claims_of(payload: &str) -> Vec<usize> {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let enqueue = format!(
        "SELECT rouse.enqueue_many('x', array_fill({payload}, ARRAY[20]), queue => 'wide')"
    );
    client
        .batch_execute(&format!(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 67108864); {enqueue};
             SELECT rouse.enqueue_many('x', array_fill('{{}}'::jsonb, ARRAY[380]), queue => 'wide')"
        ))
        .await
        .unwrap();
    let mut claims = Vec::new();
    for _ in 0..4 {
        claims.push(claim(&store, 400).await.len());
    }
    claims
}

#[tokio::test]
async fn a_claim_stops_at_the_job_that_reaches_eight_mebibytes() {
    // Base64 of random bytes, which Postgres does not compress.
    let random = "to_jsonb((SELECT string_agg(encode(sha256(n::text::bytea), 'base64'), '')
                            FROM generate_series(1, 24000) AS n))";
    // 12 KiB in the table.
    let repeated = "to_jsonb(repeat('x', 1048576))";
    // A hundred bytes in the table.
    let numbers = "to_jsonb(array_fill(1e131071, ARRAY[8]))";
    for payload in [random, repeated, numbers] {
        assert_eq!(
            claims_of(payload).await,
            [8, 8, 384, 0],
            "1 MiB each: {payload}"
        );
    }
}

#[tokio::test]
async fn a_job_larger_than_the_claim_limit_is_claimed_alone() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 67108864);
             SELECT rouse.enqueue('x', to_jsonb(repeat('x', 67000000)), queue => 'wide') FROM generate_series(1, 2)",
        )
        .await
        .unwrap();
    for _ in 0..2 {
        assert_eq!(claim(&store, 400).await.len(), 1);
    }
}

/// The key of the worker for which [`enqueue_and_claim`] claims.
const KEY: [u8; 32] = [7; 32];

/// Enqueues and claims this many jobs with this payload; returns the numbers of rows, of ids, and of bytes of the
/// payloads in the rows.
async fn enqueue_and_claim(client: &Client, payload: &str, jobs: usize) -> (usize, usize, usize) {
    client
        .batch_execute(&format!(
            "SELECT rouse.enqueue('x', to_jsonb({payload})) FROM generate_series(1, {jobs})"
        ))
        .await
        .unwrap();
    let rows = client
        .query(
            "SELECT payload, unread FROM rouse.claim((SELECT max(incarnation) FROM rouse.worker), $2, $1,
                 ARRAY(SELECT ROW(id, 0, 60000, NULL, NULL)::rouse.claim_order FROM rouse.lane), 200)",
            &[&rand(), &KEY.as_slice()],
        )
        .await
        .unwrap();
    let payloads = rows.iter().filter_map(|row| row.get::<_, Option<&str>>(0));
    let bytes: usize = payloads.map(str::len).sum();
    let ids = rows
        .iter()
        .filter_map(|row| row.get::<_, Option<Vec<i64>>>(1));
    let ids: usize = ids.map(|ids| ids.len()).sum();
    (rows.len(), ids, bytes)
}

#[tokio::test]
async fn a_claim_of_128_kib_or_more_returns_only_ids_even_if_compressed_in_the_table() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = registration("w", WorkerKey::new(KEY));
    db.store().register(&worker).await.unwrap();
    // Each job takes 120 bytes for its columns and two for the quotes.
    let text = "repeat('x', 1902)";
    assert_eq!(
        enqueue_and_claim(&client, text, 64).await,
        (64, 0, 64 * 1904)
    );
    assert_eq!(enqueue_and_claim(&client, text, 65).await, (1, 65, 0));
    // A number that takes a few bytes in the table and 1,001 bytes in a response.
    assert_eq!(
        enqueue_and_claim(&client, "1e1000", 116).await,
        (116, 0, 116 * 1001)
    );
    assert_eq!(enqueue_and_claim(&client, "1e1000", 117).await, (1, 117, 0));
}

#[tokio::test]
async fn a_payload_of_2_kib_is_written_once_and_read_after_the_claim() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = registration("w", WorkerKey::new(KEY));
    db.store().register(&worker).await.unwrap();
    assert_eq!(
        enqueue_and_claim(&client, "repeat('x', 2045)", 1).await,
        (1, 0, 2047)
    );
    assert_eq!(
        enqueue_and_claim(&client, "repeat('x', 2046)", 1).await,
        (1, 1, 0)
    );
    let stored = "SELECT count(*) FROM rouse.payload";
    assert_eq!(
        client
            .query_one(stored, &[])
            .await
            .unwrap()
            .get::<_, i64>(0),
        1
    );
}

/// Enqueues this many jobs of 64 KiB that do not compress. Returns their ids.
async fn enqueue_large(client: &Client, jobs: i32) -> Vec<i64> {
    let enqueue = "
        SELECT array_agg(id) FROM (
            SELECT rouse.enqueue('x', jsonb_build_object('id', n, 'pad', (
                SELECT string_agg(md5(n || '.' || part), '') FROM generate_series(1, 2048) AS part))) AS id
            FROM generate_series(1, $1::integer) AS n) AS enqueued";
    client.query_one(enqueue, &[&jobs]).await.unwrap().get(0)
}

/// A store with a worker registered through it, behind this proxy.
async fn worker_behind(proxy: &Proxy) -> Store {
    let store = proxy.store();
    let worker = registration("w", WorkerKey::random());
    store.register(&worker).await.unwrap();
    store
}

/// These are the jobs that [`enqueue_large`] has enqueued, in their order, with their payloads.
fn assert_are_enqueued(jobs: &[ClaimedJob], ids: &[i64]) {
    let claimed: Vec<i64> = jobs.iter().map(|job| job.id.0).collect();
    assert_eq!(claimed, ids);
    for (number, job) in (1..).zip(jobs) {
        let payload: serde_json::Value = serde_json::from_str(&job.payload.0).unwrap();
        assert_eq!(payload["id"], json!(number));
        assert_eq!(payload["pad"].as_str().map(str::len), Some(64 << 10));
    }
}

#[tokio::test]
async fn a_read_of_claimed_jobs_that_is_cut_in_the_middle_is_repeated() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let store = worker_behind(&proxy).await;
    let ids = enqueue_large(&client, 64).await;
    let response = proxy.hold("FROM rouse.claimed(", Side::Response);
    let claiming = tokio::spawn(async move { claim(&store, 64).await });
    response.caught().await;
    // A part of the response has been sent.
    let sending = "pg_stat_activity
        WHERE datname = current_database() AND wait_event = 'ClientWrite' AND query LIKE '%FROM rouse.claimed(%'";
    until_true(&client, &format!("SELECT EXISTS (SELECT FROM {sending})")).await;
    let cut = format!("SELECT pg_terminate_backend(pid, 10000) FROM {sending}");
    let cuts = client.query(&cut, &[]).await.unwrap();
    assert_eq!(cuts.len(), 1);
    response.release();
    assert_are_enqueued(&claiming.await.unwrap(), &ids);
}

#[tokio::test]
async fn the_stored_size_of_a_job_matches_what_a_claim_sends() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let payload = r#"'{"a": [1, 2.50, "\u00e9\n"]}'"#;
    let with = r#"tenant => 'zoë', source => 'hook', grants => '{"http": ["example.org"]}'"#;
    // The first enqueue creates the lane, the second finds it.
    client
        .batch_execute(&format!(
            "SELECT rouse.enqueue('x', {payload}, {with}); SELECT rouse.enqueue('x', {payload}, {with}); SELECT rouse.enqueue('x', {payload});
             SELECT rouse.enqueue('x', {payload}, {with}, unique_key => 'k'); SELECT rouse.enqueue('x', NULL); SELECT rouse.enqueue('x', '1e1000');
             SELECT rouse.enqueue_many('x', ARRAY[{payload}, '1e1000']::jsonb[], {with})"
        ))
        .await
        .unwrap();
    let jobs = claim(&store, 10).await;
    assert_eq!(jobs.len(), 8);
    sizes_match(&client, &jobs).await;
    let done: Vec<_> = jobs
        .iter()
        .map(|job| settlement(job, result("1")))
        .collect();
    store.settle(&done, Locked::Skip).await.unwrap();
    client
        .batch_execute("SELECT rouse.retry(id) FROM rouse.finished ORDER BY id")
        .await
        .unwrap();
    let again = claim(&store, 10).await;
    assert_eq!(again.len(), 8);
    sizes_match(&client, &again).await;
}

async fn sizes_match(client: &Client, jobs: &[ClaimedJob]) {
    let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
    for job in jobs {
        let grants = job.grants.as_ref().map_or(0, |grants| grants.0.len());
        let sent = job.payload.0.len() + length(&job.tenant) + length(&job.source) + grants;
        let kept: i32 = client
            .query_one("SELECT bytes FROM rouse.job WHERE id = $1", &[&job.id.0])
            .await
            .unwrap()
            .get(0);
        assert_eq!(usize::try_from(kept).unwrap(), sent, "{job:?}");
    }
}

#[tokio::test]
async fn a_claim_by_source_stops_at_eight_mebibytes() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 67108864);
             SELECT rouse.enqueue_many('x', array_fill(to_jsonb(array_fill(1e131071, ARRAY[8])), ARRAY[10]), queue => 'wide', source => s)
             FROM unnest('{s,t}'::text[]) AS s",
        )
        .await
        .unwrap();
    let lanes: Vec<_> = orders(&store, 1)
        .await
        .iter()
        .map(|order| order.lane)
        .collect();
    for expected in [8, 8, 4, 0] {
        let search = BoundSearch {
            lanes: &lanes,
            sources: &["s".to_string(), "t".to_string()],
            ..BoundSearch::default()
        };
        let lease = Duration::from_secs(60);
        let jobs = store.claim_bound(Fence(rand()), search, lease, 100).await;
        assert_eq!(jobs.unwrap().jobs.len(), expected);
    }
}

/// The jobs of the sources `a` and `b` are those of one handler, which has little room. This does not limit the jobs of
/// the source `c`.
#[tokio::test]
async fn a_claim_by_source_takes_as_many_jobs_of_each_handler_as_it_has_room_for() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[3]), queue => q, source => s)
             FROM unnest('{p,q}'::text[]) AS q, unnest('{a,b,c}'::text[]) AS s",
        )
        .await
        .unwrap();
    let lanes: Vec<_> = orders(&store, 1)
        .await
        .iter()
        .map(|order| order.lane)
        .collect();
    let sources = ["a", "b", "c"].map(String::from);
    let claim = async |room: usize, wanted: usize| {
        let search = BoundSearch {
            lanes: &lanes,
            sources: &sources,
            handlers: &[0, 0, 1],
            rooms: &[room, 100],
            ..BoundSearch::default()
        };
        let lease = Duration::from_secs(60);
        let jobs = store
            .claim_bound(Fence(rand()), search, lease, wanted)
            .await;
        let jobs = jobs.unwrap().jobs;
        let of = |source: &str| {
            let source = Some(source.to_owned());
            jobs.iter().filter(|job| job.source == source).count()
        };
        [of("a"), of("b"), of("c")]
    };
    // In each lane, by source.
    assert_eq!(claim(4, 5).await, [3, 1, 1]);
    assert_eq!(claim(0, 3).await, [0, 0, 3]);
    assert_eq!(claim(1, 100).await, [0, 1, 2]);
    assert_eq!(claim(100, 100).await, [3, 4, 0]);
}

/// The host continues after the jobs of these pairs of a lane and a source, and not after those that it has not read.
#[tokio::test]
async fn a_claim_by_source_reports_the_sources_that_have_no_job_in_a_lane() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let enqueue = async |queue: &str, source: &str| {
        let sql = format!("'x', queue => '{queue}', source => '{source}'");
        enqueue_sql(&client, &sql).await
    };
    let locked = enqueue("p", "a").await;
    for (queue, source) in [("p", "b"), ("q", "a"), ("q", "b"), ("q", "c")] {
        enqueue(queue, source).await;
    }
    let mut lanes = store.catalog_after(i64::MIN, None).await.unwrap().lanes;
    lanes.sort_by(|a, b| a.queue.cmp(&b.queue));
    let lanes: Vec<LaneId> = lanes.iter().map(|lane| lane.id).collect();
    let sources = ["a", "b", "c"].map(String::from);
    // The handler of the source `c` has no room. The number of jobs, and `e` for each pair that has none.
    let claim = async |after: &[i64], wanted: usize| {
        let search = BoundSearch {
            lanes: &lanes,
            sources: &sources,
            after,
            handlers: &[0, 0, 1],
            rooms: &[100, 0],
        };
        let lease = Duration::from_secs(60);
        let claim = store
            .claim_bound(Fence(rand()), search, lease, wanted)
            .await
            .unwrap();
        let pairs = claim.is_empty.iter();
        let pairs: String = pairs.map(|is| if *is { 'e' } else { '-' }).collect();
        (claim.jobs.len(), pairs)
    };
    let mut other = db.client().await;
    let holds = other.transaction().await.unwrap();
    lock_job(&holds, locked).await;
    assert_eq!(claim(&[], 100).await, (3, "--e---".to_owned()));
    assert_eq!(claim(&[], 100).await, (0, "-eeee-".to_owned()));
    // After its turn.
    assert_eq!(claim(&[locked], 100).await, (0, "eeeee-".to_owned()));
    holds.rollback().await.unwrap();
    enqueue("p", "b").await;
    assert_eq!(claim(&[], 1).await, (1, "-".to_owned()));
    let pause = "SELECT rouse.pause_queue('p')";
    client.batch_execute(pause).await.unwrap();
    assert_eq!(claim(&[], 100).await, (0, "---ee-".to_owned()));
}

#[tokio::test]
async fn naming_a_lane_twice_claims_each_job_once() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let large = "x".repeat(100_000);
    for payload in [json!(1), json!(large), json!(large)] {
        enqueue(&client, "x", payload).await;
    }
    let once = orders(&store, 60_000).await;
    let twice: Vec<ClaimOrder> = [&once[..], &once[..]].concat();
    let claim = async |wanted| {
        let jobs = store
            .claim(Fence(rand()), &twice, wanted, None)
            .await
            .unwrap()
            .jobs();
        jobs.iter().map(|job| job.id.0).collect::<Vec<_>>()
    };
    let mut ids = claim(1).await;
    ids.extend(claim(10).await);
    client
        .execute("UPDATE rouse.job SET lease_until = clock_timestamp()", &[])
        .await
        .unwrap();
    let adopted = crate::support::claims::adopt(&store, Fence(rand()), &twice, 10, 3, None)
        .await
        .unwrap();
    let mut again: Vec<i64> = adopted.claimed.iter().map(|job| job.id.0).collect();
    again.sort_unstable();
    assert_eq!(again, ids, "in the same order as before");
    assert_eq!(ids.len(), 3);
    assert!(adopted.claimed.iter().all(|job| job.uncounted == 1));
}
