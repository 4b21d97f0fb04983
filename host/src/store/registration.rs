//! An incarnation of a worker as the database records it, and the key that authenticates it.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tokio_postgres::types::{Json, Type};

use super::{Store, StoreError};
use crate::job::Incarnation;

/// The secret that a worker shows with each write: 32 bytes, random for each incarnation or pinned by the operator. The
/// database keeps their SHA-256; they are never logged or printed by `{:?}`.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerKey([u8; 32]);

impl WorkerKey {
    /// Generates a random key.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// A key with these bytes, for instance from a file that the operator keeps.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerKey(…)")
    }
}

/// The data that a worker reports about itself.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Its id: 1 to 64 letters, digits, `-` and `_`.
    pub worker_id: String,
    /// Its key for later writes.
    pub key: WorkerKey,
    /// The machine that it runs on.
    pub hostname: String,
    /// Operating system and processor architecture, for instance `linux x86_64`.
    pub platform: String,
    /// The host's version.
    pub version: String,
    /// By handler name: the version of its module and the granted capabilities.
    pub capabilities: Value,
    /// The maximum number of concurrent attempts.
    pub slots: usize,
    /// The queues that it serves, in order; empty means all.
    pub queues: Vec<String>,
    /// Tags that jobs may require.
    pub tags: Vec<String>,
    /// Its statistics; `None` while they are not known yet.
    pub stats: Option<Stats>,
}

/// Statistics of a worker.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Stats {
    /// Running attempts.
    pub active: usize,
    /// Jobs that have succeeded in this incarnation.
    pub completed: u64,
    /// Jobs that have ended in another final state in this incarnation.
    pub failed: u64,
    /// Attempts that have failed in this incarnation, including the last attempt of each failed job.
    pub attempts_failed: u64,
    /// Attempts that reached their run timeout in this incarnation. Many of them may mean that the worker itself is
    /// slow.
    pub timed_out: u64,
    /// The average duration of an attempt in this incarnation, in milliseconds; `None` before the first.
    pub average_ms: Option<f64>,
    /// CPU use of the process since the last heartbeat, in cores: 1.0 is one fully used core.
    pub cpu_cores: Option<f64>,
    /// Resident memory of the process, in bytes.
    pub memory_bytes: Option<u64>,
    /// Free space on the disk of the handlers folder, in bytes.
    pub disk_free_bytes: Option<u64>,
    /// The age of this incarnation, in seconds.
    pub uptime_s: u64,
    /// True if some of the modules that were present when the worker started are not loaded yet: it may soon have
    /// handlers that it does not list.
    pub loading: bool,
    /// The statistics of its claims in fair queues in this incarnation.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub fair: Vec<FairQueueStats>,
}

/// The statistics of a worker's claims in a fair queue.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FairQueueStats {
    /// The queue.
    pub queue: String,
    /// The number of times that the keys got credit.
    pub rounds: u64,
    /// The number of jobs that went first because they had waited too long.
    pub promotions: u64,
    /// Its keys, by name. Keys that are not counted individually share one entry.
    pub keys: Vec<FairKeyStats>,
}

/// The statistics of a worker's claims for a key of a fair queue.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct FairKeyStats {
    /// The key; `None` for all keys that are not counted individually.
    pub key: Option<String>,
    /// Claimed jobs.
    pub selected: u64,
    /// The number of claims that took none of its jobs although it was known to have some.
    pub deferred: u64,
    /// The number of jobs that went first because they had waited too long.
    pub promotions: u64,
    /// The turns that it has left in this round; less than zero if it took some in advance. `None` for several keys.
    pub deficit: Option<f64>,
}

/// The credentials of a worker's calls.
#[derive(Debug)]
pub(super) struct Identity {
    pub(super) incarnation: Incarnation,
    pub(super) key: WorkerKey,
}

impl Identity {
    pub(super) fn key(&self) -> &[u8] {
        &self.key.0
    }
}

/// SQLSTATEs that `migrations/functions/workers.sql` raises.
const ENDED: &str = "RW001";
const SUPERSEDED: &str = "RW002";
const TAKEN: &str = "RW003";
const UNKNOWN: &str = "RW004";
const SHARED: &str = "RW005";

impl StoreError {
    fn is(&self, codes: &[&str]) -> bool {
        self.code().is_some_and(|code| codes.contains(&code.code()))
    }

