//! Commits whose responses are lost, and attempts that have lost their jobs.

use std::time::Duration;

use rouse::job::{OnError, SqlLimits, Statement};
use rouse::store::{Login, Unfit};
use rouse::worker::{Overrides, Settings};
use serde_json::{Value, json};

use super::parked::parked;
use super::shop::{Shop, call, connector};
use crate::support::TestDb;
use crate::support::proxy::{COMMIT, Proxy, Side};
use crate::support::worker::lease;

fn payment() -> Value {
    json!([
        {"sql": call("mark_paid", json!([1]))},
        {"sql": call("add_line", json!([1, 10]))},
    ])
}

fn short_leases() -> Overrides {
    lease("sql.*", 5)
}

/// A shop whose effects go through a proxy.
async fn through_a_proxy() -> (Shop, Proxy) {
    let shop = Shop::open().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    let proxy = Proxy::start(&shop.db).await;
    (shop, proxy)
}

/// Asserts that the job has succeeded, and that its effects were applied once.
async fn assert_paid_once(shop: &Shop, id: i64) {
    let ended = shop.ended(id).await;
    assert_eq!(ended.state, "succeeded", "{:?}", ended.error);
    assert!(
        shop.holds("SELECT count(*) = 1 AND sum(amount) = 10 FROM ledger")
            .await
    );
    assert!(shop.holds("SELECT bool_and(paid) FROM orders").await);
}

#[tokio::test]
async fn effects_are_committed_once_if_the_connection_is_cut_at_any_message() {
    for (words, side) in [
        ("BEGIN ISOLATION", Side::Cut),
        ("BEGIN ISOLATION", Side::Response),
        (COMMIT, Side::Cut),
        (COMMIT, Side::Response),
    ] {
        let (shop, proxy) = through_a_proxy().await;
        let login = connector(&shop.as_login(proxy.url()));
        let worker = shop.start_with(login, Settings::default()).await;
        shop.until_all_are_checked().await;
        let held = proxy.hold(words, side);
        let id = shop.enqueue(payment()).await;
        held.caught().await;
        if side == Side::Response {
            // The server has committed, but the host does not know this.
            proxy.go_down();
            proxy.come_up();
        }
        held.release();
        assert_paid_once(&shop, id).await;
        let attempts = format!("SELECT attempt = 1 FROM rouse.jobs WHERE id = {id}");
        assert!(shop.holds(&attempts).await, "{words} {side:?}");
        worker.drain().await;
    }
}

/// The other connections, of which there are few, remain for claims, settlements and renewals.
#[tokio::test]
async fn commits_that_got_no_response_are_looked_up_two_at_a_time() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    let login = connector(&shop.as_login(proxy.url()));
    let worker = shop.start_with(login, Settings::default()).await;
    shop.until_all_are_checked().await;
    // A third lookup at the same time uses the sequence.
    shop.sql(
        "ALTER FUNCTION rouse.confirm RENAME TO confirm_one;
         CREATE SEQUENCE crowded;
         CREATE FUNCTION rouse.confirm(p_worker bigint, p_key bytea, p_id bigint, p_fence bigint, p_attempt integer)
             RETURNS text LANGUAGE plpgsql AS $$
         BEGIN
             IF NOT pg_try_advisory_xact_lock(71, 1) THEN
                 IF NOT pg_try_advisory_xact_lock(71, 2) THEN
                     PERFORM nextval('public.crowded');
                 END IF;
             END IF;
             PERFORM pg_sleep(0.1);
             RETURN rouse.confirm_one(p_worker, p_key, p_id, p_fence, p_attempt);
         END $$;
         INSERT INTO orders SELECT generate_series(1, 20)",
    )
    .await;
    shop.sql("BEGIN").await;
    for id in 1..=20 {
        shop.enqueue(json!([
            {"sql": call("mark_paid", json!([id]))},
            {"sql": call("add_line", json!([id, 10]))},
        ]))
        .await;
    }
    let held = proxy.hold(COMMIT, Side::Cut);
    shop.sql("COMMIT").await;
    // After six lost commits, most of the jobs are in doubt, because they share transactions.
    held.caught_times(6).await;
    held.release();
    shop.until("SELECT NOT EXISTS (SELECT FROM rouse.job)")
        .await;
    assert!(
        shop.holds("SELECT count(*) = 20 AND count(DISTINCT job) = 20 FROM ledger")
            .await
    );
    assert!(shop.holds("SELECT NOT is_called FROM crowded").await);
    worker.drain().await;
}

