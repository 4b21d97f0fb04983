//! `rouse schedule`.

use serde_json::json;

use super::{fire_due, handled_until, one, schedule};
use crate::support::{
    CommandOutput, TestDb, command, connect, rouse_in, rouse_without_database, scratch,
};

#[test]
fn due_times_are_printed_without_a_database() {
    let folder = scratch("next");
    let next =
        |args: &[&str]| rouse_without_database(&[&["schedule", "next"], args].concat(), &folder);
    let berlin = [
        "30 2 * * *",
        "--time-zone",
        "Europe/Berlin",
        "--count",
        "2",
        "--after",
        "2026-03-28T12:00:00Z",
    ];
    assert_eq!(
        next(&berlin).exits(0).stdout,
        "Sun 2026-03-29 03:00:00 +02:00   2026-03-29T01:00:00Z\nMon 2026-03-30 02:30:00 +02:00   2026-03-30T00:30:00Z\n"
    );
    let json = next(&[&berlin[..], &["--json"]].concat()).json();
    assert_eq!(
        json["times"],
        json!(["2026-03-29T01:00:00Z", "2026-03-30T00:30:00Z"])
    );
    assert_eq!(next(&["*/5 * * * * *"]).exits(0).stdout.lines().count(), 5);
    next(&["0 25 * * *"])
        .exits(1)
        .prints("the cron expression is invalid");
    next(&["0 3 * *"]).exits(1).prints("has 4 fields");
    next(&["0 3 * * *", "--time-zone", "Mars"])
        .exits(1)
        .prints("\"Mars\" is unknown");
    next(&["0 0 30 2 *"]).exits(0).prints("never");
    next(&["0 3 * * *", "--after", "noon"])
        .exits(2)
        .prints("expected a time such as 2026-03-28T00:00:00Z");
    next(&["nightly"])
        .exits(1)
        .prints("a word without spaces is the name of a schedule");
    next(&["--help"])
        .exits(0)
        .prints("due when the clock goes forward");
}

#[tokio::test]
async fn a_schedule_is_set_listed_shown_and_deleted() {
    let (db, folder) = (TestDb::new().await, scratch("schedule"));
    let store = db.worker().await;
    let run = async |args: &[&str]| rouse_in(&db, &[&["schedule"], args].concat(), &folder).await;
    run(&[]).await.exits(0).prints("no schedules");
    let set = [
        "set",
        "nightly",
        "report.make",
        "0 3 * * *",
        "{\"kind\": 1}",
        "--time-zone",
        "Europe/Berlin",
        "--due-key",
        "day",
        "--jitter",
        "5m",
    ];
    run(&set)
        .await
        .exits(0)
        .prints("schedule nightly is created; next due ");
    run(&set)
        .await
        .exits(0)
        .prints("schedule nightly is unchanged");
    let done = run(&[&set[..], &["--overlap", "queue", "--json"]].concat())
        .await
        .json();
    assert_eq!(done["done"], "replaced");
    assert!(done["next_at"].is_string());
    run(&["show", "nightly"])
        .await
        .exits(0)
        .prints("a host has yet to compute them");
    run(&["set", "bad", "x", "0 25 * * *"])
        .await
        .exits(1)
        .prints("the cron expression is invalid");
    run(&["set", "b a d", "x", "0 2 * * *"])
        .await
        .exits(1)
        .prints("is not a schedule name");

    handled_until(&db.client().await, "nightly", "2 days").await;
    fire_due(&store).await;
    let listed = run(&["ls"]).await;
    listed
        .exits(0)
        .prints("nightly")
        .prints("0 3 * * *")
        .prints("Europe/Berlin")
        .prints("queued");
    let shown = run(&["show", "nightly"]).await;
    for part in [
        "overlap",
        "queue",
        "00:05:00",
        "enqueued",
        "03:00:00 +0",
        "{\"kind\":1}",
    ] {
        shown.exits(0).prints(part);
    }
    let json = run(&["show", "nightly", "--json"]).await.json();
    assert_eq!(json["upcoming"].as_array().map(Vec::len), Some(5));
    assert_eq!(
        run(&["next", "nightly"])
            .await
            .exits(0)
            .stdout
            .lines()
            .count(),
        5
    );
    let json = run(&["ls", "--json"]).await.json();
    assert_eq!(json["schedules"][0]["name"], "nightly");
    run(&["delete", "nightly", "nobody"])
        .await
        .exits(3)
        .prints("schedule nightly is deleted; its jobs stay")
        .prints("no schedule nobody");
}

