//! Handlers whose statements do not fit the database.

use std::path::Path;
use std::time::Duration;

use serde_json::json;

use rouse::store::Login;
use rouse::store::connect::Connector;
use rouse::worker::{Parts, Settings};
use tokio::net::TcpListener;

use super::shop::{MODULE, Shop, call, connector, folder_of_guests, guests_in, guests_with};
use crate::http::metrics_with;
use crate::support::proxy::{Proxy, Side};
use crate::support::worker::{TestWorker, enqueue, lease};
use crate::support::{Host, free_port, scratch};

/// The SQL condition that is true once the list of the fleet's handlers shows this handler as parked.
pub(super) fn parked(handler: &str) -> String {
    format!(
        "SELECT coalesce(bool_or(parked IS NOT NULL), false) FROM rouse.handlers WHERE handler = '{handler}'"
    )
}

async fn why(shop: &Shop, handler: &str) -> String {
    let sql = "SELECT coalesce(parked, '') FROM rouse.handlers WHERE handler = $1";
    shop.client
        .query_one(sql, &[&handler])
        .await
        .unwrap()
        .get(0)
}

/// How `rouse.why` explains that the handler of a job is parked: the sentence and the remedy.
async fn explained(shop: &Shop, job: i64) -> (String, String) {
    let sql = "SELECT sentence, remedy FROM rouse.why($1) WHERE reason = 'parked'";
    let row = shop.client.query_one(sql, &[&job]).await.unwrap();
    (row.get(0), row.get(1))
}

#[tokio::test]
async fn statements_that_postgres_refuses_are_never_run_and_park_their_handlers() {
    let shop = Shop::open().await;
    let _worker = shop.start().await;
    for (handler, message) in [
        ("sql.jobs", "permission denied"),
        ("sql.settle", "permission denied"),
        ("sql.copy", "syntax error"),
        ("sql.listen", "syntax error"),
        ("sql.do", "syntax error"),
        ("sql.temporary", "syntax error"),
        ("sql.two", "multiple commands"),
        ("sql.commit", "syntax error"),
        ("sql.role", "syntax error"),
        ("sql.missing", "no_such_table"),
        ("sql.modifying", "RETURNING if a WITH changes data"),
        ("sql.syntax", "syntax error"),
        ("sql.into", "leave out INTO"),
    ] {
        shop.until(&parked(handler)).await;
        let why = why(&shop, handler).await;
        assert!(why.contains(message), "{handler}: {why}");
        assert!(why.contains("the statement it: "), "{handler}: {why}");
    }
    // The jobs of these handlers wait, and other handlers of the module run.
    let waiting = enqueue(&shop.client, "sql.missing", json!({})).await;
    let other = shop
        .run(json!([{"sql": call("add_order", json!([1]))}]))
        .await;
    assert_eq!(other.state, "succeeded");
    let sql =
        format!("SELECT state = 'queued' AND attempt = 0 FROM rouse.jobs WHERE id = {waiting}");
    assert!(shop.holds(&sql).await);
}

#[tokio::test]
async fn a_right_that_is_revoked_parks_the_handler_without_spending_the_attempt() {
    let shop = Shop::open().await;
    let worker = shop.start().await;
    let first = shop
        .run(json!([{"sql": call("add_order", json!([1]))}]))
        .await;
    assert_eq!(first.state, "succeeded");
    shop.sql(&format!("REVOKE INSERT ON orders FROM {}", shop.role))
        .await;
    let second = shop
        .enqueue(json!([{"sql": call("add_order", json!([2]))}]))
        .await;
    shop.until(&parked("sql.run")).await;
    let message = why(&shop, "sql.run").await;
    assert!(
        message.contains("permission denied for table orders"),
        "{message}"
    );
    let grant = format!("; GRANT INSERT ON \"orders\" TO \"{}\"", shop.role);
    assert!(message.ends_with(&grant), "{message}");
    shop.until(&format!(
        "SELECT state = 'queued' AND attempt = uncounted FROM rouse.jobs WHERE id = {second}"
    ))
    .await;
    let (sentence, remedy) = explained(&shop, second).await;
    assert!(
        sentence.contains("because its SQL statements cannot run: "),
        "{sentence}"
    );
    assert!(remedy.starts_with("Run the GRANT"), "{remedy}");
    // A new worker finds the privilege again; the running one within 30 seconds.
    shop.grant().await;
    worker.drain().await;
    let _worker = shop.start().await;
    assert_eq!(shop.ended(second).await.state, "succeeded");
}

