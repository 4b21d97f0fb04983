//! The `rouse` command as a child process: its output, its exit, and the failures that it survives.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::database::{connect, migrate};
use crate::support::worker::{PATIENCE, ended, enqueue, guests_dir, show, until, until_true};
use crate::support::{Host, TestDb, scratch};

/// A host that serves the test's database.
fn serve(db: &TestDb, config: &Path, more: &[&str]) -> Host {
    let guests = guests_dir();
    let mut args = vec!["serve", "--handlers", guests.to_str().unwrap()];
    if !more.contains(&"--http") {
        args.extend(["--http", "off"]);
    }
    args.extend(["--config", config.to_str().unwrap()]);
    args.extend(more);
    let log = ("ROUSE_LOG", "info,rouse::job=debug");
    let host = Host::rouse(&args, &[("DATABASE_URL", &db.url()), log]);
    host.line(PATIENCE, |line| line.contains("worker started"));
    host
}

/// Writes a `rouse.toml` with this text.
fn config(text: &str) -> std::path::PathBuf {
    let path = scratch("config").join("rouse.toml");
    std::fs::write(&path, text).unwrap();
    path
}

/// Runs a command on a database to its end; returns its exit code and its stdout followed by its stderr.
pub(crate) fn run(db: &TestDb, args: &[&str]) -> (i32, String) {
    let host = Host::rouse(args, &[("DATABASE_URL", &db.url()), ("ROUSE_LOG", "off")]);
    let (status, output) = host.exit(PATIENCE);
    (status.code().expect("an exit code"), output)
}

#[tokio::test]
async fn two_hosts_share_five_thousand_jobs_and_each_job_runs_exactly_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = config("");
    let hosts = [serve(&db, &config, &[]), serve(&db, &config, &[])];
    client
        .query(
            "SELECT count(*) FROM (SELECT rouse.enqueue_many('noop', array_agg(jsonb_build_object('n', n))) FROM generate_series(1, 5000) AS n) AS q",
            &[],
        )
        .await
        .unwrap();
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let row = client
        .query_one(
            "SELECT count(*), count(DISTINCT id), count(*) FILTER (WHERE state = 'succeeded' AND attempt = 1 AND lost = 0
                        AND result->'n' = payload->'n'),
                    count(DISTINCT worker), (SELECT count(*) FROM rouse.attempt)
             FROM rouse.finished",
            &[],
        )
        .await
        .unwrap();
    let counts: Vec<i64> = (0..5).map(|n| row.get(n)).collect();
    assert_eq!(
        counts,
        [5000, 5000, 5000, 2, 0],
        "finished, jobs, first attempts, workers, failed attempts"
    );
    for host in hosts {
        host.signal(libc::SIGTERM);
        let (status, output) = host.exit(PATIENCE);
        assert!(status.success(), "{output}");
    }
}

#[tokio::test]
async fn a_host_that_is_stopped_during_its_start_exits_with_zero() {
    // A server that accepts connections and never responds.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://a@{}/b", silent.local_addr().unwrap());
    let guests = guests_dir();
    let folder = guests.to_str().unwrap();
    let host = Host::rouse(
        &["serve", "--http", "off", "--handlers", folder],
        &[("DATABASE_URL", &url), ("ROUSE_LOG", "info")],
    );
    let (_asks, _) = tokio::task::spawn_blocking(move || silent.accept())
        .await
        .unwrap()
        .unwrap();
    host.signal(libc::SIGTERM);
    let (status, output) = host.exit(PATIENCE);
    assert!(status.success(), "{status}: {output}");
    assert!(output.contains("before anything was started"), "{output}");
}

