//! Errors of Postgres about effects, by their classes.

use std::time::{Duration, Instant};

use rouse::worker::Settings;
use serde_json::json;
use tokio_postgres::Client;

use super::shop::{MODULE, Shop, call};
use crate::support::database::connect;
use crate::support::refusals::refuse_inserts;
use crate::support::worker::{TIMEOUT, enqueue_sql, guests_dir, lease, show};
use crate::support::{Host, command, folder_of};

/// Holds the lock of a row in a transaction of its own.
async fn lock(shop: &Shop, sql: &str) -> Client {
    let other = connect(&shop.db.url()).await;
    other.batch_execute(&format!("BEGIN; {sql}")).await.unwrap();
    other
}

#[tokio::test]
async fn data_that_postgres_refuses_fails_the_job_or_retries_it_as_the_statement_declares() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    for (statement, params, code, attempts) in [
        ("add_order", json!([1]), "23505", 1),
        ("add_or_retry", json!([1]), "23505", 3),
        ("add_order", json!(["seven"]), "22P02", 1),
        ("add_line", json!([null, 1]), "23502", 1),
    ] {
        let failed = shop
            .run(json!([
                {"sql": call("add_line", json!([1, 1]))},
                {"sql": call(statement, params)},
            ]))
            .await;
        let error = failed.error.unwrap();
        assert_eq!(failed.state, "failed", "{statement}");
        assert_eq!(error["kind"], "effect_failed", "{error}");
        assert_eq!(error["details"]["code"], code, "{error}");
        assert_eq!(failed.attempt, attempts, "{statement}");
    }
    assert_eq!(shop.count("ledger").await, 0);
}

#[tokio::test]
async fn a_settlement_that_postgres_refuses_fails_the_job_at_once_as_without_effects() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql("UPDATE rouse.limits SET descendants_max = 1")
        .await;
    let line = json!({"sql": call("add_line", json!([1, 1]))});
    let child = json!({"enqueue": {"handler": "sql.run", "payload": {"script": []}}});
    let grants = json!({"memory_mb": 0});
    let limited =
        json!({"enqueue": {"handler": "sql.run", "payload": {"script": []}, "grants": grants}});
    for (script, why) in [
        (
            json!([line, child, child]),
            "it may have at most 1 more descendants",
        ),
        (json!([line, limited]), "memory_mb of grants must be"),
        (json!([line]), "no_success"),
    ] {
        if why == "no_success" {
            shop.sql(
                "ALTER TABLE rouse.finished ADD CONSTRAINT no_success CHECK (state <> 'succeeded')",
            )
            .await;
        }
        let failed = shop.run(script).await;
        let error = failed.error.unwrap();
        assert_eq!((failed.state.as_str(), failed.attempt), ("failed", 1));
        assert_eq!(error["kind"], "invalid_result", "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(why), "{message}");
    }
    assert_eq!(shop.count("ledger").await, 0);
    assert_eq!(shop.count("rouse.job").await, 0);
}

#[tokio::test]
async fn a_commit_whose_partition_stays_missing_is_tried_after_pauses_until_its_lease_ends() {
    let shop = Shop::open().await;
    shop.sql(
        "CREATE SEQUENCE public.tries;
         CREATE FUNCTION public.miss() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
             -- A sequence keeps its value whatever becomes of the transaction.
             PERFORM nextval('public.tries');
             RAISE EXCEPTION 'no partition found' USING ERRCODE = 'check_violation', SCHEMA = 'rouse', TABLE = 'finished';
         END $$;
         CREATE TRIGGER miss BEFORE INSERT ON rouse.finished FOR EACH ROW EXECUTE FUNCTION public.miss()",
    )
    .await;
    let settings = Settings {
        overrides: lease("sql.run", 2),
        ..Settings::default()
    };
    let worker = shop.start_with(shop.login(), settings).await;
    shop.until_all_are_checked().await;
    let line = json!([{"sql": call("add_line", json!([1, 1]))}]);
    // Before the first try: a slow machine only makes this longer.
    let started_at = Instant::now();
    let id = shop.enqueue(line).await;
    shop.until("SELECT last_value >= 6 FROM public.tries").await;
    let took = started_at.elapsed();
    assert!(took > Duration::from_millis(500), "{took:?}");
    // The lease is not renewed forever: another attempt starts.
    let again = format!("SELECT attempt > 1 FROM rouse.job WHERE id = {id}");
    shop.until(&again).await;
    // Locks the table before its partitions, as readers of the history do.
    shop.sql("BEGIN; LOCK TABLE rouse.finished IN ACCESS EXCLUSIVE MODE; DROP TRIGGER miss ON rouse.finished; COMMIT")
        .await;
    assert_eq!(shop.ended(id).await.state, "succeeded");
    worker.drain().await;
}

