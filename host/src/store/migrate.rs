//! Brings schema `rouse` up to date: applies each migration once, and the definitions (functions, views, triggers, rights) whenever they
//! differ from this host's. Records both.
//!
//! Any number of hosts may do this at the same time: one works, the others wait. Migrations change tables and are recorded with their
//! sha256; a database with a different record is refused. The definitions are applied as a whole, in one transaction, which also drops what
//! they no longer define, and restores what was dropped or revoked.
//!
//! Producers continue in the meantime. A statement that needs an exclusive lock on a table waits for its users, and all later statements
//! queue behind that wait. So it waits for [`LOCK_WAIT`] only; then the transaction is rolled back, and tried again later.

mod in_force;
mod lock;
mod sources;

use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::time::Instant;
use tokio_postgres::error::SqlState;
use tokio_postgres::{Client, GenericClient, IsolationLevel, Transaction};

use in_force::Difference;
pub use in_force::check_in_force;
use lock::{Blockers, Lock, watched};
pub use sources::{ALL, Migration, PROTOCOL, ROLES_SQL, Source, Sources};

/// How long a statement may wait for a lock, and block every enqueue, claim and settlement meanwhile. Long enough for the transactions of
/// producers and workers, which end within milliseconds.
pub const LOCK_WAIT: Duration = Duration::from_millis(150);
/// The pause after the first try that was blocked; each later pause is twice as long, up to [`PAUSE_MAX`].
const PAUSE_MIN: Duration = Duration::from_millis(250);
/// The longest pause between two tries.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long [`run`] keeps trying by default.
pub const WAIT: Duration = Duration::from_secs(60);

/// The roles that receive rights.
const ROLES: [&str; 5] = [
    "rouse_enqueuer",
    "rouse_producer",
    "rouse_operator",
    "rouse_worker",
    "rouse_observer",
];
/// The name of the definitions in lists of migrations.
const DEFINITIONS: &str = "functions";

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The names of the applied migrations, and `functions` for the definitions; empty if nothing had to be done.
    pub applied: Vec<String>,
    /// The schema's version now.
    pub version: i32,
    /// Applied definitions that had been changed, and were restored.
    pub restored: Vec<String>,
    /// The sessions that blocked it.
    pub waited_for: Vec<String>,
}

/// Why a database cannot be migrated or served.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// Schema `rouse` does not exist, or lacks migrations or this host's functions.
    #[error("the database is not migrated (missing: {}); run `rouse migrate` first", .missing.join(", "))]
    NotMigrated {
        /// The names of the missing migrations.
        missing: Vec<String>,
    },
    /// Functions, views or rights have been changed since they were applied.
    #[error(
        "the database differs from what `rouse migrate` applied: {}; run `rouse migrate` to restore it",
        in_force::listed(.differences)
    )]
    NotInForce {
        /// One phrase for each difference.
        differences: Vec<String>,
    },
    /// A recorded migration has a different text in this host.
    #[error(
        "migration {name} was applied to this database with a different text (sha256 {recorded}, this host has {ours}); \
         a released migration was changed: use the host that applied it, or restore its file"
    )]
    Drift {
        /// The migration.
        name: String,
        /// The ledger's digest.
        recorded: String,
        /// This host's digest.
        ours: String,
    },
    /// The functions of a later release are incompatible with this host.
    #[error(
        "the database serves hosts of protocol {oldest} and later, but this host has protocol {ours}; upgrade the host"
    )]
    TooNew {
        /// The oldest supported protocol.
        oldest: i32,
        /// This host's protocol.
        ours: i32,
    },
    /// The user may not create the roles, or the schema.
    #[error(
        "{0}; ask an administrator to run the output of `rouse migrate --roles-sql`, or migrate as a user with that right"
    )]
    NotAllowed(String),
    /// The user may not act as the owner of the schema, or the owner may not create it.
    #[error(
        "{why}; an administrator has to run: {}",
        .who.grants()
    )]
    NotOwner {
        /// The operation that was refused.
        why: String,
        /// The user and the database.
        who: Who,
    },
    /// Handlers use UTF-8, and one row in another encoding would block its lane.
    #[error("the database has the encoding {0}; create one with ENCODING 'UTF8'")]
    Encoding(String),
    /// The database does not answer.
    #[error("{0}")]
    Unreachable(String),
    /// Other sessions hold locks that the migration needs, and did not release them in time. Everything not yet committed is undone.
    #[error(
        "{what} waited {:?} for locks that other sessions hold: {}; end those sessions (SELECT pg_terminate_backend(PID)) or their transactions, and run \
         `rouse migrate` again, or allow a longer wait with --wait",
        waited, .by.join(", ")
    )]
    Blocked {
        /// The operation that had to wait.
        what: String,
        /// The time waited.
        waited: Duration,
        /// The sessions that hold the locks.
        by: Vec<String>,
    },
    /// A statement failed; nothing was changed.
    #[error("{what}: {}", super::describe(.error))]
    Sql {
        /// The operation that failed.
        what: String,
        /// The error of Postgres.
        error: tokio_postgres::Error,
    },
}

