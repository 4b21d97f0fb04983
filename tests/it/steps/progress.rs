//! Progress of running attempts.

use rouse::job::Fence;
use rouse::store::Report;
use rouse::worker::Settings;
use serde_json::{Value, json};

use super::{refused, until_waiting};
use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::worker::{TestWorker, cancel, enqueue, until_true};

#[tokio::test]
async fn concurrent_progress_reports_of_the_same_jobs_do_not_deadlock() {
    let db = TestDb::new().await;
    let (mut holder, client, store) = (db.client().await, db.client().await, db.worker().await);
    for _ in 0..2 {
        enqueue(&client, "x", json!({})).await;
    }
    let jobs = claim(&store, 2).await;
    let report = |place: usize| Report {
        id: jobs[place].id,
        fence: jobs[place].fence,
        percent: 1,
        step: "s".into(),
    };
    let ended = |place: usize| (jobs[place].id, jobs[place].fence);
    store.report(&[report(0), report(1)], &[]).await.unwrap();
    let open = holder.transaction().await.unwrap();
    open.query("SELECT FROM rouse.progress FOR UPDATE", &[])
        .await
        .unwrap();
    let call = |reported: usize, over: usize| {
        let (store, reported, over) = (store.clone(), report(reported), ended(over));
        tokio::spawn(async move { store.report(&[reported], &[over]).await })
    };
    let calls = [call(0, 1), call(1, 0)];
    // Both calls are in progress and have reached a locked row.
    until_true(
        &client,
        "SELECT count(*) = 2 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%rouse.report%'",
    )
    .await;
    open.rollback().await.unwrap();
    for call in calls {
        call.await.unwrap().expect("neither is a deadlock victim");
    }
}

#[tokio::test]
async fn progress_is_shown_during_the_attempt_and_only_its_worker_can_report_it() {
    let db = TestDb::new().await;
    let (client, owner, other) = (db.client().await, db.worker().await, db.worker().await);
    let id = enqueue(&client, "x", json!({})).await;
    let job = claim(&owner, 1).await.remove(0);
    let report = |fence, percent| Report {
        id: job.id,
        fence,
        percent,
        step: "half of it".into(),
    };
    let shown = async || -> Option<Value> {
        client
            .query_one("SELECT progress FROM rouse.job($1)", &[&id])
            .await
            .unwrap()
            .get(0)
    };
    assert_eq!(shown().await, None);

    let accepted = owner.report(&[report(job.fence, 50)], &[]).await.unwrap();
    assert_eq!(accepted, [job.id].into());
    let progress = shown().await.unwrap();
    assert_eq!(
        (&progress["percent"], &progress["step"]),
        (&json!(50), &json!("half of it"))
    );

    let stale = Fence(job.fence.0 ^ 1);
    assert!(
        owner
            .report(&[report(stale, 60)], &[])
            .await
            .unwrap()
            .is_empty()
    );
    assert!(
        other
            .report(&[report(job.fence, 60)], &[])
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(refused(&client).await, 1, "reported by the other worker");
    assert_eq!(shown().await.unwrap()["percent"], 50);

    // The next owner of the job starts without progress.
    client
        .execute(
            "UPDATE rouse.job SET fence = fence + 1 WHERE id = $1",
            &[&id],
        )
        .await
        .unwrap();
    assert_eq!(shown().await, None);
    owner.report(&[], &[(job.id, job.fence)]).await.unwrap();
    let left: i64 = client
        .query_one("SELECT count(*) FROM rouse.progress", &[])
        .await
        .unwrap()
        .get(0);
    assert_eq!(left, 0);
}

#[tokio::test]
async fn the_progress_of_a_handler_is_in_the_database_until_its_attempt_ends() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "test.steps", json!({"between": "wait"})).await;
    until_waiting(&client, id).await;
    cancel(&client, id).await;
    until_true(&client, "SELECT count(*) = 0 FROM rouse.progress").await;
    worker.drain().await;
}

#[tokio::test]
async fn a_progress_text_that_grows_by_escaping_is_cut_to_the_maximum_length() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    // Each of these characters is shown as several.
    let escaped = enqueue(
        &client,
        "test.wordy-progress",
        json!({"step": "\u{202a}".repeat(200)}),
    )
    .await;
    let other = enqueue(&client, "test.steps", json!({"between": "wait"})).await;
    until_waiting(&client, other).await;
    let sql = format!(
        "SELECT coalesce(length(progress->>'step') = 200, false) FROM rouse.job({escaped})"
    );
    until_true(&client, &sql).await;
    for id in [escaped, other] {
        cancel(&client, id).await;
    }
    worker.drain().await;
}
