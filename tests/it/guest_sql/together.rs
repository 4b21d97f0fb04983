//! Effects of several jobs in one transaction.

use std::time::Duration;

use rouse::store::connect::Connector;
use rouse::worker::{Settings, UnsettledLimits};
use serde_json::{Value, json};
use tokio_postgres::Client;

use super::shop::{Shop, call, connector};
use crate::support::proxy::{COMMIT, Proxy, Side};
use crate::support::worker::{TestWorker, enqueue, lease};

/// From now on, changes to an order wait for a lock, and then fail. A timeout does not end the wait: otherwise, a
/// connection of the login would be free for a moment, or for good.
const HOLD_UP_CHANGES: &str = "
    CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        LOOP
            BEGIN
                PERFORM pg_advisory_xact_lock(77002);
                EXIT;
            EXCEPTION WHEN query_canceled OR lock_not_available THEN
                -- The next try.
            END;
        END LOOP;
        RAISE EXCEPTION 'it has waited';
    END $$;
    CREATE TRIGGER hold_up BEFORE UPDATE ON orders FOR EACH ROW EXECUTE FUNCTION hold_up()";

/// Jobs whose effects wait, because two other jobs keep both connections of the login busy.
struct Gathered {
    worker: TestWorker,
    ids: Vec<i64>,
    /// The session that has the lock for which the two other jobs wait.
    other: Client,
}

impl Gathered {
    async fn of(shop: &Shop, login: Connector, scripts: Vec<Value>) -> Self {
        shop.sql("INSERT INTO orders VALUES (1), (2)").await;
        shop.sql(HOLD_UP_CHANGES).await;
        let other = shop.db.client().await;
        let lock = "BEGIN; SELECT pg_advisory_xact_lock(77002)";
        other.batch_execute(lock).await.unwrap();
        let settings = Settings {
            // An attempt starts after the previous attempt has passed on its effects.
            slots: 1,
            ..Settings::default()
        };
        let worker = shop.start_with(login, settings).await;
        // A check would need one of the connections.
        shop.until_all_are_checked().await;
        for order in 1..=2 {
            shop.enqueue(json!([{"sql": call("mark_paid", json!([order]))}]))
                .await;
        }
        shop.until(&format!(
            "SELECT count(*) = 2 FROM pg_stat_activity WHERE usename = '{}' AND wait_event_type = 'Lock'",
            shop.role
        ))
        .await;
        let mut ids = Vec::new();
        for script in scripts {
            ids.push(shop.enqueue(script).await);
        }
        let last = shop.enqueue(json!([{"run": {"ms": 500}}])).await;
        shop.until(&format!(
            "SELECT coalesce(progress->>'step' = 'waiting', false) FROM rouse.job({last})"
        ))
        .await;
        Self { worker, ids, other }
    }

    /// Makes the two other jobs fail, so that they send no COMMIT.
    async fn unblock(&self) {
        self.other.batch_execute("COMMIT").await.unwrap();
    }

    /// Waits until all of them except these have succeeded, each in its first attempt.
    async fn succeed(&self, shop: &Shop, except: &[usize]) {
        for (number, id) in self.ids.iter().enumerate() {
            if !except.contains(&number) {
                let ended = shop.ended(*id).await;
                let end = (ended.state.as_str(), ended.attempt);
                assert_eq!(end, ("succeeded", 1), "{:?}", ended.error);
            }
        }
    }
}

/// Adds a line with this number.
fn line(number: usize) -> Value {
    json!({"sql": call("add_line", json!([number, 0]))})
}

fn lines(count: usize) -> Vec<Value> {
    (0..count).map(|number| json!([line(number)])).collect()
}

/// Asserts that each line exists once, and that there are fewer transactions than lines.
async fn are_shared(shop: &Shop, count: usize) {
    let sql = format!("SELECT count(*) = {count} AND count(DISTINCT job) = {count} FROM ledger");
    assert!(shop.holds(&sql).await);
    let sql = "SELECT count(DISTINCT xmin::text) < count(*) FROM ledger";
    assert!(shop.holds(sql).await, "lines share transactions");
}

