//! Errors of the handlers' sessions.

use tokio_postgres::error::{DbError, Severity};

use crate::job::{SqlErrorClass, SqlFailure};
use crate::store::error::{describe_sql, is_partition_missing};

/// An error from Postgres, or of the connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SqlError {
    /// The SQLSTATE; `None` if there was no response.
    pub(super) code: Option<String>,
    /// The function of the server that raised it.
    pub(super) routine: Option<String>,
    /// A human-readable message, in one line.
    pub(super) message: String,
    /// The statement of the handler, if one has failed.
    pub(super) statement: Option<String>,
    /// Today's partition of the history does not exist.
    pub(super) is_partition_missing: bool,
    /// The session continues after it.
    session_continues: bool,
}

impl SqlError {
    pub(super) fn code(&self) -> &str {
        // 08000: connection exception.
        self.code.as_deref().unwrap_or("08000")
    }

    /// The class of the error, which decides what happens to the transaction.
    pub fn class(&self) -> SqlErrorClass {
        let class = SqlErrorClass::from_code(self.code(), self.routine.as_deref());
        // A server that shuts down, or has no connection left, ends the session. If it continues, the error is that of
        // another server, which the statement uses, for instance for a foreign table. A standby (0A000) only refuses
        // the transaction.
        let is_of_other_server = self.session_continues && self.code() != "0A000";
        if class == SqlErrorClass::Unavailable && is_of_other_server {
            return SqlErrorClass::Temporary;
        }
        class
    }

    pub(super) fn no_response(message: String) -> Self {
        Self {
            code: None,
            routine: None,
            message,
            statement: None,
            is_partition_missing: false,
            session_continues: false,
        }
    }

    /// A failure after which another attempt may succeed.
    pub fn into_failure(self) -> SqlFailure {
        SqlFailure {
            code: self.code().to_owned(),
            statement: self
                .statement
                .unwrap_or_else(|| SqlFailure::NO_STATEMENT.into()),
            message: self.message,
            permanent: false,
        }
    }
}

impl std::fmt::Display for SqlError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<&tokio_postgres::Error> for SqlError {
    fn from(error: &tokio_postgres::Error) -> Self {
        Self {
            code: error.code().map(|code| code.code().to_owned()),
            routine: error
                .as_db_error()
                .and_then(|db| db.routine().map(str::to_owned)),
            message: describe_sql(error),
            statement: None,
            is_partition_missing: is_partition_missing(error),
            session_continues: error.as_db_error().and_then(DbError::parsed_severity)
                == Some(Severity::Error),
        }
    }
}