/// Statements that run several times in a transaction are prepared before all others.
#[tokio::test]
async fn a_statement_that_can_no_longer_be_prepared_parks_its_handler_and_costs_no_attempt() {
    let shop = Shop::open().await;
    let worker = shop.start().await;
    let script = |first: i64| {
        let mut script = vec![json!({"sql": call("add_line", json!([first, 0]))})];
        script.extend((first..first + 4).map(|id| json!({"sql": call("add_order", json!([id]))})));
        json!(script)
    };
    assert_eq!(shop.run(script(1)).await.state, "succeeded");
    shop.sql("ALTER TABLE orders RENAME id TO number").await;
    let second = shop.enqueue(script(5)).await;
    shop.until(&parked("sql.run")).await;
    shop.until(&format!(
        "SELECT state = 'queued' AND attempt = uncounted FROM rouse.jobs WHERE id = {second}"
    ))
    .await;
    worker.drain().await;
    shop.sql("ALTER TABLE orders RENAME number TO id").await;
    let _worker = shop.start().await;
    assert_eq!(shop.ended(second).await.state, "succeeded");
    assert_eq!(shop.count("orders").await, 8);
    assert_eq!(shop.count("ledger").await, 2);
}

/// The attempt that checks the statements first cannot know this, and fails.
#[tokio::test]
async fn an_attempt_whose_statements_were_found_to_fit_again_in_the_meantime_tries_again() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    let login = connector(&shop.as_login(proxy.url()));
    let worker = shop.start_with(login, Settings::default()).await;
    let line = |number: i64| json!([{"sql": call("add_line", json!([number, 0]))}]);
    assert_eq!(shop.run(line(0)).await.state, "succeeded");
    // The message that is held is not that of another handler's check.
    shop.until_all_are_checked().await;
    shop.sql(
        "CREATE SEQUENCE public.tries;
         CREATE FUNCTION public.count_try() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$ BEGIN
             PERFORM nextval('public.tries');
             RETURN NEW;
         END $$;
         CREATE TRIGGER count_try BEFORE INSERT ON rouse.finished FOR EACH ROW EXECUTE FUNCTION public.count_try()",
    )
    .await;
    shop.sql(&format!("REVOKE INSERT ON ledger FROM {}", shop.role))
        .await;
    let checking = proxy.hold("r.rolsuper", Side::Statement);
    let first = shop.enqueue(line(1)).await;
    checking.caught().await;
    let second = shop.enqueue(line(2)).await;
    shop.until("SELECT last_value >= 2 FROM public.tries").await;
    // The transaction of the second job has failed.
    shop.until(&format!(
        "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE usename = '{}' AND state <> 'idle')",
        shop.role
    ))
    .await;
    shop.grant().await;
    checking.release();
    let ended = shop.ended(second).await;
    assert_eq!((ended.state.as_str(), ended.attempt), ("succeeded", 1));
    assert_eq!(shop.ended(first).await.state, "succeeded");
    worker.drain().await;
}

