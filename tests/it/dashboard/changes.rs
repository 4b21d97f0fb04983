//! Changes that the forms of pages make.

use rouse::job::JobId;
use rouse::store::LockWait;
use serde_json::json;

use super::{Dashboard, ids, shop};
use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::worker::{enqueue, enqueue_sql};

#[tokio::test]
async fn a_job_gets_signals_results_and_messages() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let all = ids(
        &client,
        "SELECT rouse.enqueue('a.b', '{}') FROM generate_series(1, 3)",
    )
    .await;
    let dashboard = Dashboard::start(&db, &[]);
    let token = dashboard.form_token(&format!("/jobs/{}", all[0])).await;
    for (id, action, form, words) in [
        (
            all[0],
            "signal",
            "name=approved&payload=%7B%22by%22%3A%22Ada%22%7D",
            "has received the signal approved",
        ),
        (all[1], "complete", "result=7", "has succeeded"),
        (all[2], "fail", "message=by+hand", "has failed"),
        (
            all[0],
            "complete",
            "result=%7B",
            "invalid input syntax for type json",
        ),
        (all[0], "fail", "", "The message is missing"),
        (all[1], "cancel", "", "had already ended"),
        (all[0], "priority", "priority=high", "has the priority high"),
        (
            all[0],
            "replace-payload",
            "payload=%7B",
            "invalid input syntax for type json",
        ),
        (all[0], "run-now", "", "is due now"),
        (
            all[0],
            "replace-payload",
            "payload=%7B%22n%22%3A7%7D",
            "has this payload",
        ),
        (999_999, "retry", "", "999999"),
    ] {
        let done = dashboard
            .post(
                &format!("/jobs/{id}/{action}"),
                &format!("csrf={token}&{form}"),
            )
            .await;
        assert_eq!(done.status, 303, "{action}: {}", done.body);
        let notice = done.cookie();
        let shown = dashboard
            .send("GET", "/", &[("Cookie", &notice)], "")
            .await
            .body;
        assert!(shown.contains(words), "{action} without {words:?}: {shown}");
    }
    let unknown = dashboard
        .post("/jobs/1/explode", &format!("csrf={token}"))
        .await;
    assert_eq!(unknown.status, 404);
    let result: String = client
        .query_one("SELECT rouse.result($1)::text", &[&all[1]])
        .await
        .unwrap()
        .get(0);
    assert_eq!(result, "7");
    let signals = ids(&client, "SELECT count(*) FROM rouse.signal").await[0];
    assert_eq!(signals, 1);
    let edited = ids(
        &client,
        "SELECT retried_from FROM rouse.jobs WHERE payload = '{\"n\": 7}' AND priority = 'high'",
    )
    .await;
    assert_eq!(edited, [all[0]]);
}

#[tokio::test]
async fn an_action_on_a_locked_queue_names_what_it_has_waited_for_and_is_not_made_later() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let transaction = client.transaction().await.unwrap();
    // The row is not committed.
    let pause = "SELECT rouse.pause_queue('mail')";
    transaction.query(pause, &[]).await.unwrap();
    let dashboard = Dashboard::start(&db, &[]);
    enqueue_sql(&watcher, "'a.b', queue => 'mail'").await;
    let token = dashboard.form_token("/queues").await;
    let done = dashboard
        .post("/queues/mail/pause", &format!("csrf={token}"))
        .await;
    assert_eq!(done.status, 303, "{}", done.body);
    let notice = done.cookie();
    let shown = dashboard
        .send("GET", "/", &[("Cookie", &notice)], "")
        .await
        .body;
    let words = "It waited for a transaction that has changed a queue";
    assert!(shown.contains(words), "{shown}");
    transaction.rollback().await.unwrap();
    let paused = "SELECT count(*) FROM rouse.queue WHERE paused_at IS NOT NULL";
    assert_eq!(ids(&watcher, paused).await, [0]);
}

