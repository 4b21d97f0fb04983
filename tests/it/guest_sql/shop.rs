//! A database with tables of a shop, a login for its handlers, and workers that run them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use rouse::job::SqlLimits;
use rouse::sandbox::{Catalog, Sandbox, Settings as SandboxSettings, SqlGrant};
use rouse::store::connect::Connector;
use rouse::worker::{Parts, Settings};
use serde_json::{Value, json};
use tokio::sync::OnceCell;
use tokio_postgres::Client;

use crate::support::worker::{self, Shown, TestWorker, guests_dir, until_true};
use crate::support::{TestDb, code_cache, rouse_binary};

const TABLES: &str = "
    CREATE TABLE orders (id bigint PRIMARY KEY, paid boolean NOT NULL DEFAULT false);
    CREATE TABLE ledger (job bigint NOT NULL, amount bigint NOT NULL);
    CREATE TABLE accounts (id bigint PRIMARY KEY, balance bigint NOT NULL CHECK (balance >= 0));
    CREATE FUNCTION checked(n integer) RETURNS integer LANGUAGE plpgsql AS $$ BEGIN RETURN n; END $$;";

pub(super) struct Shop {
    pub(super) db: TestDb,
    pub(super) client: Client,
    /// The login of the handlers.
    pub(super) role: String,
}

/// A call to a statement.
pub(super) fn call(statement: &str, params: Value) -> Value {
    json!({"statement": statement, "params": params})
}

impl Shop {
    pub(super) async fn open() -> Self {
        let shop = Self::without_rights().await;
        shop.grant().await;
        shop
    }

    /// A shop whose login has no privilege on the tables yet.
    pub(super) async fn without_rights() -> Self {
        let db = TestDb::new().await;
        let client = db.client().await;
        let role = format!("sql_{}", db.address().database);
        client
            .batch_execute(&format!(
                "{TABLES} CREATE ROLE {role} LOGIN IN ROLE rouse_handler"
            ))
            .await
            .unwrap();
        Self { db, client, role }
    }

    pub(super) async fn grant(&self) {
        self.sql(&format!(
            "GRANT SELECT, INSERT, UPDATE, DELETE ON orders, ledger, accounts TO {}",
            self.role
        ))
        .await;
    }

    /// The connection string of the shop's login, derived from that of a superuser.
    pub(super) fn as_login(&self, url: &str) -> String {
        let (_, rest) = url.split_once('@').expect("a user");
        format!("postgres://{}@{rest}", self.role)
    }

    pub(super) fn login(&self) -> Connector {
        connector(&self.as_login(&self.db.url()))
    }

    pub(super) async fn start(&self) -> TestWorker {
        self.start_with(self.login(), Settings::default()).await
    }

    /// Starts a worker whose handlers run their statements with this login.
    pub(super) async fn start_with(&self, login: Connector, settings: Settings) -> TestWorker {
        let parts = self.parts(login).await;
        TestWorker::start_with(parts, settings)
    }

    pub(super) async fn parts(&self, login: Connector) -> Parts {
        let (sandbox, catalog) = guests().await;
        self.parts_of(sandbox, catalog, login)
    }

    pub(super) fn parts_of(
        &self,
        sandbox: Arc<Sandbox>,
        catalog: Arc<Catalog>,
        login: Connector,
    ) -> Parts {
        Parts {
            store: self.db.store(),
            listen_connector: self.db.connector(),
            sandbox,
            catalog,
            sql_logins: [("sql.*".to_owned(), login)].into(),
            middleware: Vec::new(),
        }
    }

    /// Waits until the statements of all handlers have been checked: those of `sql.run`, and then those of handlers that
    /// come after it in the order of their names, of which the last one is parked. Until then, a message of the login
    /// may be that of a check.
    pub(super) async fn until_all_are_checked(&self) {
        self.until("SELECT coalesce(bool_or(parked IS NOT NULL), false) FROM rouse.handlers WHERE handler = 'sql.two'")
            .await;
    }

    pub(super) async fn enqueue(&self, script: Value) -> i64 {
        worker::enqueue(&self.client, "sql.run", json!({"script": script})).await
    }

    pub(super) async fn ended(&self, id: i64) -> Shown {
        worker::ended(&self.client, id).await
    }

    pub(super) async fn run(&self, script: Value) -> Shown {
        self.ended(self.enqueue(script).await).await
    }

    pub(super) async fn until(&self, sql: &str) {
        until_true(&self.client, sql).await;
    }

    pub(super) async fn sql(&self, sql: &str) {
        self.client
            .batch_execute(sql)
            .await
            .unwrap_or_else(|error| panic!("{sql}: {error:?}"));
    }

    pub(super) async fn holds(&self, sql: &str) -> bool {
        let row = self.client.query_one(sql, &[]).await;
        row.unwrap_or_else(|error| panic!("{sql}: {error:?}"))
            .get(0)
    }

    pub(super) async fn count(&self, table: &str) -> i64 {
        let sql = format!("SELECT count(*) FROM {table}");
        self.client.query_one(&sql, &[]).await.unwrap().get(0)
    }

    pub(super) async fn clear(&self) {
        self.sql("TRUNCATE orders, ledger, accounts").await;
    }
}

pub(super) fn connector(url: &str) -> Connector {
    Connector::from_url(url, &|_| None).expect("a good connection string")
}

/// The guests, with grants of all their statements.
async fn guests() -> (Arc<Sandbox>, Arc<Catalog>) {
    static GUESTS: OnceCell<(Arc<Sandbox>, Arc<Catalog>)> = OnceCell::const_new();
    let guests = GUESTS.get_or_init(|| async {
        let folder = folder_of_guests();
        guests_in(folder.path()).await
    });
    guests.await.clone()
}

/// The file of the guests.
pub(super) const MODULE: &str = "flow_guests.wasm";

/// A folder with the guests.
pub(super) fn folder_of_guests() -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::copy(guests_dir().join(MODULE), folder.path().join(MODULE)).expect("a guest");
    folder
}

pub(super) async fn guests_in(folder: &Path) -> (Arc<Sandbox>, Arc<Catalog>) {
    guests_with(folder, &["sql.*"]).await
}

/// The guests, with grants of all their statements by these tables.
pub(super) async fn guests_with(folder: &Path, tables: &[&str]) -> (Arc<Sandbox>, Arc<Catalog>) {
    let grant = || SqlGrant {
        statements: None,
        limits: SqlLimits {
            connections_max: 2,
            statement_timeout: std::time::Duration::from_secs(2),
            ..SqlLimits::default()
        },
    };
    let settings = SandboxSettings {
        attempts_max: 50,
        compiler: Some(rouse_binary()),
        cache_dir: Some(code_cache()),
        modules: BTreeMap::from([("sql.*".to_owned(), vec![MODULE.parse().expect("a binding")])]),
        sql: tables
            .iter()
            .map(|table| ((*table).to_owned(), grant()))
            .collect(),
        enqueue: [("sql.*".to_owned(), vec!["sql.*".to_owned()])].into(),
        ..SandboxSettings::default()
    };
    let sandbox = Sandbox::start(settings).expect("a sandbox");
    let catalog = Catalog::open(sandbox.clone(), folder).await;
    (sandbox, Arc::new(catalog.expect("the guests load")))
}
