//! Text from guests and modules is sanitized wherever it is shown: on a terminal, in a host's log, in the database.

use rouse::worker::Settings;
use serde_json::{Value, json};

use crate::sandbox_guest::{
    Handlers, assemble, echo, guest, guest_that, manifest, returns, sandbox,
};
use crate::support::worker::{TestWorker, catalog_of, ended, enqueue};
use crate::support::{
    CommandOutput, TestDb, command_without_database, folder_of, rouse_in, rouse_without_database,
    run_rouse,
};

/// Control sequences that a terminal would obey, and a forged log line.
const NASTY: &str =
    "it\n2026-11-22T12:00:00Z  WARN rouse: faked\r\u{1b}[2J\u{7f}\u{9b}31m\u{202e}\u{2028}x";

/// The same text as shown where several lines are allowed.
const SHOWN: &str = "it\n2026-11-22T12:00:00Z  WARN rouse: faked\\u{d}\\u{1b}[2J\\u{7f}\\u{9b}31m\\u{202e}\\u{2028}x";

/// A coin does not land on the same side this many times in a row.
const TOSSES_MAX: usize = 64;

/// True for characters that must not appear in printed text; line breaks are checked separately.
pub(crate) fn is_unsafe(character: char) -> bool {
    (character.is_control() && character != '\n') || matches!(character, '\u{202e}' | '\u{2028}')
}

#[test]
fn a_refused_module_cannot_forge_lines_in_the_log_or_the_listing() {
    let describe = format!(
        "(call $panicked (i32.const 4096) (i32.const {bytes}) (i32.const 4096) (i32.const {bytes})) unreachable",
        bytes = NASTY.len()
    );
    let panics = guest_that(&describe, NASTY, "unreachable");
    let word = json!({"handlers": [{"name": "test.word", "instances": NASTY}]}).to_string();
    let capability = json!({"handlers": [{"name": "test.asks", "capabilities": [NASTY]}]});
    let folder = folder_of(
        "",
        &[
            ("asks.wasm", &guest(&capability.to_string(), "unreachable")),
            ("panics.wasm", &panics),
            ("word.wasm", &guest(&word, "unreachable")),
        ],
    );
    let ran = CommandOutput::run(
        command_without_database(&["handlers"], &folder).env("ROUSE_LOG", "warn"),
    );
    let output = ran.exits(1).text();
    assert!(!output.contains(is_unsafe), "{output:?}");
    for (file, why) in [
        ("panics.wasm", "it panicked while it described itself"),
        ("word.wasm", "unknown variant"),
        ("asks.wasm", "a capability must be a word such as `dirs`"),
    ] {
        let lines = output.lines().filter(|line| line.contains(file));
        assert_eq!(
            lines.filter(|line| line.contains(why)).count(),
            2,
            "in the log and in the listing: {output}"
        );
    }
    // Anything that looks like a log line appears inside a line that names its origin.
    let faked: Vec<&str> = output
        .lines()
        .filter(|line| line.contains("faked"))
        .collect();
    assert_eq!(faked.len(), 4, "{output}");
    assert!(
        faked.iter().all(|line| line.contains(".wasm")),
        "{faked:#?}"
    );
}

#[tokio::test]
async fn a_handlers_error_is_sanitized_in_the_database_and_keeps_its_line_breaks() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let manifest = manifest("test.nasty", "1");
    let describe = format!(
        "(call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    let fails = format!(
        "(call $return_error (i32.const {}) (i32.const {}) (i32.const 1))",
        4096 + manifest.len(),
        NASTY.len()
    );
    let module = guest_that(&describe, &format!("{manifest}{NASTY}"), &fails);
    let catalog = catalog_of(&[("nasty.wasm", &module)]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let id = enqueue(&client, "test.nasty", json!({})).await;
    let error = ended(&client, id).await.error.unwrap();
    assert_eq!(error["message"], SHOWN);
    let kind = error["guest_kind"].as_str().unwrap();
    assert!(
        !kind.contains(is_unsafe) && !kind.contains('\n'),
        "{kind:?}"
    );
    worker.drain().await;
}

