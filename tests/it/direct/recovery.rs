//! Jobs in the inbox of a worker that has stopped, and jobs whose attempt did not end them.

use std::sync::Arc;
use std::time::Duration;

use rouse::job::{ErrorKind, Fence, Outcome};
use rouse::store::{InboxRecovery, Locked, Registration, Stats, WorkerKey};
use serde_json::json;
use tokio::sync::Barrier;

use super::{declare_dead, direct, enqueue, inbox, lanes, register, with_handlers, worker};
use crate::support::claims::{adopt, claim, claim_one, error, orders, settlement};
use crate::support::worker::enqueue_sql;

const NOTHING: InboxRecovery = InboxRecovery {
    moved: 0,
    late: 0,
    next: None,
};

#[tokio::test]
async fn the_inbox_of_a_dead_worker_is_recovered_once_by_any_number_of_workers() {
    let (db, client) = direct("'random'").await;
    let dead = worker(&db, "dead").await;
    let many =
        "SELECT rouse.enqueue_many('greet', array_fill('{}'::jsonb, ARRAY[900]), queue => 'q')";
    client.batch_execute(many).await.unwrap();
    // These jobs have waited for others, and become ready later.
    for _ in 0..10 {
        let first = enqueue_sql(&client, "'greet'").await;
        let waiting = enqueue_sql(
            &client,
            &format!("'greet', queue => 'q', after => '[{first}]'"),
        )
        .await;
        assert_eq!(inbox(&client, waiting).await, "dead");
    }
    let mut others = Vec::new();
    for id in ["a", "b", "c"] {
        others.push(Arc::new(worker(&db, id).await));
    }
    assert_eq!(
        others[0].recover_direct(1000, None).await.unwrap(),
        NOTHING,
        "it is alive"
    );
    let highest: i64 = client
        .query_one("SELECT max(turn) FROM rouse.job", &[])
        .await
        .unwrap()
        .get(0);
    declare_dead(&client, &dead).await;
    let start = Arc::new(Barrier::new(others.len()));
    let calls: Vec<_> = others
        .iter()
        .map(|store| {
            let (store, start) = (store.clone(), start.clone());
            tokio::spawn(async move {
                start.wait().await;
                let (mut moved, mut from) = (0, None);
                loop {
                    let recovered = store.recover_direct(100, from).await.unwrap();
                    moved += recovered.moved;
                    from = recovered.next;
                    if from.is_none() {
                        break moved;
                    }
                }
            })
        })
        .collect();
    let mut moved = 0;
    for call in calls {
        moved += call.await.unwrap();
    }
    // A call that finds the inbox or all rows locked ends early, and the next round continues.
    while let recovered @ InboxRecovery { moved: 1.., .. } =
        others[0].recover_direct(1000, None).await.unwrap()
    {
        moved += recovered.moved;
    }
    assert_eq!(moved, 910, "each job was moved once");
    let turns = "SELECT count(DISTINCT j.turn), min(j.turn) > $1
                 FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane WHERE l.queue = 'q' AND j.turn IS NOT NULL";
    let row = client.query_one(turns, &[&highest]).await.unwrap();
    assert_eq!(
        (row.get::<_, i64>(0), row.get::<_, bool>(1)),
        (900, true),
        "cursors find their new turns"
    );
    assert_eq!(
        lanes(&client).await.len(),
        1,
        "all are in lanes without a key"
    );
}

#[tokio::test]
async fn jobs_that_waited_for_more_than_a_day_are_counted() {
    let (db, client) = direct("'random'").await;
    let dead = worker(&db, "dead").await;
    for _ in 0..3 {
        enqueue(&client, "").await;
    }
    let old = "UPDATE rouse.job SET available_at = now() - interval '25 hours' WHERE id = (SELECT min(id) FROM rouse.job)";
    client.batch_execute(old).await.unwrap();
    declare_dead(&client, &dead).await;
    let store = worker(&db, "a").await;
    let recovered = store.recover_direct(2, None).await.unwrap();
    assert_eq!((recovered.moved, recovered.late), (2, 1));
    assert!(recovered.next.is_some(), "there may be more");
    assert_eq!(store.recover_direct(2, None).await.unwrap().moved, 1);
    assert_eq!(store.recover_direct(2, None).await.unwrap(), NOTHING);
}

