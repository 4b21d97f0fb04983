//! Reads the audit trail.

use std::time::Duration;

use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::json::shown_rows;
use super::{Store, StoreError, millis};
use crate::job::JobId;

/// The selection of an audit.
#[derive(Debug, Clone)]
pub struct Audit {
    /// The time range before `before`, by the database's clock.
    pub since: Duration,
    /// Only events before this time; `None` means until now.
    pub before: Option<String>,
    /// Only for this queue.
    pub queue: Option<String>,
    /// Only for this handler.
    pub handler: Option<String>,
    /// Only actions of this login.
    pub who: Option<String>,
    /// The maximum number of rows.
    pub limit: i32,
}

impl Store {
    /// Events, newest first: rows of `rouse.audit`. `None` if the login may not read it.
    pub async fn audit(&self, audit: &Audit) -> Result<Option<Vec<Value>>, StoreError> {
        let result = self
            .read(
                include_str!("audit.sql"),
                &[
                    (&millis(audit.since), Type::INT8),
                    (&audit.before, Type::TEXT),
                    (&audit.queue, Type::TEXT),
                    (&audit.handler, Type::TEXT),
                    (&audit.who, Type::TEXT),
                    (&audit.limit, Type::INT4),
                ],
            )
            .await;
        Ok(allowed(result)?.map(|rows| shown_rows(&rows)))
    }

    /// Admin actions, newest first: `at`, `event`, `job`, `queue`, `handler`, `by`, `detail`. `since`: the time range
    /// before `before`, which is a time of the database (`None`: now); `who`: only this login, or this reader of the
    /// dashboard; `queue`: only actions on this queue. `None` if the login may not read it.
    pub async fn admin_records(
        &self,
        since: Duration,
        before: Option<&str>,
        (who, queue): (Option<&str>, Option<&str>),
        limit: i32,
    ) -> Result<Option<Vec<Value>>, StoreError> {
        let result = self
            .read(
                include_str!("admin_records.sql"),
                &[
                    (&millis(since), Type::INT8),
                    (&before, Type::TEXT),
                    (&who, Type::TEXT),
                    (&limit, Type::INT4),
                    (&queue, Type::TEXT),
                ],
            )
            .await;
        Ok(allowed(result)?.map(|rows| shown_rows(&rows)))
    }

    /// The events of one job, oldest first; empty if the job does not exist or is no longer kept. `None` if the login
    /// may not read it.
    pub async fn audit_job(&self, id: JobId) -> Result<Option<Vec<Value>>, StoreError> {
        let result = self
            .read(include_str!("audit_job.sql"), &[(&id.0, Type::INT8)])
            .await;
        Ok(allowed(result)?.map(|rows| shown_rows(&rows)))
    }
}
