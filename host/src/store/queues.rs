//! Queues: their contents and settings, and admin actions on them.

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;
use serde_json::{Value, json};
use tokio_postgres::types::{Json, Type};

use super::fleet::allowed;
use super::{LockWait, Store, StoreError};
use crate::job::{Dispatch, FairCharge, FairKey, FairPolicy};

/// New settings of a fair queue, as in `rouse.set_fair_share`. `None` leaves a setting unchanged.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct NewFairShare {
    /// The order of jobs.
    pub policy: Option<FairPolicy>,
    /// The key by which its jobs are divided.
    pub key: Option<FairKey>,
    /// The number of jobs of a key of weight 1 in each round.
    pub quantum: Option<i32>,
    /// The weights of keys; replaces those that were set.
    pub weights: Option<BTreeMap<String, f64>>,
    /// The weight of all other keys.
    pub default_weight: Option<f64>,
    /// The wait, in seconds, after which jobs go first; 0 means never.
    pub starvation_s: Option<f64>,
    /// The maximum number of running jobs of a key, across all workers; 0 means no limit.
    pub max_in_flight: Option<i32>,
    /// The cost of a job for its key.
    pub charge: Option<FairCharge>,
}

/// Adds to each of these queues the numbers of its jobs. `backlog`: rows of [`Store::backlog`].
pub fn add_counts<'a>(queues: impl IntoIterator<Item = &'a mut Value>, backlog: &[Value]) {
    let mut rows: HashMap<&str, Vec<&Value>> = HashMap::new();
    for row in backlog {
        let queue = row["queue"].as_str().unwrap_or_default();
        rows.entry(queue).or_default().push(row);
    }
    for queue in queues {
        let name = queue["name"].as_str().unwrap_or_default();
        let rows = rows.get(name).map_or(&[][..], Vec::as_slice);
        add_sums(queue, rows);
    }
}

fn add_sums(queue: &mut Value, rows: &[&Value]) {
    for state in ["ready", "scheduled", "running"] {
        let jobs = rows.iter().filter_map(|row| row[state].as_i64());
        queue[state] = jobs.sum::<i64>().into();
    }
    queue["at_least"] = rows.iter().any(|row| row["at_least"] == true).into();
    let wait = |row: &&&Value| row["oldest_wait_s"].as_f64();
    let waiting = rows.iter().filter(|row| wait(row).is_some());
    let oldest = waiting.max_by(|left, right| {
        let [left, right] = [left, right].map(|row| wait(row).unwrap_or_default());
        left.total_cmp(&right)
    });
    for key in ["oldest_ready_at", "oldest_wait_s"] {
        queue[key] = oldest.map_or(Value::Null, |row| row[key].clone());
    }
}

/// Adds the keys of a queue, if it is fair. `keys`: the result of [`Store::fair_keys`].
pub fn add_keys(queue: &mut Value, keys: &HashMap<String, Value>) {
    if queue["scheduler"]["policy"] == "drr" {
        let name = queue["name"].as_str().unwrap_or_default();
        queue["scheduler"]["keys"] = keys.get(name).cloned().unwrap_or_else(|| json!([]));
    }
}

impl Store {
    /// The rows of the view `rouse.queues`, by name, with the state of fair queues and their keys.
    pub async fn queues(&self) -> Result<Vec<Value>, StoreError> {
        let mut queues = self.queue_settings().await?;
        let every: Option<&str> = None;
        let sql = include_str!("backlog.sql");
        let backlog = self.read(sql, &[(&every, Type::TEXT)]).await?;
        let backlog: Vec<Value> = backlog.iter().map(|row| row.get(0)).collect();
        add_counts(&mut queues, &backlog);
        let keys = self.fair_keys().await?;
        for queue in &mut queues {
            add_keys(queue, &keys);
        }
        Ok(queues)
    }

    /// The rows of the view `rouse.queue_settings`, by name, with the state of fair queues. Counts no jobs.
    pub async fn queue_settings(&self) -> Result<Vec<Value>, StoreError> {
        let sql = include_str!("queue_settings.sql");
        let rows = self.read(sql, &[]).await?;
        Ok(rows.iter().map(|row| row.get(0)).collect())
    }

    /// The keys of all fair queues that have any, by queue.
    pub async fn fair_keys(&self) -> Result<HashMap<String, Value>, StoreError> {
        let rows = self.read(include_str!("fair_keys.sql"), &[]).await?;
        Ok(rows.iter().map(|row| (row.get(0), row.get(1))).collect())
    }

    /// The queues into which jobs were enqueued; `None` if this login may not read them.
    pub async fn used_queues(&self) -> Result<Option<Vec<String>>, StoreError> {
        self.names("SELECT DISTINCT queue FROM rouse.lane").await
    }

    /// The handlers for which jobs were enqueued; `None` if this login may not read them.
    pub async fn used_handlers(&self) -> Result<Option<Vec<String>>, StoreError> {
        self.names("SELECT DISTINCT handler FROM rouse.lane").await
    }