#[tokio::test]
async fn a_bad_effect_fails_only_its_own_job_of_its_transaction() {
    let shop = Shop::open().await;
    let mut scripts = lines(8);
    // The order already exists, so that this effect fails.
    scripts[2] = json!([line(2), {"sql": call("add_order", json!([1]))}]);
    let gathered = Gathered::of(&shop, shop.login(), scripts).await;
    gathered.unblock().await;
    gathered.succeed(&shop, &[2]).await;
    let failed = shop.ended(gathered.ids[2]).await;
    let error = failed.error.unwrap();
    assert_eq!((failed.state.as_str(), failed.attempt), ("failed", 1));
    assert_eq!(error["details"]["code"], "23505", "{error}");
    are_shared(&shop, 7).await;
    gathered.worker.drain().await;
}

#[tokio::test]
async fn a_job_that_waits_for_a_lock_does_not_hold_up_others_of_its_transaction() {
    let shop = Shop::open().await;
    shop.sql("INSERT INTO accounts VALUES (0, 0)").await;
    let other = shop.db.client().await;
    let lock = "BEGIN; SELECT FROM accounts WHERE id = 0 FOR UPDATE";
    other.batch_execute(lock).await.unwrap();
    let mut scripts = lines(8);
    scripts[2] = json!([line(2), {"sql": call("transfer", json!([0, 1]))}]);
    let gathered = Gathered::of(&shop, shop.login(), scripts).await;
    gathered.unblock().await;
    // The others succeed while the lock is held.
    gathered.succeed(&shop, &[2]).await;
    other.batch_execute("ROLLBACK").await.unwrap();
    // On a slow machine, its first attempt has waited for too long.
    let waited = shop.ended(gathered.ids[2]).await;
    assert_eq!(waited.state, "succeeded", "{:?}", waited.error);
    assert!(shop.holds("SELECT balance = 1 FROM accounts").await);
    are_shared(&shop, 8).await;
    gathered.worker.drain().await;
}

#[tokio::test]
async fn settings_of_one_job_are_reset_for_the_next_one_of_its_transaction() {
    let shop = Shop::open().await;
    // A line gets the amount 1 if a setting of another statement is left over.
    shop.sql(
        "CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             NEW.amount := (coalesce(current_setting('shop.tenant', true), '') <> ''
                            OR current_user <> session_user OR current_setting('lock_timeout') = '7ms')::integer;
             PERFORM set_config('shop.tenant', 'A', true), set_config('role', 'pg_monitor', true),
                     set_config('lock_timeout', '7', false), set_config('search_path', 'pg_catalog', true);
             RETURN NEW;
         END $$;
         CREATE TRIGGER note BEFORE INSERT ON ledger FOR EACH ROW EXECUTE FUNCTION note();",
    )
    .await;
    shop.sql(&format!("GRANT pg_monitor TO {}", shop.role))
        .await;
    let gathered = Gathered::of(&shop, shop.login(), lines(8)).await;
    gathered.unblock().await;
    gathered.succeed(&shop, &[]).await;
    are_shared(&shop, 8).await;
    let clean = "SELECT bool_and(amount = 0) FROM ledger";
    assert!(shop.holds(clean).await);
    gathered.worker.drain().await;
}

#[tokio::test]
async fn a_cancelled_job_does_not_cancel_others_of_its_transaction() {
    let shop = Shop::open().await;
    let gathered = Gathered::of(&shop, shop.login(), lines(8)).await;
    let cancelled = gathered.ids[3];
    assert!(crate::support::worker::cancel(&shop.client, cancelled).await);
    gathered.unblock().await;
    gathered.succeed(&shop, &[3]).await;
    assert_eq!(shop.ended(cancelled).await.state, "cancelled");
    are_shared(&shop, 7).await;
    assert!(shop.holds("SELECT bool_and(job <> 3) FROM ledger").await);
    gathered.worker.drain().await;
}

#[tokio::test]
async fn effects_of_one_job_stay_in_order_however_many_they_are() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    let all: Vec<Value> = (0..90).map(line).collect();
    let done = shop.run(json!(all)).await;
    assert_eq!(done.state, "succeeded", "{:?}", done.error);
    let in_order = "SELECT array_agg(job ORDER BY ctid) = ARRAY(SELECT generate_series(0, 89))::bigint[] FROM ledger";
    assert!(shop.holds(in_order).await);
}

