//! Jobs that no live worker takes, shown with the reason.

use rouse::worker::Settings;
use serde_json::{Value, json};

use super::named;
use crate::support::claims::claim;
use crate::support::worker::{TestWorker, enqueue, enqueue_sql, until_true, watched};
use crate::support::{TestDb, run_rouse};

#[tokio::test]
async fn showing_a_queued_job_explains_why_no_worker_takes_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, _folder) = watched(&["noop.wasm"]).await;
    let settings = Settings {
        queues: vec!["mail".into()],
        ..named("mail-1")
    };
    let worker = TestWorker::start_on(&db, settings, catalog);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;
    client
        .query_one("SELECT rouse.pause_queue('mail')", &[])
        .await
        .unwrap();
    for (sql, expected) in [
        ("'no.such', queue => 'mail'", "has the handler no.such"),
        (
            "'noop', queue => 'other'",
            "serves queue other.\n    → Start a host with `--queue other`",
        ),
        ("'noop', queue => 'mail', tags => '{gpu}'", "has tag gpu"),
        ("'noop', queue => 'mail'", "Queue mail has been paused for"),
    ] {
        let id = enqueue_sql(&client, sql).await.to_string();
        run_rouse(&db, &["job", "show", &id])
            .await
            .exits(0)
            .prints(expected);
    }
    let listed = run_rouse(&db, &["job", "ls"]).await;
    listed
        .exits(0)
        .prints("has the handler no.such")
        .prints("serves the queue other")
        .prints("requires (gpu)")
        .prints("queue mail has been paused since");
    assert_eq!(listed.stderr.lines().count(), 4, "{}", listed.stderr);
    worker.drain().await;
}

#[tokio::test]
async fn an_orphan_that_no_worker_can_adopt_is_shown_as_such() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let dead = db.worker().await;
    let id = enqueue(&client, "video.cut", json!({})).await;
    assert_eq!(claim(&dead, 1).await.len(), 1);
    let running = run_rouse(&db, &["job", &id.to_string(), "--json"]).await;
    running.exits(0);
    assert_eq!(running.json()["orphaned_at"], Value::Null);

    let end = "UPDATE rouse.job SET lease_until = clock_timestamp() - interval '1 minute' WHERE state = 'running'";
    client.execute(end, &[]).await.unwrap();
    let no_worker = "no running worker has the handler video.cut";
    run_rouse(&db, &["job", &id.to_string()])
        .await
        .exits(0)
        .prints("orphaned_at")
        .prints("No running worker has the handler video.cut.");
    run_rouse(&db, &["job", "ls"])
        .await
        .exits(0)
        .prints("orphan")
        .prints(no_worker);
    let fleet = run_rouse(&db, &["handlers", "ls", "--json"]).await;
    let waiting = &fleet.json()["waiting"][0];
    assert_eq!(
        (
            &waiting["handler"],
            &waiting["orphans"],
            &waiting["running"]
        ),
        (&json!("video.cut"), &json!(1), &json!(1))
    );
    run_rouse(&db, &["handlers", "ls"])
        .await
        .prints("no worker can run these:")
        .prints("orphans");
}
