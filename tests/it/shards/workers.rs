//! Complete workers that share a queue by shards.

use std::time::Duration;

use rouse::worker::Settings;
use tokio_postgres::Client;

use super::{end_lease, enqueue, sharded};
use crate::support::claims::claim;
use crate::support::worker::{
    TestWorker, ended, enqueue_sql, expire_lease, guests_dir, show, until_true,
};
use crate::support::{Host, TestDb};

/// Records claims of queued jobs from a shard that the worker has not leased at that time.
pub(super) async fn note_strays(client: &Client) {
    client
        .batch_execute(
            "CREATE TABLE public.stray (lane bigint, worker bigint);
             CREATE FUNCTION public.note_stray() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
             BEGIN
                 IF EXISTS (
                     SELECT FROM rouse.lane AS l JOIN rouse.queue AS q ON q.name = l.queue
                     WHERE l.id = new.lane AND q.shards > 0 AND NOT EXISTS (
                         SELECT FROM rouse.shard AS s
                         WHERE s.worker = new.worker AND s.queue = q.name AND s.shard = rouse._shard_of(new.lane, q.shards))) THEN
                     INSERT INTO public.stray VALUES (new.lane, new.worker);
                 END IF;
                 RETURN NULL;
             END $$;
             CREATE TRIGGER note_stray AFTER UPDATE ON rouse.job FOR EACH ROW
             WHEN (old.state = 'queued' AND new.state = 'running') EXECUTE FUNCTION public.note_stray()",
        )
        .await
        .unwrap();
}

pub(super) async fn assert_no_strays(client: &Client) {
    let strays = client
        .query("SELECT lane, worker FROM public.stray", &[])
        .await
        .unwrap();
    assert!(strays.is_empty(), "{strays:?}");
}

fn settings(worker_id: &str) -> Settings {
    Settings {
        worker_id: worker_id.into(),
        slots: 2,
        ..Settings::default()
    }
}

async fn worker(db: &TestDb, worker_id: &str) -> TestWorker {
    TestWorker::start(db, settings(worker_id)).await
}

/// Waits until the workers have these numbers of shards.
async fn until_shares_are(client: &Client, shares: &[i32]) {
    let shares: Vec<String> = shares.iter().map(ToString::to_string).collect();
    let are = format!(
        "SELECT coalesce(array_agg(s.shards ORDER BY s.worker), '{{}}') = '{{{}}}'::bigint[]
         FROM (SELECT s.worker, count(*) AS shards FROM rouse.shard AS s GROUP BY 1) AS s",
        shares.join(",")
    );
    until_true(client, &are).await;
}

