//! Lists jobs.

use serde_json::Value;
use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// Which jobs.
#[derive(Debug, Clone, Default)]
pub struct Listing {
    /// Of this queue; none: of any.
    pub queue: Option<String>,
    /// For this handler; none: for any.
    pub handler: Option<String>,
    /// In this state, a word of SPEC row D1; none: in any.
    pub state: Option<String>,
    /// At most so many, the newest.
    pub limit: i64,
}

impl Store {
    /// The newest jobs that fit, live or finished.
    pub async fn jobs(&self, listing: &Listing) -> Result<Vec<Value>, StoreError> {
        let rows = self
            .query(
                include_str!("jobs.sql"),
                &[
                    (&listing.queue, Type::TEXT),
                    (&listing.handler, Type::TEXT),
                    (&listing.state, Type::TEXT),
                    (&listing.limit, Type::INT8),
                ],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }
}
