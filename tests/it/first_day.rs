//! The first day with Rouse: lists without a subcommand, subcommands for several jobs, pages whose examples work.

mod concurrent;
mod dev;

use std::path::Path;
use std::process::{Command, Stdio};

use rouse::worker::Settings;
use serde_json::{Value, json};

use crate::support::page::{blocks_of, repository};
use crate::support::worker::{TestWorker, ended, enqueue, retries, show, until};
use crate::support::{
    CommandOutput, TestDb, command, folder, on_terminal, on_terminal_until, rouse_in,
    rouse_without_database, scratch,
};

#[tokio::test]
async fn a_noun_without_a_verb_prints_a_list() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    ended(&client, id).await;
    let empty_folder = scratch("anywhere");
    for (noun, shown) in [
        ("job", "noop"),
        ("queue", "default"),
        ("workers", "active"),
        ("state", "no handler has any state"),
    ] {
        let bare = rouse_in(&db, &[noun], &empty_folder).await;
        bare.exits(0).prints(shown);
        let listed = rouse_in(&db, &[noun, "ls"], &empty_folder).await;
        let first = |ran: &CommandOutput| ran.stdout.lines().next().map(str::to_owned);
        assert_eq!(first(&bare), first(&listed), "{noun}");
        let json = rouse_in(&db, &[noun, "--json"], &empty_folder).await;
        assert!(json.exits(0).json().is_object(), "{noun}");
    }
    let handlers = folder("", &["noop.wasm"]);
    rouse_without_database(&["handlers"], &handlers)
        .exits(0)
        .prints("noop.wasm");
    let waits = rouse_in(&db, &["job", "--wait"], &empty_folder).await;
    waits.exits(2).prints("<ID>");
    worker.drain().await;
}

#[tokio::test]
async fn a_subcommand_accepts_several_jobs_and_a_refusal_does_not_stop_the_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = scratch("anywhere");
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(enqueue(&client, "no.such", json!({})).await.to_string());
    }
    let run = async |args: &[&str]| rouse_in(&db, args, &folder).await;
    let [a, b, c] = [&ids[0], &ids[1], &ids[2]].map(String::as_str);

    let moved = run(&["job", "reschedule", a, b, "--in", "1h"]).await;
    moved.exits(0).prints("2 of 2 jobs done, 0 refused");
    let unknown = run(&["job", "cancel", a, "999999", b]).await;
    unknown.exits(3).prints("no job 999999");
    unknown.prints(&format!("job {b} is cancelled"));
    unknown.prints("2 of 3 jobs done, 1 refused");
    // With several refusals the highest exit code wins: 999999 never existed, and c has ended differently.
    run(&["job", "complete", c, "1"]).await.exits(0);
    let d = enqueue(&client, "no.such", json!({})).await.to_string();
    let refused = run(&["job", "cancel", c, "999999", &d]).await;
    refused.exits(6).prints(&format!("job {d} is cancelled"));
    refused.prints("has ended as succeeded");

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

    // A single job is reported without a summary.
    let single = run(&["job", "cancel", &lines[0]["id"].to_string()]).await;
    assert_eq!(
        single.exits(0).text().lines().count(),
        1,
        "{}",
        single.text()
    );
    run(&["job", "cancel"])
        .await
        .exits(2)
        .prints("no job ids were given");

    run(&["queue", "pause", "mail", "bulk"])
        .await
        .exits(0)
        .prints("queue bulk has been paused")
        .prints("2 of 2 queues done");
    run(&["queue", "resume", "mail", "bulk"])
        .await
        .exits(0)
        .prints("queue mail is resumed");
    run(&["workers", "forget", "no-such", "nor-this"])
        .await
        .exits(3)
        .prints("no worker nor-this")
        .prints("0 of 2 workers done, 2 refused");
}

