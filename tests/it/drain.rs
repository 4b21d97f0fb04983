//! `rouse queue drain`: a worker that empties one queue and exits.

use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::json;

use crate::support::held_up::{IS_HELD_UP, hold_up, hold_up_ends};
use crate::support::proxy::{ECHO, Proxy, Side};
use crate::support::worker::{
    TIMEOUT, cancel, ended, enqueue, enqueue_sql, events, show, until, until_true,
};
use crate::support::{Host, TestDb, command, cut_all_others, folder, rouse_binary, rouse_in};

#[tokio::test]
async fn a_drain_empties_its_queue_and_does_not_touch_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    // The worker id in the file is that of a host that may be alive.
    let folder = folder(
        "worker_id = \"mail-1\"\n[sources]\nlegacy = \"text.stats\"\n",
        &["noop.wasm", "text_stats.wasm"],
    );
    let nothing = rouse_in(
        &db,
        &["queue", "drain", "mail", "--handlers", "/nowhere"],
        &folder,
    )
    .await;
    nothing
        .exits(0)
        .prints("queue mail: 0 succeeded, 0 failed")
        .prints("nothing was enqueued recently into queue mail; is its name correct?");
    client
        .query(
            "SELECT count(*) FROM (SELECT rouse.enqueue_many('noop', array_agg(jsonb_build_object('n', n)), queue => 'mail') FROM generate_series(1, 300) AS n) AS q",
            &[],
        )
        .await
        .unwrap();
    let bound = enqueue_sql(
        &client,
        "'noop', '{\"text\": \"one two\"}', queue => 'mail', source => 'legacy'",
    )
    .await;
    let later = enqueue_sql(
        &client,
        "'noop', '{\"n\": 1}', queue => 'mail', run_at => now() + interval '1 hour'",
    )
    .await;
    let other = enqueue_sql(&client, "'noop', '{\"n\": 1}', queue => 'other'").await;

    let ran = rouse_in(&db, &["queue", "drain", "mail", "--json"], &folder).await;
    ran.exits(0);
    let summary = ran.json();
    assert_eq!(summary["succeeded"], 301);
    assert_eq!(
        (&summary["failed"], &summary["retried"]),
        (&json!(0), &json!(0))
    );
    assert_eq!(summary["left"][0]["scheduled"], 1, "{summary}");
    assert_ne!(summary["worker_id"], "mail-1");
    assert_eq!(
        ended(&client, bound).await.result.unwrap()["words"],
        2,
        "by the bound handler"
    );
    for id in [later, other] {
        assert_eq!(events(&client, id).await, ["requested"]);
    }
    until_true(
        &client,
        "SELECT count(*) = 1 AND bool_and(state = 'unregistered') FROM rouse.workers",
    )
    .await;
}

#[tokio::test]
async fn a_drain_shows_a_progress_bar_on_a_terminal_and_clears_it_at_the_end() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 2\n", &["test_guests.wasm"]);
    client
        .query(
            "SELECT rouse.enqueue_many('test.sleep', array_fill('{\"ms\": 100}'::jsonb, ARRAY[20]), queue => 'mail')",
            &[],
        )
        .await
        .unwrap();
    let drain = format!("{} queue drain mail", rouse_binary().display());
    // A terminal of its own, created with `script` (util-linux).
    let mut script = Command::new("script");
    script
        .args(["--quiet", "--return", "--command", &drain, "/dev/null"])
        .env("DATABASE_URL", db.url())
        .env("TERM", "xterm")
        .current_dir(&folder)
        .stdin(Stdio::null());
    let ran = tokio::task::spawn_blocking(move || script.output())
        .await
        .unwrap()
        .unwrap();
    let shown = String::from_utf8(ran.stdout).unwrap();
    assert!(ran.status.success(), "{shown}");
    let (bar, rest) = shown
        .rsplit_once("\u{1b}[2K")
        .unwrap_or_else(|| panic!("no line was cleared: {shown:?}"));
    assert!(
        bar.contains("mail ") && bar.contains(" done, 0 failed, ") && bar.contains(" left"),
        "{shown:?}"
    );
    assert!(!rest.contains(" left"), "{shown:?}");
    assert!(
        rest.contains("queue mail: 20 succeeded, 0 failed"),
        "{shown:?}"
    );
}

