//! Reads the catalog of lanes.

use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{LaneId, Priority};

/// One lane of the catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// Its position in the catalog, from which new rows are read.
    pub seq: i64,
    /// The lane.
    pub id: LaneId,
    /// The queue.
    pub queue: String,
    /// The handler that its jobs are for.
    pub handler: String,
    /// The priority class.
    pub priority: Priority,
    /// Tags that a worker must have.
    pub tags: Vec<String>,
    /// True if no job was added since it was closed, more than a day ago.
    pub retired: bool,
}

impl Store {
    /// The lanes that were added to the catalog after `seq`.
    pub async fn lanes_after(&self, seq: i64) -> Result<Vec<Lane>, StoreError> {
        let rows = self
            .query(include_str!("lanes.sql"), &[(&seq, Type::INT8)])
            .await?;
        Ok(rows
            .iter()
            .filter_map(|row| {
                Some(Lane {
                    seq: row.get(0),
                    id: LaneId(row.get(1)),
                    queue: row.get(2),
                    handler: row.get(3),
                    // A priority that only a newer host knows is left to that host.
                    priority: Priority::parse(row.get(4))?,
                    tags: row.get(5),
                    retired: row.get(6),
                })
            })
            .collect())
    }

    /// Closes lanes that have had no job for a day, and removes unreferenced rows of the catalog; see
    /// rouse.maintain_lanes (migrations/functions/lanes.sql). Returns how many rows were closed, reopened, and removed.
    pub async fn maintain_lanes(&self) -> Result<(i32, i32, i32), StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                "SELECT closed, reopened, removed FROM rouse.maintain_lanes($1, $2)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok((row.get(0), row.get(1), row.get(2)))
    }
}
