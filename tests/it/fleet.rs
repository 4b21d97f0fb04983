//! The commands that look at the fleet, ask it to prove itself, and empty a queue.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rouse::store::{Stats, Store, WorkerKey};
use rouse::worker::Settings;
use serde_json::{Value, json};
use tokio_postgres::Client;

use crate::support::database::registration;
use crate::support::worker::{
    PATIENCE, TestWorker, ended, enqueue, events, guests_dir, until, until_true, watched,
};
use crate::support::{Host, TestDb, rouse_binary, scratch};

/// What a command prints, and its exit code.
struct Ran {
    code: i32,
    stdout: String,
    stderr: String,
}

impl Ran {
    fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}{}", self.stdout, self.stderr))
    }

    fn says(&self, part: &str) -> &Self {
        let all = format!("{}{}", self.stdout, self.stderr);
        assert!(all.contains(part), "{part:?} is not in:\n{all}");
        self
    }

    fn exits(&self, code: i32) -> &Self {
        assert_eq!(self.code, code, "{}{}", self.stdout, self.stderr);
        self
    }
}

fn command(url: &str, args: &[&str], folder: &Path) -> Command {
    let mut command = Command::new(rouse_binary());
    command
        .args(args)
        .env("DATABASE_URL", url)
        .env_remove("ROUSE_LOG")
        .current_dir(folder)
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end, in an empty folder.
async fn rouse(db: &TestDb, args: &[&str]) -> Ran {
    rouse_in(db, args, &scratch("fleet")).await
}

async fn rouse_in(db: &TestDb, args: &[&str], folder: &Path) -> Ran {
    let mut command = command(&db.url(), args, folder);
    let output = tokio::task::spawn_blocking(move || command.output())
        .await
        .unwrap()
        .unwrap();
    Ran {
        code: output.status.code().expect("it exits"),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

fn named(worker_id: &str) -> Settings {
    Settings {
        worker_id: worker_id.into(),
        ..Settings::default()
    }
}

/// As if nothing had been heard of it for a while.
async fn silence(client: &Client, worker: &Store) {
    client
        .execute(
            "UPDATE rouse.worker SET seen_at = now() - interval '91 s' WHERE incarnation = $1",
            &[&worker.incarnation().unwrap().0],
        )
        .await
        .unwrap();
}

#[tokio::test]
async fn workers_are_listed_with_what_they_are_and_shown_with_their_handlers() {
    let db = TestDb::new().await;
    let settings = Settings {
        hostname: "machine-7".into(),
        queues: vec!["mail".into(), "news".into()],
        tags: vec!["gpu".into()],
        slots: 3,
        ..named("mail-1")
    };
    let worker = TestWorker::start(&db, settings).await;
    let client = db.client().await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;

    let ran = rouse(&db, &["workers", "ls"]).await;
    ran.exits(0);
    let row = ran.stdout.lines().nth(1).expect("one worker");
    for part in [
        "mail-1",
        "active",
        "machine-7",
        " 3 ",
        "gpu",
        "mail, news",
        "ago",
    ] {
        assert!(row.contains(part), "{part}: {row}");
    }
    let listed = rouse(&db, &["workers", "ls", "--json"]).await.json();
    assert_eq!(listed["workers"][0]["worker_id"], "mail-1");
    assert_eq!(listed["workers"][0]["slots"], 3);
    assert!(listed["workers"][0].get("key_hash").is_none());

    let shown = rouse(&db, &["workers", "show", "mail-1"]).await;
    shown
        .exits(0)
        .says("machine-7")
        .says("test.echo")
        .says("9.8.7");
    let shown = rouse(&db, &["workers", "show", "mail-1", "--json"])
        .await
        .json();
    assert_eq!(
        shown["worker"]["capabilities"]["test.echo"]["version"],
        "9.8.7"
    );
    assert_eq!(shown["earlier"], json!([]));
    let unknown = rouse(&db, &["workers", "show", "nobody"]).await;
    unknown.exits(3).says("no worker nobody is listed");

    // One that has ended in order is listed among all lives only.
    worker.drain().await;
    assert_eq!(
        rouse(&db, &["workers", "ls", "--json"]).await.json()["workers"],
        json!([])
    );
    let all = rouse(&db, &["workers", "ls", "--all", "--json"])
        .await
        .json();
    assert_eq!(all["workers"][0]["state"], "unregistered");
}

#[tokio::test]
async fn the_dead_are_listed_until_they_are_forgotten_and_their_jobs_go_on_naming_them() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let store = db.store();
    let job = enqueue(&client, "x", json!({})).await;
    store
        .register(&registration("mail", WorkerKey::random()))
        .await
        .unwrap();
    let lane = store.lanes_after(i64::MIN).await.unwrap().remove(0);
    let order = rouse::store::ClaimOrder {
        lane: lane.id,
        after: i64::MIN,
        lease_ms: 3_600_000,
    };
    let claimed = store
        .claim(rouse::job::Fence(7), &[order], 1)
        .await
        .unwrap();
    assert_eq!(claimed.len(), 1);

    let living = rouse(&db, &["workers", "forget", "mail"]).await;
    living
        .exits(6)
        .says("worker mail lives (here, heard of 0 s ago)");
    silence(&client, &store).await;
    rouse(&db, &["workers", "ls"]).await.exits(0).says("dead");
    let forgotten = rouse(&db, &["workers", "forget", "mail", "--json"]).await;
    forgotten.exits(0);
    assert_eq!(forgotten.json(), json!({"worker_id": "mail", "lives": 1}));
    assert_eq!(
        rouse(&db, &["workers", "ls", "--all", "--json"])
            .await
            .json()["workers"],
        json!([])
    );
    rouse(&db, &["workers", "forget", "mail"]).await.exits(3);

    // What it had claimed is free, and the history knows who that was.
    until_true(
        &client,
        "SELECT lease_until < clock_timestamp() FROM rouse.job",
    )
    .await;
    rouse(&db, &["job", &job.to_string()])
        .await
        .exits(0)
        .says("mail");
    // It may live after all: then it is told that it is not known, and registers again.
    let refused = store.heartbeat(&json!({}), &Stats::default(), false).await;
    assert!(refused.unwrap_err().is_over());
    let row = client
        .query_one(
            "SELECT event, who IS NOT NULL, detail->>'worker_id' FROM rouse.record WHERE event = 'forgotten'",
            &[],
        )
        .await
        .unwrap();
    assert!(row.get::<_, bool>(1) && row.get::<_, String>(2) == "mail");
}

#[tokio::test]
async fn a_forgotten_worker_goes_for_good_once_nothing_that_is_kept_can_name_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for id in ["old", "busy", "new"] {
        let store = db.store();
        store
            .register(&registration(id, WorkerKey::random()))
            .await
            .unwrap();
        if id == "busy" {
            enqueue(&client, "x", json!({})).await;
            let lane = store.lanes_after(i64::MIN).await.unwrap().remove(0);
            let order = rouse::store::ClaimOrder {
                lane: lane.id,
                after: i64::MIN,
                lease_ms: 3_600_000,
            };
            store
                .claim(rouse::job::Fence(7), &[order], 1)
                .await
                .unwrap();
        }
        silence(&client, &store).await;
    }
    let forget = "SELECT rouse.forget_worker($1)";
    client.query_one(forget, &[&"old"]).await.unwrap();
    client.query_one(forget, &[&"busy"]).await.unwrap();
    let rows =
        "SELECT coalesce(string_agg(worker_id, ' ' ORDER BY worker_id), '') FROM rouse.worker";
    let left: String = client.query_one(rows, &[]).await.unwrap().get(0);
    assert_eq!(left, "busy new old", "their history is still kept");
    client
        .execute(
            "UPDATE rouse.worker SET forgotten_at = now() - interval '30 days' WHERE forgotten_at IS NOT NULL",
            &[],
        )
        .await
        .unwrap();
    client.query_one(forget, &[&"new"]).await.unwrap();
    let left: String = client.query_one(rows, &[]).await.unwrap().get(0);
    assert_eq!(left, "busy new", "a job that runs still names one");
}

#[tokio::test]
async fn a_worker_proves_what_it_can_run_and_says_what_it_cannot() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, named("mail-1")).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;

    let proven = rouse(&db, &["workers", "verify", "mail-1", "test.echo", "--json"]).await;
    proven.exits(0);
    let proven = proven.json();
    let bytes = std::fs::read(guests_dir().join("test_guests.wasm")).unwrap();
    let digest = rouse::sandbox::Digest::of(&bytes).to_string();
    assert_eq!(proven["answer"]["has"], true);
    assert_eq!(proven["answer"]["version"], "9.8.7");
    assert_eq!(proven["answer"]["sha256"], digest);
    rouse(&db, &["workers", "verify", "mail-1", "noop"])
        .await
        .exits(0)
        .says("worker mail-1 can run noop");

    let cannot = rouse(&db, &["workers", "verify", "mail-1", "no.such"]).await;
    cannot
        .exits(4)
        .says("worker mail-1 cannot run no.such: the worker does not have this handler");
    let nobody = rouse(&db, &["workers", "verify", "nobody", "noop"]).await;
    nobody.exits(3).says("no worker nobody lives");
    worker.drain().await;
}

