//! Attenuation: jobs that drop some of the grants of their handlers, and lower their limits.

use std::path::Path;
use std::sync::Arc;

use rouse::sandbox::{
    Catalog, Grant, Grants, HostPattern, HttpGrant, HttpScheme, Limits, Mode, Sandbox, Secret,
    SecretGrant, Secrets, Settings as SandboxSettings,
};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::http_out::{MODULE, guest_folder};
use crate::sandbox_guest::bound;
use crate::support::web::web;
use crate::support::worker::{Shown, TestWorker, ended, enqueue_sql};
use crate::support::{TestDb, scratch};

/// A worker whose handlers may send requests to this machine, with no other grants.
async fn start(db: &TestDb) -> TestWorker {
    start_with(db, Grants::default()).await
}

async fn start_with(db: &TestDb, grants: Grants) -> TestWorker {
    let settings = SandboxSettings {
        attempts_max: 8,
        grants,
        limits: Limits {
            memory_bytes: 32 << 20,
            ..Limits::default()
        },
        http_grants: vec![HttpGrant {
            handler: "test.http.secret".into(),
            hosts: vec!["*".parse().expect("a host")],
            schemes: vec![HttpScheme::Http],
            ports: vec![web().plain],
            methods: vec![],
            private: true,
        }],
        secrets: Secrets([("KEY".into(), Secret::new("s3cret-of-mine").unwrap())].into()),
        secret_grants: vec![SecretGrant {
            handler: "test.http.secret".into(),
            name: "KEY".into(),
            hosts: vec!["localhost".parse().expect("a host")],
            headers: vec!["authorization".into()],
            body: false,
            sign: false,
        }],
        env: [(
            "test.env".into(),
            [("LANG".into(), "C".into()), ("TZ".into(), "UTC".into())].into(),
        )]
        .into(),
        modules: bound("test.http.secret", MODULE),
        ..SandboxSettings::default()
    };
    let sandbox = Sandbox::start(settings).expect("a sandbox");
    let catalog = Catalog::open(sandbox.clone(), guest_folder()).await;
    let catalog = Arc::new(catalog.expect("the guests load"));
    TestWorker::start_in(db, Settings::default(), sandbox, catalog)
}

/// Runs a job with these grants to its end.
async fn run(client: &Client, handler: &str, payload: Value, grants: Value) -> Shown {
    let sql = format!("'{handler}', '{payload}', grants => '{grants}'");
    let id = enqueue_sql(client, &sql).await;
    ended(client, id).await
}

fn message(job: &Shown) -> &str {
    assert_eq!(job.state, "failed", "{job:?}");
    let message = job
        .error
        .as_ref()
        .and_then(|error| error["message"].as_str());
    message.expect("a message")
}

#[tokio::test]
async fn a_job_can_drop_servers_secrets_and_variables_of_its_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = start(&db).await;
    let url = |host: &str| format!("http://{host}:{}/attenuated", web().plain);
    let payload =
        |host: &str, secrets: Value| json!({"secrets": secrets, "requests": [{"url": url(host)}]});

    let remaining = json!({"http": ["localhost"], "secrets": ["KEY"]});
    let job = run(
        &client,
        "test.http.secret",
        payload("localhost", json!(["KEY"])),
        remaining.clone(),
    )
    .await;
    assert_eq!(job.state, "succeeded", "{job:?}");
    let job = run(
        &client,
        "test.http.secret",
        payload("127.0.0.1", json!([])),
        remaining,
    )
    .await;
    assert_eq!(
        (job.attempt, job.error.as_ref().unwrap()["kind"].as_str()),
        (1, Some("denied"))
    );
    assert!(
        message(&job).contains("the grants of this job leave out"),
        "{job:?}"
    );
    let job = run(
        &client,
        "test.http.secret",
        payload("localhost", json!(["KEY"])),
        json!({"secrets": []}),
    )
    .await;
    assert!(
        message(&job).contains("the secret KEY, which the grants of this job leave out"),
        "{job:?}"
    );
    // The server may know the secret from another job, but the guest must not learn it from the response.
    let request = json!({"requests": [{"method": "POST", "url": url("localhost"), "body": "s3cret-of-mine"}]});
    let job = run(&client, "test.http.secret", request, json!({"secrets": []})).await;
    let result = job.result.expect("a response").to_string();
    assert!(
        result.contains("rouse-secret-") && !result.contains("s3cret-of-mine"),
        "{result}"
    );
    // A job cannot add grants that the handler does not have.
    let job = run(
        &client,
        "test.http.none",
        payload("localhost", json!([])),
        json!({"http": ["*"]}),
    )
    .await;
    assert!(
        message(&job).contains("[[handlers.\"test.http.none\".http]]"),
        "{job:?}"
    );

    let job = run(
        &client,
        "test.env",
        json!({}),
        json!({"env": ["TZ", "HOME"]}),
    )
    .await;
    assert_eq!(job.result.unwrap()["vars"], json!(["TZ"]));
    let job = run(&client, "test.env", json!({}), json!({})).await;
    assert_eq!(job.result.unwrap()["vars"], json!(["LANG", "TZ"]));
    worker.drain().await;
}

