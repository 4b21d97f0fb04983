//! The contents of the pages, and their forms.

use std::time::Duration;

use rouse::job::JobId;
use rouse::store::LockWait;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::time::{sleep, timeout};

use super::{Dashboard, ids, paths, read_until, shop};
use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::worker::{TIMEOUT, enqueue, enqueue_sql, until_true};

#[tokio::test]
async fn every_page_responds_and_escapes_untrusted_text() {
    let db = shop().await;
    let client = db.client().await;
    let dashboard = Dashboard::start(&db, &[]);
    for path in paths(&client).await {
        let page = dashboard.get(&path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.body);
        assert!(page.body.contains("<h1>"), "{path}: {}", page.body);
        for harmful in ["<script>window", "<img src=x", "\u{202e}", "\u{1b}"] {
            assert!(
                !page.body.contains(harmful),
                "{path} has {harmful:?}: {}",
                page.body
            );
        }
        let policy = page.header("content-security-policy").unwrap();
        assert!(policy.contains("script-src 'self'") && policy.contains("frame-ancestors 'none'"));
        assert_eq!(page.header("x-content-type-options"), Some("nosniff"));
        assert_eq!(page.header("cache-control"), Some("no-store"));
    }
    for (path, words) in [
        ("/", "can run 1 job of"),
        ("/", "has been paused for"),
        ("/jobs?state=failed", "onerror=window"),
        ("/schedules", "3:30"),
        ("/queues", "at most 5 running jobs of each tenant"),
        ("/workers/shop-1", "http: api.example.com"),
        ("/handlers/no.such", "No running worker has this handler"),
        ("/handlers/shop.mail", "The newest 3 by error"),
        ("/audit", "paused"),
        ("/audit?queue=paused", ">paused<"),
        ("/audit?queue=no.such", "Nobody changed anything"),
    ] {
        let page = dashboard.get(path).await.body;
        assert!(page.contains(words), "{path} without {words:?}: {page}");
    }
}

#[tokio::test]
async fn missing_objects_and_invalid_filters_get_a_page_that_explains_the_error() {
    let db = TestDb::new().await;
    let dashboard = Dashboard::start(&db, &[]);
    for (path, status, words) in [
        ("/nothing", 404, "There is no page"),
        ("/jobs/17", 404, "There is no job 17"),
        ("/flows/17", 404, "There is no flow 17"),
        ("/queues/none", 404, "There is no queue none"),
        ("/schedules/none", 404, "There is no schedule none"),
        ("/workers/none", 404, "There is no worker none"),
        ("/handlers/none", 404, "No worker has a handler none"),
        ("/bulk/17", 404, "does not know that change"),
        ("/jobs?state=done", 400, "is not a state"),
        ("/jobs?payload=id", 400, "JSON pointer"),
        ("/jobs?since=yesteryear", 200, "must be a time or an age"),
    ] {
        let page = dashboard.get(path).await;
        assert_eq!(page.status, status, "{path}: {}", page.body);
        assert!(page.body.contains(words), "{path}: {}", page.body);
    }
}

#[tokio::test]
async fn large_ids_and_numbers_keep_every_digit_and_raw_payloads_are_plain_text() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute("SELECT setval('rouse.turn_seq', 9007199254740993)")
        .await
        .unwrap();
    let id = ids(
        &client,
        "SELECT rouse.enqueue('a.b', '{\"n\": 12345678901234567890123, \"html\": \"<b>\"}')",
    )
    .await[0];
    assert!(id > 9_007_199_254_740_992);
    let dashboard = Dashboard::start(&db, &[]);
    let list = dashboard.get("/jobs").await.body;
    assert!(list.contains(&format!("/jobs/{id}\"")), "{list}");
    let page = dashboard.get(&format!("/jobs/{id}")).await.body;
    assert!(page.contains("12345678901234567890123"), "{page}");
    let raw = dashboard.get(&format!("/jobs/{id}/payload")).await;
    assert_eq!(
        raw.header("content-type"),
        Some("text/plain; charset=utf-8")
    );
    assert!(raw.body.contains("\"<b>\""), "{}", raw.body);
}

