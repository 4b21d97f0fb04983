//! The outcomes of due times: missed due times, pauses, and jobs that are refused.

use std::time::Duration;

use rouse::worker::Settings;
use serde_json::json;

use super::{
    decided, fire_due, handled_until, make_due, one, outcomes, schedule, shown, this_minute, write,
};
use crate::support::TestDb;
use crate::support::claims::claim;
use crate::support::worker::{TestWorker, until_true};

#[tokio::test]
async fn an_hour_without_hosts_is_caught_up_by_the_policy() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    // The schedules are due every ten minutes, and were due five minutes ago.
    let minute: i32 = one(
        &client,
        "SELECT extract(minute FROM clock_timestamp())::integer",
    )
    .await;
    let cron = format!("{}-59/10 * * * *", (minute + 5) % 10);
    for (name, policy) in [
        ("none", "catch_up => 'none'"),
        ("one", "catch_up => 'one'"),
        ("all", "catch_up => 'all'"),
        (
            "window",
            "catch_up => 'all', catch_up_window => '30 minutes'",
        ),
    ] {
        schedule(
            &client,
            &format!("'{name}', 'x', cron => '{cron}', overlap => 'allow', {policy}"),
        )
        .await;
        handled_until(&client, name, "1 hour").await;
    }
    fire_due(&store).await;
    let enqueued = |count| vec!["enqueued".to_owned(); count];
    assert_eq!(outcomes(&client, "none").await, ["missed"]);
    assert_eq!(outcomes(&client, "one").await, enqueued(1));
    assert_eq!(outcomes(&client, "all").await, enqueued(6));
    assert_eq!(
        outcomes(&client, "window").await,
        [vec!["missed".into()], enqueued(3)].concat()
    );
    let last: bool = one(
        &client,
        "SELECT bool_and(due_at = (SELECT max(due_at) FROM rouse.schedule_run)) FROM rouse.schedule_run WHERE schedule IN ('none', 'one')",
    )
    .await;
    assert!(last, "the latest one");
    // All due times are handled.
    fire_due(&store).await;
    assert_eq!(outcomes(&client, "all").await.len(), 6);
}

#[tokio::test]
async fn more_missed_due_times_than_one_transaction_handles_are_caught_up_in_order() {
    let db = TestDb::new().await;
    let client = db.client().await;
    schedule(&client, "'a', 'test.nobody-has-this', cron => '*/20 * * * * *', catch_up => 'all', overlap => 'allow'").await;
    handled_until(&client, "a", "2 hours").await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(&client, "SELECT count(*) >= 360 FROM rouse.schedule_run").await;
    worker.drain().await;
    let sql = "SELECT count(*) = count(DISTINCT due_at) AND bool_and(due_at = first + (n - 1) * interval '20 s')
               FROM (SELECT due_at, row_number() OVER (ORDER BY id) AS n, first_value(due_at) OVER (ORDER BY id) AS first FROM rouse.schedule_run) AS r";
    assert!(
        one::<bool>(&client, sql).await,
        "each due time once, in order"
    );
}

#[tokio::test]
async fn nothing_is_enqueued_while_a_schedule_is_paused_and_nothing_is_caught_up_afterwards() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    schedule(&client, "'a', 'x', cron => '* * * * *', catch_up => 'all'").await;
    client
        .batch_execute("SELECT rouse.pause_schedule('a')")
        .await
        .unwrap();
    handled_until(&client, "a", "1 hour").await;
    assert!(decided(&store).await.is_empty());
    assert_eq!(shown(&client, "a").await["state"], "paused");
    assert_eq!(
        schedule(&client, "'a', 'y', cron => '* * * * *', catch_up => 'all'").await,
        "replaced"
    );
    assert_eq!(shown(&client, "a").await["state"], "paused");
    // The schedule can be run by hand.
    let job: i64 = one(&client, "SELECT rouse.run_schedule('a')").await;
    assert_eq!(claim(&store, 10).await[0].id.0, job);
    assert!(one::<bool>(&client, "SELECT rouse.resume_schedule('a')").await);
    let due = decided(&store).await;
    assert!(
        due[0].1.firings.len() <= 1,
        "at most the minute that has just started"
    );
    write(&store, &due).await;
    assert_eq!(shown(&client, "a").await["state"], "active");
    assert_eq!(
        shown(&client, "a").await["upcoming"]
            .as_array()
            .map(Vec::len),
        Some(5)
    );
}

#[tokio::test]
async fn a_schedule_that_is_paused_between_listing_and_firing_enqueues_nothing() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let cron = this_minute(&client).await;
    schedule(&client, &format!("'a', 'x', cron => '{cron}'")).await;
    make_due(&client).await;
    let due = decided(&store).await;
    client
        .batch_execute("SELECT rouse.pause_schedule('a')")
        .await
        .unwrap();
    assert!(write(&store, &due).await.is_empty());
    assert!(outcomes(&client, "a").await.is_empty());
}

