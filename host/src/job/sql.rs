//! Statements that a module has declared, and the meaning of Postgres errors about them.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::JsonText;

/// A statement that a module has declared in its manifest.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct Statement {
    /// Its name: letters, digits and underscores.
    pub name: String,
    /// The text: one SELECT, INSERT, UPDATE, DELETE, MERGE or VALUES, with parameters `$1`, `$2` …
    pub sql: String,
    /// The number of rows that it has to affect, or to return. `None`: any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rows: Option<u64>,
    /// The consequence for the attempt if Postgres refuses it.
    #[serde(default, skip_serializing_if = "OnError::is_default")]
    pub on_error: OnError,
}

/// The consequence for an attempt if Postgres refuses the data of one of its statements, or the number of rows is
/// wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnError {
    /// The job fails.
    #[default]
    Fail,
    /// The job is tried again after the backoff.
    Retry,
}

impl OnError {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The number of connections on which the commits of one handler on a host run in parallel; more than a few rarely make
/// the commits faster.
const CONNECTIONS_MAX: u32 = 4;

/// The transaction holds locks while the statement runs. A statement that takes longer belongs in a scheduled job of
/// the database.
const STATEMENT_TIMEOUT: Duration = Duration::from_secs(5);

/// The number of rows that easily fit into the memory of a guest; more rows are read in pages.
const ROWS_MAX: usize = 1_000;

/// The host holds the rows of all its attempts in memory.
const BYTES_MAX: usize = 1 << 20;

/// Limits on the statements of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SqlLimits {
    /// The maximum number of connections of this host with the login. Default: 4.
    pub connections_max: u32,
    /// The time limit for one statement. Default: 5 s.
    pub statement_timeout: Duration,
    /// The maximum number of rows of one query. Default: 1,000.
    pub rows_max: usize,
    /// The maximum total size of the rows of one query as JSON, in bytes. Default: 1 MiB.
    pub bytes_max: usize,
}

impl Default for SqlLimits {
    fn default() -> Self {
        Self {
            connections_max: CONNECTIONS_MAX,
            statement_timeout: STATEMENT_TIMEOUT,
            rows_max: ROWS_MAX,
            bytes_max: BYTES_MAX,
        }
    }
}

/// A call to a statement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlCall {
    /// The name of the statement.
    pub statement: String,
    /// A JSON array with its parameters.
    pub params: JsonText,
}

impl SqlCall {
    /// The bytes that its transaction sends, roughly.
    pub fn bytes(&self) -> usize {
        self.statement.len() + self.params.0.len()
    }
}

/// The failure of a statement, or of the transaction that it belongs to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlFailure {
    /// The name of the statement, or [`SqlFailure::NO_STATEMENT`].
    pub statement: String,
    /// The SQLSTATE, or [`SqlFailure::ROWS`].
    pub code: String,
    /// The Postgres message, in one line.
    pub message: String,
    /// True if the job must not be tried again, by the statement's declaration.
    pub permanent: bool,
}

impl SqlFailure {
    /// The code of a statement whose number of rows differs from its declaration.
    pub const ROWS: &str = "rows";

    /// Stands in for the name if the session failed, or the settlement that commits the statements.
    pub const NO_STATEMENT: &str = "(none)";
}

/// The meaning of a Postgres error for a transaction with statements of a handler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SqlErrorClass {
    /// There was a conflict with another transaction: the same transaction may succeed at once.
    Conflict,
    /// The server has become unreachable, has no connection left, or is a standby: the same transaction may succeed
    /// later, in a new session.
    Unavailable,
    /// The statement does not fit the database: a table, a type or a privilege is missing. It would fail for each job.
    Mismatch,
    /// The server could not run it now, or not in time, or a server that it uses is unreachable: retried after the
    /// backoff.
    Temporary,
    /// Postgres refuses this data: the declaration of the statement decides the consequence.
    Data,
}

impl SqlErrorClass {
    /// The class of a SQLSTATE (<https://www.postgresql.org/docs/current/errcodes-appendix.html>). `routine`: the
    /// server's function that raised it, if known.
    pub fn from_code(code: &str, routine: Option<&str>) -> Self {
        match code {
            // Serialization failure, deadlock, lock not available.
            "40001" | "40P01" | "55P03" => Self::Conflict,
            // Shutdown, crash, starting up; the session ended because it was idle, because the next message of its
            // transaction did not arrive in time, or because the transaction took too long; too many connections.
            "57P01" | "57P02" | "57P03" | "57P05" | "25P03" | "25P04" | "53300" => {
                Self::Unavailable
            }
            // A row that violates a policy has the code of a missing privilege.
            "42501" if routine == Some("ExecWithCheckOptions") => Self::Data,
            // BEGIN READ WRITE on a standby: a new session may reach the primary.
            "0A000" if routine == Some("call_bool_check_hook") => Self::Unavailable,
            // The type of a parameter no longer exists: `cache lookup failed for type …`.
            "XX000" if routine == Some("getBaseTypeAndTypmod") => Self::Mismatch,
            _ => match code.get(..2) {
                Some("08") => Self::Unavailable,
                // Syntax error or access rule violation; invalid schema, catalog; wrong password; not supported.
                Some("42" | "3F" | "3D" | "28" | "0A") => Self::Mismatch,
                // Cancelled by a timeout; no resources; a server limit; a failing disk; an internal error; a read-only
                // server.
                Some("57" | "53" | "54" | "58" | "XX" | "25") => Self::Temporary,
                // Data exceptions, violated constraints, RAISE EXCEPTION, codes of extensions.
                Some(_) | None => Self::Data,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_postgres_are_classified_by_their_codes() {
        use SqlErrorClass::{Conflict, Data, Mismatch, Temporary, Unavailable};
        for (code, class) in [
            ("40001", Conflict),
            ("40P01", Conflict),
            ("55P03", Conflict),
            ("08006", Unavailable),
            ("57P01", Unavailable),
            ("25P03", Unavailable),
            ("25P04", Unavailable),
            ("53300", Unavailable),
            ("57014", Temporary),
            ("53100", Temporary),
            ("25006", Temporary),
            ("XX000", Temporary),
            ("42P01", Mismatch),
            ("42501", Mismatch),
            ("28P01", Mismatch),
            ("3F000", Mismatch),
            ("22P02", Data),
            ("23505", Data),
            ("P0001", Data),
            ("ABC12", Data),
            ("", Data),
        ] {
            assert_eq!(SqlErrorClass::from_code(code, None), class, "{code}");
        }
        let policy = Some("ExecWithCheckOptions");
        assert_eq!(SqlErrorClass::from_code("42501", policy), Data);
        let standby = Some("call_bool_check_hook");
        assert_eq!(SqlErrorClass::from_code("0A000", standby), Unavailable);
        assert_eq!(SqlErrorClass::from_code("0A000", None), Mismatch);
        let no_type = Some("getBaseTypeAndTypmod");
        assert_eq!(SqlErrorClass::from_code("XX000", no_type), Mismatch);
    }
}
