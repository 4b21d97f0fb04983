//! Scheduled jobs and retries: from waiting for a time to waiting for a turn.

use std::time::Duration;

use tokio_postgres::types::Type;

use super::{Store, StoreError, millis};
use crate::job::JobId;

/// How many jobs one call promotes at most: enough for bursts, and short enough to hold no lock for long.
const PROMOTED_MAX: i32 = 1000;

/// What a promotion found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promotion {
    /// Jobs that can be claimed from now on.
    pub promoted: u32,
    /// Until the next one is due, by the database's clock; none: none waits.
    pub next_due: Option<Duration>,
    /// Those jobs, where they were asked for.
    pub ids: Vec<JobId>,
}

impl Store {
    /// Promotes jobs whose time has come, `within` the last so long by the database's clock (none: all); with `tell` the answer has
    /// their ids.
    pub async fn promote(
        &self,
        within: Option<Duration>,
        tell: bool,
    ) -> Result<Promotion, StoreError> {
        let me = self.me()?;
        let within_ms = within.map(millis);
        let row = self
            .query(
                include_str!("promote.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&PROMOTED_MAX, Type::INT4),
                    (&within_ms, Type::INT8),
                    (&tell, Type::BOOL),
                ],
            )
            .await?;
        let row = row
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok(Promotion {
            promoted: u32::try_from(row.get::<_, i32>(0)).unwrap_or(0),
            next_due: row
                .get::<_, Option<i64>>(1)
                .and_then(|ms| u64::try_from(ms).ok())
                .map(Duration::from_millis),
            ids: row
                .get::<_, Option<Vec<i64>>>(2)
                .into_iter()
                .flatten()
                .map(JobId)
                .collect(),
        })
    }
}
