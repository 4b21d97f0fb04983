//! The imports for jobs, chains and waits.

use super::bindings::rouse::handler::jobs::{self, JobError};
use super::bindings::rouse::handler::parents::{self, ParentError};
use super::bindings::rouse::handler::steps::StepError;
use super::bindings::rouse::handler::waits::{self, NewCall, Returned};
use super::{Imports, aborted};
use crate::host::Flow;
use crate::job::NewJob;
use crate::{End, Error, Parent, Result};

impl Flow for Imports {
    fn enqueue(&self, job: NewJob) -> Result<i64> {
        jobs::enqueue(&new_job(job)).map_err(job_error)
    }

    fn continue_with(&self, job: NewJob) -> Result<()> {
        jobs::continue_with(&new_job(job)).map_err(job_error)
    }

    fn parents(&self, after: Option<&str>) -> Result<Vec<Parent>> {
        let page = parents::page(after).map_err(|error| match error {
            ParentError::Aborted => aborted(),
            ParentError::Refused(why) => Error::permanent(why).kind("results_refused"),
        })?;
        Ok(page.into_iter().map(parent).collect())
    }

    fn sleep(&self, step: &str, duration_ms: u64) -> Result<()> {
        waits::sleep(step, duration_ms).map_err(wait_error)
    }

    fn sleep_until(&self, step: &str, unix_ms: i64) -> Result<()> {
        waits::sleep_until(step, unix_ms).map_err(wait_error)
    }

    fn signal(&self, step: &str, name: &str, timeout_ms: Option<u64>) -> Result<Option<Vec<u8>>> {
        waits::signal(step, name, timeout_ms).map_err(wait_error)
    }

    fn call(&self, calls: Vec<(String, NewJob)>) -> Result<Vec<Result<Vec<u8>, Vec<u8>>>> {
        let calls: Vec<NewCall> = calls
            .into_iter()
            .map(|(step, job)| NewCall {
                step,
                job: new_job(job),
            })
            .collect();
        let ends = waits::call(&calls).map_err(job_error)?;
        let ends = ends.into_iter().map(|end| match end {
            Returned::Output(json) => Ok(json),
            Returned::Failed(json) => Err(json),
        });
        Ok(ends.collect())
    }
}

fn new_job(job: NewJob) -> jobs::NewJob {
    jobs::NewJob {
        handler: job.handler,
        payload: job.payload,
        options: job.options,
    }
}

fn parent(parent: parents::Parent) -> Parent {
    Parent {
        name: parent.name,
        job: parent.job,
        end: match parent.end {
            parents::End::Succeeded => End::Succeeded,
            parents::End::Failed => End::Failed,
            parents::End::TimedOut => End::TimedOut,
            parents::End::Cancelled => End::Cancelled,
            parents::End::Deleted => End::Deleted,
        },
        output: parent.output,
    }
}

fn job_error(error: JobError) -> Error {
    match error {
        JobError::Aborted => aborted(),
        JobError::NotGranted(why) => Error::permanent(why).kind("denied"),
        JobError::Refused(why) => Error::permanent(why).kind("job_refused"),
    }
}

fn wait_error(error: StepError) -> Error {
    match error {
        StepError::Aborted => aborted(),
        StepError::Refused(why) => Error::permanent(why).kind("wait_refused"),
    }
}