#[tokio::test]
async fn jobs_of_high_priority_are_recovered_first() {
    let (db, client) = direct("'random'").await;
    let dead = worker(&db, "dead").await;
    let mut jobs = Vec::new();
    for priority in ["low", "normal", "high"] {
        let arguments = format!("'greet', queue => 'q', priority => '{priority}'");
        jobs.push(enqueue_sql(&client, &arguments).await);
    }
    declare_dead(&client, &dead).await;
    let store = worker(&db, "a").await;
    let mut from = None;
    for id in jobs.iter().rev() {
        assert_eq!(inbox(&client, *id).await, "dead");
        let recovered = store.recover_direct(1, from).await.unwrap();
        assert_eq!(
            (recovered.moved, inbox(&client, *id).await),
            (1, String::new())
        );
        from = recovered.next;
    }
    assert_eq!(store.recover_direct(1, from).await.unwrap(), NOTHING);
}

/// An open transaction keeps the index entries of the jobs that were moved.
#[tokio::test]
async fn a_recovery_continues_where_its_last_call_has_stopped() {
    let (db, client) = direct("'random'").await;
    let dead = worker(&db, "dead").await;
    let mut jobs = Vec::new();
    for _ in 0..3 {
        jobs.push(enqueue_sql(&client, "'greet', queue => 'q'").await);
    }
    declare_dead(&client, &dead).await;
    let store = worker(&db, "a").await;
    let first = store.recover_direct(1, None).await.unwrap();
    let (lane, turn) = first.next.expect("there are more");
    assert_eq!(turn, jobs[0]);
    // The job is back in the inbox, as if it had been committed late.
    client
        .execute(
            "UPDATE rouse.job SET lane = $2, turn = id WHERE id = $1",
            &[&jobs[0], &lane.0],
        )
        .await
        .unwrap();
    let rest = store.recover_direct(10, first.next).await.unwrap();
    assert_eq!((rest.moved, rest.next), (2, None));
    assert_eq!(inbox(&client, jobs[0]).await, "dead");
    let next_round = store.recover_direct(10, None).await.unwrap();
    assert_eq!(next_round.moved, 1);
}

#[tokio::test]
async fn an_inbox_that_another_worker_recovers_is_left_to_it() {
    let (db, client) = direct("'random'").await;
    let dead = worker(&db, "dead").await;
    enqueue(&client, "").await;
    declare_dead(&client, &dead).await;
    let store = worker(&db, "a").await;
    let mut other = db.client().await;
    let recovering = other.transaction().await.unwrap();
    recovering
        .batch_execute("SELECT FROM rouse.lane WHERE worker IS NOT NULL FOR NO KEY UPDATE")
        .await
        .unwrap();
    assert_eq!(store.recover_direct(10, None).await.unwrap(), NOTHING);
    recovering.rollback().await.unwrap();
    assert_eq!(store.recover_direct(10, None).await.unwrap().moved, 1);
}

#[tokio::test]
async fn a_worker_gives_its_inbox_back_when_it_drains_or_stops_or_is_replaced() {
    let (db, client) = direct("'random'").await;
    let key = WorkerKey::new([7; 32]);
    let pinned = Registration {
        key: key.clone(),
        ..with_handlers("a")
    };
    for end in ["drain", "stop", "replace"] {
        let store = register(&db, &pinned).await;
        let id = enqueue_sql(&client, "'greet', queue => 'q'").await;
        assert_eq!(inbox(&client, id).await, "a");
        match end {
            "drain" => {
                store
                    .heartbeat(None, &Stats::default(), true)
                    .await
                    .unwrap();
            }
            "stop" => store.unregister().await.unwrap(),
            _ => {
                let fresh = register(&db, &pinned).await;
                let of = "SELECT count(*) FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane WHERE l.worker = $1";
                let inherited: i64 = client
                    .query_one(of, &[&fresh.incarnation().unwrap().0])
                    .await
                    .unwrap()
                    .get(0);
                assert_eq!(inherited, 0);
            }
        }
        assert_eq!(inbox(&client, id).await, "", "{end}");
        assert_eq!(
            claim(&worker(&db, end).await, 10).await.len(),
            1,
            "{end}: others take it at once"
        );
        client.batch_execute("DELETE FROM rouse.job; UPDATE rouse.worker SET stopped_at = now() WHERE stopped_at IS NULL").await.unwrap();
    }
}

#[tokio::test]
async fn jobs_of_a_handler_that_a_live_worker_has_lost_leave_its_inbox() {
    let (db, client) = direct("'random'").await;
    let store = worker(&db, "a").await;
    assert_eq!(enqueue(&client, "").await, "a");
    let other = worker(&db, "b").await;
    let gone = json!({"greet": null, "test.sleep": null});
    store
        .heartbeat(Some(&gone), &Stats::default(), false)
        .await
        .unwrap();
    assert_eq!(other.recover_direct(10, None).await.unwrap().moved, 1);
}

