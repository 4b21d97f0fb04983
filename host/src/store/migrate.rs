//! Brings schema `rouse` up to date.
//!
//! Each migration is applied once. The definitions (functions, views, triggers, privileges) are applied whenever they
//! differ from this host's. Both are recorded in a ledger.
//!
//! Any number of hosts may migrate at the same time: one does the work, the others wait. Migrations change tables and
//! are recorded with their sha256; a database with a different record is refused. The definitions are applied as a
//! whole, in one transaction, which also drops what they no longer define, and restores what was dropped or revoked.
//!
//! Producers continue in the meantime. A statement that needs an exclusive lock on a table waits for the transactions
//! that use the table, and all later statements queue behind that wait. Such a statement therefore waits for at most
//! [`LOCK_WAIT`]; after that, the transaction is rolled back, and tried again later.

mod apply;
mod error;
mod in_force;
mod ledger;
mod lock;
mod plan;
mod set_aside;
mod sources;
mod work;

use std::time::Duration;

use tokio::time::Instant;
use tokio_postgres::{Client, GenericClient};

pub use error::{Login, MigrateError};
pub use in_force::check_in_force;
use ledger::Record;
use lock::{Blockers, Lock};
use plan::Plan;
pub use sources::{ALL, Migration, PROTOCOL, ROLES_SQL, Source, Sources};
use work::Work;

/// The time that a statement may wait for a lock, and block every enqueue, claim and settlement while it waits. Long
/// enough for the transactions of producers and workers, which end within milliseconds.
pub const LOCK_WAIT: Duration = Duration::from_millis(150);
/// The time for which [`run`] keeps trying by default.
pub const WAIT: Duration = Duration::from_secs(60);

/// The roles that receive privileges.
const ROLES: [&str; 6] = [
    "rouse_enqueuer",
    "rouse_producer",
    "rouse_operator",
    "rouse_worker",
    "rouse_handler",
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
    /// The sessions that blocked the run.
    pub waited_for: Vec<String>,
}

/// Applies what is missing, and restores what was changed. `keeper` is a second connection to the same database: it
/// holds the migration lock, and checks which sessions block. Keeps trying for `wait`.
///
/// # Errors
/// If the database cannot be migrated. Migrations that ran outside a transaction, and those before them, remain
/// applied; all others are undone.
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
    lock::lift_transaction_timeout(client).await?;
    lock::lift_transaction_timeout(keeper).await?;
    let login = Login::read(client).await?;
    let plan = Plan::read(client, sources).await;
    let plan = plan.map_err(|error| error.or_not_owner(&login))?;
    let mut work = Work {
        sources,
        login,
        started: Instant::now(),
        wait,
        blockers: Blockers::default(),
        report: Report {
            applied: Vec::new(),
            version: 0,
            restored: Vec::new(),
            waited_for: Vec::new(),
        },
    };
    if !plan.is_empty() {
        let lock = Lock::take(keeper, client, &work.login, wait, &mut work.blockers).await?;
        // Another host may have done part of the work in the meantime.
        loop {
            let plan = Plan::read(client, sources).await?;
            if plan.is_empty() {
                break;
            }
            work.advance(client, &lock, plan).await?;
        }
        lock.release().await?;
    }
    work.report.version = Plan::read(client, sources).await?.version;
    work.report.waited_for = work.blockers.seen();
    Ok(work.report)
}

/// Rejects a database that this host cannot serve. Changes nothing.
///
/// # Errors
/// If this host cannot serve the database, with a hint about what to do.
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
