//! What somebody meets on the first day: lists without a command, verbs for several things, pages whose examples work.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use rouse::worker::Settings;
use serde_json::{Value, json};

use crate::support::worker::{PATIENCE, TestWorker, ended, enqueue};
use crate::support::{
    Host, Ran, TestDb, command, folder, rouse_in, rouse_without_database, scratch,
};

/// The repository.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The code blocks of this kind of a page.
fn blocks(page: &str, kind: &str) -> Vec<String> {
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    let opening = format!("```{kind}\n");
    let blocks = text.split(opening.as_str()).skip(1);
    blocks
        .map(|rest| rest.split("```").next().unwrap_or_default().to_owned())
        .collect()
}

#[tokio::test]
async fn a_noun_without_a_verb_lists() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, id).await;
    let anywhere = scratch("anywhere");
    for (noun, shown) in [
        ("job", "noop"),
        ("queue", "default"),
        ("workers", "active"),
        ("state", "tenant"),
    ] {
        let bare = rouse_in(&db, &[noun], &anywhere).await;
        bare.exits(0).says(shown);
        let listed = rouse_in(&db, &[noun, "ls"], &anywhere).await;
        let first = |ran: &Ran| ran.stdout.lines().next().map(str::to_owned);
        assert_eq!(first(&bare), first(&listed), "{noun}");
        let json = rouse_in(&db, &[noun, "--json"], &anywhere).await;
        assert!(json.exits(0).json().is_object(), "{noun}");
    }
    let handlers = folder("", &["noop.wasm"]);
    rouse_without_database(&["handlers"], &handlers)
        .exits(0)
        .says("noop.wasm");
    let waits = rouse_in(&db, &["job", "--wait"], &anywhere).await;
    waits.exits(2).says("<ID>");
    worker.drain().await;
}

#[tokio::test]
async fn a_verb_takes_several_jobs_and_one_refusal_keeps_no_other_from_being_done() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let anywhere = scratch("anywhere");
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(enqueue(&client, "no.such", json!({})).await.to_string());
    }
    let run = async |args: &[&str]| rouse_in(&db, args, &anywhere).await;
    let [a, b, c] = [&ids[0], &ids[1], &ids[2]].map(String::as_str);

    let moved = run(&["job", "reschedule", a, b, "--in", "1h"]).await;
    moved.exits(0).says("2 of 2 jobs done, 0 refused");
    let unknown = run(&["job", "cancel", a, "999999", b]).await;
    unknown.exits(3).says("no job 999999");
    unknown.says(&format!("job {b} is cancelled"));
    unknown.says("2 of 3 jobs done, 1 refused");
    // Of several refusals the highest code counts: 999999 was never there, and c has ended otherwise.
    run(&["job", "complete", c, "1"]).await.exits(0);
    let d = enqueue(&client, "no.such", json!({})).await.to_string();
    let refused = run(&["job", "cancel", c, "999999", &d]).await;
    refused.exits(6).says(&format!("job {d} is cancelled"));
    refused.says("has ended as succeeded");

    let retried = run(&["job", "retry", a, b, "--json"]).await;
    retried.exits(0);
    let lines: Vec<Value> = retried
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines[0]["retried_from"].to_string(), *a);
    assert_eq!(lines[1]["retried_from"].to_string(), *b);
    assert_eq!(lines[2], json!({"done": 2, "refused": 0}));

    // One alone is without a summary.
    let one = run(&["job", "cancel", &lines[0]["id"].to_string()]).await;
    assert_eq!(one.exits(0).text().lines().count(), 1, "{}", one.text());
    run(&["job", "cancel"]).await.exits(2).says("<ID>...");

    run(&["queue", "pause", "mail", "bulk"])
        .await
        .exits(0)
        .says("queue bulk is paused")
        .says("2 of 2 queues done");
    run(&["queue", "resume", "mail", "bulk"])
        .await
        .exits(0)
        .says("queue mail goes on");
    run(&["workers", "forget", "no-such", "nor-this"])
        .await
        .exits(3)
        .says("no worker nor-this")
        .says("0 of 2 workers done, 2 refused");
}

#[tokio::test]
async fn noops_page_says_what_it_returns() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let page = "handlers/noop/README.md";
    let call = &blocks(page, "sql")[0];
    let id: i64 = client.query_one(call.trim(), &[]).await.unwrap().get(0);
    let text = std::fs::read_to_string(root().join(page)).unwrap();
    let result = ended(&client, id).await.result.unwrap();
    let said = text.split("The result is `").nth(1).unwrap();
    let said: Value = serde_json::from_str(said.split('`').next().unwrap()).unwrap();
    assert_eq!(result, said);
    let more = enqueue(&client, "noop", json!({"n": 7, "more": true})).await;
    assert_eq!(
        ended(&client, more).await.result,
        Some(said),
        "without `more`"
    );
    worker.drain().await;
}