#[tokio::test]
async fn a_result_is_printed_as_equal_json_without_terminal_control_characters() {
    let result = serde_json::to_string(&json!({ "said": NASTY })).unwrap();
    assert!(result.contains('\u{202e}') && result.contains('\u{9b}'));
    let module = returns("test.nasty", &result);
    let folder = folder_of("", &[("nasty.wasm", &module)]);
    for args in [
        &["invoke", "test.nasty"][..],
        &["invoke", "test.nasty", "--json"],
    ] {
        let ran = rouse_without_database(args, &folder);
        let output = ran.exits(0).text();
        assert!(!output.contains(is_unsafe), "{output:?}");
        let printed: Value = serde_json::from_str(&output).unwrap();
        let found = printed.get("result").unwrap_or(&printed);
        assert_eq!(found["said"], NASTY);
    }

    let db = TestDb::new().await;
    let client = db.client().await;
    let catalog = catalog_of(&[("nasty.wasm", &module)]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let id = enqueue(&client, "test.nasty", json!({})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    worker.drain().await;
    let shown = rouse_in(&db, &["job", &id.to_string(), "--json"], &folder).await;
    assert!(!shown.exits(0).stdout.contains(is_unsafe), "{shown:?}");
    assert_eq!(shown.json()["result"]["said"], NASTY);
}

/// Producers, workers and modules can store numbers and nesting depths that most JSON parsers refuse.
#[tokio::test]
async fn json_that_only_postgres_can_hold_does_not_break_the_lists_that_contain_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let deep = "[".repeat(200) + &"]".repeat(200);
    let read_id = async |sql: &str| -> i64 { client.query_one(sql, &[]).await.unwrap().get(0) };
    client
        .batch_execute(&format!(
            "SELECT rouse.schedule('large', 'x', '{{\"n\": 1e400}}', cron => '0 3 * * *');
             SELECT rouse.schedule('deep', 'x', '{deep}', cron => '0 3 * * *')"
        ))
        .await
        .unwrap();
    let capabilities = r#"{"x": {"max_attempts": 1e400}}"#;
    let worker = read_id(&format!(
        "SELECT incarnation FROM rouse.register('w', sha256('k'), 'h', 'p', 'v', '{capabilities}', 1, \
         '{{}}', '{{}}', '{{\"running\": 1e400}}')"
    ))
    .await;
    let flow =
        read_id("SELECT rouse.enqueue_flow('[{\"name\": \"a\", \"handler\": \"x\"}]')").await;
    let lanes = "ARRAY(SELECT ROW(id, -1, 60000, NULL, NULL)::rouse.claim_order FROM rouse.lane)";
    let job = read_id(&format!(
        "SELECT id FROM rouse.claim({worker}, sha256('k'), 5, {lanes}, 1)"
    ))
    .await;
    let error = format!(r#"{{"kind": 1e400, "message": "no", "details": {deep}}}"#);
    client
        .batch_execute(&format!(
            "SELECT rouse.settle({worker}, sha256('k'), ARRAY[ROW({job}, 5, 'failed', 1, NULL, '{error}', 0, \
                 NULL, NULL, 1, 1, 1, 1, 1, NULL, NULL)::rouse.settlement], '{{}}', false)"
        ))
        .await
        .unwrap();
    let (flow, job) = (flow.to_string(), job.to_string());
    let large = format!("1{}", "0".repeat(400));
    let lists: [(&[&str], &str); 12] = [
        (&["schedule", "ls"], "large"),
        (&["schedule", "show", "large"], "0 3 * * *"),
        (&["schedule", "ls", "--json"], "deep"),
        (&["workers", "ls"], "active"),
        (&["workers", "show", "w"], "active"),
        (&["handlers", "ls"], "x"),
        (&["handlers", "ls", "--json"], &large),
        (&["job", "ls"], "failed"),
        (&["flow", &flow], "failed"),
        (&["flow", "show", &flow, "--json"], &large),
        (&["audit"], "failed"),
        (&["audit", &job], "failed"),
    ];
    for (args, part) in lists {
        run_rouse(&db, args).await.exits(0).prints(part);
    }
}

const RANDOM: &str =
    r#"(import "wasi_snapshot_preview1" "random_get" (func $random (param i32 i32) (result i32)))"#;

/// Loads a module whose `describe` fails at random, and verifies it until that fails. All reasons have to start with
/// these words.
async fn is_refused_after_it_was_loaded(handler: &str, module: &[u8], words: &str) {
    let mut loaded = None;
    for _ in 0..TOSSES_MAX {
        let handlers = Handlers::with(&[("moody.wasm", module)]).await;
        loaded = handlers.catalog.current().get(handler).cloned();
        if loaded.is_some() {
            break;
        }
        let why = handlers.refusal("moody.wasm");
        assert!(why.starts_with(words), "{why}");
    }
    let loaded = loaded.expect("a successful describe within the tosses");
    let mut why = None;
    for _ in 0..TOSSES_MAX {
        why = sandbox().verify(&loaded).await.err();
        if why.is_some() {
            break;
        }
    }
    let why = why.expect("a failed describe within the tosses");
    assert!(why.starts_with(words), "{why}");
}

#[tokio::test]
async fn a_module_whose_second_describe_panics_is_reported_in_text_that_postgres_stores() {
    let manifest = manifest("test.moody", "1");
    let panic = "no\0\u{9b}more";
    let (at, bytes) = (4096 + manifest.len(), panic.len());
    // `describe` panics at random.
    let describe = format!(
        "(drop (call $random (i32.const 0) (i32.const 1)))
         (if (i32.and (i32.load8_u (i32.const 0)) (i32.const 1)) (then
             (call $panicked (i32.const {at}) (i32.const {bytes}) (i32.const {at}) (i32.const 0))
             unreachable))
         (call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    let module = assemble(
        RANDOM,
        &describe,
        &format!("{manifest}{panic}"),
        "unreachable",
    );
    let words = "it panicked while it described itself: no\\u{0}\\u{9b}more";
    is_refused_after_it_was_loaded("test.moody", &module, words).await;
}

#[tokio::test]
async fn a_module_whose_second_manifest_does_not_parse_is_reported_with_what_does_not() {
    let manifest = manifest("test.terse", "1");
    // `describe` returns half of the manifest at random.
    let describe = format!(
        "(drop (call $random (i32.const 0) (i32.const 1)))
         (call $text (i32.const 4096) (select (i32.const {half}) (i32.const {whole})
             (i32.and (i32.load8_u (i32.const 0)) (i32.const 1))))",
        half = manifest.len() / 2,
        whole = manifest.len()
    );
    let module = assemble(RANDOM, &describe, &manifest, "unreachable");
    let words = "its manifest (describe) does not parse: ";
    is_refused_after_it_was_loaded("test.terse", &module, words).await;
}

#[test]
fn handlers_reports_what_would_prevent_a_host_from_starting_and_its_warnings() {
    let config = r#"
        [secrets.KEY]
        env = "ROUSE_TEST_KEY"
        [secrets.OTHER]
        file = "nowhere.key"
        [handlers."test.other"]
        secrets = [{ name = "KEY", hosts = ["a.example"], headers = ["authorization"] },
                   { name = "OTHER", hosts = ["a.example"], headers = ["authorization"] }]
        dirs = [{ dir = "nowhere", at = "/data", mode = "read" }]
    "#;
    let folder = folder_of(
        config,
        &[
            ("echo.wasm", &echo("test.echo", "1")),
            ("other.wasm", &echo("test.other", "1")),
        ],
    );
    let listed = rouse_without_database(&["handlers"], &folder);
    listed.exits(1);
    for part in [
        "a host would not start: read the secret KEY (secrets.KEY in rouse.toml): the variable ROUSE_TEST_KEY is not set",
        "a host would not start: read the secret OTHER (secrets.OTHER in rouse.toml)",
        "warning: test.other is granted the directory",
    ] {
        listed.prints(part);
    }
    // A missing grant of one handler does not prevent another from running.
    let echoed = rouse_without_database(&["invoke", "test.echo", "[7]"], &folder);
    assert_eq!(echoed.exits(0).text(), "[7]\n");
    let other = rouse_without_database(&["invoke", "test.other"], &folder);
    other.exits(6).prints("read the secret KEY");

    // A warning alone would not keep a host from starting.
    let key = folder.join("nowhere.key");
    std::fs::write(&key, "correct horse battery").unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
    std::fs::set_permissions(&key, mode).unwrap();
    let mut command = command_without_database(&["handlers", "--json"], &folder);
    let listed = CommandOutput::run(command.env("ROUSE_TEST_KEY", "correct horse battery"));
    let listed = listed.exits(0).json();
    assert_eq!(listed["errors"], json!([]));
    let warning = listed["warnings"][0].as_str().unwrap();
    assert!(
        warning.contains("nowhere at /data, which cannot be opened: there is no such directory"),
        "{warning}"
    );
}
