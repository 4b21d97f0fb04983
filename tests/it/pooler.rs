//! Behind PgBouncer in transaction mode, each transaction may run in another session.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rouse::job::JobId;
use rouse::store::Store;
use rouse::store::connect::Connector;
use rouse::worker::{Parts, Settings};
use serde_json::json;
use tokio::task::JoinSet;

use crate::support::held_ends::HeldEnds;
use crate::support::worker::{
    TIMEOUT, TestWorker, cancel, catalog, ended, enqueue, lease, sandbox, until, until_true,
};
use crate::support::{Host, TestDb, command, cut_all_others, folder, free_port, scratch, skip};

/// A PgBouncer for one test, with two sessions in total.
struct Pooler {
    process: Host,
    url: String,
}

/// `None` if this machine has no PgBouncer; CI installs it.
fn pooler(db: &TestDb) -> Option<Pooler> {
    let Some(binary) = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer"]
        .into_iter()
        .find(|path| Path::new(path).is_file())
    else {
        skip("there is no PgBouncer on this machine (apt-get install pgbouncer)");
        return None;
    };
    let at = db.address();
    let (user, database, socket) = (&at.user, &at.database, at.directory.display());
    // Only its owner may use the socket, so PgBouncer runs as this owner.
    let owner = std::fs::metadata(&at.directory).expect("the socket's directory");
    let (dir, port) = (scratch("pooler"), free_port());
    let config = dir.join("pgbouncer.ini");
    std::fs::write(
        &config,
        format!(
            "[databases]\n{database} = host={socket} user={user}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
        ),
    )
    .expect("a configuration");
    let mut command = Command::new(binary);
    command.arg(&config).uid(owner.uid()).gid(owner.gid());
    let process = Host::spawn(command);
    process.line(TIMEOUT, |line| line.contains("process up"));
    let url = format!("postgres://{user}@127.0.0.1:{port}/{database}?sslmode=disable");
    Some(Pooler { process, url })
}

impl Pooler {
    fn connector(&self) -> Connector {
        Connector::from_url(&self.url, &|_| None).expect("a good connection string")
    }

    fn store(&self) -> Store {
        Store::new(&self.connector(), 4)
    }
}

fn settings() -> Settings {
    Settings {
        notify: false,
        poll_max: Duration::from_millis(200),
        overrides: lease("test.*", 2),
        ..Settings::default()
    }
}

#[tokio::test]
async fn a_worker_behind_a_transaction_pooler_works_by_polling() {
    let db = TestDb::new().await;
    let Some(pooler) = pooler(&db) else { return };
    let client = db.client().await;
    let held = HeldEnds::of("test.sleep");
    // It is renewed after 8 s.
    let long_leases = || Settings {
        overrides: lease("test.*", 20),
        ..settings()
    };
    let start = async || {
        let parts = Parts {
            store: pooler.store(),
            listen_connector: pooler.connector(),
            sandbox: sandbox(),
            catalog: catalog().await,
            sql_logins: BTreeMap::new(),
            middleware: held.alone(),
        };
        TestWorker::start_with(parts, long_leases())
    };
    let (one, other) = (start().await, start().await);

    // Producers also use the pooler, in transactions of every length.
    let through = crate::support::connect(&pooler.url).await;
    for n in 0..50 {
        through
            .batch_execute(&format!(
                "BEGIN; SELECT rouse.enqueue('noop', '{{\"n\": {n}}}'); SELECT rouse.enqueue('test.flaky', '{{\"fail_until\": 1}}'); COMMIT"
            ))
            .await
            .unwrap();
    }
    // Steps, a lease that is renewed before it ends, and a cancellation that the renewal finds.
    let steps = enqueue(&client, "test.steps", json!({"between": "fail"})).await;
    let long = enqueue(&client, "test.sleep", json!({"ms": 1})).await;
    let endless = enqueue(&client, "test.wait-abort", json!({})).await;
    until(&client, endless, |job| job.state == "running").await;
    cancel(&client, endless).await;

    let job = ended(&client, steps).await;
    let done = json!({"first": 1, "looped": [1, 1, 1], "second": 2});
    assert_eq!(job.result, Some(done));
    let renewed =
        format!("SELECT EXISTS (SELECT FROM rouse.history({long}) WHERE event = 'renewed')");
    until_true(&client, &renewed).await;
    held.release();
    let job = ended(&client, long).await;
    assert_eq!((job.state.as_str(), job.attempt), ("succeeded", 1));
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let row = client
        .query_one(
            "SELECT count(*) FILTER (WHERE state = 'succeeded'), count(DISTINCT id), max(attempt) FROM rouse.finished",
            &[],
        )
        .await
        .unwrap();
    let counts: (i64, i64, i32) = (row.get(0), row.get(1), row.get(2));
    assert_eq!(counts, (102, 103, 2));
    one.drain().await;
    other.drain().await;
}