#[tokio::test]
async fn a_drain_reports_failed_jobs_and_jobs_it_cannot_run() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["noop.wasm", "test_guests.wasm"]);
    enqueue_sql(&client, "'noop', '{\"n\": 1}'").await;
    let unknown = enqueue_sql(&client, "'no.such'").await;
    enqueue_sql(&client, "'noop', '{\"n\": 1}', tags => '{gpu}'").await;
    let ran = rouse_in(&db, &["queue", "drain", "default"], &folder).await;
    ran.exits(3)
        .prints("queue default: 1 succeeded, 0 failed")
        .prints("left: no.such: 1 ready; the folder has no such handler")
        .prints("left: noop: 1 ready; they require the tags gpu");
    assert_eq!(events(&client, unknown).await, ["requested"]);

    enqueue_sql(&client, "'test.fail', '{\"as\": \"permanent\"}'").await;
    enqueue_sql(&client, "'test.fail', '{\"as\": \"retry-after\"}'").await;
    let ran = rouse_in(&db, &["queue", "drain", "default", "--json"], &folder).await;
    // Failures are printed at once; successes are not.
    ran.exits(1).prints("WARN").prints("hopeless");
    assert!(!ran.stderr.contains("INFO"), "{}", ran.stderr);
    let summary = ran.json();
    assert_eq!(
        (&summary["failed"], &summary["retried"]),
        (&json!(1), &json!(1))
    );
    let waiting = |left: &serde_json::Value| left["handler"] == "test.fail" && left["retries"] == 1;
    assert!(summary["left"].as_array().unwrap().iter().any(waiting));
}

#[tokio::test]
async fn a_drain_continues_when_its_standard_error_cannot_be_written() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["test_guests.wasm"]);
    // A line of progress is due after five seconds.
    let id = enqueue(&client, "test.sleep", json!({"ms": 7000})).await;
    let mut drain = command(&db.url(), &["queue", "drain", "default", "--json"], &folder);
    let full = std::fs::File::options().write(true).open("/dev/full");
    drain.stderr(full.unwrap());
    let ran = tokio::task::spawn_blocking(move || drain.output());
    let ran = ran.await.unwrap().unwrap();
    let summary = String::from_utf8(ran.stdout).unwrap();
    assert_eq!(ran.status.code(), Some(0), "{summary}");
    assert!(summary.contains("\"succeeded\":1"), "{summary}");
    assert_eq!(ended(&client, id).await.attempt, 1);
    until_true(
        &client,
        "SELECT count(*) = 1 AND bool_and(state = 'unregistered') FROM rouse.workers",
    )
    .await;
}

#[tokio::test]
async fn a_drain_finds_due_jobs_among_ten_thousand_waiting_ones() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["noop.wasm"]);
    client
        .batch_execute(
            "SELECT rouse.enqueue_many('noop', array_agg(jsonb_build_object('n', n)), queue => 'mail') FROM generate_series(1, 10200) AS n;
             UPDATE rouse.job SET turn = NULL, available_at = now() + interval '1 hour';
             UPDATE rouse.job SET available_at = now() - interval '1 second' WHERE id > (SELECT max(id) - 3 FROM rouse.job)",
        )
        .await
        .unwrap();
    let ran = rouse_in(&db, &["queue", "drain", "mail", "--json"], &folder).await;
    ran.exits(0);
    let summary = ran.json();
    assert_eq!(summary["succeeded"], 3, "{summary}");
    assert_eq!(summary["left"][0]["at_least"], true, "{summary}");
    assert_eq!(summary["left"][0]["ready"], 0, "{summary}");
}