    /// True if this incarnation of the worker has ended: its heartbeats stopped for too long, or the database no longer
    /// knows it (after a restore, for instance). It has to register again, and all its claims are lost.
    pub fn is_incarnation_ended(&self) -> bool {
        self.is(&[ENDED, UNKNOWN])
    }

    /// True if the database does not know this incarnation of the worker, or knows it with a different key or login: it
    /// was restored, or has lost the registration in a failover.
    pub fn is_unknown(&self) -> bool {
        self.is(&[UNKNOWN])
    }

    /// True if another host uses this worker's id and key. This host cannot recover from that.
    pub fn is_superseded(&self) -> bool {
        self.is(&[SUPERSEDED])
    }

    /// True if a live host already has the worker id, with its own key or with the same one.
    pub fn is_taken(&self) -> bool {
        self.is(&[TAKEN, SHARED])
    }
}

/// The result of a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// The number of workers that this heartbeat found dead.
    pub expired: i32,
    /// The number of attempts for which the worker has its timeout flag.
    pub timeouts: i64,
    /// The number of heartbeats of this incarnation whose changes the database has.
    pub changes: i64,
}

impl Store {
    /// Registers an incarnation of a worker; returns its number and the heartbeat interval. After this, the store and
    /// its clones show this identity with each write.
    pub async fn register(
        &self,
        worker: &Registration,
    ) -> Result<(Incarnation, Duration), StoreError> {
        let (incarnation, every) = loop {
            let rows = self
                .query(
                    "SELECT incarnation, heartbeat_ms FROM rouse.register($1, $2, $3, $4, $5, $6, $7, $8, $9, $10)",
                    &[
                        (&worker.worker_id, Type::TEXT),
                        (&&worker.key.0[..], Type::BYTEA),
                        (&worker.hostname, Type::TEXT),
                        (&worker.platform, Type::TEXT),
                        (&worker.version, Type::TEXT),
                        (&Json(&worker.capabilities), Type::JSONB),
                        (
                            &i32::try_from(worker.slots).unwrap_or(i32::MAX),
                            Type::INT4,
                        ),
                        (&worker.queues, Type::TEXT_ARRAY),
                        (&worker.tags, Type::TEXT_ARRAY),
                        (&worker.stats.as_ref().map(Json), Type::JSONB),
                    ],
                )
                .await?;
            let row = rows
                .first()
                .expect("a function with OUT parameters returns one row");
            // Null if the database's clock has been set back since the last heartbeat of the holder of the id. This
            // call has corrected the time, and the next one decides.
            if let Some(incarnation) = row.get::<_, Option<i64>>(0) {
                break (Incarnation(incarnation), row.get::<_, i64>(1));
            }
        };
        self.identity.store(Some(Arc::new(Identity {
            incarnation,
            key: worker.key.clone(),
        })));
        let every = u64::try_from(every).unwrap_or(30_000);
        Ok((incarnation, Duration::from_millis(every)))
    }

    /// Reports that the worker is alive, the changes to the handlers that it can run (null for one that it no longer
    /// has), its statistics, and whether it is draining.
    ///
    /// # Errors
    /// [`StoreError::is_about_data`] if the database rejects what the worker reports; nothing of it is stored then.
    pub async fn heartbeat(
        &self,
        changes: Option<&Value>,
        stats: &Stats,
        draining: bool,
    ) -> Result<Heartbeat, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                "SELECT expired, timeouts, changes FROM rouse.heartbeat($1, $2, $3, $4, $5)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&changes.map(Json), Type::JSONB),
                    (&Json(stats), Type::JSONB),
                    (&draining, Type::BOOL),
                ],
            )
            .await?;
        let row = rows
            .first()
            .expect("a function with OUT parameters returns one row");
        Ok(Heartbeat {
            expired: row.get(0),
            timeouts: row.get(1),
            changes: row.get(2),
        })
    }

    /// Reports that this host is alive although the incarnation of its worker has ended, so that the attempts that it
    /// lost do not count as crashes.
    pub async fn outlived(&self) -> Result<(), StoreError> {
        self.query_as_worker("SELECT rouse.outlived($1, $2)")
            .await?;
        Ok(())
    }

    /// Reports that the worker has stopped. Its remaining claims are free at once.
    pub async fn unregister(&self) -> Result<(), StoreError> {
        self.query_as_worker("SELECT rouse.unregister($1, $2)")
            .await?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_not_printed() {
        let shown = format!("{:?}", WorkerKey::new([0xab; 32]));
        assert_eq!(shown, "WorkerKey(…)");
    }
}