#[tokio::test]
async fn a_job_can_lower_the_memory_and_time_limits_of_its_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = start(&db).await;
    let alloc = json!({"bytes": 16 << 20});
    let job = run(
        &client,
        "test.alloc",
        alloc.clone(),
        json!({"memory_mb": 4}),
    )
    .await;
    assert_eq!(
        (&job.error.as_ref().unwrap()["kind"], job.attempt),
        (&json!("out_of_memory"), 1),
        "{job:?}"
    );
    assert!(names_the_job(&job, "memory_mb"), "{job:?}");
    // A job that requests 4 GiB gets no more than the handler's 32 MiB.
    let job = run(
        &client,
        "test.alloc",
        json!({"bytes": 100 << 20}),
        json!({"memory_mb": 4096}),
    )
    .await;
    assert_eq!(job.error.as_ref().unwrap()["kind"], "out_of_memory");
    assert!(!names_the_job(&job, "memory_mb"), "{job:?}");
    assert!(error_of(&job).contains("rouse.toml"), "{job:?}");
    let job = run(&client, "test.alloc", alloc, json!({})).await;
    assert_eq!(job.state, "succeeded");

    let job = run(&client, "test.spin", json!({}), json!({"timeout": "200ms"})).await;
    assert_eq!(job.state, "timed_out");
    assert!(names_the_job(&job, "timeout"), "{job:?}");
    let job = run(&client, "test.spin", json!({}), json!({"cpu": "100ms"})).await;
    assert_eq!(job.error.as_ref().unwrap()["kind"], "out_of_cpu");
    assert!(names_the_job(&job, "cpu"), "{job:?}");
    worker.drain().await;
}

fn error_of(job: &Shown) -> &str {
    let message = job
        .error
        .as_ref()
        .and_then(|error| error["message"].as_str());
    message.expect("a message")
}

/// Whether the error says that the job set this limit, and not rouse.toml.
fn names_the_job(job: &Shown, key: &str) -> bool {
    let message = error_of(job);
    message.contains("the grants of this job set")
        && message.contains(&format!("under \"{key}\""))
        && !message.contains("rouse.toml")
}

#[tokio::test]
async fn a_denial_names_the_job_if_it_kept_only_read_access_to_a_directory() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = scratch("attenuated-dirs");
    let grant = |dir: &Path, at: &str, mode| Grant {
        handler: "test.write-file".into(),
        dir: dir.into(),
        at: at.into(),
        mode,
        quota: None,
    };
    let out = grant(&folder, "/out", Mode::ReadWrite);
    let worker = start_with(&db, Grants(vec![out])).await;
    let payload = json!({"path": "/out/a", "text": "a"});
    let handler = "test.write-file";
    let job = run(&client, handler, payload.clone(), json!({"dirs": ["/out"]})).await;
    assert_eq!(job.state, "succeeded", "{job:?}");
    let job = run(&client, handler, payload, json!({"dirs": ["/out:read"]})).await;
    let denial = message(&job);
    assert!(
        denial.contains("the grants of this job allow only reading in /out"),
        "{job:?}"
    );
    assert!(denial.contains("under \"dirs\"") && !denial.contains("rouse.toml"));
    worker.drain().await;

    // A limit set by the operator is still reported as the operator's.
    let read = grant(&folder, "/in", Mode::Read);
    let worker = start_with(&db, Grants(vec![read])).await;
    let payload = json!({"path": "/in/a", "text": "a"});
    let job = run(&client, handler, payload, json!({"dirs": ["/in"]})).await;
    assert!(message(&job).contains("rouse.toml"), "{job:?}");
    assert!(!message(&job).contains("this job"), "{job:?}");
    worker.drain().await;
}

