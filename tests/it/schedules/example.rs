//! examples/nightly: a schedule that writes a report each night.

use std::fs;

use serde_json::{Value, json};

use super::one;
use crate::support::page::blocks_of;
use crate::support::worker::{guests_dir, until_true};
use crate::support::{Host, TestDb, command, folder_of};

const PAGE: &str = "examples/nightly/README.md";

#[tokio::test]
async fn the_nightly_report_is_written_for_each_day_of_a_backfill() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let module = fs::read(guests_dir().join("nightly.wasm")).unwrap();
    let folder = folder_of(&blocks_of(PAGE, "toml")[0], &[("nightly.wasm", module)]);
    for name in ["orders", "reports"] {
        fs::create_dir(folder.join(name)).unwrap();
    }
    for (day, cents) in [(1, 250), (2, 1_000), (3, 99)] {
        let orders = format!("order,cents\n1,{cents}\n2,{cents}\n");
        fs::write(folder.join(format!("orders/2026-03-0{day}.csv")), orders).unwrap();
    }
    let host = Host::spawn(command(&db.url(), &["serve", "--http", "off"], &folder));
    for statement in blocks_of(PAGE, "sql") {
        client.batch_execute(&statement).await.unwrap();
    }
    until_true(
        &client,
        "SELECT count(*) = 3 FROM rouse.finished WHERE state = 'succeeded'",
    )
    .await;
    host.stop();
    let results: Value = one(
        &client,
        "SELECT jsonb_agg(result ORDER BY id) FROM rouse.finished",
    )
    .await;
    let report =
        |day, cents| json!({"day": format!("2026-03-0{day}"), "orders": 2, "cents": cents});
    assert_eq!(
        results,
        json!([report(1, 500), report(2, 2_000), report(3, 198)])
    );
    let written = fs::read_to_string(folder.join("reports/2026-03-02.txt")).unwrap();
    assert_eq!(written, "2 orders, 2000 cents\n");
}