#[tokio::test]
async fn an_open_page_is_updated_when_something_changes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = ids(&client, "SELECT rouse.enqueue('a.b', '{}')").await[0];
    let dashboard = Dashboard::start(&db, &[]);
    let page = dashboard.get(&format!("/jobs/{id}")).await.body;
    let live = format!(r#"data-live="/ui/live/jobs/{id}?""#);
    assert!(page.contains(&live), "{page}");
    let mut stream = dashboard.follow(&format!("/jobs/{id}")).await;
    let mut seen = String::new();
    read_until(&mut stream, &mut seen, "event: page").await;
    client
        .execute("SELECT rouse.fail($1, 'the mill is broken')", &[&id])
        .await
        .unwrap();
    read_until(&mut stream, &mut seen, "the mill is broken").await;

    // Browsers do not wait for a page that does not exist.
    dashboard.until("/jobs/999999", "event: gone").await;
}

#[tokio::test]
async fn a_query_without_a_response_is_cancelled_and_the_page_reports_it() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let dashboard = Dashboard::start(&db, &[]);
    let holder = client.transaction().await.unwrap();
    let lock = "LOCK TABLE rouse.schedule IN ACCESS EXCLUSIVE MODE";
    holder.batch_execute(lock).await.unwrap();
    let page = dashboard.get("/schedules").await;
    assert_eq!(page.status, 503, "{}", page.body);
    assert!(page.body.contains("no response from"), "{}", page.body);
    let waiting = "SELECT count(*) = 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    until_true(&db.client().await, waiting).await;
    holder.rollback().await.unwrap();
    assert_eq!(dashboard.get("/schedules").await.status, 200);
}

