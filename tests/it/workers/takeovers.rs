//! Worker ids that change hands: expiry, restarts and shared ids, with running hosts.

use rouse::store::WorkerKey;
use rouse::worker::Settings;
use serde_json::json;

use super::{heartbeat, states};
use crate::support::TestDb;
use crate::support::database::registration;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{
    SESSION_WAITS, TestWorker, backdate_heartbeat, cancel, catalog, ended, enqueue, show, until,
    until_true,
};

#[tokio::test]
async fn an_expired_worker_stops_its_attempts_and_starts_a_new_incarnation() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, id, |job| job.state == "running").await;
    // The worker learns from its next heartbeat that it has expired.
    client
        .batch_execute("SELECT rouse._expire_worker(incarnation) FROM rouse.worker")
        .await
        .unwrap();
    until_true(
        &client,
        "SELECT count(*) = 2 AND count(*) FILTER (WHERE state = 'active') = 1 FROM rouse.workers",
    )
    .await;
    // The new incarnation has adopted the job, and other jobs run.
    until_true(
        &client,
        "SELECT count(*) = 1 FROM rouse.job AS j JOIN rouse.workers AS w ON w.incarnation = j.worker WHERE w.state = 'active'",
    )
    .await;
    let other = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, other).await.state, "succeeded");
    worker.stop_now().await;
    assert_eq!(show(&client, id).await.state, "queued");
}

#[tokio::test]
async fn a_worker_unknown_to_the_database_registers_again() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    // A restore of the database has this effect. The next claim is refused.
    client
        .batch_execute("DELETE FROM rouse.worker; DELETE FROM rouse.sleeper")
        .await
        .unwrap();
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    let incarnations = states(&client).await;
    assert_eq!(incarnations.len(), 1, "{incarnations:?}");
    worker.drain().await;
}

/// A failover may lose the registration of a worker together with the end of its previous incarnation, which had a
/// different key.
#[tokio::test]
async fn a_worker_unknown_to_the_database_waits_until_its_earlier_incarnation_is_dead() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let proxy = Proxy::start(&db).await;
    let settings = Settings {
        worker_id: "mail".into(),
        ..Settings::default()
    };
    let worker =
        TestWorker::start_through(proxy.store(), db.connector(), settings, catalog().await);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let first = proxy.hold("rouse.register(", Side::Statement);
    client
        .batch_execute("UPDATE rouse.worker SET key_hash = sha256('another key'), seen_at = now()")
        .await
        .unwrap();
    // The claim of this job is refused.
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    first.caught().await;
    let second = proxy.hold("rouse.register(", Side::Statement);
    first.release();
    // The worker tries again although the id was taken.
    second.caught().await;
    client
        .batch_execute("UPDATE rouse.worker SET seen_at = now() - interval '91 s'")
        .await
        .unwrap();
    second.release();
    assert_eq!(ended(&client, id).await.state, "succeeded");
    let dead_and_active = [("mail", "dead"), ("mail", "active")];
    assert_eq!(
        states(&client).await,
        dead_and_active.map(|(id, state)| (id.into(), state.into()))
    );
    worker.drain().await;
}

#[tokio::test]
async fn the_first_of_two_hosts_with_the_same_id_and_key_stops_and_stays_stopped() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let same = Settings {
        worker_id: "mail".into(),
        key: WorkerKey::new([7; 32]),
        ..Settings::default()
    };
    let first = TestWorker::start(&db, same.clone()).await;
    until_true(&client, "SELECT count(*) = 1 FROM rouse.workers").await;
    let running = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, running, |job| job.state == "running").await;
    let second = TestWorker::start(&db, same.clone()).await;
    let why = first.failed().await;
    assert!(why.contains("taken over worker id mail"), "{why}");
    // A supervisor would restart it like this. The worker does not take the id back, so that no jobs are lost while the
    // two hosts compete for it.
    for _ in 0..3 {
        let why = TestWorker::start(&db, same.clone()).await.failed().await;
        assert!(why.contains("two hosts share worker id mail"), "{why}");
        assert!(why.contains("worker_key_file"), "{why}");
    }
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    until(&client, running, |job| job.attempt == 2).await;
    assert!(cancel(&client, running).await);
    second.drain().await;
    assert_eq!(show(&client, running).await.attempt, 2, "lost only once");
}

#[tokio::test]
async fn a_shared_id_is_free_again_once_its_holder_is_silent() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mail = || registration("mail", WorkerKey::new([7; 32]));
    let (first, second) = (db.store(), db.store());
    first.register(&mail()).await.unwrap();
    second.register(&mail()).await.unwrap();
    // The first worker has not sent a heartbeat since: it may have crashed, and this may be its successor.
    let third = db.store();
    third.register(&mail()).await.unwrap();
    second.outlived().await.unwrap();
    let refused = second.register(&mail()).await.unwrap_err();
    assert!(refused.is_taken(), "{refused}");
    backdate_heartbeat(&client, &third, 91).await;
    second.register(&mail()).await.unwrap();
    // After 10 minutes, a takeover is possible again.
    client
        .execute(
            "UPDATE rouse.worker SET outlived_at = outlived_at - interval '10 minutes'",
            &[],
        )
        .await
        .unwrap();
    db.store().register(&mail()).await.unwrap();
}

