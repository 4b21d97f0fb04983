//! Tests of the test harness itself.

use std::process::Command;

use crate::support::worker::TIMEOUT;
use crate::support::{Host, TestDb, database::connect, postgres_major, skip};

#[tokio::test]
async fn each_test_has_a_database_of_its_own() {
    let (one, other) = (TestDb::new().await, TestDb::new().await);
    let client = one.client().await;
    client.batch_execute("CREATE TABLE mine ()").await.unwrap();
    let found = "SELECT count(*) FROM pg_tables WHERE tablename = 'mine'";
    let row = other.client().await.query_one(found, &[]).await.unwrap();
    assert_eq!(row.get::<_, i64>(0), 0);
}

#[tokio::test]
async fn a_database_is_dropped_after_its_test_even_if_a_connection_is_open() {
    let watcher = TestDb::unmigrated().await;
    let client = watcher.client().await;
    let dropped = TestDb::unmigrated().await;
    let left_open = dropped.client().await;
    let name: String = left_open
        .query_one("SELECT current_database()::text", &[])
        .await
        .unwrap()
        .get(0);
    drop(dropped);
    // The janitor's DROP may have ended, may be under way, or may not have started yet.
    let still_there = "SELECT FROM pg_database WHERE datname = $1";
    let gone = async {
        while client
            .query_opt(still_there, &[&name])
            .await
            .unwrap()
            .is_some()
        {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIMEOUT, gone).await.unwrap();
}

#[test]
fn the_harness_reads_lines_of_a_child_signals_it_and_waits_for_its_exit() {
    let mut command = Command::new("sh");
    command.args([
        "-c",
        "trap 'echo signalled >&2; exit 7' TERM; echo ready; while :; do sleep 0.01; done",
    ]);
    let host = Host::spawn(command);
    host.line(TIMEOUT, |line| line == "ready");
    host.signal(libc::SIGTERM);
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(7));
    assert!(output.contains("signalled"), "{output}");
}

#[tokio::test]
async fn a_connection_string_of_the_harness_works_with_psql() {
    let db = TestDb::unmigrated().await;
    connect(&db.url())
        .await
        .batch_execute("SELECT 1")
        .await
        .unwrap();
    let Ok(output) = Command::new("psql")
        .args([&db.url(), "-XAtc", "SELECT current_user"])
        .output()
    else {
        skip("there is no psql on this machine (apt-get install postgresql-client)");
        return;
    };
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "rouse\n",
        "{output:?}"
    );
}

#[tokio::test]
async fn the_server_has_the_requested_version() {
    // Kept until the end: dropping it drops the database, which ends the session of `client`.
    let db = TestDb::unmigrated().await;
    let client = db.client().await;
    let row = client.query_one("SHOW server_version_num", &[]).await;
    let version: u32 = row.unwrap().get::<_, &str>(0).parse().unwrap();
    let major = (version / 10_000).to_string();
    assert_eq!(postgres_major().unwrap_or(major.clone()), major);
}