#[tokio::test]
async fn a_shared_commit_whose_response_is_lost_is_looked_up_for_each_job() {
    for (words, side) in [
        (COMMIT, Side::Cut),
        (COMMIT, Side::Response),
        ("settle_with_effects", Side::Cut),
    ] {
        let shop = Shop::open().await;
        let proxy = Proxy::start(&shop.db).await;
        let login = connector(&shop.as_login(proxy.url()));
        let gathered = Gathered::of(&shop, login, lines(8)).await;
        let held = proxy.hold(words, side);
        gathered.unblock().await;
        held.caught().await;
        if side == Side::Response {
            // The server has committed, but the host does not know this.
            proxy.go_down();
            proxy.come_up();
        }
        held.release();
        gathered.succeed(&shop, &[]).await;
        let once = "SELECT count(*) = 8 AND count(DISTINCT job) = 8 FROM ledger";
        assert!(shop.holds(once).await, "{words} {side:?}");
        gathered.worker.drain().await;
    }
}

#[tokio::test]
async fn effects_that_wait_when_their_host_stops_are_committed_before_it_ends() {
    let shop = Shop::open().await;
    let gathered = Gathered::of(&shop, shop.login(), lines(8)).await;
    let draining = tokio::spawn(gathered.worker.drain());
    shop.until("SELECT bool_and(state = 'draining') FROM rouse.workers")
        .await;
    gathered.other.batch_execute("COMMIT").await.unwrap();
    draining.await.unwrap();
    are_shared(&shop, 8).await;
}

/// There are at least as many of these jobs as the login has connections.
#[tokio::test]
async fn jobs_that_another_transaction_names_do_not_hold_up_others_of_their_handler() {
    let shop = Shop::open().await;
    let mut named = Vec::new();
    for number in 0..12 {
        named.push(shop.enqueue(json!([line(number)])).await);
    }
    let other = shop.db.client().await;
    let name = "BEGIN; SELECT rouse.enqueue('x', after => (SELECT jsonb_agg(id) FROM rouse.job))";
    other.batch_execute(name).await.unwrap();
    let worker = shop.start().await;
    shop.until("SELECT count(*) = 12 FROM rouse.job WHERE state = 'running'")
        .await;
    let ended = shop.run(json!([line(99)])).await;
    assert_eq!(ended.state, "succeeded");
    // None of the twelve locked jobs has been committed.
    assert!(shop.holds("SELECT count(*) = 1 FROM ledger").await);
    other.batch_execute("ROLLBACK").await.unwrap();
    for id in named {
        let ended = shop.ended(id).await;
        assert_eq!((ended.state.as_str(), ended.attempt), ("succeeded", 1));
    }
    worker.drain().await;
}

/// Each try to commit one of the others would wait for 250 ms.
#[tokio::test]
async fn a_job_that_is_locked_for_a_short_time_does_not_wait_for_hundreds_that_stay_locked() {
    let shop = Shop::open().await;
    for number in 0..200 {
        shop.enqueue(json!([line(number)])).await;
    }
    let (long, short) = (shop.db.client().await, shop.db.client().await);
    let name = "BEGIN; SELECT rouse.enqueue('x', after => (SELECT jsonb_agg(id) FROM rouse.job))";
    long.batch_execute(name).await.unwrap();
    let last = shop.enqueue(json!([line(200)])).await;
    let name = format!("BEGIN; SELECT rouse.enqueue('x', after => '[{last}]')");
    short.batch_execute(&name).await.unwrap();
    let worker = shop.start().await;
    shop.until("SELECT count(*) = 201 FROM rouse.job WHERE state = 'running'")
        .await;
    // After these jobs have run, the last one waits for a turn, behind all others.
    for number in 300..305 {
        shop.run(json!([line(number)])).await;
    }
    short.batch_execute("ROLLBACK").await.unwrap();
    let ended = tokio::time::timeout(Duration::from_secs(35), shop.ended(last)).await;
    let ended = ended.expect("it does not wait for the others");
    assert_eq!((ended.state.as_str(), ended.attempt), ("succeeded", 1));
    assert!(shop.holds("SELECT count(*) = 6 FROM ledger").await);
    long.batch_execute("ROLLBACK").await.unwrap();
    shop.until("SELECT count(*) = 206 FROM ledger").await;
    worker.drain().await;
}