#[tokio::test]
async fn sigterm_stops_claiming_finishes_what_runs_and_exits_with_zero() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let host = serve(&db, &config(""), &["--slots", "1"]);
    let running = enqueue(&client, "test.sleep", json!({"ms": 1000})).await;
    // A claim that has not started yet would be released.
    host.line(PATIENCE, |line| {
        line.contains("started") && line.contains("rouse::job")
    });
    host.signal(libc::SIGTERM);
    host.line(PATIENCE, |line| line.contains("stopping"));
    let waiting = enqueue(&client, "noop", json!({"n": 1})).await;
    let (status, output) = host.exit(PATIENCE);
    assert!(status.success(), "{output}");
    assert_eq!(show(&client, running).await.state, "succeeded");
    assert_eq!(show(&client, waiting).await.state, "queued");
}

#[tokio::test]
async fn a_job_whose_worker_is_killed_runs_again_elsewhere_after_its_lease() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = config("[handlers.\"test.*\"]\nlease = \"2s\"");
    let victim = serve(&db, &config, &["--worker-id", "victim"]);
    let id = enqueue(&client, "test.sleep", json!({"ms": 1500})).await;
    until(&client, id, |job| job.state == "running").await;
    victim.kill();
    let heir = serve(&db, &config, &["--worker-id", "heir"]);
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    let rows = client
        .query(
            "SELECT event, worker FROM rouse.history($1) WHERE event <> 'renewed'",
            &[&id],
        )
        .await
        .unwrap();
    let events: Vec<(String, Option<String>)> =
        rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    let event = |event: &str, worker: Option<&str>| (event.to_string(), worker.map(str::to_string));
    assert_eq!(
        events,
        [
            event("requested", None),
            event("claimed", Some("victim")),
            event("lost", Some("victim")),
            event("started", Some("heir")),
            event("succeeded", Some("heir")),
        ]
    );
    drop(heir);
}

#[tokio::test]
async fn a_host_that_was_frozen_past_its_lease_cannot_settle_the_job() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = config("[handlers.\"test.*\"]\nlease = \"2s\"");
    let frozen = serve(&db, &config, &["--worker-id", "frozen"]);
    let id = enqueue(&client, "test.race", json!({"ms": 3000})).await;
    until(&client, id, |job| job.state == "running").await;
    frozen.signal(libc::SIGSTOP);
    let heir = serve(&db, &config, &["--worker-id", "heir"]);
    until(&client, id, |job| job.attempt == 2).await;
    frozen.signal(libc::SIGCONT);
    // By its own clock its leases have ended while it was frozen, and so may have the guest's sleep: either it stops the attempt
    // first, or the database refuses the outcome.
    frozen.line(PATIENCE, |line| {
        // The guest, the check of the leases or the database may notice it first.
        [
            "aborted",
            "lease lost",
            "outcome refused: the lease is lost",
        ]
        .iter()
        .any(|noticed| line.contains(noticed))
    });
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
    assert_eq!(job.result, Some(json!({"slept_ms": 3000})));
    let owner: String = client
        .query_one(
            "SELECT w.worker_id FROM rouse.finished AS f JOIN rouse.worker AS w ON w.incarnation = f.worker WHERE f.id = $1",
            &[&id],
        )
        .await
        .unwrap()
        .get(0);
    assert_eq!(owner, "heir");
    drop(heir);
}

