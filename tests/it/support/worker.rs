//! Workers inside the test process, with handlers that were built beforehand.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rouse::sandbox::{Catalog, Limits, Sandbox, Settings as SandboxSettings};
use rouse::store::Store;
use rouse::store::connect::Connector;
use rouse::worker::{self, Health, Middleware, Override, Overrides, Parts, Settings, Stop};
use serde_json::Value;
use tempfile::TempDir;
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;
use tokio_postgres::Client;

use super::{TestDb, code_cache, rouse_binary};

/// Long enough for a busy machine, on which a host takes half a minute to compile all guests; a test that waits this
/// long has failed.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(90);

/// The folder with the wasm files of `tests/guests`, `handlers` and `examples`.
pub(crate) fn guests_dir() -> PathBuf {
    let dir = std::env::var_os("ROUSE_TEST_GUESTS").map_or_else(
        || {
            PathBuf::from(concat!(
                env!("CARGO_MANIFEST_DIR"),
                "/../target/test-guests"
            ))
        },
        PathBuf::from,
    );
    // The components, which were built for WASI 0.2 (wasm32-wasip2).
    let dir = dir.join("p2");
    assert!(
        dir.is_dir(),
        "{} is missing: `cargo xtask test` builds the guests",
        dir.display()
    );
    dir
}

/// One sandbox for all workers of the test binary: each sandbox reserves address space.
pub(crate) fn sandbox() -> Arc<Sandbox> {
    static SANDBOX: OnceLock<Arc<Sandbox>> = OnceLock::new();
    SANDBOX
        .get_or_init(|| {
            let settings = SandboxSettings {
                attempts_max: 200,
                limits: Limits {
                    memory_bytes: 32 << 20,
                    result_bytes: 1 << 20,
                    ..Limits::default()
                },
                compiler: Some(rouse_binary()),
                cache_dir: Some(code_cache()),
                enqueue: [("flow.*".to_owned(), vec!["flow.*".to_owned()])].into(),
                ..SandboxSettings::default()
            };
            Sandbox::start(settings).expect("a sandbox")
        })
        .clone()
}

/// All guests, compiled once for the test binary.
pub(crate) async fn catalog() -> Arc<Catalog> {
    static CATALOG: OnceCell<Arc<Catalog>> = OnceCell::const_new();
    CATALOG
        .get_or_init(|| async {
            let catalog = Catalog::open(sandbox(), guests_dir()).await;
            Arc::new(catalog.expect("the guests load"))
        })
        .await
        .clone()
}

/// A worker in this process.
pub(crate) struct TestWorker {
    stop: Stop,
    task: JoinHandle<anyhow::Result<()>>,
}

impl TestWorker {
    /// Starts a worker with all guests.
    pub(crate) async fn start(db: &TestDb, settings: Settings) -> Self {
        Self::start_on(db, settings, catalog().await)
    }

    /// Starts a worker with these handlers.
    pub(crate) fn start_on(db: &TestDb, settings: Settings, catalog: Arc<Catalog>) -> Self {
        Self::start_listening_through(db.connector(), db, settings, catalog)
    }

    /// Starts a worker with these handlers that listens for notifications through this connector.
    pub(crate) fn start_listening_through(
        listen_connector: Connector,
        db: &TestDb,
        settings: Settings,
        catalog: Arc<Catalog>,
    ) -> Self {
        Self::start_through(db.store(), listen_connector, settings, catalog)
    }

    /// Starts a worker that uses this store, and listens for notifications through this connector.
    pub(crate) fn start_through(
        store: Store,
        listen_connector: Connector,
        settings: Settings,
        catalog: Arc<Catalog>,
    ) -> Self {
        let parts = Parts {
            store,
            listen_connector,
            sandbox: sandbox(),
            catalog,
            sql_logins: BTreeMap::new(),
            middleware: Vec::new(),
        };
        Self::start_with(parts, settings)
    }