#[tokio::test]
async fn a_backend_that_is_terminated_while_it_commits_commits_once() {
    let shop = Shop::open().await;
    let worker = shop.start().await;
    let terminate = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{}'",
        shop.role
    );
    for id in 1..=20 {
        shop.sql(&format!("INSERT INTO orders VALUES ({id})")).await;
        let job = shop
            .enqueue(json!([
                {"sql": call("mark_paid", json!([id]))},
                {"sql": call("add_line", json!([id, 10]))},
            ]))
            .await;
        shop.sql(&terminate).await;
        let ended = shop.ended(job).await;
        assert_eq!(ended.state, "succeeded", "{:?}", ended.error);
    }
    assert!(
        shop.holds("SELECT count(*) = 20 AND count(DISTINCT job) = 20 FROM ledger")
            .await
    );
    worker.drain().await;
}

#[tokio::test]
async fn a_step_whose_commit_got_no_response_is_looked_up() {
    for side in [Side::Cut, Side::Response] {
        let (shop, proxy) = through_a_proxy().await;
        let login = connector(&shop.as_login(proxy.url()));
        let worker = shop.start_with(login, Settings::default()).await;
        assert_eq!(shop.run(json!([])).await.state, "succeeded");
        let held = proxy.hold(COMMIT, side);
        let effects = json!([
            call("mark_paid", json!([1])),
            call("add_line", json!([1, 10]))
        ]);
        let id = shop
            .enqueue(json!([{"step": {"name": "pay", "effects": effects}}]))
            .await;
        held.caught().await;
        if side == Side::Response {
            proxy.go_down();
            proxy.come_up();
        }
        held.release();
        assert_paid_once(&shop, id).await;
        worker.drain().await;
    }
}

#[tokio::test]
async fn an_attempt_whose_job_was_taken_over_while_it_committed_has_no_effects() {
    let (shop, proxy) = through_a_proxy().await;
    let login = connector(&shop.as_login(proxy.url()));
    // Each worker has an id of its own.
    let settings = || Settings {
        overrides: short_leases(),
        ..Settings::default()
    };
    let first = shop.start_with(login, settings()).await;
    shop.until_all_are_checked().await;
    // The transaction of the first worker is frozen before the server sees it.
    let held = proxy.hold("BEGIN ISOLATION", Side::Statement);
    let id = shop.enqueue(payment()).await;
    held.caught().await;
    // Another worker takes the job over and ends it.
    shop.sql(&format!(
        "UPDATE rouse.job SET lease_until = claimed_at WHERE id = {id}"
    ))
    .await;
    let second = shop.start_with(shop.login(), settings()).await;
    assert_eq!(shop.ended(id).await.state, "succeeded");
    // Now the first transaction arrives, and its fence stops it.
    held.release();
    tokio::time::timeout(Duration::from_secs(60), first.drain())
        .await
        .expect("it ends");
    assert_paid_once(&shop, id).await;
    second.drain().await;
}

/// As if the worker were frozen between the check of its fence, which locks the row of the job, and COMMIT. No other
/// worker could adopt the job.
#[tokio::test]
async fn a_transaction_that_gets_no_commit_ends_on_its_own_and_unlocks_its_job() {
    let (shop, proxy) = through_a_proxy().await;
    let login = connector(&shop.as_login(proxy.url()));
    let worker = shop.start_with(login, Settings::default()).await;
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    let held = proxy.hold(COMMIT, Side::Statement);
    let id = shop.enqueue(payment()).await;
    held.caught().await;
    assert_paid_once(&shop, id).await;
    // The server has ended the session, so that nothing was committed: that is not the fault of the attempt.
    let attempts = format!("SELECT attempt = 1 FROM rouse.jobs WHERE id = {id}");
    assert!(shop.holds(&attempts).await);
    held.release();
    worker.drain().await;
}

/// The same, after an effect that has called a function which switches off the timeouts of its transaction.
#[tokio::test]
async fn a_statement_that_switches_off_timeouts_does_not_keep_its_job_locked() {
    let (shop, proxy) = through_a_proxy().await;
    shop.sql(
        "CREATE FUNCTION endless() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             PERFORM set_config('idle_in_transaction_session_timeout', '0', true);
             -- The server ignores the other timeouts while this one is shorter, but its timer keeps the first value.
             IF current_setting('server_version_num')::integer >= 170000 THEN
                 PERFORM set_config('transaction_timeout', '2147483647', true);
                 PERFORM set_config('transaction_timeout', '1', true);
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER endless BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION endless()",
    )
    .await;
    let login = connector(&shop.as_login(proxy.url()));
    let worker = shop.start_with(login, Settings::default()).await;
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    let held = proxy.hold(COMMIT, Side::Statement);
    let id = shop.enqueue(payment()).await;
    held.caught().await;
    assert_paid_once(&shop, id).await;
    held.release();
    worker.drain().await;
}

