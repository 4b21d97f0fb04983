//! Batches in native tests.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde_json::Value;

use super::{Recorder, TestCtx, read_result};
use crate::host::Batch;
use crate::{Error, Handler, JobInfo, Result};

/// The jobs of a batch, and their outcomes.
#[derive(Default)]
pub(super) struct BatchState {
    jobs: RefCell<Vec<(JobInfo, Vec<u8>)>>,
    outcomes: RefCell<BTreeMap<i64, Result<Vec<u8>>>>,
}

impl TestCtx {
    /// Runs a handler of batches like the host, once for all of these payloads. The ids of their jobs start at the id
    /// of this job. Returns the outcome of each, in the order of the payloads. As with [`run`](Self::run), calls that do
    /// not fit the declaration of the handler are refused.
    ///
    /// # Panics
    /// If the handler panics. The host would run each of the jobs again, in an attempt of its own.
    pub fn run_batch<H: Handler>(&self, payloads: Vec<Value>) -> Vec<Result<Value>> {
        let first = self.job_of::<H>();
        let ids = first.id..;
        let jobs: Vec<(JobInfo, Vec<u8>)> = ids
            .zip(payloads)
            .map(|(id, payload)| {
                let mut info = first.clone();
                info.id = id;
                (info, payload.to_string().into_bytes())
            })
            .collect();
        let batch = &self.recorder.batch;
        let Some((_, payload)) = jobs.first().cloned() else {
            return Vec::new();
        };
        let ids: Vec<i64> = jobs.iter().map(|(info, _)| info.id).collect();
        let is_one = ids.len() == 1;
        if !is_one {
            *batch.jobs.borrow_mut() = jobs;
        }
        let returned = self.call_handler::<H>(&payload);
        // The outcomes that jobs got before the abort stay.
        let returned = returned.and_then(|result| self.recorder.unless_aborted().map(|()| result));
        batch.jobs.borrow_mut().clear();
        let mut outcomes = batch.outcomes.take();
        let outcome = |id: i64| match (outcomes.remove(&id), &returned) {
            (Some(outcome), _) => outcome,
            (None, Err(error)) => Err(error.clone()),
            (None, Ok(result)) if is_one => Ok(result.clone()),
            (None, Ok(_)) => Err(Error::retryable("no outcome").kind("no_outcome")),
        };
        ids.into_iter()
            .map(outcome)
            .map(|result| read_result(&result?))
            .collect()
    }
}

impl Batch for Recorder {
    fn batch(&self) -> Vec<(JobInfo, Vec<u8>)> {
        self.batch.jobs.borrow().clone()
    }

    fn settle(&self, job: i64, outcome: Result<Vec<u8>>) -> Result<()> {
        self.unless_aborted()?;
        self.batch.outcomes.borrow_mut().insert(job, outcome);
        Ok(())
    }
}
