//! `rouse:handler/batch`: the jobs of an attempt at several jobs, and their outcomes.

use std::collections::HashMap;

use crate::job::{JobId, RunEnd};
use crate::sandbox::attempt::failure::failed;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::exports::rouse::handler::handlers::{Failure, JobInfo};
use crate::sandbox::bindings::rouse::handler::batch::{BatchError, Host};

/// Why steps and waits are refused to a handler that takes batches, even in an attempt at one job: otherwise the
/// handler would fail only in attempts at several.
pub(super) const NO_STEPS: &str = "a handler that takes batches has no steps, waits or results of other jobs, because an attempt may run several jobs";
pub(super) const NO_JOBS: &str =
    "a handler that takes batches cannot enqueue jobs, because an attempt may run several jobs";
pub(super) const NO_EFFECTS: &str =
    "a handler that takes batches has no effects, because an attempt may run several jobs";

/// The maximum size of all outcomes of a batch, in bytes, or the maximum size of one result if that is larger. The host
/// keeps the outcomes until the attempt has ended.
const OUTCOMES_BYTES_MAX: usize = 8 << 20;

/// The jobs of an attempt at several jobs, and the outcomes that they have so far. Empty for an attempt at one job.
#[derive(Default)]
pub(in crate::sandbox) struct Batch {
    jobs: Vec<JobInfo>,
    ends: HashMap<i64, RunEnd>,
    /// The size of all outcomes so far.
    bytes: usize,
    result_bytes_max: usize,
}

impl Batch {
    pub(in crate::sandbox) fn new(jobs: Vec<JobInfo>, result_bytes_max: usize) -> Self {
        Self {
            jobs,
            result_bytes_max,
            ..Self::default()
        }
    }

    /// The outcomes of the jobs that have one.
    pub(in crate::sandbox) fn take(&mut self) -> Vec<(JobId, RunEnd)> {
        let ends = std::mem::take(&mut self.ends).into_iter();
        ends.map(|(job, end)| (JobId(job), end)).collect()
    }

    fn settle(&mut self, job: i64, outcome: Result<Vec<u8>, Failure>) -> Result<(), String> {
        if !self.jobs.iter().any(|own| own.id == job) {
            return Err(format!("job {job} is not one of this batch"));
        }
        if self.ends.contains_key(&job) {
            return Err(format!("job {job} already has an outcome"));
        }
        let limit_bytes = self.result_bytes_max;
        let bytes = match &outcome {
            // Not kept.
            Ok(result) if result.len() > limit_bytes => 0,
            Ok(result) => result.len(),
            Err(failure) => failure.message.len() + failure.details.as_ref().map_or(0, Vec::len),
        };
        let bytes_max = OUTCOMES_BYTES_MAX.max(limit_bytes);
        if self.bytes + bytes > bytes_max {
            return Err(format!(
                "the outcomes of a batch may take at most {bytes_max} bytes together; a gate with a smaller `max` \
                 makes smaller batches"
            ));
        }
        self.bytes += bytes;
        let end = match outcome {
            Ok(result) if result.len() > limit_bytes => RunEnd::OutputTooLarge {
                bytes: result.len(),
                limit_bytes,
            },
            Ok(result) => RunEnd::Returned(result),
            Err(failure) => RunEnd::Failed(failed(failure, limit_bytes)),
        };
        self.ends.insert(job, end);
        Ok(())
    }
}

impl Host for AttemptState {
    fn jobs(&mut self) -> wasmtime::Result<Vec<JobInfo>> {
        self.meter.count_host_call();
        Ok(self.batch.jobs.clone())
    }

    fn settle(
        &mut self,
        job: i64,
        outcome: Result<Vec<u8>, Failure>,
    ) -> wasmtime::Result<Result<(), BatchError>> {
        self.meter.count_host_call();
        if self.abort.reason().is_some() {
            return Ok(Err(BatchError::Aborted));
        }
        Ok(self.batch.settle(job, outcome).map_err(BatchError::Refused))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(id: i64) -> JobInfo {
        JobInfo {
            id,
            handler: "a.b".into(),
            queue: "default".into(),
            tenant: None,
            source: None,
            attempt: 1,
            max_attempts: 3,
            requested_at_ms: 0,
            payload: b"{}".to_vec(),
        }
    }

    #[test]
    fn each_job_of_a_batch_gets_one_outcome() {
        let mut batch = Batch::new(vec![info(1), info(2), info(3)], 10);
        let failure = Failure {
            kind: "error".into(),
            message: "no".into(),
            details: None,
            permanent: true,
            retry_after_ms: None,
        };
        assert_eq!(batch.settle(2, Ok(b"null".to_vec())), Ok(()));
        assert_eq!(batch.settle(1, Err(failure)), Ok(()));
        assert_eq!(batch.settle(3, Ok(vec![b' '; 11])), Ok(()));
        let twice = batch.settle(2, Ok(b"null".to_vec())).unwrap_err();
        assert!(twice.contains("already has an outcome"), "{twice}");
        let foreign = batch.settle(4, Ok(b"null".to_vec())).unwrap_err();
        assert!(foreign.contains("not one of this batch"), "{foreign}");
        let mut large = Batch::new(vec![info(1), info(2)], OUTCOMES_BYTES_MAX);
        let half = vec![b' '; OUTCOMES_BYTES_MAX / 2 + 1];
        assert_eq!(large.settle(1, Ok(half.clone())), Ok(()));
        let both = large.settle(2, Ok(half)).unwrap_err();
        assert!(both.contains("8388608 bytes together"), "{both}");
        let mut ends = batch.take();
        ends.sort_by_key(|(job, _)| job.0);
        assert!(
            matches!(&ends[0], (JobId(1), RunEnd::Failed(failed)) if failed.permanent),
            "{ends:?}"
        );
        assert_eq!(ends[1], (JobId(2), RunEnd::Returned(b"null".to_vec())));
        let too_large = RunEnd::OutputTooLarge {
            bytes: 11,
            limit_bytes: 10,
        };
        assert_eq!(ends[2], (JobId(3), too_large));
    }
}