/// The values of an enum type can only be removed by replacing the type.
#[tokio::test]
async fn an_attempt_tries_again_if_the_type_of_a_parameter_was_changed_or_replaced() {
    let shop = Shop::open().await;
    let worker = shop.start().await;
    let order = |id: i64| json!([{"sql": call("add_order", json!([id]))}]);
    assert_eq!(shop.run(order(1)).await.state, "succeeded");
    for (id, change) in [
        (
            2,
            "CREATE TYPE size AS ENUM ('1', '2', '3', '4');
             ALTER TABLE orders ALTER id TYPE size USING id::text::size",
        ),
        // The type that the host knows no longer exists.
        (
            3,
            "ALTER TYPE size RENAME TO old_size;
             CREATE TYPE size AS ENUM ('1', '2', '3');
             ALTER TABLE orders ALTER id TYPE size USING id::text::size;
             DROP TYPE old_size",
        ),
    ] {
        shop.sql(change).await;
        let ended = shop.run(order(id)).await;
        assert_eq!(ended.state, "succeeded", "{id}: {:?}", ended.error);
        assert_eq!(ended.attempt, 1, "{id}");
    }
    worker.drain().await;
}

/// At the last check, the statements of all handlers of the login fitted, so that no further check was due.
#[tokio::test]
async fn a_handler_whose_statements_no_longer_fit_is_checked_again_until_they_do() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    let folder = folder_of_guests();
    let (sandbox, catalog) = guests_with(folder.path(), &["sql.run"]).await;
    let login = connector(&shop.as_login(proxy.url()));
    let parts = Parts {
        sql_logins: [("sql.run".to_owned(), login)].into(),
        ..shop.parts_of(sandbox, catalog, shop.login())
    };
    let worker = TestWorker::start_with(parts, Settings::default());
    let order = |number: i64| json!([{"sql": call("add_order", json!([number]))}]);
    assert_eq!(shop.run(order(1)).await.state, "succeeded");
    shop.sql(&format!("REVOKE INSERT ON orders FROM {}", shop.role))
        .await;
    // The statements cannot be checked now; the check is repeated every second.
    let checking = proxy.hold("r.rolsuper", Side::Cut);
    let refused = shop.enqueue(order(2)).await;
    checking.caught().await;
    shop.until(&parked("sql.run")).await;
    shop.grant().await;
    checking.release();
    assert_eq!(shop.ended(refused).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn an_attempt_whose_query_or_step_parks_its_handler_is_not_counted() {
    let shop = Shop::open().await;
    let worker = shop.start().await;
    let warm = shop
        .run(json!([{"query": call("orders", json!([[1]]))}]))
        .await;
    assert_eq!(warm.state, "succeeded");
    shop.sql(&format!("REVOKE ALL ON orders FROM {}", shop.role))
        .await;
    let query = shop
        .enqueue(json!([{"try_query": call("orders", json!([[1]]))}]))
        .await;
    shop.until(&parked("sql.run")).await;
    shop.until(&format!(
        "SELECT state = 'queued' AND attempt = uncounted FROM rouse.jobs WHERE id = {query}"
    ))
    .await;
    worker.drain().await;
    shop.grant().await;
    let worker = shop.start().await;
    assert_eq!(shop.ended(query).await.state, "succeeded");
    shop.sql(&format!("REVOKE ALL ON ledger FROM {}", shop.role))
        .await;
    let step = shop
        .enqueue(json!([{"try_step": {"name": "s", "effects": [call("add_line", json!([1, 1]))]}}]))
        .await;
    shop.until(&parked("sql.run")).await;
    shop.until(&format!(
        "SELECT state = 'queued' AND attempt = uncounted FROM rouse.jobs WHERE id = {step}"
    ))
    .await;
    worker.drain().await;
    shop.grant().await;
    let _worker = shop.start().await;
    assert_eq!(shop.ended(step).await.state, "succeeded");
    assert_eq!(shop.count("ledger").await, 1);
}

#[tokio::test]
async fn a_login_without_the_role_a_superuser_and_members_of_other_roles_are_refused() {
    let shop = Shop::open().await;
    let (role, url) = (&shop.role, shop.db.url());
    shop.sql(&format!("REVOKE rouse_handler FROM {role}")).await;
    let worker = shop.start().await;
    shop.until(&parked("sql.run")).await;
    let message = why(&shop, "sql.run").await;
    assert!(
        message.contains(&format!("GRANT rouse_handler TO {role}")),
        "{message}"
    );
    worker.drain().await;

    shop.sql(&format!("GRANT rouse_handler TO {role}")).await;
    let owner = shop.db.address().user;
    for (other, expected) in [
        ("rouse_worker", "member of rouse_worker"),
        ("rouse_producer", "member of rouse_producer"),
        ("rouse_enqueuer", "member of rouse_enqueuer"),
        (&*owner, "member of a superuser"),
        (
            "pg_read_all_data",
            "member of pg_read_all_data, which can reach Rouse's own tables",
        ),
        (
            "pg_write_all_data",
            "member of pg_write_all_data, which can reach Rouse's own tables",
        ),
        (
            "pg_read_server_files",
            "member of pg_read_server_files, which can reach the files of the server",
        ),
        (
            "pg_write_server_files",
            "member of pg_write_server_files, which can reach the files of the server",
        ),
        (
            "pg_execute_server_program",
            "member of pg_execute_server_program, which can reach the programs of the server",
        ),
    ] {
        shop.sql(&format!("GRANT \"{other}\" TO {role}")).await;
        let worker = shop.start().await;
        shop.until(&parked("sql.run")).await;
        let message = why(&shop, "sql.run").await;
        assert!(message.contains(expected), "{message}");
        worker.drain().await;
        shop.sql(&format!("REVOKE \"{other}\" FROM {role}")).await;
    }

    let superuser = connector(&url);
    let worker = shop.start_with(superuser, Default::default()).await;
    shop.until(&parked("sql.run")).await;
    let message = why(&shop, "sql.run").await;
    assert!(message.contains("superuser"), "{message}");
    worker.drain().await;

    let other = Shop::open().await;
    let elsewhere = connector(&shop.as_login(&other.db.url()));
    let _worker = shop.start_with(elsewhere, Default::default()).await;
    shop.until(&parked("sql.run")).await;
    let message = why(&shop, "sql.run").await;
    assert!(
        message.contains("a database other than Rouse's"),
        "{message}"
    );
}

#[tokio::test]
async fn a_new_version_with_the_same_statements_is_served_without_a_new_check() {
    let shop = Shop::open().await;
    let folder = folder_of_guests();
    let (sandbox, catalog) = guests_in(folder.path()).await;
    catalog.watch();
    let parts = shop.parts_of(sandbox, catalog, shop.login());
    let _worker = TestWorker::start_with(parts, Settings::default());
    let first = shop
        .run(json!([{"sql": call("add_order", json!([1]))}]))
        .await;
    assert_eq!(first.state, "succeeded");
    // From now on no check can succeed.
    shop.sql(&format!(
        "REVOKE rouse_handler FROM {}; CREATE TABLE first AS SELECT sha256 FROM rouse.handlers WHERE handler = 'sql.run'",
        shop.role
    ))
    .await;
    let mut module = std::fs::read(folder.path().join(MODULE)).unwrap();
    // A custom section without a name.
    module.extend([0, 2, 0, 7]);
    std::fs::write(folder.path().join("next"), module).unwrap();
    std::fs::rename(folder.path().join("next"), folder.path().join(MODULE)).unwrap();
    shop.until(
        "SELECT sha256 <> (SELECT sha256 FROM first) FROM rouse.handlers WHERE handler = 'sql.run'",
    )
    .await;
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
}

/// Replaces the file of the guests by one in which these texts, of the same length, are different.
fn replace_texts(folder: &Path, texts: &[(&str, &str)]) {
    let mut module = std::fs::read(folder.join(MODULE)).unwrap();
    for (old, new) in texts {
        assert_eq!(old.len(), new.len());
        let at = |module: &[u8]| {
            module
                .windows(old.len())
                .position(|it| it == old.as_bytes())
        };
        let first = at(&module).expect("the module contains the text");
        module[first..first + new.len()].copy_from_slice(new.as_bytes());
        assert_eq!(at(&module), None, "{old} occurs twice");
    }
    std::fs::write(folder.join("next"), module).unwrap();
    std::fs::rename(folder.join("next"), folder.join(MODULE)).unwrap();
}

#[tokio::test]
async fn an_attempt_of_a_replaced_module_runs_only_the_statements_that_its_version_declares() {
    let shop = Shop::open().await;
    let folder = folder_of_guests();
    let (sandbox, catalog) = guests_in(folder.path()).await;
    catalog.watch();
    let parts = shop.parts_of(sandbox, catalog, shop.login());
    let settings = Settings {
        slots: 8,
        overrides: lease("sql.*", 600),
        ..Settings::default()
    };
    let worker = TestWorker::start_with(parts, settings);
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    shop.sql("CREATE TABLE first AS SELECT sha256 FROM rouse.handlers WHERE handler = 'sql.run'")
        .await;
    // While this lock is held, no step can be recorded.
    let other = shop.db.client().await;
    let lock = "BEGIN; LOCK TABLE rouse.step IN SHARE MODE";
    other.batch_execute(lock).await.unwrap();
    // The new version of the module has the same statement for this step.
    let step =
        |order: i64| json!({"step": {"name": "a", "effects": [call("add_order", json!([order]))]}});
    let line = || call("add_line", json!([7, 1]));
    let mut ids = Vec::new();
    for (order, then) in [
        (1, json!({"sql": line()})),
        (2, json!({"step": {"name": "b", "effects": [line()]}})),
        (3, json!({"query": call("orders", json!([[3]]))})),
    ] {
        let script = json!([{"run": {"ms": 0}}, step(order), then]);
        ids.push(shop.enqueue(script).await);
    }
    for id in &ids {
        shop.until(&format!(
            "SELECT coalesce(progress->>'step' = 'waiting', false) FROM rouse.job({id})"
        ))
        .await;
    }
    replace_texts(
        folder.path(),
        &[
            ("INTO ledger (job, amount)", "INTO ledger (amount, job)"),
            ("ORDER BY id -- all of them", "ORDER BY id LIMIT 0 -- all"),
        ],
    );
    shop.until(
        "SELECT sha256 <> (SELECT sha256 FROM first) FROM rouse.handlers WHERE handler = 'sql.run'",
    )
    .await;
    // This job starts once the new statements have been checked.
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    other.batch_execute("COMMIT").await.unwrap();
    let mut ends = Vec::new();
    for id in ids {
        let ended = shop.ended(id).await;
        ends.push((ended.state, ended.attempt, ended.result.unwrap()));
    }
    // The first attempts have recorded their steps; the second ones have run the new statements.
    let succeeded = |result| ("succeeded".to_owned(), 2, result);
    assert_eq!(
        ends,
        [json!([1]), json!([1, 2]), json!([1, []])].map(succeeded)
    );
    let sql = "SELECT count(*) = 2 AND bool_and(amount = 7 AND job = 1) FROM ledger";
    assert!(shop.holds(sql).await);
    worker.drain().await;
}

#[tokio::test]
async fn a_handler_whose_login_has_not_responded_since_the_start_is_shown_as_parked() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    proxy.go_down();
    let login = connector(&shop.as_login(proxy.url()));
    let worker = shop.start_with(login, Settings::default()).await;
    shop.until(&parked("sql.run")).await;
    let message = why(&shop, "sql.run").await;
    assert_eq!(message, "its SQL statements cannot be checked now");
    let waiting = shop.enqueue(json!([])).await;
    let (sentence, remedy) = explained(&shop, waiting).await;
    assert!(
        sentence.ends_with("could run it: its SQL statements cannot be checked now."),
        "{sentence}"
    );
    assert!(remedy.starts_with("Check whether the login"), "{remedy}");
    proxy.come_up();
    shop.until(&format!("SELECT NOT ({})", parked("sql.run")))
        .await;
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    worker.drain().await;
}

