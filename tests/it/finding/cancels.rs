//! Bulk cancellations and deletions of the jobs that match a filter.

use serde_json::{Value, json};

use super::{start, start_behind_lock};
use crate::commands::run;
use crate::support::claims::claim;
use crate::support::page::blocks_of;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{TIMEOUT, enqueue_sql, show};
use crate::support::{Host, TestDb};

/// The exit code and the output of a process. The wait for its end does not block the proxy, which runs on this thread.
async fn exit(host: Host) -> (Option<i32>, String) {
    let (status, output) = tokio::task::spawn_blocking(move || host.exit(TIMEOUT))
        .await
        .unwrap();
    (status.code(), output)
}

#[tokio::test]
async fn matching_live_jobs_are_counted_and_then_cancelled_or_deleted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let queued = enqueue_sql(&client, "'x', tenant => 't'").await;
    let scheduled = "'x', tenant => 't', run_at => now() + interval '1 hour'";
    let scheduled = enqueue_sql(&client, scheduled).await;
    let other = enqueue_sql(&client, "'x', tenant => 'u'").await;
    let state = async |id: i64| show(&client, id).await.state;

    for (verb, done) in [("cancel", "cancelled"), ("delete", "deleted")] {
        let ids = match verb {
            "cancel" => vec![queued, scheduled],
            _ => vec![enqueue_sql(&client, "'x', tenant => 't'").await],
        };
        let them = if ids.len() == 1 { "it" } else { "them" };
        let args = ["job", verb, "--handler", "x", "--tenant", "t"];
        let (code, output) = run(&db, &args);
        assert_eq!(code, 2, "{output}");
        assert!(
            output.contains(&format!("found {} of the ", ids.len()))
                && output.contains(&format!("nothing was done; --confirm {verb}s {them}")),
            "{output}"
        );
        for id in &ids {
            assert_eq!(state(*id).await, "queued");
        }
        let (code, output) = run(&db, &[&args[..], &["--yes", "--json"]].concat());
        assert_eq!(code, 0, "{output}");
        let output: Value = serde_json::from_str(&output).unwrap();
        assert_eq!(
            (&output[done], &output["refused"], &output["complete"]),
            (&json!(ids.len()), &json!([]), &json!(true))
        );
        let records = "SELECT count(*) FROM rouse.record WHERE event = $1 AND who = session_user AND job = ANY ($2)";
        let row = client.query_one(records, &[&done, &ids]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), i64::try_from(ids.len()).unwrap());
        for id in &ids {
            assert_eq!(state(*id).await, "cancelled");
        }
        let (code, output) = run(&db, &args);
        assert_eq!(code, 0, "there is nothing left: {output}");
    }
    assert_eq!(state(other).await, "queued");

    for (args, expected) in [
        (
            &["cancel"][..],
            "no job ids were given: pass ids, or filters",
        ),
        (&["cancel", "1", "--handler", "x"], "not both"),
        (
            &["cancel", "--state", "failed"],
            "only live jobs can be cancelled: --state takes queued and running here",
        ),
        (
            &["delete", "--state", "running"],
            "only queued jobs can be deleted: --state takes queued here",
        ),
    ] {
        let (code, output) = run(&db, &[&["job"][..], args].concat());
        assert_eq!(code, 2, "{output}");
        assert!(output.contains(expected), "{output}");
    }
}

#[tokio::test]
async fn a_job_that_ends_before_its_turn_is_skipped() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let ends = enqueue_sql(&client, "'x'").await;
    let newer = enqueue_sql(&client, "'x'").await;
    // The newest job comes first: before it is cancelled, the other one ends.
    let proxy = Proxy::start(&db).await;
    let cancellation = proxy.hold("rouse.cancel", Side::Statement);
    let args = ["job", "cancel", "--handler", "x", "--confirm"];
    let host = start(proxy.url(), &args);
    cancellation.caught().await;
    client
        .query("SELECT rouse.complete($1)", &[&ends])
        .await
        .unwrap();
    cancellation.release();
    let (code, output) = exit(host).await;
    assert_eq!(code, Some(0), "{output}");
    assert!(
        output.contains("cancelled 1 of the 2 jobs")
            && output.contains("1 job had ended or started before it could be cancelled"),
        "{output}"
    );
    assert_eq!(show(&client, ends).await.state, "succeeded");
    assert_eq!(show(&client, newer).await.state, "cancelled");
}