    /// Starts a worker with all guests and with this middleware.
    pub(crate) async fn start_with_middlewares(
        db: &TestDb,
        settings: Settings,
        middleware: Vec<Arc<dyn Middleware>>,
    ) -> Self {
        let parts = Parts {
            store: db.store(),
            listen_connector: db.connector(),
            sandbox: sandbox(),
            catalog: catalog().await,
            sql_logins: BTreeMap::new(),
            middleware,
        };
        Self::start_with(parts, settings)
    }

    /// Starts a worker in the test's own sandbox.
    pub(crate) fn start_in(
        db: &TestDb,
        settings: Settings,
        sandbox: Arc<Sandbox>,
        catalog: Arc<Catalog>,
    ) -> Self {
        let parts = Parts {
            store: db.store(),
            listen_connector: db.connector(),
            sandbox,
            catalog,
            sql_logins: BTreeMap::new(),
            middleware: Vec::new(),
        };
        Self::start_with(parts, settings)
    }

    /// Starts a worker from the test's own parts.
    pub(crate) fn start_with(parts: Parts, settings: Settings) -> Self {
        Self::start_with_health(parts, settings, Health::default())
    }

    /// Like [`start_with`](Self::start_with); the worker reports to this health, which the test reads.
    pub(crate) fn start_with_health(parts: Parts, settings: Settings, health: Health) -> Self {
        let stop = Stop::default();
        let task = tokio::spawn(worker::run(settings, parts, health, stop.clone()));
        Self { stop, task }
    }

    /// Signals the worker to stop, and waits until all its attempts are settled.
    pub(crate) async fn drain(self) {
        self.stop.drain();
        self.ended().await;
    }

    /// Signals the worker to stop at once, and waits for its end.
    pub(crate) async fn stop_now(self) {
        self.stop.now();
        self.ended().await;
    }

    /// Waits until the worker has ended on its own; returns the error.
    pub(crate) async fn failed(self) -> String {
        let ended = tokio::time::timeout(TIMEOUT, self.task)
            .await
            .expect("the worker ends")
            .expect("the worker does not panic");
        format!("{:#}", ended.expect_err("the worker fails"))
    }

    async fn ended(self) {
        tokio::time::timeout(TIMEOUT, self.task)
            .await
            .expect("the worker ends")
            .expect("the worker does not panic")
            .expect("the worker ends without an error");
    }
}

/// Enqueues through SQL, as a producer would.
pub(crate) async fn enqueue(client: &Client, handler: &str, payload: Value) -> i64 {
    client
        .query_one("SELECT rouse.enqueue($1, $2)", &[&handler, &payload])
        .await
        .expect("enqueue the job")
        .get(0)
}

/// Calls `rouse.enqueue` with `sql` as its arguments.
pub(crate) async fn enqueue_sql(client: &Client, sql: &str) -> i64 {
    let sql = format!("SELECT rouse.enqueue({sql})");
    client.query_one(&sql, &[]).await.unwrap().get(0)
}

/// Cancels a job as an admin action; returns whether this call cancelled it.
pub(crate) async fn cancel(client: &Client, id: i64) -> bool {
    client
        .query_one("SELECT rouse.cancel($1)", &[&id])
        .await
        .expect("cancel the job")
        .get(0)
}

/// Ends the lease of a running job, as if its worker had been unable to renew it.
pub(crate) async fn expire_lease(client: &Client, id: i64) {
    client
        .execute(
            "UPDATE rouse.job SET lease_until = now() - interval '1 s' WHERE id = $1",
            &[&id],
        )
        .await
        .expect("expire the lease");
}

/// Deletes the row of an ended job, as if its history had been dropped.
pub(crate) async fn forget(client: &Client, id: i64) {
    let sql = format!(
        "BEGIN; SELECT rouse.unlock_history('as if it had been dropped'); DELETE FROM rouse.finished WHERE id = {id}; COMMIT"
    );
    client.batch_execute(&sql).await.expect("forget the job");
}

