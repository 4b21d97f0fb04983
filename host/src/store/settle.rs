//! Settles attempts in batches, behind their fences.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use postgres_types::ToSql;
use tokio_postgres::types::Type;

use super::{JsonText, Store, StoreError, count, micros, millis};
use crate::job::{Again, Fence, JobId, RetryAt, State, Usage};

/// What is to become of one job.
#[derive(Debug, Clone)]
pub struct Settlement {
    /// The job.
    pub id: JobId,
    /// The number that its claim drew.
    pub fence: Fence,
    /// From the claim to the real start; none: it never started.
    pub started_after: Option<Duration>,
    /// What the attempt has used, and the SHA-256 of the module that ran; none: nothing ran.
    pub ran: Option<Ran>,
    /// The handler that ran, where that is not the one that the job names.
    pub handler: Option<String>,
    /// What is to become of it.
    pub fate: Fate,
}

/// What ran, and what it has used.
#[derive(Debug, Clone, Copy)]
pub struct Ran {
    /// What it has used.
    pub usage: Usage,
    /// The SHA-256 of the module's file.
    pub digest: [u8; 32],
}

/// What is to become of a job, in the words of the database.
#[derive(Debug, Clone)]
pub enum Fate {
    /// `succeeded`, with its result.
    Succeeded(JsonText),
    /// A final state without a result, with the error.
    Ended(State, JsonText),
    /// Back to `queued`, for a next attempt; the error is kept.
    Retry(Again, JsonText),
    /// Back to `queued` at once, as if the claim had never been made.
    Released,
}

/// What to do about a job that somebody else's transaction has locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Locked {
    /// Wait, for at most 250 ms; then the whole call fails with `lock_not_available`.
    Wait,
    /// Leave it out and say so. Costs a look at each row first.
    Skip,
}

/// What the database said of a batch. A job that is in neither set has lost its lease.
#[derive(Debug, Default)]
pub struct Settled {
    /// The job is what the settlement said.
    pub accepted: HashSet<JobId>,
    /// Left out, because somebody else's transaction has the job locked.
    pub locked: HashSet<JobId>,
}

impl Store {
    /// Settles a batch in one statement and one commit. All or nothing: an error has settled none.
    pub async fn settle<S: Borrow<Settlement>>(
        &self,
        batch: &[S],
        locked: Locked,
    ) -> Result<Settled, StoreError> {
        let (me, lists) = (self.me()?, self.lists().await?);
        let batch: Vec<SettlementRecord<'_>> =
            batch.iter().map(|one| one.borrow().into()).collect();
        let rows = self
            .query_with_records(
                include_str!("settle.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&batch, lists.of("settlement")),
                    (&(locked == Locked::Skip), Type::BOOL),
                ],
            )
            .await?;
        let mut settled = Settled::default();
        for row in &rows {
            let id = JobId(row.get(0));
            if row.get(1) {
                settled.locked.insert(id);
            } else {
                settled.accepted.insert(id);
            }
        }
        Ok(settled)
    }
}

/// As `rouse.settle` takes it.
#[derive(Debug, Default, ToSql)]
#[postgres(name = "settlement")]
struct SettlementRecord<'a> {
    id: i64,
    fence: i64,
    state: &'static str,
    started_us: Option<i64>,
    result: Option<&'a JsonText>,
    error: Option<&'a JsonText>,
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
    fn from(one: &'a Settlement) -> Self {
        let mut record = Self {
            id: one.id.0,
            fence: one.fence.0,
            started_us: one.started_after.map(micros),
            handler: one.handler.as_deref(),
            ..Self::default()
        };
        match &one.fate {
            Fate::Succeeded(result) => {
                record.state = State::Succeeded.as_str();
                record.result = Some(result);
            }
            Fate::Ended(state, error) => {
                record.state = state.as_str();
                record.error = Some(error);
            }
            Fate::Retry(again, error) => {
                record.state = State::Queued.as_str();
                record.error = Some(error);
                record.next_memory_bytes = again.memory_bytes.map(count);
                match again.at {
                    RetryAt::After(delay) => record.delay_ms = Some(millis(delay)),
                    RetryAt::Time(time) => record.retry_at = Some(time),
                }
            }
            Fate::Released => record.state = State::Queued.as_str(),
        }
        if let Some(ran) = &one.ran {
            record.cpu_us = Some(micros(ran.usage.cpu));
            record.memory_peak_bytes = Some(count(ran.usage.memory_bytes_peak));
            record.host_calls = Some(i32::try_from(ran.usage.host_calls).unwrap_or(i32::MAX));
            record.bytes_in = Some(count(ran.usage.bytes_in));
            record.bytes_out = Some(count(ran.usage.bytes_out));
            record.digest = Some(&ran.digest);
        }
        record
    }
}
