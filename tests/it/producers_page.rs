//! The page for producers: its SQL, JavaScript and Python blocks return what the page shows.

use std::fs;
use std::process::Command;

use rouse::worker::Settings;

use crate::commands::run;
use crate::support::libraries::{Libraries, NPM, PIP};
use crate::support::page::{blocks, run_sql};
use crate::support::worker::{TestWorker, until_true, watched};
use crate::support::{CommandOutput, TestDb, scratch, skip};

const PAGE: &str = "docs/guides/producers.md";

/// True once no job of the page's blocks is live.
const DONE: &str = "SELECT NOT EXISTS (SELECT FROM rouse.jobs WHERE handler = 'text.stats' AND finished_at IS NULL)";

#[tokio::test]
async fn the_sql_on_the_page_for_producers_returns_what_the_page_shows() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, folder) = watched(&["text_stats.wasm"]).await;
    let handlers = folder.path().to_str().unwrap();
    let (code, output) = run(&db, &["contract", "publish", "--handlers", handlers]);
    assert_eq!(code, 0, "{output}");
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
async fn a_trigger_without_privileges_fails_as_the_page_describes() {
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
        let error = client.simple_query(call).await.unwrap_err();
        assert_eq!(error.as_db_error().unwrap().message(), message);
        let page = blocks(PAGE);
        let prose: String = page.iter().map(|block| block.before.as_str()).collect();
        assert!(prose.contains(message), "{message}");
    }
}

/// A language of blocks on the page.
struct Language {
    libraries: Libraries,
    /// The word after the backticks of its blocks.
    kind: &'static str,
    extension: &'static str,
    /// The interpreter; a path below the installed folder, or on PATH.
    interpreter: &'static str,
    /// The expected output of each block of the page, in order: a part of the text, and the number of its jobs.
    prints: &'static [(&'static str, i64)],
}

const NODE: Language = Language {
    libraries: Libraries {
        folder: "producers-page/node",
        lock: "package-lock.json",
        install: NPM,
    },
    kind: "js",
    extension: "cjs",
    interpreter: "node",
    prints: &[(" succeeded ", 1), ("[ '", 2)],
};

const PYTHON: Language = Language {
    libraries: Libraries {
        folder: "producers-page/python",
        lock: "requirements.txt",
        install: PIP,
    },
    kind: "python",
    extension: "py",
    interpreter: "venv/bin/python",
    prints: &[(" succeeded ", 1), ("[", 2), (" ", 2)],
};

/// Runs each block of the language as a program of its own, and checks its output and its jobs.
async fn run_blocks(language: &Language) {
    let libraries = match language.libraries.installed() {
        Ok(libraries) => libraries,
        Err(why) => {
            skip(&format!(
                "no libraries for the {} blocks of {PAGE}: {why}",
                language.kind
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
        let ran = tokio::task::spawn_blocking(move || CommandOutput::run(&mut command));
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