/// Makes each worker send a heartbeat now, as a challenge does.
pub(crate) async fn prompt_heartbeats(client: &Client) {
    client
        .batch_execute("SELECT pg_notify('rouse_worker_' || incarnation, '') FROM rouse.worker")
        .await
        .unwrap();
}

/// Moves the last heartbeat of a worker this many seconds into the past.
pub(crate) async fn backdate_heartbeat(client: &Client, worker: &Store, seconds: i32) {
    client
        .execute(
            "UPDATE rouse.worker SET seen_at = now() - make_interval(secs => $2::integer) WHERE incarnation = $1",
            &[&worker.incarnation().unwrap().0, &seconds],
        )
        .await
        .unwrap();
}

/// SQL that replaces `rouse.peek` with a function whose response makes the claimer panic.
pub(crate) const UNREADABLE_PEEK: &str = "
    DROP FUNCTION rouse.peek;
    CREATE FUNCTION rouse.peek(bigint[], bigint[], bigint, bigint, timestamptz, timestamptz, bigint[],
        OUT ready integer, OUT catalog_changed integer, OUT orphans integer, OUT due integer, OUT next_due_ms integer,
        OUT looked_at integer, OUT turn integer, OUT writers integer, OUT releases integer, OUT deadlines integer,
        OUT paused integer)
    LANGUAGE plpgsql AS 'BEGIN END'";

/// The events of a job, oldest first.
pub(crate) async fn events(client: &Client, id: i64) -> Vec<String> {
    let rows = client
        .query("SELECT event FROM rouse.history($1)", &[&id])
        .await
        .expect("read the history");
    rows.iter().map(|row| row.get(0)).collect()
}

/// The events of a job that a worker has run, oldest first, without those that depend on the speed of the machine. They
/// are the renewals of its lease: a worker also renews its leases when its LISTEN starts, which may be before, during
/// or after the first attempt. And the claims that were given back because no attempt had started within a second.
pub(crate) async fn events_at_any_speed(client: &Client, id: i64) -> Vec<String> {
    let sql = "SELECT event FROM rouse.history($1)
               WHERE event <> 'renewed' AND (event <> 'released' OR detail ->> 'started_at' IS NOT NULL)";
    let rows = client.query(sql, &[&id]).await.expect("read the history");
    rows.iter().map(|row| row.get(0)).collect()
}

/// The events of a job in the log of a worker, without the claims that it has given back because no attempt had started
/// within a second, as on a slow machine.
pub(crate) fn without_returned_claims<T>(events: Vec<T>, name: impl Fn(&T) -> &str) -> Vec<T> {
    let mut kept: Vec<T> = Vec::new();
    for event in events {
        let is_claimed = kept.last().is_some_and(|last| name(last) == "claimed");
        match is_claimed && name(&event) == "released" {
            true => _ = kept.pop(),
            false => kept.push(event),
        }
    }
    kept
}

/// A job, as the database shows it.
#[derive(Debug)]
pub(crate) struct Shown {
    pub(crate) state: String,
    pub(crate) attempt: i32,
    pub(crate) result: Option<Value>,
    pub(crate) error: Option<Value>,
}

/// The current state of a job in the database.
pub(crate) async fn show(client: &Client, id: i64) -> Shown {
    let row = client
        .query_one(
            "SELECT state::text, attempt, result, error FROM rouse.job($1)",
            &[&id],
        )
        .await
        .unwrap_or_else(|error| panic!("job {id}: {error:?}"));
    Shown {
        state: row.get(0),
        attempt: row.get(1),
        result: row.get(2),
        error: row.get(3),
    }
}

/// Waits until `wanted` accepts the job. It polls, since there is no event to wait for.
pub(crate) async fn until(client: &Client, id: i64, wanted: impl Fn(&Shown) -> bool) -> Shown {
    until_within(client, id, TIMEOUT, wanted).await
}

