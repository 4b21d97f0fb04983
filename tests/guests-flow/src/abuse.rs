//! Guests that enqueue or wait where they must not, or too often.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, Job, Result, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum What {
    Enqueue,
    ContinueWith,
    Sleep,
    Signal,
    Call,
}

/// Does this within a step, and returns the error.
#[handler(name = "flow.in-step", max_attempts = 1, capabilities = ["enqueue:flow.*"])]
pub(crate) fn in_step(ctx: &Ctx, what: What) -> Value {
    let job = || Job::new("flow.square", &json!({"n": 1}));
    let done = ctx.step("it", || match what {
        What::Enqueue => ctx.enqueue(job()).map(drop),
        What::ContinueWith => ctx.continue_with(job()),
        What::Sleep => ctx.sleep("nap", Duration::from_secs(3600)),
        What::Signal => ctx.wait_signal::<Value>("go", None).map(drop),
        What::Call => ctx.call(job()).map(drop),
    });
    match done {
        Ok(()) => json!("nothing was refused"),
        Err(error) => described(&error),
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Many {
    count: u32,
    /// The size of each payload.
    #[serde(default)]
    bytes: usize,
}

/// Enqueues jobs until one is refused. Returns how many were accepted, and the error.
#[handler(name = "flow.many-children", max_attempts = 1, capabilities = ["enqueue:flow.*"])]
pub(crate) fn many_children(ctx: &Ctx, payload: Many) -> Value {
    let text = "x".repeat(payload.bytes);
    until_refused(payload.count, || {
        ctx.enqueue(Job::new("flow.square", &json!({"n": 1, "text": text})))
            .map(drop)
    })
}

/// Sleeps for zero time until a sleep is refused. Returns how many were accepted, and the error.
#[handler(name = "flow.many-waits", max_attempts = 1)]
pub(crate) fn many_waits(ctx: &Ctx, payload: Many) -> Value {
    until_refused(payload.count, || ctx.sleep("nap", Duration::ZERO))
}

fn until_refused(count: u32, mut act: impl FnMut() -> Result<()>) -> Value {
    for nth in 0..count {
        if let Err(error) = act() {
            return json!({"done": nth, "error": described(&error)});
        }
    }
    json!({"done": count})
}

fn described(error: &Error) -> Value {
    json!({"kind": error.kind, "message": error.message})
}
