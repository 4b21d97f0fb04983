//! SQL statements of handlers: queries, and effects that commit with an outcome or a step.

mod commits;
mod errors;
mod parked;
mod shop;
mod together;
mod wall;

use serde_json::{Value, json};

use self::shop::{Shop, call};

#[tokio::test]
async fn effects_are_committed_with_the_outcome_and_only_after_a_success() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let lines = [
        json!({"sql": call("add_line", json!([1, 10]))}),
        json!({"sql": call("add_line", json!([1, 20]))}),
    ];
    for (then, left) in [
        (json!("fail_once"), 2),
        (json!("fail"), 0),
        (json!("fail_permanently"), 0),
        (json!("panic"), 0),
    ] {
        shop.clear().await;
        let script: Vec<Value> = lines.iter().cloned().chain([then.clone()]).collect();
        shop.run(json!(script)).await;
        assert_eq!(shop.count("ledger").await, left, "{then}");
    }
}

#[tokio::test]
async fn effects_run_in_order_and_count_their_rows() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql("INSERT INTO orders VALUES (1), (2)").await;
    let paid = shop
        .run(json!([
            {"sql": call("expect_unpaid", json!([1]))},
            {"sql": call("mark_paid", json!([1]))},
            {"sql": call("returning", json!([3, 10]))},
        ]))
        .await;
    assert_eq!(paid.state, "succeeded", "{:?}", paid.error);
    // The second effect of the same kind does not find a row, so the first effect is also undone.
    let twice = shop
        .run(json!([
            {"sql": call("mark_paid", json!([2]))},
            {"sql": call("mark_paid", json!([2]))},
        ]))
        .await;
    let error = twice.error.unwrap();
    assert_eq!(twice.state, "failed");
    assert_eq!(error["kind"], "effect_failed");
    assert_eq!(error["details"]["statement"], "mark_paid");
    assert_eq!(error["details"]["code"], "rows");
    let message = error["message"].as_str().unwrap();
    assert!(
        message.contains("wrong number of rows: expected 1, got 0"),
        "{message}"
    );
    let sql = "SELECT array_agg(id ORDER BY id) FILTER (WHERE paid) = '{1}' FROM orders";
    assert!(shop.holds(sql).await);
}

#[tokio::test]
async fn parameters_and_rows_keep_their_values() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let params = json!([
        9_007_199_254_740_993_i64,
        "it's \\ \"quoted\" → ü",
        {"a": [1, null]},
        ["x,y", null, "\"z\""],
        true,
        "12345678901234567890.123456789"
    ]);
    let read = shop
        .run(json!([{"query": call("types", params)}, {"query": call("types", json!([null, null, null, null, null, null]))}]))
        .await;
    let rows = &read.result.unwrap();
    let row = &rows[0][0];
    assert_eq!(row["n"].to_string(), "9007199254740993");
    assert_eq!(row["t"], "it's \\ \"quoted\" → ü");
    assert_eq!(row["j"], json!({"a": [1, null]}));
    assert_eq!(row["a"], json!(["x,y", null, "\"z\""]));
    assert_eq!(row["b"], true);
    let nothing = json!({"n": null, "t": null, "j": null, "a": null, "b": null, "d": null});
    assert_eq!(rows[1][0], nothing);
}

#[tokio::test]
async fn queries_read_what_is_committed_and_cannot_write() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql("INSERT INTO orders VALUES (1), (2)").await;
    let read = shop
        .run(json!([
            {"sql": call("mark_paid", json!([1]))},
            // The effect is not committed yet.
            {"query": call("orders", json!([[1, 2, 3]]))},
            {"try_query": call("mark_paid", json!([1]))},
            {"try_query": call("checked", json!([1]))},
        ]))
        .await;
    let result = read.result.unwrap();
    let unpaid = json!([{"id": 1, "paid": false}, {"id": 2, "paid": false}]);
    assert_eq!(result[0], unpaid);
    assert_eq!(result[1]["kind"], "sql_refused");
    let not_a_query = result[1]["message"].as_str().unwrap();
    assert!(not_a_query.contains("is not a query"), "{not_a_query}");
    assert_eq!(result[2]["kind"], "sql_refused");
    assert!(shop.holds("SELECT bool_or(paid) FROM orders").await);
}

#[tokio::test]
async fn a_query_returns_as_many_rows_as_its_statement_declares() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    let read = shop
        .run(json!([
            {"query": call("one_order", json!([1]))},
            {"try_query": call("one_order", json!([2]))},
        ]))
        .await;
    let result = read.result.unwrap();
    assert_eq!(result[0], json!([{"id": 1}]));
    assert_eq!(result[1]["kind"], "sql_failed");
    let details = json!({"statement": "one_order", "code": "rows"});
    assert_eq!(result[1]["details"], details);
    assert_eq!(result[1]["permanent"], true);
    let missing = shop
        .run(json!([{"query": call("one_order", json!([2]))}]))
        .await;
    assert_eq!((missing.state.as_str(), missing.attempt), ("failed", 1));
    let message = missing.error.unwrap()["message"].clone();
    let message = message.as_str().unwrap();
    assert!(
        message.contains("wrong number of rows: expected 1, got 0"),
        "{message}"
    );
}

