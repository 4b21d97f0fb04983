//! Command output for newcomers: on 80 columns, on pipes, and for misspelt or missing things.

use rouse::worker::Settings;
use serde_json::json;

use crate::sandbox_guest::{guest_of_wasip1, manifest};
use crate::support::worker::{TIMEOUT, TestWorker, ended, enqueue, until, until_true, watched};
use crate::support::{
    CommandOutput, Host, TestDb, command, command_without_database, folder, folder_of, on_terminal,
    rouse_in, rouse_without_database, scratch,
};

const NAME: &str = "newsletter.of-the-month.send-to-everybody";

fn named_guest() -> Vec<u8> {
    let body = "(call $return_ok (i32.const 0) (i32.const 0))";
    guest_of_wasip1("", &manifest(NAME, "1.2.3"), body)
}

#[test]
fn names_of_handlers_are_not_cut_on_a_terminal_of_80_columns() {
    let dir = folder_of("", &[("newsletter_of_the_month.wasm", named_guest())]);
    let list = || command_without_database(&["handlers"], &dir);
    let shown = on_terminal(list(), 80);
    assert!(shown.contains(NAME), "{shown}");
    for line in shown.lines() {
        assert!(line.chars().count() <= 80, "{line:?} in\n{shown}");
    }
    // As a last resort, the name is visibly truncated.
    let narrow = on_terminal(list(), 24);
    assert!(!narrow.contains(NAME) && narrow.contains('…'), "{narrow}");
    let piped = CommandOutput::run(&mut list());
    let row = piped.exits(0).stdout.lines().nth(1).expect("a row");
    for part in [NAME, "1.2.3", "newsletter_of_the_month.wasm"] {
        assert!(row.contains(part), "{part}: {row}");
    }
}

#[tokio::test]
async fn top_drops_columns_before_it_cuts_words() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let settings = Settings {
        worker_id: "a-worker-with-an-id-of-some-length".into(),
        ..Settings::default()
    };
    let worker = TestWorker::start(&db, settings).await;
    let enqueued = "SELECT rouse.enqueue('test.sleep', '{\"ms\": 600000}', tenant => 'somebody-with-a-name-of-some-length')";
    let id: i64 = client.query_one(enqueued, &[]).await.unwrap().get(0);
    until(&client, id, |job| job.state == "running").await;
    let shown = on_terminal(command(&db.url(), &["top", "--once"], &scratch("top")), 80);
    assert_eq!(shown.trim_end().lines().count(), 2, "one row:\n{shown}");
    for part in ["test.sleep", "a-worker-with-an-id-of-some-length"] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    let piped = rouse_in(&db, &["top"], &scratch("top")).await;
    piped.exits(0).prints("somebody-with-a-name-of-some-length");
    client
        .execute("SELECT rouse.cancel($1)", &[&id])
        .await
        .unwrap();
    worker.drain().await;
}

#[test]
fn dev_reports_missing_handlers_once_without_warnings() {
    let folder = folder(
        "",
        &["email_send.wasm", "http_fetch.wasm", "text_stats.wasm"],
    );
    let dev = ["dev", "--data-dir", "pg", "--http", "off"];
    let dev = Host::spawn(command_without_database(&dev, &folder));
    dev.line(TIMEOUT, |line| line.contains("modules loaded"));
    dev.line(TIMEOUT, |line| line.starts_with("then: "));
    dev.line(TIMEOUT, |line| line.contains("handlers show"));
    let output = dev.stop();
    // A slow machine may cause other warnings.
    let is_warning = |line: &str| line.contains("WARN") && line.contains("handler");
    assert!(!output.lines().any(is_warning), "{output}");
    let missing: Vec<&str> = output
        .lines()
        .filter(|line| line.contains("handlers show"))
        .collect();
    assert_eq!(missing.len(), 1, "{output}");
    assert!(
        missing[0].contains("handlers=\"email.send, http.fetch\""),
        "{output}"
    );
}

#[tokio::test]
async fn a_denial_is_printed_once_when_its_job_is_shown() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    let id = enqueue(
        &client,
        "test.read-file",
        json!({"path": "/nowhere/in.txt"}),
    )
    .await;
    ended(&client, id).await;
    let shown = rouse_in(&db, &["job", &id.to_string()], &scratch("denial")).await;
    shown.exits(0).prints("failed").prints("the error above");
    let denial = "tried to access /nowhere/in.txt, which is not in a granted directory";
    assert_eq!(shown.stdout.matches(denial).count(), 1, "{}", shown.stdout);
    worker.drain().await;
}

