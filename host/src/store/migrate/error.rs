//! Why a database cannot be migrated or served.

use std::time::Duration;

use tokio_postgres::GenericClient;
use tokio_postgres::error::SqlState;

use crate::store::error::{describe, describe_with};

/// The maximum number of differences that a message lists.
const LISTED_MAX: usize = 5;

/// Why a database cannot be migrated or served.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    /// Schema `rouse` does not exist, or lacks migrations or this host's functions.
    #[error("the database is not migrated (missing: {}); run `rouse migrate` first", .missing.join(", "))]
    NotMigrated {
        /// The names of the missing migrations.
        missing: Vec<String>,
    },
    /// Functions, views or privileges have been changed since they were applied.
    #[error(
        "the database differs from what `rouse migrate` applied: {}; run `rouse migrate` to restore it",
        listed(.differences)
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
        "{0}; ask an administrator to run the output of `rouse migrate --roles-sql`, or migrate as a user with that privilege"
    )]
    NotAllowed(String),
    /// The user may not act as the owner of the schema, or the owner may not create it.
    #[error(
        "{refusal}; an administrator has to run: {}",
        .login.grants()
    )]
    NotOwner {
        /// The operation, and the reason for the refusal.
        refusal: String,
        /// The user and the database.
        login: Login,
    },
    /// Handlers use UTF-8, and one row in another encoding would block its lane.
    #[error("the database has the encoding {0}; create one with ENCODING 'UTF8'")]
    Encoding(String),
    /// The database does not respond.
    #[error("{0}")]
    Unreachable(String),
    /// Other sessions hold locks that the migration needs, and did not release them in time. Everything not yet
    /// committed is undone.
    #[error(
        "{operation} waited {:?} for locks that other sessions hold: {}; end those sessions (SELECT pg_terminate_backend(PID)) or their transactions, and run \
         `rouse migrate` again, or allow a longer wait with --wait",
        waited, .by.join(", ")
    )]
    Blocked {
        /// The operation that had to wait.
        operation: String,
        /// The time that it waited.
        waited: Duration,
        /// The sessions that hold the locks.
        by: Vec<String>,
    },
    /// A statement failed; nothing was changed.
    #[error("{operation}: {}", describe(.error))]
    Sql {
        /// The operation that failed.
        operation: String,
        /// The Postgres error.
        error: tokio_postgres::Error,
    },
}

impl MigrateError {
    /// The same error, with what an administrator has to do if the login lacks a privilege.
    pub(super) fn or_not_owner(self, login: &Login) -> Self {
        match self {
            Self::Sql { operation, error }
                if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) =>
            {
                Self::NotOwner {
                    refusal: refusal(&operation, &error),
                    login: login.clone(),
                }
            }
            other => other,
        }
    }

    /// True if another session held a lock for too long, or if there was a deadlock.
    pub(super) fn is_blocked(&self) -> bool {
        matches!(self, Self::Sql { error, .. }
            if matches!(error.code(), Some(&SqlState::LOCK_NOT_AVAILABLE | &SqlState::T_R_DEADLOCK_DETECTED)))
    }
}

/// The first differences, and the number of the others.
fn listed(differences: &[String]) -> String {
    let mut text = differences[..differences.len().min(LISTED_MAX)].join(", ");
    if let Some(more @ 1..) = differences.len().checked_sub(LISTED_MAX) {
        text += &format!(", and {more} more");
    }
    text
}

/// A refused operation, without the roles that other commands need.
fn refusal(operation: &str, error: &tokio_postgres::Error) -> String {
    format!("cannot {operation}: {}", describe_with(error, None))
}

/// The migrating user and the database, quoted for SQL.
#[derive(Debug, Clone)]
pub struct Login {
    user: String,
    database: String,
}

impl Login {
    pub(super) async fn read(client: &impl GenericClient) -> Result<Self, MigrateError> {
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

/// A failed statement.
pub(super) fn sql(operation: &str) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let operation = operation.to_string();
    move |error| MigrateError::Sql { operation, error }
}

/// Like [`sql`], for operations whose refusal means that an administrator is needed.
pub(super) fn allowed(operation: &str) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let operation = operation.to_string();
    move |error| {
        if error.code() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) {
            MigrateError::NotAllowed(refusal(&operation, &error))
        } else {
            MigrateError::Sql { operation, error }
        }
    }
}

/// Like [`sql`], for operations whose refusal means that the user, or the owner, lacks a privilege.
pub(super) fn owned(
    operation: &str,
    login: &Login,
) -> impl FnOnce(tokio_postgres::Error) -> MigrateError {
    let (operation, login) = (operation.to_string(), login.clone());
    move |error| MigrateError::Sql { operation, error }.or_not_owner(&login)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_lists_some_differences_and_counts_the_rest() {
        let some: Vec<String> = (1..=7).map(|n| format!("d{n}")).collect();
        assert_eq!(listed(&some[..2]), "d1, d2");
        assert_eq!(listed(&some), "d1, d2, d3, d4, d5, and 2 more");
    }
}
