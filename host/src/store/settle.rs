//! Settles attempts in batches, behind their fences.

use std::borrow::Borrow;
use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use tokio_postgres::types::Type;

use super::{JsonText, Store, StoreError, micros, millis};
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
        let me = self.me()?;
        let mut ids = Vec::with_capacity(batch.len());
        let mut fences = Vec::with_capacity(batch.len());
        let mut states = Vec::with_capacity(batch.len());
        let mut started = Vec::with_capacity(batch.len());
        let mut results: Vec<Option<&JsonText>> = Vec::with_capacity(batch.len());
        let mut errors: Vec<Option<&JsonText>> = Vec::with_capacity(batch.len());
        let mut delays: Vec<Option<i64>> = Vec::with_capacity(batch.len());
        let mut times: Vec<Option<SystemTime>> = Vec::with_capacity(batch.len());
        let mut memory: Vec<Option<i64>> = Vec::with_capacity(batch.len());
        let mut used = UsageColumns::default();
        let handlers = || batch.iter().map(|one| one.borrow().handler.as_deref());
        // No list at all where there is none.
        let handlers: Option<Vec<Option<&str>>> = handlers()
            .any(|one| one.is_some())
            .then(|| handlers().collect());
        for one in batch.iter().map(Borrow::borrow) {
            used.push(one.ran.as_ref());
            ids.push(one.id.0);
            fences.push(one.fence.0);
            started.push(one.started_after.map(micros));
            let (state, result, error, again) = match &one.fate {
                Fate::Succeeded(result) => (State::Succeeded, Some(result), None, None),
                Fate::Ended(state, error) => (*state, None, Some(error), None),
                Fate::Retry(again, error) => (State::Queued, None, Some(error), Some(*again)),
                Fate::Released => (State::Queued, None, None, None),
            };
            let (delay, time) = match again.map(|again| again.at) {
                Some(RetryAt::After(delay)) => (Some(millis(delay)), None),
                Some(RetryAt::Time(time)) => (None, Some(time)),
                None => (None, None),
            };
            states.push(state.as_str());
            results.push(result);
            errors.push(error);
            delays.push(delay);
            times.push(time);
            memory.push(
                again
                    .and_then(|again| again.memory_bytes)
                    .map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX)),
            );
        }
        let rows = self
            .query(
                include_str!("settle.sql"),
                &[
                    (&me.incarnation.0, Type::INT8),
                    (&me.key(), Type::BYTEA),
                    (&ids, Type::INT8_ARRAY),
                    (&fences, Type::INT8_ARRAY),
                    (&states, Type::TEXT_ARRAY),
                    (&started, Type::INT8_ARRAY),
                    (&results, Type::JSONB_ARRAY),
                    (&errors, Type::JSONB_ARRAY),
                    (&delays, Type::INT8_ARRAY),
                    (&times, Type::TIMESTAMPTZ_ARRAY),
                    (&memory, Type::INT8_ARRAY),
                    (&(locked == Locked::Skip), Type::BOOL),
                    (&used.cpu_us, Type::INT8_ARRAY),
                    (&used.memory_peaks, Type::INT8_ARRAY),
                    (&used.host_calls, Type::INT4_ARRAY),
                    (&used.bytes_in, Type::INT8_ARRAY),
                    (&used.bytes_out, Type::INT8_ARRAY),
                    (&used.digests, Type::BYTEA_ARRAY),
                    (&handlers, Type::TEXT_ARRAY),
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

/// One list for each column.
#[derive(Default)]
struct UsageColumns<'a> {
    cpu_us: Vec<Option<i64>>,
    memory_peaks: Vec<Option<i64>>,
    host_calls: Vec<Option<i32>>,
    bytes_in: Vec<Option<i64>>,
    bytes_out: Vec<Option<i64>>,
    digests: Vec<Option<&'a [u8]>>,
}

impl<'a> UsageColumns<'a> {
    fn push(&mut self, ran: Option<&'a Ran>) {
        let usage = ran.map(|ran| ran.usage);
        let count =
            |of: fn(Usage) -> u64| usage.map(|usage| i64::try_from(of(usage)).unwrap_or(i64::MAX));
        self.cpu_us.push(usage.map(|usage| micros(usage.cpu)));
        self.memory_peaks
            .push(count(|usage| usage.memory_bytes_peak));
        self.host_calls
            .push(usage.map(|usage| i32::try_from(usage.host_calls).unwrap_or(i32::MAX)));
        self.bytes_in.push(count(|usage| usage.bytes_in));
        self.bytes_out.push(count(|usage| usage.bytes_out));
        self.digests.push(ran.map(|ran| ran.digest.as_slice()));
    }
}
