//! Settles attempts in batches, behind their fences.

use std::borrow::{Borrow, Cow};
use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use postgres_types::ToSql;
use tokio_postgres::types::Type;

use super::json::CowJson;
use super::{Store, StoreError, count, micros, millis};
use crate::job::{
    AttemptError, Fence, JobId, JsonText, NewJob, NewJobKind, Outcome, RetryAt, State, Usage,
};

/// The end of one attempt, as it is written to the database.
#[derive(Debug, Clone)]
pub struct Settlement {
    /// The job.
    pub id: JobId,
    /// The fence of its claim.
    pub fence: Fence,
    /// The time from the arrival of the claim to the actual start. `None` if the attempt never started.
    pub started_after: Option<Duration>,
    /// The usage of the attempt, and the module. `None` if it ended before its payload was checked.
    pub guest_run: Option<GuestRun>,
    /// The handler that ran, if the job names another one.
    pub handler: Option<String>,
    /// The outcome.
    pub outcome: Outcome,
    /// The jobs that the attempt enqueues: its children and the next job of its chain if it has succeeded, its calls if
    /// it is suspended.
    pub jobs: Vec<NewJob>,
    /// The trace context of these jobs, a `traceparent`.
    pub trace: Option<String>,
}

impl Settlement {
    /// Replaces the outcome. The jobs are dropped if the new outcome does not enqueue them: Postgres checks them
    /// regardless of the outcome, and might otherwise refuse the new outcome, too.
    pub fn replace(&mut self, outcome: Outcome) {
        if !outcome.enqueues() {
            self.jobs.clear();
            self.trace = None;
        }
        self.outcome = outcome;
    }
}

/// The guest that ran, or that did not run because the payload does not match its schema.
#[derive(Debug, Clone, Copy)]
pub struct GuestRun {
    /// The resources that it used.
    pub usage: Usage,
    /// The SHA-256 of the module's file.
    pub digest: [u8; 32],
}

/// The treatment of a job that another transaction has locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locked {
    /// Wait for up to 250 ms; after that, the whole call fails with `lock_not_available`.
    Wait,
    /// Skip it and report it. Each row is read once more for this.
    Skip,
}

/// The result of a batch. A job in neither set has lost its lease.
#[derive(Debug, Default)]
pub struct SettleResult {
    /// Settled.
    pub accepted: HashSet<JobId>,
    /// Skipped because another transaction has locked the job.
    pub locked: HashSet<JobId>,
    /// Some jobs that wait for these are not released yet: [`Store::continue_releases`] releases them.
    pub has_releases: bool,
}

impl Store {
    /// Settles a batch in one statement and one commit. It is atomic: after an error, no job is settled.
    pub async fn settle<S: Borrow<Settlement>>(
        &self,
        batch: &[S],
        locked: Locked,
    ) -> Result<SettleResult, StoreError> {
        let (worker, lists) = (self.identity()?, self.lists().await?);
        let jobs: Vec<NewJobRecord<'_>> =
            batch.iter().flat_map(|it| new_jobs(it.borrow())).collect();
        let batch: Vec<SettlementRecord<'_>> =
            batch.iter().map(|item| item.borrow().into()).collect();
        let rows = self
            .query_with_records(
                include_str!("settle.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&batch, lists.array_type("settlement")),
                    (&jobs, lists.array_type("new_job")),
                    (&(locked == Locked::Skip), Type::BOOL),
                ],
            )
            .await?;
        let mut settled = SettleResult::default();
        for row in &rows {
            let Some(id) = row.get::<_, Option<i64>>(0).map(JobId) else {
                settled.has_releases = true;
                continue;
            };
            if row.get(1) {
                settled.locked.insert(id);
            } else {
                settled.accepted.insert(id);
            }
        }
        Ok(settled)
    }
}

/// A job that an attempt enqueues, as `rouse.settle` takes it.
#[derive(Debug, ToSql)]
#[postgres(name = "new_job")]
pub(super) struct NewJobRecord<'a> {
    parent: i64,
    kind: &'static str,
    step: Option<&'a str>,
    handler: &'a str,
    payload: &'a JsonText,
    options: Option<&'a JsonText>,
    trace: Option<&'a str>,
}