#[tokio::test]
async fn an_error_about_one_of_several_jobs_does_not_stop_the_others_and_conflicts_are_tried_again()
{
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = scratch("anywhere");
    let mut ids = Vec::new();
    for _ in 0..4 {
        ids.push(enqueue(&client, "no.such", json!({})).await.to_string());
    }
    let run = async |args: &[&str]| rouse_in(&db, args, &folder).await;
    let [a, b, c, d] = [&ids[0], &ids[1], &ids[2], &ids[3]].map(String::as_str);
    // Retries of a are refused, the first two of b meet other transactions, and those of c always do. Sequences keep
    // their values when a transaction is rolled back.
    let sql = format!(
        "CREATE SEQUENCE public.tries_of_b;
         CREATE SEQUENCE public.tries_of_c;
         CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
         BEGIN
             IF NEW.retried_from = {a} THEN
                 RAISE EXCEPTION 'the stock is closed';
             ELSIF NEW.retried_from = {b} AND nextval('public.tries_of_b') < 3 THEN
                 RAISE EXCEPTION 'b is in use' USING ERRCODE = 'serialization_failure';
             ELSIF NEW.retried_from = {c} AND nextval('public.tries_of_c') > 0 THEN
                 RAISE EXCEPTION 'rouse: c is in use' USING ERRCODE = 'deadlock_detected';
             END IF;
             RETURN NEW;
         END
         $$;
         CREATE TRIGGER refuse BEFORE INSERT ON rouse.job FOR EACH ROW EXECUTE FUNCTION public.refuse();
         CREATE FUNCTION public.keep() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             RAISE EXCEPTION 'it is still needed';
         END
         $$"
    );
    client.batch_execute(&sql).await.unwrap();
    run(&["job", "cancel", a, b, c, d]).await.exits(0);

    let retried = run(&["job", "retry", a, b, c, d, "--json"]).await;
    retried
        .exits(1)
        .prints(&format!("job {a}: the stock is closed"));
    // The prefix `rouse: ` is printed once.
    retried.prints(&format!("rouse: job {c}: c is in use"));
    let lines: Vec<Value> = retried
        .stdout
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), 3, "{}", retried.text());
    assert_eq!(lines[0]["retried_from"].to_string(), *b);
    assert_eq!(lines[1]["retried_from"].to_string(), *d);
    assert_eq!(lines[2], json!({"done": 2, "refused": 2}));
    let tries = "SELECT last_value FROM public.tries_of_c";
    let tries: i64 = client.query_one(tries, &[]).await.unwrap().get(0);
    assert_eq!(tries, 3);

    // A single job is reported as an error of the command.
    let single = run(&["job", "retry", a]).await;
    single.exits(1).prints("the stock is closed");

    let [b, d] = [&lines[0]["id"], &lines[1]["id"]].map(Value::to_string);
    let sql = format!(
        "CREATE TRIGGER keep BEFORE INSERT ON rouse.finished FOR EACH ROW WHEN (NEW.id = {b}) EXECUTE FUNCTION public.keep()"
    );
    client.batch_execute(&sql).await.unwrap();
    for verb in ["cancel", "delete"] {
        let other = enqueue(&client, "no.such", json!({})).await.to_string();
        let ended = run(&["job", verb, &b, &other]).await;
        ended.exits(1).prints(&format!("{b}: it is still needed"));
        ended.prints(&format!("job {other} is cancelled"));
        ended.prints("1 of 2 jobs done, 1 refused");
    }
    // The highest code is returned.
    let mixed = run(&["job", "cancel", &b, "999999", &d]).await;
    mixed.exits(3).prints(&format!("job {d} is cancelled"));
}

/// Postgres has the same code for a login that lacks a role, which concerns all jobs.
#[tokio::test]
async fn a_trigger_that_refuses_one_of_several_jobs_as_not_permitted_does_not_stop_the_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(enqueue(&client, "no.such", json!({})).await.to_string());
    }
    let [a, b, c] = [&ids[0], &ids[1], &ids[2]].map(String::as_str);
    let sql = format!(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             RAISE EXCEPTION 'not yours' USING ERRCODE = 'insufficient_privilege';
         END
         $$;
         CREATE TRIGGER refuse BEFORE INSERT ON rouse.finished FOR EACH ROW WHEN (NEW.id = {b}) EXECUTE FUNCTION public.refuse()"
    );
    client.batch_execute(&sql).await.unwrap();
    let folder = scratch("anywhere");
    let cancelled = rouse_in(&db, &["job", "cancel", a, b, c], &folder).await;
    cancelled.exits(1).prints(&format!("{b}: not yours"));
    cancelled.prints(&format!("job {c} is cancelled"));
    cancelled.prints("2 of 3 jobs done, 1 refused");
}