#[tokio::test]
async fn a_schedule_is_run_paused_resumed_and_backfilled() {
    let (db, folder) = (TestDb::new().await, scratch("schedule"));
    let client = db.client().await;
    schedule(&client, "'nightly', 'report.make', cron => '0 3 * * *'").await;
    let run = async |args: &[&str]| rouse_in(&db, &[&["schedule"], args].concat(), &folder).await;
    let id = run(&["run", "nightly"])
        .await
        .exits(0)
        .stdout
        .trim()
        .to_owned();
    assert_eq!(
        one::<i64>(&client, "SELECT job FROM rouse.schedule_run")
            .await
            .to_string(),
        id
    );
    assert_eq!(
        run(&["run", "nightly", "--json"]).await.json()["schedule"],
        "nightly"
    );
    run(&["pause", "nightly"])
        .await
        .exits(0)
        .prints("schedule nightly has been paused since");
    run(&["show", "nightly"]).await.prints("none: it is paused");
    let resumed = run(&["resume", "nightly", "--json"]).await.json();
    assert_eq!(resumed, json!({"schedule": "nightly", "was_paused": true}));
    run(&["resume", "nightly"])
        .await
        .exits(0)
        .prints("schedule nightly was not paused");
    let march = [
        "backfill",
        "nightly",
        "--since",
        "2026-03-01T00:00:00Z",
        "--before",
        "2026-03-08T00:00:00Z",
    ];
    run(&march).await.exits(0).prints("7 due times");
    let done = run(&[&march[..], &["--json"]].concat()).await.json();
    assert_eq!(done["due_times"], 7);
    run(&["show", "nightly"]).await.prints("in progress");
    run(&[
        "backfill",
        "nightly",
        "--since",
        "1990-01-01T00:00:00Z",
        "--before",
        "2026-03-08T00:00:00Z",
    ])
    .await
    .exits(1)
    .prints("more than 10000 due times");
    for args in [
        &["run", "x"][..],
        &["pause", "x"],
        &["resume", "x"],
        &["show", "x"],
        &["next", "x"],
        &["delete", "x"],
    ] {
        run(args).await.exits(3).prints("no schedule x");
    }
    run(&[
        "backfill",
        "x",
        "--since",
        "2026-03-01T00:00:00Z",
        "--before",
        "2026-03-08T00:00:00Z",
    ])
    .await
    .exits(3);
}

#[tokio::test]
async fn a_schedule_of_another_login_does_not_stop_the_change_of_others() {
    let (db, folder) = (TestDb::new().await, scratch("schedule"));
    let client = db.client().await;
    client
        .batch_execute(
            "CREATE ROLE several_mail LOGIN IN ROLE rouse_producer; CREATE ROLE several_enqueuer LOGIN IN ROLE rouse_enqueuer",
        )
        .await
        .unwrap();
    let url = |login: &str| db.url().replace("rouse@", &format!("{login}@"));
    let mail = connect(&url("several_mail")).await;
    schedule(&client, "'shop', 'x', cron => '0 0 1 1 *'").await;
    for name in ["first", "last"] {
        schedule(&mail, &format!("'{name}', 'x', cron => '0 0 1 1 *'")).await;
    }
    let all = ["first", "shop", "last"];
    let run = |login: &str, action: &str| {
        let args = [&["schedule", action][..], &all].concat();
        CommandOutput::run(&mut command(&url(login), &args, &folder))
    };
    for (action, done) in [
        ("pause", "schedule last has been paused since"),
        ("resume", "schedule last is resumed"),
        ("delete", "schedule last is deleted"),
    ] {
        run("several_mail", action)
            .exits(6)
            .prints("login several_mail may not change schedule shop, which belongs to login")
            .prints(done)
            .prints("2 of 3 schedules done, 1 refused");
    }
    let left = "SELECT string_agg(name, ' ') FROM rouse.schedule";
    assert_eq!(one::<String>(&client, left).await, "shop");
    // A login that may change no schedule at all.
    let denied = run("several_enqueuer", "pause");
    denied
        .exits(1)
        .prints("permission denied for function pause_schedule")
        .prints("0 of 3 schedules were done before this");
}
