//! The argument `job_timeout` of everything that enqueues jobs.

use rouse::job::{JsonText, NewJob, NewJobKind};
use rouse::store::Locked;
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::{deadline_after, one};
use crate::support::TestDb;
use crate::support::claims::{claim_one, result, settlement_with};
use crate::support::database::refusal;
use crate::support::worker::enqueue_sql;

/// The time from the enqueue of each job with a deadline to its deadline, in the order of their ids.
async fn deadlines(client: &Client) -> Vec<String> {
    let sql = "SELECT (d.deadline_at - j.requested_at)::text FROM rouse.deadline AS d JOIN rouse.job AS j ON j.id = d.job ORDER BY d.job";
    let rows = client.query(sql, &[]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

#[tokio::test]
async fn every_function_that_enqueues_takes_a_job_timeout() {
    let db = TestDb::new().await;
    let client = db.client().await;
    for sql in [
        "SELECT rouse.enqueue('x', job_timeout => '1 day')",
        "SELECT rouse.enqueue('x', payload => to_jsonb(repeat('a', 5000)), unique_key => 'k', job_timeout => '2 days')",
        "SELECT rouse.enqueue_unique('x', 'l', job_timeout => '3 days')",
        "SELECT rouse.enqueue_many('x', '{1,2}'::jsonb[], job_timeout => '4 days')",
        r#"SELECT rouse.enqueue_flow('[{"name": "a", "handler": "x", "job_timeout": "5 days"},
                                       {"name": "b", "handler": "x", "job_timeout": null}]')"#,
    ] {
        client.batch_execute(sql).await.unwrap();
    }
    assert_eq!(
        deadlines(&client).await,
        ["1 day", "2 days", "3 days", "4 days", "4 days", "5 days"]
    );
    let jobs: i64 = one(
        &client,
        "SELECT count(*) FROM rouse.jobs WHERE deadline_at IS NULL",
    )
    .await;
    assert_eq!(jobs, 1, "the job without a job timeout has no deadline");
}

#[tokio::test]
async fn a_rollback_leaves_no_deadline() {
    let db = TestDb::new().await;
    let mut client = db.client().await;
    let transaction = client.transaction().await.unwrap();
    let sql = "SELECT rouse.enqueue('x', job_timeout => '1 day')";
    transaction.query(sql, &[]).await.unwrap();
    transaction.rollback().await.unwrap();
    assert_eq!(
        one::<i64>(&client, "SELECT count(*) FROM rouse.deadline").await,
        0
    );
}

#[tokio::test]
async fn a_unique_key_keeps_the_deadline_of_the_live_job_and_reports_another_one() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let again = async |arguments: &str| -> Vec<String> {
        let sql = format!("SELECT differs FROM rouse.enqueue_unique('x', 'k'{arguments})");
        one(&client, &sql).await
    };
    let id = enqueue_sql(&client, "'x', unique_key => 'k', job_timeout => '1 day'").await;
    assert_eq!(again(", job_timeout => '24 hours'").await, [""; 0]);
    assert_eq!(again(", job_timeout => '2 days'").await, ["job_timeout"]);
    assert_eq!(again("").await, ["job_timeout"]);
    assert_eq!(deadline_after(&client, id, "requested_at").await, "1 day");
}

#[tokio::test]
async fn a_job_timeout_is_at_least_a_millisecond_and_at_most_ten_years() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for good in ["1 millisecond", "10 years", "3660 days"] {
        enqueue_sql(&client, &format!("'x', job_timeout => '{good}'")).await;
    }
    let bounds = |given: &str| {
        format!("job_timeout must be between 1 millisecond and 3660 days, not {given}")
    };
    for (invalid, given) in [
        ("0", "00:00:00"),
        ("-1 second", "-00:00:01"),
        ("3661 days", "3661 days"),
    ] {
        let argument = format!("job_timeout => '{invalid}'");
        for sql in [
            format!("SELECT rouse.enqueue('x', {argument})"),
            format!("SELECT rouse.enqueue_unique('x', 'k', {argument})"),
            format!("SELECT rouse.enqueue_many('x', '{{1}}'::jsonb[], {argument})"),
            format!("SELECT rouse.schedule('s', 'x', cron => '0 3 * * *', {argument})"),
        ] {
            let refused = refusal(&client, &sql).await;
            let expected = format!(
                "rouse.enqueue: {} / Leave it out for no job timeout.",
                bounds(given)
            );
            assert_eq!(refused, expected, "{sql}");
        }
        let flow = json!([{"name": "a", "handler": "x", "job_timeout": invalid}]);
        let refused = refusal(&client, &format!("SELECT rouse.enqueue_flow('{flow}')")).await;
        let expected = format!(
            "rouse.enqueue_flow: job 'a': {} / Leave it out for no job timeout.",
            bounds(given)
        );
        assert_eq!(refused, expected);
    }
    let flow = json!([{"name": "a", "handler": "x", "job_timeout": "soon"}]);
    let refused = refusal(&client, &format!("SELECT rouse.enqueue_flow('{flow}')")).await;
    assert!(
        refused.starts_with("rouse.enqueue_flow: job 'a': invalid input syntax for type interval"),
        "{refused}"
    );
    assert_eq!(
        deadlines(&client).await.len(),
        3,
        "nothing else was enqueued"
    );
    let schedules = "SELECT count(*) FROM rouse.schedule";
    assert_eq!(one::<i64>(&client, schedules).await, 0);

    let job = claim_one(&store).await;
    let child = child(json!({"job_timeout": "0 seconds"}));
    let ended = settlement_with(&job, result("1"), vec![child]);
    let refused = store.settle(&[ended], Locked::Wait).await.unwrap_err();
    let refused = refused.to_string();
    assert!(refused.contains(&bounds("00:00:00")), "{refused}");
}

