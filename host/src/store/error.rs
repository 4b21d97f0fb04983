//! Why an operation failed.

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio_postgres::error::SqlState;

use crate::sanitize::printable;

/// The transactions for whose locks calls of hosts and commands wait, up to a few seconds: a description, and the
/// functions that wait.
const AWAITED: [(&str, &[&str]); 8] = [
    (
        "a transaction that has changed the shards of a queue and is still open",
        &["rouse._in_own_shards"],
    ),
    (
        "a transaction that has changed a queue or a gate and is still open",
        &[
            "rouse._within_gates",
            "rouse._charge_gates",
            "rouse.declare_fair_share",
            "rouse.declare_gates",
            "rouse.pause_queue(",
            "rouse.resume_queue(",
            "rouse.set_retention(",
            "rouse.set_default_retention(",
            "rouse.set_payload_limit(",
            "rouse.set_fair_share(",
            "rouse.set_dispatch(",
            "rouse.set_shards(",
            "rouse.set_gate(",
            "rouse.delete_gate(",
        ],
    ),
    (
        "a transaction that has changed a worker and is still open",
        &[
            "rouse.register",
            "rouse.heartbeat",
            "rouse.outlived",
            "rouse.unregister",
            "rouse.forget_worker(",
            "rouse.clear_timeouts(",
        ],
    ),
    (
        "a transaction that has retried jobs by a filter and is still open",
        &["rouse.retry_jobs"],
    ),
    (
        "a transaction that has changed the job, or one that is related to it, and is still open",
        &[
            "rouse.cancel(",
            "rouse.retry(",
            "rouse.delete(",
            "rouse.reschedule(",
            "rouse.set_priority(",
            "rouse.replace_payload(",
            "rouse.complete(",
            "rouse.fail(",
            "rouse.signal(",
        ],
    ),
    (
        "a transaction that has changed a job, or one that is related to it, and is still open",
        &[
            "rouse.purge_queue(",
            "rouse.cancel_flow(",
            "rouse.retry_flow(",
            "rouse.delete_flow(",
        ],
    ),
    (
        "a transaction that has changed the state of the handler and is still open",
        &["rouse.set_state(", "rouse.delete_state("],
    ),
    (
        "a transaction that has changed the schedule, or has enqueued one of its jobs, and is still open",
        &[
            "rouse.schedule(",
            "rouse.unschedule(",
            "rouse.pause_schedule(",
            "rouse.resume_schedule(",
            "rouse.run_schedule(",
            "rouse.backfill_schedule(",
        ],
    ),
];

/// The maximum size of an error text that is kept, in bytes. A Postgres error message is a sentence or two, and may
/// quote a row.
const ERROR_BYTES_MAX: usize = 4 << 10;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// No connection could be opened. [`Store::ready`](super::Store::ready) waits for the next try.
    #[error("cannot connect to {target}: {why}")]
    Unreachable {
        /// The address, without secrets.
        target: Arc<str>,
        /// The cause and, if known, what to do.
        why: String,
    },
    /// Postgres did not respond in time.
    #[error("no response from {target} within {} s", .waited.as_secs())]
    Silent {
        /// The address, without secrets.
        target: Arc<str>,
        /// The time waited.
        waited: Duration,
    },
    /// Postgres refused the statement, or the connection broke during it.
    #[error("{}", describe(.0))]
    Refused(tokio_postgres::Error),
    /// An operation for workers was called before a worker registered.
    #[error("no worker has registered")]
    NotRegistered,
    /// The schema lacks a type of records.
    #[error("the database has no type rouse.{0}; run `rouse migrate`")]
    NotMigrated(&'static str),
}

// Not `#[from]`: the text already contains the source's.
impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Refused(error)
    }
}

impl StoreError {
    /// The error code, if Postgres gave one.
    pub fn code(&self) -> Option<&SqlState> {
        match self {
            Self::Unreachable { .. }
            | Self::Silent { .. }
            | Self::NotRegistered
            | Self::NotMigrated(_) => None,
            Self::Refused(error) => error.code(),
        }
    }

