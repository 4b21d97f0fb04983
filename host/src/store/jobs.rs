//! Lists jobs.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// The most jobs that one listing looks at: filters that match little would read all that is kept.
pub const LOOKED_AT_MAX: i64 = 100_000;

/// Which jobs.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// Of this queue; none: of any.
    pub queue: Option<String>,
    /// For this handler; none: for any.
    pub handler: Option<String>,
    /// In this state, a word of SPEC row D1; none: in any.
    pub state: Option<String>,
    /// Only jobs with a smaller id; none: all.
    pub before: Option<i64>,
    /// At most so many, the newest.
    pub limit: i64,
}

impl Store {
    /// The newest jobs that fit, live or finished, of the [`LOOKED_AT_MAX`] newest.
    pub async fn jobs(&self, listing: &Listing) -> Result<Vec<Value>, StoreError> {
        let rows = self
            .query(
                include_str!("jobs.sql"),
                &[
                    (&listing.queue, Type::TEXT),
                    (&listing.handler, Type::TEXT),
                    (&listing.state, Type::TEXT),
                    (&listing.limit, Type::INT8),
                    (&listing.before, Type::INT8),
                    (&LOOKED_AT_MAX, Type::INT8),
                ],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// The last of the jobs below this id that a listing looks at, where it does not look at all of them, and when that job was
    /// requested.
    pub async fn last_looked_at(
        &self,
        before: Option<i64>,
    ) -> Result<Option<(i64, String)>, StoreError> {
        let rows = self
            .query(
                include_str!("jobs_end.sql"),
                &[(&before, Type::INT8), (&LOOKED_AT_MAX, Type::INT8)],
            )
            .await?;
        Ok(rows.first().map(|row| (row.get(0), row.get(1))))
    }
}