#[test]
fn the_example_of_a_profile_has_samples() {
    let commands = blocks("docs/operating.md", "console");
    let example = commands
        .iter()
        .find(|block| block.contains("--profile"))
        .unwrap();
    let folder = folder("", &["text_stats.wasm"]);
    // As it stands there, with this build's `rouse` first on the path.
    let bin = crate::support::rouse_binary();
    let path = format!(
        "{}:{}",
        bin.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", example]).env("PATH", path);
    shell.current_dir(&folder).stdin(Stdio::null());
    Ran::of(&mut shell)
        .exits(0)
        .says(" samples of text.stats are in ");
    let profile = std::fs::read(folder.join("out.json")).unwrap();
    let profile: Value = serde_json::from_slice(&profile).unwrap();
    let samples = profile["threads"][0]["samples"]["length"].as_u64();
    assert!(samples.unwrap() > 1, "{samples:?}");
    // The help shows the same option at work.
    rouse_without_database(&["invoke", "--help"], &folder)
        .exits(0)
        .says("rouse invoke text.stats - --profile out.json < text.json");
}

#[tokio::test]
async fn a_password_in_an_argument_is_warned_of_and_not_repeated() {
    let db = TestDb::new().await;
    let anywhere = scratch("anywhere");
    let run = |args: &[&str], url: &str| {
        let mut command = command(url, args, &anywhere);
        Ran::of(&mut command)
    };
    // The private server asks nobody for it.
    let with = |url: &str| url.replacen("rouse@", "rouse:hunter2@", 1);
    let url = with(&db.url());
    let told = run(&["job", "--database-url", &url], "");
    told.exits(0);
    for part in ["--database-url", "DATABASE_URL", "PGPASSFILE", "`ps`"] {
        told.says(part);
    }
    assert!(!told.text().contains("hunter2"), "{}", told.text());
    let key_value = "host=/nowhere password=hunter2";
    run(&["job", "--database-url", key_value], "").says("can read the password in --database-url");
    let listen = ["serve", "--listen-url", &url, "--http", "off"];
    let told = run(&listen, "postgres://a@127.0.0.1:1/b");
    told.says("can read the password in --listen-url");
    for quiet in [
        run(&["job", "--database-url", &db.url()], ""),
        run(&["job"], &url),
    ] {
        quiet.exits(0);
        assert!(!quiet.text().contains("password"), "{}", quiet.text());
    }
}

#[test]
fn handlers_show_looks_where_the_dev_of_its_folder_looks() {
    let here = scratch("dev-here");
    let elsewhere = folder("[handlers.noop]\nmax_attempts = 17\n", &["noop.wasm"]);
    std::fs::rename(elsewhere.join("rouse.toml"), elsewhere.join("dev.toml")).unwrap();
    let (config, handlers) = (elsewhere.join("dev.toml"), elsewhere.join("handlers-wasm"));
    let rouse = |args: &[&str]| {
        let mut command = crate::support::command_without_database(args, &here);
        command.env_remove("ROUSE_DATA_DIR");
        command
    };
    let mut dev = rouse(&["dev", "--config"]);
    dev.arg(&config).arg("--handlers").arg(&handlers);
    // Its own group, as in another terminal.
    dev.process_group(0);
    let dev = Host::spawn(dev);
    dev.line(PATIENCE, |line| line.contains("worker started"));

    let shown = Ran::of(&mut rouse(&["handlers", "show", "noop"]));
    shown
        .exits(0)
        .says("with which the `rouse dev` here was started")
        .says(config.to_str().unwrap())
        .says("17");
    Ran::of(&mut rouse(&["handlers"]))
        .exits(0)
        .says("as the `rouse dev` here serves it")
        .says("17");
    // What is named counts.
    std::fs::write(
        here.join("own.toml"),
        "[handlers.noop]\nmax_attempts = 23\n",
    )
    .unwrap();
    let named = ["handlers", "show", "noop", "--config", "own.toml"];
    Ran::of(&mut rouse(&named)).exits(0).says("23");
    dev.signal(libc::SIGTERM);
    assert!(dev.exit(PATIENCE).0.success());
    // Nobody serves it from here any more.
    let gone = Ran::of(&mut rouse(&["handlers"]));
    gone.exits(1).says("there is no folder handlers-wasm");
}
