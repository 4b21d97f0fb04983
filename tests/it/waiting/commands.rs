//! `rouse job ID --wait` and `rouse chain ID --wait`.

use serde_json::json;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use crate::support::worker::{cancel, enqueue, forget, until_true};
use crate::support::{CommandOutput, TestDb, command, rouse_in, scratch};

/// Starts a command; returns once it has sent a statement that contains these words.
async fn start(
    db: &TestDb,
    client: &Client,
    args: &[&str],
    words: &str,
) -> JoinHandle<CommandOutput> {
    let mut command = command(&db.url(), args, &scratch("waiting"));
    let running = tokio::task::spawn_blocking(move || CommandOutput::run(&mut command));
    let sent = format!(
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%{words}%' AND pid <> pg_backend_pid())"
    );
    until_true(client, &sent).await;
    running
}

#[tokio::test]
async fn the_exit_code_of_a_wait_for_a_job_shows_how_the_job_has_ended() {
    let (db, folder) = (TestDb::new().await, scratch("waiting"));
    let client = db.client().await;
    for (end, code, printed) in [
        ("complete({}, '7')", 0, "succeeded"),
        ("fail({}, 'why')", 4, "why"),
        ("cancel({})", 7, "cancelled"),
    ] {
        let id = enqueue(&client, "x", json!(1)).await.to_string();
        let waiting = start(&db, &client, &["job", &id, "--wait"], "rouse.outcomes").await;
        let end = format!("SELECT rouse.{}", end.replace("{}", &id));
        client.batch_execute(&end).await.unwrap();
        waiting.await.unwrap().exits(code).prints(printed);
        rouse_in(&db, &["job", &id], &folder).await.exits(0);
    }
    let id = enqueue(&client, "x", json!(1)).await.to_string();
    rouse_in(&db, &["job", &id, "--wait", "--timeout", "50ms"], &folder)
        .await
        .exits(5)
        .prints("has not ended within 50ms");
    rouse_in(&db, &["job", "99", "--wait"], &folder)
        .await
        .exits(3);
}

#[tokio::test]
async fn a_wait_for_a_chain_continues_with_the_retry_of_its_last_job() {
    let (db, folder) = (TestDb::new().await, scratch("waiting"));
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let chain = id.to_string();
    client
        .execute("SELECT rouse.fail($1, 'why')", &[&id])
        .await
        .unwrap();
    rouse_in(&db, &["chain", &chain, "--wait"], &folder)
        .await
        .exits(4)
        .prints("error")
        .prints("why");
    let retry: i64 = client
        .query_one("SELECT rouse.retry($1)", &[&id])
        .await
        .unwrap()
        .get(0);
    let args = ["chain", &chain, "--wait", "--json"];
    let waiting = start(&db, &client, &args, "rouse.chain").await;
    client
        .execute(
            "SELECT rouse.complete($1, '12345678901234567890')",
            &[&retry],
        )
        .await
        .unwrap();
    let waited = waiting.await.unwrap();
    let shown = waited.exits(0).json();
    assert_eq!(
        (&shown["chain"], &shown["state"], &shown["error"]),
        (&json!(id), &json!("succeeded"), &json!(null))
    );
    let jobs: Vec<_> = shown["jobs"].as_array().unwrap().iter().collect();
    assert_eq!(
        jobs.iter()
            .map(|job| job["job"].as_i64().unwrap())
            .collect::<Vec<_>>(),
        [id, retry]
    );
    // Any job of the chain identifies it.
    let shown = rouse_in(&db, &["chain", &retry.to_string()], &folder).await;
    let lines: Vec<&str> = shown.exits(0).stdout.lines().collect();
    assert_eq!(lines[0], format!("chain {id}: succeeded"));
    shown.prints("failed").prints("12345678901234567890");
}

/// Failed jobs may be kept for longer than others.
#[tokio::test]
async fn a_chain_whose_last_job_is_no_longer_kept_is_not_shown_as_failed() {
    let (db, folder) = (TestDb::new().await, scratch("waiting"));
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let fail = "SELECT rouse.fail($1, 'why')";
    client.execute(fail, &[&id]).await.unwrap();
    let retry = "SELECT rouse.retry($1)";
    let retry: i64 = client.query_one(retry, &[&id]).await.unwrap().get(0);
    let complete = "SELECT rouse.complete($1)";
    client.execute(complete, &[&retry]).await.unwrap();
    forget(&client, retry).await;
    let chain = id.to_string();
    rouse_in(&db, &["chain", &chain, "--wait"], &folder)
        .await
        .exits(3)
        .prints("its last job is no longer kept");
    let shown = rouse_in(&db, &["chain", &chain, "--json"], &folder).await;
    let shown = shown.exits(0).json();
    assert_eq!(
        (&shown["chain"], &shown["state"], &shown["error"]),
        (&json!(id), &json!(null), &json!(null))
    );
}

#[tokio::test]
async fn a_wait_for_a_chain_that_does_not_end_or_exist_or_is_cancelled_says_so() {
    let (db, folder) = (TestDb::new().await, scratch("waiting"));
    let client = db.client().await;
    let id = enqueue(&client, "x", json!(1)).await;
    let chain = id.to_string();
    rouse_in(&db, &["chain", &chain], &folder)
        .await
        .exits(0)
        .prints("queued");
    let args = ["chain", &chain, "--wait", "--timeout", "50ms"];
    rouse_in(&db, &args, &folder)
        .await
        .exits(5)
        .prints("has not ended within 50ms");
    cancel(&client, id).await;
    rouse_in(&db, &["chain", &chain, "--wait"], &folder)
        .await
        .exits(7);
    rouse_in(&db, &["chain", "99"], &folder)
        .await
        .exits(3)
        .prints("no job 99");
    rouse_in(&db, &["chain", &chain, "--timeout", "1s"], &folder)
        .await
        .exits(2)
        .prints("--wait");
}
