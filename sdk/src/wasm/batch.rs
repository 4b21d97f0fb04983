//! The imports for batches.

use std::time::SystemTime;

use super::bindings::rouse::handler::batch::{self, BatchError};
use super::{Failure, Imports, aborted, details};
use crate::host::Batch;
use crate::job::milliseconds;
use crate::{Error, JobInfo, Result};

impl Batch for Imports {
    fn batch(&self) -> Vec<(JobInfo, Vec<u8>)> {
        batch::jobs().into_iter().map(super::job_info).collect()
    }

    fn settle(&self, job: i64, outcome: Result<Vec<u8>>) -> Result<()> {
        let outcome = outcome.map_err(failure);
        batch::settle(job, outcome.as_deref()).map_err(|error| match error {
            BatchError::Aborted => aborted(),
            BatchError::Refused(why) => Error::retryable(why).kind("batch_refused"),
        })
    }
}

/// The error of one job of a batch. The contract has only a delay for its next attempt, so a time becomes a delay.
fn failure(error: Error) -> Failure {
    let wait = error.retry_at.map(|at| {
        let wait = at.duration_since(SystemTime::now());
        wait.unwrap_or_default()
    });
    let wait = error.retry_after.or(wait);
    Failure {
        kind: error.kind.into_owned(),
        message: error.message,
        details: details(error.details),
        permanent: error.permanent,
        retry_after_ms: wait.map(milliseconds),
    }
}
