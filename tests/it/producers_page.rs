//! The page for producers: its SQL, JavaScript and Python blocks return what the page shows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use rouse::worker::Settings;

use crate::support::page::{blocks, run_sql};
use crate::support::worker::{TestWorker, until_true, watched};
use crate::support::{Ran, TestDb, scratch, skip};

const PAGE: &str = "docs/guides/producers.md";

/// True once no job of the page's blocks is live.
const DONE: &str = "SELECT NOT EXISTS (SELECT FROM rouse.jobs WHERE handler = 'text.stats' AND finished_at IS NULL)";

#[tokio::test]
async fn the_sql_on_the_page_for_producers_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, _folder) = watched(&["text_stats.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let blocks = blocks(PAGE);
    let sql: Vec<_> = blocks.iter().filter(|block| block.kind == "sql").collect();
    assert!(sql.len() >= 9, "{}", sql.len());
    for block in sql {
        run_sql(&client, block).await;
        // By the time that a reader gets to the statement that reads a result, the job has finished.
        until_true(&client, DONE).await;
    }
    worker.drain().await;
}

#[tokio::test]
async fn a_trigger_without_rights_fails_as_the_page_describes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = "CREATE ROLE invoking_clerk LOGIN;
        CREATE SCHEMA shop;
        CREATE TABLE shop.things (id bigint);
        GRANT USAGE ON SCHEMA shop TO invoking_clerk;
        GRANT INSERT ON shop.things TO invoking_clerk;
        CREATE FUNCTION shop.enqueue_thing() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN PERFORM rouse.enqueue(''shop.invoice''); RETURN NULL; END';
        CREATE TRIGGER enqueue_thing AFTER INSERT ON shop.things FOR EACH ROW EXECUTE FUNCTION shop.enqueue_thing();
        SET ROLE invoking_clerk;";
    client.batch_execute(sql).await.unwrap();
    let refused = client
        .execute("INSERT INTO shop.things VALUES (1)", &[])
        .await;
    let refused = refused.unwrap_err();
    let message = refused
        .as_db_error()
        .expect("an error from the server")
        .message();
    assert_eq!(message, "permission denied for schema rouse");

    client.batch_execute("RESET ROLE").await.unwrap();
    for (call, message) in [
        (
            "SELECT rouse.enqueue('shop.invoice', '{}'::json)",
            "function rouse.enqueue(unknown, json) does not exist",
        ),
        (
            "SELECT rouse.enqueue('shop.invoice', '{1,2}')",
            "invalid input syntax for type json",
        ),
    ] {
        let wrong = client.simple_query(call).await.unwrap_err();
        assert_eq!(wrong.as_db_error().unwrap().message(), message);
        let page = blocks(PAGE);
        let prose: String = page.iter().map(|block| block.before.as_str()).collect();
        assert!(prose.contains(message), "{message}");
    }
}

/// A language whose client libraries have a lock file in `tests/producers-page`.
struct Language {
    /// The folder of the lock file.
    name: &'static str,
    lock: &'static str,
    /// The word behind the backquotes of its blocks.
    kind: &'static str,
    extension: &'static str,
    /// Installs the locked libraries into the working directory.
    install: &'static [&'static [&'static str]],
    /// The interpreter; a path below the installed folder, or on PATH.
    interpreter: &'static str,
    /// The expected output of each block of the page, in order: a part of the text, and the number of its jobs.
    prints: &'static [(&'static str, i64)],
}