#[tokio::test]
async fn dev_needs_no_setup_and_leaves_no_process_running() {
    let dir = scratch("dev");
    let data = dir.join("pg");
    let guests = guests_dir();
    let port = crate::support::free_port().to_string();
    let args = [
        "dev",
        "--json",
        "--data-dir",
        data.to_str().unwrap(),
        "--handlers",
        guests.to_str().unwrap(),
        "--pg-port",
        &port,
    ];
    let host = Host::rouse(&args, &[]);
    let ready = host.line(PATIENCE, |line| line.contains("\"ready\""));
    let ready: Value = serde_json::from_str(&ready).unwrap();
    let client = connect(ready["url"].as_str().unwrap()).await;
    let id = enqueue(&client, "text.stats", json!({"text": "hello"})).await;
    let job = ended(&client, id).await;
    assert_eq!(job.result.unwrap()["words"], 1);
    let tcp = connect(ready["tcp_url"].as_str().unwrap()).await;
    tcp.query("SELECT rouse.enqueue('noop')", &[])
        .await
        .unwrap();
    assert!(
        ready["tcp_url"]
            .as_str()
            .unwrap()
            .contains(&format!("@127.0.0.1:{port}/"))
    );

    // The other commands find it from its folder, without a URL.
    let show = Host::rouse(
        &["job", &id.to_string()],
        &[
            ("ROUSE_DATA_DIR", data.to_str().unwrap()),
            ("DATABASE_URL", ""),
        ],
    );
    let (status, output) = show.exit(PATIENCE);
    assert!(status.success() && output.contains("succeeded"), "{output}");

    let postmaster: i32 = std::fs::read_to_string(data.join("cluster/postmaster.pid"))
        .unwrap()
        .lines()
        .next()
        .unwrap()
        .parse()
        .unwrap();
    host.signal(libc::SIGINT);
    let (status, output) = host.exit(PATIENCE);
    assert!(status.success(), "{output}");
    assert!(
        !Path::new(&format!("/proc/{postmaster}")).exists(),
        "the server has stopped"
    );
}

#[tokio::test]
async fn dev_prints_a_call_that_works_as_printed() {
    let dir = scratch("dev-example");
    let handlers = dir.join("handlers");
    std::fs::create_dir(&handlers).unwrap();
    let greet = "greet.wasm";
    std::fs::copy(guests_dir().join(greet), handlers.join(greet)).unwrap();
    let (data, handlers) = (dir.join("pg"), handlers.to_str().unwrap());
    let data = data.to_str().unwrap();
    let host = Host::rouse(&["dev", "--data-dir", data, "--handlers", handlers], &[]);
    let url = host.line(PATIENCE, |line| line.starts_with("postgres: "));
    host.line(PATIENCE, |line| line.contains("1 handler from"));
    let call = host.line(PATIENCE, |line| line.contains("SELECT rouse.enqueue("));
    let client = connect(url.trim_start_matches("postgres: ")).await;
    let id: i64 = client.query_one(call.trim(), &[]).await.unwrap().get(0);
    let job = ended(&client, id).await;
    assert_eq!(job.state, "succeeded", "{call}: {:?}", job.error);
    host.signal(libc::SIGTERM);
    assert!(host.exit(PATIENCE).0.success());
}

#[tokio::test]
async fn dev_lists_refused_modules_if_none_serves() {
    let dir = scratch("dev-refused");
    let handlers = dir.join("handlers");
    std::fs::create_dir(&handlers).unwrap();
    std::fs::write(handlers.join("broken.wasm"), "no wasm at all").unwrap();
    let (data, handlers) = (dir.join("pg"), handlers.to_str().unwrap());
    let data = data.to_str().unwrap();
    let host = Host::rouse(&["dev", "--data-dir", data, "--handlers", handlers], &[]);
    host.line(PATIENCE, |line| line.trim() == "none: 1 file is refused");
    host.line(PATIENCE, |line| {
        line.trim()
            .starts_with("refused broken.wasm: it is not WebAssembly")
    });
    host.signal(libc::SIGTERM);
    assert!(host.exit(PATIENCE).0.success());
}

#[tokio::test]
async fn dev_starts_again_after_a_kill_and_keeps_its_jobs() {
    let dir = scratch("dev-killed");
    let (data, guests) = (dir.join("pg"), guests_dir());
    let args = [
        "dev",
        "--json",
        "--data-dir",
        data.to_str().unwrap(),
        "--handlers",
        guests.to_str().unwrap(),
    ];
    let start = || {
        let host = Host::rouse(&args, &[]);
        let ready = host.line(PATIENCE, |line| line.contains("\"ready\""));
        let ready: Value = serde_json::from_str(&ready).unwrap();
        (host, ready["url"].as_str().unwrap().to_string())
    };
    let (first, url) = start();
    let client = connect(&url).await;
    let row = client
        .query_one("SELECT rouse.enqueue('noop', '{\"n\": 3}', run_at => clock_timestamp() + interval '1 second')", &[])
        .await
        .unwrap();
    let id: i64 = row.get(0);
    first.kill();
    let (second, url) = start();
    let client = connect(&url).await;
    assert_eq!(ended(&client, id).await.result, Some(json!({"n": 3})));
    second.signal(libc::SIGTERM);
    assert!(second.exit(PATIENCE).0.success());
}