#[tokio::test]
async fn a_job_whose_login_no_longer_responds_waits_for_the_login_and_not_for_a_grant() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    let login = connector(&shop.as_login(proxy.url()));
    let worker = shop.start_with(login, Settings::default()).await;
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    proxy.go_down();
    let paying = shop
        .enqueue(json!([{"sql": call("add_order", json!([1]))}]))
        .await;
    shop.until(&parked("sql.run")).await;
    let waiting = shop.enqueue(json!([])).await;
    let (sentence, remedy) = explained(&shop, waiting).await;
    assert!(
        sentence.ends_with("could run it: the login of its SQL statements does not respond."),
        "{sentence}"
    );
    assert!(remedy.starts_with("Check whether the login"), "{remedy}");
    proxy.come_up();
    for id in [paying, waiting] {
        assert_eq!(shop.ended(id).await.state, "succeeded");
    }
    worker.drain().await;
}

#[tokio::test]
async fn the_metric_shows_a_handler_whose_statements_cannot_be_checked_as_parked() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    proxy.go_down();
    let login = shop.as_login(proxy.url());
    let config = scratch("config").join("rouse.toml");
    let text = format!(
        "[handlers.\"sql.run\"]\nmodule = \"{MODULE}\"\n\
         [handlers.\"sql.run\".sql]\nlogin = {{ url = \"{login}\" }}\nstatements = \"all\"\n"
    );
    std::fs::write(&config, text).unwrap();
    let (folder, address) = (folder_of_guests(), format!("127.0.0.1:{}", free_port()));
    let args = [
        "serve",
        "--http",
        address.as_str(),
        "--handlers",
        folder.path().to_str().unwrap(),
        "--config",
        config.to_str().unwrap(),
    ];
    let _host = Host::rouse(&args, &[("DATABASE_URL", &shop.db.url())]);
    shop.until(&parked("sql.run")).await;
    let address = address.parse().unwrap();
    let metric = |value: u8| format!("rouse_handler_parked{{handler=\"sql.run\"}} {value}\n");
    metrics_with(address, &[metric(1).as_str()]).await;
    proxy.come_up();
    metrics_with(address, &[metric(0).as_str()]).await;
}