#[tokio::test]
async fn a_job_that_is_refused_shows_why_and_does_not_prevent_others() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let large = "jsonb_build_object('a', repeat('a', 5000))";
    let cron = this_minute(&client).await;
    schedule(
        &client,
        &format!("'large', 'test.nobody-has-this', {large}, cron => '{cron}', queue => 'small'"),
    )
    .await;
    schedule(
        &client,
        &format!("'other', 'test.nobody-has-this', cron => '{cron}'"),
    )
    .await;
    client
        .batch_execute("INSERT INTO rouse.queue (name, payload_bytes_max) VALUES ('small', 2000)")
        .await
        .unwrap();
    make_due(&client).await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(
        &client,
        "SELECT count(DISTINCT schedule) = 2 FROM rouse.schedule_run",
    )
    .await;
    let row = shown(&client, "large").await;
    assert_eq!(row["state"], "error");
    let error = row["error"].as_str().unwrap();
    assert!(error.contains("queue small allows 2000"), "{error}");
    assert_eq!(row["last_runs"][0]["outcome"], "refused");
    assert_eq!(row["last_runs"][0]["error"], row["error"]);
    assert_eq!(outcomes(&client, "other").await[0], "enqueued");
    // The job of the next due time is enqueued if the queue accepts it by then.
    client
        .batch_execute("UPDATE rouse.queue SET payload_bytes_max = 20000 WHERE name = 'small'")
        .await
        .unwrap();
    handled_until(&client, "large", "5 minutes").await;
    client
        .batch_execute("SELECT rouse._wake_for_schedules()")
        .await
        .unwrap();
    until_true(
        &client,
        "SELECT state = 'active' FROM rouse.schedules WHERE name = 'large'",
    )
    .await;
    worker.drain().await;
    assert!(
        outcomes(&client, "large")
            .await
            .contains(&"enqueued".to_owned())
    );
}

#[tokio::test]
async fn an_expression_that_only_a_host_can_check_shows_its_error() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    schedule(&client, "'invalid', 'x', cron => '0 25 * * *'").await;
    schedule(&client, "'never', 'x', cron => '0 0 30 2 *'").await;
    fire_due(&store).await;
    for (name, why) in [
        ("invalid", "the cron expression is invalid"),
        ("never", "never due again"),
    ] {
        let row = shown(&client, name).await;
        assert_eq!(
            (&row["state"], &row["upcoming"]),
            (&json!("error"), &json!([]))
        );
        assert!(row["error"].as_str().unwrap().contains(why), "{row}");
    }
    assert!(
        store
            .due_schedules(10, None, &[], &[], None)
            .await
            .unwrap()
            .schedules
            .is_empty()
    );
    assert_eq!(
        schedule(&client, "'invalid', 'x', cron => '0 5 * * *'").await,
        "replaced"
    );
    fire_due(&store).await;
    assert_eq!(shown(&client, "invalid").await["error"], json!(null));
}

#[tokio::test]
async fn jitter_delays_the_start_of_a_job() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    let cron = this_minute(&client).await;
    schedule(
        &client,
        &format!("'a', 'x', cron => '{cron}', jitter => '1 day'"),
    )
    .await;
    make_due(&client).await;
    fire_due(&store).await;
    let sql = "SELECT j.available_at > r.due_at AND j.available_at <= r.due_at + interval '1 day' FROM rouse.jobs AS j JOIN rouse.schedule_run AS r ON r.job = j.id";
    assert!(one::<bool>(&client, sql).await);
    assert!(claim(&store, 1).await.is_empty());
}

#[tokio::test]
async fn the_next_due_time_of_all_schedules_is_known_to_the_millisecond() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    assert_eq!(
        store
            .due_schedules(10, None, &[], &[], None)
            .await
            .unwrap()
            .next_in,
        None
    );
    schedule(&client, "'a', 'x', cron => '* * * * *'").await;
    schedule(&client, "'b', 'x', cron => '0 0 1 1 *'").await;
    fire_due(&store).await;
    let next_in = store
        .due_schedules(10, None, &[], &[], None)
        .await
        .unwrap()
        .next_in
        .unwrap();
    assert!(next_in <= Duration::from_secs(60), "{next_in:?}");
}

