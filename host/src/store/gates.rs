//! Gates for the command line: listing them with their keys, and changing them.

use serde::Serialize;
use serde_json::Value;
use tokio_postgres::types::{Json, Type};

use super::{Store, StoreError};

/// The arguments of `rouse.set_gate`. `None` means the default of the function.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct NewGate {
    /// Its name.
    pub name: String,
    /// `max_concurrent`, `throttle`, `batch`, `singleton` or `debounce`.
    pub kind: String,
    /// The handler of its jobs.
    pub handler: Option<String>,
    /// The queue of its jobs.
    pub queue: Option<String>,
    /// The values by which it divides its jobs.
    pub key: Vec<String>,
    /// The maximum number of running jobs of a key, of starts in a period, or of jobs in a batch.
    pub max: Option<i32>,
    /// The period, in seconds.
    pub period_s: Option<f64>,
    /// The number of jobs that may start at once.
    pub burst: Option<i32>,
    /// `queued`, `running` or `period`.
    pub during: Option<String>,
    /// `keep`, `replace` or `refuse`.
    pub on_conflict: Option<String>,
    /// `trailing` or `leading`.
    pub edge: Option<String>,
    /// The maximum duration of a burst, in seconds.
    pub max_wait_s: Option<f64>,
}

/// Keys of a gate.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GateKeys {
    /// Rows of `rouse.gate_keys`, without the name of the gate; those with the most jobs first.
    pub keys: Vec<Value>,
    /// The total number of keys; `keys` may contain only some of them.
    pub total: i64,
}

impl Store {
    /// The gate of this name, or all in the order of their names: rows of the view `rouse.gates`, with `period_ms` and
    /// `max_wait_ms` instead of intervals.
    pub async fn gates(&self, name: Option<&str>) -> Result<Vec<Value>, StoreError> {
        let rows = self
            .read(include_str!("gates.sql"), &[(&name, Type::TEXT)])
            .await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Up to `limit` keys of a gate.
    pub async fn gate_keys(&self, gate: &str, limit: i64) -> Result<GateKeys, StoreError> {
        let rows = self
            .read(
                include_str!("gate_keys.sql"),
                &[(&gate, Type::TEXT), (&limit, Type::INT8)],
            )
            .await?;
        Ok(GateKeys {
            total: rows.first().map_or(0, |row| row.get(1)),
            keys: rows.iter().map(|row| row.get(0)).collect(),
        })
    }

    /// Sets a gate. An existing gate of the same name is replaced.
    pub async fn set_gate(&self, new: &NewGate) -> Result<(), StoreError> {
        self.act(include_str!("set_gate.sql"), &[(&Json(new), Type::JSONB)])
            .await?;
        Ok(())
    }

    /// Deletes a gate; true if it existed.
    pub async fn delete_gate(&self, name: &str) -> Result<bool, StoreError> {
        let call = "rouse.delete_gate($1)";
        let row = self.act(call, &[(&name, Type::TEXT)]).await?;
        Ok(row.get(0))
    }
}
