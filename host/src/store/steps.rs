//! Results of steps, recorded behind the fence.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::{FromSql, Type};

use super::{Store, StoreError};
use crate::job::{AbortReason, Fence, JobId, RecordedStep, RecordedWait, WaitKind};

/// The job no longer belongs to this worker, for this reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostJob(pub AbortReason);

impl LostJob {
    pub(super) fn read(reason: &str) -> Self {
        Self(AbortReason::parse(reason).unwrap_or(AbortReason::Error))
    }
}

/// The recorded steps of a job that have been read.
#[derive(Debug, Clone, Default)]
pub struct RecordedSteps {
    /// The steps by name, with their results if they are small.
    pub steps: Arc<HashMap<String, RecordedStep>>,
    /// The time of the newest row.
    until: Option<SystemTime>,
    /// Identifies the versions of the rows.
    versions: i64,
}

/// The rows of a response, unless the first one shows that the job no longer belongs to this worker.
pub(super) fn check_held(rows: &[Row]) -> Result<&[Row], LostJob> {
    let refusal = rows.first().and_then(|row| row.get::<_, Option<&str>>(0));
    refusal.map_or(Ok(rows), |reason| Err(LostJob::read(reason)))
}

impl Store {
    /// The recorded steps of each of these jobs, which this worker has claimed. `known`: those of the same jobs that it
    /// has read before, if any; only newer ones are read. They are read again if any were removed or changed since.
    pub async fn recorded_steps(
        &self,
        jobs: &[(JobId, Fence)],
        mut known: Vec<RecordedSteps>,
    ) -> Result<Vec<Result<RecordedSteps, LostJob>>, StoreError> {
        known.resize_with(jobs.len(), RecordedSteps::default);
        let mut refused = HashMap::new();
        let mut requested: Vec<usize> = (0..jobs.len()).collect();
        // Nothing is known in the second round, so there is no third one.
        while !requested.is_empty() {
            let rows = self.read_steps(jobs, &known, &requested).await?;
            let mut again = Vec::new();
            for row in &rows {
                let position = usize::try_from(row.get::<_, i64>(0) - 1).ok();
                let Some(index) = position.and_then(|position| requested.get(position).copied())
                else {
                    continue;
                };
                if let Some(reason) = row.get::<_, Option<&str>>(1) {
                    refused.insert(index, LostJob::read(reason));
                } else if !known[index].add(row) {
                    known[index] = RecordedSteps::default();
                    again.push(index);
                }
            }
            requested = again;
        }
        let steps = known.into_iter().enumerate();
        Ok(steps
            .map(|(index, steps)| refused.remove(&index).map_or(Ok(steps), Err))
            .collect())
    }

    /// For some of the jobs, the steps that are newer than the known ones.
    async fn read_steps(
        &self,
        jobs: &[(JobId, Fence)],
        known: &[RecordedSteps],
        requested: &[usize],
    ) -> Result<Vec<Row>, StoreError> {
        let worker = self.identity()?;
        let ids: Vec<i64> = requested.iter().map(|index| jobs[*index].0.0).collect();
        let fences: Vec<i64> = requested.iter().map(|index| jobs[*index].1.0).collect();
        let until: Vec<Option<SystemTime>> =
            requested.iter().map(|index| known[*index].until).collect();
        self.query(
            include_str!("recorded_steps.sql"),
            &[
                (&worker.incarnation.0, Type::INT8),
                (&worker.key(), Type::BYTEA),
                (&ids, Type::INT8_ARRAY),
                (&fences, Type::INT8_ARRAY),
                (&until, Type::TIMESTAMPTZ_ARRAY),
            ],
        )
        .await
    }

    /// The result of one step, as JSON; `None` if it is not recorded.
    pub async fn recorded_step(
        &self,
        id: JobId,
        fence: Fence,
        step: &str,
    ) -> Result<Result<Option<Vec<u8>>, LostJob>, StoreError> {
        let results = self.recorded_results(id, fence, &[step]).await?;
        Ok(results.map(|mut results| results.remove(step)))
    }

