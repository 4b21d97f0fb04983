//! Signals, calls and parents of a running job, behind its fence.

use std::collections::HashMap;
use std::time::SystemTime;

use tokio_postgres::Row;
use tokio_postgres::types::Type;

use super::steps::check_held;
use super::{LostJob, Store, StoreError};
use crate::job::{Fence, JobId, JsonText, ParentEnd, ReturnedCall};

/// Ends of chains that a job has waited for.
#[derive(Debug)]
pub struct ParentEnds {
    /// The ends, by name.
    pub ends: Vec<ParentEnd>,
    /// The names of the ends that follow and were not read. There may be more after them.
    pub next: Vec<String>,
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
    ) -> Result<Result<Option<Vec<u8>>, LostJob>, StoreError> {
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
        match check_held(&rows).map(<[Row]>::first) {
            Ok(None) => Ok(Ok(None)),
            Ok(Some(row)) => match row.get::<_, Option<String>>(1) {
                Some(result) => Ok(Ok(Some(result.into_bytes()))),
                // The result is large, so it is read separately.
                None => self.recorded_step(id, fence, step).await,
            },
            Err(lost) => Ok(Err(lost)),
        }
    }

    /// The ends of the calls of these steps, recorded as their results. Fails if these are larger than `bytes_max`
    /// bytes. Large ones are read by further statements, which do not lock anything.
    pub async fn returned_calls(
        &self,
        id: JobId,
        fence: Fence,
        steps: &[String],
        bytes_max: usize,
    ) -> Result<Result<HashMap<String, ReturnedCall>, LostJob>, StoreError> {
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
        let rows = match check_held(&rows) {
            Ok(rows) => rows,
            Err(lost) => return Ok(Err(lost)),
        };
        let mut calls = HashMap::new();
        let mut large = Vec::new();
        for row in rows {
            let (result, job): (Option<String>, Option<i64>) = (row.get(2), row.get(3));
            let end = match (job, result) {
                (Some(job), _) => ReturnedCall::Pending(JobId(job)),
                (None, Some(result)) => ReturnedCall::Done(result.into_bytes()),
                (None, None) => {
                    large.push(row.get::<_, &str>(1));
                    continue;
                }
            };
            calls.insert(row.get(1), end);
        }
        while !large.is_empty() {
            let results = match self.recorded_results(id, fence, &large).await? {
                // Recorded steps are kept longer than their job, so the job no longer exists either.
                Ok(results) if results.is_empty() => return Ok(Err(LostJob::read("not_found"))),
                Ok(results) => results,
                Err(lost) => return Ok(Err(lost)),
            };
            for (step, result) in results {
                calls.insert(step, ReturnedCall::Done(result));
            }
            large.retain(|step| !calls.contains_key(*step));
        }
        Ok(Ok(calls))
    }

    /// Some of the ends of the chains that the job has waited for, by name: the first of those with these `names`, or,
    /// if there are none, of those after the name `after`.
    pub async fn parent_ends(
        &self,
        id: JobId,
        fence: Fence,
        after: Option<&str>,
        names: &[String],
    ) -> Result<Result<ParentEnds, LostJob>, StoreError> {
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
                    (&names, Type::TEXT_ARRAY),
                ],
            )
            .await?;
        let parent = |row: &Row| ParentEnd {
            name: row.get(1),
            job: row.get::<_, Option<i64>>(2).map(JobId),
            state: row.get(3),
            output: row.get::<_, Option<JsonText>>(4),
        };
        Ok(check_held(&rows).map(|rows| {
            let read = rows.partition_point(|row| row.get(5));
            let (read, next) = rows.split_at(read);
            ParentEnds {
                ends: read.iter().map(parent).collect(),
                next: next.iter().map(|row| row.get(1)).collect(),
            }
        }))
    }
}
