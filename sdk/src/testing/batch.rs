//! Batches in native tests.

use std::cell::RefCell;
use std::collections::BTreeMap;

use serde_json::Value;

use super::{Recorder, TestCtx, schemas};
use crate::host::Batch;
use crate::{Error, Handler, JobInfo, Result};

/// The jobs of a batch, and their outcomes.
#[derive(Default)]
pub(super) struct BatchState {
    jobs: RefCell<Vec<(JobInfo, Vec<u8>)>>,
    outcomes: RefCell<BTreeMap<i64, Result<Vec<u8>>>>,
}

impl TestCtx {
    /// Runs a handler of batches as the host does, once for all of these payloads. The ids of their jobs start at the
    /// id of this context's job. Returns the outcome of each, in the order of the payloads. As with [`run`](Self::run),
    /// payloads and results are checked against the schemas of the handler, and calls that do not fit its declaration
    /// are refused. The handler does not get the jobs whose payloads do not match.
    ///
    /// # Panics
    /// If the handler panics (the host would run each of the jobs again, in an attempt of its own), or if a host would
    /// refuse the module because of one of the schemas.
    pub fn run_batch<H: Handler>(&self, payloads: Vec<Value>) -> Vec<Result<Value>> {
        let of_all = self.job_of::<H>();
        let mut outcomes: BTreeMap<i64, Result<Value>> = BTreeMap::new();
        let mut jobs: Vec<(JobInfo, Vec<u8>)> = Vec::new();
        for (id, payload) in (of_all.id..).zip(payloads) {
            let payload = payload.to_string().into_bytes();
            let mut info = of_all.clone();
            info.id = id;
            match schemas::check_payload::<H>(&payload) {
                Ok(()) => jobs.push((info, payload)),
                Err(error) => {
                    outcomes.insert(id, Err(error));
                }
            }
        }
        let Some((first, payload)) = jobs.first().cloned() else {
            return outcomes.into_values().collect();
        };
        let batch = &self.recorder.batch;
        let ids: Vec<i64> = jobs.iter().map(|(info, _)| info.id).collect();
        let is_one = ids.len() == 1;
        if !is_one {
            *batch.jobs.borrow_mut() = jobs;
        }
        let returned = self.call_handler::<H>(first, &payload);
        batch.jobs.borrow_mut().clear();
        // Outcomes from before the abort signal remain.
        let mut given = batch.outcomes.take();
        for id in ids {
            let outcome = match (given.remove(&id), &returned) {
                (Some(outcome), _) => outcome,
                (None, Err(error)) => Err(error.clone()),
                (None, Ok(result)) if is_one => Ok(result.clone()),
                (None, Ok(_)) => Err(Error::retryable("no outcome").kind("no_outcome")),
            };
            let outcome = outcome.and_then(|result| schemas::read_result::<H>(&result));
            outcomes.insert(id, outcome);
        }
        outcomes.into_values().collect()
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