#[tokio::test]
async fn the_readme_of_noop_shows_its_result() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let page = "handlers/noop/README.md";
    let call = &blocks_of(page, "sql")[0];
    let id: i64 = client.query_one(call.trim(), &[]).await.unwrap().get(0);
    let text = std::fs::read_to_string(repository().join(page)).unwrap();
    let result = ended(&client, id).await.result.unwrap();
    let documented = text.split("The result is `").nth(1).unwrap();
    let documented: Value = serde_json::from_str(documented.split('`').next().unwrap()).unwrap();
    assert_eq!(result, documented);
    let more = enqueue(&client, "noop", json!({"n": 7, "more": true})).await;
    assert_eq!(
        ended(&client, more).await.result,
        Some(documented),
        "without `more`"
    );
    worker.drain().await;
}

#[test]
fn the_documented_profile_command_records_samples() {
    let commands = blocks_of("docs/guides/handlers.md", "console");
    let example = commands
        .iter()
        .find(|block| block.contains("--profile"))
        .unwrap();
    let folder = folder("", &["text_stats.wasm"]);
    // The command as the guide prints it, with this build's `rouse` first on the path.
    let bin = crate::support::rouse_binary();
    let path = format!(
        "{}:{}",
        bin.parent().unwrap().display(),
        std::env::var("PATH").unwrap()
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", example]).env("PATH", path);
    shell.current_dir(&folder).stdin(Stdio::null());
    CommandOutput::run(&mut shell)
        .exits(0)
        .prints(" samples of text.stats are in ");
    let profile = std::fs::read(folder.join("out.json")).unwrap();
    let profile: Value = serde_json::from_slice(&profile).unwrap();
    let samples = profile["threads"][0]["samples"]["length"].as_u64();
    assert!(samples.unwrap() > 1, "{samples:?}");
    // The help shows the same option in use.
    rouse_without_database(&["invoke", "--help"], &folder)
        .exits(0)
        .prints("rouse invoke text.stats - --profile out.json < text.json");
}

#[tokio::test]
async fn a_password_in_an_argument_raises_a_warning_that_does_not_repeat_it() {
    let db = TestDb::new().await;
    let folder = scratch("anywhere");
    let run = |args: &[&str], url: &str| {
        let mut command = command(url, args, &folder);
        CommandOutput::run(&mut command)
    };
    // The private server does not ask for a password.
    let with_password = |url: &str| url.replacen("rouse@", "rouse:hunter2@", 1);
    let url = with_password(&db.url());
    let ran = run(&["job", "--database-url", &url], "");
    ran.exits(0);
    for part in ["--database-url", "DATABASE_URL", "PGPASSFILE", "`ps`"] {
        ran.prints(part);
    }
    assert!(!ran.text().contains("hunter2"), "{}", ran.text());
    let key_value = "host=/nowhere password=hunter2";
    run(&["job", "--database-url", key_value], "")
        .prints("can read the password in --database-url");
    let listen = ["serve", "--listen-url", &url, "--http", "off"];
    let ran = run(&listen, "postgres://a@127.0.0.1:1/b");
    ran.prints("can read the password in --listen-url");
    for quiet in [
        run(&["job", "--database-url", &db.url()], ""),
        run(&["job"], &url),
    ] {
        quiet.exits(0);
        assert!(!quiet.text().contains("password"), "{}", quiet.text());
    }
}

/// A terminal shows colours and relative times, and no line is longer than the terminal is wide.
#[tokio::test]
async fn a_terminal_gets_colours_and_relative_times_and_a_pipe_does_not() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        worker_id: "a-worker-with-an-id-of-some-length".into(),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let done = enqueue(&client, "noop", json!({"n": 1})).await;
    let failed = enqueue(&client, "test.fail", json!({"as": "permanent"})).await;
    let waits = enqueue(
        &client,
        "a.handler.with-a-long-name.that-nobody-has",
        json!({}),
    )
    .await;
    for id in [done, failed] {
        ended(&client, id).await;
    }
    let id = failed.to_string();
    let folder = scratch("anywhere");
    let url = db.url();
    let run = |args: &[&str], variables: &[(&str, &str)]| {
        let mut command = command(&url, args, &folder);
        command
            .env("TERM", "xterm-256color")
            .env_remove("NO_COLOR")
            .env_remove("CLICOLOR")
            .env_remove("CLICOLOR_FORCE")
            .envs(variables.iter().copied());
        command
    };
    let escape = '\x1b';
    for args in [
        &["job"][..],
        &["job", &id],
        &["queue"],
        &["workers"],
        &["workers", "show", "a-worker-with-an-id-of-some-length"],
        &["handlers", "ls"],
        &["top", "--once"],
    ] {
        let plain = on_terminal(run(args, &[("NO_COLOR", "1")]), 80);
        assert!(!plain.contains(escape), "{args:?}: {plain}");
        // The terminal wraps other output of the commands.
        let table = plain.lines().filter(|line| !line.starts_with("rouse: "));
        for line in table {
            assert!(line.chars().count() <= 80, "{args:?}: {line:?} in\n{plain}");
        }
    }

    let is_relative = |text: &str| text.contains("just now") || text.contains(" ago");
    let shown = on_terminal(run(&["job"], &[]), 80);
    for part in ["\x1b[32msucceeded\x1b[0m", "\x1b[31mfailed\x1b[0m"] {
        assert!(shown.contains(part), "{part:?}: {shown}");
    }
    assert!(is_relative(&shown), "{shown}");
    let record = on_terminal(run(&["job", &id], &[("CLICOLOR", "0")]), 80);
    assert!(
        is_relative(&record) && record.contains("+00:00 ("),
        "{record}"
    );
    assert!(!record.contains(escape), "{record}");

    let piped = CommandOutput::run(&mut run(&["job"], &[]));
    piped.exits(0);
    assert!(!piped.stdout.contains(escape) && !is_relative(&piped.stdout));
    let row = piped
        .stdout
        .lines()
        .find(|line| line.contains("noop"))
        .unwrap();
    assert!(row.contains("normal") && row.contains("+00:00"), "{row}");
    let forced = CommandOutput::run(&mut run(&["job"], &[("CLICOLOR_FORCE", "1")]));
    assert!(
        forced.stdout.contains("\x1b[32msucceeded"),
        "{}",
        forced.stdout
    );
    let json = CommandOutput::run(&mut run(&["job", "--json"], &[("CLICOLOR_FORCE", "1")])).json();
    let times = json["jobs"].as_array().unwrap().iter();
    for time in times.map(|job| job["requested_at"].as_str().unwrap()) {
        assert!(time.contains('T') && time.contains("+00:00"), "{time}");
    }
    client
        .execute("SELECT rouse.cancel($1)", &[&waits])
        .await
        .unwrap();
    worker.drain().await;
}