impl MigrateError {
    /// True if another session held a lock for too long, or if there was a deadlock.
    fn is_in_the_way(&self) -> bool {
        matches!(self, Self::Sql { error, .. }
            if matches!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::T_R_DEADLOCK_DETECTED)))
    }
}

/// Applies what is missing, and restores what was changed. `keeper` is a second connection to the same database: it holds the migration
/// lock, and checks which sessions block. Keeps trying for `wait`.
///
/// # Errors
/// If the database cannot be migrated. Migrations that ran outside a transaction, and those before them, remain applied; all others are
/// undone.
pub async fn run(
    client: &mut Client,
    keeper: &mut Client,
    wait: Duration,
) -> Result<Report, MigrateError> {
    run_these(client, keeper, wait, ALL).await
}

/// [`run`] with other sources.
///
/// # Errors
/// As [`run`].
pub async fn run_these(
    client: &mut Client,
    keeper: &mut Client,
    wait: Duration,
    sources: Sources<'_>,
) -> Result<Report, MigrateError> {
    let mut work = Work {
        sources,
        began: Instant::now(),
        wait,
        blockers: Blockers::default(),
        report: Report {
            applied: Vec::new(),
            version: 0,
            restored: Vec::new(),
            waited_for: Vec::new(),
        },
    };
    if !Plan::of(client, sources).await?.is_empty() {
        let lock = Lock::take(keeper, client, wait, &mut work.blockers).await?;
        // Another host may have done some of it in the meantime.
        loop {
            let plan = Plan::of(client, sources).await?;
            if plan.is_empty() {
                break;
            }
            work.advance(client, &lock, plan).await?;
        }
        lock.release().await?;
    }
    work.report.version = Plan::of(client, sources).await?.version;
    work.report.waited_for = work.blockers.seen();
    Ok(work.report)
}

/// Rejects a database that this host cannot serve. Changes nothing.
///
/// # Errors
/// If it cannot serve it, with what to do.
pub async fn check(client: &impl GenericClient) -> Result<(), MigrateError> {
    let record = Record::read(client).await?;
    record.compare(ALL)?;
    let mut missing: Vec<String> = record
        .missing(ALL)
        .iter()
        .map(|migration| migration.name.to_string())
        .collect();
    if record.needs_definitions(ALL) {
        missing.push(DEFINITIONS.to_string());
    }
    if missing.is_empty() {
        Ok(())
    } else {
        Err(MigrateError::NotMigrated { missing })
    }
}

/// The migrating user and the database, quoted for SQL.
#[derive(Debug, Clone)]
pub struct Who {
    user: String,
    database: String,
}

impl Who {
    async fn am_i(client: &impl GenericClient) -> Result<Self, MigrateError> {
        let rows = client
            .query_typed(
                "SELECT quote_ident(session_user), quote_ident(current_database())",
                &[],
            )
            .await
            .map_err(sql("read the user"))?;
        let row = rows.first().expect("a SELECT without FROM returns one row");
        Ok(Self {
            user: row.get(0),
            database: row.get(1),
        })
    }

    /// The grants that let the user act as the owner, and create the schema.
    fn grants(&self) -> String {
        let Self { user, database } = self;
        format!(
            "GRANT rouse_owner TO {user}; GRANT CREATE ON DATABASE {database} TO {user}, rouse_owner;"
        )
    }
}

/// A row of the ledger.
struct Recorded {
    version: i32,
    name: String,
    sha256: String,
}