const NODE: Language = Language {
    name: "node",
    lock: "package-lock.json",
    kind: "js",
    extension: "cjs",
    install: &[&["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]],
    interpreter: "node",
    prints: &[(" succeeded ", 1), ("[ '", 2)],
};

const PYTHON: Language = Language {
    name: "python",
    lock: "requirements.txt",
    kind: "python",
    extension: "py",
    install: &[
        &["python3", "-m", "venv", "venv"],
        &[
            "venv/bin/pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            "--require-hashes",
            "--requirement",
            "requirements.txt",
        ],
    ],
    interpreter: "venv/bin/python",
    prints: &[(" succeeded ", 1), ("[", 2), (" ", 2)],
};

/// The folder with the installed libraries, which is kept below cargo's output until the lock file changes. An error
/// says why they cannot be installed here.
fn installed(language: &Language) -> Result<PathBuf, String> {
    let locks = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/producers-page");
    let locks = locks.join(language.name);
    let lock = fs::read(locks.join(language.lock)).unwrap();
    let test_binary = std::env::current_exe().unwrap();
    let cache = test_binary
        .ancestors()
        .nth(3)
        .unwrap()
        .join("producers-page");
    let folder = cache.join(language.name);
    // A copy of the lock file, written last: an interrupted installation is repeated.
    let complete = folder.join("complete");
    if fs::read(&complete).is_ok_and(|of_installed| of_installed == lock) {
        return Ok(folder);
    }
    // It may not exist yet.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    for file in fs::read_dir(&locks).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folder.join(file.file_name())).unwrap();
    }
    for command in language.install {
        let output = Command::new(command[0])
            .args(&command[1..])
            .current_dir(&folder)
            .output()
            .map_err(|error| format!("{} does not start: {error}", command[0]))?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            return Err(format!("`{}` failed: {stderr}", command.join(" ")));
        }
    }
    fs::write(complete, lock).unwrap();
    Ok(folder)
}

/// Runs each block of the language as a program of its own, and checks its output and its jobs.
async fn run_blocks(language: &Language) {
    let libraries = match installed(language) {
        Ok(libraries) => libraries,
        Err(why) => {
            skip(&format!(
                "no libraries for the {} blocks of {PAGE}: {why}",
                language.name
            ));
            return;
        }
    };
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, _modules) = watched(&["text_stats.wasm"]).await;
    let worker = TestWorker::start_on(&db, Settings::default(), catalog);
    let page = blocks(PAGE);
    let programs: Vec<_> = page
        .iter()
        .filter(|block| block.kind == language.kind)
        .collect();
    assert_eq!(programs.len(), language.prints.len());
    let address = db.address();
    // Not every client decodes the path of a socket in a URL: the directory is in PGHOST.
    let url = format!("postgres://{}@/{}", address.user, address.database);
    let folder = scratch("producers-page");
    let interpreter = match language.interpreter.contains('/') {
        true => libraries.join(language.interpreter),
        false => language.interpreter.into(),
    };
    for (block, (part, jobs)) in programs.into_iter().zip(language.prints) {
        let count = "SELECT count(*) FROM rouse.jobs WHERE state = 'succeeded'";
        let before: i64 = client.query_one(count, &[]).await.unwrap().get(0);
        let file = folder.join(format!("line-{}.{}", block.line, language.extension));
        fs::write(&file, &block.text).unwrap();
        let mut command = Command::new(&interpreter);
        command
            .arg(&file)
            .env("NODE_PATH", libraries.join("node_modules"))
            .env("DATABASE_URL", &url)
            .env("PGHOST", &address.directory)
            .env_remove("PGPORT");
        let ran = tokio::task::spawn_blocking(move || Ran::of(&mut command));
        let ran = ran.await.unwrap();
        ran.exits(0).prints(part);
        until_true(&client, DONE).await;
        let after: i64 = client.query_one(count, &[]).await.unwrap().get(0);
        assert_eq!(after - before, *jobs, "line {}: {}", block.line, ran.text());
    }
    worker.drain().await;
}

#[tokio::test]
async fn the_node_blocks_of_the_page_for_producers_enqueue_jobs_that_succeed() {
    run_blocks(&NODE).await;
}

#[tokio::test]
async fn the_python_blocks_of_the_page_for_producers_enqueue_jobs_that_succeed() {
    run_blocks(&PYTHON).await;
}