#[tokio::test]
async fn unenforceable_grants_are_refused_by_enqueue() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for (grants, part) in [
        (r#"{"sockets": []}"#, "'sockets' is not a key of grants"),
        ("[]", "must be an object"),
        (
            r#"{"http": ["https://a.example"]}"#,
            "without a scheme or port",
        ),
        (r#"{"http": ["a.example:443"]}"#, "without a scheme or port"),
        (r#"{"http": "a.example"}"#, "an array of strings"),
        (r#"{"env": [1]}"#, "an array of strings"),
        (r#"{"http": ["a..b"]}"#, "without a scheme or port"),
        (r#"{"dirs": ["out"]}"#, "such as /photos"),
        (r#"{"dirs": ["/out/"]}"#, "such as /photos"),
        (r#"{"dirs": ["/out:ro"]}"#, "such as /photos"),
        (r#"{"state": true}"#, "denies the job access to state"),
        (r#"{"state": []}"#, "denies the job access to state"),
        (r#"{"memory_mb": 0}"#, "1 to 9999"),
        (r#"{"memory_mb": 1.5}"#, "1 to 9999"),
        (r#"{"cpu": 5}"#, "a duration above zero such as"),
        (r#"{"cpu": "0ms"}"#, "a duration above zero such as"),
        (r#"{"env": [["LANG"]]}"#, "an array of strings"),
        (r#"{"timeout": "1 hour"}"#, "a duration above zero such as"),
    ] {
        for call in [
            format!("SELECT rouse.enqueue('x', grants => '{grants}')"),
            format!("SELECT rouse.enqueue_many('x', ARRAY['{{}}']::jsonb[], grants => '{grants}')"),
        ] {
            let error = client.query(&call, &[]).await.expect_err("it is refused");
            let error = error.as_db_error().expect("an error from the database");
            assert!(
                error.message().contains(part),
                "{call}: {}",
                error.message()
            );
        }
    }
    let rows = client.query("SELECT FROM rouse.jobs", &[]).await.unwrap();
    assert!(rows.is_empty());
}

#[tokio::test]
async fn the_database_accepts_the_same_host_patterns_as_the_host() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let long_label = format!("{}.example", "a".repeat(64));
    let long_name = ["abcdefg"; 32].join(".");
    for text in [
        "*",
        "*.example.com",
        "example.com",
        "example.com.",
        "localhost",
        "a_b.example",
        "_dmarc.example",
        "xn--bcher-kva.example",
        "7z.example",
        "192.0.2.1",
        "255.255.255.255",
        "2001:db8::1",
        "::",
        "::ffff:192.0.2.1",
        "[2001:db8::1]",
        "",
        ".",
        "*.",
        "**",
        "a..b",
        ".a",
        "-a.example",
        "a-.example",
        "a b",
        "bücher.example",
        "a.example:443",
        "https://a.example",
        "192.0.2.1.",
        "192.0.2.256",
        "192.0.2.01",
        "192.0.2",
        "*.192.0.2.1",
        "7",
        "0x7f.1",
        "0x7f",
        "1:2",
        "::1/128",
        "::1.2.3",
        "::1.2.3.4.5",
        "[::1",
        "::1]",
        "[192.0.2.1]",
        "*.[::1]",
        "*.::1",
        &long_label,
        &long_name,
    ] {
        let row = client
            .query_one("SELECT rouse._is_host_pattern($1)", &[&text])
            .await
            .unwrap();
        let taken = text.parse::<HostPattern>().is_ok();
        assert_eq!(row.get::<_, bool>(0), taken, "{text:?}");
    }
}

#[tokio::test]
async fn grants_are_kept_in_the_history_and_the_retry_of_a_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = start(&db).await;
    let remaining = json!({"memory_mb": 4});
    let sql = format!("'test.alloc', '{{\"bytes\": 16777216}}', grants => '{remaining}'");
    let id = enqueue_sql(&client, &sql).await;
    assert_eq!(ended(&client, id).await.state, "failed");
    let sql = "SELECT (SELECT detail -> 'grants' FROM rouse.history($1) WHERE event = 'requested'),
                      (SELECT grants FROM rouse.job($1)), rouse.retry($1)";
    let row = client.query_one(sql, &[&id]).await.unwrap();
    assert_eq!(
        (row.get::<_, Value>(0), row.get::<_, Value>(1)),
        (remaining.clone(), remaining.clone())
    );
    let job = ended(&client, row.get(2)).await;
    assert_eq!(job.error.unwrap()["kind"], "out_of_memory");
    worker.drain().await;

    // Also for jobs that never ran: purged, cancelled.
    let enqueue = format!("'x', grants => '{remaining}'");
    let (purged, cancelled) = (
        enqueue_sql(&client, &enqueue).await,
        enqueue_sql(&client, &format!("{enqueue}, queue => 'q'")).await,
    );
    let sql = "SELECT rouse.purge_queue('default'), rouse.cancel($1)";
    client.query_one(sql, &[&cancelled]).await.unwrap();
    for id in [purged, cancelled] {
        let row = client
            .query_one("SELECT state::text, grants FROM rouse.job($1)", &[&id])
            .await
            .unwrap();
        assert_eq!(
            (row.get(0), row.get::<_, Value>(1)),
            ("cancelled", remaining.clone())
        );
    }
}
