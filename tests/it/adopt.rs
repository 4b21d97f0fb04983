//! Adoption of jobs whose worker is gone.

use std::time::Duration;

use rouse::job::{AfterLoss, Attempt, Fence, JobId, LaneId, SILENT_FOR};
use rouse::store::{
    Adopted, Adoption, ClaimOrder, Claimed, Locked, Renewal, Stats, Store, WorkerKey,
};
use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use crate::support::TestDb;
use crate::support::claims::{claim, make_due, orders, rand, result, settlement};
use crate::support::database::registration;
use crate::support::worker::{START_ORDER, TestWorker, enqueue, events, show, until_true};

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

async fn adopt(store: &Store) -> Adopted {
    let orders = orders(store, 60_000).await;
    crate::support::claims::adopt(store, Fence(rand()), &orders, 10, 3, None)
        .await
        .unwrap()
}

async fn heartbeat(store: &Store) {
    store
        .heartbeat(Some(&json!({})), &Stats::default(), false)
        .await
        .unwrap();
}

#[tokio::test]
async fn a_job_that_crashes_its_workers_is_adopted_once_then_waits_and_fails_after_the_third_crash()
{
    let db = TestDb::new().await;
    let client = db.client().await;
    let [store, next, last, survivor] = [
        db.worker().await,
        db.worker().await,
        db.worker().await,
        db.worker().await,
    ];
    let id = enqueue(&client, "x", json!({})).await;
    let first = claim(&store, 1).await.remove(0);
    let adopted = adopt(&next).await;
    assert!(adopted.claimed.is_empty(), "its lease has not expired");
    let reported = |adopted: &Adopted| {
        let [adoption] = adopted.lost[..] else {
            panic!("one job: {adopted:?}");
        };
        let orphan = adoption.orphan;
        assert_eq!((orphan.id, orphan.lane), (first.id, first.lane));
        (orphan.attempt, orphan.uncounted, adoption.next)
    };

    expire(&client, first.id).await;
    let mut adopted = adopt(&next).await;
    let second = adopted.claimed.remove(0);
    assert!(adopted.lost.is_empty(), "its event is the adoption");
    assert_eq!(
        (second.attempt.0, second.uncounted),
        (2, 1),
        "the job is adopted at once after its first loss"
    );
    let stale = store
        .settle(&[settlement(&first, result("1"))], Locked::Wait)
        .await
        .unwrap();
    assert!(
        stale.accepted.is_empty(),
        "the old owner can no longer settle the job"
    );

    expire(&client, second.id).await;
    let adopted = adopt(&last).await;
    assert!(adopted.claimed.is_empty(), "after a second crash it waits");
    let wait = AfterLoss::Wait(Duration::from_secs(10));
    assert_eq!(reported(&adopted), (Attempt(2), 2, wait));
    assert_eq!(show(&client, id).await.state, "queued");
    make_due(&client, id).await;
    last.promote(None, false).await.unwrap();
    let third = claim(&last, 1).await.remove(0);
    assert_eq!((third.attempt.0, third.uncounted), (3, 2));

    client
        .execute(
            "UPDATE rouse.job SET claimed_at = now() - interval '1 min'",
            &[],
        )
        .await
        .unwrap();
    expire(&client, third.id).await;
    let adopted = adopt(&survivor).await;
    assert!(adopted.claimed.is_empty());
    let ran = adopted.lost[0].orphan.after;
    assert!(ran >= Duration::from_secs(60), "since its claim: {ran:?}");
    assert_eq!(reported(&adopted), (Attempt(3), 3, AfterLoss::Fail));
    let shown = show(&client, id).await;
    assert_eq!(shown.state, "failed");
    let error = shown.error.unwrap();
    assert_eq!(error["kind"], "lost");
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("crashed in 3 attempts"),
        "{error}"
    );
    assert_eq!(
        events(&client, id).await,
        [
            "requested",
            "claimed",
            "lost",
            "claimed",
            "lost",
            "claimed",
            "failed"
        ]
    );
}