/// The leases of the jobs are much longer.
#[tokio::test]
async fn a_stop_waits_for_jobs_that_another_transaction_names_until_the_end_of_the_drain_timeout() {
    let shop = Shop::open().await;
    for number in 0..20 {
        shop.enqueue(json!([line(number)])).await;
    }
    let other = shop.db.client().await;
    let name = "BEGIN; SELECT rouse.enqueue('x', after => (SELECT jsonb_agg(id) FROM rouse.job))";
    other.batch_execute(name).await.unwrap();
    let settings = Settings {
        overrides: lease("sql.*", 600),
        drain_timeout: Duration::from_millis(100),
        ..Settings::default()
    };
    let worker = shop.start_with(shop.login(), settings).await;
    shop.until("SELECT count(*) = 20 FROM rouse.job WHERE state = 'running'")
        .await;
    worker.drain().await;
    assert!(shop.holds("SELECT count(*) = 0 FROM ledger").await);
    other.batch_execute("ROLLBACK").await.unwrap();
    let next = shop.start().await;
    shop.until("SELECT count(*) = 20 FROM ledger").await;
    next.drain().await;
}

/// There are more of these jobs than may wait for their commits, and they fill all slots.
#[tokio::test]
async fn jobs_that_stay_locked_take_no_slots_of_others_however_long_their_leases_are() {
    let shop = Shop::open().await;
    for number in 0..600 {
        shop.enqueue(json!([line(number)])).await;
    }
    let other = shop.db.client().await;
    let name = "BEGIN; SELECT rouse.enqueue('x', after => (SELECT jsonb_agg(id) FROM rouse.job))";
    other.batch_execute(name).await.unwrap();
    let settings = Settings {
        slots: 4,
        overrides: lease("sql.*", 600),
        unsettled_limits: UnsettledLimits {
            blocked: Duration::from_secs(1),
            ..UnsettledLimits::default()
        },
        ..Settings::default()
    };
    let worker = shop.start_with(shop.login(), settings).await;
    shop.until("SELECT count(*) = 600 FROM rouse.job WHERE state = 'running'")
        .await;
    let square = enqueue(&shop.client, "flow.square", json!({"n": 3})).await;
    assert_eq!(shop.ended(square).await.state, "succeeded");
    assert!(shop.holds("SELECT count(*) = 0 FROM ledger").await);
    other.batch_execute("ROLLBACK").await.unwrap();
    worker.drain().await;
    let next = shop.start().await;
    shop.until("SELECT count(*) = 600 FROM ledger").await;
    next.drain().await;
}

/// The tries of so many jobs would keep all connections of the login busy for longer than others wait for one.
#[tokio::test]
async fn hundreds_of_jobs_that_another_transaction_names_do_not_hold_up_others() {
    let shop = Shop::open().await;
    for number in 0..300 {
        shop.enqueue(json!([line(number)])).await;
    }
    let other = shop.db.client().await;
    let name = "BEGIN; SELECT rouse.enqueue('x', after => (SELECT jsonb_agg(id) FROM rouse.job))";
    other.batch_execute(name).await.unwrap();
    let worker = shop.start().await;
    shop.until("SELECT count(*) = 300 FROM rouse.job WHERE state = 'running'")
        .await;
    for number in 300..303 {
        let ended = shop.run(json!([line(number)])).await;
        assert_eq!((ended.state.as_str(), ended.attempt), ("succeeded", 1));
    }
    // The others are still locked.
    assert!(shop.holds("SELECT count(*) = 3 FROM ledger").await);
    other.batch_execute("ROLLBACK").await.unwrap();
    shop.until("SELECT count(*) = 303 FROM ledger").await;
    worker.drain().await;
}
