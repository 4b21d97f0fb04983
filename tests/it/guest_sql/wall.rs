//! Privileges of a handler's login do not extend to Rouse, or to other transactions of the session.

use serde_json::{Value, json};

use super::shop::{Shop, call};

#[tokio::test]
async fn settings_of_one_job_are_reset_for_the_next_one() {
    let shop = Shop::open().await;
    // One connection, so that both jobs share a session.
    let settings = rouse::worker::Settings {
        slots: 1,
        ..Default::default()
    };
    let _worker = shop.start_with(shop.login(), settings).await;
    for (name, value) in [
        ("search_path", "nowhere"),
        ("statement_timeout", "4321ms"),
        ("my.note", "left"),
        ("transform_null_equals", "on"),
        ("default_transaction_read_only", "on"),
    ] {
        let set = shop
            .run(json!([{"sql": call("set", json!([name, value, "false"]))}]))
            .await;
        assert_eq!(set.state, "succeeded", "{name}: {:?}", set.error);
        let read = shop
            .run(json!([
                {"query": call("setting", json!([name]))},
                {"sql": call("add_line", json!([1, 1]))},
            ]))
            .await;
        assert_eq!(read.state, "succeeded", "{name}: {:?}", read.error);
        let rows = read.result.unwrap();
        assert_ne!(rows[0][0]["value"], value, "{name}");
    }
}

#[tokio::test]
async fn a_role_that_the_login_may_take_does_not_outlive_the_transaction() {
    let shop = Shop::open().await;
    let role = &shop.role;
    shop.sql(&format!(
        "CREATE ROLE {role}_more; GRANT {role}_more TO {role}"
    ))
    .await;
    let settings = rouse::worker::Settings {
        slots: 1,
        ..Default::default()
    };
    let _worker = shop.start_with(shop.login(), settings).await;
    let more = format!("{role}_more");
    let set = shop
        .run(json!([{"sql": call("set", json!(["role", more, "false"]))}]))
        .await;
    assert_eq!(set.state, "succeeded", "{:?}", set.error);
    let read = shop
        .run(json!([{"query": call("setting", json!(["role"]))}]))
        .await;
    let rows = read.result.unwrap();
    assert_eq!(rows[0][0]["current_user"], json!(role));
    // A role that the login may not take.
    let refused = shop
        .run(json!([{"sql": call("set", json!(["role", "rouse_owner", "false"]))}]))
        .await;
    let error = refused.error.unwrap();
    assert_eq!((refused.state.as_str(), refused.attempt), ("failed", 3));
    assert_eq!(error["details"]["code"], "42501", "{error}");
}

#[tokio::test]
async fn a_statement_cannot_lengthen_its_own_timeout() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let endless = shop
        .run(json!([
            {"sql": call("set", json!(["statement_timeout", "0", "true"]))},
            {"sql": call("sleepy", json!([3600]))},
        ]))
        .await;
    assert_eq!(endless.state, "failed");
    let error = endless.error.unwrap();
    // The server ends it, also if the host cannot.
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("due to statement timeout"), "{message}");
    assert_eq!(shop.count("ledger").await, 0);
}

#[tokio::test]
async fn advisory_locks_end_with_the_next_transaction_of_the_session() {
    let shop = Shop::open().await;
    let settings = rouse::worker::Settings {
        slots: 1,
        ..Default::default()
    };
    let _worker = shop.start_with(shop.login(), settings).await;
    let locked = shop.run(json!([{"sql": call("lock", json!([7]))}])).await;
    assert_eq!(locked.state, "succeeded", "{:?}", locked.error);
    let read = shop.run(json!([{"query": call("locks", json!([]))}])).await;
    assert_eq!(read.result.unwrap()[0][0]["count"], 0);
}

#[tokio::test]
async fn neither_the_key_nor_a_fence_nor_a_parameter_is_visible_to_a_later_statement() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let mut seen = Vec::new();
    for amount in 0..5 {
        let secret = 7_777_000 + amount;
        let read = shop
            .run(json!([
                {"step": {"name": "s", "effects": [call("add_line", json!([secret, secret]))]}},
                {"query": call("activity", json!([]))},
                {"sql": call("add_line", json!([secret, secret]))},
            ]))
            .await;
        assert_eq!(read.state, "succeeded", "{:?}", read.error);
        seen.push(read.result.unwrap()[1].clone());
    }
    let seen = Value::from(seen).to_string();
    // Texts of statements are visible, with numbers in place of parameters.
    assert!(seen.contains("pg_stat_activity"), "{seen}");
    assert!(!seen.contains("7777"), "{seen}");
    assert!(!seen.contains("\\\\x"), "{seen}");
}

#[tokio::test]
async fn the_functions_for_effects_need_the_key_of_a_live_worker() {
    let shop = Shop::open().await;
    let client = crate::support::database::connect(&shop.as_login(&shop.db.url())).await;
    for (sql, why) in [
        (
            "SELECT rouse.settle_with_effects(1, '\\x00', '{}', '{}')",
            "no worker has incarnation 1 and this key",
        ),
        (
            "SELECT rouse.record_step_with_effects(1, '\\x00', 1, 1, 's', '1')",
            "no worker has incarnation 1 and this key",
        ),
        (
            "SELECT rouse.confirm(1, '\\x00', 1, 1, 1)",
            "permission denied",
        ),
        ("SELECT rouse.enqueue('a', '{}')", "permission denied"),
        ("SELECT count(*) FROM rouse.job", "permission denied"),
        ("SELECT count(*) FROM rouse.worker", "permission denied"),
    ] {
        let refused = crate::support::database::refusal(&client, sql).await;
        assert!(refused.contains(why), "{sql}: {refused}");
    }
}
