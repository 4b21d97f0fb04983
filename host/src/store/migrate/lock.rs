//! The migration lock, and the sessions that block it.

use std::pin::pin;
use std::time::Duration;

use tokio_postgres::error::SqlState;
use tokio_postgres::{
    Client, GenericClient, IsolationLevel, SimpleQueryMessage, SimpleQueryRow, Transaction,
};

use super::MigrateError;
use super::error::{Login, owned, sql};
use crate::sanitize::printable;

/// The interval of checks for sessions that block a running statement.
const CHECK_EVERY: Duration = Duration::from_millis(30);

/// The lock that a migrating host holds while it works.
///
/// It is a lock on the ledger that only its owner can take, because any login of the database can hold an advisory
/// lock. Until the ledger exists, it is an advisory lock with a limited wait.
pub(super) struct Lock<'a> {
    transaction: Transaction<'a>,
}

impl<'a> Lock<'a> {
    /// Waits for the lock, for at most `wait`; `watcher` checks which session has it.
    pub(super) async fn take(
        keeper: &'a mut Client,
        watcher: &Client,
        login: &Login,
        wait: Duration,
        blockers: &mut Blockers,
    ) -> Result<Self, MigrateError> {
        let pid = pid(keeper).await?;
        let transaction = begin(keeper).await?;
        let locking = lock(&transaction, login, wait);
        match watched(locking, watcher, pid, blockers).await {
            Ok(()) => Ok(Self { transaction }),
            Err(MigrateError::Sql { error, .. })
                if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) =>
            {
                Err(MigrateError::Blocked {
                    operation: "the migration".to_string(),
                    waited: wait,
                    by: blockers.latest(),
                })
            }
            Err(error) => Err(error),
        }
    }

    /// The connection that holds the lock, which is otherwise idle.
    pub(super) fn keeper(&self) -> &Transaction<'a> {
        &self.transaction
    }

    /// Fails if the lock was lost because its session has ended.
    pub(super) async fn check(&self) -> Result<(), MigrateError> {
        let held = rows(&self.transaction, "SELECT 1").await;
        held.map(|_| ()).map_err(sql("hold the migration lock"))
    }

    pub(super) async fn release(self) -> Result<(), MigrateError> {
        self.transaction
            .rollback()
            .await
            .map_err(sql("release the migration lock"))
    }
}

/// Starts a transaction. The isolation level is explicit, because a stricter default of the database would keep a
/// snapshot, for which CREATE INDEX CONCURRENTLY would wait.
pub(super) async fn begin(client: &mut Client) -> Result<Transaction<'_>, MigrateError> {
    client
        .build_transaction()
        .isolation_level(IsolationLevel::ReadCommitted)
        .read_only(false)
        .start()
        .await
        .map_err(sql("begin"))
}

async fn lock(
    transaction: &Transaction<'_>,
    login: &Login,
    wait: Duration,
) -> Result<(), MigrateError> {
    let timeouts = format!(
        "SET LOCAL lock_timeout = {}; SET LOCAL statement_timeout = 0; SET LOCAL idle_in_transaction_session_timeout = 0",
        wait.as_millis().max(1)
    );
    let taking = sql("take the migration lock");
    transaction
        .batch_execute(&timeouts)
        .await
        .map_err(sql("set the lock timeout"))?;
    if !has_ledger(transaction).await? {
        transaction
            .batch_execute("SELECT pg_advisory_xact_lock(hashtextextended('rouse.migrate', 0))")
            .await
            .map_err(sql("take the lock of the first migration"))?;
        // No ledger was created in the meantime: later hosts wait for the advisory lock.
        if !has_ledger(transaction).await? {
            return Ok(());
        }
    }
    transaction
        .batch_execute("SET LOCAL ROLE rouse_owner")
        .await
        .map_err(owned("act as rouse_owner", login))?;
    transaction
        .batch_execute("LOCK TABLE rouse.migration IN SHARE UPDATE EXCLUSIVE MODE")
        .await
        .map_err(taking)?;
    // Only members of pg_monitor and of a session's own role see more than its pid.
    transaction
        .batch_execute("RESET ROLE")
        .await
        .map_err(sql("reset the role"))
}

/// Lets the transactions of a session take as long as they need. Otherwise a `transaction_timeout` of the database or
/// the login (Postgres 17 and later) would end the session that holds the lock, or the migration.
pub(super) async fn lift_transaction_timeout(client: &Client) -> Result<(), MigrateError> {
    client
        .batch_execute(
            "SELECT pg_catalog.set_config(name, '0', false) FROM pg_catalog.pg_settings WHERE name = 'transaction_timeout'",
        )
        .await
        .map_err(sql("lift the transaction timeout"))
}

async fn has_ledger(client: &impl GenericClient) -> Result<bool, MigrateError> {
    let rows = rows(client, "SELECT to_regclass('rouse.migration')").await;
    let rows = rows.map_err(sql("find the ledger"))?;
    Ok(rows.first().is_some_and(|row| row.get(0).is_some()))
}