#[tokio::test]
async fn a_job_that_its_attempt_does_not_end_leaves_the_inbox() {
    let (db, client) = direct("'random'").await;
    client
        .batch_execute("SELECT rouse.set_fair_share('q', policy => 'drr')")
        .await
        .unwrap();
    let store = worker(&db, "a").await;
    let retry = || Outcome::Retry {
        again: Duration::from_secs(3600).into(),
        error: error(ErrorKind::GuestError),
    };
    for (outcome, is_ready) in [(retry(), false), (Outcome::Released, true)] {
        let id = enqueue_sql(&client, "'greet', queue => 'q', tenant => 'acme'").await;
        assert_eq!(inbox(&client, id).await, "a");
        let job = claim_one(&store).await;
        store
            .settle(&[&settlement(&job, outcome)], Locked::Wait)
            .await
            .unwrap();
        let lane = "SELECT l.key, j.turn IS NOT NULL FROM rouse.job AS j JOIN rouse.lane AS l ON l.id = j.lane WHERE j.id = $1";
        let row = client.query_one(lane, &[&id]).await.unwrap();
        let (key, ready): (String, bool) = (row.get(0), row.get(1));
        assert_eq!(
            (key.as_str(), ready),
            (r#"{"tenant": "acme"}"#, is_ready),
            "it keeps its other values"
        );
        client.batch_execute("DELETE FROM rouse.job").await.unwrap();
    }
    // A retry by an operator.
    let id = enqueue_sql(&client, "'greet', queue => 'q', tenant => 'acme'").await;
    client
        .batch_execute(&format!("SELECT rouse.fail({id}, 'no')"))
        .await
        .unwrap();
    let again: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&id])
        .await
        .unwrap()
        .get(0);
    assert_eq!(inbox(&client, again).await, "");
}

#[tokio::test]
async fn an_orphan_of_an_inbox_is_adopted_by_any_worker() {
    let (db, client) = direct("'random'").await;
    let dead = worker(&db, "dead").await;
    let id = enqueue_sql(&client, "'greet', queue => 'q'").await;
    assert_eq!(claim(&dead, 1).await.len(), 1);
    client
        .batch_execute("UPDATE rouse.job SET lease_until = now() - interval '1 s'")
        .await
        .unwrap();
    let other = worker(&db, "b").await;
    let orders = orders(&other, 60_000).await;
    let adopted = adopt(&other, Fence(7), &orders, 10, 3, None).await.unwrap();
    assert_eq!(adopted.claimed[0].id.0, id);
}

#[tokio::test]
async fn inboxes_of_ended_workers_leave_the_catalog_before_other_lanes() {
    let (db, client) = direct("'random'").await;
    let store = worker(&db, "a").await;
    enqueue(&client, "").await;
    store.unregister().await.unwrap();
    client
        .batch_execute(
            "DELETE FROM rouse.job; UPDATE rouse.lane SET used_at = now() - interval '3 hours'",
        )
        .await
        .unwrap();
    let other = worker(&db, "b").await;
    let closed = async || -> i64 {
        other.maintain_lanes().await.unwrap();
        let closed =
            "SELECT count(*) FROM rouse.lane WHERE closed_at IS NOT NULL AND worker IS NOT NULL";
        client.query_one(closed, &[]).await.unwrap().get(0)
    };
    assert_eq!(closed().await, 1);
    let shared: i64 = client
        .query_one(
            "SELECT count(*) FROM rouse.lane WHERE closed_at IS NULL",
            &[],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(shared, 1);
    // A job that a late commit leaves in a closed inbox is recovered.
    client
        .batch_execute(
            "INSERT INTO rouse.job (id, lane, turn, requested_at, available_at, bytes, payload)
             SELECT 900001, l.id, 900001, now(), now(), 2, '{}' FROM rouse.lane AS l WHERE l.worker IS NOT NULL",
        )
        .await
        .unwrap();
    assert_eq!(other.recover_direct(10, None).await.unwrap().moved, 1);
}

/// Inboxes stay in the catalog as long as ended jobs refer to them.
#[tokio::test]
async fn an_inbox_that_was_closed_for_a_day_is_recovered_after_maintenance_has_opened_it() {
    let (db, client) = direct("'random'").await;
    let store = worker(&db, "a").await;
    let id = enqueue_sql(&client, "'greet', queue => 'q'").await;
    declare_dead(&client, &store).await;
    let other = worker(&db, "b").await;
    client
        .batch_execute(
            "UPDATE rouse.lane SET closed_at = now() - interval '25 hours' WHERE worker IS NOT NULL",
        )
        .await
        .unwrap();
    assert_eq!(other.recover_direct(10, None).await.unwrap(), NOTHING);
    let (_, reopened, _) = other.maintain_lanes().await.unwrap();
    assert_eq!(reopened, 1);
    assert_eq!(other.recover_direct(10, None).await.unwrap().moved, 1);
    assert_eq!(inbox(&client, id).await, "");
}