#[tokio::test]
async fn locked_jobs_are_left_after_a_short_wait_and_do_not_hold_up_the_others() {
    for (verb, done) in [("cancel", "cancelled"), ("delete", "deleted")] {
        let db = TestDb::new().await;
        let (mut client, watcher) = (db.client().await, db.client().await);
        let older = enqueue_sql(&client, "'x'").await;
        // Waiting for each of them would take longer than the test.
        let mut locked = Vec::new();
        for _ in 0..10 {
            locked.push(enqueue_sql(&client, "'x'").await);
        }
        let transaction = client.transaction().await.unwrap();
        transaction
            .query(
                "SELECT rouse.cancel(id) FROM unnest($1::bigint[]) AS id",
                &[&locked],
            )
            .await
            .unwrap();
        let args = ["job", verb, "--handler", "x", "--confirm"];
        let (code, output) = run(&db, &[&args[..], &["--json"]].concat());
        assert_eq!(code, 6, "{output}");
        let named: Vec<String> = locked.iter().map(ToString::to_string).collect();
        let why = "because another transaction has locked them";
        let again = "; the same command with --until 2";
        assert!(
            output.contains(&format!("\"{done}\":1,"))
                && output.contains("\"examined_count\":11")
                && output.contains("\"refused\":[]")
                && output.contains(&format!("\"locked\":[{}]", named.join(",")))
                && output.contains("10 were not")
                && output.contains(&format!("{why}: {}{again}", named.join(", "))),
            "{output}"
        );
        assert_eq!(show(&watcher, older).await.state, "cancelled");
        transaction.rollback().await.unwrap();
        for id in &locked {
            assert_eq!(show(&watcher, *id).await.state, "queued");
        }
        let (code, output) = run(&db, &args);
        assert_eq!(code, 0, "{output}");
        assert!(output.contains("10 of the 10 jobs"), "{output}");
    }
}

#[tokio::test]
async fn a_bulk_change_that_meets_another_transaction_is_tried_again_a_few_times() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..2 {
        enqueue_sql(&client, "'x'").await;
    }
    // A sequence keeps its value when a transaction is rolled back.
    client
        .batch_execute(
            "CREATE SEQUENCE public.tries MINVALUE -10 START 1;
             CREATE FUNCTION public.meet() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
             BEGIN
                 IF nextval('public.tries') < 3 THEN
                     RAISE EXCEPTION 'in use' USING ERRCODE = 'serialization_failure';
                 END IF;
                 RETURN NEW;
             END
             $$;
             CREATE TRIGGER meet BEFORE INSERT ON rouse.finished FOR EACH ROW EXECUTE FUNCTION public.meet();
             CREATE TRIGGER meet BEFORE INSERT ON rouse.job FOR EACH ROW WHEN (NEW.retried_from IS NOT NULL)
                 EXECUTE FUNCTION public.meet()",
        )
        .await
        .unwrap();
    for (verb, state, done) in [
        ("cancel", "queued", "cancelled"),
        ("retry", "cancelled", "retried"),
        ("delete", "queued", "deleted"),
    ] {
        let args = ["job", verb, "--state", state, "--confirm"];
        // The next three tries meet another transaction, and the command ends.
        let set = "SELECT setval('public.tries', -1)";
        client.query_one(set, &[]).await.unwrap();
        let (code, output) = run(&db, &args);
        assert_eq!(code, 1, "{output}");
        assert!(output.contains("in use"), "{output}");
        // Only the next two tries meet another transaction.
        let set = "SELECT setval('public.tries', 0)";
        client.query_one(set, &[]).await.unwrap();
        let (code, output) = run(&db, &args);
        assert_eq!(code, 0, "{output}");
        let summary = format!("{done} 2 of the ");
        assert!(output.contains(&summary), "{output}");
    }
}