fn child(options: Value) -> NewJob {
    NewJob {
        kind: NewJobKind::Child,
        handler: "child".into(),
        payload: JsonText("1".into()),
        options: Some(JsonText(options.to_string())),
    }
}

#[tokio::test]
async fn the_deadline_of_a_child_counts_from_the_end_of_its_delay() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    enqueue_sql(&client, "'x'").await;
    let job = claim_one(&store).await;
    let child = child(json!({"job_timeout": "1 day", "delay_ms": 3_600_000}));
    let ended = settlement_with(&job, result("1"), vec![child]);
    store.settle(&[ended], Locked::Wait).await.unwrap();
    let id: i64 = one(&client, "SELECT id FROM rouse.job").await;
    assert_eq!(deadline_after(&client, id, "available_at").await, "1 day");
}

#[tokio::test]
async fn a_schedule_gives_each_of_its_jobs_a_deadline() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let set = async |more: &str| -> String {
        let sql = format!("SELECT rouse.schedule('nightly', 'x', cron => '0 3 * * *'{more})");
        one(&client, &sql).await
    };
    let run = "SELECT rouse.run_schedule('nightly')";
    assert_eq!(set("").await, "created");
    let first: i64 = one(&client, run).await;
    assert_eq!(set(", job_timeout => '2 hours'").await, "replaced");
    assert_eq!(set(", job_timeout => '2 hours'").await, "unchanged");
    let second: i64 = one(&client, run).await;
    assert_eq!(deadline_after(&client, first, "requested_at").await, "");
    assert_eq!(
        deadline_after(&client, second, "requested_at").await,
        "02:00:00"
    );
    let shown: String = one(&client, "SELECT job_timeout::text FROM rouse.schedules").await;
    assert_eq!(shown, "02:00:00");
    let sql = "SELECT detail -> 'changed' FROM rouse.record WHERE event = 'schedule_replaced'";
    assert_eq!(one::<Value>(&client, sql).await, json!(["job_timeout"]));
    assert_eq!(set("").await, "replaced", "without one");
    let third: i64 = one(&client, run).await;
    assert_eq!(deadline_after(&client, third, "requested_at").await, "");
}

#[tokio::test]
async fn the_command_line_sets_and_shows_job_timeouts() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let run = |args: &[&str]| crate::commands::run(&db, args);
    let (code, output) = run(&[
        "enqueue",
        "x",
        "--in",
        "1h",
        "--job-timeout",
        "3d",
        "--json",
    ]);
    assert_eq!(code, 0, "{output}");
    let first = output.lines().next().unwrap_or_default();
    let done: Value = serde_json::from_str(first).unwrap();
    let id = done["id"].as_i64().unwrap();
    assert_eq!(deadline_after(&client, id, "available_at").await, "3 days");
    let at: String = one(
        &client,
        "SELECT to_jsonb(deadline_at) #>> '{}' FROM rouse.jobs",
    )
    .await;
    let (_, output) = run(&["job", &id.to_string()]);
    let shows = |line: &str| line.trim_start().starts_with("deadline_at") && line.contains(&at);
    assert!(output.lines().any(shows), "{at}: {output}");
    let (code, output) = run(&["enqueue", "x", "--job-timeout", "3661d"]);
    assert_eq!(code, 1);
    assert!(output.contains("job_timeout must be between"), "{output}");
    run(&["enqueue", "x", "--unique-key", "k"]);
    let (_, again) = run(&["enqueue", "x", "--unique-key", "k", "--job-timeout", "1d"]);
    assert!(again.contains("with a different job_timeout"), "{again}");

    let (code, output) = run(&[
        "schedule",
        "set",
        "s",
        "x",
        "0 3 * * *",
        "--job-timeout",
        "3d",
    ]);
    assert_eq!(code, 0, "{output}");
    let (_, output) = run(&["schedule", "show", "s"]);
    let shows =
        |line: &str| line.trim_start().starts_with("job_timeout") && line.ends_with("72:00:00");
    assert!(output.lines().any(shows), "{output}");
}