    /// The results of these steps by name, as JSON: of the first ones that are recorded, as many as fit into one
    /// response, and at least one.
    pub(super) async fn recorded_results(
        &self,
        id: JobId,
        fence: Fence,
        steps: &[&str],
    ) -> Result<Result<HashMap<String, Vec<u8>>, LostJob>, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("recorded_results.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&id.0, Type::INT8),
                    (&fence.0, Type::INT8),
                    (&steps, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        let read = |row: &Row| {
            let (name, result): (String, String) = (row.get(1), row.get(2));
            (name, result.into_bytes())
        };
        Ok(check_held(&rows).map(|rows| rows.iter().map(read).collect()))
    }

    /// Records the result of a step, as JSON, for a job that this worker has claimed. It is committed when this
    /// returns. Recording the same step again changes nothing.
    pub async fn record_step(
        &self,
        id: JobId,
        fence: Fence,
        step: &str,
        output: &str,
    ) -> Result<Result<(), LostJob>, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("record_step.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&id.0, Type::INT8),
                    (&fence.0, Type::INT8),
                    (&step, Type::TEXT),
                    (&output, Type::TEXT),
                ],
            )
            .await?;
        let refusal: Option<&str> = rows.first().and_then(|row| row.get(0));
        Ok(refusal.map_or(Ok(()), |reason| Err(LostJob::read(reason))))
    }
}

impl RecordedSteps {
    /// Adds the newer steps in a row of `recorded_steps.sql`. False if those that were read before have changed.
    fn add(&mut self, row: &Row) -> bool {
        let (known, added): (i64, i64) = (row.get(2), row.get(3));
        if known != self.versions {
            return false;
        }
        let columns = array::<String>(row, 4)
            .into_iter()
            .zip(array(row, 5))
            .zip(array(row, 6))
            .zip(array(row, 7))
            .zip(array(row, 8))
            .zip(array(row, 9));
        let mut newer: Vec<(SystemTime, String, RecordedStep)> = columns
            .map(|(((((name, bytes), result), kind), until_ms), at)| {
                (at, name, read_step(bytes, result, kind, until_ms))
            })
            .collect();
        newer.sort_by_key(|(at, ..)| *at);
        self.until = newer.last().map(|(at, ..)| *at).or(self.until);
        self.versions = known.wrapping_add(added);
        if newer.is_empty() {
            return true;
        }
        // The steps are copied only if an attempt that has lost its job is still reading them.
        let steps = Arc::make_mut(&mut self.steps);
        for (_, name, step) in newer {
            // A clock that was set back may have dated the end of a wait before its start.
            let is_done = matches!(steps.get(&name), Some(RecordedStep::Done { .. }));
            if !(is_done && matches!(step, RecordedStep::Waits(_))) {
                steps.insert(name, step);
            }
        }
        true
    }

    /// The approximate size in memory.
    pub fn bytes(&self) -> usize {
        let texts = self.steps.iter().map(|(name, step)| match step {
            RecordedStep::Done {
                result: Some(result),
                ..
            } => name.len() + result.len(),
            RecordedStep::Done { result: None, .. } | RecordedStep::Waits(_) => name.len(),
        });
        self.steps.capacity() * size_of::<(String, RecordedStep)>() + texts.sum::<usize>()
    }
}

/// An array of a row; null is an empty one.
fn array<'a, T: FromSql<'a>>(row: &'a Row, column: usize) -> Vec<T> {
    row.get::<_, Option<Vec<T>>>(column).unwrap_or_default()
}

/// A step as `recorded_steps.sql` returns it.
fn read_step(
    bytes: Option<i32>,
    result: Option<String>,
    kind: Option<&str>,
    until_ms: Option<i64>,
) -> RecordedStep {
    match bytes {
        Some(bytes) => RecordedStep::Done {
            bytes: usize::try_from(bytes).unwrap_or(0),
            result: result.map(String::into_bytes),
        },
        None => RecordedStep::Waits(RecordedWait {
            kind: kind.and_then(WaitKind::parse).unwrap_or(WaitKind::Sleep),
            until: until_ms
                .and_then(|ms| u64::try_from(ms).ok())
                .map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms)),
        }),
    }
}
