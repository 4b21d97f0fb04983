//! Claims, fences and settlements: how two workers may and may not affect each other.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use rouse::job::{
    AbortReason, ErrorKind, Fence, JobId, NextAttempt, Outcome, RetryAt, Suspension, Wait,
};
use rouse::store::{CommitStatus, Locked, Refusal, Settlement, WorkerKey};
use serde_json::json;

use crate::support::TestDb;
use crate::support::claims::{
    claim, claim_one, error, lock_job, make_due, renewal, result, settlement,
};
use crate::support::database::registration;
use crate::support::worker::{cancel, enqueue, events, show};

#[tokio::test]
async fn jobs_of_a_lane_are_claimed_in_order_and_only_once() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let mut ids = Vec::new();
    for n in 0..10 {
        ids.push(enqueue(&client, "x", json!({ "n": n })).await);
    }
    let first: Vec<i64> = claim(&store, 4).await.iter().map(|job| job.id.0).collect();
    let second: Vec<i64> = claim(&store, 100)
        .await
        .iter()
        .map(|job| job.id.0)
        .collect();
    assert_eq!(first, ids[..4]);
    assert_eq!(second, ids[4..]);
    assert!(claim(&store, 100).await.is_empty());
}

#[tokio::test]
async fn a_claim_skips_jobs_that_a_concurrent_claim_has_locked() {
    let db = TestDb::new().await;
    let (mut other, store) = (db.client().await, db.worker().await);
    let ids = [
        enqueue(&other, "x", json!(1)).await,
        enqueue(&other, "x", json!(2)).await,
    ];
    let transaction = other.transaction().await.unwrap();
    lock_job(&transaction, ids[0]).await;
    let got: Vec<i64> = claim(&store, 10).await.iter().map(|job| job.id.0).collect();
    assert_eq!(got, [ids[1]]);
    transaction.rollback().await.unwrap();
}

#[tokio::test]
async fn only_the_owner_of_the_fence_can_settle() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let mut stale = settlement(&job, result("\"stale\""));
    stale.fence = Fence(job.fence.0 ^ 1);
    let settled = store.settle(&[stale], Locked::Wait).await.unwrap();
    assert!(settled.accepted.is_empty());
    assert_eq!(show(&client, id).await.state, "running");

    let settled = store
        .settle(&[settlement(&job, result("\"mine\""))], Locked::Wait)
        .await
        .unwrap();
    assert!(settled.accepted.contains(&JobId(id)));
    let again = store
        .settle(&[settlement(&job, result("\"again\""))], Locked::Wait)
        .await
        .unwrap();
    assert!(again.accepted.is_empty(), "a job is settled once");
    assert_eq!(show(&client, id).await.result, Some(json!("mine")));
}

#[tokio::test]
async fn a_settlement_reports_accepted_jobs_and_lost_leases() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for n in 0..3 {
        enqueue(&client, "x", json!(n)).await;
    }
    let jobs = claim(&store, 3).await;
    let cancelled = cancel(&client, jobs[1].id.0).await;
    assert!(cancelled);
    let batch: Vec<_> = jobs
        .iter()
        .map(|job| settlement(job, result("1")))
        .collect();
    let settled = store.settle(&batch, Locked::Wait).await.unwrap();
    assert_eq!(settled.accepted.len(), 2);
    assert!(!settled.accepted.contains(&jobs[1].id));
    assert_eq!(show(&client, jobs[1].id.0).await.state, "cancelled");
    assert_eq!(
        events(&client, jobs[1].id.0).await,
        ["requested", "claimed", "cancelled"]
    );
}

#[tokio::test]
async fn a_retry_keeps_its_attempt_count_waits_for_its_time_and_takes_a_new_turn() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let outcome = Outcome::Retry {
        again: Duration::from_secs(3600).into(),
        error: error(ErrorKind::GuestError),
    };
    let retry = settlement(&job, outcome);
    store.settle(&[retry], Locked::Wait).await.unwrap();
    let shown = show(&client, id).await;
    assert_eq!((shown.state.as_str(), shown.attempt), ("queued", 1));
    assert_eq!(shown.error.unwrap()["message"], "no");
    assert!(claim(&store, 1).await.is_empty(), "it is not due yet");
    let promotion = store.promote(None, false).await.unwrap();
    assert_eq!(promotion.promoted, 0);
    let wait = promotion.next_due.expect("a due job");
    assert!(
        wait > Duration::from_secs(3500) && wait <= Duration::from_secs(3600),
        "{wait:?}"
    );

    make_due(&client, id).await;
    assert_eq!(store.promote(None, false).await.unwrap().promoted, 1);
    let second = claim(&store, 1).await.remove(0);
    assert_eq!((second.attempt.0, second.uncounted), (2, 0));
    assert!(second.turn > job.turn);
    assert_ne!(second.fence, job.fence);
    assert_eq!(
        events(&client, id).await,
        ["requested", "started", "failed", "claimed"]
    );
}

