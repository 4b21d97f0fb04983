//! Signals, calls and parents of a running job, behind its fence.

use std::collections::HashMap;
use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::{NotMine, Store, StoreError};
use crate::job::{Fence, JobId, JsonText, ParentEnd, ReturnedCall};

/// The rows of an answer, unless the first one says that the job is no longer this worker's.
fn mine(rows: &[Row]) -> Result<&[Row], NotMine> {
    let refusal = rows.first().and_then(|row| row.get::<_, Option<&str>>(0));
    refusal.map_or(Ok(rows), |reason| Err(NotMine::read(reason)))
}

impl Store {
    /// Takes the oldest signal with this name and records it as the result of the step; `{"timed_out": true}` if there
    /// is none at `until`. `None` if the job has to wait.
    pub async fn take_signal(
        &self,
        id: JobId,
        fence: Fence,
        step: &str,
        name: &str,
        until: Option<SystemTime>,
    ) -> Result<Result<Option<Vec<u8>>, NotMine>, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("take_signal.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&id.0, Type::INT8),
                    (&fence.0, Type::INT8),
                    (&step, Type::TEXT),
                    (&name, Type::TEXT),
                    (&until, Type::TIMESTAMPTZ),
                ],
            )
            .await?;
        match mine(&rows).map(<[Row]>::first) {
            Ok(None) => Ok(Ok(None)),
            Ok(Some(row)) => match row.get::<_, Option<String>>(1) {
                Some(result) => Ok(Ok(Some(result.into_bytes()))),
                // It is large.
                None => self.recorded_step(id, fence, step).await,
            },
            Err(not_mine) => Ok(Err(not_mine)),
        }
    }

    /// The ends of the calls of these steps, recorded as their results. Fails if these have more than `bytes_max` bytes.
    pub async fn returned_calls(
        &self,
        id: JobId,
        fence: Fence,
        steps: &[String],
        bytes_max: usize,
    ) -> Result<Result<HashMap<String, ReturnedCall>, NotMine>, StoreError> {
        let worker = self.identity()?;
        let bytes_max = i64::try_from(bytes_max).unwrap_or(i64::MAX);
        let rows = self
            .query(
                include_str!("returned_calls.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&id.0, Type::INT8),
                    (&fence.0, Type::INT8),
                    (&steps, Type::TEXT_ARRAY),
                    (&bytes_max, Type::INT8),
                ],
            )
            .await?;
        let rows = match mine(&rows) {
            Ok(rows) => rows,
            Err(not_mine) => return Ok(Err(not_mine)),
        };
        let mut calls = HashMap::new();
        for row in rows {
            let step: String = row.get(1);
            let (result, job): (Option<String>, Option<i64>) = (row.get(2), row.get(3));
            let end = match (job, result) {
                (Some(job), _) => ReturnedCall::Pending(JobId(job)),
                (None, Some(result)) => ReturnedCall::Done(result.into_bytes()),
                // It is large.
                (None, None) => match self.recorded_step(id, fence, &step).await? {
                    Ok(Some(result)) => ReturnedCall::Done(result),
                    // A step outlives its job.
                    Ok(None) => return Ok(Err(NotMine::read("not_found"))),
                    Err(not_mine) => return Ok(Err(not_mine)),
                },
            };
            calls.insert(step, end);
        }
        Ok(Ok(calls))
    }

    /// Some of the ends of the chains that the job has waited for, by name, after this name.
    pub async fn parent_ends(
        &self,
        id: JobId,
        fence: Fence,
        after: Option<&str>,
    ) -> Result<Result<Vec<ParentEnd>, NotMine>, StoreError> {
        let worker = self.identity()?;
        let rows = self
            .query(
                include_str!("parent_ends.sql"),
                &[
                    (&worker.incarnation.0, Type::INT8),
                    (&worker.key(), Type::BYTEA),
                    (&id.0, Type::INT8),
                    (&fence.0, Type::INT8),
                    (&after, Type::TEXT),
                ],
            )
            .await?;
        let parent = |row: &Row| ParentEnd {
            name: row.get(1),
            job: row.get::<_, Option<i64>>(2).map(JobId),
            state: row.get(3),
            output: row.get::<_, Option<JsonText>>(4),
        };
        Ok(mine(&rows).map(|rows| rows.iter().map(parent).collect()))
    }
}
