//! Deadlines on hosts that are idle, and on hosts whose slots are all taken.

use std::time::Duration;

use rouse::store::connect::Connector;
use rouse::store::{Registration, Store, WorkerKey};
use rouse::worker::{Intervals, Settings};
use serde_json::{Value, json};

use super::{enforced, one, pass};
use crate::support::database::{refusal, registration};
use crate::support::worker::{
    TIMEOUT, TestWorker, ended, enqueue, enqueue_sql, events_at_any_speed, guests_dir, show, until,
    until_true,
};
use crate::support::{Host, TestDb};

#[tokio::test]
async fn an_idle_host_ends_a_job_for_which_no_worker_has_a_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // Without notifications: the host detects the deadline in its looks.
    let settings = Settings {
        notify: false,
        intervals: Intervals {
            deadlines: Duration::from_secs(3_600),
            ..Intervals::default()
        },
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.worker)").await;
    let id = enqueue_sql(
        &client,
        "'nobody.has-it', job_timeout => '300 milliseconds'",
    )
    .await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 0));
    let error = job.error.unwrap_or_default();
    assert_eq!(error["kind"], "job_timeout");
    let sql = "SELECT finished_at >= requested_at + interval '300 milliseconds' FROM rouse.jobs";
    assert!(one::<bool>(&client, sql).await, "not before its deadline");
    worker.drain().await;
}

#[tokio::test]
async fn a_host_whose_only_slot_is_taken_stops_the_attempt_whose_deadline_has_passed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        slots: 1,
        intervals: Intervals {
            deadlines: Duration::from_millis(100),
            ..Intervals::default()
        },
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let arguments = "'test.wait-abort', job_timeout => '1 hour', max_attempts => 5";
    let id = enqueue_sql(&client, arguments).await;
    until(&client, id, |job| job.state == "running").await;
    let next = enqueue(&client, "noop", json!({})).await;
    pass(&client, id).await;
    let job = ended(&client, id).await;
    let kind = job.error.unwrap_or_default()["kind"].clone();
    assert_eq!((job.state.as_str(), kind), ("failed", json!("job_timeout")));
    // The attempt waits for the abort signal, and the lease of the job is longer than this.
    let next = tokio::time::timeout(Duration::from_secs(15), ended(&client, next));
    let next = next.await.expect("the slot is free again");
    assert_eq!(next.state, "succeeded");
    worker.drain().await;
    let job = show(&client, id).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("failed", 1),
        "its outcome was refused"
    );
    let events = events_at_any_speed(&client, id).await;
    assert_eq!(events, ["requested", "claimed", "failed"]);
}

#[tokio::test]
async fn hosts_log_the_end_as_an_event() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let guests = guests_dir();
    let args = ["--log-format", "json", "serve", "--handlers"];
    let args: Vec<&str> = args.into_iter().chain(guests.to_str()).collect();
    let host = Host::rouse(&args, &[("DATABASE_URL", &db.url()), ("ROUSE_LOG", "info")]);
    host.line(TIMEOUT, |line| line.contains("worker started"));
    let id = enqueue_sql(&client, "'nobody.has-it', job_timeout => '1 millisecond'").await;
    let line = host.line(TIMEOUT, |line| line.contains("\"failed\""));
    let event: Value = serde_json::from_str(&line).unwrap();
    let fields = event.get("fields").unwrap_or(&event);
    assert_eq!(fields["job.id"], json!(id), "{line}");
    assert_eq!(fields["handler"], "nobody.has-it", "{line}");
    let error = fields["error"].as_str().unwrap_or_default();
    let error: Value = serde_json::from_str(error).unwrap();
    assert_eq!(error["kind"], "job_timeout");
    assert_eq!(
        error["message"],
        "the job had not ended within 0.001 seconds, the job timeout that it was enqueued with"
    );
    host.signal(libc::SIGTERM);
    host.exit(TIMEOUT);
}

#[tokio::test]
async fn a_worker_of_a_limited_login_enforces_all_deadlines_but_sees_only_its_own_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let role = "CREATE ROLE late_worker LOGIN IN ROLE rouse_worker; SET ROLE rouse_owner;
                INSERT INTO rouse.worker_login (login, worker_ids, queues) VALUES ('late_worker', '{*}', '{mail}'); RESET ROLE";
    client.batch_execute(role).await.unwrap();
    let url = db.url().replace("rouse@", "late_worker@");
    let connector = Connector::from_url(&url, &|_| None).unwrap();
    let store = Store::new(&connector, 2);
    let registration = Registration {
        queues: vec!["mail".into()],
        ..registration("late", WorkerKey::random())
    };
    store.register(&registration).await.unwrap();
    let own = enqueue_sql(&client, "'x', queue => 'mail', job_timeout => '1 hour'").await;
    let foreign = enqueue_sql(&client, "'x', job_timeout => '1 hour'").await;
    pass(&client, own).await;
    pass(&client, foreign).await;
    assert_eq!(enforced(&store).await, [own]);
    for id in [own, foreign] {
        assert_eq!(show(&client, id).await.state, "failed");
    }
    let outsider = "SET ROLE rouse_observer; SELECT rouse.enforce_deadlines(1, 'key', 1)";
    let refused = refusal(&client, outsider).await;
    assert!(
        refused.starts_with("permission denied for function enforce_deadlines"),
        "{refused}"
    );
}
