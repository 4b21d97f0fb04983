//! Flows: listing them, and admin actions on them.

use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::{Store, StoreError};

impl StoreError {
    /// True if the flow does not exist.
    pub fn is_unknown_flow(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }
}

impl Store {
    /// The newest flows with an id below `before`, newest first: rows of the view `rouse.flows`.
    pub async fn flows(&self, before: i64, limit: i32) -> Result<Vec<Value>, StoreError> {
        let rows = self
            .query(
                include_str!("flows.sql"),
                &[(&before, Type::INT8), (&limit, Type::INT4)],
            )
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// A flow with its `jobs`, the rows of `rouse.flow`; `None` if it does not exist.
    pub async fn flow(&self, id: i64) -> Result<Option<Value>, StoreError> {
        let rows = self
            .query(include_str!("flow.sql"), &[(&id, Type::INT8)])
            .await?;
        Ok(rows.first().map(|row| row.get(0)))
    }

    /// Cancels up to `limit` live jobs of a flow; returns how many.
    pub async fn cancel_flow(&self, id: i64, limit: i32) -> Result<i32, StoreError> {
        let args = [(&id as _, Type::INT8), (&limit as _, Type::INT4)];
        let rows = self
            .query("SELECT rouse.cancel_flow($1, $2)", &args)
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Retries up to `limit` jobs of a flow that ended without success before this time, seconds since 1970 of the
    /// database's clock; returns how many.
    pub async fn retry_flow(&self, id: i64, limit: i32, before: f64) -> Result<i32, StoreError> {
        let args = [
            (&id as _, Type::INT8),
            (&limit as _, Type::INT4),
            (&before as _, Type::FLOAT8),
        ];
        let rows = self
            .query("SELECT rouse.retry_flow($1, $2, to_timestamp($3))", &args)
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Deletes the queued jobs of a flow; returns how many.
    pub async fn delete_flow(&self, id: i64) -> Result<i32, StoreError> {
        let rows = self
            .query("SELECT rouse.delete_flow($1)", &[(&id, Type::INT8)])
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }
}