#[tokio::test]
async fn a_login_that_does_not_respond_does_not_delay_the_check_of_another() {
    let shop = Shop::open().await;
    let (_worker, silent, _folder) = with_silent_login(&shop, shop.login()).await;
    let given_up = given_up(&silent).await;
    tokio::select! {
        biased;
        () = given_up => panic!("sql.run was not checked before the other login was given up"),
        job = shop.run(json!([])) => assert_eq!(job.state, "succeeded"),
    }
}

#[tokio::test]
async fn a_login_that_does_not_respond_does_not_delay_the_next_try_of_another() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    proxy.go_down();
    let login = connector(&shop.as_login(proxy.url()));
    let (_worker, silent, _folder) = with_silent_login(&shop, login.clone()).await;
    let given_up = given_up(&silent).await;
    let mut reach = login.reach();
    let first_try = reach.wait_for(|reach| reach.away().is_some());
    assert!(first_try.await.is_ok());
    proxy.come_up();
    tokio::select! {
        biased;
        () = given_up => panic!("sql.run was not tried again before the other login was given up"),
        job = shop.run(json!([])) => assert_eq!(job.state, "succeeded"),
    }
}

/// A worker whose handlers have a login that accepts connections and never responds, except `sql.run`, which has the
/// given login. Also returns the listener of the silent login, and the folder of the handlers.
async fn with_silent_login(
    shop: &Shop,
    login: Connector,
) -> (TestWorker, TcpListener, tempfile::TempDir) {
    let folder = folder_of_guests();
    // Most of the handlers come before `sql.run` in the order of their names.
    let (sandbox, catalog) = guests_with(folder.path(), &["sql.*", "sql.run"]).await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = silent.local_addr().unwrap().port();
    // The host gives a connection up after twice this time. A check stops waiting for it after 15 s: if other logins
    // had to wait for that, they would be checked after the host has closed the connection.
    let url = format!(
        "postgres://{}@127.0.0.1:{port}/shop?sslmode=disable&connect_timeout=7",
        shop.role
    );
    let sql_logins = [
        ("sql.*".to_owned(), connector(&url)),
        ("sql.run".to_owned(), login),
    ];
    let parts = Parts {
        sql_logins: sql_logins.into(),
        ..shop.parts_of(sandbox, catalog, shop.login())
    };
    let worker = TestWorker::start_with(parts, Settings::default());
    (worker, silent, folder)
}

