//! One life of a worker, as the database knows it; and the key by which it knows it again.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tokio_postgres::types::{Json, Type};

use super::{Store, StoreError};
use crate::job::Incarnation;

/// What a worker has to show with each write: 32 bytes, random for each life or pinned by the
/// operator. The database keeps their SHA-256; they are never logged, nor printed by `{:?}`.
#[derive(Clone, PartialEq, Eq)]
pub struct WorkerKey([u8; 32]);

impl WorkerKey {
    /// A new key.
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// These bytes, for instance of a file that the operator keeps.
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Debug for WorkerKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("WorkerKey(…)")
    }
}

/// What a worker says of itself.
#[derive(Debug, Clone)]
pub struct Registration {
    /// Its id: 1 to 64 letters, digits, `-` and `_`.
    pub worker_id: String,
    /// What it will have to show.
    pub key: WorkerKey,
    /// The machine that it runs on.
    pub hostname: String,
    /// Operating system and processor, for instance `linux x86_64`.
    pub platform: String,
    /// The host's version.
    pub version: String,
    /// By handler name: version of its module, granted capabilities.
    pub capabilities: Value,
    /// Attempts at the same time.
    pub slots: usize,
    /// The queues that it serves, in order; empty: all.
    pub queues: Vec<String>,
    /// What jobs may require of it.
    pub tags: Vec<String>,
    /// How it fares; none: that is not known yet.
    pub stats: Option<Stats>,
}

/// How a worker fares.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Stats {
    /// Attempts that run now.
    pub active: usize,
    /// Jobs that have succeeded in this life.
    pub completed: u64,
    /// Jobs that have ended otherwise in this life.
    pub failed: u64,
    /// Attempts that have failed in this life, the last one of each failed job included.
    pub attempts_failed: u64,
    /// Attempts that ran into their run timeout, in this life: where there are many, the worker may be what is slow.
    pub timed_out: u64,
    /// Of an attempt in this life, milliseconds; none before the first.
    pub average_ms: Option<f64>,
    /// Of the process since the last heartbeat, in cores: 1.0 is one core all the time.
    pub cpu_cores: Option<f64>,
    /// Resident memory of the process, bytes.
    pub memory_bytes: Option<u64>,
    /// Free on the disk of the handlers folder, bytes.
    pub disk_free_bytes: Option<u64>,
    /// Of this life, seconds.
    pub uptime_s: u64,
    /// Some of the modules that were there at its start are not loaded yet: it may have handlers soon that it does not name.
    pub loading: bool,
}

/// What a verb of a worker has to show.
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

/// Codes of `migrations/functions/workers.sql`.
const OVER: &str = "RW001";
const SUPERSEDED: &str = "RW002";
const TAKEN: &str = "RW003";
const UNKNOWN: &str = "RW004";
const SHARED: &str = "RW005";

impl StoreError {
    fn is(&self, codes: &[&str]) -> bool {
        self.code().is_some_and(|code| codes.contains(&code.code()))
    }

    /// True where this life of the worker is over: it was not heard of for too long, or the database has
    /// forgotten it (it was restored, for instance). It has to register again, and all that it has
    /// claimed is lost.
    pub fn is_over(&self) -> bool {
        self.is(&[OVER, UNKNOWN])
    }

    /// True where another host has this worker's id and key: nothing that this host does can help.
    pub fn is_superseded(&self) -> bool {
        self.is(&[SUPERSEDED])
    }

    /// True where a host that lives has the worker id already, with a key of its own or with the same one.
    pub fn is_taken(&self) -> bool {
        self.is(&[TAKEN, SHARED])
    }
}

/// The answer to a heartbeat.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heartbeat {
    /// Workers that were found dead by the way.
    pub expired: i32,
    /// For how many attempts the worker has its timeout flag.
    pub timeouts: i64,
}

impl Store {
    /// Registers one life of a worker; returns its number and the time between two heartbeats. From then on the
    /// store shows this identity with each write, and its clones do too.
    pub async fn register(
        &self,
        worker: &Registration,
    ) -> Result<(Incarnation, Duration), StoreError> {
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
        let incarnation = Incarnation(row.get(0));
        self.identity.store(Some(Arc::new(Identity {
            incarnation,
            key: worker.key.clone(),
        })));
        let every = u64::try_from(row.get::<_, i64>(1)).unwrap_or(30_000);
        Ok((incarnation, Duration::from_millis(every)))
    }

    /// Says that the worker lives, what it can run (none: what it could run before), how it fares, and whether it takes no more jobs.
    /// Returns how many workers were found dead by the way, and for how many attempts the worker has its timeout flag.
    ///
    /// # Errors
    /// [`StoreError::is_about_data`] where the database does not take what the worker says of itself; nothing of it is kept then.
    pub async fn heartbeat(
        &self,
        capabilities: Option<&Value>,
        stats: &Stats,
        draining: bool,
    ) -> Result<Heartbeat, StoreError> {
        let me = self.me()?;
        let rows = self
            .query(
                "SELECT expired, timeouts FROM rouse.heartbeat($1, $2, $3, $4, $5)",
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&capabilities.map(Json), Type::JSONB),
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
        })
    }

    /// Says that this host lives although the life of its worker is over, so that the attempts that it has lost count as no crash of theirs.
    pub async fn outlived(&self) -> Result<(), StoreError> {
        let me = self.me()?;
        self.query(
            "SELECT rouse.outlived($1, $2)",
            &[(&me.incarnation.0, Type::INT8), (&me.key(), Type::BYTEA)],
        )
        .await?;
        Ok(())
    }

    /// Says that the worker has stopped. What it still has is free at once.
    pub async fn unregister(&self) -> Result<(), StoreError> {
        let me = self.me()?;
        self.query(
            "SELECT rouse.unregister($1, $2)",
            &[(&me.incarnation.0, Type::INT8), (&me.key(), Type::BYTEA)],
        )
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