#[tokio::test]
async fn restarting_the_pooler_or_cutting_its_sessions_does_not_lose_jobs() {
    let db = TestDb::new().await;
    let Some(first) = pooler(&db) else { return };
    let client = db.client().await;
    let worker = TestWorker::start_through(
        first.store(),
        first.connector(),
        settings(),
        catalog().await,
    );
    client
        .batch_execute("SELECT rouse.enqueue_many('test.sleep', array_fill('{\"ms\": 20}'::jsonb, ARRAY[300]))")
        .await
        .unwrap();
    for finished in [20, 100, 200] {
        until_true(
            &client,
            &format!("SELECT count(*) > {finished} FROM rouse.finished"),
        )
        .await;
        cut_all_others(&client).await;
    }
    until_true(&client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    let row = client
        .query_one(
            "SELECT count(*) FILTER (WHERE state = 'succeeded'), count(DISTINCT id) FROM rouse.finished",
            &[],
        )
        .await
        .unwrap();
    assert_eq!((row.get::<_, i64>(0), row.get::<_, i64>(1)), (300, 300));
    worker.drain().await;
    first.process.kill();
}

#[tokio::test]
async fn a_worker_behind_a_pooler_is_notified_over_a_direct_address() {
    let db = TestDb::new().await;
    let Some(pooler) = pooler(&db) else { return };
    let client = db.client().await;
    let never = Duration::from_secs(60);
    let asleep = Settings {
        notify: true,
        poll_min: never,
        poll_max: never,
        ..settings()
    };
    let worker = TestWorker::start_through(pooler.store(), db.connector(), asleep, catalog().await);
    until_true(&client, "SELECT EXISTS (SELECT FROM rouse.sleeper)").await;
    let before = std::time::Instant::now();
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    assert!(before.elapsed() < never / 2, "found by the poll");
    worker.drain().await;
}

/// The sessions of the pooler, and the number of channels on which each listens.
async fn channels(pooler: &Pooler) -> Vec<(i32, i64)> {
    let mut sessions = Vec::new();
    let mut open = Vec::new();
    // Each transaction occupies one session, so the next transaction gets another.
    for _ in 0..2 {
        let client = crate::support::connect(&pooler.url).await;
        client.batch_execute("BEGIN").await.unwrap();
        let sql = "SELECT pg_backend_pid(), (SELECT count(*) FROM pg_listening_channels())";
        let rows = client.query_typed(sql, &[]).await.unwrap();
        sessions.push((rows[0].get(0), rows[0].get(1)));
        open.push(client);
    }
    sessions
}

#[tokio::test]
async fn a_host_behind_a_pooler_reports_it_polls_and_leaves_no_state_in_shared_sessions() {
    let db = TestDb::new().await;
    let Some(pooler) = pooler(&db) else { return };
    let client = db.client().await;
    let folder = folder("", &["noop.wasm"]);
    let host = Host::spawn(command(&pooler.url, &["serve", "--http", "off"], &folder));
    host.line(TIMEOUT, |line| {
        line.contains("which is a transaction pooler; set ROUSE_LISTEN_URL")
    });
    let id = enqueue(&client, "noop", json!({"n": 1})).await;
    assert_eq!(ended(&client, id).await.state, "succeeded");
    host.stop();
    let sessions = channels(&pooler).await;
    assert_ne!(sessions[0].0, sessions[1].0, "both sessions");
    assert!(
        sessions.iter().all(|(_, channels)| *channels == 0),
        "{sessions:?}"
    );
}

#[tokio::test]
async fn reads_for_people_behind_a_pooler_share_its_sessions_and_leave_no_transaction_open() {
    const OPEN: &str = "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid() AND state LIKE 'idle in transaction%'";
    let db = TestDb::new().await;
    let Some(pooler) = pooler(&db) else { return };
    let client = db.client().await;
    let mut ids = Vec::new();
    for n in 0..20 {
        ids.push(enqueue(&client, "noop", json!({ "n": n })).await);
    }
    // Reads of the first ten jobs fail.
    let fails_up_to = ids[9];
    client
        .batch_execute(&format!(
            "CREATE OR REPLACE FUNCTION rouse.why(id bigint)
             RETURNS TABLE (reason text, sentence text, remedy text, since timestamptz, until timestamptz)
             LANGUAGE plpgsql AS $$
             BEGIN
                 IF id <= {fails_up_to} THEN
                     RAISE EXCEPTION 'job % fails', id;
                 END IF;
                 RETURN QUERY SELECT id::text, current_setting('jit'), NULL, NULL::timestamptz, NULL::timestamptz;
             END $$"
        ))
        .await
        .unwrap();
    // More connections than sessions.
    let store = Arc::new(pooler.store());
    let mut reads = JoinSet::new();
    for id in ids {
        let store = store.clone();
        reads.spawn(async move { (id, store.why(JobId(id)).await) });
    }
    let mut failed = 0;
    for (id, read) in reads.join_all().await {
        match read {
            Ok(rows) => {
                let rows = rows.unwrap();
                assert_eq!(rows[0]["reason"], json!(id.to_string()));
                assert_eq!(rows[0]["sentence"], json!("off"));
            }
            Err(error) => {
                let expected = format!("job {id} fails");
                assert!(error.to_string().contains(&expected), "{error}");
                failed += 1;
            }
        }
    }
    assert_eq!(failed, 10);
    // The rollback after an error follows the response.
    until_true(&client, &format!("SELECT ({OPEN}) = 0")).await;
}