/// The host cannot read the types of its records.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn effects_that_cannot_be_committed_for_a_while_are_logged_as_a_warning() {
    let shop = Shop::open().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    let config = "[handlers.\"sql.*\"]\nmodule = \"flow_guests.wasm\"\n\n\
                  [handlers.\"sql.*\".sql]\nlogin = { env = \"SHOP_DATABASE_URL\" }\nstatements = \"all\"\n";
    let module = std::fs::read(guests_dir().join(MODULE)).unwrap();
    let folder = folder_of(config, &[(MODULE, module)]);
    let mut serve = command(&shop.db.url(), &["serve", "--http", "off"], &folder);
    serve.env("SHOP_DATABASE_URL", shop.as_login(&shop.db.url()));
    let host = Host::spawn(serve);
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    // The progress of this job is tried again every second. After each such error, the host reads the types again.
    let error = "'no progress' USING ERRCODE = 'undefined_object'";
    refuse_inserts(&shop.client, "rouse.progress", "true", error).await;
    shop.enqueue(json!([{"run": {"ms": 600_000}}])).await;
    shop.until("SELECT is_called FROM public.tries").await;
    let other = lock(&shop, "SELECT FROM orders WHERE id = 1 FOR UPDATE").await;
    let id = shop
        .enqueue(json!([{"sql": call("mark_paid", json!([1]))}]))
        .await;
    shop.until(&format!(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE usename = '{}' AND wait_event_type = 'Lock'",
        shop.role
    ))
    .await;
    shop.sql("ALTER TYPE rouse.schedule_firing RENAME TO hidden")
        .await;
    host.line(TIMEOUT, |line| {
        line.contains("WARN")
            && line.contains("cannot commit effects; trying again")
            && line.contains(&format!("job.id={id} "))
    });
    other.batch_execute("ROLLBACK").await.unwrap();
    shop.sql("ALTER TYPE rouse.hidden RENAME TO schedule_firing")
        .await;
    let ended = shop.ended(id).await;
    assert_eq!((ended.state.as_str(), ended.attempt), ("succeeded", 1));
}

#[tokio::test]
async fn invalid_parameters_are_refused_at_once() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    for (params, why) in [
        (json!([]), "wrong number of parameters: expected 1, got 0"),
        (
            json!([{}]),
            "parameter $1: expected a value of type int8, got an object",
        ),
    ] {
        let failed = shop.run(json!([{"sql": call("add_order", params)}])).await;
        let error = failed.error.unwrap();
        assert_eq!(error["guest_kind"], "sql_refused");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(why), "{message}");
    }
}

/// Only the first try waits for the lock, until its timeout of one second. Later tries find that nobody has it.
#[tokio::test]
async fn a_lock_that_is_released_soon_costs_no_attempt() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql(
        "INSERT INTO orders VALUES (1);
         CREATE SEQUENCE public.tries;
         CREATE FUNCTION public.wait_once() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
             -- A sequence keeps its value whatever becomes of the transaction.
             IF nextval('public.tries') = 1 THEN
                 PERFORM pg_advisory_xact_lock(77003);
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER wait_once BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION public.wait_once()",
    )
    .await;
    let _other = lock(&shop, "SELECT pg_advisory_xact_lock(77003)").await;
    let ended = shop
        .run(json!([{"sql": call("mark_paid", json!([1]))}]))
        .await;
    assert_eq!((ended.state.as_str(), ended.attempt), ("succeeded", 1));
    assert!(shop.holds("SELECT last_value >= 2 FROM public.tries").await);
}

/// The same lock would delay a settlement without effects.
#[tokio::test]
async fn a_producer_that_names_the_job_delays_its_effects_and_costs_no_attempt() {
    let shop = Shop::open().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    let id = shop
        .enqueue(json!([{"sql": call("mark_paid", json!([1]))}]))
        .await;
    let enqueue = format!("SELECT rouse.enqueue('x', after => '[{id}]')");
    let other = lock(&shop, &enqueue).await;
    let _worker = shop.start().await;
    // The transaction waits for the lock more often than it is tried if it waits for other locks.
    let waits = format!(
        "SELECT count(*) > 0 FROM pg_stat_activity WHERE usename = '{}' AND wait_event_type = 'Lock'",
        shop.role
    );
    for _ in 0..8 {
        shop.until(&waits).await;
        shop.until(&waits.replace("> 0", "= 0")).await;
    }
    other.batch_execute("ROLLBACK").await.unwrap();
    let ended = shop.ended(id).await;
    assert_eq!((ended.state.as_str(), ended.attempt), ("succeeded", 1));
}