#[tokio::test]
async fn a_retry_at_a_time_in_the_past_is_due_now_and_has_not_waited_since_then() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let outcome = Outcome::Retry {
        again: NextAttempt {
            at: RetryAt::Time(SystemTime::UNIX_EPOCH),
            memory_bytes: None,
        },
        error: error(ErrorKind::GuestError),
    };
    let retry = settlement(&job, outcome);
    store.settle(&[retry], Locked::Wait).await.unwrap();
    // A busy worker looks only for jobs that became due since its last look.
    let promotion = store.promote(Some(job.claimed_at), false).await.unwrap();
    assert_eq!(promotion.promoted, 1);
    let again = claim(&store, 1).await.remove(0);
    let ready_at = again.ready_at.expect("it is not adopted");
    assert!(ready_at >= job.claimed_at, "{ready_at:?}");
}

#[tokio::test]
async fn a_locked_due_job_does_not_shorten_a_workers_wait() {
    let db = TestDb::new().await;
    let (mut other, client, store) = (db.client().await, db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let due = "UPDATE rouse.job SET turn = NULL, available_at = now() - interval '1 s'";
    client.batch_execute(due).await.unwrap();
    let transaction = other.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.cancel($1)", &[&id])
        .await
        .unwrap();
    let promotion = store.promote(None, false).await.unwrap();
    // If the job were due at once, the worker would ask again without pause for as long as the lock is held.
    assert_eq!((promotion.promoted, promotion.next_due), (0, None));
    assert!(promotion.left_at.is_some());
    transaction.rollback().await.unwrap();
    let promotion = store.promote(None, false).await.unwrap();
    assert_eq!((promotion.promoted, promotion.left_at), (1, None));
}

#[tokio::test]
async fn a_released_claim_does_not_count() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let released = Settlement {
        started_after: None,
        ..settlement(&job, Outcome::Released)
    };
    store.settle(&[released], Locked::Wait).await.unwrap();
    let shown = show(&client, id).await;
    assert_eq!((shown.state.as_str(), shown.attempt), ("queued", 0));
    assert_eq!(events(&client, id).await, ["requested", "released"]);
    let again = claim(&store, 1).await.remove(0);
    assert_eq!(again.attempt.0, 1);
    assert!(again.turn > job.turn, "no cursor has passed its new turn");
}

