//! Promotes scheduled jobs and retries: from waiting for a time to waiting for a turn.

use std::time::{Duration, SystemTime};

use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::JobId;

/// The maximum number of jobs that one call promotes: enough for bursts, and few enough not to hold locks for a long
/// time.
const PROMOTED_MAX: i32 = 1000;

/// The result of a promotion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promotion {
    /// The number of promoted jobs, which can be claimed now.
    pub promoted: u32,
    /// The time until the next job is due, by the database's clock; `None` if there is none.
    pub next_due: Option<Duration>,
    /// The ids of the promoted jobs, if they were requested.
    pub ids: Vec<JobId>,
    /// If due jobs were left because they were locked, the time at which the first of them became due, by the
    /// database's clock. `None` if there are none, or if the promotion is not complete.
    pub left_at: Option<SystemTime>,
}

impl Promotion {
    /// True if no job is left that was due, except those that were locked.
    pub fn is_complete(&self) -> bool {
        self.promoted < PROMOTED_MAX.unsigned_abs()
    }
}

impl Store {
    /// Promotes due jobs. `since` restricts the call to jobs that became due after this time, by the database's clock
    /// (`None`: all); `with_ids` requests their ids.
    pub async fn promote(
        &self,
        since: Option<SystemTime>,
        with_ids: bool,
    ) -> Result<Promotion, StoreError> {
        let worker = self.identity()?;
        let row = self
            .query(
                include_str!("promote.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&PROMOTED_MAX, Type::INT4),
                    (&since, Type::TIMESTAMPTZ),
                    (&with_ids, Type::BOOL),
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
            left_at: row.get(3),
        })
    }
}
