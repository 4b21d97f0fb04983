//! Batches: one attempt that processes several jobs.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::handler::{decode, encode};
use crate::host::Batch as _;
use crate::{Ctx, Error, JobInfo, Result};

/// One of the jobs of a batch: one attempt of a handler with `batch(…)` processes all of them.
///
/// ```
/// use rouse_sdk::{BatchJob, Result, TestCtx, handler};
/// use serde_json::json;
///
/// /// Counts words; many strings cost little more than one.
/// #[handler(name = "text.count", batch(max = 100, period = "500ms"))]
/// fn count(jobs: Vec<BatchJob<String>>) -> Vec<Result<usize>> {
///     let count = |job: &BatchJob<String>| match job.payload.is_empty() {
///         true => Err(rouse_sdk::Error::permanent("the text is empty")),
///         false => Ok(job.payload.split_whitespace().count()),
///     };
///     jobs.iter().map(count).collect()
/// }
///
/// let outcomes = TestCtx::new().run_batch::<count>(vec![json!("to be"), json!("")]);
/// assert_eq!(*outcomes[0].as_ref().unwrap(), json!(2));
/// assert!(outcomes[1].is_err());
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BatchJob<T> {
    /// The job and the number of this attempt. All jobs of a batch have the same handler, queue and tenant.
    pub info: JobInfo,
    /// Its payload.
    pub payload: T,
}

/// Runs a handler of batches, from JSON to JSON. `handler` returns one outcome for each job, in the order of the jobs.
///
/// # Errors
/// Errors of the handler that apply to all jobs of the batch; for an attempt at a single job, also the error of that
/// job.
pub fn run_batch<T, O, E>(
    ctx: &Ctx,
    payload: &[u8],
    handler: impl FnOnce(Vec<BatchJob<T>>) -> Result<Vec<Result<O, E>>>,
) -> Result<Vec<u8>>
where
    T: DeserializeOwned,
    O: Serialize,
    E: Into<Error>,
{
    let outcome = |outcome: Result<O, E>| encode(&outcome.map_err(Into::into)?);
    let all = ctx.world().batch();
    if all.is_empty() {
        let one = BatchJob {
            info: ctx.job().clone(),
            payload: decode(payload)?,
        };
        let mut outcomes = handler(vec![one])?;
        return match (outcomes.pop(), outcomes.len()) {
            (Some(only), 0) => outcome(only),
            (last, others) => Err(wrong_number(others + usize::from(last.is_some()), 1)),
        };
    }
    let mut jobs = Vec::with_capacity(all.len());
    for (info, payload) in all {
        match decode(&payload) {
            Ok(payload) => jobs.push(BatchJob { info, payload }),
            Err(error) => ctx.world().settle(info.id, Err(error))?,
        }
    }
    let ids: Vec<i64> = jobs.iter().map(|job| job.info.id).collect();
    if !ids.is_empty() {
        let outcomes = handler(jobs)?;
        if outcomes.len() != ids.len() {
            return Err(wrong_number(outcomes.len(), ids.len()));
        }
        for (id, of_job) in ids.into_iter().zip(outcomes) {
            if let Err(refused) = ctx.world().settle(id, outcome(of_job)) {
                // The outcomes may be too large in total. In that case, this error still fits.
                ctx.world().settle(id, Err(refused))?;
            }
        }
    }
    Ok(b"null".to_vec())
}

fn wrong_number(outcomes: usize, jobs: usize) -> Error {
    let why = format!(
        "a handler of batches has to return one outcome for each job: expected {jobs}, got {outcomes}"
    );
    Error::permanent(why).kind("invalid_batch")
}