#[test]
fn a_handler_fits_on_a_screen_and_its_schemas_are_shown_on_request() {
    let folder = folder("", &["email_send.wasm"]);
    let show = |more: &[&str]| {
        let args = [
            "handlers",
            "show",
            "email.send",
            "--handlers",
            "handlers-wasm",
        ];
        rouse_without_database(&[&args[..], more].concat(), &folder)
    };
    let short = show(&[]);
    short
        .exits(0)
        .prints("Sends an email")
        .prints("hosts = [\"…\"]");
    assert!(!short.stdout.contains("input_schema"), "{}", short.stdout);
    assert!(short.stdout.lines().count() <= 40, "{}", short.stdout);
    show(&["--schema"])
        .prints("input_schema")
        .prints("reply_to");
    show(&["--defaults"]).prints("limits.memory_mb");
    let json = show(&["--json"]).json();
    assert_eq!(json["manifest"]["input_schema"]["type"], "object");
}

#[tokio::test]
async fn a_misspelt_name_suggests_the_nearest_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let empty_folder = scratch("misspelt");
    let (catalog, _folder) = watched(&["text_stats.wasm"]).await;
    let settings = Settings {
        worker_id: "mail-1".into(),
        ..Settings::default()
    };
    let worker = TestWorker::start_on(&db, settings, catalog);
    until_true(
        &client,
        "SELECT EXISTS (SELECT FROM rouse.workers WHERE 'text.stats' = ANY (handlers))",
    )
    .await;
    let run = async |args: &[&str]| rouse_in(&db, args, &empty_folder).await;
    run(&["enqueue", "text.stat", "--queue", "mail"])
        .await
        .exits(0)
        .prints("did you mean text.stats?");
    let misspelt = run(&["enqueue", "text.stats", r#"{"txt": "a"}"#]).await;
    misspelt
        .exits(0)
        .prints("no worker knows the key txt in a payload of text.stats; did you mean text?");
    let right = run(&["enqueue", "text.stats", r#"{"text": "a"}"#]).await;
    assert!(!right.exits(0).text().contains("no worker knows"));
    run(&["handlers", "show", "txet.stats"])
        .await
        .exits(3)
        .prints("did you mean text.stats?");
    for verb in [
        &["queue", "pause", "mial"][..],
        &["queue", "resume", "mial"],
        &["queue", "purge", "mial", "--confirm"],
    ] {
        run(verb).await.exits(0).prints("did you mean mail?");
    }
    for (verb, name) in [
        (&["job", "ls", "--queue", "mial"][..], "mail"),
        (&["job", "ls", "--handler", "text.stast"], "text.stat"),
    ] {
        let meant = format!("did you mean {name}?");
        run(verb).await.exits(0).prints(&meant);
    }
    let used = run(&["job", "ls", "--queue", "mail", "--state", "failed"]).await;
    assert!(!used.exits(0).text().contains("enqueued recently"));
    for verb in [
        &["show", "mial-1"][..],
        &["forget", "mial-1"],
        &["verify", "mial-1", "text.stats"],
    ] {
        let args: Vec<&str> = ["workers"].iter().chain(verb).copied().collect();
        let mistyped = run(&args).await;
        mistyped.exits(3).prints("did you mean mail-1?");
    }
    let other = run(&["handlers", "show", "image.crop"]).await;
    assert!(!other.exits(3).text().contains("did you mean"));
    worker.drain().await;
    let folder = folder("", &["text_stats.wasm"]);
    rouse_without_database(&["invoke", "text.stat", "{}"], &folder)
        .exits(3)
        .prints("did you mean text.stats?");
}

#[test]
fn a_failed_connection_names_the_server_but_not_the_password() {
    let empty_folder = scratch("unreachable");
    for (url, target) in [
        (
            "postgres://ann:hunter2@127.0.0.1:1/jobs",
            "cannot connect to jobs on 127.0.0.1:1 as ann",
        ),
        (
            "host=/nowhere user=ann dbname=jobs password=hunter2",
            "cannot connect to jobs on /nowhere/.s.PGSQL.5432 as ann",
        ),
    ] {
        for args in [&["job"][..], &["queue", "ls"], &["enqueue", "x"]] {
            let ran = CommandOutput::run(&mut command(url, args, &empty_folder));
            ran.exits(1)
                .prints(target)
                .prints("that the server is running");
            assert!(!ran.text().contains("hunter2"), "{}", ran.text());
        }
    }
}

#[test]
fn an_invalid_number_is_rejected_with_the_accepted_format() {
    let folder = folder("slots = \"many\"\n", &[]);
    for (args, expected) in [
        (
            &["job", "ls", "--limit", "x"][..],
            "expected a whole number from 1 to 10000",
        ),
        (
            &["top", "--limit", "0"],
            "expected a whole number from 1 to 100000",
        ),
        (
            &["serve", "--slots", "0"],
            "expected a whole number from 1 to 10000",
        ),
        (
            &["enqueue", "x", "--max-attempts", "1.5"],
            "expected a whole number from 1 to 1000",
        ),
        (&["job", "shwo"], "expected the id of a job"),
        (&["handlers"], "expected a whole number, 0 or more"),
    ] {
        let ran = rouse_without_database(args, &folder);
        assert_ne!(ran.prints(expected).code, 0);
        for word in ["digit", "usize"] {
            assert!(!ran.text().contains(word), "{}", ran.text());
        }
    }
}

#[tokio::test]
async fn a_refusal_advises_a_working_command() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let empty_folder = scratch("advice");
    let id = enqueue(&client, "no.such", json!({})).await.to_string();
    let run = async |args: &[&str]| rouse_in(&db, args, &empty_folder).await;
    let queued = run(&["job", "retry", &id]).await;
    queued
        .exits(6)
        .prints(&format!("`rouse job reschedule {id}` makes it ready"));
    run(&["job", "cancel", &id]).await.exits(0);
    let ended = run(&["job", "complete", &id, "1"]).await;
    ended.exits(6).prints(&format!(
        "`rouse job retry {id}` enqueues it again as a new job"
    ));
    for ran in [queued, ended] {
        assert!(!ran.text().contains("SELECT"), "{}", ran.text());
    }
}

#[tokio::test]
async fn an_empty_list_prints_nothing_to_a_pipe_and_a_note_to_standard_error() {
    let db = TestDb::new().await;
    let empty_folder = scratch("empty");
    for (args, expected, key) in [
        (&["job"][..], "no jobs", "jobs"),
        (&["workers"], "no workers", "workers"),
        (&["top"], "no attempt is running", "running"),
        (&["state"], "no handler has any state", "states"),
        (
            &["handlers", "ls"],
            "no running worker has a handler",
            "handlers",
        ),
    ] {
        let ran = rouse_in(&db, args, &empty_folder).await;
        ran.exits(0);
        assert_eq!(ran.stdout, "", "{args:?}");
        assert!(ran.stderr.contains(expected), "{args:?}: {}", ran.stderr);
        let listed = rouse_in(&db, &[args, &["--json"]].concat(), &empty_folder).await;
        assert_eq!(listed.exits(0).json()[key], json!([]), "{args:?}");
        assert_eq!(listed.stderr, "", "{args:?}");
    }
}

#[tokio::test]
async fn ages_are_exact_times_on_a_pipe_and_a_worker_has_one_json_shape() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;
    enqueue(&client, "no.such", json!({})).await;
    let empty_folder = scratch("ages");
    for args in [&["workers"][..], &["queue"]] {
        let ran = rouse_in(&db, args, &empty_folder).await;
        let row = ran.exits(0).stdout.lines().nth(1).unwrap_or_default();
        assert!(has_a_time(row) && !row.contains(" ago"), "{args:?}: {row}");
        let shown = on_terminal(command(&db.url(), args, &empty_folder), 200);
        assert!(!has_a_time(&shown), "{args:?}: {shown}");
    }
    let listed = rouse_in(&db, &["workers", "--json"], &empty_folder).await;
    let mut listed = listed.json()["workers"][0].take();
    let id = listed["worker_id"].as_str().unwrap().to_owned();
    let shown = rouse_in(&db, &["workers", "show", &id, "--json"], &empty_folder).await;
    let mut shown = shown.json()["workers"][0].take();
    for worker in [&mut listed, &mut shown] {
        let worker = worker.as_object_mut().unwrap();
        // A heartbeat may come between the two commands.
        worker.retain(|key, _| !matches!(key.as_str(), "seen_s" | "seen_at" | "stats"));
    }
    assert_eq!(listed, shown);
    worker.drain().await;
}

/// True if a word is a date with a time.
fn has_a_time(text: &str) -> bool {
    let is_time = |word: &str| word.len() > 19 && word.as_bytes()[10] == b'T';
    text.split_whitespace().any(is_time)
}

#[test]
fn a_missing_settings_file_leaves_nothing_behind() {
    let empty = scratch("nosuch");
    for args in [
        &["dev", "--config", "nosuch.toml"][..],
        &["handlers", "--config", "nosuch.toml"],
        &["serve", "--no-queue", "--config", "nosuch.toml"],
    ] {
        let ran = rouse_without_database(args, &empty);
        ran.exits(1).prints("cannot read nosuch.toml");
        assert_eq!(std::fs::read_dir(&empty).unwrap().count(), 0, "{args:?}");
    }
}

#[test]
fn the_end_of_a_help_page_uses_the_width_of_the_terminal_up_to_80_columns() {
    let empty_folder = scratch("help");
    for (args, columns) in [
        (&["job", "ls", "--help"], 100),
        (&["job", "ls", "--help"], 60),
        (&["job", "logs", "--help"], 100),
        (&["job", "logs", "--help"], 60),
    ] {
        let mut command = command_without_database(args, &empty_folder);
        command.env("NO_COLOR", "1");
        let page = on_terminal(command, columns);
        let (_, end) = page.split_once("Print help").expect("options");
        let lines: Vec<&str> = end.trim().lines().collect();
        assert!(lines.len() > 2, "{page}");
        for pair in lines.windows(2) {
            let next = pair[1].split(' ').next().unwrap_or_default();
            // Text of the width of a large screen is hard to read.
            let width = usize::from(columns).min(80);
            let fits = pair[0].chars().count() + 1 + next.chars().count() <= width;
            assert!(!fits || next == "Exit", "{pair:?} in\n{page}");
            assert!(pair[0].chars().count() <= width, "{pair:?}");
        }
    }
}

/// The lines between the colon and the paragraph that explains what to do with them.
fn lines_of(message: &str) -> String {
    let (_, rest) = message.split_once(":\n").expect("lines to copy");
    let (lines, _) = rest
        .split_once("\n\nPut ")
        .expect("a paragraph after the lines");
    lines.to_owned()
}

/// The denial that `rouse invoke` prints.
fn denied(ran: &CommandOutput) -> String {
    let invoked = ran.json();
    assert_eq!(invoked["error"]["kind"], "denied", "{invoked}");
    invoked["error"]["message"].as_str().unwrap().to_owned()
}

#[test]
fn the_lines_printed_for_a_second_directory_and_its_mount_point_suffice() {
    for in_a_list in [false, true] {
        let folder = folder("", &["image_thumbnail.wasm"]);
        let photo = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../examples/data/photos/chelsea.png");
        for dir in ["photos", "thumbs"] {
            std::fs::create_dir(folder.join(dir)).unwrap();
        }
        std::fs::copy(photo, folder.join("photos/chelsea.png")).unwrap();
        let payload = r#"{"path": "/photos/chelsea.png", "out": "/thumbs/cat.jpg"}"#;
        let invoke = ["invoke", "image.thumbnail", payload, "--json"];
        let run = || rouse_without_database(&invoke, &folder);
        let toml = folder.join("rouse.toml");
        let first = lines_of(&denied(&run())).replace('…', "photos");
        let first = match in_a_list {
            false => first,
            true => "[handlers.\"image.thumbnail\"]\ndirs = [\n{ dir = \"photos\", at = \"/photos\" },\n".to_owned(),
        };
        std::fs::write(&toml, first.clone() + if in_a_list { "]\n" } else { "" }).unwrap();
        let second = lines_of(&denied(&run())).replace('…', "thumbs");
        for part in ["at = \"/thumbs\"", "mode = \"read-write\""] {
            assert!(second.contains(part), "{part}: {second}");
        }
        assert_eq!(second.starts_with("# "), in_a_list, "{second}");
        let end = if in_a_list { "\n]\n" } else { "\n" };
        std::fs::write(&toml, format!("{first}\n{second}{end}")).unwrap();
        let ran = run();
        ran.exits(0);
        assert!(folder.join("thumbs/cat.jpg").is_file(), "{}", ran.text());
    }
}

#[test]
fn the_lines_printed_for_a_secret_suffice() {
    let settings = "[handlers.\"test.http.secret\"]\ntimeout = \"10s\"\n";
    for before in ["", settings] {
        let folder = folder(before, &["test_guests.wasm"]);
        let payload = r#"{"secrets": ["KEY"], "requests": []}"#;
        let invoke = ["invoke", "test.http.secret", payload, "--json"];
        let run = || {
            let mut command = command_without_database(&invoke, &folder);
            CommandOutput::run(command.env("KEY", "s3cret-of-some-length"))
        };
        let lines = lines_of(&denied(&run())).replace('…', "a.example");
        for part in [
            "module = \"test_guests.wasm\"",
            "[secrets.KEY]\nenv = \"KEY\"",
        ] {
            assert!(lines.contains(part), "{part}: {lines}");
        }
        // If the table exists, its header is not repeated.
        let header = lines.contains("[handlers.\"test.http.secret\"]\nmodule");
        assert_eq!(header, before.is_empty(), "{lines}");
        std::fs::write(folder.join("rouse.toml"), format!("{before}{lines}\n")).unwrap();
        run().exits(0);
    }
}
