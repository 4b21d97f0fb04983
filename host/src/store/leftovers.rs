//! Deletes what ended jobs leave behind: signals that no wait has taken, and flows of which no job is kept.

use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// What ended jobs leave behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// Signals to jobs that have ended.
    Signals,
    /// Flows of which no job is kept.
    Flows,
}

impl Leftover {
    fn sql(self) -> &'static str {
        match self {
            Self::Signals => "SELECT reached, deleted FROM rouse.maintain_signals($1, $2, $3)",
            Self::Flows => "SELECT reached, deleted FROM rouse.maintain_flows($1, $2, $3)",
        }
    }
}

/// The result of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deletion {
    /// The id up to which signals, or flows, were examined; `None` if all were.
    pub reached: Option<i64>,
    /// The number of those that were deleted.
    pub deleted: i32,
}

impl Store {
    /// Examines the next signals, or flows, after this id, and deletes those that are left behind.
    pub async fn delete_leftovers(
        &self,
        what: Leftover,
        after: i64,
    ) -> Result<Deletion, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                what.sql(),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&after, Type::INT8),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok(Deletion {
            reached: row.get(0),
            deleted: row.get(1),
        })
    }
}