#[tokio::test]
async fn a_statement_that_never_ends_is_stopped_and_does_not_hold_up_other_jobs() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let slow = shop
        .enqueue(json!([{"sql": call("sleepy", json!([3600]))}]))
        .await;
    shop.until("SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%pg_sleep%' AND state = 'active' AND pid <> pg_backend_pid())")
        .await;
    let other = shop
        .run(json!([{"sql": call("add_line", json!([1, 1]))}]))
        .await;
    assert_eq!(other.state, "succeeded");
    let slow = shop.ended(slow).await;
    let error = slow.error.unwrap();
    assert_eq!((slow.state.as_str(), slow.attempt), ("failed", 3));
    assert_eq!(error["details"]["code"], "57014", "{error}");
}

#[tokio::test]
async fn a_transaction_timeout_of_the_login_does_not_end_its_transactions() {
    let shop = Shop::open().await;
    // Postgres has this setting from version 17 on.
    shop.sql(&format!(
        "DO $$ BEGIN
             IF current_setting('server_version_num')::integer >= 170000 THEN
                 ALTER ROLE {} SET transaction_timeout = '400ms';
             END IF;
         END $$",
        shop.role
    ))
    .await;
    let worker = shop.start().await;
    let slow = shop
        .run(json!([
            {"sql": call("add_line", json!([1, 1]))},
            {"sql": call("sleepy", json!([0.8]))},
            {"query": call("sleepy", json!([0.8]))},
        ]))
        .await;
    let end = (slow.state.as_str(), slow.attempt);
    assert_eq!(end, ("succeeded", 1), "{:?}", slow.error);
    assert_eq!(shop.count("ledger").await, 1);
    worker.drain().await;
}

/// Something other than the attempt may have set the timeout.
#[tokio::test]
async fn a_transaction_that_the_server_ends_for_its_duration_costs_no_attempt() {
    for when in [
        "TRIGGER overrun BEFORE INSERT ON ledger",
        // The response to COMMIT.
        "CONSTRAINT TRIGGER overrun AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED",
    ] {
        let shop = Shop::open().await;
        // On versions before 17, no transaction fails.
        shop.sql(&format!(
            "CREATE SEQUENCE public.tries;
             CREATE FUNCTION overrun() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
                 -- A sequence keeps its value whatever becomes of the transaction.
                 IF nextval('public.tries') = 1 AND current_setting('server_version_num')::integer >= 170000 THEN
                     PERFORM set_config('transaction_timeout', '1', true);
                     PERFORM pg_sleep(60);
                 END IF;
                 RETURN NEW;
             END $$;
             CREATE {when} FOR EACH ROW EXECUTE FUNCTION overrun()"
        ))
        .await;
        let worker = shop.start().await;
        let ended = shop
            .run(json!([{"sql": call("add_line", json!([1, 1]))}]))
            .await;
        let end = (ended.state.as_str(), ended.attempt);
        assert_eq!(end, ("succeeded", 1), "{when}: {:?}", ended.error);
        assert_eq!(shop.count("ledger").await, 1, "{when}");
        worker.drain().await;
    }
}

/// As for a foreign table whose server is unreachable. The login itself responds.
#[tokio::test]
async fn a_statement_that_loses_its_connection_to_another_server_fails_the_attempt() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql(
        "CREATE FUNCTION forward() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             RAISE EXCEPTION 'could not connect to server' USING ERRCODE = 'connection_failure';
         END $$;
         CREATE TRIGGER forward BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION forward()",
    )
    .await;
    let failed = shop
        .run(json!([{"sql": call("add_line", json!([1, 1]))}]))
        .await;
    let error = failed.error.unwrap();
    assert_eq!((failed.state.as_str(), failed.attempt), ("failed", 3));
    assert_eq!(error["kind"], "effect_failed", "{error}");
    assert_eq!(error["details"]["code"], "08006", "{error}");
    assert_eq!(shop.count("ledger").await, 0);
}

#[tokio::test]
async fn a_cancelled_job_has_no_effects() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    // The effect of the job waits for this lock when the job is cancelled.
    let other = lock(&shop, "SELECT FROM orders WHERE id = 1 FOR UPDATE").await;
    let id = shop
        .enqueue(json!([{"run": {"ms": 1000}}, {"sql": call("mark_paid", json!([1]))}]))
        .await;
    shop.until(&format!(
        "SELECT coalesce(progress->>'step' = 'waiting', false) FROM rouse.job({id})"
    ))
    .await;
    assert!(crate::support::worker::cancel(&shop.client, id).await);
    other.batch_execute("ROLLBACK").await.unwrap();
    assert_eq!(shop.ended(id).await.state, "cancelled");
    assert!(shop.holds("SELECT NOT paid FROM orders").await);
}