/// Waits for the host's connection. The returned future ends when the host closes it after waiting too long.
async fn given_up(silent: &TcpListener) -> impl Future<Output = ()> {
    let (mut connection, _) = silent.accept().await.unwrap();
    async move {
        let mut nowhere = tokio::io::sink();
        // The host may also reset the connection.
        let _ = tokio::io::copy(&mut connection, &mut nowhere).await;
    }
}

/// The login may not connect. More attempts succeed than may wait for their commit, and those that wait have no slots.
#[tokio::test]
async fn jobs_wait_for_a_login_that_does_not_respond_and_take_no_slots_of_others() {
    let shop = Shop::open().await;
    let settings = Settings {
        slots: 4,
        ..Settings::default()
    };
    let worker = shop.start_with(shop.login(), settings).await;
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    let limit =
        |connections: i32| format!("ALTER ROLE {} CONNECTION LIMIT {connections}", shop.role);
    shop.sql(&limit(0)).await;
    shop.sql(&format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{}'",
        shop.role
    ))
    .await;
    for number in 0..600 {
        shop.enqueue(json!([{"sql": call("add_line", json!([number, 0]))}]))
            .await;
    }
    shop.until("SELECT count(*) > 4 FROM rouse.job WHERE state = 'running'")
        .await;
    let other = enqueue(&shop.client, "flow.square", json!({"n": 3})).await;
    assert_eq!(shop.ended(other).await.state, "succeeded");
    // On a slow machine, fewer wait, because the login counts as unavailable earlier.
    shop.until("SELECT count(*) <= 512 FROM rouse.job WHERE state = 'running'")
        .await;
    shop.sql(&limit(-1)).await;
    shop.until("SELECT count(*) = 600 AND count(DISTINCT job) = 600 FROM ledger")
        .await;
    worker.drain().await;
}