#[tokio::test]
async fn a_step_commits_its_effects_once_and_a_failed_one_commits_neither() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql("INSERT INTO accounts VALUES (1, 100), (2, 0)")
        .await;
    let move_ten = json!([
        call("transfer", json!([1, -10])),
        call("transfer", json!([2, 10]))
    ]);
    let too_much = json!([
        call("transfer", json!([2, 1000])),
        call("transfer", json!([1, -1000]))
    ]);
    let done = shop
        .run(json!([
            {"step": {"name": "move", "effects": move_ten}},
            {"try_step": {"name": "too much", "effects": too_much}},
            "fail_once",
        ]))
        .await;
    let result = done.result.unwrap();
    // The second attempt has the result of the first attempt, and has tried the failed step again.
    assert_eq!(
        result[0],
        1,
        "{result} {:?}",
        crate::support::worker::events(&shop.client, 1).await
    );
    assert_eq!(result[1]["kind"], "sql_failed");
    assert_eq!(result[1]["details"]["code"], "23514");
    let sql = "SELECT array_agg(balance ORDER BY id) = '{90,10}' FROM accounts";
    assert!(shop.holds(sql).await);
}

#[tokio::test]
async fn steps_suspensions_and_effects_can_be_combined_in_any_order() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let line = |amount: i64| call("add_line", json!([7, amount]));
    let id = shop
        .enqueue(json!([
            {"sql": line(1)},
            {"step": {"name": "a", "effects": [line(2)]}},
            {"sleep": {"ms": 3000}},
            {"step": {"name": "b", "effects": [line(3)]}},
            {"sql": line(4)},
        ]))
        .await;
    shop.until(&format!(
        "SELECT wait IS NOT NULL FROM rouse.jobs WHERE id = {id}"
    ))
    .await;
    // Only the step is committed.
    assert!(
        shop.holds("SELECT array_agg(amount) = '{2}' FROM ledger")
            .await
    );
    shop.sql(&format!("SELECT rouse.reschedule({id})")).await;
    assert_eq!(shop.ended(id).await.state, "succeeded");
    let sql = "SELECT array_agg(amount ORDER BY amount) = '{1,2,3,4}' FROM ledger";
    assert!(shop.holds(sql).await);
}

#[tokio::test]
async fn no_transaction_is_open_while_a_guest_runs() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let line = || call("add_line", json!([7, 1]));
    // Each guest waits until its job is cancelled.
    let wait = || json!({"run": {"ms": 60_000}});
    for script in [
        json!([{"sql": line()}, wait()]),
        json!([{"query": call("orders", json!([[1]]))}, wait()]),
        json!([{"step": {"name": "a", "effects": [line()]}}, wait()]),
    ] {
        let id = shop.enqueue(script.clone()).await;
        shop.until(&format!(
            "SELECT coalesce(progress->>'step' = 'waiting', false) FROM rouse.job({id})"
        ))
        .await;
        // A check of statements may be running, but it ends while the guest still waits.
        shop.until(&format!(
            "SELECT NOT EXISTS (
                 SELECT FROM pg_stat_activity WHERE datname = current_database() AND usename = '{}' AND xact_start IS NOT NULL)",
            shop.role
        ))
        .await;
        shop.sql(&format!("SELECT rouse.cancel({id})")).await;
        assert_eq!(shop.ended(id).await.state, "cancelled");
    }
}

#[tokio::test]
async fn the_limits_on_rows_and_bytes_refuse_a_query_and_nothing_else() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let read = shop
        .run(json!([
            {"query": call("text", json!([10, 3]))},
            {"try_query": call("text", json!([10, 2000]))},
            {"try_query": call("text", json!([100_000, 20]))},
            // A gigabyte as the row of a query, and of an effect.
            {"try_query": call("text", json!([1_000_000_000, 1]))},
            {"sql": call("text", json!([100_000_000, 1]))},
        ]))
        .await;
    let result = read.result.unwrap();
    assert_eq!(result[0][2]["x"], "xxxxxxxxxx");
    for (index, why) in [(1, "rows_max"), (2, "bytes_max")] {
        let message = result[index]["message"].as_str().unwrap();
        assert!(message.contains(why), "{message}");
    }
    assert_ne!(result[3]["kind"], Value::Null);
    assert_eq!(read.state, "succeeded");
}