#[tokio::test]
async fn a_challenge_is_answered_once_and_by_nobody_else_and_silence_is_told() {
    let db = TestDb::new().await;
    let (mine, other) = (db.worker().await, db.worker().await);
    let nonce = mine.challenge("w-1", "noop").await.unwrap();
    assert_eq!(mine.challenges().await.unwrap()[0].handler, "noop");
    assert!(other.challenges().await.unwrap().is_empty());
    let answer = json!({"has": true});
    assert!(!other.answer_challenge(&nonce, &answer).await.unwrap());
    assert_eq!(mine.challenge_answer(&nonce).await.unwrap(), None);
    assert!(mine.answer_challenge(&nonce, &answer).await.unwrap());
    let again = json!({"has": false});
    assert!(!mine.answer_challenge(&nonce, &again).await.unwrap());
    assert_eq!(mine.challenge_answer(&nonce).await.unwrap(), Some(answer));

    // Registered, and nobody there.
    let args = ["workers", "verify", "w-2", "noop", "--timeout", "300ms"];
    let silent = rouse(&db, &args).await;
    silent
        .exits(5)
        .says("worker w-2 has not answered within 300ms");
}

#[tokio::test]
async fn a_worker_that_hears_no_notifications_answers_with_its_next_heartbeat() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, folder) = watched(&["noop.wasm"]).await;
    let settings = Settings {
        notify: false,
        ..named("deaf")
    };
    let worker = TestWorker::start_on(&db, settings, catalog);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;
    let store = db.store();
    let nonce = store.challenge("deaf", "noop").await.unwrap();
    // A change of what it can run is told with a heartbeat at once.
    std::fs::copy(
        guests_dir().join("text_stats.wasm"),
        folder.path().join("text_stats.wasm"),
    )
    .unwrap();
    let answered = format!("SELECT rouse.challenge_answer('{nonce}') IS NOT NULL");
    until_true(&client, &answered).await;
    worker.drain().await;
}