async fn until_all_are_done(client: &Client) {
    until_true(client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
}

#[tokio::test]
async fn each_lane_is_served_by_one_worker() {
    let (db, client) = sharded(16).await;
    note_strays(&client).await;
    enqueue(&client, "test.sleep", 60).await;
    let workers = [
        worker(&db, "a").await,
        worker(&db, "b").await,
        worker(&db, "c").await,
    ];
    until_shares_are(&client, &[6, 5, 5]).await;
    until_all_are_done(&client).await;
    client
        .batch_execute("SELECT rouse.unlock_history('test'); DELETE FROM rouse.finished")
        .await
        .unwrap();
    for _ in 0..5 {
        enqueue(&client, "test.sleep", 60).await;
    }
    until_all_are_done(&client).await;
    let lanes = "SELECT count(*), count(*) FILTER (WHERE l.workers > 1), count(DISTINCT l.worker)
                 FROM (SELECT f.lane, count(DISTINCT f.worker) AS workers, min(f.worker) AS worker FROM rouse.finished AS f GROUP BY 1) AS l";
    let row = client.query_one(lanes, &[]).await.unwrap();
    let counts: [i64; 3] = [row.get(0), row.get(1), row.get(2)];
    assert_eq!(counts, [60, 0, 3]);
    assert_no_strays(&client).await;
    // One worker leaves: the others take over within seconds.
    let [one, two, three] = workers;
    one.drain().await;
    until_shares_are(&client, &[8, 8]).await;
    enqueue(&client, "test.sleep", 60).await;
    until_all_are_done(&client).await;
    two.drain().await;
    three.drain().await;
    let left = "SELECT NOT EXISTS (SELECT FROM rouse.shard_lease)";
    until_true(&client, left).await;
    // Jobs that no worker serves wait for the next worker.
    enqueue(&client, "test.sleep", 60).await;
    let next = worker(&db, "d").await;
    until_all_are_done(&client).await;
    next.drain().await;
    assert_no_strays(&client).await;
}

/// With many workers and queues, dividing the shards would otherwise take more of the database than the jobs.
#[tokio::test]
async fn a_worker_leases_shards_only_of_queues_of_which_it_serves_a_lane() {
    let (db, client) = sharded(16).await;
    enqueue(&client, "test.sleep", 1).await;
    client
        .batch_execute(
            "SELECT rouse.set_shards('other', 16); SELECT rouse.enqueue('unknown', queue => 'other')",
        )
        .await
        .unwrap();
    let worker = worker(&db, "a").await;
    // One call leases the shards of all queues.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.shard_lease)").await;
    let leased = "SELECT array_agg(queue) FROM rouse.shard_lease";
    let leased: Vec<String> = client.query_one(leased, &[]).await.unwrap().get(0);
    assert_eq!(leased, ["q"]);
    let id = enqueue_sql(&client, r#"'noop', '{"n": 1}', queue => 'other'"#).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
}

/// Without notifications, a job would wait for the next poll.
#[tokio::test]
async fn the_worker_of_a_shard_is_notified_of_its_jobs() {
    let (db, client) = sharded(16).await;
    enqueue(&client, "test.sleep", 30).await;
    let settings = |id: &str| Settings {
        poll_max: Duration::from_secs(120),
        ..settings(id)
    };
    let workers = [
        TestWorker::start(&db, settings("a")).await,
        TestWorker::start(&db, settings("b")).await,
    ];
    until_shares_are(&client, &[8, 8]).await;
    until_all_are_done(&client).await;
    until_true(&client, "SELECT count(*) = 2 FROM rouse.sleeper").await;
    for _ in 0..3 {
        enqueue(&client, "test.sleep", 30).await;
        until_all_are_done(&client).await;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    let slow: i64 = client
        .query_one(
            "SELECT count(*) FROM rouse.finished WHERE started_at > requested_at + interval '20 s'",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(slow, 0);
    for worker in workers {
        worker.drain().await;
    }
}

#[tokio::test]
async fn the_number_of_shards_changes_while_workers_run_until_there_are_none() {
    let (db, client) = sharded(16).await;
    note_strays(&client).await;
    enqueue(&client, "test.sleep", 40).await;
    let workers = [worker(&db, "a").await, worker(&db, "b").await];
    for shards in [5, 64, 2, 16] {
        client
            .batch_execute(&format!("SELECT rouse.set_shards('q', {shards})"))
            .await
            .unwrap();
        for _ in 0..10 {
            enqueue(&client, "test.sleep", 40).await;
        }
        until_shares_are(&client, &[(shards + 1) / 2, shards / 2]).await;
    }
    until_all_are_done(&client).await;
    assert_no_strays(&client).await;
    client
        .batch_execute("SELECT rouse.set_shards('q', 0)")
        .await
        .unwrap();
    for _ in 0..10 {
        enqueue(&client, "test.sleep", 40).await;
    }
    until_all_are_done(&client).await;
    let calls: i64 = client
        .query_one("SELECT count(*) FROM rouse.shard_lease", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(calls, 0, "nobody leases");
    for worker in workers {
        worker.drain().await;
    }
}

#[tokio::test]
async fn an_orphan_is_adopted_by_a_worker_that_has_not_leased_its_shard() {
    let (db, client) = sharded(2).await;
    enqueue(&client, "test.sleep", 1).await;
    let worker = worker(&db, "a").await;
    until_shares_are(&client, &[2]).await;
    let serves: i64 = client
        .query_one("SELECT serves FROM rouse.shard_lease", &[])
        .await
        .unwrap()
        .get(0);
    // A worker with the same handlers takes one of the shards, and does nothing.
    let other = db.worker().await;
    let queues = ["q".to_owned()];
    let lease = async || {
        tokio::time::sleep(Duration::from_millis(100)).await;
        other.lease_shards(&queues, serves).await.unwrap()[0]
            .own
            .clone()
    };
    while lease().await.is_empty() {}
    enqueue(&client, "test.sleep", 20).await;
    let job = claim(&other, 1).await.pop().expect("a job of its shard");
    expire_lease(&client, job.id.0).await;
    while show(&client, job.id.0).await.state != "succeeded" {
        assert_eq!(lease().await.len(), 1);
    }
    let others: i64 = client
        .query_one("SELECT count(*) FROM rouse.job WHERE state = 'queued'", &[])
        .await
        .unwrap()
        .get(0);
    assert!(others > 0, "those of its shard wait");
    other.unregister().await.unwrap();
    until_all_are_done(&client).await;
    worker.drain().await;
}

/// A host process with all guests.
fn host(db: &TestDb, worker_id: &str) -> Host {
    let guests = guests_dir();
    let args = [
        "serve",
        "--http",
        "off",
        "--slots",
        "2",
        "--worker-id",
        worker_id,
        "--handlers",
    ];
    let args: Vec<&str> = args.into_iter().chain(guests.to_str()).collect();
    Host::rouse(&args, &[("DATABASE_URL", &db.url())])
}

#[tokio::test]
async fn the_shards_of_a_frozen_or_killed_host_go_to_the_others() {
    let (db, client) = sharded(16).await;
    note_strays(&client).await;
    enqueue(&client, "test.sleep", 40).await;
    let (frozen, other) = (host(&db, "frozen"), host(&db, "other"));
    until_shares_are(&client, &[8, 8]).await;
    until_all_are_done(&client).await;
    frozen.signal(libc::SIGSTOP);
    end_lease(&client, "frozen").await;
    until_shares_are(&client, &[16]).await;
    enqueue(&client, "test.sleep", 40).await;
    until_all_are_done(&client).await;
    frozen.signal(libc::SIGCONT);
    until_shares_are(&client, &[8, 8]).await;
    enqueue(&client, "test.sleep", 40).await;
    until_all_are_done(&client).await;
    frozen.kill();
    end_lease(&client, "frozen").await;
    enqueue(&client, "test.sleep", 40).await;
    until_shares_are(&client, &[16]).await;
    until_all_are_done(&client).await;
    other.kill();
    assert_no_strays(&client).await;
}
