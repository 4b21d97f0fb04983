//! A handler whose attempts are suspended, and which enqueues and calls other jobs.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, Job, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::Witness;

/// The handler of the jobs that it enqueues, calls and continues with.
const WORK: &str = "chaos.work";
/// The name of the signals that it waits for.
const SIGNAL: &str = "go";

/// The task of a job.
#[derive(Deserialize, JsonSchema)]
pub(crate) struct Task {
    /// The job's number in the ledger.
    n: i64,
    /// How long it sleeps durably.
    nap_ms: u64,
    /// How many signals it waits for.
    waits: u32,
    /// How long it waits for each of them; null: until it arrives.
    timeout_ms: Option<u64>,
    /// The first attempt that gets there fails before the sleep.
    stumbles: bool,
    /// The first attempt that gets there traps after the signals.
    traps: bool,
    /// The payload of the job that it calls.
    call: Option<Value>,
    /// The payloads of its children. Each runs after the one before.
    children: Vec<Value>,
    /// The payload of the job that continues its chain.
    next: Option<Value>,
}

/// Enqueues jobs, does a step, sleeps, waits for signals and calls a job. The result lists what it has enqueued and
/// received.
#[handler(name = "chaos.suspending", capabilities = ["dirs", "enqueue:chaos.work"])]
pub(crate) fn suspending(ctx: &Ctx, task: Task) -> Result<Value, Error> {
    let witness = Witness::start(ctx)?;
    // Every attempt enqueues them, and only those of the last one may exist.
    let mut previous = None;
    for payload in &task.children {
        let mut job = Job::new(WORK, payload);
        if let Some(previous) = &previous {
            job = job.after("the one before", previous);
        }
        previous = Some(ctx.enqueue(job)?);
    }
    if let Some(payload) = &task.next {
        ctx.continue_with(Job::new(WORK, payload))?;
    }
    let first: String = ctx.step("first", || {
        witness.leave("did")?;
        Ok(witness.nonce.clone())
    })?;
    if first == witness.nonce {
        witness.leave("step")?;
    }
    if task.stumbles && is_first(ctx, &witness, "stumble")? {
        return Err(Error::retryable("as the payload requests")
            .kind("stumbled")
            .details(witness.to_json()));
    }
    ctx.sleep("nap", Duration::from_millis(task.nap_ms))?;
    let timeout = task.timeout_ms.map(Duration::from_millis);
    let mut signals = Vec::new();
    for _ in 0..task.waits {
        signals.push(ctx.wait_signal::<Value>(SIGNAL, timeout)?);
    }
    if task.traps && is_first(ctx, &witness, "trap")? {
        std::process::abort();
    }
    let called = match &task.call {
        None => Value::Null,
        Some(payload) => match ctx.try_call::<Value>(Job::new(WORK, payload))? {
            Ok(output) => json!({"output": output}),
            Err(failure) => json!({"failed": failure.kind}),
        },
    };
    witness.leave("end")?;
    let mut result = witness.to_json();
    result["n"] = task.n.into();
    result["first"] = first.into();
    result["signals"] = json!(signals);
    result["called"] = called;
    result["children"] = task.children.len().into();
    result["continued"] = task.next.is_some().into();
    Ok(result)
}

/// True once for each job: in the first attempt that gets here.
fn is_first(ctx: &Ctx, witness: &Witness, step: &str) -> Result<bool, Error> {
    let by: String = ctx.step(step, || Ok(witness.nonce.clone()))?;
    Ok(by == witness.nonce)
}