#[tokio::test]
async fn too_many_open_pages_are_refused_until_one_is_closed() {
    let db = TestDb::new().await;
    let dashboard = Dashboard::start(&db, &[]);
    let mut open = Vec::new();
    for nth in 0..64 {
        let mut stream = dashboard.follow(&format!("/jobs?handler=h{nth}")).await;
        read_until(&mut stream, &mut String::new(), "event: page").await;
        open.push(stream);
    }
    let refused = dashboard.get("/live/jobs?handler=other").await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert!(refused.body.contains("too many pages"), "{}", refused.body);
    // Further users of a page that is already open do not count as another page, until there are too many.
    for _ in 64..80 {
        let mut stream = dashboard.follow("/jobs?handler=h0").await;
        read_until(&mut stream, &mut String::new(), "event: page").await;
        open.push(stream);
    }
    let refused = dashboard.get("/live/jobs?handler=h0").await;
    assert_eq!(refused.status, 503, "{}", refused.body);
    open.clear();
    let again = async {
        loop {
            let mut stream = dashboard.follow("/jobs?handler=other").await;
            let mut status = [0; 12];
            stream.read_exact(&mut status).await.unwrap();
            if status == *b"HTTP/1.1 200" {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(TIMEOUT, again)
        .await
        .expect("a page can be opened again");
}

#[tokio::test]
async fn the_reason_why_a_job_waits_has_a_link_or_a_button() {
    let db = shop().await;
    let client = db.client().await;
    let of_paused = "SELECT rouse.enqueue('no.such', queue => 'paused')";
    let paused = ids(&client, of_paused).await[0];
    let after = format!("SELECT rouse.enqueue('shop.mail', after => '[{paused}]')");
    let after = ids(&client, &after).await[0];
    let dashboard = Dashboard::start(&db, &[]);
    let page = dashboard.get(&format!("/jobs/{after}")).await.body;
    let why = page.split_once("Why it waits").unwrap().1;
    assert!(
        why.contains(&format!(
            "/ui/jobs/{paused}\">{paused}</a>, which is queued"
        )),
        "{why}"
    );
    let path = format!("/jobs/{paused}");
    let page = dashboard.get(&path).await.body;
    assert!(
        page.contains("/ui/handlers/no%2Esuch\">the handler</a>"),
        "{page}"
    );
    assert!(page.contains("/ui/queues/paused/resume"), "{page}");
    let form = format!("csrf={}", dashboard.form_token(&path).await);
    let done = dashboard.post("/queues/paused/resume", &form).await;
    assert_eq!(done.status, 303, "{}", done.body);
    let page = dashboard.get(&path).await.body;
    assert!(!page.contains("Resume the queue"), "{page}");
}

#[tokio::test]
async fn a_job_is_opened_by_its_id() {
    let db = shop().await;
    let dashboard = Dashboard::start(&db, &[]);
    let page = dashboard.get("/jobs").await.body;
    assert!(page.contains(r#"action="/ui/job""#), "{page}");
    let job = dashboard.get("/job?job=+42+").await;
    assert_eq!(
        (job.status, job.header("location")),
        (303, Some("/ui/jobs/42"))
    );
    for id in ["", "x", "99999999999999999999"] {
        let refused = dashboard.get(&format!("/job?job={id}")).await;
        assert_eq!(refused.status, 400);
        assert!(
            refused.body.contains("The id of a job is a number"),
            "{}",
            refused.body
        );
    }
}

#[tokio::test]
async fn lists_have_counts_of_live_jobs_and_link_retried_ones_to_their_retries() {
    let db = shop().await;
    let client = db.client().await;
    let failed = "SELECT min(id) FROM rouse.jobs WHERE state = 'failed'";
    let again = format!("SELECT rouse.retry(({failed}))");
    let again = ids(&client, &again).await[0];
    client
        .execute("SELECT rouse.set_priority($1, 'high')", &[&again])
        .await
        .unwrap();
    let live = ids(
        &client,
        "SELECT count(*) FROM rouse.job WHERE state = 'queued'",
    )
    .await[0];
    let dashboard = Dashboard::start(&db, &[]);
    // The list does not wait for the counts.
    dashboard
        .until(
            "/jobs",
            &format!(">Queued<span class=\"soft\">{live}</span>"),
        )
        .await;
    let page = dashboard.get("/jobs?state=failed").await.body;
    assert!(page.contains("retried as <a"), "{page}");
    assert!(page.contains(&format!("/ui/jobs/{again}\"")), "{page}");
    assert!(!page.contains("Priority"), "{page}");
    let page = dashboard.get("/jobs").await.body;
    assert!(page.contains("data-label=\"Priority\">high<"), "{page}");
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
async fn the_running_jobs_of_a_worker_are_found_among_a_limited_number() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (first, second) = (db.worker().await, db.worker().await);
    let ids = [
        enqueue(&client, "a.b", json!({})).await,
        enqueue(&client, "a.b", json!({})).await,
    ];
    claim(&first, 1).await;
    claim(&second, 1).await;
    let found = async |worker, examine| {
        let running = db.store().running_on(worker, 10, examine).await.unwrap();
        let running = running.expect("the superuser may read it");
        let ids = running.attempts.iter().map(|it| it["id"].as_i64().unwrap());
        (ids.collect::<Vec<_>>(), running.examined_count)
    };
    assert_eq!(found("w-1", 10).await, (vec![ids[0]], 2));
    assert_eq!(found("w-2", 10).await, (vec![ids[1]], 2));
    // Its lease ends first.
    assert_eq!(found("w-1", 1).await, (vec![ids[0]], 1));
    assert_eq!(found("w-2", 1).await, (vec![], 1));
    assert_eq!(found("w-3", 10).await, (vec![], 2));
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
            "1 cancelled of 2; 1 are left, because another transaction has locked them",
        )
        .await;
    transaction.rollback().await.unwrap();
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
            "has the signal approved",
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
async fn a_host_with_a_catalog_serves_the_dashboard_alongside_its_metrics() {
    let db = TestDb::new().await;
    let url = db.url();
    let scratch = crate::support::scratch("dashboard-serve");
    let handlers = scratch.join("handlers");
    std::fs::create_dir_all(&handlers).unwrap();
    let host = crate::support::Host::rouse(
        &[
            "serve",
            "--http",
            "127.0.0.1:0",
            "--handlers",
            handlers.to_str().unwrap(),
        ],
        &[("DATABASE_URL", &url), ("ROUSE_LOG", "info")],
    );
    let line = host.line(TIMEOUT, |line| line.contains("/ui/"));
    let port = line
        .split("127.0.0.1:")
        .nth(1)
        .unwrap()
        .split('/')
        .next()
        .unwrap();
    let dashboard = Dashboard {
        _host: host,
        address: format!("127.0.0.1:{port}").parse().unwrap(),
    };
    let page = dashboard.get("/workers").await;
    assert_eq!(page.status, 200, "{}", page.body);
    // A host on loopback without a token lets this machine read, but not change anything.
    assert!(page.body.contains("change nothing"), "{}", page.body);
    assert_eq!(dashboard.post("/queues/a/pause", "").await.status, 403);
}
