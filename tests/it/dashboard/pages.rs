//! The contents of the pages.

use rouse::worker::Settings;

use super::{Dashboard, ids, paths, shop};
use crate::support::TestDb;
use crate::support::worker::{TIMEOUT, TestWorker, ended, until_true};

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
        (
            "/audit?queue=no.such",
            "No action in these 31 days matches the filter.",
        ),
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
async fn the_page_of_a_job_has_the_backtrace_of_its_error() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let panics = "SELECT rouse.enqueue('test.panic', max_attempts => 1)";
    let id = ids(&client, panics).await[0];
    assert_eq!(ended(&client, id).await.state, "failed");
    worker.drain().await;
    let dashboard = Dashboard::start(&db, &[]);
    let page = dashboard.get(&format!("/jobs/{id}")).await.body;
    let (_, trace) = page.split_once("Backtrace of the handler").unwrap();
    let (trace, _) = trace.split_once("</pre>").unwrap();
    assert!(trace.contains("failing.rs:"), "{trace}");
}

#[tokio::test]
async fn the_page_of_a_job_has_a_limited_number_of_events() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = ids(&client, "SELECT rouse.enqueue('a.b')").await[0];
    let record = async |event: &str, attempt: &str, count: i32| {
        let sql = format!(
            "INSERT INTO rouse.record (at, job, event, attempt)
             SELECT clock_timestamp(), $1::bigint, $2::text, {attempt} FROM generate_series(1, $3::integer) AS n"
        );
        client.execute(&sql, &[&id, &event, &count]).await.unwrap();
    };
    let dashboard = Dashboard::start(&db, &[]);
    record("renewed", "1", 3_600).await;
    let page = dashboard.get(&format!("/jobs/{id}")).await.body;
    assert_eq!(page.matches(">renewed<").count(), 1, "{page}");
    assert!(page.contains("3,600 times") && page.contains(">requested<"));
    assert!(!page.contains("These are the newest events"));
    record("released", "n", 1_500).await;
    let page = dashboard.get(&format!("/jobs/{id}")).await.body;
    assert_eq!(page.matches(">released<").count(), 1_000);
    assert!(page.contains("These are the newest events") && !page.contains(">requested<"));
}

#[tokio::test]
async fn a_job_that_is_due_at_the_end_of_the_year_9999_is_shown() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let never = "SELECT rouse.enqueue('a.b', run_at => '9999-12-31 23:59:59.999999+00')";
    let id = ids(&client, never).await[0];
    let dashboard = Dashboard::start(&db, &[]);
    for path in ["/jobs".to_owned(), format!("/jobs/{id}")] {
        let page = dashboard.get(&path).await;
        assert_eq!(page.status, 200, "{path}: {}", page.body);
        assert!(
            page.body.contains("9999-12-31 23:59:59"),
            "{path}: {}",
            page.body
        );
    }
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