/// After an outage of the server or a freeze, the lease has ended, and the worker sends heartbeats again.
#[tokio::test]
async fn a_loss_does_not_count_as_a_crash_if_the_worker_survived() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (store, other) = (db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let mut job = claim(&store, 1).await.remove(0);
    // Alternately, the job's own worker or another one takes the job over, before or after the first worker's next
    // heartbeat.
    for (taker, owner) in [
        (&store, &store),
        (&other, &store),
        (&store, &other),
        (&other, &store),
        (&store, &other),
    ] {
        expire(&client, job.id).await;
        let mut adopted = adopt(taker).await;
        job = adopted.claimed.remove(0);
        if !std::ptr::eq(taker, owner) {
            heartbeat(owner).await;
        }
    }
    assert_eq!((job.attempt.0, job.uncounted), (6, 5));
    assert_eq!(show(&client, id).await.state, "running");
}

/// The worker sends a heartbeat after the lease has ended and before another worker adopts the job; then it falls
/// silent.
#[tokio::test]
async fn a_loss_does_not_count_as_a_crash_if_the_worker_sent_a_heartbeat_before_the_adoption() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({})).await;
    let mut owner = db.worker().await;
    let mut job = claim(&owner, 1).await.remove(0);
    for _ in 0..4 {
        expire(&client, job.id).await;
        heartbeat(&owner).await;
        let next = db.worker().await;
        job = adopt(&next).await.claimed.remove(0);
        owner = next;
    }
    assert_eq!((job.attempt.0, job.uncounted), (5, 4));
    assert_eq!(show(&client, id).await.state, "running");
}

/// A host was frozen: others took the job over, and when the host resumes it claims the job again before its first
/// heartbeat.
#[tokio::test]
async fn a_loss_does_not_count_as_a_crash_if_the_worker_claims_the_job_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({})).await;
    let (first, frozen, last) = (db.worker().await, db.worker().await, db.worker().await);
    let job = claim(&first, 1).await.remove(0);
    expire(&client, job.id).await;
    adopt(&frozen).await.claimed.remove(0);
    expire(&client, job.id).await;
    // It looks as if two workers had crashed, so the job waits.
    assert!(adopt(&last).await.claimed.is_empty());
    client
        .batch_execute("UPDATE rouse.job SET turn = 1, available_at = now()")
        .await
        .unwrap();
    claim(&frozen, 1).await.remove(0);
    expire(&client, job.id).await;
    adopt(&last).await;
    assert_eq!(
        show(&client, id).await.state,
        "queued",
        "two crashes, not three"
    );
}

/// The adoptions that `last` decides on for the orphans that it has listed.
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

/// A host may freeze between its two statements.
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
                let renewal = Renewal {
                    id: job.id,
                    fence: job.fence,
                    lease_ms: 60_000,
                };
                let answers = owner.renew(&[renewal]).await.unwrap();
                assert_eq!(answers, [(job.id, None)]);
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

/// The worker of an orphan seems to have crashed, but it sends a heartbeat before the job fails for the crash.
#[tokio::test]
async fn a_job_does_not_fail_for_a_crash_that_is_disproved_after_it_was_listed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (owner, last) = (db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    expire(&client, job.id).await;
    let adoptions = decide(&last, AfterLoss::Fail).await;
    assert_eq!(adoptions[0].orphan.crashes, 1);
    heartbeat(&owner).await;
    let adopted = last.adopt(Fence(rand()), &adoptions).await.unwrap();
    assert!(adopted.lost.is_empty(), "{adopted:?}");
    assert_eq!(show(&client, id).await.state, "running");
    // The next list no longer counts the crash.
    let adoptions = decide(&last, AfterLoss::Claim).await;
    assert_eq!(adoptions[0].orphan.crashes, 0);
    let adopted = last.adopt(Fence(rand()), &adoptions).await.unwrap();
    assert_eq!(adopted.claimed.len(), 1);
}