#[tokio::test]
async fn a_scheduled_job_is_never_claimed_before_its_time() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .query(
            "SELECT rouse.enqueue('x', run_at => now() + interval '1 hour')",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(store.promote(None, false).await.unwrap().promoted, 0);
    assert!(claim(&store, 1).await.is_empty());
    // A time in the past does not schedule the job.
    client
        .query(
            "SELECT rouse.enqueue('x', run_at => now() - interval '1 hour')",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(claim(&store, 2).await.len(), 1);
}

#[tokio::test]
async fn a_result_that_postgres_cannot_store_fails_its_whole_batch() {
    // How the settler handles this is tested in outcomes.rs.
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for n in 0..2 {
        enqueue(&client, "x", json!(n)).await;
    }
    let jobs = claim(&store, 2).await;
    let batch = [
        settlement(&jobs[0], result("1")),
        settlement(&jobs[1], result(r#""\u0000""#)),
    ];
    let error = store.settle(&batch, Locked::Wait).await.unwrap_err();
    assert_eq!(error.code().unwrap().code(), "22P05");
    assert!(!error.is_transient());
    for job in &jobs {
        assert_eq!(show(&client, job.id.0).await.state, "running");
    }
}

#[tokio::test]
async fn a_locked_job_is_left_out_and_the_others_are_settled() {
    let db = TestDb::new().await;
    let (mut other, store) = (db.client().await, db.worker().await);
    for n in 0..3 {
        enqueue(&other, "x", json!(n)).await;
    }
    let jobs = claim(&store, 3).await;
    let batch: Vec<_> = jobs
        .iter()
        .map(|job| settlement(job, result("1")))
        .collect();
    let transaction = other.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.cancel($1)", &[&jobs[1].id.0])
        .await
        .unwrap();
    let error = store.settle(&batch, Locked::Wait).await.unwrap_err();
    assert_eq!(
        error.code().unwrap().code(),
        "55P03",
        "the wait for the lock ends with an error"
    );
    let settled = store.settle(&batch, Locked::Skip).await.unwrap();
    assert_eq!(settled.accepted.len(), 2);
    assert_eq!(settled.locked.into_iter().collect::<Vec<_>>(), [jobs[1].id]);

    transaction.rollback().await.unwrap();
    let settled = store.settle(&batch, Locked::Skip).await.unwrap();
    assert_eq!(
        settled.accepted.into_iter().collect::<Vec<_>>(),
        [jobs[1].id]
    );
    assert!(settled.locked.is_empty());
}

#[tokio::test]
async fn a_producer_that_names_a_job_delays_its_end_and_no_other_outcome() {
    let db = TestDb::new().await;
    let (mut producer, store) = (db.client().await, db.worker().await);
    for n in 0..4 {
        enqueue(&producer, "x", json!(n)).await;
    }
    let jobs = claim(&store, 4).await;
    let transaction = producer.transaction().await.unwrap();
    let name = "SELECT rouse.enqueue('x', after => (SELECT jsonb_agg(id) FROM rouse.job))";
    transaction.query(name, &[]).await.unwrap();
    let retry = Outcome::Retry {
        again: Duration::from_secs(60).into(),
        error: error(ErrorKind::GuestError),
    };
    let sleep = Outcome::Suspended(Suspension {
        step: "nap".into(),
        wait: Wait::Sleep {
            until: SystemTime::now() + Duration::from_secs(60),
        },
        is_recorded: false,
    });
    let outcomes = [result("1"), retry, Outcome::Released, sleep];
    let batch: Vec<_> = jobs
        .iter()
        .zip(outcomes)
        .map(|(job, outcome)| settlement(job, outcome))
        .collect();
    let settled = store.settle(&batch, Locked::Skip).await.unwrap();
    let others: HashSet<JobId> = jobs[1..].iter().map(|job| job.id).collect();
    assert_eq!(settled.accepted, others);
    assert_eq!(settled.locked, HashSet::from([jobs[0].id]));
    transaction.rollback().await.unwrap();
    let settled = store.settle(&batch[..1], Locked::Skip).await.unwrap();
    assert!(settled.accepted.contains(&jobs[0].id));
}

/// Otherwise, a step whose commit had no response would wait as long as that transaction is open.
#[tokio::test]
async fn a_commit_is_looked_up_although_a_producer_has_named_the_job() {
    let db = TestDb::new().await;
    let (mut producer, mut settling) = (db.client().await, db.client().await);
    let store = db.worker().await;
    let id = enqueue(&producer, "x", json!(1)).await;
    let job = claim_one(&store).await;
    let transaction = producer.transaction().await.unwrap();
    let name = "SELECT rouse.enqueue('x', after => jsonb_build_array($1::bigint))";
    transaction.query(name, &[&id]).await.unwrap();
    let confirm = || store.confirm(job.id, job.fence, job.attempt);
    assert_eq!(confirm().await.unwrap(), CommitStatus::Held);
    transaction.rollback().await.unwrap();

    // The lookup waits for a settlement that may still commit.
    let transaction = settling.transaction().await.unwrap();
    lock_job(&transaction, id).await;
    assert!(confirm().await.unwrap_err().is_locked());
    transaction.rollback().await.unwrap();
    assert_eq!(confirm().await.unwrap(), CommitStatus::Held);
}

/// The worker trusts the longer lease as soon as it has the response.
#[tokio::test]
async fn a_renewal_commits_as_durably_as_the_session_requires() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.store());
    let key = [7; 32];
    let worker = registration("w-1", WorkerKey::new(key));
    let (incarnation, _) = store.register(&worker).await.unwrap();
    enqueue(&client, "x", json!({})).await;
    let job = claim_one(&store).await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .batch_execute("SET LOCAL synchronous_commit = on")
        .await
        .unwrap();
    let row = transaction
        .query_one(
            "SELECT refusal FROM rouse.renew($1, $2, ARRAY[$3::bigint], ARRAY[$4::bigint], '{60000}')",
            &[&incarnation.0, &key.as_slice(), &job.id.0, &job.fence.0],
        )
        .await
        .unwrap();
    assert_eq!(row.get::<_, Option<&str>>(0), None, "it was renewed");
    let row = transaction
        .query_one("SHOW synchronous_commit", &[])
        .await
        .unwrap();
    assert_eq!(row.get::<_, &str>(0), "on");
    transaction.commit().await.unwrap();
}

/// A host that gave up on the statement would find the jobs still locked by it when it repeats the statement.
#[tokio::test]
async fn renewals_of_many_leases_may_take_a_slow_server_longer() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    client
        .batch_execute("SELECT rouse.enqueue('x') FROM generate_series(1, 400)")
        .await
        .unwrap();
    let jobs = claim(&store, 400).await;
    assert_eq!(jobs.len(), 400);
    // The renewals of all jobs take at least 1.2 s.
    client
        .batch_execute(
            "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS
                 $$ BEGIN PERFORM pg_sleep(0.003); RETURN NEW; END $$;
             CREATE TRIGGER slow BEFORE UPDATE ON rouse.job FOR EACH ROW EXECUTE FUNCTION public.slow()",
        )
        .await
        .unwrap();
    let renewals: Vec<_> = jobs.iter().map(|job| renewal(job, 120_000)).collect();
    let responses = store.renew(&renewals).await.unwrap();
    assert_eq!(responses.len(), 400);
    assert!(responses.iter().all(|(_, refusal)| refusal.is_none()));
}

