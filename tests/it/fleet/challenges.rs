//! Challenges: a worker proves which modules it has.

use std::sync::Arc;

use rouse::sandbox::{Catalog, Digest};
use rouse::worker::Settings;
use serde_json::json;

use super::named;
use crate::support::worker::{TestWorker, guests_dir, sandbox, until_true, watched};
use crate::support::{TestDb, run_rouse};

#[tokio::test]
async fn a_worker_proves_the_handlers_it_has_and_reports_those_it_lacks() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let worker = TestWorker::start(&db, named("mail-1")).await;
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;

    let proven = run_rouse(&db, &["workers", "verify", "mail-1", "test.echo", "--json"]).await;
    proven.exits(0);
    let proven = proven.json();
    let bytes = std::fs::read(guests_dir().join("test_guests.wasm")).unwrap();
    let digest = Digest::compute(&bytes).to_string();
    assert_eq!(proven["answer"]["has"], true);
    assert_eq!(proven["answer"]["version"], "9.8.7");
    assert_eq!(proven["answer"]["sha256"], digest);
    assert_eq!(proven["verdict"], "claims");
    run_rouse(&db, &["workers", "verify", "mail-1", "noop"])
        .await
        .exits(0)
        .prints("worker mail-1 claims that it can run noop");
    let module = guests_dir().join("test_guests.wasm");
    let verify = |handler| {
        let args = ["workers", "verify", "mail-1", handler, "--module"];
        [args.as_slice(), &[module.to_str().unwrap()]].concat()
    };
    run_rouse(&db, &verify("test.echo"))
        .await
        .exits(0)
        .prints(&format!(
            "worker mail-1 proves that it has the module of test.echo 9.8.7, sha256 {digest}"
        ));
    run_rouse(&db, &verify("noop"))
        .await
        .exits(4)
        .prints("worker mail-1 has another module: sha256 ");

    let cannot = run_rouse(&db, &["workers", "verify", "mail-1", "no.such"]).await;
    cannot
        .exits(4)
        .prints("worker mail-1 cannot run the handler: the worker does not have this handler");
    let cannot = run_rouse(&db, &["workers", "verify", "mail-1", "no.such", "--json"]).await;
    cannot.exits(4);
    let why = &cannot.json()["why"];
    assert_eq!(
        *why,
        "cannot run the handler: the worker does not have this handler"
    );
    let unknown = run_rouse(&db, &["workers", "verify", "nobody", "noop"]).await;
    unknown.exits(3).prints("no worker nobody is alive");
    worker.drain().await;
}

/// A worker made with SQL: it knows the digest of its module's file, and does not have the file.
#[tokio::test]
async fn a_worker_without_the_module_cannot_prove_that_it_has_it() {
    let db = TestDb::new().await;
    let fake = db.worker().await;
    let module = guests_dir().join("test_guests.wasm");
    let digest = Digest::compute(&std::fs::read(&module).unwrap()).to_string();
    let module = module.to_str().unwrap();
    let args = ["workers", "verify", "w-1", "test.echo", "--module", module];
    let known = json!({"has": true, "version": "9.8.7", "sha256": digest});
    let of_another_nonce = Digest::proof("another nonce", &std::fs::read(module).unwrap());
    for (more, expected) in [
        (
            json!({}),
            "does not prove that it has the module: no reason given",
        ),
        (
            json!({"proof": of_another_nonce.to_string()}),
            "its proof does not match the file",
        ),
        (
            json!({"unproven": "its file was removed"}),
            "does not prove that it has the module: its file was removed",
        ),
    ] {
        let answer = async {
            let challenge = loop {
                if let Some(challenge) = fake.challenges().await.unwrap().pop() {
                    break challenge;
                }
            };
            let mut answer = known.clone();
            answer
                .as_object_mut()
                .unwrap()
                .extend(more.as_object().unwrap().clone());
            fake.answer_challenge(&challenge.nonce, &answer)
                .await
                .unwrap();
        };
        let (ran, ()) = tokio::join!(run_rouse(&db, &args), answer);
        ran.exits(4).prints(expected);
    }
}

#[tokio::test]
async fn a_worker_whose_file_changed_or_vanished_reports_that_it_cannot_answer() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = tempfile::tempdir().unwrap();
    let (noop, served) = (
        guests_dir().join("noop.wasm"),
        folder.path().join("noop.wasm"),
    );
    std::fs::copy(&noop, &served).unwrap();
    // The folder is not watched, so the handler stays as it is.
    let catalog = Catalog::open(sandbox(), folder.path()).await.unwrap();
    let worker = TestWorker::start_on(&db, named("mail-1"), Arc::new(catalog));
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;
    let args = [
        "workers",
        "verify",
        "mail-1",
        "noop",
        "--module",
        noop.to_str().unwrap(),
    ];
    run_rouse(&db, &args)
        .await
        .exits(0)
        .prints("proves that it has the module of noop");
    std::fs::write(&served, "a newer file that is not a module").unwrap();
    let changed = "worker mail-1 does not prove that it has the module: its file has changed since it was loaded";
    run_rouse(&db, &args).await.exits(4).prints(changed);
    std::fs::remove_file(&served).unwrap();
    run_rouse(&db, &args)
        .await
        .exits(4)
        .prints("its file was removed");
    // A pipe to which nothing writes.
    let made = std::process::Command::new("mkfifo").arg(&served).status();
    assert!(made.expect("the system has mkfifo").success());
    let no_file = "it cannot be read: it is not a regular file";
    run_rouse(&db, &args).await.exits(4).prints(no_file);
    let args = ["workers", "verify", "mail-1", "noop", "--module", "no.wasm"];
    run_rouse(&db, &args)
        .await
        .exits(1)
        .prints("read the module no.wasm");
    worker.drain().await;
}

