//! A guest that calls the host in ways that the SDK does not: with invalid options, ids of other jobs, and steps
//! of its own choice.

use rouse_sdk::{Ctx, Result, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
#[cfg_attr(
    not(target_family = "wasm"),
    expect(dead_code, reason = "only a module calls the host")
)]
pub(crate) enum HostCall {
    Enqueue(NewJob),
    ContinueWith(NewJob),
    /// The names in a page of parents.
    Parents(Option<String>),
    /// A step, and milliseconds.
    Sleep(String, u64),
    SleepUntil(String, i64),
    /// A step, a name, and the timeout in milliseconds.
    Signal(String, String, Option<u64>),
    /// Jobs with their steps.
    Call(Vec<(String, NewJob)>),
    /// Starts a step, and records it with this text, if there is one.
    Step(String, Option<Bytes>),
}

#[derive(Deserialize, JsonSchema)]
#[cfg_attr(
    not(target_family = "wasm"),
    expect(dead_code, reason = "only a module calls the host")
)]
pub(crate) struct NewJob {
    handler: String,
    payload: Bytes,
    options: Option<Bytes>,
}

/// Text, or bytes that need not be UTF-8.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
#[cfg_attr(
    not(target_family = "wasm"),
    expect(dead_code, reason = "only a module calls the host")
)]
pub(crate) enum Bytes {
    Text(String),
    Bytes(Vec<u8>),
}

/// Makes these calls, one after the other. Returns the responses of the host: `{"ok": …}`, `{"refused": why}`,
/// `{"not-granted": why}` or `{"aborted": null}`.
#[handler(name = "flow.raw", max_attempts = 1, capabilities = ["enqueue"])]
pub(crate) fn raw(_ctx: &Ctx, calls: Vec<HostCall>) -> Result<Vec<Value>> {
    Ok(calls.into_iter().map(answer).collect())
}

#[cfg(not(target_family = "wasm"))]
fn answer(_call: HostCall) -> Value {
    Value::Null
}

#[cfg(target_family = "wasm")]
use wasm::answer;

#[cfg(target_family = "wasm")]
mod wasm {
    use rouse_sdk::__private::bindings::rouse::handler::jobs::{self, JobError};
    use rouse_sdk::__private::bindings::rouse::handler::parents::{self, ParentError};
    use rouse_sdk::__private::bindings::rouse::handler::steps::{self, StepError};
    use rouse_sdk::__private::bindings::rouse::handler::waits::{self, Returned};
    use serde_json::{Value, json};

    use super::{Bytes, HostCall, NewJob};

    pub(super) fn answer(call: HostCall) -> Value {
        match call {
            HostCall::Enqueue(job) => response(
                jobs::enqueue(&new_job(job))
                    .map(Value::from)
                    .map_err(job_error),
            ),
            HostCall::ContinueWith(job) => {
                let continued = jobs::continue_with(&new_job(job));
                response(continued.map(Value::from).map_err(job_error))
            }
            HostCall::Parents(after) => {
                let page = parents::page(after.as_deref()).map_err(|error| match error {
                    ParentError::Aborted => json!({"aborted": null}),
                    ParentError::Refused(why) => json!({"refused": why}),
                });
                response(page.map(|page| page.into_iter().map(|parent| parent.name).collect()))
            }
            HostCall::Sleep(step, ms) => {
                response(waits::sleep(&step, ms).map(Value::from).map_err(step_error))
            }
            HostCall::SleepUntil(step, ms) => {
                let slept = waits::sleep_until(&step, ms);
                response(slept.map(Value::from).map_err(step_error))
            }
            HostCall::Signal(step, name, timeout_ms) => {
                let signal = waits::signal(&step, &name, timeout_ms);
                response(
                    signal
                        .map(|json| json.map_or(Value::Null, text))
                        .map_err(step_error),
                )
            }
            HostCall::Call(calls) => {
                let calls: Vec<waits::NewCall> = calls
                    .into_iter()
                    .map(|(step, job)| waits::NewCall {
                        step,
                        job: new_job(job),
                    })
                    .collect();
                let ends = waits::call(&calls).map_err(job_error);
                response(ends.map(|ends| ends.into_iter().map(returned).collect()))
            }
            HostCall::Step(name, output) => response(step(&name, output).map_err(step_error)),
        }
    }

    fn step(name: &str, output: Option<Bytes>) -> Result<Value, StepError> {
        let recorded = steps::start(name)?;
        if let Some(output) = output {
            steps::complete(name, &bytes(output))?;
        }
        Ok(recorded.map_or(Value::Null, text))
    }

    fn response(result: Result<Value, Value>) -> Value {
        result.map_or_else(|error| error, |value| json!({"ok": value}))
    }

    fn returned(end: Returned) -> Value {
        match end {
            Returned::Output(json) => json!({"output": text(json)}),
            Returned::Failed(json) => json!({"failed": text(json)}),
        }
    }

    fn job_error(error: JobError) -> Value {
        match error {
            JobError::Aborted => json!({"aborted": null}),
            JobError::NotGranted(why) => json!({"not-granted": why}),
            JobError::Refused(why) => json!({"refused": why}),
        }
    }

    fn step_error(error: StepError) -> Value {
        match error {
            StepError::Aborted => json!({"aborted": null}),
            StepError::Refused(why) => json!({"refused": why}),
        }
    }

    fn new_job(job: NewJob) -> jobs::NewJob {
        jobs::NewJob {
            handler: job.handler,
            payload: bytes(job.payload),
            options: job.options.map(bytes),
        }
    }

    fn bytes(bytes: Bytes) -> Vec<u8> {
        match bytes {
            Bytes::Text(text) => text.into_bytes(),
            Bytes::Bytes(bytes) => bytes,
        }
    }

    fn text(json: Vec<u8>) -> Value {
        String::from_utf8_lossy(&json).into()
    }
}
