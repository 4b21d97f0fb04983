//! Reads the catalog of lanes.

use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{LaneId, Priority};

/// One lane of the catalog.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lane {
    /// Its place in the catalog, for reading what is new.
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
}

impl Store {
    /// The lanes that were catalogued after `seq`.
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
                    // A class that only a newer host knows is left to that host.
                    priority: Priority::parse(row.get(4))?,
                    tags: row.get(5),
                })
            })
            .collect())
    }
}
