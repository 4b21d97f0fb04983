//! The daily partitions of the history: created ahead, dropped when they are old.

use super::{Store, StoreError};

impl Store {
    /// Creates the partitions of today and the next days; returns the number that were missing.
    pub async fn prepare_partitions(&self) -> Result<i32, StoreError> {
        let rows = self.query("SELECT rouse.prepare_partitions()", &[]).await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Drops the partitions that are older than the retentions in the database. Returns the number that were dropped,
    /// and the number that were in use: a later call drops those.
    pub async fn maintain_partitions(&self) -> Result<(i32, i32), StoreError> {
        let rows = self
            .query_as_worker("SELECT dropped, in_use FROM rouse.maintain_partitions($1, $2)")
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok((row.get(0), row.get(1)))
    }
}
