//! The page of a worker.

use rouse::store::{Store, connect::Connector};
use serde_json::json;

use super::Dashboard;
use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::worker::enqueue;

#[tokio::test]
async fn the_page_of_a_worker_lists_the_jobs_that_it_runs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let id = enqueue(&client, "a.b", json!({})).await;
    let queued = enqueue(&client, "a.b", json!({})).await;
    assert_eq!(claim(&worker, 1).await.len(), 1);
    let sql = "SELECT worker_id FROM rouse.worker";
    let worker: String = client.query_one(sql, &[]).await.unwrap().get(0);
    let dashboard = Dashboard::start(&db, &[]);
    let page = dashboard.get(&format!("/workers/{worker}")).await.body;
    let link = |id: i64| format!("/ui/jobs/{id}\"");
    assert!(page.contains(&link(id)), "{page}");
    assert!(!page.contains(&link(queued)), "{page}");
}

#[tokio::test]
async fn the_page_of_a_worker_says_that_it_runs_more_jobs_than_are_listed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (busy, other) = (db.worker().await, db.worker().await);
    client
        .execute(
            "SELECT rouse.enqueue('a.b') FROM generate_series(1, 52)",
            &[],
        )
        .await
        .unwrap();
    assert_eq!(claim(&other, 1).await.len(), 1);
    assert_eq!(claim(&busy, 50).await.len(), 50);
    let dashboard = Dashboard::start(&db, &[]);
    let page = async || dashboard.get("/workers/w-1").await.body;
    let listed = |page: &str| page.matches("<tr id=\"job-").count();
    let notice = "Only the 50 that have run longest";
    let all = page().await;
    assert_eq!(listed(&all), 50, "{all}");
    assert!(!all.contains(notice), "{all}");
    let newest = claim(&busy, 1).await;
    let longest = page().await;
    assert_eq!(listed(&longest), 50, "{longest}");
    assert!(longest.contains(notice), "{longest}");
    let link = format!("/ui/jobs/{}\"", newest[0].id.0);
    assert!(!longest.contains(&link), "{longest}");
}

#[tokio::test]
async fn a_login_that_may_not_read_running_jobs_gets_no_page_on_which_a_worker_runs_nothing() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "DO $$ BEGIN CREATE ROLE workers_reader LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$;
             GRANT rouse_observer TO workers_reader;
             REVOKE SELECT ON rouse.job FROM rouse_observer",
        )
        .await
        .unwrap();
    let worker = db.worker().await;
    enqueue(&client, "a.b", json!({})).await;
    assert_eq!(claim(&worker, 1).await.len(), 1);
    let url = db.url().replace("rouse@", "workers_reader@");
    let dashboard = Dashboard::start(&db, &[("ROUSE_UI_DATABASE_URL", &url)]);
    assert_eq!(dashboard.get("/workers").await.status, 200);
    let page = dashboard.get("/workers/w-1").await;
    assert_eq!(page.status, 403, "{}", page.body);
    let words = "may not read the running jobs";
    assert!(page.body.contains(words), "{}", page.body);
}

/// The login of the dashboard may have no role but that of observers.
#[tokio::test]
async fn the_running_jobs_of_a_worker_are_found_among_a_limited_number() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("DO $$ BEGIN CREATE ROLE workers_observer LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END $$; GRANT rouse_observer TO workers_observer")
        .await
        .unwrap();
    let url = db.url().replace("rouse@", "workers_observer@");
    let observer = Store::new(&Connector::from_url(&url, &|_| None).unwrap(), 1);
    let (first, second) = (db.worker().await, db.worker().await);
    let ids = [
        enqueue(&client, "a.b", json!({})).await,
        enqueue(&client, "a.b", json!({})).await,
    ];
    claim(&first, 1).await;
    claim(&second, 1).await;
    let found = async |worker, examine| {
        let running = observer.running_on(worker, 10, examine).await.unwrap();
        let running = running.expect("an observer may read it");
        let ids = running.attempts.iter().map(|it| it["id"].as_i64().unwrap());
        (ids.collect::<Vec<_>>(), running.examined_count)
    };
    assert_eq!(found("w-1", 10).await, (vec![ids[0]], 2));
    assert_eq!(found("w-2", 10).await, (vec![ids[1]], 2));
    // The lease of this job ends first.
    assert_eq!(found("w-1", 1).await, (vec![ids[0]], 1));
    assert_eq!(found("w-2", 1).await, (vec![], 1));
    assert_eq!(found("w-3", 10).await, (vec![], 2));
}