#[tokio::test]
async fn what_the_fleet_can_run_is_listed_by_where_it_is_and_what_waits_in_vain_with_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, _folder) = watched(&["noop.wasm", "text_stats.wasm"]).await;
    let gpu = Settings {
        tags: vec!["gpu".into()],
        queues: vec!["mail".into()],
        ..named("gpu-1")
    };
    let workers = [
        TestWorker::start_on(&db, gpu, catalog.clone()),
        TestWorker::start_on(&db, named("cpu-1"), catalog),
    ];
    until_true(&client, "SELECT count(*) = 2 FROM rouse.workers").await;
    enqueue(&client, "image.crop", json!({})).await;

    let listed = async |filters: &[&str]| {
        let mut args = vec!["handlers", "ls", "--json"];
        for filter in filters {
            args.extend(["--where", filter]);
        }
        let ran = rouse(&db, &args).await;
        ran.exits(0);
        let listed = ran.json();
        let rows: Vec<String> = listed["handlers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|row| {
                format!(
                    "{}@{}",
                    row["handler"].as_str().unwrap(),
                    row["worker_id"].as_str().unwrap()
                )
            })
            .collect();
        (rows.join(" "), listed["waiting"].as_array().unwrap().len())
    };
    let all = "noop@cpu-1 noop@gpu-1 text.stats@cpu-1 text.stats@gpu-1";
    assert_eq!(listed(&[]).await, (all.into(), 1));
    assert_eq!(
        listed(&["handler=text.*", "tag=gpu"]).await,
        ("text.stats@gpu-1".into(), 0)
    );
    assert_eq!(
        listed(&["queue=other", "handler=noop"]).await,
        ("noop@cpu-1".into(), 0)
    );
    assert_eq!(listed(&["version=99"]).await, (String::new(), 0));
    assert_eq!(listed(&["handler=image.*"]).await, (String::new(), 1));

    let table = rouse(&db, &["handlers", "ls"]).await;
    table
        .exits(0)
        .says("cpu-1, gpu-1")
        .says("no worker takes these:")
        .says("image.crop");
    let wrong = rouse(&db, &["handlers", "ls", "--where", "noop"]).await;
    wrong
        .exits(2)
        .says("it is no condition such as handler=image.*");

    let shown = rouse(&db, &["handlers", "show", "noop", "--json"]).await;
    shown.exits(0);
    assert_eq!(shown.json()["on"].as_array().unwrap().len(), 2);
    assert_eq!(shown.json()["manifest"], Value::Null);
    rouse(&db, &["handlers", "show", "image.crop"])
        .await
        .exits(0)
        .says("no worker that runs now has it")
        .says("waiting");
    rouse(&db, &["handlers", "show", "no.such"])
        .await
        .exits(3)
        .says("nobody has a handler no.such");
    for worker in workers {
        worker.drain().await;
    }
}