#[tokio::test]
async fn a_job_that_fails_once_and_then_succeeds_within_the_drain_counts_as_succeeded() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["test_guests.wasm"]);
    // The first job keeps the drain running until the second has been tried again.
    let busy = enqueue(&client, "test.race", json!({"ms": 600_000})).await;
    let flaky = enqueue(&client, "test.flaky", json!({"fail_until": 2})).await;
    let drain = Host::spawn(command(
        &db.url(),
        &["queue", "drain", "default", "--json"],
        &folder,
    ));
    assert_eq!(ended(&client, flaky).await.attempt, 3);
    cancel(&client, busy).await;
    let (status, output) = drain.exit(TIMEOUT);
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(
        output.contains("\"retried\":2") && output.contains("\"failed\":0"),
        "{output}"
    );
}

#[tokio::test]
async fn a_drain_refuses_to_start_with_a_source_bound_to_a_missing_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("[sources]\nlegacy = \"text.stats\"\n", &["noop.wasm"]);
    let id = enqueue_sql(&client, "'noop', '{\"n\": 1}', source => 'legacy'").await;
    let ran = rouse_in(&db, &["queue", "drain", "default"], &folder).await;
    ran.exits(7).prints("legacy = text.stats");
    assert_eq!(events(&client, id).await, ["requested"]);
}

#[tokio::test]
async fn an_error_at_the_end_of_a_drain_does_not_hide_its_summary() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["noop.wasm"]);
    // The jobs cannot end before the function is gone.
    let other = hold_up_ends(&db, &client, "true").await;
    for n in 1..=2 {
        enqueue(&client, "noop", json!({"n": n})).await;
    }
    let drain = Host::spawn(command(
        &db.url(),
        &["queue", "drain", "default", "--json"],
        &folder,
    ));
    until_true(&client, IS_HELD_UP).await;
    client
        .batch_execute("ALTER FUNCTION rouse.remaining RENAME TO gone")
        .await
        .unwrap();
    other.batch_execute("COMMIT").await.unwrap();
    let (status, output) = drain.exit(TIMEOUT);
    assert_eq!(status.code(), Some(7), "{output}");
    assert!(output.contains("\"succeeded\":2"), "{output}");
    assert!(
        output.contains("rouse: count the jobs that are left"),
        "{output}"
    );
}

#[tokio::test]
async fn a_drain_leases_its_claims_for_five_minutes_by_default() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder(
        "[handlers.\"test.*\"]\nlease = \"10s\"\n",
        &["test_guests.wasm"],
    );
    for (more, secs) in [(&[][..], 300), (&["--lease", "20m"], 1200)] {
        let id = enqueue(&client, "test.race", json!({"ms": 60_000})).await;
        let mut args = vec!["queue", "drain", "default"];
        args.extend(more);
        let drain = Host::spawn(command(&db.url(), &args, &folder));
        until(&client, id, |job| job.state == "running").await;
        // The drain renews the lease when it starts to listen.
        let lease = "SELECT extract(epoch FROM j.lease_until - greatest(j.claimed_at, (
                         SELECT max(r.at) FROM rouse.record AS r WHERE r.job = j.id AND r.event = 'renewed')))::float8
                     FROM rouse.job AS j";
        let lease: f64 = client.query_one(lease, &[]).await.unwrap().get(0);
        assert!((lease - f64::from(secs)).abs() < 1.0, "{lease}");
        // An admin action ends the job, after which the queue is empty.
        cancel(&client, id).await;
        let (status, output) = drain.exit(TIMEOUT);
        assert_eq!(status.code(), Some(0), "{output}");
    }
}

#[tokio::test]
async fn a_paused_queue_is_not_drained_and_a_pause_ends_a_running_drain() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 1\n", &["noop.wasm", "test_guests.wasm"]);
    let running = enqueue(&client, "test.race", json!({"ms": 600_000})).await;
    let drain = Host::spawn(command(&db.url(), &["queue", "drain", "default"], &folder));
    until(&client, running, |job| job.state == "running").await;
    client
        .query_one("SELECT rouse.pause_queue('default')", &[])
        .await
        .unwrap();
    let waiting = enqueue_sql(&client, "'noop', '{\"n\": 1}'").await;
    assert!(cancel(&client, running).await, "cancelled by this call");
    assert_eq!(ended(&client, running).await.state, "cancelled");
    let (status, output) = drain.exit(TIMEOUT);
    assert_eq!(status.code(), Some(6), "{output}");
    assert!(
        output.contains("queue default has been paused since"),
        "{output}"
    );
    assert_eq!(events(&client, waiting).await, ["requested"]);
    let ran = rouse_in(&db, &["queue", "drain", "default"], &folder).await;
    ran.exits(6).prints("rouse queue resume default");
}

