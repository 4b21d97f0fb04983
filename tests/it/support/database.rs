//! A database for each test.

use std::future::poll_fn;
use std::path::PathBuf;
use std::sync::{
    OnceLock,
    atomic::{AtomicU32, Ordering},
    mpsc,
};
use std::time::Duration;

use rouse::store::migrate::{self, MigrateError, Report, Sources};
use rouse::store::{Registration, Store, WorkerKey, connect::Connector};
use tokio::sync::OnceCell;
use tokio_postgres::error::DbError;
use tokio_postgres::{AsyncMessage, Client, NoTls};

use super::cluster;

const TEMPLATE: &str = "rouse_template";

/// A migrated database for one test; dropped some time after the test.
#[derive(Debug)]
pub(crate) struct TestDb {
    name: String,
    workers: AtomicU32,
}

/// The address of a database.
pub(crate) struct Address {
    pub(crate) user: String,
    /// The directory of the server's Unix socket.
    pub(crate) directory: PathBuf,
    pub(crate) database: String,
}

impl TestDb {
    /// Makes a database from the migrated template.
    pub(crate) async fn new() -> Self {
        static TEMPLATE_MADE: OnceCell<()> = OnceCell::const_new();
        TEMPLATE_MADE.get_or_init(make_template).await;
        Self::copy(TEMPLATE).await
    }

    /// Makes an empty database without migrations.
    pub(crate) async fn unmigrated() -> Self {
        Self::copy("template1").await
    }

    async fn copy(template: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        create(&name, template).await;
        Self {
            name,
            workers: AtomicU32::new(0),
        }
    }

    /// Its connection string, over the Unix socket, as the superuser.
    pub(crate) fn url(&self) -> String {
        cluster::shared().url(&self.name)
    }

    /// Its address, for a proxy.
    pub(crate) fn address(&self) -> Address {
        let url = self.url();
        let (server, database) = url.rsplit_once('/').expect("a database");
        let (user, host) = server
            .strip_prefix("postgres://")
            .and_then(|rest| rest.split_once('@'))
            .expect("a user at a host");
        Address {
            user: user.into(),
            directory: host.replace("%2F", "/").into(),
            database: database.into(),
        }
    }

    /// A store with connections of its own.
    pub(crate) fn store(&self) -> Store {
        Store::new(&self.connector(), 4)
    }

    /// A store with a worker registered through it; the first is `w-1`.
    pub(crate) async fn worker(&self) -> Store {
        let store = self.store();
        let number = self.workers.fetch_add(1, Ordering::Relaxed) + 1;
        store
            .register(&registration(&format!("w-{number}"), WorkerKey::random()))
            .await
            .expect("the id is free");
        store
    }

    /// The connector with which a worker is started.
    pub(crate) fn connector(&self) -> Connector {
        Connector::from_url(&self.url(), &|_| None).expect("a good connection string")
    }

    /// A new connection to it, as the superuser.
    pub(crate) async fn client(&self) -> Client {
        connect(&self.url()).await
    }
}

/// The registration of a worker without handlers, queues or tags of its own.
pub(crate) fn registration(worker_id: &str, key: WorkerKey) -> Registration {
    Registration {
        worker_id: worker_id.into(),
        key,
        hostname: "here".into(),
        platform: "linux x86_64".into(),
        version: "0".into(),
        capabilities: serde_json::json!({}),
        slots: 1,
        queues: Vec::new(),
        tags: Vec::new(),
        stats: None,
    }
}

impl Drop for TestDb {
    fn drop(&mut self) {
        // One thread drops all databases, so that no test waits. Databases that are left when the run ends are removed
        // with the cluster.
        static JANITOR: OnceLock<mpsc::Sender<String>> = OnceLock::new();
        let janitor = JANITOR.get_or_init(|| {
            let (names, queue) = mpsc::channel();
            std::thread::spawn(move || clean(&queue));
            names
        });
        // The janitor only ends with the process.
        let _ = janitor.send(std::mem::take(&mut self.name));
    }
}

/// Connects, and keeps the connection going in the background of the test's runtime.
pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls)
        .await
        .unwrap_or_else(|error| panic!("connect to {url}: {error:?}"));
    tokio::spawn(connection);
    client
}

/// The message and the hint with which the database refuses these statements. After an error in a batch of several
/// statements, the transaction must be rolled back.
pub(crate) async fn refusal(client: &Client, sql: &str) -> String {
    let error = client.batch_execute(sql).await.expect_err(sql);
    let error = error.as_db_error().expect("an error from the database");
    format!("{} / {}", error.message(), error.hint().unwrap_or_default())
}

/// The notices that these statements raise.
pub(crate) async fn raised(db: &TestDb, statements: &str) -> Vec<DbError> {
    let (client, mut connection) = tokio_postgres::connect(&db.url(), NoTls).await.unwrap();
    let reading = tokio::spawn(async move {
        let mut notices = Vec::new();
        while let Some(message) = poll_fn(|cx| connection.poll_message(cx)).await {
            if let AsyncMessage::Notice(notice) = message.unwrap() {
                notices.push(notice);
            }
        }
        notices
    });
    client.batch_execute(statements).await.unwrap();
    drop(client);
    reading.await.unwrap()
}

/// Drops all partitions of this table in schema `rouse`, including today's.
pub(crate) async fn drop_all_partitions(client: &Client, table: &str) {
    let drop = format!(
        "DO $$ DECLARE t text; BEGIN
             FOR t IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'rouse.{table}'::regclass LOOP
                 EXECUTE 'DROP TABLE ' || t;
             END LOOP;
         END $$"
    );
    client.batch_execute(&drop).await.unwrap();
}

/// Ends every session on this session's database except its own, as an operator or a failing server would.
pub(crate) async fn cut_all_others(client: &Client) {
    let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
               WHERE datname = current_database() AND pid <> pg_backend_pid()";
    client.batch_execute(cut).await.expect("cut the sessions");
}

/// Migrates the database, with this host's sources.
pub(crate) async fn migrate(url: &str) -> Result<Report, MigrateError> {
    migrate_with(url, migrate::ALL, migrate::WAIT).await
}

/// Like [`migrate`], with sources and time limits of the test's own.
pub(crate) async fn migrate_with(
    url: &str,
    sources: Sources<'_>,
    wait: Duration,
) -> Result<Report, MigrateError> {
    let (mut client, mut keeper) = (connect(url).await, connect(url).await);
    migrate::run_these(&mut client, &mut keeper, wait, sources).await
}

async fn make_template() {
    create(TEMPLATE, "template1").await;
    migrate(&cluster::shared().url(TEMPLATE))
        .await
        .expect("the template is migrated");
}

async fn create(name: &str, template: &str) {
    // The first test to get here starts the server, which blocks for a second.
    let server = tokio::task::spawn_blocking(cluster::shared)
        .await
        .expect("the server starts");
    connect(&server.url("postgres"))
        .await
        .batch_execute(&format!("CREATE DATABASE {name} TEMPLATE {template}"))
        .await
        .unwrap_or_else(|error| panic!("create {name}: {error:?}"));
}

fn clean(queue: &mpsc::Receiver<String>) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime for dropping databases");
    runtime.block_on(async {
        let client = connect(&cluster::shared().url("postgres")).await;
        while let Ok(name) = queue.recv() {
            // Best effort: leftovers are removed with the cluster.
            let _ = client
                .batch_execute(&format!("DROP DATABASE IF EXISTS {name} WITH (FORCE)"))
                .await;
        }
    });
}
