//! Reads what has happened, for whoever audits it.

use std::time::Duration;

use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{Store, StoreError, millis};
use crate::job::JobId;

/// What an audit is about.
#[derive(Debug, Clone)]
pub struct Audit {
    /// How far back from `before`, by the database's clock.
    pub since: Duration,
    /// Only what happened before this time; none: until now.
    pub before: Option<String>,
    /// Only of this queue.
    pub queue: Option<String>,
    /// Only of this handler.
    pub handler: Option<String>,
    /// Only what this login has done.
    pub who: Option<String>,
    /// At most so many rows.
    pub most: i32,
}

impl Store {
    /// What has happened, the newest first: rows of `rouse.audit`. None where the login may not see it.
    pub async fn audit(&self, audit: &Audit) -> Result<Option<Vec<Value>>, StoreError> {
        let asked = self
            .query(
                include_str!("audit.sql"),
                &[
                    (&millis(audit.since), Type::INT8),
                    (&audit.before, Type::TEXT),
                    (&audit.queue, Type::TEXT),
                    (&audit.handler, Type::TEXT),
                    (&audit.who, Type::TEXT),
                    (&audit.most, Type::INT4),
                ],
            )
            .await;
        Ok(allowed(asked)?.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }

    /// What has happened to one job, the oldest first; empty where there is no such job (any more). None where the login may not see it.
    pub async fn audit_job(&self, id: JobId) -> Result<Option<Vec<Value>>, StoreError> {
        let asked = self
            .query(include_str!("audit_job.sql"), &[(&id.0, Type::INT8)])
            .await;
        Ok(allowed(asked)?.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }
}