/// A host that was frozen, or connects again after an outage, has some time to report that it has not crashed.
#[tokio::test]
async fn a_loss_that_would_fail_a_job_is_judged_after_its_worker_has_been_silent_for_some_time() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (owner, last) = (db.worker().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    let lanes = [job.lane];
    let crashes = async |crashes_max| -> Vec<u32> {
        let orphans = last.orphans(&lanes, None, 10, None, crashes_max).await;
        orphans.unwrap().iter().map(|it| it.crashes).collect()
    };
    let lease_ended = async |seconds: f64| {
        let sql = "UPDATE rouse.job SET lease_until = clock_timestamp() - $1 * interval '1 s', claimed_at = now() - interval '1 min'";
        client.execute(sql, &[&seconds]).await.unwrap();
        // Its worker has sent nothing since.
        let sql = "UPDATE rouse.worker SET seen_at = clock_timestamp() - interval '1 min'";
        client.batch_execute(sql).await.unwrap();
    };
    lease_ended(0.0).await;
    assert_eq!(crashes(2).await, [1], "it does not fail for one crash");
    assert!(crashes(1).await.is_empty(), "the worker may be alive");
    lease_ended(SILENT_FOR.as_secs_f64() - 5.0).await;
    assert!(crashes(1).await.is_empty());
    lease_ended(SILENT_FOR.as_secs_f64()).await;
    assert_eq!(crashes(1).await, [1]);
    lease_ended(0.0).await;
    heartbeat(&owner).await;
    assert_eq!(crashes(1).await, [0], "the worker is alive");
}

/// The orphan has killed its worker as often as it may. It waits until it is certain that its worker is dead; the only
/// slot of the other worker does not.
#[tokio::test]
async fn a_job_whose_last_loss_is_not_judged_yet_holds_up_no_other_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let dead = db.worker().await;
    let orphan = enqueue(&client, "noop", json!({})).await;
    let orphaned = claim(&dead, 1).await.remove(0);
    expire(&client, orphaned.id).await;
    for _ in 0..100 {
        enqueue(&client, "noop", json!({})).await;
    }
    let settings = Settings {
        slots: 1,
        lost_max: 1,
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT count(*) = 100 FROM rouse.finished").await;
    assert_eq!(show(&client, orphan).await.state, "running");
    until_true(&client, "SELECT count(*) = 101 FROM rouse.finished").await;
    worker.drain().await;
    assert_eq!(show(&client, orphan).await.state, "failed");
    let row = client
        .query_one(
            "SELECT extract(epoch FROM finished_at - (error ->> 'lease_ended_at')::timestamptz)::float8 FROM rouse.finished WHERE id = $1",
            &[&orphan],
        )
        .await
        .unwrap();
    let waited: f64 = row.get(0);
    assert!(waited >= SILENT_FOR.as_secs_f64(), "{waited} s");
}

/// A host that learns that its worker was declared dead or replaced reports that it has not crashed.
#[tokio::test]
async fn a_loss_does_not_count_as_a_crash_if_the_worker_was_replaced() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue(&client, "x", json!({})).await;
    let mail = || registration("mail", WorkerKey::new([7; 32]));
    let mut holder = db.store();
    holder.register(&mail()).await.unwrap();
    let mut job = claim(&holder, 1).await.remove(0);
    for _ in 0..4 {
        let next = db.store();
        next.register(&mail()).await.unwrap();
        // The lease that the takeover frees ends in a moment.
        until_true(
            &client,
            "SELECT bool_and(lease_until < clock_timestamp()) FROM rouse.job",
        )
        .await;
        job = adopt(&next).await.claimed.remove(0);
        holder.outlived().await.unwrap();
        // Otherwise the next takeover would be refused.
        client
            .execute("UPDATE rouse.worker SET replaced_at = NULL", &[])
            .await
            .unwrap();
        holder = next;
    }
    assert_eq!((job.attempt.0, job.uncounted), (5, 4));
    assert_eq!(show(&client, id).await.state, "running");
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
        most: None,
        only: None,
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
    // Room for more jobs than there are orphans.
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
    let Claimed::Orphans(until) = ask(Some(ended)).await else {
        panic!("the lease ended at that time");
    };
    assert!(until > ended);
    let waits = show(&client, queued).await;
    assert_eq!((waits.state.as_str(), waits.attempt), ("queued", 0));
    // A claim that knows of this lease proceeds: perhaps this host cannot adopt the job.
    let claimed = ask(Some(until)).await.jobs();
    assert_eq!(claimed[0].id.0, queued);
    assert!(
        claimed[0].claimed_at > until,
        "the next claim continues from there"
    );
}