#[tokio::test]
async fn a_signal_ends_a_list_that_refreshes_on_a_terminal() {
    let db = TestDb::new().await;
    let mut top = command(&db.url(), &["top"], &scratch("anywhere"));
    // A terminal of its own; the signal comes once the first list is printed.
    top.env("TERM", "xterm");
    let shown =
        tokio::task::spawn_blocking(move || on_terminal_until(top, "no attempt is running"));
    let shown = shown.await.unwrap();
    assert!(shown.contains("\x1b[2J"), "{shown:?}");
}

#[tokio::test]
async fn a_failed_attempt_shows_its_number_the_limit_and_the_time_of_the_next_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let hour = std::time::Duration::from_secs(3600);
    let settings = Settings {
        overrides: retries("test.fail", 3, hour),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let id = enqueue(&client, "test.fail", json!({"as": "retryable"})).await;
    until(&client, id, |job| job.state == "queued" && job.attempt == 1).await;
    let folder = scratch("anywhere");
    // Neither the job nor the command knows the handler's settings: the error carries them.
    for args in [&["job", &id.to_string()][..], &["job", "ls"]] {
        let shown = rouse_in(&db, args, &folder).await;
        shown.exits(0).prints("1 of 3, next in ");
    }
    let shown = show(&client, id).await;
    assert_eq!(shown.error.unwrap()["max_attempts"], 3);
    // A producer's own limit takes precedence.
    let own = client
        .query_one(
            "SELECT rouse.enqueue('test.fail', '{\"as\": \"retryable\"}', max_attempts => 2)",
            &[],
        )
        .await
        .unwrap();
    let own: i64 = own.get(0);
    until(&client, own, |job| {
        job.state == "queued" && job.attempt == 1
    })
    .await;
    let shown = rouse_in(&db, &["job", &own.to_string()], &folder).await;
    shown.prints("1 of 2, next in ");
    worker.drain().await;
}