/// The login may not connect; the worker keeps trying until the leases end.
#[tokio::test]
async fn a_worker_that_cannot_commit_effects_stops_when_their_leases_have_ended() {
    let shop = Shop::open().await;
    let settings = Settings {
        overrides: short_leases(),
        drain_timeout: Duration::from_millis(500),
        ..Settings::default()
    };
    let worker = shop.start_with(shop.login(), settings).await;
    shop.until_all_are_checked().await;
    shop.sql("INSERT INTO orders VALUES (1)").await;
    shop.sql(&format!("ALTER ROLE {} CONNECTION LIMIT 0", shop.role))
        .await;
    shop.sql(&format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{}'",
        shop.role
    ))
    .await;
    let id = shop.enqueue(payment()).await;
    // The worker has tried to commit the effects for 5 s.
    shop.until(&parked("sql.run")).await;
    tokio::time::timeout(Duration::from_secs(60), worker.drain())
        .await
        .expect("it ends");
    assert!(shop.holds("SELECT count(*) = 0 FROM ledger").await);
    shop.sql(&format!("ALTER ROLE {} CONNECTION LIMIT -1", shop.role))
        .await;
    let second = shop.start().await;
    assert_paid_once(&shop, id).await;
    second.drain().await;
}

#[tokio::test]
async fn a_check_whose_connection_is_cut_does_not_count_as_a_failure_of_the_login() {
    let db = TestDb::new().await;
    let worker = db.worker().await;
    let proxy = Proxy::start(&db).await;
    let connector = proxy.connector();
    let login = Login::new(&connector, 1);
    proxy.go_down();
    assert!(!login.responds().await);
    proxy.come_up();
    // Waits until the next try is due.
    connector.ready().await;
    let cut = proxy.hold("r.rolsuper", Side::Cut);
    let checked = worker.check_login(&login).await;
    assert!(matches!(checked, Err(Unfit::Unchecked(_))), "{checked:?}");
    cut.caught().await;
    assert!(login.unavailable_for().is_some());
    cut.release();
    let checked = worker.check_login(&login).await;
    assert!(matches!(checked, Err(Unfit::Mismatch(_))), "{checked:?}");
    assert_eq!(login.unavailable_for(), None);
}

#[tokio::test]
async fn a_query_or_the_check_of_a_statement_does_not_show_that_a_login_is_available() {
    let shop = Shop::open().await;
    let connector = shop.login();
    let statement = Statement {
        name: "orders".into(),
        sql: "SELECT id FROM orders".into(),
        rows: None,
        on_error: OnError::Fail,
    };
    let limits = SqlLimits::default();
    let checked = Login::new(&connector, 1).check(&statement, &limits).await;
    let checked = checked.expect("it fits");
    let login = Login::new(&connector, 1);
    let alter = async |change: &str| {
        let sql = format!("ALTER ROLE {} {change}", shop.role);
        shop.sql(&sql).await;
    };
    alter("CONNECTION LIMIT 0").await;
    assert!(!login.responds().await);
    assert!(login.unavailable_for().is_some());
    // As on a standby, for a transaction that does not declare that it writes.
    alter("SET default_transaction_read_only = on").await;
    alter("CONNECTION LIMIT -1").await;
    connector.start_over();
    let rows = login.query(&checked, "[]", &limits).await;
    assert_eq!(rows.expect("it is answered").len(), 0);
    assert!(login.unavailable_for().is_some(), "after the query");
    let again = login.check(&statement, &limits).await;
    again.expect("it still fits");
    assert!(login.unavailable_for().is_some(), "after the check");
    assert!(login.responds().await, "a transaction that writes");
    assert_eq!(login.unavailable_for(), None);
}

#[tokio::test]
async fn a_session_of_a_login_that_may_not_write_is_not_used_again() {
    let shop = Shop::open().await;
    let worker = shop.db.worker().await;
    let login = Login::new(&shop.login(), 1);
    let alter = async |change: &str| {
        let sql = format!("ALTER ROLE {} {change}", shop.role);
        shop.sql(&sql).await;
    };
    // As on a standby, for a transaction that does not declare that it writes.
    alter("SET default_transaction_read_only = on").await;
    let checked = worker.check_login(&login).await;
    assert!(matches!(checked, Err(Unfit::Unchecked(_))), "{checked:?}");
    alter("RESET default_transaction_read_only").await;
    assert_eq!(worker.check_login(&login).await, Ok(()), "a new session");
}