/// What the database has recorded.
struct Record {
    migrations: Vec<Recorded>,
    definitions: Option<Definitions>,
}

/// The definitions that were applied last.
struct Definitions {
    sha256: String,
    /// The release of the host that applied them.
    release: Vec<i32>,
    protocol_oldest: i32,
}

impl Record {
    async fn read(client: &impl GenericClient) -> Result<Self, MigrateError> {
        let rows = client
            .query_typed(
                "SELECT to_regclass('rouse.migration') IS NOT NULL, to_regclass('rouse.definitions') IS NOT NULL,
                        current_setting('server_encoding')",
                &[],
            )
            .await
            .map_err(sql("find the ledger"))?;
        let found = rows.first().expect("a SELECT without FROM returns one row");
        let encoding: String = found.get(2);
        if encoding != "UTF8" {
            return Err(MigrateError::Encoding(encoding));
        }
        let mut record = Self {
            migrations: Vec::new(),
            definitions: None,
        };
        if found.get(0) {
            let rows = client
                .query_typed(
                    "SELECT version, name, sha256 FROM rouse.migration ORDER BY version",
                    &[],
                )
                .await
                .map_err(sql("read the ledger"))?;
            record.migrations = rows
                .iter()
                .map(|row| Recorded {
                    version: row.get(0),
                    name: row.get(1),
                    sha256: row.get(2),
                })
                .collect();
        }
        if found.get(1) {
            let rows = client
                .query_typed(
                    "SELECT sha256, release, protocol_oldest FROM rouse.definitions",
                    &[],
                )
                .await
                .map_err(sql("read which functions were applied"))?;
            record.definitions = rows.first().map(|row| Definitions {
                sha256: row.get(0),
                release: row.get(1),
                protocol_oldest: row.get(2),
            });
        }
        Ok(record)
    }

