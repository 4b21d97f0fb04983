//! Schedules and gates that modules declare.

use std::collections::HashSet;

use serde_json::Value;
use tokio_postgres::types::{Json, Type};

use super::{JsonText, Store, StoreError};
use crate::job::declared::{Current, Declaring};
use crate::job::declared_gate::DeclaredGate;

/// A handler for which a live worker reports a schedule, or for which one was created.
#[derive(Debug, Clone)]
pub struct ModuleSchedule {
    /// The handler, and the name of its schedule.
    pub handler: String,
    /// The live workers that have it.
    pub workers: Vec<Declaring>,
    /// Its schedule.
    pub current: Option<Current>,
}

impl Store {
    /// Lists the handlers for which a live worker reports a schedule, or for which one was created, except those with a
    /// schedule that a login has created.
    pub async fn module_schedules(&self) -> Result<Vec<ModuleSchedule>, StoreError> {
        let rows = self
            .query_as_worker("SELECT handler, workers, current FROM rouse.module_schedules($1, $2)")
            .await?;
        let listed = rows.iter().map(|row| {
            let (workers, current): (Option<JsonText>, Option<JsonText>) = (row.get(1), row.get(2));
            // A worker whose capabilities do not have the form of a host's is left out.
            let workers: Option<Vec<Value>> =
                workers.and_then(|JsonText(text)| serde_json::from_str(&text).ok());
            let workers = workers.unwrap_or_default().into_iter();
            let workers = workers.filter_map(|worker| serde_json::from_value(worker).ok());
            ModuleSchedule {
                handler: row.get(0),
                workers: workers.collect(),
                current: current.and_then(|JsonText(text)| serde_json::from_str(&text).ok()),
            }
        });
        Ok(listed.collect())
    }

    /// Creates or replaces the schedule of a handler. Returns `created`, `replaced`, `unchanged`, `foreign` or
    /// `undeclared`.
    pub async fn put_module_schedule(
        &self,
        handler: &str,
        wanted: &Current,
    ) -> Result<String, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                "SELECT rouse.put_module_schedule($1, $2, $3, $4, $5, $6)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&handler, Type::TEXT),
                    (&wanted.version, Type::TEXT),
                    (&wanted.schedule.cron, Type::TEXT),
                    (&wanted.schedule.time_zone, Type::TEXT),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// Deletes the schedule of a handler whose module no longer declares it.
    pub async fn delete_module_schedule(&self, handler: &str) -> Result<bool, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                "SELECT rouse.delete_module_schedule($1, $2, $3)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&handler, Type::TEXT),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }

    /// The handlers for which hosts have set gates that modules declare.
    pub async fn handlers_with_declared_gates(&self) -> Result<HashSet<String>, StoreError> {
        let sql = "SELECT DISTINCT declared_by FROM rouse.gate WHERE declared_by IS NOT NULL";
        let rows = self.query(sql, &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// Sets the gates that the module of a handler declares, and deletes those that it declared before. Returns true if
    /// this has changed any gate.
    pub async fn declare_gates(
        &self,
        handler: &str,
        gates: &[DeclaredGate],
    ) -> Result<bool, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                "SELECT rouse.declare_gates($1, $2, $3, $4)",
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&handler, Type::TEXT),
                    (&Json(gates), Type::JSONB),
                ],
            )
            .await?;
        let row = rows.first().expect("a scalar function returns one row");
        Ok(row.get(0))
    }
}