#[tokio::test]
async fn a_challenge_is_answered_once_by_its_worker_and_silence_is_reported() {
    let db = TestDb::new().await;
    let (challenged, other) = (db.worker().await, db.worker().await);
    let nonce = challenged.challenge("w-1", "noop").await.unwrap();
    assert_eq!(challenged.challenges().await.unwrap()[0].handler, "noop");
    assert!(other.challenges().await.unwrap().is_empty());
    let answer = json!({"has": true});
    assert!(!other.answer_challenge(&nonce, &answer).await.unwrap());
    assert_eq!(challenged.challenge_answer(&nonce).await.unwrap(), None);
    assert!(challenged.answer_challenge(&nonce, &answer).await.unwrap());
    let again = json!({"has": false});
    assert!(!challenged.answer_challenge(&nonce, &again).await.unwrap());
    assert_eq!(
        challenged.challenge_answer(&nonce).await.unwrap(),
        Some(answer)
    );

    // The worker is registered, but does not respond.
    let args = ["workers", "verify", "w-2", "noop", "--timeout", "300ms"];
    let silent = run_rouse(&db, &args).await;
    silent
        .exits(5)
        .prints("worker w-2 did not answer within 300ms");
}

#[tokio::test]
async fn a_worker_has_at_most_a_hundred_open_challenges() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (worker, other) = (db.worker().await, db.worker().await);
    let mut nonces = Vec::new();
    for _ in 0..100 {
        nonces.push(worker.challenge("w-1", "noop").await.unwrap());
    }
    let refused = worker.challenge("w-1", "noop").await.unwrap_err();
    assert!(refused.is_refused_by_state(), "{refused}");
    run_rouse(&db, &["workers", "verify", "w-1", "noop"])
        .await
        .exits(6)
        .prints("worker w-1 has 100 unanswered challenges of the last 10 minutes");
    // Other workers can be challenged, and so can this one once it has answered.
    other.challenge("w-2", "noop").await.unwrap();
    let answer = json!({"has": true});
    assert!(worker.answer_challenge(&nonces[0], &answer).await.unwrap());
    worker.challenge("w-1", "noop").await.unwrap();
    // Challenges that have expired for the worker do not count.
    client
        .batch_execute("UPDATE rouse.challenge SET asked_at = now() - interval '11 minutes'")
        .await
        .unwrap();
    worker.challenge("w-1", "noop").await.unwrap();
}

#[tokio::test]
async fn new_challenges_remove_old_ones_without_waiting_for_locked_rows() {
    let db = TestDb::new().await;
    let (client, mut holder) = (db.client().await, db.client().await);
    let worker = db.worker().await;
    client
        .batch_execute(
            "INSERT INTO rouse.challenge (worker, handler, asked_at)
             SELECT 1, 'noop', now() - interval '1 day' - n * interval '1 second' FROM generate_series(1, 150) AS n",
        )
        .await
        .unwrap();
    let held = holder.transaction().await.unwrap();
    held.execute(
        "SELECT FROM rouse.challenge ORDER BY asked_at LIMIT 10 FOR UPDATE",
        &[],
    )
    .await
    .unwrap();
    let left = async || {
        worker.challenge("w-1", "noop").await.unwrap();
        let sql = "SELECT count(*) FROM rouse.challenge WHERE asked_at < now() - interval '1 hour'";
        client.query_one(sql, &[]).await.unwrap().get::<_, i64>(0)
    };
    assert_eq!(left().await, 50);
    assert_eq!(left().await, 10, "the locked ones remain");
    held.rollback().await.unwrap();
    assert_eq!(left().await, 0);
}

#[tokio::test]
async fn a_worker_without_notifications_answers_with_its_next_heartbeat() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let (catalog, folder) = watched(&["noop.wasm"]).await;
    let settings = Settings {
        notify: false,
        ..named("polling")
    };
    let worker = TestWorker::start_on(&db, settings, catalog);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.workers)").await;
    let store = db.store();
    let nonce = store.challenge("polling", "noop").await.unwrap();
    // A change to its handlers is reported by a heartbeat at once.
    std::fs::copy(
        guests_dir().join("text_stats.wasm"),
        folder.path().join("text_stats.wasm"),
    )
    .unwrap();
    let answered = format!("SELECT rouse.challenge_answer('{nonce}') IS NOT NULL");
    until_true(&client, &answered).await;
    worker.drain().await;
}