#[tokio::test]
async fn a_change_of_a_flow_that_stops_at_a_locked_job_says_what_was_done() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let enqueue =
        "SELECT rouse.enqueue_flow(jsonb_agg(jsonb_build_object('name', n, 'handler', 'x')))
         FROM unnest('{a,b,c}'::text[]) AS n";
    let flow = ids(&client, enqueue).await[0];
    let transaction = client.transaction().await.unwrap();
    let lock = "SELECT FROM rouse.job WHERE flow_name = 'b' FOR UPDATE";
    transaction.query_one(lock, &[]).await.unwrap();
    let dashboard = Dashboard::start(&db, &[]);
    let token = dashboard.form_token(&format!("/flows/{flow}")).await;
    let done = dashboard
        .post(&format!("/flows/{flow}/cancel"), &format!("csrf={token}"))
        .await;
    assert_eq!(done.status, 303, "{}", done.body);
    let notice = done.cookie();
    let shown = dashboard
        .send("GET", "/", &[("Cookie", &notice)], "")
        .await
        .body;
    let words = format!("2 jobs of flow {flow} are cancelled; others are left");
    assert!(shown.contains(&words), "{shown}");
    assert!(shown.contains("It waited for a transaction"), "{shown}");
    transaction.rollback().await.unwrap();
    let queued = "SELECT count(*) FROM rouse.job WHERE state = 'queued'";
    assert_eq!(ids(&watcher, queued).await, [1]);
}

#[tokio::test]
async fn a_purge_that_fails_after_its_first_batch_says_what_was_done_and_pages_show_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('x', array_fill('{}'::jsonb, ARRAY[1500]));
             CREATE FUNCTION public.permit_one_purge() RETURNS trigger LANGUAGE plpgsql AS $$
             BEGIN
                 IF NEW.queue IS NOT NULL AND EXISTS (SELECT FROM rouse.record AS r WHERE r.queue = NEW.queue) THEN
                     RAISE EXCEPTION 'one purge is enough';
                 END IF;
                 RETURN NEW;
             END $$;
             CREATE TRIGGER permit_one_purge BEFORE INSERT ON rouse.record
                 FOR EACH ROW EXECUTE FUNCTION public.permit_one_purge()",
        )
        .await
        .unwrap();
    let dashboard = Dashboard::start(&db, &[]);
    let page = dashboard.get("/queues/default").await.body;
    assert!(page.contains(">1,500<"), "{page}");
    let token = dashboard.form_token("/queues/default").await;
    let done = dashboard
        .post("/queues/default/purge", &format!("csrf={token}"))
        .await;
    assert_eq!(done.status, 303, "{}", done.body);
    let notice = done.cookie();
    let shown = dashboard
        .send("GET", "/queues/default", &[("Cookie", &notice)], "")
        .await
        .body;
    let words = "1000 ready jobs of queue default are cancelled; others are left: ";
    assert!(shown.contains(words), "{shown}");
    assert!(shown.contains("one purge is enough"), "{shown}");
    assert!(shown.contains(">500<"), "{shown}");
}

#[tokio::test]
async fn selected_jobs_are_cancelled_and_those_that_have_ended_are_counted_separately() {
    let db = shop().await;
    let client = db.client().await;
    let dashboard = Dashboard::start(&db, &[]);
    let queued = ids(
        &client,
        "SELECT id FROM rouse.jobs WHERE state = 'queued' AND queue = 'mail' ORDER BY id LIMIT 2",
    )
    .await;
    let failed = ids(
        &client,
        "SELECT id FROM rouse.jobs WHERE state = 'failed' LIMIT 1",
    )
    .await[0];
    let token = dashboard.form_token("/jobs").await;
    let form = format!(
        "csrf={token}&do=cancel&id={}&id={}&id={failed}",
        queued[0], queued[1]
    );
    let started = dashboard.post("/jobs/change", &form).await;
    assert_eq!(started.status, 303, "{}", started.body);
    dashboard
        .until("/bulk/1", "2 cancelled of 3; 1 could not be")
        .await;
    let cancelled = ids(
        &client,
        "SELECT count(*) FROM rouse.jobs WHERE state = 'cancelled'",
    )
    .await[0];
    assert_eq!(cancelled, 2);
    let none = dashboard
        .post("/jobs/change", &format!("csrf={token}&do=cancel"))
        .await;
    assert_eq!(none.status, 303);
}

