//! The `rouse` command as a child process: its output, its exit, and the failures that it survives.

mod dev;
mod flows;
mod hosts;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use rouse::job::JobId;
use serde_json::{Value, json};

use crate::support::worker::{TIMEOUT, ended, enqueue, guests_dir};
use crate::support::{Host, TestDb, rouse, scratch};

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
    host.line(TIMEOUT, |line| line.contains("worker started"));
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
    let (status, output) = host.exit(TIMEOUT);
    (status.code().expect("an exit code"), output)
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

/// Otherwise, the variable would count as unset, and another database could be used.
#[test]
fn a_variable_that_is_not_utf_8_is_refused_by_name() {
    let mut command = rouse();
    command.args(["top"]).env(
        "DATABASE_URL",
        OsStr::from_bytes(b"postgres://ann:caf\xe9@db.example/jobs"),
    );
    let (status, output) = Host::spawn(command).exit(TIMEOUT);
    assert_eq!(status.code(), Some(1), "{output}");
    assert_eq!(output, "rouse: DATABASE_URL is not UTF-8");
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
    let history = record["history"].as_array().unwrap();
    let events: Vec<&str> = history
        .iter()
        .filter_map(|event| event["event"].as_str())
        // The host renews its leases when it starts to listen, and gives back a claim that does not start soon.
        .filter(|event| !["renewed", "released"].contains(event))
        .collect();
    assert_eq!(events, ["requested", "started", "succeeded"]);

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
    let (code, output) = run(
        &db,
        &["job", &result(&late), "--wait", "--timeout", "100ms"],
    );
    assert_eq!(code, 5, "it has not ended in time");
    assert!(output.contains("has not ended within 100ms"), "{output}");
    assert!(!output.contains("tags"), "the job has no tags: {output}");
    let (_, tagged) = run(
        &db,
        &["enqueue", "noop", "--tag", "gpu", "--unique-key", "once"],
    );
    let again = ["enqueue", "noop", "--queue", "q", "--unique-key", "once"];
    let (code, output) = run(&db, &again);
    assert_eq!(code, 0);
    assert!(
        tagged.contains("the tags that the job requires (gpu)"),
        "{tagged}"
    );
    let tagged = result(&tagged);
    let id = tagged.as_str();
    assert_eq!(
        output,
        format!(
            "{id}\nrouse: no job was added: job {id} has the unique key, with a different queue, tags"
        )
    );
    let (_, output) = run(&db, &[&again[..], &["--json"]].concat());
    let output: Value = serde_json::from_str(&output).unwrap();
    let id: i64 = id.parse().unwrap();
    assert_eq!(
        output,
        json!({"id": id, "created": false, "differs": ["queue", "tags"]})
    );
    let other = ["enqueue", "noop", "--unique-key", "once", "--tenant", "t"];
    let (_, output) = run(&db, &[&other[..], &["--json"]].concat());
    let output: Value = serde_json::from_str(&result(&output)).unwrap();
    assert!(output["created"] == true && output["id"] != id, "{output}");
    let (_, shown) = run(&db, &["job", &tagged]);
    for part in ["tags", "gpu", "unique_key", "once"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let (_, unserved) = run(&db, &["enqueue", "no.such.handler"]);
    assert!(
        unserved.contains("has the handler no.such.handler"),
        "{unserved}"
    );
    let (code, output) = run(&db, &["job", &result(&unserved)]);
    assert_eq!(code, 0);
    assert!(
        output.contains("No running worker has the handler no.such.handler."),
        "{output}"
    );
    let (code, output) = run(&db, &["job", "999999"]);
    assert_eq!(code, 3);
    assert!(output.contains("no job 999999"), "{output}");
    drop(host);
}

#[tokio::test]
async fn the_history_of_a_job_has_one_line_for_the_renewals_of_an_attempt() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let id = "SELECT rouse.enqueue('a.b')";
    let id: i64 = client.query_one(id, &[]).await.unwrap().get(0);
    client
        .execute(
            "INSERT INTO rouse.record (at, job, event, attempt)
             SELECT clock_timestamp() + n * interval '1 s', $1::bigint, 'renewed', 1 FROM generate_series(1, 30) AS n
             UNION ALL
             SELECT clock_timestamp() + interval '31 s', $1::bigint, 'released', 1
             UNION ALL
             SELECT clock_timestamp() + interval '32 s', $1::bigint, 'renewed', 2",
            &[&id],
        )
        .await
        .unwrap();
    // The others are not read.
    let read = db.store().job(JobId(id)).await.unwrap().expect("the job");
    let events = read.record["history"].as_array().unwrap();
    let events: Vec<Value> = events
        .iter()
        .map(|it| json!([it["event"], it["times"]]))
        .collect();
    let expected = json!([
        ["requested", null],
        ["renewed", 30],
        ["released", null],
        ["renewed", null]
    ]);
    assert_eq!(Value::from(events), expected);
    let id = id.to_string();
    let (_, shown) = run(&db, &["job", &id]);
    assert_eq!(shown.matches("renewed").count(), 2, "{shown}");
    assert!(shown.contains("30 times, last at this time"), "{shown}");
    let (_, record) = run(&db, &["job", &id, "--json"]);
    let record: Value = serde_json::from_str(&record).unwrap();
    let history = record["history"].as_array().unwrap();
    let renewals = history.iter().filter(|event| event["event"] == "renewed");
    assert_eq!(renewals.count(), 31);
}