#[tokio::test]
async fn a_granted_directory_is_visible_to_its_handler_only() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let config = config(
        "[handlers.\"test.read-file\"]\ndirs = [{ dir = \"in\", at = \"/in\" }]\n\
         [handlers.\"test.write-file\"]\ndirs = [{ dir = \"out\", at = \"/out\", mode = \"read-write\" }]",
    );
    let folder = config.parent().unwrap();
    for dir in ["in", "out"] {
        std::fs::create_dir(folder.join(dir)).unwrap();
    }
    std::fs::write(folder.join("in/a.txt"), "inside").unwrap();
    std::fs::write(folder.join("secret.txt"), "outside").unwrap();
    let host = serve(&db, &config, &[]);
    let read = async |path: &str| {
        let id = enqueue(&client, "test.read-file", json!({ "path": path })).await;
        ended(&client, id).await
    };
    assert_eq!(read("/in/a.txt").await.state, "succeeded");
    for path in ["/in/../secret.txt", "/out/b.txt", "/etc/passwd"] {
        assert_eq!(read(path).await.state, "failed", "{path}");
    }
    let write = async |path: &str| {
        let payload = json!({"path": path, "text": "written"});
        let id = enqueue(&client, "test.write-file", payload).await;
        ended(&client, id).await.state
    };
    assert_eq!(write("/out/b.txt").await, "succeeded");
    assert_eq!(
        std::fs::read_to_string(folder.join("out/b.txt")).unwrap(),
        "written"
    );
    assert_eq!(write("/in/b.txt").await, "failed");
    drop(host);
}