#[test]
fn a_folder_is_shown_without_any_database() {
    let folder = folder("", &["noop.wasm"]);
    let run = |args: &[&str]| {
        let output = command("", args, &folder).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        (output.status.code().unwrap(), text)
    };
    let (code, text) = run(&["handlers", "ls", "--folder", "handlers-wasm"]);
    assert!(code == 0 && text.contains("noop.wasm"), "{text}");
    let (code, text) = run(&["handlers", "show", "noop", "--folder", "handlers-wasm"]);
    assert!(code == 0 && text.contains("input_schema"), "{text}");
    let (code, _) = run(&["handlers", "show", "no.such", "--folder", "handlers-wasm"]);
    assert_eq!(code, 3);
}

/// A folder with these guests in `handlers-wasm`, and a `rouse.toml` with this text.
fn folder(config: &str, guests: &[&str]) -> PathBuf {
    let folder = scratch("drain");
    std::fs::create_dir(folder.join("handlers-wasm")).unwrap();
    for file in guests {
        std::fs::copy(
            guests_dir().join(file),
            folder.join("handlers-wasm").join(file),
        )
        .unwrap();
    }
    std::fs::write(folder.join("rouse.toml"), config).unwrap();
    folder
}

/// Enqueues by `sql`, the arguments of `rouse.enqueue`.
async fn put(client: &Client, sql: &str) -> i64 {
    let sql = format!("SELECT rouse.enqueue({sql})");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

#[tokio::test]
async fn a_queue_is_drained_until_it_is_empty_and_nothing_else_is_touched() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The id of the file is that of a host that may live.
    let folder = folder(
        "worker_id = \"mail-1\"\n[sources]\nlegacy = \"text.stats\"\n",
        &["noop.wasm", "text_stats.wasm"],
    );
    let nothing = rouse_in(
        &db,
        &["queue", "drain", "mail", "--handlers", "/nowhere"],
        &folder,
    )
    .await;
    nothing.exits(0).says("queue mail: 0 succeeded, 0 failed");
    client
        .query(
            "SELECT count(*) FROM (SELECT rouse.enqueue_many('noop', array_agg(jsonb_build_object('n', n)), queue => 'mail') FROM generate_series(1, 300) AS n) AS q",
            &[],
        )
        .await
        .unwrap();
    let bound = put(
        &client,
        "'noop', '{\"text\": \"one two\"}', queue => 'mail', source => 'legacy'",
    )
    .await;
    let later = put(
        &client,
        "'noop', '{\"n\": 1}', queue => 'mail', run_at => now() + interval '1 hour'",
    )
    .await;
    let other = put(&client, "'noop', '{\"n\": 1}', queue => 'other'").await;

    let ran = rouse_in(&db, &["queue", "drain", "mail", "--json"], &folder).await;
    ran.exits(0);
    let summary = ran.json();
    assert_eq!(summary["succeeded"], 301);
    assert_eq!(
        (&summary["failed"], &summary["retried"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(summary["left"][0]["scheduled"], 1, "{summary}");
    assert_ne!(summary["worker_id"], "mail-1");
    assert_eq!(
        ended(&client, bound).await.result.unwrap()["words"],
        2,
        "by the bound handler"
    );
    for id in [later, other] {
        assert_eq!(events(&client, id).await, ["requested"]);
    }
    until_true(
        &client,
        "SELECT count(*) = 1 AND bool_and(state = 'unregistered') FROM rouse.workers",
    )
    .await;
}

#[tokio::test]
async fn a_drain_says_what_failed_and_what_it_cannot_run() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["noop.wasm", "test_guests.wasm"]);
    put(&client, "'noop', '{\"n\": 1}'").await;
    let unknown = put(&client, "'no.such'").await;
    put(&client, "'noop', '{\"n\": 1}', tags => '{gpu}'").await;
    let ran = rouse_in(&db, &["queue", "drain", "default"], &folder).await;
    ran.exits(3)
        .says("queue default: 1 succeeded, 0 failed")
        .says("left: no.such: 1 ready; the folder has no such handler")
        .says("left: noop: 1 ready; they require the tags gpu");
    assert_eq!(events(&client, unknown).await, ["requested"]);

    put(&client, "'test.fail', '{\"as\": \"permanent\"}'").await;
    put(&client, "'test.fail', '{\"as\": \"retry-after\"}'").await;
    let ran = rouse_in(&db, &["queue", "drain", "default", "--json"], &folder).await;
    ran.exits(1);
    let summary = ran.json();
    assert_eq!(
        (&summary["failed"], &summary["retried"]),
        (&json!(1), &json!(1))
    );
}

#[tokio::test]
async fn a_drain_holds_its_claims_for_five_minutes_unless_told_otherwise() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder(
        "[handlers.\"test.*\"]\nlease = \"10s\"\n",
        &["test_guests.wasm"],
    );
    for (more, secs) in [(&[][..], 300), (&["--lease", "20m"], 1200)] {
        let id = enqueue(&client, "test.race", json!({"ms": 60_000})).await;
        let mut args = vec!["queue", "drain", "default"];
        args.extend(more);
        let drain = Host::spawn(command(&db.url(), &args, &folder));
        until(&client, id, |job| job.state == "running").await;
        let lease = "SELECT extract(epoch FROM lease_until - claimed_at)::float8 FROM rouse.job";
        let lease: f64 = client.query_one(lease, &[]).await.unwrap().get(0);
        assert!((lease - f64::from(secs)).abs() < 1.0, "{lease}");
        // The job ends from outside, and with it the queue.
        client
            .query_one("SELECT rouse.cancel($1)", &[&id])
            .await
            .unwrap();
        let (status, output) = drain.exit(PATIENCE);
        assert_eq!(status.code(), Some(0), "{output}");
    }
}

