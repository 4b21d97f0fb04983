//! Reads the audit trail.

use std::time::Duration;

use serde_json::Value;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::json::{ShownJson, shown_rows};
use super::{Store, StoreError, millis};
use crate::job::JobId;

/// The maximum number of admin actions that a page examines. A filter with few matches does not read more.
const ACTIONS_EXAMINED_MAX: i32 = 10_000;

/// The events that an audit lists.
#[derive(Debug, Clone)]
pub struct Audit {
    /// The length of the time range that ends at `before`, by the database's clock.
    pub since: Duration,
    /// Only events before this time; `None` means until now.
    pub before: Option<String>,
    /// The key of an event at that time: those at the same time that follow it are listed too.
    pub before_key: Option<String>,
    /// Only for this queue.
    pub queue: Option<String>,
    /// Only for this handler.
    pub handler: Option<String>,
    /// Only actions of this login or user of the dashboard.
    pub who: Option<String>,
    /// The maximum number of rows.
    pub limit: i32,
}

/// A page of admin actions.
#[derive(Debug)]
pub struct AdminRecords {
    /// The newest first: `at`, `id`, `event`, `job`, `queue`, `handler`, `by`, `detail`.
    pub actions: Vec<Value>,
    /// The time and the id of the action after which the next page starts, because this page is full, or because it has
    /// examined as many actions as it may. `None`: there are no more in the time range.
    pub next: Option<(String, i64)>,
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
                    (&audit.before_key, Type::TEXT),
                ],
            )
            .await;
        Ok(allowed(result)?.map(|rows| shown_rows(&rows)))
    }

    /// A page of admin actions. `since`: the length of the time range that ends at `before`, a time of the database
    /// (`None`: now); `after`: the id of the action at that time after which the page starts; `who`: only this login,
    /// or this user of the dashboard; `queue`: only actions on this queue. `None` if the login may not read them.
    pub async fn admin_records(
        &self,
        since: Duration,
        (before, after): (Option<&str>, Option<i64>),
        (who, queue): (Option<&str>, Option<&str>),
        limit: i32,
    ) -> Result<Option<AdminRecords>, StoreError> {
        let result = self
            .read(
                include_str!("admin_records.sql"),
                &[
                    (&millis(since), Type::INT8),
                    (&before, Type::TEXT),
                    (&who, Type::TEXT),
                    (&limit, Type::INT4),
                    (&queue, Type::TEXT),
                    (&ACTIONS_EXAMINED_MAX, Type::INT4),
                    (&after, Type::INT8),
                ],
            )
            .await;
        let Some(rows) = allowed(result)? else {
            return Ok(None);
        };
        let actions = rows
            .iter()
            .filter_map(|row| row.get::<_, Option<ShownJson>>(0));
        let actions: Vec<Value> = actions.map(|ShownJson(action)| action).collect();
        let examined_to = rows.first().and_then(|row| row.get::<_, Option<Value>>(1));
        let is_full = i32::try_from(actions.len()).is_ok_and(|count| count >= limit);
        let last = actions.last().filter(|_| is_full).or(examined_to.as_ref());
        let next = last.and_then(|row| Some((row["at"].as_str()?.to_owned(), row["id"].as_i64()?)));
        Ok(Some(AdminRecords { actions, next }))
    }

    /// The events of one job, oldest first; empty if the job does not exist or is no longer kept. `None` if the login
    /// may not read them.
    pub async fn audit_job(&self, id: JobId) -> Result<Option<Vec<Value>>, StoreError> {
        let result = self
            .read(include_str!("audit_job.sql"), &[(&id.0, Type::INT8)])
            .await;
        Ok(allowed(result)?.map(|rows| shown_rows(&rows)))
    }
}
