//! Reads one job, or one chain.

use std::collections::BTreeMap;

use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::types::Type;

use super::fleet::allowed;
use super::{JsonText, Store, StoreError};
use crate::job::JobId;

/// The maximum number of events on the page of a job.
const PAGE_EVENTS_MAX: i32 = 1_000;

/// A job or a chain, for display.
#[derive(Debug, Clone)]
pub struct JobView {
    /// Its state.
    pub state: String,
    /// The columns of the view `rouse.jobs`, and `history`, as Postgres wrote them. Postgres accepts numbers and
    /// nesting depths that [`Value`] cannot hold.
    pub text: String,
    /// The payload, as Postgres wrote it.
    pub payload: Option<String>,
    /// The result, as Postgres wrote it.
    pub result: Option<String>,
    /// All columns except payload and result. Values that [`Value`] cannot hold are strings here, which contain their
    /// JSON.
    pub record: Value,
}

impl JobView {
    fn new(state: String, text: String) -> Self {
        let mut fields: BTreeMap<String, Box<RawValue>> =
            serde_json::from_str(&text).unwrap_or_default();
        let mut take = |key: &str| {
            let raw = fields.remove(key)?;
            (raw.get() != "null").then(|| raw.get().to_owned())
        };
        let (payload, result) = (take("payload"), take("result"));
        let read = |(key, raw): (String, Box<RawValue>)| {
            let value = serde_json::from_str(raw.get());
            (key, value.unwrap_or_else(|_| raw.get().into()))
        };
        Self {
            state,
            payload,
            result,
            record: Value::Object(fields.into_iter().map(read).collect()),
            text,
        }
    }
}

impl Store {
    /// The time by the database's clock, in seconds since 1970, for computing the age of its timestamps.
    pub async fn now(&self) -> Result<f64, StoreError> {
        let rows = self
            .query("SELECT extract(epoch FROM clock_timestamp())::float8", &[])
            .await?;
        Ok(rows.first().map_or(0.0, |row| row.get(0)))
    }

    /// One job with its history, which has one event for all renewals of an attempt, with their number (`times`).
    /// `None` if the job does not exist or is no longer kept.
    pub async fn job(&self, id: JobId) -> Result<Option<JobView>, StoreError> {
        self.read_job(include_str!("read_merged.sql"), id).await
    }

    /// One job with all events of its history: a job that has run for long has thousands of renewals. `None` if the job
    /// does not exist or is no longer kept.
    pub async fn job_with_all_events(&self, id: JobId) -> Result<Option<JobView>, StoreError> {
        self.read_job(include_str!("read.sql"), id).await
    }

    async fn read_job(&self, sql: &str, id: JobId) -> Result<Option<JobView>, StoreError> {
        let rows = self.read(sql, &[(&id.0, Type::INT8)]).await?;
        Ok(rows.first().map(|row| {
            let JsonText(text) = row.get(1);
            JobView::new(row.get(0), text)
        }))
    }

    /// One job for its page, with the newest events of its history: a job may have a million. The field
    /// `has_older_events` is true if there are more. `None` if the job does not exist or is no longer kept.
    pub async fn job_page(&self, id: JobId) -> Result<Option<JobView>, StoreError> {
        let rows = self
            .read(
                include_str!("read_page.sql"),
                &[(&id.0, Type::INT8), (&PAGE_EVENTS_MAX, Type::INT4)],
            )
            .await?;
        Ok(rows.first().map(|row| {
            let JsonText(text) = row.get(1);
            JobView::new(row.get(0), text)
        }))
    }

    /// The reasons why this job has not started: rows of `rouse.why`; empty if the job does not exist or is no longer
    /// kept. `None` if the login may not read it.
    pub async fn why(&self, id: JobId) -> Result<Option<Vec<Value>>, StoreError> {
        let result = self
            .read(include_str!("why.sql"), &[(&id.0, Type::INT8)])
            .await;
        Ok(allowed(result)?.map(|rows| rows.iter().map(|row| row.get(0)).collect()))
    }

    /// The chain of this job, with its `jobs`: the rows of `rouse.chain`. State, result and error are those of its last
    /// job; the state is empty if only older jobs are kept. `None` if the job does not exist or is no longer kept.
    pub async fn chain(&self, id: JobId) -> Result<Option<JobView>, StoreError> {
        let rows = self
            .query(include_str!("chain.sql"), &[(&id.0, Type::INT8)])
            .await?;
        Ok(rows.first().map(|row| {
            let JsonText(text) = row.get(1);
            JobView::new(row.get(0), text)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_only_postgres_can_hold_are_shown_verbatim() {
        let deep = format!("{}1{}", "[".repeat(500), "]".repeat(500));
        let text = format!(
            r#"{{"id": 7, "payload": {{"cents": 12345678901234567890123456789}}, "result": {deep}, "error": {{"details": 1{}}}, "tenant": null}}"#,
            "0".repeat(400)
        );
        let job = JobView::new("failed".into(), text.clone());
        assert_eq!(
            job.payload.as_deref(),
            Some(r#"{"cents": 12345678901234567890123456789}"#)
        );
        assert_eq!(job.result, Some(deep));
        assert_eq!(
            (&job.record["id"], &job.record["tenant"]),
            (&7.into(), &Value::Null)
        );
        assert!(job.record["error"].is_string());
        assert_eq!(job.text, text);
    }
}