#[tokio::test]
async fn a_thousand_schedules_due_in_the_same_second_enqueue_a_thousand_jobs() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql =
        "SELECT rouse.schedule('s' || n, 'noop', cron => $1) FROM generate_series(1, 1000) AS n";
    let cron = this_minute(&client).await;
    client.execute(sql, &[&cron]).await.unwrap();
    make_due(&client).await;
    let worker = TestWorker::start(&db, Settings::default()).await;
    until_true(
        &client,
        "SELECT count(DISTINCT schedule) = 1000 FROM rouse.schedule_run WHERE job IS NOT NULL",
    )
    .await;
    until_true(
        &client,
        "SELECT count(*) = 1000 FROM rouse.finished WHERE state = 'succeeded'",
    )
    .await;
    worker.drain().await;
    let twice: i64 = one(
        &client,
        "SELECT count(*) FROM (SELECT FROM rouse.schedule_run WHERE job IS NOT NULL GROUP BY schedule, due_at HAVING count(*) > 1) AS twice",
    )
    .await;
    assert_eq!(twice, 0);
}

#[tokio::test]
async fn a_look_for_recent_due_times_leaves_out_earlier_ones_and_finds_new_schedules() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    for (name, next_at) in [
        ("old", "clock_timestamp() - interval '1 hour'"),
        ("recent", "clock_timestamp() - interval '1 second'"),
        ("later", "clock_timestamp() + interval '1 hour'"),
        ("new", "NULL"),
    ] {
        schedule(&client, &format!("'{name}', 'x', cron => '0 0 1 1 *'")).await;
        let set = format!("UPDATE rouse.schedule SET next_at = {next_at} WHERE name = '{name}'");
        client.batch_execute(&set).await.unwrap();
    }
    let now = store
        .due_schedules(1, None, &[], &[], None)
        .await
        .unwrap()
        .now;
    let minute_ago = now - Duration::from_secs(60);
    for (since, max, expected) in [
        (None, 10, vec!["new", "old", "recent"]),
        (Some(minute_ago), 10, vec!["new", "recent"]),
        (Some(minute_ago), 1, vec!["new"]),
    ] {
        let due = store
            .due_schedules(max, since, &[], &[], None)
            .await
            .unwrap();
        let names: Vec<&str> = due
            .schedules
            .iter()
            .map(|due| &*due.schedule.name)
            .collect();
        assert_eq!(names, expected);
    }
    // Those that a host could not fire are left out, unless they have changed since.
    let all = store
        .due_schedules(10, None, &[], &[], None)
        .await
        .unwrap()
        .schedules;
    let except: Vec<i64> = all.iter().take(2).map(|due| due.revision).collect();
    let due = store
        .due_schedules(1, None, &except, &[], None)
        .await
        .unwrap();
    assert_eq!(due.schedules[0].schedule.name, "recent");
    client
        .batch_execute(
            "UPDATE rouse.schedule SET revision = nextval('rouse.turn_seq') WHERE name = 'old'",
        )
        .await
        .unwrap();
    let due = store
        .due_schedules(1, None, &except, &[], None)
        .await
        .unwrap();
    assert_eq!(due.schedules[0].schedule.name, "old");
}

#[tokio::test]
async fn a_schedule_that_fires_across_a_change_of_the_clock_enqueues_one_job_a_day() {
    let db = TestDb::new().await;
    let (client, store) = (db.client().await, db.worker().await);
    schedule(&client, "'a', 'x', cron => '30 2 * * *', time_zone => 'Europe/Berlin', overlap => 'allow', catch_up => 'all'").await;
    // As if no host had run since the day before, on the days of both changes.
    for (since, until, times) in [
        (
            "2024-03-30T12:00Z",
            "2024-04-01T12:00Z",
            ["2024-03-31 01:00", "2024-04-01 00:30"],
        ),
        (
            "2024-10-26T12:00Z",
            "2024-10-28T12:00Z",
            ["2024-10-27 00:30", "2024-10-28 01:30"],
        ),
    ] {
        let set = format!(
            "UPDATE rouse.schedule SET handled_until = '{since}', next_at = NULL, revision = nextval('rouse.turn_seq'); TRUNCATE rouse.schedule_run"
        );
        client.batch_execute(&set).await.unwrap();
        let reached = format!("SELECT max(due_at) > '{until}' FROM rouse.schedule_run");
        while !one::<Option<bool>>(&client, &reached)
            .await
            .unwrap_or(false)
        {
            fire_due(&store).await;
        }
        let sql = format!(
            "SELECT to_char(due_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI') FROM rouse.schedule_run
             WHERE due_at <= '{until}' AND outcome = 'enqueued' AND job IS NOT NULL ORDER BY due_at"
        );
        let rows = client.query(&sql, &[]).await.unwrap();
        let fired: Vec<String> = rows.iter().map(|row| row.get(0)).collect();
        assert_eq!(fired, times);
    }
}