    /// A column of strings. `None` if this login may not read it.
    pub(super) async fn names(&self, sql: &str) -> Result<Option<Vec<String>>, StoreError> {
        let rows = allowed(self.read(sql, &[]).await)?;
        Ok(rows.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }

    /// Pauses a queue; returns when it was paused, as text.
    pub async fn pause_queue(&self, queue: &str) -> Result<String, StoreError> {
        let call = "to_jsonb(rouse.pause_queue($1)) #>> '{}'";
        let row = self.act(call, &[(&queue, Type::TEXT)]).await?;
        Ok(row.get(0))
    }

    /// Resumes a queue; true if it was paused.
    pub async fn resume_queue(&self, queue: &str) -> Result<bool, StoreError> {
        let call = "rouse.resume_queue($1)";
        let row = self.act(call, &[(&queue, Type::TEXT)]).await?;
        Ok(row.get(0))
    }

    /// Sets the number of days for which finished jobs of a queue are kept, and the number for jobs that failed or
    /// timed out: `None` leaves a setting unchanged, 0 resets it to the default retention. Returns the current
    /// settings; `None` means the default retention.
    pub async fn set_retention(
        &self,
        queue: &str,
        keep_days: Option<i32>,
        keep_failed_days: Option<i32>,
    ) -> Result<(Option<i32>, Option<i32>), StoreError> {
        let row = self
            .act(
                "SELECT ARRAY[keep_days, keep_failed_days] FROM rouse.set_retention($1, $2, $3)",
                &[
                    (&queue, Type::TEXT),
                    (&keep_days, Type::INT4),
                    (&keep_failed_days, Type::INT4),
                ],
            )
            .await?;
        let kept: Vec<Option<i32>> = row.get(0);
        Ok((kept[0], kept[1]))
    }

    /// Sets the maximum size of the payloads of a queue.
    pub async fn set_payload_limit(&self, queue: &str, bytes_max: i32) -> Result<(), StoreError> {
        self.act(
            "rouse.set_payload_limit($1, $2)",
            &[(&queue, Type::TEXT), (&bytes_max, Type::INT4)],
        )
        .await?;
        Ok(())
    }

    /// The number of days for which finished jobs are kept if their queue has no retention of its own.
    pub async fn default_retention(&self) -> Result<Option<i32>, StoreError> {
        let sql = "SELECT keep_days::integer FROM rouse.limits";
        let rows = self.query(sql, &[]).await?;
        Ok(rows.first().map(|row| row.get(0)))
    }

    /// Sets the number of days for which finished jobs are kept if their queue has no retention of its own. Returns the
    /// previous number.
    pub async fn set_default_retention(&self, keep_days: i32) -> Result<i32, StoreError> {
        let call = "rouse.set_default_retention($1)";
        let row = self.act(call, &[(&keep_days, Type::INT4)]).await?;
        Ok(row.get(0))
    }

    /// Sets the fair share of a queue: `None` leaves a setting unchanged. Returns the settings in force.
    pub async fn set_fair_share(
        &self,
        queue: &str,
        new: &NewFairShare,
    ) -> Result<Value, StoreError> {
        let row = self
            .act(
                include_str!("set_fair_share.sql"),
                &[(&queue, Type::TEXT), (&Json(new), Type::JSONB)],
            )
            .await?;
        Ok(row.get(0))
    }

    /// Sets how workers are chosen for the jobs of a queue: `None` leaves a setting unchanged. Returns the settings in
    /// force.
    pub async fn set_dispatch(
        &self,
        queue: &str,
        dispatch: Option<Dispatch>,
        key: Option<&[String]>,
    ) -> Result<Value, StoreError> {
        let row = self
            .act(
                include_str!("set_dispatch.sql"),
                &[
                    (&queue, Type::TEXT),
                    (&Json(dispatch), Type::JSONB),
                    (&key, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        Ok(row.get(0))
    }

    /// Sets the fair share of a queue from the settings of a worker.
    pub async fn declare_fair_share(
        &self,
        queue: &str,
        new: &NewFairShare,
    ) -> Result<(), StoreError> {
        let worker = self.identity()?;
        self.query(
            include_str!("declare_fair_share.sql"),
            &[
                (&queue, Type::TEXT),
                (&Json(new), Type::JSONB),
                (&worker.incarnation.0, Type::INT8),
                (&worker.key(), Type::BYTEA),
            ],
        )
        .await?;
        Ok(())
    }

    /// Cancels up to `limit` ready jobs; returns how many. Part of a bulk change.
    pub async fn purge_queue(&self, queue: &str, limit: i32) -> Result<i32, StoreError> {
        let row = self
            .act_in_bulk(
                LockWait::start(),
                "rouse.purge_queue($1, $2)",
                "",
                &[(&queue, Type::TEXT), (&limit, Type::INT4)],
            )
            .await?;
        Ok(row.expect("the statement returns one row").get(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_jobs_of_a_queue_are_those_of_its_rows_in_the_backlog() {
        let row = |queue: &str, ready: i64, wait: Value| {
            json!({"queue": queue, "ready": ready, "scheduled": 1, "running": 2, "at_least": ready > 9,
                   "oldest_ready_at": wait.as_f64().map(|wait| format!("{wait} ago")), "oldest_wait_s": wait})
        };
        let backlog = [
            row("mail", 3, json!(1.5)),
            row("sms", 10, json!(9)),
            row("mail", 4, json!(2.25)),
            row("mail", 0, Value::Null),
        ];
        let mut queues = ["idle", "mail", "sms"].map(|name| json!({"name": name}));
        add_counts(&mut queues, &backlog);
        assert_eq!(
            queues[0],
            json!({"name": "idle", "ready": 0, "scheduled": 0, "running": 0, "at_least": false,
                   "oldest_ready_at": null, "oldest_wait_s": null})
        );
        assert_eq!(
            queues[1],
            json!({"name": "mail", "ready": 7, "scheduled": 3, "running": 6, "at_least": false,
                   "oldest_ready_at": "2.25 ago", "oldest_wait_s": 2.25})
        );
        assert_eq!(queues[2]["at_least"], true);
    }
}