#[tokio::test]
async fn a_listing_reads_only_the_newest_jobs_reports_that_and_can_be_continued() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .batch_execute(
            "SELECT rouse.enqueue('rare');
             SELECT rouse.enqueue('usual', queue => 'q');
             INSERT INTO rouse.finished (id, lane, requested_at, available_at, finished_at, attempt, uncounted, state, payload)
             SELECT 10 + n, (SELECT id FROM rouse.lane WHERE queue = 'q'), '2026-01-02Z', now(), now(), 0, 0, 'cancelled', '{}'
             FROM generate_series(1, 100000) AS n",
        )
        .await
        .unwrap();
    let rare = ["job", "ls", "--handler", "rare"];
    let (code, output) = run(&db, &rare);
    assert_eq!(code, 0);
    let back = "only the newest 100000 jobs were examined, back to 11, requested at 2026-01-02T00:00:00Z; --before 11 continues from there";
    assert!(
        output.contains(back) && !output.contains("queued"),
        "{output}"
    );
    let (_, output) = run(&db, &[&rare[..], &["--json"]].concat());
    let output: Value = serde_json::from_str(&output).unwrap();
    assert_eq!(
        output,
        json!({"jobs": [], "more": false, "examined_back_to": 11})
    );
    let (_, output) = run(&db, &[&rare[..], &["--before", "11"]].concat());
    assert!(
        output.contains("queued") && !output.contains("--before"),
        "{output}"
    );
    // A listing with enough rows does not mention the rows that it did not read.
    let (_, output) = run(&db, &["job", "ls", "--limit", "3", "--queue", "q"]);
    assert!(
        output.contains("--limit N") && !output.contains("--before"),
        "{output}"
    );
    let (_, help) = run(&db, &["job", "ls", "--help"]);
    assert!(help.contains("examines the newest 100,000 jobs"), "{help}");
}

#[tokio::test]
async fn a_job_is_enqueued_for_a_time() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let at = ["enqueue", "noop", "--at", "2099-01-31T08:00Z"];
    for more in [&[][..], &["--unique-key", "k"]] {
        let (code, output) = run(&db, &[&at[..], more].concat());
        assert_eq!(code, 0, "{output}");
    }
    let jobs = "SELECT count(*) FROM rouse.job WHERE available_at = '2099-01-31 08:00+00'";
    let row = client.query_one(jobs, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 2);
    let (code, output) = run(&db, &[&at[..], &["--in", "1h"]].concat());
    assert_eq!(code, 2, "{output}");
}

#[tokio::test]
async fn tags_of_the_command_line_replace_those_of_the_file() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let tags = ["--tag", "gpu", "--tag", "region=eu"];
    let _host = serve(&db, &config("tags = [\"cpu\"]"), &tags);
    let sql = "SELECT tags FROM rouse.workers WHERE state = 'active'";
    let row = client.query_one(sql, &[]).await.unwrap();
    assert_eq!(row.get::<_, Vec<String>>(0), ["gpu", "region=eu"]);
}

#[tokio::test]
async fn mistakes_on_the_command_line_are_reported_with_the_next_step() {
    let db = TestDb::new().await;
    let missing = scratch("empty").join("rouse.toml");
    let bad = config("slot = 3");
    for (args, expected) in [
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
            &["enqueue", "noop", "--at", "soon"],
            "invalid input syntax for type timestamp",
        ),
        (&["serve", "--queue", "a b"], "\"a b\" is not a name"),
        (&["serve", "--tag", "g p u"], "\"g p u\" is not a name"),
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
            "the handlers folder /nowhere does not exist",
        ),
        (&["serve", "--poll-max", "2h"], "must be between 1ms and 1m"),
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
        assert!(output.contains(expected), "{args:?}: {output}");
    }
    let (_, refused) = run(
        &db,
        &["migrate", "--database-url", "postgres://a@127.0.0.1:1/b"],
    );
    assert_eq!(
        refused.matches("refused").count(),
        1,
        "reported once: {refused}"
    );
    assert!(refused.contains("check host and port"), "{refused}");
    let without_url = Host::rouse(
        &["job", "1"],
        &[("DATABASE_URL", ""), ("ROUSE_DATA_DIR", "/nowhere")],
    );
    let (status, output) = without_url.exit(Duration::from_secs(10));
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

#[test]
fn the_help_shows_where_to_start() {
    let (status, output) = Host::rouse(&["--help"], &[]).exit(TIMEOUT);
    assert!(status.success());
    insta::assert_snapshot!(output);
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
