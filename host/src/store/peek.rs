//! Queries whether there is anything to do.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use tokio_postgres::types::Type;

use super::{ClaimOrder, Store, StoreError};
use crate::job::LaneId;

/// The parameters of a peek.
#[derive(Debug, Clone, Copy)]
pub struct PeekParams<'a> {
    /// Lanes that may have jobs after their cursors.
    pub lanes: &'a [ClaimOrder],
    /// The position in the catalog of lanes after which rows are checked.
    pub catalog_after: i64,
    /// The sum of the positions after it that the worker has already read.
    pub catalog_sum: i64,
    /// Only leases that ended at this time or later, by the database's clock; `None` means all.
    pub orphaned_since: Option<SystemTime>,
    /// Only jobs that became due, and deadlines that have passed, after this time, by the database's clock; `None`
    /// means all.
    pub due_since: Option<SystemTime>,
    /// Requests the transactions that have written: the ids that the last such peek returned, empty for the first one.
    /// `None` does not request them.
    pub writers: Option<&'a [i64]>,
}

/// The result of a peek.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peek {
    /// Lanes that have ready jobs.
    pub ready: Vec<LaneId>,
    /// The catalog of lanes has rows that the worker has not read, or no longer has some that it has read.
    pub catalog_changed: bool,
    /// The lease of some job has ended; the job may be in a lane that this worker does not serve.
    pub orphans: bool,
    /// A due job waits for its turn.
    pub due: bool,
    /// The time until the next scheduled job or retry is due, by the database's clock;
    /// `None` if there is none.
    pub next_due: Option<Duration>,
    /// Leases and due jobs were checked up to this time, by the database's clock.
    pub looked_at: SystemTime,
    /// The last turn that was assigned.
    pub turn: i64,
    /// The queues that are paused: their lanes were not read, and may have jobs.
    pub paused: HashSet<String>,
    /// The ids of the transactions in progress that have written: their jobs are not visible yet. They include
    /// transactions that the last peek returned and that ended during this one. `None` if they were not requested.
    pub writers: Option<Vec<i64>>,
    /// Releases have been pending for more than a second.
    pub releases: bool,
    /// The deadline of a job has passed.
    pub deadlines: bool,
}

impl Store {
    /// One read: it does not take locks, and never waits for one.
    pub async fn peek(&self, looking: &PeekParams<'_>) -> Result<Peek, StoreError> {
        let lanes: Vec<i64> = looking.lanes.iter().map(|order| order.lane.0).collect();
        let cursors: Vec<i64> = looking.lanes.iter().map(|order| order.after).collect();
        let rows = self
            .query(
                include_str!("peek.sql"),
                &[
                    (&lanes, Type::INT8_ARRAY),
                    (&cursors, Type::INT8_ARRAY),
                    (&looking.catalog_after, Type::INT8),
                    (&looking.catalog_sum, Type::INT8),
                    (&looking.orphaned_since, Type::TIMESTAMPTZ),
                    (&looking.due_since, Type::TIMESTAMPTZ),
                    (&looking.writers, Type::INT8_ARRAY),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok(Peek {
            ready: row.get::<_, Vec<i64>>(0).into_iter().map(LaneId).collect(),
            catalog_changed: row.get(1),
            orphans: row.get(2),
            due: row.get(3),
            next_due: row
                .get::<_, Option<i64>>(4)
                .and_then(|ms| u64::try_from(ms).ok())
                .map(Duration::from_millis),
            looked_at: row.get(5),
            turn: row.get(6),
            writers: row.get(7),
            releases: row.get(8),
            deadlines: row.get(9),
            paused: row.get::<_, Vec<String>>(10).into_iter().collect(),
        })
    }

    /// The lanes of the ready jobs whose ids come after `after` and are among the last `limit`; and the last id that
    /// was assigned. Without `after`, returns only that id.
    pub async fn newest_lanes(
        &self,
        after: Option<i64>,
        limit: i32,
    ) -> Result<(Vec<LaneId>, i64), StoreError> {
        let rows = self
            .query(
                include_str!("newest_lanes.sql"),
                &[(&after, Type::INT8), (&limit, Type::INT4)],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        let lanes: Vec<i64> = row.get(0);
        Ok((lanes.into_iter().map(LaneId).collect(), row.get(1)))
    }
}
