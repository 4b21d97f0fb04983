//! Flows: listing them, and admin actions on them.

use serde_json::Value;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::Type;

use super::json::{ShownJson, shown_rows};
use super::{Store, StoreError};

/// A page of flows ends with the flow that reaches this many jobs. All jobs are counted: 10,000, the maximum for a
/// flow, take 10 to 40 ms.
const JOBS_OF_PAGE: i64 = 20_000;

/// Some of the newest flows.
#[derive(Debug)]
pub struct FlowPage {
    /// Rows of the view `rouse.flows`, newest first.
    pub flows: Vec<Value>,
    /// The id with which to continue; `None` if there are no older flows.
    pub next_before: Option<i64>,
}

impl StoreError {
    /// True if the flow does not exist.
    pub fn is_unknown_flow(&self) -> bool {
        self.code() == Some(&SqlState::NO_DATA_FOUND)
    }
}

impl Store {
    /// The newest flows with an id below `before`: at most `limit`, and fewer if they have many jobs, but at least one
    /// if there is any.
    pub async fn flows(&self, before: i64, limit: i32) -> Result<FlowPage, StoreError> {
        let rows = self
            .read(
                include_str!("flows.sql"),
                &[
                    (&before, Type::INT8),
                    (&limit, Type::INT4),
                    (&JOBS_OF_PAGE, Type::INT8),
                ],
            )
            .await?;
        let flows = shown_rows(&rows);
        let has_older = rows.last().is_some_and(|row| row.get(1));
        let last = flows.last().filter(|_| has_older);
        let next_before = last.and_then(|flow| flow["id"].as_i64());
        Ok(FlowPage { flows, next_before })
    }

    /// A flow with its `jobs`, the rows of `rouse.flow`; `None` if it does not exist.
    pub async fn flow(&self, id: i64) -> Result<Option<Value>, StoreError> {
        let rows = self
            .read(include_str!("flow.sql"), &[(&id, Type::INT8)])
            .await?;
        let shown = rows.first().map(|row| row.get::<_, ShownJson>(0));
        Ok(shown.map(|ShownJson(flow)| flow))
    }

    /// A row of `rouse.flows`, and up to `limit` of its jobs with later chains than `after` (`None`: from the first),
    /// as `listed`; `None` if the flow does not exist.
    pub async fn flow_page(
        &self,
        id: i64,
        after: Option<i64>,
        limit: i32,
    ) -> Result<Option<Value>, StoreError> {
        let rows = self
            .read(
                include_str!("flow_page.sql"),
                &[
                    (&id, Type::INT8),
                    (&after, Type::INT8),
                    (&limit, Type::INT4),
                ],
            )
            .await?;
        let shown = rows.first().map(|row| row.get::<_, ShownJson>(0));
        Ok(shown.map(|ShownJson(flow)| flow))
    }

    /// Cancels up to `limit` live jobs of a flow; returns how many.
    pub async fn cancel_flow(&self, id: i64, limit: i32) -> Result<i32, StoreError> {
        let row = self
            .act(
                "rouse.cancel_flow($1, $2)",
                &[(&id, Type::INT8), (&limit, Type::INT4)],
            )
            .await?;
        Ok(row.get(0))
    }

    /// Retries up to `limit` jobs of a flow that ended without success before this time (in seconds since 1970, by the
    /// database's clock); returns how many.
    pub async fn retry_flow(&self, id: i64, limit: i32, before: f64) -> Result<i32, StoreError> {
        let row = self
            .act(
                "rouse.retry_flow($1, $2, to_timestamp($3))",
                &[
                    (&id, Type::INT8),
                    (&limit, Type::INT4),
                    (&before, Type::FLOAT8),
                ],
            )
            .await?;
        Ok(row.get(0))
    }

    /// Deletes the queued jobs of a flow; returns how many.
    pub async fn delete_flow(&self, id: i64) -> Result<i32, StoreError> {
        let call = "rouse.delete_flow($1)";
        let row = self.act(call, &[(&id, Type::INT8)]).await?;
        Ok(row.get(0))
    }
}