#[tokio::test]
async fn a_renewal_reports_why_a_worker_has_lost_a_job() {
    let db = TestDb::new().await;
    let (mut client, store) = (db.client().await, db.worker().await);
    for n in 0..5 {
        enqueue(&client, "x", json!(n)).await;
    }
    let jobs = claim(&store, 5).await;
    store
        .settle(&[settlement(&jobs[1], result("1"))], Locked::Wait)
        .await
        .unwrap();
    cancel(&client, jobs[2].id.0).await;
    client
        .execute(
            "UPDATE rouse.job SET fence = fence + 1 WHERE id = $1",
            &[&jobs[3].id.0],
        )
        .await
        .unwrap();
    client
        .execute("DELETE FROM rouse.job WHERE id = $1", &[&jobs[4].id.0])
        .await
        .unwrap();
    let renewals: Vec<_> = jobs.iter().map(|job| renewal(job, 120_000)).collect();
    let responses = store.renew(&renewals).await.unwrap();
    let reasons: Vec<_> = jobs
        .iter()
        .map(|job| responses.iter().find(|(id, _)| *id == job.id).unwrap().1)
        .collect();
    assert_eq!(
        reasons,
        [
            None,
            Some(Refusal::Lost(AbortReason::AlreadyCompleted)),
            Some(Refusal::Lost(AbortReason::Cancelled)),
            Some(Refusal::Lost(AbortReason::TakenByAnotherWorker)),
            Some(Refusal::Lost(AbortReason::NotFound)),
        ]
    );
    let left: f64 = client
        .query_one(
            "SELECT extract(epoch FROM lease_until - clock_timestamp())::float8 FROM rouse.job WHERE id = $1",
            &[&jobs[0].id.0],
        )
        .await
        .unwrap()
        .get(0);
    assert!(left > 110.0, "the lease was extended: {left}");
    assert_eq!(
        events(&client, jobs[0].id.0).await,
        ["requested", "claimed", "renewed"]
    );

    // If another transaction has locked the row, the renewal reports nothing and does not wait.
    let transaction = client.transaction().await.unwrap();
    lock_job(&transaction, jobs[0].id.0).await;
    let responses = store.renew(&renewals[..1]).await.unwrap();
    assert_eq!(responses, [(jobs[0].id, Some(Refusal::Busy))]);
}

#[tokio::test]
async fn a_final_error_is_kept_with_the_job() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&store, 1).await.remove(0);
    let outcome = Outcome::TimedOut(error(ErrorKind::TimedOut));
    store
        .settle(&[settlement(&job, outcome)], Locked::Wait)
        .await
        .unwrap();
    let shown = show(&client, id).await;
    assert_eq!(shown.state, "timed_out");
    assert_eq!(shown.error.unwrap()["message"], "no");
    let row = client
        .query_one(
            "SELECT requested_at <= claimed_at AND claimed_at < started_at FROM rouse.job($1)",
            &[&id],
        )
        .await
        .unwrap();
    assert!(row.get::<_, bool>(0), "requested, claimed, started");
}

#[tokio::test]
async fn the_sabotage_for_the_chaos_test_accepts_a_stale_outcome() {
    let db = TestDb::new().await;
    let (client, owner, other) = (db.client().await, db.worker().await, db.worker().await);
    enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    let stale = Settlement {
        fence: Fence(job.fence.0 ^ 1),
        ..settlement(&job, result("1"))
    };
    let stale = std::slice::from_ref(&stale);
    let settled = other.settle(stale, Locked::Wait).await.unwrap();
    assert!(settled.accepted.is_empty());
    let sabotage = include_str!("../chaos/sabotage/no_fence.sql");
    client.batch_execute(sabotage).await.unwrap();
    let settled = other.settle(stale, Locked::Wait).await.unwrap();
    assert!(settled.accepted.contains(&job.id));
}