#[tokio::test]
async fn a_selected_job_that_is_locked_does_not_hold_up_the_others() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let locked = enqueue_sql(&client, "'a.b'").await;
    let other = enqueue_sql(&client, "'a.b'").await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.cancel($1)", &[&locked])
        .await
        .unwrap();
    let dashboard = Dashboard::start(&db, &[]);
    let token = dashboard.form_token("/jobs").await;
    let form = format!("csrf={token}&do=cancel&id={locked}&id={other}");
    dashboard.post("/jobs/change", &form).await;
    dashboard
        .until(
            "/bulk/1",
            "1 cancelled of 2; 1 is left, because another transaction has locked it",
        )
        .await;
    transaction.rollback().await.unwrap();
}

#[tokio::test]
async fn a_change_that_panics_is_shown_as_failed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = enqueue_sql(&client, "'a.b'").await;
    let dashboard = Dashboard::start(&db, &[]);
    let token = dashboard.form_token("/jobs").await;
    // The host reads its result as true or false.
    client
        .batch_execute(
            "CREATE OR REPLACE FUNCTION rouse.cancel(id bigint) RETURNS boolean LANGUAGE sql AS 'SELECT NULL::boolean'",
        )
        .await
        .unwrap();
    let form = format!("csrf={token}&do=cancel&id={id}");
    dashboard.post("/jobs/change", &form).await;
    let failed = r#"state bad">failed"#;
    dashboard.until("/bulk/1", failed).await;
    let page = dashboard.get("/bulk/1").await.body;
    assert!(page.contains("the change has panicked"), "{page}");
}

#[tokio::test]
async fn a_job_that_was_found_queued_and_has_started_since_is_not_cancelled() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = db.worker().await;
    let id = enqueue(&client, "a.b", json!({})).await;
    assert_eq!(claim(&worker, 1).await.len(), 1);
    let (store, wait) = (db.store(), LockWait::default());
    let queued = ["queued".to_owned()];
    assert!(!store.cancel_in(JobId(id), &queued, wait).await.unwrap());
    let live = ["queued".to_owned(), "running".to_owned()];
    assert!(store.cancel_in(JobId(id), &live, wait).await.unwrap());
}