#[tokio::test]
async fn a_paused_queue_is_not_drained_and_one_that_is_paused_meanwhile_ends_the_drain() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 1\n", &["noop.wasm", "test_guests.wasm"]);
    let running = enqueue(&client, "test.race", json!({"ms": 600_000})).await;
    let drain = Host::spawn(command(&db.url(), &["queue", "drain", "default"], &folder));
    until(&client, running, |job| job.state == "running").await;
    client
        .query_one("SELECT rouse.pause_queue('default')", &[])
        .await
        .unwrap();
    let waits = put(&client, "'noop', '{\"n\": 1}'").await;
    client
        .query_one("SELECT rouse.cancel($1)", &[&running])
        .await
        .unwrap();
    let (status, output) = drain.exit(PATIENCE);
    assert_eq!(status.code(), Some(6), "{output}");
    assert!(output.contains("queue default is paused since"), "{output}");
    assert_eq!(events(&client, waits).await, ["requested"]);
    let ran = rouse_in(&db, &["queue", "drain", "default"], &folder).await;
    ran.exits(6).says("rouse queue resume default");
}

#[tokio::test]
async fn a_signal_ends_a_drain_with_what_runs_and_leaves_the_rest() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 1\n", &["noop.wasm", "test_guests.wasm"]);
    let running = enqueue(&client, "test.sleep", json!({"ms": 1500})).await;
    let mut command = command(&db.url(), &["queue", "drain", "default", "--json"], &folder);
    command.env("ROUSE_LOG", "info");
    let drain = Host::spawn(command);
    drain.line(PATIENCE, |line| line.contains("worker started"));
    until(&client, running, |job| job.state == "running").await;
    drain.signal(libc::SIGTERM);
    drain.line(PATIENCE, |line| line.contains("stopping: "));
    let left = put(&client, "'noop', '{\"n\": 1}'").await;
    let (status, output) = drain.exit(PATIENCE);
    assert_eq!(status.code(), Some(130), "{output}");
    assert_eq!(ended(&client, running).await.state, "succeeded");
    assert_eq!(events(&client, left).await, ["requested"]);
    assert!(output.contains("\"interrupted\":true"), "{output}");
}

