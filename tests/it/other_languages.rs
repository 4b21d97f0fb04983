//! Guests built by toolchains of other languages run like guests in Rust (`docs/guides/other-languages.md`).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rouse::sandbox::{Catalog, Sandbox, Settings as SandboxSettings};
use rouse::worker::{Override, Overrides, Settings};
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use crate::support::worker::{TestWorker, cancel, ended, enqueue, guests_dir, until, until_true};
use crate::support::{TestDb, code_cache, rouse_binary, skip};

const LANGUAGES: [&str; 4] = ["python", "js", "qjs", "c"];

/// The folder with the guests that `cargo xtask test` has built with other toolchains.
fn folder() -> PathBuf {
    guests_dir().join("../other")
}

/// The languages whose guests exist. In CI that is all of them; elsewhere a toolchain may be missing.
fn languages() -> Vec<&'static str> {
    let is_there = |language: &&str| {
        if folder().join(format!("{language}.wasm")).is_file() {
            return true;
        }
        let why = std::fs::read_to_string(folder().join(format!("{language}.why")));
        let why = why.unwrap_or_else(|_| "`cargo xtask test other_languages` builds it".into());
        skip(&format!("there is no guest of {language}: {why}"));
        false
    };
    LANGUAGES.into_iter().filter(is_there).collect()
}

/// The existing guests, compiled once, in a sandbox with the usual limits, since they contain whole runtimes.
async fn loaded() -> (Arc<Sandbox>, Arc<Catalog>) {
    static LOADED: OnceCell<(Arc<Sandbox>, Arc<Catalog>)> = OnceCell::const_new();
    let load = || async {
        let sandbox = Sandbox::start(SandboxSettings {
            attempts_max: 8,
            compiler: Some(rouse_binary()),
            cache_dir: Some(code_cache()),
            ..SandboxSettings::default()
        });
        let sandbox = sandbox.expect("a sandbox");
        let modules = tempfile::tempdir().expect("a folder");
        for language in languages() {
            let file = format!("{language}.wasm");
            std::fs::copy(folder().join(&file), modules.path().join(file)).expect("a guest");
        }
        let catalog = Catalog::open(sandbox.clone(), modules.path()).await;
        let catalog = catalog.expect("a catalog");
        let refused = &catalog.current().refused;
        assert!(refused.is_empty(), "{refused:?}");
        (sandbox, Arc::new(catalog))
    };
    LOADED.get_or_init(load).await.clone()
}

/// A worker with these guests. Their grace lasts ten minutes, longer than a test waits.
async fn worker(db: &TestDb) -> TestWorker {
    let (sandbox, catalog) = loaded().await;
    let patient = Override::default()
        .with("grace", Duration::from_secs(600))
        .with("max_attempts", 5_u32)
        .with("retry_initial", Duration::ZERO);
    let settings = Settings {
        overrides: Overrides([("*".to_owned(), patient)].into()),
        ..Settings::default()
    };
    TestWorker::start_in(db, settings, sandbox, catalog)
}

/// The lines that a job has logged, in order.
async fn lines(client: &Client, id: i64) -> Vec<String> {
    let sql = "SELECT text FROM rouse.log WHERE job = $1 ORDER BY attempt, line";
    let rows = client.query(sql, &[&id]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

/// The error of a failed job.
async fn error(client: &Client, id: i64) -> Value {
    let job = ended(client, id).await;
    assert_eq!(job.state, "failed", "{job:?}");
    job.error.expect("an error")
}

#[tokio::test]
async fn each_language_logs_and_returns() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    let mut jobs = Vec::new();
    for language in languages() {
        let id = enqueue(&client, &format!("{language}.log"), json!("hü")).await;
        let job = ended(&client, id).await;
        assert_eq!(job.result, Some(json!({"logged": "hü"})), "{job:?}");
        jobs.push((language, id));
    }
    // A worker that stops writes all pending lines.
    worker.drain().await;
    for (language, id) in jobs {
        let printed = match language {
            "python" => vec!["printed by Python"],
            "js" => vec!["printed by JavaScript"],
            "c" => vec!["printed by C"],
            // QuickJS has no console.
            _ => vec![],
        };
        let all: Vec<_> = ["hü"].into_iter().chain(printed).collect();
        assert_eq!(lines(&client, id).await, all, "{language}");
    }
}

#[tokio::test]
async fn each_language_fails_with_its_own_error_text() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    for language in languages() {
        let id = enqueue(&client, &format!("{language}.fail"), json!("not ü")).await;
        assert_eq!(
            error(&client, id).await,
            json!({
                "kind": "guest_error", "guest_kind": "refused", "message": "not ü", "details": {"by": language}, "max_attempts": 5,
            })
        );
    }
    worker.drain().await;
}

