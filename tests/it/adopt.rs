//! Adoption of jobs whose worker is dead.

mod crashes;

use std::time::Duration;

use rouse::job::{AfterLoss, Fence, JobId, LaneId};
use rouse::store::{Adoption, AdoptionResult, ClaimOrder, ClaimResult, Store};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, orders, rand, renewal};
use crate::support::worker::{START_ORDER, TestWorker, enqueue, show, until_true};

/// Ends the job's lease without any later heartbeat of its worker.
async fn expire(client: &Client, id: JobId) {
    client
        .execute(
            "UPDATE rouse.job SET lease_until = clock_timestamp() WHERE id = $1 AND state = 'running'",
            &[&id.0],
        )
        .await
        .unwrap();
}

async fn adopt(store: &Store) -> AdoptionResult {
    let orders = orders(store, 60_000).await;
    crate::support::claims::adopt(store, Fence(rand()), &orders, 10, 3, None)
        .await
        .unwrap()
}

/// Lists all orphans with `last`, and returns its decision `next` about each of them. Nothing is adopted yet.
async fn decide(last: &Store, next: AfterLoss) -> Vec<Adoption> {
    let lanes: Vec<LaneId> = orders(last, 60_000)
        .await
        .iter()
        .map(|it| it.lane)
        .collect();
    let orphans = last.orphans(&lanes, None, 10, None, 3).await.unwrap();
    let adoption = |orphan| Adoption {
        orphan,
        next,
        lease: Duration::from_secs(60),
    };
    orphans.into_iter().map(adoption).collect()
}

/// A host may freeze after it has listed orphans and before it adopts them.
#[tokio::test]
async fn an_orphan_that_changes_after_it_was_listed_is_left_alone() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (owner, other, last) = (db.worker().await, db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    for (next, change) in [
        (AfterLoss::Claim, "renewed"),
        (AfterLoss::Fail, "renewed"),
        (AfterLoss::Claim, "paused"),
        (AfterLoss::Fail, "locked"),
        (AfterLoss::Claim, "adopted"),
    ] {
        expire(&client, job.id).await;
        let adoptions = decide(&last, next).await;
        assert_eq!(adoptions.len(), 1, "{change}");
        let mut holder = db.client().await;
        let holds = holder.transaction().await.unwrap();
        match change {
            "renewed" => {
                let responses = owner.renew(&[renewal(&job, 60_000)]).await.unwrap();
                assert_eq!(responses, [(job.id, None)]);
            }
            "paused" => {
                let pause = "SELECT rouse.pause_queue('default')";
                client.batch_execute(pause).await.unwrap();
            }
            "locked" => {
                let lock = "SELECT FROM rouse.job FOR UPDATE";
                holds.batch_execute(lock).await.unwrap();
            }
            _ => {
                adopt(&other).await.claimed.remove(0);
            }
        }
        let adopted = last.adopt(Fence(rand()), &adoptions).await.unwrap();
        assert!(adopted.claimed.is_empty(), "{change}");
        assert!(adopted.lost.is_empty(), "{change}");
        holds.rollback().await.unwrap();
        assert_eq!(show(&client, id).await.state, "running", "{change}");
        let resume = "SELECT rouse.resume_queue('default')";
        client.batch_execute(resume).await.unwrap();
    }
}

#[tokio::test]
async fn a_job_that_is_listed_twice_is_adopted_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (owner, last) = (db.worker().await, db.worker().await);
    let wait = AfterLoss::Wait(Duration::from_secs(1));
    for (first, second, state) in [
        (AfterLoss::Claim, AfterLoss::Claim, "running"),
        (wait, AfterLoss::Claim, "queued"),
        (AfterLoss::Fail, wait, "failed"),
    ] {
        let id = enqueue(&client, "x", json!({})).await;
        let job = claim(&owner, 1).await.remove(0);
        expire(&client, job.id).await;
        let mut adoptions = decide(&last, first).await;
        adoptions.extend(decide(&last, second).await);
        assert_eq!(adoptions.len(), 2);
        last.adopt(Fence(rand()), &adoptions).await.unwrap();
        let shown = show(&client, id).await;
        assert_eq!(shown.state, state);
        let lost = "SELECT count(*) FROM rouse.attempt WHERE job = $1 AND lost";
        let lost: i64 = client.query_one(lost, &[&id]).await.unwrap().get(0);
        assert!(lost <= 1, "{state}: {lost}");
        client
            .execute("SELECT rouse.cancel($1)", &[&id])
            .await
            .unwrap();
    }
}

#[tokio::test]
async fn a_worker_adopts_only_jobs_from_its_own_lanes() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    expire(&client, job.id).await;
    let other = [ClaimOrder {
        lane: LaneId(job.lane.0 ^ 1),
        after: 0,
        lease_ms: 1000,
        max: None,
        overdue: None,
    }];
    let adopted = crate::support::claims::adopt(&store, Fence(1), &other, 10, 3, None)
        .await
        .unwrap();
    assert!(adopted.claimed.is_empty());
}

#[tokio::test]
async fn an_adoption_stops_at_the_job_that_reaches_eight_mebibytes() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 67108864);
             SELECT rouse.enqueue_many('x', array_fill(to_jsonb(repeat('x', 1048576)), ARRAY[12]), queue => 'wide');
             SELECT rouse.enqueue('x', to_jsonb(repeat('x', 67000000)), queue => 'wide') FROM generate_series(1, 2);
             UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1, claimed_at = now() - interval '2 min',
                 lease_until = now() - interval '1 min' + id * interval '1 ms'",
        )
        .await
        .unwrap();
    let mut adopted = Vec::new();
    for _ in 0..5 {
        let orders = orders(&store, 60_000).await;
        let round =
            crate::support::claims::adopt(&store, Fence(rand()), &orders, 64, 3, None).await;
        adopted.push(round.unwrap().claimed.len());
    }
    assert_eq!(adopted, [8, 5, 1, 0, 0]);
}