/// As a standby does when it replays changes to what the search reads.
#[tokio::test]
async fn a_search_that_postgres_cancels_because_of_a_conflict_is_tried_again_a_few_times() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for _ in 0..2 {
        enqueue_sql(&client, "'x'").await;
    }
    client
        .batch_execute(
            "CREATE SEQUENCE public.tries MINVALUE -10 START 1;
             ALTER FUNCTION rouse.search_jobs(jsonb, bigint, integer, integer) RENAME TO undisturbed_search;
             CREATE FUNCTION rouse.search_jobs(jsonb, bigint, integer, integer,
                 OUT ids bigint[], OUT examined_count integer, OUT next_before bigint, OUT examined_back_to bigint)
             LANGUAGE plpgsql AS $$
             BEGIN
                 IF nextval('public.tries') < 3 THEN
                     RAISE EXCEPTION 'conflict with recovery' USING ERRCODE = 'serialization_failure';
                 END IF;
                 SELECT s.ids, s.examined_count, s.next_before, s.examined_back_to
                 INTO ids, examined_count, next_before, examined_back_to
                 FROM rouse.undisturbed_search($1, $2, $3, $4) AS s;
             END
             $$",
        )
        .await
        .unwrap();
    for (args, code, summary) in [
        (&["job", "cancel", "--state", "queued"][..], 2, "found 2 of"),
        (
            &["job", "cancel", "--state", "queued", "--confirm"],
            0,
            "cancelled 2 of",
        ),
    ] {
        // The next three tries meet a conflict, and the command ends.
        let set = "SELECT setval('public.tries', -1)";
        client.query_one(set, &[]).await.unwrap();
        let (failed, output) = run(&db, args);
        assert_eq!(failed, 1, "{output}");
        assert!(output.contains("conflict with recovery"), "{output}");
        // Only the next two tries meet a conflict.
        let set = "SELECT setval('public.tries', 0)";
        client.query_one(set, &[]).await.unwrap();
        let (done, output) = run(&db, args);
        assert_eq!(done, code, "{output}");
        assert!(output.contains(summary), "{output}");
    }
}

#[tokio::test]
async fn a_locked_job_is_changed_if_it_becomes_free_during_the_wait() {
    let db = TestDb::new().await;
    let (mut client, watcher) = (db.client().await, db.client().await);
    let locked = enqueue_sql(&client, "'x'").await;
    let transaction = client.transaction().await.unwrap();
    transaction
        .query("SELECT rouse.cancel($1)", &[&locked])
        .await
        .unwrap();
    let args = ["job", "cancel", "--handler", "x", "--confirm"];
    let host = start_behind_lock(&db, &watcher, &args).await;
    transaction.rollback().await.unwrap();
    let (status, output) = host.exit(TIMEOUT);
    assert_eq!(status.code(), Some(0), "{output}");
    assert!(
        output.contains("cancelled 1 of the 1 job that was examined"),
        "{output}"
    );
    assert_eq!(show(&watcher, locked).await.state, "cancelled");
}

#[tokio::test]
async fn a_bulk_cancellation_without_a_response_ends_with_an_error_and_the_same_command_resumes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let mut ids = Vec::new();
    for _ in 0..3 {
        ids.push(enqueue_sql(&client, "'x'").await);
    }
    let proxy = Proxy::start(&db).await;
    let response = proxy.hold("rouse.cancel", Side::Response);
    let args = ["job", "cancel", "--handler", "x", "--confirm"];
    let (code, output) = exit(start(proxy.url(), &args)).await;
    assert_eq!(code, Some(1), "{output}");
    assert!(output.contains("no response from"), "{output}");
    // The newest one was cancelled; the command does not know that.
    assert_eq!(show(&client, ids[2]).await.state, "cancelled");
    for id in &ids[..2] {
        assert_eq!(show(&client, *id).await.state, "queued");
    }
    response.release();
    let (code, output) = exit(start(proxy.url(), &args)).await;
    assert_eq!(code, Some(0), "{output}");
    assert!(output.contains("cancelled 2 of the 2 jobs"), "{output}");
}