#[tokio::test]
async fn all_that_match_are_retried_after_their_number_was_shown() {
    let db = shop().await;
    let client = db.client().await;
    let dashboard = Dashboard::start(&db, &[]);
    let token = dashboard.form_token("/jobs?state=failed").await;
    let asked = dashboard
        .post(
            "/jobs/change",
            &format!("csrf={token}&state=failed&do=retry-all"),
        )
        .await;
    assert!(asked.body.contains("Retry 3 jobs?"), "{}", asked.body);
    let (_, until) = asked
        .body
        .split_once(r#"name="until-now" value=""#)
        .unwrap();
    let until = until.split_once('"').unwrap().0;
    // A job that fails after the confirmation page was shown is not retried.
    client.batch_execute("SELECT rouse.fail(max(id), 'later') FROM rouse.jobs WHERE state = 'queued' AND queue = 'mail'").await.unwrap();
    let form = format!("csrf={token}&state=failed&do=retry-all&sure=yes&until-now={until}");
    let started = dashboard.post("/jobs/change", &form).await;
    assert_eq!(
        (started.status, started.header("location")),
        (303, Some("/ui/bulk/1"))
    );
    dashboard.until("/bulk/1", "3 retried.").await;
    let ended = r#"state good">done"#;
    dashboard.until("/bulk/1", ended).await;
    let made = ids(
        &client,
        "SELECT count(*) FROM rouse.jobs WHERE retried_from IS NOT NULL",
    )
    .await[0];
    assert_eq!(made, 3);
    let retries = ids(
        &client,
        "SELECT id FROM rouse.jobs WHERE retried_from IS NOT NULL",
    )
    .await;
    let page = dashboard.get("/bulk/1").await.body;
    for id in retries {
        assert!(page.contains(&format!("/ui/jobs/{id}\"")), "{page}");
    }
    // The number does not include jobs that were retried.
    let again = dashboard
        .post(
            "/jobs/change",
            &format!("csrf={token}&state=failed&do=retry-all"),
        )
        .await;
    assert!(again.body.contains("Retry 1 job?"), "{}", again.body);
    for (form, words) in [
        (
            "state=failed&do=cancel-all",
            "Only queued and running jobs can be cancelled",
        ),
        ("do=retry-all", "Only jobs that have ended can be retried"),
        (
            "state=running&do=delete-all",
            "Only queued jobs can be deleted",
        ),
        ("do=explode", "is not an action"),
    ] {
        let refused = dashboard
            .post("/jobs/change", &format!("csrf={token}&{form}"))
            .await;
        assert_eq!(refused.status, 400, "{form}");
        assert!(refused.body.contains(words), "{form}: {}", refused.body);
    }
}

#[tokio::test]
async fn queued_jobs_that_match_are_made_due_or_deleted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue('a.b', run_at => now() + interval '1 day', queue => 'later') FROM generate_series(1, 4);
             SELECT rouse.enqueue('a.b', queue => 'other') FROM generate_series(1, 2)",
        )
        .await
        .unwrap();
    let dashboard = Dashboard::start(&db, &[]);
    let token = dashboard.form_token("/jobs").await;
    let two = ids(
        &client,
        "SELECT id FROM rouse.job WHERE turn IS NULL LIMIT 2",
    )
    .await;
    let waiting = format!(
        "SELECT rouse.enqueue('a.b', queue => 'waits', after => '[{}]')",
        two[0]
    );
    let waiting = ids(&client, &waiting).await[0];
    let asleep = ids(&client, "SELECT rouse.enqueue('a.b', queue => 'waits')").await[0];
    // Makes the job look suspended.
    let suspended = "UPDATE rouse.job SET turn = NULL, wait = '{\"kind\": \"sleep\", \"step\": \"s\"}' WHERE id = $1";
    client.execute(suspended, &[&asleep]).await.unwrap();
    let chosen = format!(
        "csrf={token}&do=run-now&id={}&id={}&id={waiting}&id={asleep}",
        two[0], two[1]
    );
    dashboard.post("/jobs/change", &chosen).await;
    dashboard
        .until("/bulk/1", "2 due now of 4; 2 could not be")
        .await;
    let due = "SELECT count(*) FROM rouse.job WHERE turn IS NOT NULL";
    assert_eq!(ids(&client, due).await, [4]);
    let filter = format!("csrf={token}&queue=later&do=delete-all");
    let asked = dashboard.post("/jobs/change", &filter).await.body;
    assert!(asked.contains("Delete 4 jobs?"), "{asked}");
    let (_, until) = asked.split_once(r#"name="until-now" value=""#).unwrap();
    let until = until.split_once('"').unwrap().0;
    let sure = format!("{filter}&sure=yes&until-now={until}");
    dashboard.post("/jobs/change", &sure).await;
    dashboard.until("/bulk/2", "4 deleted").await;
    let left = "SELECT count(*) FROM rouse.jobs WHERE state = 'queued' AND queue = 'other'";
    assert_eq!(ids(&client, left).await, [2]);
    let deleted = "SELECT count(*) FROM rouse.record WHERE event = 'deleted'";
    assert_eq!(ids(&client, deleted).await, [4]);
}