#[tokio::test]
async fn orphans_left_by_a_truncated_adoption_precede_queued_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('wide', 67108864);
             SELECT rouse.enqueue('noop', to_jsonb(repeat('x', 9000000)), queue => 'wide') FROM generate_series(1, 3);
             UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1, claimed_at = now() - interval '2 min',
                 lease_until = now() - interval '1 min' + id * interval '1 ms';
             SELECT rouse.enqueue_many('noop', array_fill('{}'::jsonb, ARRAY[20]))",
        )
        .await
        .unwrap();
    // There is capacity for more jobs than there are orphans.
    let settings = Settings {
        slots: 16,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT count(*) = 23 FROM rouse.finished").await;
    let sql = format!("SELECT array_agg(queue ORDER BY {START_ORDER}) FROM rouse.jobs");
    let order: Vec<String> = client.query_one(&sql, &[]).await.unwrap().get(0);
    assert_eq!(order[..3], ["wide", "wide", "wide"], "{order:?}");
    worker.drain().await;
}

#[tokio::test]
async fn orphans_are_adopted_by_priority_and_then_by_age() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (dead, survivor) = (db.worker().await, db.worker().await);
    let mut ids = Vec::new();
    for priority in ["low", "normal", "high"] {
        for _ in 0..2 {
            let row = client
                .query_one("SELECT rouse.enqueue('x', priority => $1)", &[&priority])
                .await
                .unwrap();
            ids.push(row.get::<_, i64>(0));
        }
    }
    assert_eq!(claim(&dead, 10).await.len(), 6);
    // The leases end in a different order: low before normal before high, and within each priority the younger job's
    // first.
    client
        .execute(
            "UPDATE rouse.job AS j SET lease_until = now() - interval '1 min' + n * interval '1 s'
             FROM unnest($1::bigint[]) WITH ORDINALITY AS o(id, n) WHERE j.id = o.id",
            &[&[ids[1], ids[0], ids[3], ids[2], ids[5], ids[4]].as_slice()],
        )
        .await
        .unwrap();
    let orders = orders(&survivor, 60_000).await;
    let mut adopted = Vec::new();
    for _ in 0..6 {
        let one = crate::support::claims::adopt(&survivor, Fence(rand()), &orders, 1, 3, None);
        adopted.push(one.await.unwrap().claimed.remove(0).id.0);
    }
    let expected = [ids[4], ids[5], ids[2], ids[3], ids[0], ids[1]];
    assert_eq!(adopted, expected, "{ids:?}");
}

#[tokio::test]
async fn a_claim_yields_if_a_lease_has_ended_since_the_previous_claim() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (dead, store) = (db.worker().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let orphan = claim(&dead, 1).await.remove(0);
    let queued = enqueue(&client, "x", json!({})).await;
    let orders = orders(&store, 60_000).await;
    let ask = async |since| store.claim(Fence(rand()), &orders, 1, since).await.unwrap();

    expire(&client, orphan.id).await;
    let ended = client
        .query_one(
            "SELECT lease_until FROM rouse.job WHERE id = $1",
            &[&orphan.id.0],
        )
        .await
        .unwrap()
        .get(0);
    let ClaimResult::Orphans(until) = ask(Some(ended)).await else {
        panic!("the lease ended at that time");
    };
    assert!(until > ended);
    let waits = show(&client, queued).await;
    assert_eq!((waits.state.as_str(), waits.attempt), ("queued", 0));
    // A claim that knows about this lease proceeds: this host may not be able to adopt the job.
    let claimed = ask(Some(until)).await.jobs();
    assert_eq!(claimed[0].id.0, queued);
    assert!(
        claimed[0].claimed_at > until,
        "the next claim continues from there"
    );
}

/// As many are locked as a worker usually considers, in a transaction that may stay open for a long time.
#[tokio::test]
async fn orphans_that_another_transaction_has_locked_do_not_hide_others() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[1001]));
             UPDATE rouse.job SET state = 'running', attempt = 1, fence = 1, worker = 1, claimed_at = now() - interval '2 min',
                 lease_until = now() - interval '1 min' + id * interval '1 ms'",
        )
        .await
        .unwrap();
    let last = client.query_one("SELECT max(id) FROM rouse.job", &[]);
    let last: i64 = last.await.unwrap().get(0);
    let operator = db.client().await;
    let lock = format!("BEGIN; SELECT FROM rouse.job WHERE id < {last} FOR UPDATE");
    operator.batch_execute(&lock).await.unwrap();
    let adopted = adopt(&store).await;
    let ids: Vec<i64> = adopted.claimed.iter().map(|job| job.id.0).collect();
    assert_eq!(ids, [last]);
    operator.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(adopt(&store).await.claimed.len(), 10);
}

/// The row is locked as by `rouse.clear_timeouts`, in a transaction that stays open.
#[tokio::test]
async fn a_worker_whose_row_is_locked_does_not_wait_to_adopt_its_own_orphans() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    expire(&client, job.id).await;
    let operator = db.client().await;
    let lock = "BEGIN; SELECT FROM rouse.worker FOR NO KEY UPDATE";
    operator.batch_execute(lock).await.unwrap();
    let lanes: Vec<LaneId> = orders(&store, 60_000)
        .await
        .iter()
        .map(|it| it.lane)
        .collect();
    let refused = store.orphans(&lanes, None, 10, None, 3).await;
    let error = refused.expect_err("the row is locked");
    assert!(error.is_locked(), "{error}");
    operator.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(adopt(&store).await.claimed.len(), 1);
}