/// Other attempts can use the connections of the login at once.
#[tokio::test]
async fn a_step_that_is_aborted_while_it_waits_for_a_lock_leaves_no_open_transaction() {
    let shop = Shop::open().await;
    let worker = shop.start().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    let other = lock(&shop, "SELECT FROM orders WHERE id = 1 FOR UPDATE").await;
    let effects = json!([
        call("add_line", json!([1, 10])),
        call("mark_paid", json!([1]))
    ]);
    let payload = json!({"script": [{"step": {"name": "pay", "effects": effects}}]});
    let id = enqueue_sql(
        &shop.client,
        &format!("'sql.run', '{payload}', timeout => '1500 ms', max_attempts => 1"),
    )
    .await;
    while matches!(&*show(&shop.client, id).await.state, "queued" | "running") {
        let next = shop
            .run(json!([{"sql": call("add_line", json!([2, 10]))}]))
            .await;
        assert_eq!(next.state, "succeeded", "{:?}", next.error);
    }
    assert_eq!(shop.ended(id).await.state, "timed_out");
    let is_idle = format!(
        "SELECT count(*) = 0 FROM pg_stat_activity WHERE usename = '{}' AND xact_start IS NOT NULL",
        shop.role
    );
    shop.until(&is_idle).await;
    other.batch_execute("ROLLBACK").await.unwrap();
    for amount in 0..4 {
        let next = shop
            .run(json!([{"sql": call("add_line", json!([2, amount]))}]))
            .await;
        assert_eq!(next.state, "succeeded", "{:?}", next.error);
    }
    let has_no_effect =
        "SELECT NOT EXISTS (SELECT FROM ledger WHERE job = 1) AND NOT paid FROM orders";
    assert!(shop.holds(has_no_effect).await);
    worker.drain().await;
}

#[tokio::test]
async fn a_deferred_constraint_and_a_trigger_fail_the_job_at_commit() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql(
        "CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'not %', NEW.amount; END $$;
         CREATE CONSTRAINT TRIGGER late AFTER INSERT ON ledger DEFERRABLE INITIALLY DEFERRED
             FOR EACH ROW WHEN (NEW.amount = 1) EXECUTE FUNCTION no();
         CREATE TRIGGER early BEFORE INSERT ON ledger FOR EACH ROW WHEN (NEW.amount = 2) EXECUTE FUNCTION no();",
    )
    .await;
    for amount in [1, 2] {
        let failed = shop
            .run(json!([
                {"sql": call("add_order", json!([amount]))},
                {"sql": call("add_line", json!([1, amount]))},
            ]))
            .await;
        let error = failed.error.unwrap();
        assert_eq!(
            (failed.state.as_str(), failed.attempt),
            ("failed", 1),
            "{error}"
        );
        assert_eq!(error["details"]["code"], "P0001", "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("not {amount}")), "{message}");
    }
    assert_eq!(shop.count("orders").await, 0);
}

#[tokio::test]
async fn a_row_that_violates_a_policy_fails_its_job_and_does_not_park_its_handler() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    shop.sql(
        "ALTER TABLE ledger ENABLE ROW LEVEL SECURITY;
         CREATE POLICY small ON ledger WITH CHECK (amount < 100)",
    )
    .await;
    let failed = shop
        .run(json!([{"sql": call("add_line", json!([1, 100]))}]))
        .await;
    assert_eq!(failed.state, "failed");
    assert_eq!(failed.error.unwrap()["details"]["code"], "42501");
    let other = shop
        .run(json!([{"sql": call("add_line", json!([1, 99]))}]))
        .await;
    assert_eq!(other.state, "succeeded");
}

#[tokio::test]
async fn effects_wait_for_a_free_connection_and_all_are_committed() {
    let shop = Shop::open().await;
    let settings = Settings {
        slots: 20,
        ..Settings::default()
    };
    let worker = shop.start_with(shop.login(), settings).await;
    let mut ids = Vec::new();
    for amount in 0..100 {
        ids.push(
            shop.enqueue(json!([{"sql": call("add_line", json!([1, amount]))}]))
                .await,
        );
    }
    for id in ids {
        assert_eq!(shop.ended(id).await.state, "succeeded");
    }
    let connections = format!(
        "SELECT count(*) <= 2 FROM pg_stat_activity WHERE usename = '{}'",
        shop.role
    );
    assert!(shop.holds(&connections).await);
    assert!(
        shop.holds("SELECT count(DISTINCT amount) = 100 AND count(*) = 100 FROM ledger")
            .await
    );
    tokio::time::timeout(Duration::from_secs(30), worker.drain())
        .await
        .expect("it ends");
}