#[tokio::test]
async fn whoever_looks_at_a_queued_job_hears_why_nobody_takes_it() {
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
    for (sql, says) in [
        ("'no.such', queue => 'mail'", "has the handler no.such"),
        (
            "'noop', queue => 'other'",
            "serves the queue other; start one with --queue other",
        ),
        (
            "'noop', queue => 'mail', tags => '{gpu}'",
            "has the tags that the job requires (gpu)",
        ),
        ("'noop', queue => 'mail'", "queue mail is paused since"),
    ] {
        let id = put(&client, sql).await.to_string();
        rouse(&db, &["job", "show", &id]).await.exits(0).says(says);
    }
    let listed = rouse(&db, &["job", "ls"]).await;
    listed
        .exits(0)
        .says("has the handler no.such")
        .says("serves the queue other")
        .says("requires (gpu)")
        .says("queue mail is paused since");
    assert_eq!(listed.stderr.lines().count(), 4, "{}", listed.stderr);
    worker.drain().await;
}

#[tokio::test]
async fn a_drain_goes_on_while_its_connections_are_cut() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["test_guests.wasm"]);
    let running = enqueue(&client, "test.race", json!({"ms": 2000})).await;
    let drain = Host::spawn(command(
        &db.url(),
        &["queue", "drain", "default", "--json"],
        &folder,
    ));
    until(&client, running, |job| job.state == "running").await;
    client
        .query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'rouse' AND datname = current_database()",
            &[],
        )
        .await
        .unwrap();
    let (status, output) = drain.exit(Duration::from_secs(120));
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(output.contains("\"succeeded\":1"), "{output}");
}