    fn missing<'a>(&self, sources: Sources<'a>) -> Vec<&'a Migration> {
        let is_missing = |migration: &&Migration| {
            !self
                .migrations
                .iter()
                .any(|recorded| recorded.version == migration.version)
        };
        sources.migrations.iter().filter(is_missing).collect()
    }

    /// True if the definitions are neither this host's nor those of a later release.
    fn needs_definitions(&self, sources: Sources<'_>) -> bool {
        self.definitions.as_ref().is_none_or(|theirs| {
            theirs.sha256 != sources.digest() && theirs.release <= self::release()
        })
    }

    /// Rejects a recorded migration whose text differs from ours, and definitions that no longer serve this host's protocol. Migrations of
    /// later releases are accepted.
    fn compare(&self, sources: Sources<'_>) -> Result<(), MigrateError> {
        let migrations = sources.migrations;
        for theirs in &self.migrations {
            match migrations
                .iter()
                .find(|ours| ours.version == theirs.version)
            {
                Some(ours) if digest(ours.sql) != theirs.sha256 => {
                    return Err(MigrateError::Drift {
                        name: theirs.name.clone(),
                        recorded: theirs.sha256.clone(),
                        ours: digest(ours.sql),
                    });
                }
                Some(_) | None => {}
            }
        }
        match &self.definitions {
            Some(theirs) if theirs.protocol_oldest > sources.protocols.1 => {
                Err(MigrateError::TooNew {
                    oldest: theirs.protocol_oldest,
                    ours: sources.protocols.1,
                })
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// The work to do.
struct Plan<'a> {
    /// There is no ledger.
    first: bool,
    missing: Vec<&'a Migration>,
    definitions: bool,
    /// Applied definitions that have been changed.
    differences: Vec<Difference>,
    version: i32,
}

impl<'a> Plan<'a> {
    async fn of(client: &mut Client, sources: Sources<'a>) -> Result<Self, MigrateError> {
        let record = Record::read(client).await?;
        record.compare(sources)?;
        let missing = record.missing(sources);
        let (mut definitions, mut differences) = (record.needs_definitions(sources), Vec::new());
        // The definitions of a newer host are restored by that host.
        let ours = |theirs: &Definitions| theirs.sha256 == sources.digest();
        if record.definitions.as_ref().is_some_and(ours) {
            differences = in_force::differences(client).await?;
            // A migration may have dropped functions that have to be restored.
            definitions = !differences.is_empty() || !missing.is_empty();
        }
        let newest = record
            .migrations
            .last()
            .map_or(0, |migration| migration.version);
        Ok(Self {
            first: record.migrations.is_empty() && record.definitions.is_none(),
            missing,
            definitions,
            differences,
            version: newest,
        })
    }

    fn is_empty(&self) -> bool {
        self.missing.is_empty() && !self.definitions
    }
}

/// A run in progress.
struct Work<'a> {
    sources: Sources<'a>,
    began: Instant,
    wait: Duration,
    blockers: Blockers,
    report: Report,
}

impl Work<'_> {
    /// Does a part of the plan: one migration outside a transaction, or everything that fits into one transaction.
    async fn advance(
        &mut self,
        client: &mut Client,
        lock: &Lock<'_>,
        plan: Plan<'_>,
    ) -> Result<(), MigrateError> {
        if let Some(first) = plan.missing.first()
            && first.is_outside_a_transaction()
            && !plan.first
        {
            self.run_outside(client, first).await?;
            self.report.applied.push(first.name.to_string());
            return Ok(());
        }
        let together: Vec<&Migration> = plan
            .missing
            .iter()
            .take_while(|migration| !migration.is_outside_a_transaction())
            .copied()
            .collect();
        let definitions = plan.definitions && together.len() == plan.missing.len();
        let mut pause = PAUSE_MIN;
        loop {
            match self
                .try_together(client, lock, plan.first, &together, definitions)
                .await
            {
                Ok(()) => break,
                Err(error) if error.is_in_the_way() => {
                    let what = together
                        .first()
                        .map_or(DEFINITIONS, |migration| migration.name);
                    self.pause(what, &mut pause).await?;
                }
                Err(error) => return Err(error),
            }
        }
        self.report
            .applied
            .extend(together.iter().map(|migration| migration.name.to_string()));
        if definitions {
            self.report.applied.push(DEFINITIONS.to_string());
            self.report.restored = plan.differences.iter().map(ToString::to_string).collect();
        }
        Ok(())
    }

    /// Waits before the next try, without holding any lock that producers or workers need; fails if there is no time left.
    async fn pause(&mut self, what: &str, pause: &mut Duration) -> Result<(), MigrateError> {
        let by = self.blockers.latest();
        let left = self.wait.saturating_sub(self.began.elapsed());
        if left.is_zero() {
            return Err(MigrateError::Blocked {
                what: what.to_string(),
                waited: self.wait,
                by,
            });
        }
        tracing::warn!(
            migration = what,
            "waiting for locks that other sessions hold: {}; retrying for {} s",
            by.join(", "),
            left.as_secs()
        );
        tokio::time::sleep((*pause).min(left)).await;
        *pause = (*pause * 2).min(PAUSE_MAX);
        Ok(())
    }

    /// All of it in one transaction or, on an error, nothing.
    async fn try_together(
        &mut self,
        client: &mut Client,
        lock: &Lock<'_>,
        first: bool,
        migrations: &[&Migration],
        definitions: bool,
    ) -> Result<(), MigrateError> {
        let pid = lock::pid(client).await?;
        let transaction = client
            .build_transaction()
            .isolation_level(IsolationLevel::ReadCommitted)
            .read_only(false)
            .start()
            .await
            .map_err(sql("begin"))?;
        let doing = apply(&transaction, self.sources, first, migrations, definitions);
        let done = watched(doing, lock.keeper(), pid, &mut self.blockers).await;
        match done {
            Ok(()) => transaction.commit().await.map_err(sql("commit")),
            Err(error) => {
                // The first error is more useful than a possible error here.
                let _ = transaction.rollback().await;
                Err(error)
            }
        }
    }

    /// Runs it statement by statement, with a lock timeout of the remaining time: statements that can run outside a transaction block
    /// no other session. Blocking sessions are not checked meanwhile: a check takes a snapshot, and a concurrent index would wait for its
    /// transaction.
    async fn run_outside(
        &mut self,
        client: &mut Client,
        migration: &Migration,
    ) -> Result<(), MigrateError> {
        let left = self.wait.saturating_sub(self.began.elapsed());
        let left_ms = left.as_millis().max(1);
        let doing = async {
            client
                .batch_execute(&format!(
                    "SET search_path = pg_catalog, pg_temp; SET statement_timeout = 0; SET lock_timeout = {left_ms}; SET ROLE rouse_owner"
                ))
                .await
                .map_err(allowed("become rouse_owner"))?;
            for statement in migration.statements() {
                client
                    .batch_execute(statement)
                    .await
                    .map_err(sql(migration.name))?;
            }
            record(client, migration).await
        };
        let done = doing.await;
        let back = client
            .batch_execute(
                "RESET ROLE; RESET lock_timeout; RESET statement_timeout; RESET search_path",
            )
            .await
            .map_err(sql("reset the session"));
        match done {
            Ok(()) => back,
            Err(error) if error.is_in_the_way() => Err(MigrateError::Blocked {
                what: migration.name.to_string(),
                waited: self.wait,
                by: lock::with_open_transactions(client).await?,
            }),
            Err(error) => Err(error),
        }
    }
}