#[tokio::test]
async fn a_login_is_tried_at_once_when_the_host_has_reached_the_server_again() {
    let shop = Shop::open().await;
    let proxy = Proxy::start(&shop.db).await;
    let login = connector(&shop.as_login(proxy.url()));
    let store = proxy.store();
    let parts = Parts {
        store: store.clone(),
        ..shop.parts(login.clone()).await
    };
    let worker = TestWorker::start_with(parts, Settings::default());
    assert_eq!(shop.run(json!([])).await.state, "succeeded");
    proxy.go_down();
    let failures = |login: &Connector| {
        let reach = login.reach();
        let reach = reach.borrow();
        reach.away().map_or(0, |away| away.failures)
    };
    // After these failures, the next try of the login is at least 30 s away.
    let session = Login::new(&login, 1);
    while failures(&login) < 7 {
        login.try_now();
        assert!(!session.responds().await);
    }
    let mut reach = store.reach();
    let is_away = reach.wait_for(|reach| reach.away().is_some());
    assert!(is_away.await.is_ok());
    proxy.come_up();
    store.try_now();
    let paid = shop.run(json!([{"sql": call("add_order", json!([1]))}]));
    let paid = tokio::time::timeout(Duration::from_secs(25), paid).await;
    assert_eq!(paid.expect("the login is tried").state, "succeeded");
    worker.drain().await;
}