    /// True if no connection could be opened. The worker reports an outage once (`worker/reach.rs`).
    pub fn is_unreachable(&self) -> bool {
        matches!(self, Self::Unreachable { .. })
    }

    /// True if Postgres did not respond in time.
    pub fn is_silence(&self) -> bool {
        matches!(self, Self::Silent { .. })
    }

    /// True if the connection broke during the statement. In an outage, one statement of each task may end in this way
    /// before the first try to connect has failed.
    pub fn is_cut_off(&self) -> bool {
        let Self::Refused(error) = self else {
            return false;
        };
        error.is_closed()
            || error
                .source()
                .is_some_and(|source| source.is::<io::Error>())
    }

    /// True if the statement was sent and got no response: none in time, or none because its connection broke.
    pub fn is_unanswered(&self) -> bool {
        matches!(self, Self::Silent { .. }) || self.is_cut_off()
    }

    /// True if a lock could not be taken in time.
    pub fn is_locked(&self) -> bool {
        self.code() == Some(&SqlState::LOCK_NOT_AVAILABLE)
    }

    /// True if Postgres rolled the transaction back because of concurrent ones: the same call may work at once.
    pub fn is_conflict(&self) -> bool {
        let conflicts = [
            SqlState::T_R_SERIALIZATION_FAILURE,
            SqlState::T_R_DEADLOCK_DETECTED,
        ];
        self.code().is_some_and(|code| conflicts.contains(code))
    }

    /// True if the same call about another job or queue may work now. An outage, a full disk and a login without the
    /// necessary roles concern all calls.
    pub fn concerns_one_call(&self) -> bool {
        self.code().is_some_and(|code| {
            // 25 invalid transaction state; 42 access rules, and functions that do not exist. Postgres itself reports
            // these about the statement, which is the same for all calls; functions, and triggers of the operator,
            // raise 42 about the job or the queue.
            let concerns_all = self.is_transient()
                || code.code().starts_with("25")
                || code.code().starts_with("42") && !self.is_raised();
            !concerns_all || self.is_conflict() || *code == SqlState::QUERY_CANCELED
        })
    }

    /// True if a function has raised the error, not Postgres itself.
    fn is_raised(&self) -> bool {
        matches!(self, Self::Refused(error) if is_raised(error))
    }

    /// A description of the transactions for whose locks a call has waited until its timeout. `None` if it has failed
    /// for another reason.
    pub fn waits_for(&self) -> Option<&'static str> {
        let Self::Refused(error) = self else {
            return None;
        };
        waited_for(error)
    }

    /// True if Postgres cannot store the data it was given: the same call would fail again.
    pub fn is_about_data(&self) -> bool {
        self.code().is_some_and(|code| is_about_data(code.code())) && !self.is_partition_missing()
    }

    /// True if the day's partition does not exist because no worker was running to create it. Postgres uses the code of
    /// a CHECK violation for this too, but a CHECK has a name, and an error that a trigger of the operator raises names
    /// no table of Rouse.
    pub fn is_partition_missing(&self) -> bool {
        matches!(self, Self::Refused(error) if is_partition_missing(error))
    }

    /// True if the cause may be an individual row or the size of the call: no space on disk or in memory, a timeout, an
    /// unreadable page. A smaller call may work.
    pub fn may_be_one_rows_fault(&self) -> bool {
        // 58 system.
        self.code().is_some_and(|code| {
            let size = [
                SqlState::DISK_FULL,
                SqlState::OUT_OF_MEMORY,
                SqlState::CONFIGURATION_LIMIT_EXCEEDED,
                SqlState::QUERY_CANCELED,
            ];
            size.contains(code) || code.code().starts_with("58")
        })
    }

    /// True if the same call may work later: the server is unreachable, restarting, in recovery, out of connections, or
    /// rolled the transaction back.
    pub fn is_transient(&self) -> bool {
        match self.code() {
            None => !matches!(self, Self::NotRegistered | Self::NotMigrated(_)),
            // 08 connection, 40 rollback, 53 resources, 57 operator intervention, 58 system;
            // 25006 read-only (a standby before its promotion).
            Some(code) => {
                matches!(&code.code()[..2], "08" | "40" | "53" | "57" | "58")
                    || *code == SqlState::READ_ONLY_SQL_TRANSACTION
            }
        }
    }
}

