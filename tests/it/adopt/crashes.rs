//! Which losses count as crashes of the worker, and what effect they have.

use std::time::Duration;

use rouse::job::{AfterLoss, Attempt, Fence, SILENT_FOR};
use rouse::store::{AdoptionResult, Locked, Stats, Store, WorkerKey};
use rouse::worker::Settings;
use serde_json::json;

use super::{adopt, decide, expire};
use crate::support::TestDb;
use crate::support::claims::{claim, make_due, rand, result, settlement};
use crate::support::database::registration;
use crate::support::worker::{TestWorker, enqueue, events, show, until_true};

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
    let reported = |adopted: &AdoptionResult| {
        let [adoption] = &adopted.lost[..] else {
            panic!("one job: {adopted:?}");
        };
        let orphan = &adoption.orphan;
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

/// The worker sends heartbeats after the loss, but the clock was set back, so they seem to be earlier.
#[tokio::test]
async fn a_loss_before_the_clock_was_set_back_does_not_count_as_a_crash_until_the_clock_has_caught_up()
 {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (survivor, next, last) = (db.worker().await, db.worker().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&survivor, 1).await.remove(0);
    expire(&client, job.id).await;
    adopt(&next).await.claimed.remove(0);
    client
        .batch_execute(
            "BEGIN; SELECT rouse.unlock_history('a test'); UPDATE rouse.attempt SET ended_at = ended_at + interval '1 hour'; COMMIT",
        )
        .await
        .unwrap();
    heartbeat(&survivor).await;
    expire(&client, job.id).await;
    let adoptions = decide(&last, AfterLoss::Claim).await;
    assert_eq!(adoptions[0].orphan.crashes, 1, "that of the next worker");
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

/// The orphan has killed its workers as often as is permitted. It waits until its last worker is certainly dead; in the
/// meantime, the only slot of the other worker runs other jobs.
#[tokio::test]
async fn a_job_whose_last_loss_is_not_judged_yet_does_not_hold_up_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let dead = db.worker().await;
    let orphan = enqueue(&client, "noop", json!({})).await;
    let orphaned = claim(&dead, 1).await.remove(0);
    for _ in 0..100 {
        enqueue(&client, "noop", json!({})).await;
    }
    let settings = Settings {
        slots: 1,
        lost_max: 1,
        ..Settings::default()
    };
    expire(&client, orphaned.id).await;
    let worker = TestWorker::start(&db, settings).await;
    // Until the others have ended, the silence of the worker starts anew again and again, however slow this machine is.
    let others_have_ended = format!(
        "WITH again AS (UPDATE rouse.job SET lease_until = clock_timestamp() WHERE id = {orphan})
         SELECT count(*) = 100 FROM rouse.finished"
    );
    until_true(&client, &others_have_ended).await;
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
        // The lease of the freed claim ends a moment later.
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