#[tokio::test]
async fn enqueue_and_job_work_from_the_shell() {
    let db = TestDb::new().await;
    let host = serve(&db, &config(""), &[]);
    let (code, id) = run(&db, &["enqueue", "text.stats", r#"{"text": "one two"}"#]);
    assert_eq!(code, 0, "{id}");
    // The result may be followed by a warning that no worker serves the handler: the host may not have registered yet.
    let result = |output: &str| {
        let mut lines = output.lines();
        let is_result = |line: &&str| !line.starts_with("rouse: ");
        lines.find(is_result).expect("a result").to_owned()
    };
    let id = result(&id);
    let (code, shown) = run(&db, &["job", &id, "--wait", "--timeout", "60s"]);
    assert_eq!(code, 0, "{shown}");
    for part in [
        "text.stats",
        "succeeded",
        "\"words\": 2",
        "history",
        "requested",
        "started",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let (code, record) = run(&db, &["job", &id, "--json"]);
    assert_eq!(code, 0);
    let record: Value = serde_json::from_str(&record).expect("one JSON object");
    assert_eq!(record["result"]["words"], 2);
    assert_eq!(record["history"].as_array().unwrap().len(), 3);

    let (code, failed) = run(
        &db,
        &["enqueue", "test.fail", r#"{"as": "permanent"}"#, "--json"],
    );
    assert_eq!(code, 0);
    let failed: Value = serde_json::from_str(&result(&failed)).unwrap();
    let (code, shown) = run(&db, &["job", &failed["id"].to_string(), "--wait"]);
    assert_eq!(code, 4, "an unsuccessful end: {shown}");
    assert!(shown.contains("hopeless"), "{shown}");

    let (code, late) = run(&db, &["enqueue", "noop", "--in", "1h"]);
    assert_eq!(code, 0);
    let (code, said) = run(
        &db,
        &["job", &result(&late), "--wait", "--timeout", "100ms"],
    );
    assert_eq!(code, 5, "it has not ended in time");
    assert!(said.contains("has not ended within 100ms"), "{said}");
    assert!(!said.contains("tags"), "it has none: {said}");
    let (_, tagged) = run(
        &db,
        &["enqueue", "noop", "--tag", "gpu", "--unique-key", "once"],
    );
    let again = ["enqueue", "noop", "--queue", "q", "--unique-key", "once"];
    let (code, said) = run(&db, &again);
    assert_eq!(code, 0);
    assert!(
        tagged.contains("the tags that the job requires (gpu)"),
        "{tagged}"
    );
    let tagged = result(&tagged);
    let id = tagged.as_str();
    assert_eq!(
        said,
        format!(
            "{id}\nrouse: already queued as {id}, with a different queue, tags; nothing was added"
        )
    );
    let (_, said) = run(&db, &[&again[..], &["--json"]].concat());
    let said: Value = serde_json::from_str(&said).unwrap();
    let id: i64 = id.parse().unwrap();
    assert_eq!(
        said,
        json!({"id": id, "created": false, "differs": ["queue", "tags"]})
    );
    let other = ["enqueue", "noop", "--unique-key", "once", "--tenant", "t"];
    let (_, said) = run(&db, &[&other[..], &["--json"]].concat());
    let said: Value = serde_json::from_str(&result(&said)).unwrap();
    assert!(said["created"] == true && said["id"] != id, "{said}");
    let (_, shown) = run(&db, &["job", &tagged]);
    for part in ["tags", "gpu", "unique_key", "once"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let (_, nobodys) = run(&db, &["enqueue", "no.such.handler"]);
    assert!(
        nobodys.contains("has the handler no.such.handler"),
        "{nobodys}"
    );
    let (code, said) = run(&db, &["job", &result(&nobodys)]);
    assert_eq!(code, 0);
    assert!(
        said.contains("no running worker has the handler no.such.handler"),
        "{said}"
    );
    let (code, said) = run(&db, &["job", "999999"]);
    assert_eq!(code, 3);
    assert!(said.contains("no job 999999"), "{said}");
    drop(host);
}

#[tokio::test]
async fn a_listing_reads_only_the_newest_jobs_reports_that_and_can_be_continued() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue('rare');
             SELECT rouse.enqueue('usual', queue => 'q');
             INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, lost, state, payload)
             SELECT 10 + n, (SELECT id FROM rouse.lane WHERE queue = 'q'), '2026-01-02Z', now(), now(), 0, 0, 'cancelled', '{}'
             FROM generate_series(1, 100000) AS n",
        )
        .await
        .unwrap();
    let rare = ["job", "ls", "--handler", "rare"];
    let (code, said) = run(&db, &rare);
    assert_eq!(code, 0);
    let back = "only the newest 100000 jobs were examined, back to 11, requested at 2026-01-02T00:00:00Z; --before 11 continues from there";
    assert!(said.contains(back) && !said.contains("queued"), "{said}");
    let (_, said) = run(&db, &[&rare[..], &["--json"]].concat());
    let said: Value = serde_json::from_str(&said).unwrap();
    assert_eq!(
        said,
        json!({"jobs": [], "more": false, "looked_back_to": 11})
    );
    let (_, said) = run(&db, &[&rare[..], &["--before", "11"]].concat());
    assert!(
        said.contains("queued") && !said.contains("--before"),
        "{said}"
    );
    // A listing with enough rows does not mention the rows that it did not read.
    let (_, said) = run(&db, &["job", "ls", "--limit", "3", "--queue", "q"]);
    assert!(
        said.contains("--limit N") && !said.contains("--before"),
        "{said}"
    );
    let (_, help) = run(&db, &["job", "ls", "--help"]);
    assert!(help.contains("examines the newest 100,000 jobs"), "{help}");
}

#[tokio::test]
async fn mistakes_on_the_command_line_are_reported_with_the_next_step() {
    let db = TestDb::new().await;
    let missing = scratch("empty").join("rouse.toml");
    let bad = config("slot = 3");
    for (args, says) in [
        (
            &["enqueue", "noop", "{a: 1}"][..],
            "the payload is not JSON",
        ),
        (&["enqueue", "No Such"], "is not a handler name"),
        (
            &["enqueue", "noop", "--priority", "urgent"],
            "priority must be high, normal or low",
        ),
        (&["enqueue", "noop", "--in", "soon"], "such as 90s or 2h"),
        (
            &["handlers", "--handlers", "/nowhere"],
            "there is no folder /nowhere",
        ),
        (
            &["handlers", "--config", missing.to_str().unwrap()],
            "cannot read",
        ),
        (&["handlers", "--config", bad.to_str().unwrap()], "slot"),
        (&["invoke", "noop", "--timeout", "0s"], "longer than 0s"),
        (&["serve", "--http", "localhost"], "is neither ADDRESS:PORT"),
        (
            &["serve", "--http", "off", "--handlers", "/nowhere"],
            "there is no handlers folder /nowhere",
        ),
        (
            &["serve", "--poll-max", "2h"],
            "must be between 1ms and 60s",
        ),
        (&["job", "12", "--timeout", "1s"], "--wait"),
        (
            &[
                "serve",
                "--database-url",
                "postgres://h/d?sslmode=sometimes",
            ],
            "sslmode",
        ),
        (
            &["serve", "--listen-url", "postgres://h/d?sslmode=sometimes"],
            "--listen-url or ROUSE_LISTEN_URL",
        ),
    ] {
        let (code, output) = run(&db, args);
        assert_ne!(code, 0, "{args:?}: {output}");
        assert!(output.contains(says), "{args:?}: {output}");
    }
    let (_, refused) = run(
        &db,
        &["migrate", "--database-url", "postgres://a@127.0.0.1:1/b"],
    );
    assert_eq!(
        refused.matches("refused").count(),
        1,
        "told once: {refused}"
    );
    assert!(refused.contains("check host and port"), "{refused}");
    let nowhere = Host::rouse(
        &["job", "1"],
        &[("DATABASE_URL", ""), ("ROUSE_DATA_DIR", "/nowhere")],
    );
    let (status, output) = nowhere.exit(Duration::from_secs(10));
    assert!(!status.success());
    assert!(output.contains("set DATABASE_URL"), "{output}");
}

#[tokio::test]
async fn handlers_lists_served_and_refused_modules() {
    let db = TestDb::new().await;
    let folder = scratch("handlers");
    std::fs::copy(guests_dir().join("noop.wasm"), folder.join("noop.wasm")).unwrap();
    std::fs::write(folder.join("broken.wasm"), "no wasm at all").unwrap();
    let dir = folder.to_str().unwrap();
    let (code, listed) = run(&db, &["handlers", "--handlers", dir]);
    assert_eq!(code, 1, "a refused file is an error: {listed}");
    assert!(
        listed.contains("noop.wasm") && listed.contains("refused broken.wasm"),
        "{listed}"
    );
    let (_, listed) = run(&db, &["handlers", "--handlers", dir, "--json"]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(listed["handlers"][0]["name"], "noop");
    assert_eq!(listed["handlers"][0]["input_schema"]["type"], "object");
    assert_eq!(listed["handlers"][0]["instances"], "fresh");
    assert_eq!(listed["refused"][0]["file"], "broken.wasm");
}

#[tokio::test]
async fn serve_reports_its_health_and_its_metrics() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let port = crate::support::free_port();
    let address = format!("127.0.0.1:{port}");
    let guests = guests_dir();
    let host = Host::rouse(
        &[
            "serve",
            "--http",
            &address,
            "--handlers",
            guests.to_str().unwrap(),
        ],
        &[("DATABASE_URL", &db.url())],
    );
    host.line(PATIENCE, |line| line.contains("worker started"));
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, id).await;
    let get = async |path: &str| crate::http::get(address.parse().unwrap(), path).await;
    assert!(get("/healthz").await.0.contains("200"));
    assert!(get("/readyz").await.0.contains("200"));
    let metrics = get("/metrics").await.1;
    assert!(metrics.contains("rouse_jobs_claimed_total 1"), "{metrics}");
    assert!(
        metrics.contains("rouse_attempts_total{handler=\"noop\",outcome=\"succeeded\"} 1"),
        "{metrics}"
    );
    // The database is queried after the page was read once, for the next read.
    for shown in [
        "rouse_dead_rows ",
        "rouse_xmin_age_transactions ",
        "rouse_notification_queue_usage ",
        "rouse_oldest_transaction_seconds ",
    ] {
        assert!(!metrics.contains(shown), "{shown}: {metrics}");
        let started = std::time::Instant::now();
        while !get("/metrics").await.1.contains(shown) {
            assert!(started.elapsed() < PATIENCE, "{shown}");
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }

    let second = Host::rouse(
        &[
            "serve",
            "--http",
            &address,
            "--handlers",
            guests.to_str().unwrap(),
        ],
        &[("DATABASE_URL", &db.url())],
    );
    let (status, output) = second.exit(PATIENCE);
    assert!(!status.success());
    assert!(output.contains("choose another with --http"), "{output}");
    host.signal(libc::SIGTERM);
    assert!(host.exit(PATIENCE).0.success());
}

#[test]
fn the_help_shows_where_to_start() {
    let (status, output) = Host::rouse(&["--help"], &[]).exit(PATIENCE);
    assert!(status.success());
    insta::assert_snapshot!(output);
}

#[tokio::test]
async fn a_host_whose_database_hangs_stops_at_the_second_signal() {
    let dir = scratch("hangs");
    let settings = crate::support::postgres_settings(dir.join("pg"));
    let server = tokio::task::spawn_blocking(move || rouse::postgres::Server::start(&settings))
        .await
        .unwrap()
        .expect("a server");
    let url = server.url("postgres");
    migrate(&url).await.unwrap();
    let guests = guests_dir();
    let host = Host::rouse(
        &[
            "serve",
            "--http",
            "off",
            "--handlers",
            guests.to_str().unwrap(),
        ],
        &[("DATABASE_URL", &url)],
    );
    host.line(PATIENCE, |line| line.contains("worker started"));
    let client = connect(&url).await;
    // By then the connections that test for a pooler are closed.
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let rows = client
        .query(
            "SELECT pid FROM pg_stat_activity WHERE application_name = 'rouse'",
            &[],
        )
        .await
        .unwrap();
    let backends: Vec<i32> = rows.iter().map(|row| row.get(0)).collect();
    assert!(!backends.is_empty());
    let signal = |signal: &str| {
        for pid in &backends {
            let sent = std::process::Command::new("kill")
                .args([signal, &pid.to_string()])
                .status();
            assert!(sent.unwrap().success());
        }
    };
    signal("-STOP");
    host.signal(libc::SIGTERM);
    host.line(PATIENCE, |line| line.contains("stopping"));
    host.signal(libc::SIGTERM);
    let (_, output) = host.exit(Duration::from_secs(60));
    signal("-CONT");
    assert!(output.contains("worker stopped"), "{output}");
    tokio::task::spawn_blocking(move || server.stop())
        .await
        .unwrap();
}

#[tokio::test]
async fn the_private_postgres_reports_that_its_server_has_ended() {
    let data = scratch("ends").join("pg");
    let host = Host::rouse(
        &["postgres", "--json", "--data-dir", data.to_str().unwrap()],
        &[],
    );
    host.line(PATIENCE, |line| line.contains("\"ready\""));
    let pid = std::fs::read_to_string(data.join("cluster/postmaster.pid")).unwrap();
    let pid = pid.lines().next().unwrap();
    let sent = std::process::Command::new("kill")
        .args(["-INT", pid])
        .status();
    assert!(sent.unwrap().success());
    let (status, output) = host.exit(PATIENCE);
    assert!(!status.success());
    assert!(
        output.contains("the private Postgres ended unexpectedly"),
        "{output}"
    );
}

#[tokio::test]
async fn a_closed_output_pipe_ends_the_command_quietly() {
    let mut child = std::process::Command::new(crate::support::rouse_binary())
        .args(["migrate", "--roles-sql"])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[tokio::test]
async fn a_host_whose_log_pipe_is_closed_keeps_working_and_stops_on_a_signal() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let guests = guests_dir();
    let mut host = crate::support::rouse()
        .args([
            "serve",
            "--http",
            "off",
            "--worker-id",
            "unread",
            "--handlers",
        ])
        .arg(&guests)
        .env("DATABASE_URL", db.url())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop((host.stdout.take(), host.stderr.take()));
    // Its attempts write to the log, and so does every step of stopping it.
    let id = enqueue(&client, "test.print", json!({"line": "unread", "times": 3})).await;
    let job = ended(&client, id).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    let pid = libc::pid_t::try_from(host.id()).unwrap();
    let sent = std::process::Command::new("kill")
        .args(["-TERM", &pid.to_string()])
        .status();
    assert!(sent.unwrap().success());
    let status = tokio::task::spawn_blocking(move || host.wait())
        .await
        .unwrap();
    assert!(status.unwrap().success());
    until_true(
        &client,
        "SELECT state = 'unregistered' FROM rouse.workers WHERE worker_id = 'unread'",
    )
    .await;
}

#[tokio::test]
async fn numbers_and_nesting_that_only_postgres_can_hold_are_shown_unchanged() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let deep = format!("{}1{}", "[".repeat(300), "]".repeat(300));
    for payload in ["{\"cents\": 12345678901234567890123456789}", &deep] {
        let sql = format!("SELECT rouse.enqueue('no.such', '{payload}')");
        let id: i64 = client.query_one(&sql, &[]).await.unwrap().get(0);
        for more in [None, Some("--json")] {
            let id = id.to_string();
            let mut args = vec!["job", "show", &id];
            args.extend(more);
            let (code, output) = run(&db, &args);
            assert_eq!(code, 0, "{output}");
            assert!(output.contains(payload), "{output}");
        }
    }
}

#[tokio::test]
async fn a_host_that_cannot_claim_is_not_ready_even_if_it_renews_leases() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let address = format!("127.0.0.1:{}", crate::support::free_port());
    let config = config("[handlers.\"test.sleep\"]\nlease = \"2s\"\n");
    let host = serve(&db, &config, &["--http", &address]);
    let running = enqueue(&client, "test.sleep", json!({"ms": 600_000})).await;
    until(&client, running, |job| job.state == "running").await;
    let ready = async || {
        let (head, _) = crate::http::get(address.parse().unwrap(), "/readyz").await;
        head.contains("200")
    };
    assert!(ready().await);
    let broken = "ALTER FUNCTION rouse.peek RENAME TO peek_away";
    client.batch_execute(broken).await.unwrap();
    let started = std::time::Instant::now();
    while ready().await {
        assert!(started.elapsed() < PATIENCE, "the host cannot claim");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    for _ in 0..3 {
        let lease = "SELECT lease_until::text FROM rouse.job";
        let lease: String = client.query_one(lease, &[]).await.unwrap().get(0);
        let renewed = format!("SELECT lease_until > '{lease}' FROM rouse.job");
        until_true(&client, &renewed).await;
        assert!(!ready().await);
    }
    host.signal(libc::SIGKILL);
}
