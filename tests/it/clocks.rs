//! A host whose own clock is wrong: the database's clock decides.

use std::path::Path;

use serde_json::json;

use crate::support::worker::{
    TIMEOUT, ended, enqueue, enqueue_sql, events, guests_dir, until_true,
};
use crate::support::{Host, TestDb, rouse, scratch, skip};

/// Debian's `faketime`, which CI installs.
const FAKETIME: &str = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1";

/// Starts a host whose wall clock is off by this much.
fn serve(db: &TestDb, off_by: &str) -> Host {
    let config = scratch("clocks").join("rouse.toml");
    std::fs::write(&config, "[handlers.\"test.*\"]\nlease = \"20s\"\n").unwrap();
    let mut command = rouse();
    command
        .args(["serve", "--http", "off"])
        .args(["--handlers".as_ref(), guests_dir().as_os_str()])
        .args(["--config".as_ref(), config.as_os_str()])
        .env("DATABASE_URL", db.url())
        .env("ROUSE_LOG", "info")
        .env("LD_PRELOAD", FAKETIME)
        .env("FAKETIME", off_by)
        // The clock that counts durations cannot be set, so it is not faked.
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let host = Host::spawn(command);
    host.line(TIMEOUT, |line| line.contains("worker started"));
    host
}

#[tokio::test]
async fn a_host_whose_clock_is_off_by_a_day_starts_nothing_early_and_loses_nothing() {
    if !Path::new(FAKETIME).is_file() {
        skip("there is no libfaketime on this machine (apt-get install faketime)");
        return;
    }
    let mut hosts = Vec::new();
    for off_by in ["-1d", "+1d"] {
        let db = TestDb::new().await;
        let client = db.client().await;
        let in_an_hour = enqueue_sql(
            &client,
            "'test.echo', '{}', run_at => now() + interval '1 hour'",
        )
        .await;
        let row = client
            .query_one(
                "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint + 1500, current_date::text",
                &[],
            )
            .await
            .unwrap();
        let (again_ms, today): (i64, String) = (row.get(0), row.get(1));
        let again = enqueue(&client, "test.retry-at", json!({ "unix_ms": again_ms })).await;
        // Longer than its lease, which has to be renewed after 8 s.
        let long = enqueue(&client, "test.sleep", json!({ "ms": 21_000 })).await;
        let host = serve(&db, off_by);
        let line = host.line(TIMEOUT, |line| line.contains("worker started"));
        assert!(!line.starts_with(&today), "its clock is wrong: {line}");
        hosts.push((db, client, host, [in_an_hour, again, long], again_ms));
    }
    for (_db, client, host, [in_an_hour, again, long], again_ms) in hosts {
        assert_eq!(ended(&client, long).await.attempt, 1, "renewed in time");
        let job = ended(&client, again).await;
        assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 2));
        let early = "SELECT at >= to_timestamp($2::float8 / 1000) FROM rouse.history($1) WHERE event = 'started' AND attempt = 2";
        let row = client
            .query_one(early, &[&again, &(again_ms as f64)])
            .await
            .unwrap();
        assert!(row.get::<_, bool>(0), "a retry started early");
        assert_eq!(events(&client, in_an_hour).await, ["requested"]);
        // The host does not use its own time for anything that it writes, and it is not declared dead.
        until_true(
            &client,
            "SELECT count(*) = 1 AND bool_and(state = 'active' AND seen_at BETWEEN now() - interval '1 minute' AND now()) FROM rouse.workers",
        )
        .await;
        host.kill();
    }
}
