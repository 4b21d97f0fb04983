//! Guests that call others, and those that they call.

use rouse_sdk::{Ctx, Error, Failure, Job, Result, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::spec::{Spec, once};

/// Calls one job, and returns its result, or fails with its failure.
#[handler(name = "flow.call", max_attempts = 1, capabilities = ["enqueue:flow.*"])]
pub(crate) fn call(ctx: &Ctx, job: Spec) -> Result<Value> {
    ctx.call(job.job(&[])?)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct CallAll {
    jobs: Vec<Spec>,
    /// Calls all of them this many times, in one wait.
    #[serde(default = "once")]
    times: u32,
    /// Squares this number with a call of its own at the end.
    square: Option<u32>,
}

/// Calls jobs in parallel. Returns their ends: `{"output": …}`, or `{"failed": {kind, message}}`.
#[handler(name = "flow.call-all", max_attempts = 1, capabilities = ["enqueue:flow.*"])]
pub(crate) fn call_all(ctx: &Ctx, payload: CallAll) -> Result<Vec<Value>> {
    let mut jobs = Vec::new();
    for _ in 0..payload.times {
        for job in &payload.jobs {
            jobs.push(job.job(&[])?);
        }
    }
    let mut ends: Vec<Value> = ctx.call_all(jobs)?.into_iter().map(end).collect();
    if let Some(n) = payload.square {
        let squared = ctx.call(Job::of::<square>(&Square { n }))?;
        ends.push(json!({"output": squared}));
    }
    Ok(ends)
}

fn end(end: Result<Value, Failure>) -> Value {
    match end {
        Ok(output) => json!({"output": output}),
        Err(Failure { kind, message, .. }) => {
            json!({"failed": {"kind": kind, "message": message}})
        }
    }
}

#[derive(Deserialize, Serialize, JsonSchema)]
pub(crate) struct Square {
    n: u32,
}

/// Returns the square of a number.
#[handler(name = "flow.square", max_attempts = 1)]
pub(crate) fn square(payload: Square) -> u64 {
    u64::from(payload.n) * u64::from(payload.n)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Fails {
    kind: String,
    message: String,
}

/// Fails permanently, with this kind and message.
#[handler(name = "flow.fails", max_attempts = 1)]
pub(crate) fn fails(payload: Fails) -> Result<()> {
    Err(Error::permanent(payload.message).kind(payload.kind))
}
