//! Results of steps, recorded behind the fence.

use std::collections::HashMap;
use std::time::{Duration, SystemTime};

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{Store, StoreError};
use crate::job::{AbortReason, BegunWait, Fence, JobId, RecordedStep, WaitKind};

/// The job is no longer this worker's, for this reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotMine(pub AbortReason);

impl NotMine {
    pub(super) fn read(reason: &str) -> Self {
        Self(AbortReason::parse(reason).unwrap_or(AbortReason::Error))
    }
}

impl Store {
    /// The recorded steps of each of these jobs, which this worker has claimed, with their results if they are small.
    pub async fn recorded_steps(
        &self,
        jobs: &[(JobId, Fence)],
    ) -> Result<Vec<Result<HashMap<String, RecordedStep>, NotMine>>, StoreError> {
        let worker = self.identity()?;
        let (ids, fences): (Vec<i64>, Vec<i64>) =
            jobs.iter().map(|(id, fence)| (id.0, fence.0)).unzip();
        let rows = self
            .query(
                include_str!("recorded_steps.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&ids, Type::INT8_ARRAY),
                    (&fences, Type::INT8_ARRAY),
                ],
            )
            .await?;
        let mut answers = vec![Ok(HashMap::new()); jobs.len()];
        for row in &rows {
            let place = usize::try_from(row.get::<_, i64>(0) - 1).ok();
            let Some(answer) = place.and_then(|place| answers.get_mut(place)) else {
                continue;
            };
            if let Some(reason) = row.get::<_, Option<&str>>(1) {
                *answer = Err(NotMine::read(reason));
            } else if let (Ok(steps), Some(name)) = (answer, row.get::<_, Option<String>>(2)) {
                let step = read_step(row);
                // A clock that was set back may have dated the end of a wait before its start.
                let is_done = matches!(steps.get(&name), Some(RecordedStep::Done { .. }));
                if !(is_done && matches!(step, RecordedStep::Waits(_))) {
                    steps.insert(name, step);
                }
            }
        }
        Ok(answers)
    }

    /// The result of one step, JSON; `None` if it is not recorded.
    pub async fn recorded_step(
        &self,
        id: JobId,
        fence: Fence,
        step: &str,
    ) -> Result<Result<Option<Vec<u8>>, NotMine>, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("recorded_step.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&id.0, Type::INT8),
                    (&fence.0, Type::INT8),
                    (&step, Type::TEXT),
                ],
            )
            .await?;
        let Some(row) = rows.first() else {
            return Ok(Ok(None));
        };
        Ok(match row.get::<_, Option<&str>>(0) {
            Some(reason) => Err(NotMine::read(reason)),
            None => Ok(Some(row.get::<_, String>(1).into_bytes())),
        })
    }

    /// Records the result of a step, JSON, for a job that this worker has claimed. It is committed when this returns.
    /// Recording the same step again changes nothing.
    pub async fn record_step(
        &self,
        id: JobId,
        fence: Fence,
        step: &str,
        output: &str,
    ) -> Result<Result<(), NotMine>, StoreError> {
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
        Ok(refusal.map_or(Ok(()), |reason| Err(NotMine::read(reason))))
    }
}

/// A step in a row of `recorded_steps.sql`.
fn read_step(row: &Row) -> RecordedStep {
    let bytes: Option<i32> = row.get(3);
    let result: Option<String> = row.get(4);
    let kind: Option<&str> = row.get(5);
    let until_ms: Option<i64> = row.get(6);
    match bytes {
        Some(bytes) => RecordedStep::Done {
            bytes: usize::try_from(bytes).unwrap_or(0),
            result: result.map(String::into_bytes),
        },
        None => RecordedStep::Waits(BegunWait {
            kind: kind.and_then(WaitKind::parse).unwrap_or(WaitKind::Sleep),
            until: until_ms
                .and_then(|ms| u64::try_from(ms).ok())
                .map(|ms| SystemTime::UNIX_EPOCH + Duration::from_millis(ms)),
        }),
    }
}