#[tokio::test]
async fn a_queued_job_that_starts_before_its_turn_is_not_deleted() {
    let db = TestDb::new().await;
    let worker = db.worker().await;
    let client = db.client().await;
    let starts = enqueue_sql(&client, "'x'").await;
    let newer = enqueue_sql(&client, "'x'").await;
    // The newest job comes first: before it is deleted, the other one starts.
    let proxy = Proxy::start(&db).await;
    let deletion = proxy.hold("rouse.delete", Side::Statement);
    let host = start(
        proxy.url(),
        &["job", "delete", "--handler", "x", "--confirm"],
    );
    deletion.caught().await;
    assert_eq!(claim(&worker, 1).await.len(), 1);
    deletion.release();
    let (code, output) = exit(host).await;
    assert_eq!(code, Some(0), "{output}");
    assert!(
        output.contains("deleted 1 of the 2 jobs")
            && output.contains("1 job had ended or started before it could be deleted"),
        "{output}"
    );
    assert_eq!(show(&client, starts).await.state, "running");
    assert_eq!(show(&client, newer).await.state, "cancelled");
}

#[tokio::test]
async fn an_interrupted_bulk_cancellation_stops_before_the_next_job_and_the_same_command_resumes() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .execute(
            "SELECT rouse.enqueue('x') FROM generate_series(1, 600)",
            &[],
        )
        .await
        .unwrap();
    let proxy = Proxy::start(&db).await;
    let first = proxy.hold("rouse.cancel", Side::Statement);
    let args = ["job", "cancel", "--state", "queued", "--yes"];
    let host = start(proxy.url(), &args);
    first.caught().await;
    host.signal(libc::SIGINT);
    host.until_signal_is_taken(TIMEOUT).await;
    first.release();
    let (code, output) = exit(host).await;
    assert_eq!(code, Some(130), "{output}");
    let (_, done) = output.split_once("cancelled ").expect("a summary");
    let done: u32 = done.split(' ').next().unwrap().parse().unwrap();
    // The command stops within its first batch.
    assert!((1..500).contains(&done), "{output}");
    let (code, output) = run(&db, &args);
    assert_eq!(code, 0, "{output}");
    let rest = format!("cancelled {0} of the {0} jobs", 600 - done);
    assert!(output.contains(&rest), "{output}");
    let live = client
        .query_one("SELECT count(*) FROM rouse.job", &[])
        .await;
    assert_eq!(live.unwrap().get::<_, i64>(0), 0);
}

#[tokio::test]
async fn an_operator_cancels_a_batch_with_the_statement_of_the_guide() {
    let db = TestDb::new().await;
    let client = db.client().await;
    client
        .execute(
            "SELECT rouse.enqueue('email.send', tenant => 'acme') FROM generate_series(1, 1100)",
            &[],
        )
        .await
        .unwrap();
    let other = enqueue_sql(&client, "'email.send', tenant => 'other'").await;
    let statements = blocks_of("docs/guides/jobs-and-queues.md", "sql");
    let statement = statements
        .iter()
        .find(|text| text.contains("rouse.cancel(id)"))
        .expect("a statement that cancels");
    client
        .batch_execute("SET ROLE rouse_operator")
        .await
        .unwrap();
    for expected in [1000, 100, 0] {
        let row = client.query_one(statement.trim(), &[]).await.unwrap();
        assert_eq!(row.get::<_, i64>(0), expected);
    }
    assert_eq!(show(&client, other).await.state, "queued");
}
