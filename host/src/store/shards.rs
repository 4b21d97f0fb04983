//! Leases of shards.

use std::collections::HashSet;
use std::time::Duration;

use tokio_postgres::types::Type;

use super::{Store, StoreError};

/// The shards of a queue that a worker has leased.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeasedShards {
    /// The queue.
    pub queue: String,
    /// The number of its shards.
    pub shards: u32,
    /// The numbers of those that the worker has leased.
    pub own: HashSet<u32>,
    /// The duration of the lease, counted from before the call.
    pub lease: Duration,
}

impl Store {
    /// Leases shards of these queues, or renews the lease, and gives up those of other queues. `serves` is a hash of
    /// what the worker can run: workers with the same hash divide the shards among themselves. Returns the shards that
    /// it has now, for each of the queues that has any.
    pub async fn lease_shards(
        &self,
        queues: &[String],
        serves: i64,
    ) -> Result<Vec<LeasedShards>, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("lease_shards.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&queues, Type::TEXT_ARRAY),
                    (&serves, Type::INT8),
                ],
            )
            .await?;
        let number = |value: i32| u32::try_from(value).unwrap_or(0);
        Ok(rows
            .iter()
            .map(|row| LeasedShards {
                queue: row.get(0),
                shards: number(row.get(1)),
                own: row.get::<_, Vec<i32>>(2).into_iter().map(number).collect(),
                lease: Duration::from_millis(row.get::<_, i64>(3).unsigned_abs()),
            })
            .collect())
    }

    /// Divides a queue into this many shards; 0 means none.
    pub async fn set_shards(&self, queue: &str, shards: i32) -> Result<(), StoreError> {
        self.act(
            "rouse.set_shards($1, $2)",
            &[(&queue, Type::TEXT), (&shards, Type::INT4)],
        )
        .await?;
        Ok(())
    }
}
