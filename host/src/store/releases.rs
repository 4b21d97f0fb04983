//! Releases jobs that wait for chains that have ended, and looks for those that were not released.

use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// The maximum number of dependencies that one call resolves: enough for a wide graph, and few enough not to hold locks
/// for a long time.
const RELEASED_MAX: i32 = 1000;

impl Store {
    /// Releases more of the jobs that a settlement has left unreleased. Returns whether there is more to do at once.
    pub async fn continue_releases(&self) -> Result<bool, StoreError> {
        let me = self.identity()?;
        let rows = self
            .query(
                include_str!("continue_releases.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&RELEASED_MAX, Type::INT4),
                ],
            )
            .await?;
        Ok(rows.first().is_some_and(|row| row.get(0)))
    }

    /// Finds jobs that wait for chains that have ended. Returns the number of chains whose release was lost, which no
    /// known fault causes, and the number of chains that are no longer kept although jobs still waited for a retry of
    /// them.
    pub async fn maintain_dependencies(&self) -> Result<(i32, i32), StoreError> {
        let rows = self
            .query_as_worker("SELECT lost, dropped FROM rouse.maintain_dependencies($1, $2)")
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok((row.get(0), row.get(1)))
    }
}