/// True for the SQLSTATEs of data that Postgres cannot store. A missing partition has one of them too.
pub(super) fn is_about_data(code: &str) -> bool {
    // 22 data exception; 54 a limit (JSON that is nested too deep); 23514 a CHECK.
    code.starts_with("22") || code.starts_with("54") || code == SqlState::CHECK_VIOLATION.code()
}

/// See [`StoreError::is_partition_missing`].
pub(super) fn is_partition_missing(error: &tokio_postgres::Error) -> bool {
    error.as_db_error().is_some_and(|db| {
        *db.code() == SqlState::CHECK_VIOLATION
            && db.constraint().is_none()
            && db.schema() == Some("rouse")
    })
}

/// A description of the transactions for whose locks a call has waited until its lock timeout.
fn waited_for(error: &tokio_postgres::Error) -> Option<&'static str> {
    let db = error.as_db_error()?;
    if *db.code() != SqlState::LOCK_NOT_AVAILABLE {
        return None;
    }
    // The functions that were running.
    let within = db.where_().unwrap_or_default();
    let awaited = AWAITED
        .iter()
        .find(|(_, functions)| functions.iter().any(|function| within.contains(function)));
    awaited.map(|(what, _)| *what)
}

/// True if a function of Rouse has refused the login. Postgres itself uses the same SQLSTATE for a login that may not
/// call the function.
pub(super) fn is_login_refused_by_function(error: &tokio_postgres::Error) -> bool {
    error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) && is_raised(error)
}

/// True for an error of `RAISE` in PL/pgSQL.
fn is_raised(error: &tokio_postgres::Error) -> bool {
    error
        .as_db_error()
        .is_some_and(|db| db.routine() == Some("exec_stmt_raise"))
}

/// The Postgres message with detail and hint: `tokio_postgres::Error` alone prints "db error".
pub(super) fn describe(error: &tokio_postgres::Error) -> String {
    let lacks_role = error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE)
        && !is_login_refused_by_function(error);
    let roles = lacks_role.then_some(
        "The login needs a role: GRANT rouse_worker to serve, rouse_enqueuer to enqueue, rouse_producer also to cancel and to read \
         single jobs, rouse_observer to read everything, rouse_operator also for admin actions",
    );
    let lock = waited_for(error)
        .map(|what| format!("It waited for {what}: commit it, or end its session"));
    describe_with(error, roles.or(lock.as_deref()))
}

/// Like [`describe`], without hints about the roles and locks of Rouse, for statements of handlers and contracts.
pub(super) fn describe_sql(error: &tokio_postgres::Error) -> String {
    describe_with(error, None)
}

pub(super) fn describe_with(error: &tokio_postgres::Error, more: Option<&str>) -> String {
    let Some(db) = error.as_db_error() else {
        return describe_chain(error);
    };
    let mut text = db.message().to_string();
    // Details and hints are sentences.
    for sentence in [db.detail(), db.hint(), more].into_iter().flatten() {
        if !text.ends_with('.') {
            text.push('.');
        }
        text.push(' ');
        text.push_str(sentence);
    }
    // The message may quote a row, and with it a guest's text.
    printable(&text, ERROR_BYTES_MAX)
}

/// An error with all its sources.
pub(super) fn describe_chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(source) = next {
        let part = source.to_string();
        if !text.contains(&part) {
            text.push_str(": ");
            text.push_str(&part);
        }
        next = source.source();
    }
    text
}