async fn apply(
    transaction: &Transaction<'_>,
    sources: Sources<'_>,
    first: bool,
    migrations: &[&Migration],
    definitions: bool,
) -> Result<(), MigrateError> {
    transaction
        .batch_execute(&format!(
            "SET LOCAL search_path = pg_catalog, pg_temp; SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {}",
            LOCK_WAIT.as_millis()
        ))
        .await
        .map_err(sql("set the lock timeout"))?;
    let who = Who::am_i(transaction).await?;
    let roles = transaction
        .query_typed(
            "SELECT count(*) FROM pg_roles WHERE rolname = ANY ($1)",
            &[(&&ROLES[..], tokio_postgres::types::Type::TEXT_ARRAY)],
        )
        .await
        .map_err(sql("look for the roles"))?;
    let there: i64 = roles.first().expect("a count is one row").get(0);
    if first || there < ROLES.len() as i64 {
        transaction
            .batch_execute(ROLES_SQL)
            .await
            .map_err(allowed("create the roles"))?;
    }
    if first {
        transaction
            .batch_execute(include_str!("migrate/ledger.sql"))
            .await
            .map_err(owned("create schema rouse", &who))?;
    }
    transaction
        .batch_execute("SET LOCAL ROLE rouse_owner")
        .await
        .map_err(owned("act as rouse_owner", &who))?;
    for migration in migrations {
        transaction
            .batch_execute(migration.sql)
            .await
            .map_err(sql(migration.name))?;
        record(transaction, migration).await?;
    }
    if definitions {
        for source in sources.functions {
            transaction
                .batch_execute(source.sql)
                .await
                .map_err(sql(source.name))?;
        }
        transaction
            .batch_execute(include_str!("migrate/drop_vanished.sql"))
            .await
            .map_err(sql("drop vanished functions"))?;
        for source in sources.rights {
            transaction
                .batch_execute(source.sql)
                .await
                .map_err(sql(source.name))?;
        }
        in_force::record(transaction, sources).await?;
    }
    Ok(())
}

async fn record(client: &impl GenericClient, migration: &Migration) -> Result<(), MigrateError> {
    client
        .execute(
            "INSERT INTO rouse.migration (version, name, sha256) VALUES ($1, $2, $3)",
            &[&migration.version, &migration.name, &digest(migration.sql)],
        )
        .await
        .map(|_| ())
        .map_err(sql("write the ledger"))
}

/// This host's release, as comparable numbers.
fn release() -> Vec<i32> {
    env!("CARGO_PKG_VERSION")
        .split(['.', '-', '+'])
        .map_while(|part| part.parse().ok())
        .collect()
}

fn digest(text: &str) -> String {
    format!("{:x}", Sha256::digest(text))
}

fn sql(what: &str) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let what = what.to_string();
    move |error| MigrateError::Sql { what, error }
}

/// Like [`sql`], for operations whose refusal means that an administrator is needed.
fn allowed(what: &str) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let what = what.to_string();
    move |error| {
        if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) {
            MigrateError::NotAllowed(format!("cannot {what}: {}", super::describe(&error)))
        } else {
            MigrateError::Sql { what, error }
        }
    }
}

/// Like [`sql`], for operations whose refusal means that the user, or the owner, lacks a right.
fn owned(what: &str, who: &Who) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let (what, who) = (what.to_string(), who.clone());
    move |error| {
        if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) {
            let why = format!("cannot {what}: {}", super::describe(&error));
            MigrateError::NotOwner { why, who }
        } else {
            MigrateError::Sql { what, error }
        }
    }
}
