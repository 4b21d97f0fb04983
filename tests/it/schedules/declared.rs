//! Schedules that modules declare.

use serde_json::json;
use tokio_postgres::Client;

use super::{one, schedule, shown};
use crate::sandbox_guest::guest_of_wasip1;
use crate::support::database::refusal;
use crate::support::worker::{TIMEOUT, until_true};
use crate::support::{Host, TestDb, command, folder_of, rouse_without_database, show_handler};

fn module(version: &str, cron: &str) -> Vec<u8> {
    let schedule = match cron {
        "" => String::new(),
        cron => format!(r#","schedule":{{"cron":"{cron}","time_zone":"Europe/Berlin"}}"#),
    };
    let manifest =
        format!(r#"{{"handlers":[{{"name":"report.make","version":"{version}"{schedule}}}]}}"#);
    guest_of_wasip1(
        "",
        &manifest,
        "(call $return_ok (i32.const 0) (i32.const 0))",
    )
}

const ALLOWED: &str = "[handlers.\"report.*\"]\nschedule = true\n";

/// A host on a folder with this module and these settings.
fn host(db: &TestDb, config: &str, module: &[u8]) -> Host {
    let folder = folder_of(config, &[("report.wasm", module)]);
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    host.line(TIMEOUT, |line| line.contains("modules loaded"));
    host
}

/// Waits until this SQL is true of the only schedule.
async fn until(client: &Client, condition: &str) {
    until_true(
        client,
        &format!("SELECT coalesce((SELECT {condition} FROM rouse.schedules), false)"),
    )
    .await;
}

const GONE: &str = "SELECT NOT EXISTS (SELECT FROM rouse.schedules)";

#[tokio::test]
async fn a_schedule_of_a_module_is_created_if_the_operator_allows_it() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let first = host(&db, ALLOWED, &module("1.0.0", "0 3 * * *"));
    until(&client, "upcoming <> '{}'").await;
    let row = shown(&client, "report.make").await;
    assert_eq!(
        (
            &row["cron"],
            &row["time_zone"],
            &row["module_version"],
            &row["handler"]
        ),
        (
            &json!("0 3 * * *"),
            &json!("Europe/Berlin"),
            &json!("1.0.0"),
            &json!("report.make")
        )
    );
    let refused = refusal(&client, "SELECT rouse.unschedule('report.make')").await;
    assert!(
        refused.contains("the module of handler report.make declares it"),
        "{refused}"
    );
    client
        .batch_execute("SELECT rouse.pause_schedule('report.make')")
        .await
        .unwrap();

    // A newer version on another host decides, and a schedule that an operator has paused stays paused.
    let second = host(&db, ALLOWED, &module("1.1.0", "0 4 * * *"));
    until(
        &client,
        "module_version = '1.1.0' AND cron = '0 4 * * *' AND state = 'paused'",
    )
    .await;
    // The host with the older version does not change it back.
    first.stop();
    let third = host(&db, ALLOWED, &module("1.0.0", "0 3 * * *"));
    let looked = "SELECT EXISTS (SELECT FROM rouse.worker WHERE stopped_at IS NULL AND capabilities @> '{\"report.make\": {\"version\": \"1.0.0\"}}')";
    until_true(&client, looked).await;
    assert_eq!(
        shown(&client, "report.make").await["module_version"],
        "1.1.0"
    );
    // The older version is started first: alone, it would decide.
    third.stop();
    second.stop();
    // While no host runs, the schedule stays.
    until_true(
        &client,
        "SELECT bool_and(stopped_at IS NOT NULL) FROM rouse.worker",
    )
    .await;
    assert_eq!(
        shown(&client, "report.make").await["module_version"],
        "1.1.0"
    );

    // A version without a schedule ends it.
    let without = host(&db, ALLOWED, &module("1.2.0", ""));
    until_true(&client, GONE).await;
    without.stop();
    let deleted: i64 = one(
        &client,
        "SELECT count(*) FROM rouse.record WHERE event = 'schedule_deleted'",
    )
    .await;
    assert_eq!(deleted, 1);
}

#[tokio::test]
async fn a_schedule_of_a_module_that_is_no_longer_allowed_is_deleted() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let allowed = host(&db, ALLOWED, &module("1.0.0", "0 3 * * *"));
    until(&client, "true").await;
    allowed.stop();
    let not = host(&db, "", &module("1.0.0", "0 3 * * *"));
    until_true(&client, GONE).await;
    not.stop();
}

#[tokio::test]
async fn a_schedule_that_a_login_has_created_is_left_alone() {
    let db = TestDb::new().await;
    let client = db.client().await;
    schedule(&client, "'report.make', 'report.make', cron => '0 9 * * *'").await;
    let host = host(&db, ALLOWED, &module("1.0.0", "0 3 * * *"));
    until(&client, "upcoming <> '{}'").await;
    assert_eq!(shown(&client, "report.make").await["cron"], "0 9 * * *");
    host.stop();
    assert_eq!(
        shown(&client, "report.make").await["module_version"],
        json!(null)
    );
}

#[test]
fn a_schedule_that_is_not_allowed_is_shown_with_the_lines_that_allow_it() {
    let folder = folder_of("", &[("report.wasm", module("1.0.0", "0 3 * * *"))]);
    let ran = show_handler("report.make", &folder, &[]);
    ran.exits(0)
        .prints("[handlers.\"report.make\"]\nschedule = true");
    let json = show_handler("report.make", &folder, &["--json"]).json();
    assert_eq!(json["manifest"]["missing"][0]["what"], "schedule");
    let folder = folder_of(ALLOWED, &[("report.wasm", module("1.0.0", "0 3 * * *"))]);
    let json = show_handler("report.make", &folder, &["--json"]).json();
    assert_eq!(json["manifest"]["missing"], json!([]));
    assert_eq!(json["manifest"]["granted"], json!(["schedule"]));
}

#[test]
fn a_module_with_an_invalid_schedule_is_refused() {
    let folder = folder_of("", &[("report.wasm", module("1.0.0", "0 25 * * *"))]);
    rouse_without_database(&["handlers"], &folder)
        .exits(1)
        .prints(
            "is invalid for the handler `report.make`: schedule: the cron expression is invalid",
        );
}