/// The drain's leases last five minutes, so a renewal would come after two.
#[tokio::test]
async fn a_cancellation_before_the_drain_has_received_its_echo_ends_the_attempt_at_once() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 1\n", &["test_guests.wasm"]);
    let id = enqueue(&client, "test.race", json!({"ms": 600_000})).await;
    let proxy = Proxy::start(&db).await;
    let echo = proxy.hold(ECHO, Side::Statement);
    let args = ["queue", "drain", "default"];
    let drain = Host::spawn(command(proxy.url(), &args, &folder));
    echo.caught().await;
    until(&client, id, |job| job.state == "running").await;
    assert!(cancel(&client, id).await, "cancelled by this call");
    echo.release();
    // The proxy runs on this thread.
    let (status, output) = tokio::task::spawn_blocking(move || drain.exit(TIMEOUT))
        .await
        .unwrap();
    assert_eq!(status.code(), Some(0), "{output}");
    assert_eq!(show(&client, id).await.state, "cancelled");
}

#[tokio::test]
async fn a_signal_ends_a_drain_after_its_running_attempts_and_leaves_the_rest() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("slots = 1\n", &["noop.wasm", "test_guests.wasm"]);
    // The attempt waits until its first step is recorded.
    let other = hold_up(&db, &client, "rouse.step", "true").await;
    let running = enqueue(&client, "test.steps", json!({"between": "nothing"})).await;
    let mut command = command(&db.url(), &["queue", "drain", "default", "--json"], &folder);
    command.env("ROUSE_LOG", "info");
    let drain = Host::spawn(command);
    // A job that is claimed but not started would be released.
    until_true(&client, IS_HELD_UP).await;
    drain.signal(libc::SIGTERM);
    drain.line(TIMEOUT, |line| line.contains("stopping: "));
    let left = enqueue_sql(&client, "'noop', '{\"n\": 1}'").await;
    other.batch_execute("COMMIT").await.unwrap();
    let (status, output) = drain.exit(TIMEOUT);
    assert_eq!(status.code(), Some(130), "{output}");
    assert_eq!(ended(&client, running).await.state, "succeeded");
    assert_eq!(events(&client, left).await, ["requested"]);
    assert!(output.contains("\"interrupted\":true"), "{output}");
}

#[tokio::test]
async fn a_drain_continues_when_its_connections_are_cut() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("", &["test_guests.wasm"]);
    let running = enqueue(&client, "test.race", json!({"ms": 2000})).await;
    let drain = Host::spawn(command(
        &db.url(),
        &["queue", "drain", "default", "--json"],
        &folder,
    ));
    until(&client, running, |job| job.state == "running").await;
    cut_all_others(&client).await;
    let (status, output) = drain.exit(Duration::from_secs(120));
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(output.contains("\"succeeded\":1"), "{output}");
}

#[tokio::test]
async fn a_drain_runs_its_bound_sources_and_reports_the_remaining_jobs_of_their_handler() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let folder = folder("[sources]\nlegacy = \"noop\"\n", &["noop.wasm"]);
    for _ in 0..3 {
        enqueue_sql(&client, "'producers.own', '{\"n\": 1}', source => 'legacy'").await;
    }
    enqueue_sql(
        &client,
        "'producers.own', '{\"n\": 1}', source => 'legacy', tags => '{gpu}'",
    )
    .await;
    let other = enqueue_sql(&client, "'producers.own', source => 'other'").await;
    let ran = rouse_in(&db, &["queue", "drain", "default", "--json"], &folder).await;
    ran.exits(3);
    let summary = ran.json();
    assert_eq!(summary["succeeded"], 3, "{summary}");
    let left = summary["left"].as_array().unwrap();
    assert_eq!(left.len(), 2, "{summary}");
    assert!(left.iter().all(|left| left["ready"] == 1), "{summary}");
    assert_eq!(events(&client, other).await, ["requested"]);
}