/// Like [`until`], with this timeout.
pub(crate) async fn until_within(
    client: &Client,
    id: i64,
    timeout: Duration,
    wanted: impl Fn(&Shown) -> bool,
) -> Shown {
    let deadline = tokio::time::Instant::now() + timeout;
    loop {
        let shown = show(client, id).await;
        if wanted(&shown) {
            return shown;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "job {id} is still {shown:?}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the job has ended.
pub(crate) async fn ended(client: &Client, id: i64) -> Shown {
    until(client, id, |job| {
        job.state != "queued" && job.state != "running"
    })
    .await
}

/// For `ORDER BY`: the order in which one worker received and started its jobs. The start times alone may mix the jobs
/// of two claims: they are measured from the claim, on the server's clock, and ignore the transit time of the response.
pub(crate) const START_ORDER: &str = "claimed_at, started_at";

/// Runs all jobs on a worker with one slot, so that the order of the starts is the order of the claims.
pub(crate) async fn run_all_in_one_slot(db: &TestDb, client: &Client) {
    let settings = Settings {
        slots: 1,
        ..Settings::default()
    };
    let worker = TestWorker::start(db, settings).await;
    until_true(client, "SELECT NOT EXISTS (SELECT FROM rouse.job)").await;
    worker.drain().await;
}

/// Waits until a worker with this health has this number of claimed jobs whose attempt has not ended.
pub(crate) async fn until_in_hand(health: &Health, wanted: usize) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let in_hand = health.in_hand.load(Ordering::Relaxed);
        if in_hand == wanted {
            return;
        }
        assert!(
            tokio::time::Instant::now() < deadline,
            "{in_hand} jobs in hand, not {wanted}"
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Whether some session of the database waits for a lock, for [`until_true`].
pub(crate) const SESSION_WAITS: &str = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')";

/// Waits until the SQL, a boolean, is true.
pub(crate) async fn until_true(client: &Client, sql: &str) {
    let deadline = tokio::time::Instant::now() + TIMEOUT;
    loop {
        let row = client.query_one(sql, &[]).await;
        if row
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"))
            .get(0)
        {
            return;
        }
        assert!(tokio::time::Instant::now() < deadline, "still false: {sql}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A catalog of these modules only.
pub(crate) async fn catalog_of(modules: &[(&str, &[u8])]) -> Arc<Catalog> {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, bytes) in modules {
        std::fs::write(folder.path().join(name), bytes).expect("a module");
    }
    let catalog = Catalog::open(sandbox(), folder.path()).await;
    Arc::new(catalog.expect("the modules load"))
}

/// A watched folder with copies of these guests.
pub(crate) async fn watched(guests: &[&str]) -> (Arc<Catalog>, TempDir) {
    let folder = tempfile::tempdir().expect("a folder");
    for name in guests {
        std::fs::copy(guests_dir().join(name), folder.path().join(name)).expect("a guest");
    }
    let catalog = Catalog::open(sandbox(), folder.path())
        .await
        .expect("the guests load");
    catalog.watch();
    (Arc::new(catalog), folder)
}

/// The operator's lease for handlers of this name or pattern.
pub(crate) fn lease(pattern: &str, secs: u64) -> Overrides {
    let set = Override::default().with("lease", Duration::from_secs(secs));
    Overrides([(pattern.to_string(), set)].into())
}

/// The operator's run timeout for handlers of this name or pattern, with a short grace.
pub(crate) fn timeout(pattern: &str, timeout: Duration) -> Overrides {
    let set = Override::default()
        .with("timeout", timeout)
        .with("grace", Duration::from_millis(200));
    Overrides([(pattern.to_string(), set)].into())
}

/// The operator's retries for handlers of this name or pattern.
pub(crate) fn retries(pattern: &str, max_attempts: u32, backoff: Duration) -> Overrides {
    let set = Override::default()
        .with("max_attempts", max_attempts)
        .with("retry_initial", backoff)
        .with("retry_max", backoff);
    Overrides([(pattern.to_string(), set)].into())
}