#[tokio::test]
async fn each_language_reads_the_result_of_a_step_in_the_next_attempt() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    for language in languages() {
        let id = enqueue(&client, &format!("{language}.steps"), json!("")).await;
        let job = ended(&client, id).await;
        assert_eq!(
            job.result,
            Some(json!({"recorded": 1, "attempt": 2})),
            "{job:?}"
        );
    }
    worker.drain().await;
}

#[tokio::test]
async fn each_language_stops_when_its_job_is_cancelled() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    for language in languages() {
        let id = enqueue(&client, &format!("{language}.wait"), json!("")).await;
        until(&client, id, |job| job.state == "running").await;
        // The guest logs that it waits, so the cancellation arrives during its wait.
        until_true(
            &client,
            &format!("SELECT EXISTS (SELECT FROM rouse.log WHERE job = {id} AND text = 'waiting')"),
        )
        .await;
        assert!(cancel(&client, id).await);
        assert_eq!(ended(&client, id).await.state, "cancelled");
    }
    // The worker waits for the attempts, whose grace lasts ten minutes.
    worker.drain().await;
}

#[tokio::test]
async fn each_language_reports_why_it_crashed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    for language in languages() {
        let handler = format!("{language}.crash");
        let sql = "SELECT rouse.enqueue($1, '\"why\"', max_attempts => 1)";
        let row = client.query_one(sql, &[&handler]).await.unwrap();
        let error = error(&client, row.get(0)).await;
        assert_eq!(error["kind"], "trap", "{error}");
        let words = match language {
            "python" => "TypeError: string indices must be integers",
            "js" => "expected a string, received [undefined]",
            "qjs" => "expected object",
            _ => "C gives up: why",
        };
        let stderr = error["stderr"].as_array().expect("lines of standard error");
        let matches = |line: &Value| line.as_str().is_some_and(|line| line.contains(words));
        assert!(stderr.iter().any(matches), "{error}");
    }
    worker.drain().await;
}

#[tokio::test]
async fn an_uncaught_javascript_error_has_its_stack() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = worker(&db).await;
    for language in ["js", "qjs"] {
        if !languages().contains(&language) {
            continue;
        }
        let handler = format!("{language}.bug");
        let sql = "SELECT rouse.enqueue($1, '\"\"', max_attempts => 1)";
        let row = client.query_one(sql, &[&handler]).await.unwrap();
        let error = error(&client, row.get(0)).await;
        assert_eq!(error["guest_kind"], "TypeError", "{error}");
        let stack = error["details"]["stack"].as_str().expect("a stack");
        assert!(
            stack.contains("bug") && stack.contains("app.js:"),
            "{stack}"
        );
    }
    worker.drain().await;
}

#[test]
fn the_page_shows_the_commands_that_built_these_guests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(root.join("docs/guides/other-languages.md")).unwrap();
    for language in LANGUAGES {
        let mut shown = 0;
        for script in ["system.sh", "install.sh", "build.sh"] {
            let path = root.join("tests/guests-other").join(language).join(script);
            if let Ok(commands) = std::fs::read_to_string(&path) {
                assert!(page.contains(&commands), "{}:\n{commands}", path.display());
                shown += 1;
            }
        }
        assert!(shown >= 2, "{language}");
    }
}
