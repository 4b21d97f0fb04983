//! Deletes what ended jobs leave behind: signals that no wait has taken, flows of which no job is kept, and keys of
//! gates that no longer have an effect.

use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// What ended jobs leave behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Leftover {
    /// Signals to jobs that have ended.
    Signals,
    /// Flows of which no job is kept.
    Flows,
    /// Keys of gates that no longer have an effect.
    GateKeys,
}

impl Leftover {
    fn sql(self) -> &'static str {
        match self {
            Self::Signals => {
                "SELECT reached::text, deleted FROM rouse.maintain_signals($1, $2, coalesce($3::bigint, 0))"
            }
            Self::Flows => {
                "SELECT reached::text, deleted FROM rouse.maintain_flows($1, $2, coalesce($3::bigint, 0))"
            }
            Self::GateKeys => {
                "SELECT reached::text, deleted FROM rouse.maintain_gate_keys($1, $2, $3::text[])"
            }
        }
    }
}

/// The result of one call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Deletion {
    /// The position up to which rows were examined; `None` if all were.
    pub reached: Option<String>,
    /// The number of rows that were deleted.
    pub deleted: i32,
}

impl Store {
    /// Examines the next signals, flows, or keys of gates after this position (`None`: the first ones), and deletes
    /// those that are left behind.
    pub async fn delete_leftovers(
        &self,
        what: Leftover,
        after: Option<&str>,
    ) -> Result<Deletion, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                what.sql(),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&after, Type::TEXT),
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
