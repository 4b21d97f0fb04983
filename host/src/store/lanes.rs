//! Reads the catalog of lanes.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use serde_json::Value;
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{ClaimGate, ClaimLimit, FairKey, FairShare, Incarnation, LaneId, Priority};

/// The catalog is re-read from this far before its known end, because a lane's row may be committed after rows with
/// higher numbers.
pub const CATALOG_WINDOW: i64 = 256;

/// The result of a recovery of inboxes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InboxRecovery {
    /// The number of jobs that were moved to shared lanes.
    pub moved: i32,
    /// The number of these that had been ready for more than a day.
    pub late: i32,
    /// The position from which the next call continues: the inbox, and the last turn that was read there. `None` if
    /// there is nothing left to read.
    pub next: Option<(LaneId, i64)>,
}

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
    /// The priority of its jobs.
    pub priority: Priority,
    /// Tags that a worker must have.
    pub tags: Vec<String>,
    /// The values that all of its jobs have, and by which a fair queue or a gate divides them: `tenant`, `source`, or a
    /// path in the payload. In an inbox, also `worker`.
    pub values: BTreeMap<String, String>,
    /// True if no job was added since it was closed, more than a day ago.
    pub retired: bool,
}

/// The version of the settings of fair queues. It is different after each change to one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FairVersion(i64);

/// The settings of fair queues.
#[derive(Debug, PartialEq)]
pub struct FairQueues {
    /// Their version.
    pub version: FairVersion,
    /// The settings of all fair queues, by name. Queues with a key that only newer hosts know are left out: this host
    /// lets their lanes take turns.
    pub queues: HashMap<String, FairShare>,
}

/// The catalog of lanes, and the settings by which they are served.
#[derive(Debug)]
pub struct Catalog {
    /// The requested lanes. Of retired ones, only those in the last [`CATALOG_WINDOW`] positions.
    pub lanes: Vec<Lane>,
    /// The settings of fair queues. `None` if the caller knows this version.
    pub fair: Option<FairQueues>,
    /// The gates that act in claims (`rouse.gate`), by name.
    pub gates: Vec<ClaimGate>,
    /// The queues that are divided into shards.
    pub sharded: HashSet<String>,
}

impl Lane {
    /// `None` if only newer hosts know its priority. The lane is left to them.
    fn read(row: &Row) -> Option<Self> {
        Some(Self {
            seq: row.get(0),
            id: LaneId(row.get(1)),
            queue: row.get(2),
            handler: row.get(3),
            priority: Priority::parse(row.get(4))?,
            tags: row.get(5),
            // The lane for keys that no longer fit into the catalog has `*` instead of values.
            values: serde_json::from_str(row.get(6)).unwrap_or_default(),
            retired: row.get(7),
        })
    }

    /// The worker whose inbox it is (direct dispatch); `None` if it is not an inbox.
    pub fn inbox_of(&self) -> Option<Incarnation> {
        let worker = self.values.get("worker")?;
        worker.parse().ok().map(Incarnation)
    }
}

/// The settings of all fair queues. `None` if this version is known.
fn fair_queues(rows: &[Row], known: Option<FairVersion>) -> Option<FairQueues> {
    let first = rows.first().expect("the version is in a row, even alone");
    let version = FairVersion(first.get(0));
    if known == Some(version) {
        return None;
    }
    let fair_queue = |row: &Row| {
        // `None` in a row that has only the version.
        let name: Option<String> = row.get(1);
        Some((name?, fair_share(row)?))
    };
    Some(FairQueues {
        version,
        queues: rows.iter().filter_map(fair_queue).collect(),
    })
}