pub(super) fn new_jobs(settlement: &Settlement) -> impl Iterator<Item = NewJobRecord<'_>> {
    settlement.jobs.iter().map(|job| NewJobRecord {
        parent: settlement.id.0,
        kind: job.kind.as_str(),
        step: match &job.kind {
            NewJobKind::Call { step } => Some(step),
            NewJobKind::Child | NewJobKind::Next => None,
        },
        handler: &job.handler,
        payload: &job.payload,
        options: job.options.as_ref(),
        trace: settlement.trace.as_deref(),
    })
}

/// The record that `rouse.settle` takes.
#[derive(Debug, Default, ToSql)]
#[postgres(name = "settlement")]
pub(super) struct SettlementRecord<'a> {
    id: i64,
    fence: i64,
    state: &'static str,
    started_us: Option<i64>,
    result: Option<CowJson<'a>>,
    error: Option<JsonText>,
    delay_ms: Option<i64>,
    retry_at: Option<SystemTime>,
    next_memory_bytes: Option<i64>,
    cpu_us: Option<i64>,
    memory_peak_bytes: Option<i64>,
    host_calls: Option<i32>,
    bytes_in: Option<i64>,
    bytes_out: Option<i64>,
    digest: Option<&'a [u8]>,
    handler: Option<&'a str>,
}

impl<'a> From<&'a Settlement> for SettlementRecord<'a> {
    fn from(settlement: &'a Settlement) -> Self {
        let mut record = Self {
            id: settlement.id.0,
            fence: settlement.fence.0,
            started_us: settlement.started_after.map(micros),
            handler: settlement.handler.as_deref(),
            ..Self::default()
        };
        let json = |error: &AttemptError| Some(JsonText(error.to_json()));
        match &settlement.outcome {
            Outcome::Succeeded(result) => {
                record.state = State::Succeeded.as_str();
                record.result = Some(CowJson(Cow::Borrowed(result)));
            }
            Outcome::Failed(error) => {
                record.state = State::Failed.as_str();
                record.error = json(error);
            }
            Outcome::TimedOut(error) => {
                record.state = State::TimedOut.as_str();
                record.error = json(error);
            }
            Outcome::Retry { again, error } => {
                record.state = State::Queued.as_str();
                record.error = json(error);
                record.next_memory_bytes = again.memory_bytes.map(count);
                match again.at {
                    RetryAt::After(delay) => record.delay_ms = Some(millis(delay)),
                    RetryAt::Time(time) => record.retry_at = Some(time),
                }
            }
            Outcome::Suspended(suspension) => {
                record.state = State::Queued.as_str();
                record.result = Some(CowJson(Cow::Owned(suspension.to_json())));
                record.retry_at = suspension.until();
            }
            Outcome::Released => record.state = State::Queued.as_str(),
        }
        if let Some(run) = &settlement.guest_run {
            record.cpu_us = Some(micros(run.usage.cpu));
            record.memory_peak_bytes = Some(count(run.usage.memory_bytes_peak));
            record.host_calls = Some(i32::try_from(run.usage.host_calls).unwrap_or(i32::MAX));
            record.bytes_in = Some(count(run.usage.bytes_in));
            record.bytes_out = Some(count(run.usage.bytes_out));
            record.digest = Some(&run.digest);
        }
        record
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::ErrorKind;

    #[test]
    fn an_outcome_that_replaces_a_success_does_not_enqueue_jobs() {
        let success = Settlement {
            id: JobId(1),
            fence: Fence(1),
            started_after: None,
            guest_run: None,
            handler: None,
            outcome: Outcome::Succeeded(JsonText("1".into())),
            jobs: vec![NewJob {
                handler: "mail".into(),
                payload: JsonText("1".into()),
                options: None,
                kind: NewJobKind::Child,
            }],
            trace: Some("00-1-1-01".into()),
        };
        let error = || AttemptError::new(ErrorKind::EffectFailed, "no");
        for outcome in [
            Outcome::Released,
            Outcome::Failed(error()),
            Outcome::TimedOut(error()),
            Outcome::Retry {
                again: Duration::ZERO.into(),
                error: error(),
            },
        ] {
            let mut one = success.clone();
            one.replace(outcome);
            assert!(one.jobs.is_empty() && one.trace.is_none(), "{one:?}");
        }
        let mut one = success;
        one.replace(Outcome::Succeeded(JsonText("2".into())));
        assert_eq!(one.jobs.len(), 1);
        assert!(one.trace.is_some());
    }
}