/// The holder of the id could otherwise not be replaced by a host that has its key.
#[tokio::test]
async fn a_host_that_takes_the_id_of_a_dead_one_with_another_key_does_not_share_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let dead = db.store();
    let other_key = registration("mail", WorkerKey::random());
    dead.register(&other_key).await.unwrap();
    backdate_heartbeat(&client, &dead, 91).await;
    let mail = || registration("mail", WorkerKey::new([7; 32]));
    db.store().register(&mail()).await.unwrap();
    // It was only frozen.
    dead.outlived().await.unwrap();
    let successor = db.store().register(&mail()).await;
    successor.expect("it has the key of the holder");
}

/// Otherwise, the worker would lose its attempts.
#[tokio::test]
async fn a_heartbeat_that_has_not_committed_yet_keeps_the_worker_alive() {
    let db = TestDb::new().await;
    let (client, beating) = (db.client().await, db.client().await);
    let (holder, other) = (db.store(), db.store());
    let mail = registration("mail", WorkerKey::new([7; 32]));
    holder.register(&mail).await.unwrap();
    let beat = format!(
        "BEGIN; SELECT rouse.heartbeat({}, decode(repeat('07', 32), 'hex'), NULL, '{{}}', false)",
        holder.incarnation().unwrap().0
    );
    let start = async || {
        backdate_heartbeat(&client, &holder, 91).await;
        beating.batch_execute(&beat).await.unwrap();
    };
    let commit = async || {
        until_true(&client, SESSION_WAITS).await;
        beating.batch_execute("COMMIT").await.unwrap();
    };

    start().await;
    let mail = registration("mail", WorkerKey::random());
    let (refused, ()) = tokio::join!(other.register(&mail), commit());
    let refused = refused.unwrap_err();
    assert!(refused.is_taken(), "{refused}");

    start().await;
    let (refused, ()) = tokio::join!(other.forget_worker("mail"), commit());
    let refused = refused.unwrap_err();
    assert!(refused.is_refused_by_state(), "{refused}");
    heartbeat(&holder).await.expect("it has not been expired");
}

/// Both lock all incarnations of a worker.
#[tokio::test]
async fn a_worker_is_forgotten_while_its_timeouts_are_cleared_without_a_deadlock() {
    let db = TestDb::new().await;
    let (client, mut holder) = (db.client().await, db.client().await);
    let mail = registration("mail", WorkerKey::new([7; 32]));
    db.store().register(&mail).await.unwrap();
    let newest = db.store();
    newest.register(&mail).await.unwrap();
    backdate_heartbeat(&client, &newest, 91).await;
    // A call that locks the rows as it reads them starts with the oldest incarnation.
    client
        .batch_execute(
            "UPDATE rouse.worker SET timeouts = 1, timed_out_since = now();
             CLUSTER rouse.worker USING worker_pkey",
        )
        .await
        .unwrap();
    let waiting = async |calls: i64| {
        let waiting = format!(
            "SELECT count(*) = {calls} FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        );
        until_true(&client, &waiting).await;
    };
    let holds = holder.transaction().await.unwrap();
    let lock = format!(
        "SELECT FROM rouse.worker WHERE incarnation = {} FOR UPDATE",
        newest.incarnation().unwrap().0
    );
    holds.batch_execute(&lock).await.unwrap();
    // The call that waits first is the first to get the row.
    let store = db.store();
    let forgotten = tokio::spawn(async move { store.forget_worker("mail").await });
    waiting(1).await;
    let store = db.store();
    let cleared = tokio::spawn(async move { store.clear_timeouts("mail").await });
    waiting(2).await;
    holds.rollback().await.unwrap();
    assert_eq!(forgotten.await.unwrap().unwrap(), 2);
    assert_eq!(cleared.await.unwrap().unwrap(), 0, "they are forgotten");
}

/// The primary key of `rouse.worker` does not prevent it.
#[tokio::test]
async fn an_incarnation_is_not_assigned_twice_although_its_sequence_is_behind() {
    const CORRECT: &str =
        "SELECT setval('rouse.worker_incarnation_seq', max(incarnation)) FROM rouse.worker";
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..3 {
        db.worker().await.unregister().await.unwrap();
    }
    let behind = "SELECT setval('rouse.worker_incarnation_seq', 1)";
    client.batch_execute(behind).await.unwrap();
    let mail = || registration("mail", WorkerKey::random());
    let refused = db.store().register(&mail()).await.unwrap_err().to_string();
    assert!(
        refused.contains("incarnation 2 was already assigned") && refused.contains(CORRECT),
        "{refused}"
    );
    client.batch_execute(CORRECT).await.unwrap();
    let (incarnation, _) = db.store().register(&mail()).await.unwrap();
    assert_eq!(incarnation.0, 4);
}