/// The rows of a query, as text. Uses the simple protocol, because the extended one keeps the last query of a
/// transaction open, with its snapshot, for which CREATE INDEX CONCURRENTLY would wait.
async fn rows(
    client: &impl GenericClient,
    query: &str,
) -> Result<Vec<SimpleQueryRow>, tokio_postgres::Error> {
    let messages = client.simple_query(query).await?;
    let row = |message| match message {
        SimpleQueryMessage::Row(row) => Some(row),
        _ => None,
    };
    Ok(messages.into_iter().filter_map(row).collect())
}

/// The process id of the session.
pub(super) async fn pid(client: &impl GenericClient) -> Result<i32, MigrateError> {
    let rows = client
        .query_typed("SELECT pg_backend_pid()", &[])
        .await
        .map_err(sql("read the session's process id"))?;
    Ok(rows
        .first()
        .expect("a SELECT without FROM returns one row")
        .get(0))
}

/// Runs `work`, while `watcher` checks which sessions keep session `pid` waiting.
pub(super) async fn watched<T>(
    work: impl Future<Output = T>,
    watcher: &impl GenericClient,
    pid: i32,
    blockers: &mut Blockers,
) -> T {
    let mut work = pin!(work);
    blockers.latest.clear();
    loop {
        tokio::select! {
            done = &mut work => return done,
            () = tokio::time::sleep(CHECK_EVERY) => {
                let query = include_str!("blockers.sql").replace("$1", &pid.to_string());
                // If the check fails, the work continues, and its own error is reported.
                if let Ok(rows) = rows(watcher, &query).await
                    && !rows.is_empty()
                {
                    blockers.note(&rows);
                }
            }
        }
    }
}

/// The sessions with open transactions, for any of which CREATE INDEX CONCURRENTLY may have to wait.
pub(super) async fn with_open_transactions(
    client: &impl GenericClient,
) -> Result<Vec<String>, MigrateError> {
    let rows = rows(client, include_str!("open_transactions.sql"))
        .await
        .map_err(sql("list open transactions"))?;
    let mut blockers = Blockers::default();
    blockers.note(&rows);
    Ok(blockers.latest())
}

/// The sessions that were blocking.
#[derive(Debug, Default)]
pub(super) struct Blockers {
    latest: Vec<String>,
    /// The sessions with their process ids, so that each is kept once.
    seen: Vec<(String, String)>,
}

impl Blockers {
    /// The sessions of the last try.
    pub(super) fn latest(&self) -> Vec<String> {
        if self.latest.is_empty() {
            vec!["sessions that had ended before they could be identified".to_string()]
        } else {
            self.latest.clone()
        }
    }

    /// The sessions of all tries.
    pub(super) fn seen(self) -> Vec<String> {
        self.seen.into_iter().map(|(_, text)| text).collect()
    }

    fn note(&mut self, rows: &[SimpleQueryRow]) {
        self.latest = rows
            .iter()
            .map(|row| describe(row.get(0), row.get(1), row.get(2), row.get(3)))
            .collect();
        for (row, text) in rows.iter().zip(&self.latest) {
            let pid = row.get(0).unwrap_or_default();
            match self.seen.iter_mut().find(|(known, _)| known == pid) {
                Some((_, known)) => known.clone_from(text),
                None => self.seen.push((pid.to_string(), text.clone())),
            }
        }
    }
}

fn describe(
    pid: Option<&str>,
    user: Option<&str>,
    application: Option<&str>,
    open_s: Option<&str>,
) -> String {
    let pid = match pid {
        None | Some("0") => return "a prepared transaction (see pg_prepared_xacts)".to_string(),
        Some(pid) => pid,
    };
    let mut known = Vec::new();
    if let Some(user) = user {
        known.push(format!("user {}", printable(user, 63)));
    }
    if let Some(application) = application.filter(|name| !name.is_empty()) {
        known.push(format!("application {}", printable(application, 63)));
    }
    if let Some(open_s) = open_s {
        known.push(format!("transaction open for {open_s} s"));
    }
    if known.is_empty() {
        format!("process {pid}")
    } else {
        format!("process {pid} ({})", known.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocker_is_described_with_the_fields_that_this_login_may_see() {
        assert_eq!(
            describe(Some("7"), Some("app"), Some("report\u{1b}[2J"), Some("12")),
            "process 7 (user app, application report\\u{1b}[2J, transaction open for 12 s)"
        );
        assert_eq!(
            describe(Some("7"), Some("app"), None, None),
            "process 7 (user app)"
        );
        assert_eq!(describe(Some("7"), None, Some(""), None), "process 7");
        assert!(describe(Some("0"), None, None, None).contains("pg_prepared_xacts"));
    }
}