/// Runs `rouse invoke HANDLER PAYLOAD --json` in this folder.
fn invoke(folder: &Path, handler: &str, payload: Value) -> Value {
    let payload = payload.to_string();
    rouse_without_database(&["invoke", handler, &payload, "--json"], folder).json()
}

#[test]
fn the_lines_printed_by_a_file_denial_grant_the_access() {
    let folder = folder("", &["test_guests.wasm"]);
    let toml = folder.join("rouse.toml");
    std::fs::create_dir(folder.join("files")).unwrap();
    std::fs::write(folder.join("files/in.txt"), "inside").unwrap();
    let denied = |handler: &str, payload: Value| {
        let invoked = invoke(&folder, handler, payload);
        let error = &invoked["error"];
        assert_eq!(error["kind"], "denied", "{invoked}");
        error["message"].as_str().unwrap().to_owned()
    };
    let lines = |message: &str| {
        let (_, lines) = message.split_once(":\n").expect("lines to copy");
        lines.split("\n\n").next().unwrap().to_owned()
    };

    let read = json!({"path": "/data/in.txt"});
    let message = denied("test.read-file", read.clone());
    for part in [
        "the handler test.read-file tried to access /data/in.txt, which is not in a granted directory",
        "`rouse job retry ID`",
        "then: No such file or directory",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
    let grant = lines(&message).replace("dir = \"…\"", "dir = \"files\"");
    std::fs::write(&toml, grant).unwrap();
    let invoked = invoke(&folder, "test.read-file", read);
    assert_eq!(invoked["result"], "inside", "{invoked}");

    // A directory that is granted for reading only.
    let write = json!({"path": "/data/new.txt", "text": "new"});
    let bound = "[handlers.\"test.*\"]\nmodule = \"test_guests.wasm\"\n";
    let grant = "[[handlers.\"test.*\".dirs]]\ndir = \"files\"\nat = \"/data\"\n";
    std::fs::write(&toml, format!("{bound}{grant}")).unwrap();
    let message = denied("test.write-file", write.clone());
    assert!(
        message
            .contains("tried to change /data/new.txt, but /data is granted to it for reading only"),
        "{message}"
    );
    std::fs::write(&toml, format!("{bound}{}", lines(&message))).unwrap();
    let invoked = invoke(&folder, "test.write-file", write);
    assert_eq!(invoked["outcome"], "succeeded", "{invoked}");
    assert_eq!(
        std::fs::read_to_string(folder.join("files/new.txt")).unwrap(),
        "new"
    );

    // No path leads out of a granted directory.
    let out = json!({"path": "/data/../etc/passwd"});
    let message = denied("test.read-file", out);
    assert!(message.contains("tried to access /etc/passwd"), "{message}");
    assert!(message.contains("at = \"/etc\""), "{message}");
}

#[tokio::test]
async fn a_job_denied_a_file_is_not_retried_and_one_that_only_probed_for_it_is() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        overrides: retries("test.read-file", 3, std::time::Duration::ZERO),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let denied = enqueue(
        &client,
        "test.read-file",
        json!({"path": "/nowhere/in.txt"}),
    )
    .await;
    let job = ended(&client, denied).await;
    assert_eq!((job.state.as_str(), job.attempt), ("failed", 1));
    let error = job.error.unwrap();
    assert_eq!(
        (&error["kind"], &error["guest_kind"]),
        (&json!("denied"), &json!("error"))
    );
    assert!(
        error["message"]
            .as_str()
            .unwrap()
            .contains("at = \"/nowhere\""),
        "{error}"
    );

    let looked = enqueue(
        &client,
        "test.probe-file",
        json!({"path": "/etc/localtime"}),
    )
    .await;
    let job = ended(&client, looked).await;
    assert_eq!(
        (job.state.as_str(), job.attempt),
        ("failed", 2),
        "the job was retried"
    );
    let error = job.error.unwrap();
    assert_eq!(error["kind"], "guest_error", "{error}");
    assert_eq!(error["message"], "the server is busy (false)");
    worker.drain().await;
}