/// The settings of a fair queue. `None` if its key is unknown.
fn fair_share(row: &Row) -> Option<FairShare> {
    let weights: Value = row.get(4);
    let weights = weights.as_object().into_iter().flatten();
    let (starvation_s, max_in_flight): (i32, i32) = (row.get(6), row.get(7));
    let above_zero = |value: i32| u32::try_from(value).ok().filter(|value| *value > 0);
    Some(FairShare {
        key: FairKey::parse(row.get(2))?,
        quantum: u32::try_from(row.get::<_, i32>(3)).unwrap_or(1),
        weights: weights
            .filter_map(|(key, weight)| Some((key.clone(), weight.as_f64()?)))
            .collect(),
        default_weight: row.get(5),
        starvation: above_zero(starvation_s).map(|s| Duration::from_secs(s.into())),
        max_in_flight: above_zero(max_in_flight),
        charges_cpu: row.get::<_, &str>(8) == "cpu",
    })
}

fn claim_gate(row: &Row) -> ClaimGate {
    let limit = match row.get(4) {
        "max_concurrent" => ClaimLimit::Running,
        "throttle" => ClaimLimit::Starts,
        _batch => {
            let max: Option<i32> = row.get(5);
            ClaimLimit::Batch(max.map_or(1, |max| usize::try_from(max).unwrap_or(1)))
        }
    };
    ClaimGate {
        name: row.get(0),
        queue: row.get(1),
        handler: row.get(2),
        key: row.get(3),
        limit,
        settings: row.get(6),
    }
}

impl Store {
    /// The lanes that were added to the catalog after `seq`, and then the settings by which lanes are served: a change
    /// to these settings also changes the catalog, so they are never older than the lanes. `fair`: the known version of
    /// the settings of fair queues, which are then left out.
    pub async fn catalog_after(
        &self,
        seq: i64,
        fair: Option<FairVersion>,
    ) -> Result<Catalog, StoreError> {
        let known = fair.map(|version| version.0);
        let rows = self
            .query_in_order([
                (
                    include_str!("lanes.sql"),
                    &[(&seq, Type::INT8), (&CATALOG_WINDOW, Type::INT8)],
                ),
                (include_str!("fair_queues.sql"), &[(&known, Type::INT8)]),
                (include_str!("claim_gates.sql"), &[]),
                ("SELECT name FROM rouse.queue WHERE shards > 0", &[]),
            ])
            .await?;
        let [lanes, queues, gates, sharded] = &rows;
        Ok(Catalog {
            lanes: lanes.iter().filter_map(Lane::read).collect(),
            fair: fair_queues(queues, fair),
            gates: gates.iter().map(claim_gate).collect(),
            sharded: sharded.iter().map(|row| row.get(0)).collect(),
        })
    }

    /// Moves up to `wanted` jobs out of inboxes of workers that no longer take them; see rouse.recover_direct
    /// (migrations/functions/direct.sql). `from`: the position at which the last call of this round stopped.
    pub async fn recover_direct(
        &self,
        wanted: i32,
        from: Option<(LaneId, i64)>,
    ) -> Result<InboxRecovery, StoreError> {
        let (inbox, turn) = from.map(|(inbox, turn)| (inbox.0, turn)).unzip();
        let worker = self.identity()?;
        let rows = self
            .query(
                "SELECT moved, late, inbox, turn FROM rouse.recover_direct($1, $2, $3, $4, $5)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&wanted, Type::INT4),
                    (&inbox, Type::INT8),
                    (&turn, Type::INT8),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        let inbox: Option<i64> = row.get(2);
        Ok(InboxRecovery {
            moved: row.get(0),
            late: row.get(1),
            next: inbox.map(LaneId).zip(row.get(3)),
        })
    }

    /// Closes lanes that have had no job for a day, and removes unreferenced rows of the catalog; see
    /// rouse.maintain_lanes (migrations/functions/lanes.sql). Returns how many rows were closed, reopened, and removed.
    pub async fn maintain_lanes(&self) -> Result<(i32, i32, i32), StoreError> {
        let rows = self
            .query_as_worker("SELECT closed, reopened, removed FROM rouse.maintain_lanes($1, $2)")
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok((row.get(0), row.get(1), row.get(2)))
    }
}
