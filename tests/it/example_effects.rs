//! examples/effects: an order that is paid once although its host is killed, and a price list.

use std::fs;
use std::process::Command;

use serde_json::json;

use crate::support::page::blocks_of;
use crate::support::worker::{ended, guests_dir, until_true};
use crate::support::{Host, TestDb, command, folder_of};

const PAGE: &str = "examples/effects/README.md";
/// The login of the page. All databases of a server share it.
pub(crate) const LOGIN: &str = "shop_handler";

/// The SQL of its page: first the application's tables and the login.
pub(crate) fn sql() -> Vec<String> {
    blocks_of(PAGE, "sql")
}

/// A host with the example and the settings of its page. `login`: that of its handlers.
pub(crate) fn serving(db: &TestDb, login: &str) -> Command {
    let module = fs::read(guests_dir().join("effects.wasm")).unwrap();
    let folder = folder_of(&blocks_of(PAGE, "toml")[0], &[("effects.wasm", module)]);
    let mut command = command(&db.url(), &["serve", "--http", "off"], &folder);
    let url = db.url();
    let (_, rest) = url.split_once('@').expect("a user");
    command.env("SHOP_DATABASE_URL", format!("postgres://{login}@{rest}"));
    command
}

#[tokio::test]
async fn an_order_is_paid_once_although_its_host_is_killed() {
    let db = TestDb::new().await;
    let client = db.client().await;
    let sql = sql();
    client.batch_execute(&sql[0]).await.unwrap();
    // The payment of the page, which takes a second instead of 30 once the host was killed.
    client.batch_execute(&sql[1]).await.unwrap();
    let first = Host::spawn(serving(&db, LOGIN));
    until_true(
        &client,
        "SELECT state = 'running' FROM rouse.jobs WHERE id = 1",
    )
    .await;
    first.kill();
    client
        .batch_execute("UPDATE rouse.job SET payload = payload || '{\"seconds\": 1}'")
        .await
        .unwrap();
    let second = Host::spawn(serving(&db, LOGIN));
    let paid = ended(&client, 1).await;
    assert_eq!(paid.result, Some(json!({"cents": 1250})));
    assert_eq!(paid.attempt, 2);
    let row = client.query_one(&sql[2], &[]).await.unwrap();
    assert_eq!((row.get::<_, bool>(0), row.get::<_, i64>(1)), (true, 1));

    client.batch_execute(&sql[3]).await.unwrap();
    let twice = "SELECT state = 'failed' AND error ->> 'kind' = 'effect_failed' FROM rouse.jobs WHERE handler = 'shop.pay' AND id <> 1";
    until_true(&client, twice).await;

    client.batch_execute(&sql[4]).await.unwrap();
    until_true(
        &client,
        "SELECT bool_and(state = 'succeeded') FROM rouse.jobs WHERE handler = 'prices.import'",
    )
    .await;
    let sum = client
        .query_one("SELECT count(*), sum(cents)::bigint FROM prices", &[])
        .await
        .unwrap();
    assert_eq!(
        (sum.get::<_, i64>(0), sum.get::<_, i64>(1)),
        (1_000, 500_500)
    );
    second.stop();
}
