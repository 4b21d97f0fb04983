//! Guests whose work outlives their attempt.

use std::cell::Cell;
use std::future::poll_fn;
use std::task::Poll;
use std::time::{Duration, SystemTime};

use rouse_sdk::{Ctx, Error, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

/// The behaviour of the first attempt between its first step and its second.
#[derive(Deserialize, JsonSchema, Clone, Copy, PartialEq)]
#[serde(rename_all = "kebab-case")]
enum Between {
    Nothing,
    Fail,
    Panic,
    /// Reports `waiting` as its progress, then waits for the abort, and then tries a step.
    Wait,
    /// Like `Wait`, but ignores the abort.
    IgnoreAbort,
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Steps {
    between: Between,
}

/// Does two steps, and between them one in a loop. Each returns the number of the attempt that did it, and the result
/// contains all of them.
#[handler(
    name = "test.steps",
    max_attempts = 3,
    retry_initial = "10ms",
    retry_max = "10ms",
    grace = "200ms"
)]
pub(crate) async fn two_steps(ctx: &Ctx, payload: Steps) -> Result<Value, Error> {
    let attempt = ctx.job().attempt;
    let first = ctx.step("first", || Ok(attempt))?;
    let looped: Vec<u32> = (0..3)
        .map(|_| ctx.step("looped", || Ok(attempt)))
        .collect::<Result<_, Error>>()?;
    if attempt == 1 {
        match payload.between {
            Between::Nothing => {}
            Between::Fail => return Err(Error::retryable("between the steps")),
            Between::Panic => panic!("between the steps"),
            Between::Wait => {
                ctx.progress(50, "waiting");
                ctx.abort().wait().await;
                let late = ctx.step("late", || Ok(attempt));
                ctx.info(format_args!("a step after the abort: {late:?}"));
                late?;
            }
            Between::IgnoreAbort => {
                ctx.progress(50, "waiting");
                rouse_sdk::sleep(Duration::from_secs(3600)).await;
            }
        }
    }
    let second = ctx.step_async("second", async { Ok(attempt) }).await?;
    Ok(json!({"first": first, "looped": looped, "second": second}))
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Open {
    steps: u32,
}

/// Does the steps `1`, `2` and so on, all of which are open before the first ends. Returns their number.
#[handler(name = "test.open-steps")]
pub(crate) async fn open_steps(ctx: &Ctx, payload: Open) -> Result<u32, Error> {
    let all_open = Cell::new(false);
    let work = || {
        poll_fn(|_| match all_open.get() {
            true => Poll::Ready(Ok(())),
            false => Poll::Pending,
        })
    };
    let mut steps: Vec<_> = (1..=payload.steps)
        .map(|nth| Box::pin(ctx.step_async(nth.to_string(), work())))
        .collect();
    poll_fn(|context| {
        let ended = steps
            .iter_mut()
            .any(|step| step.as_mut().poll(context).is_ready());
        assert!(!ended, "no step ends before all are open");
        Poll::Ready(())
    })
    .await;
    all_open.set(true);
    for step in steps {
        step.await?;
    }
    Ok(payload.steps)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct BadSteps {
    name: String,
    bytes: usize,
    count: u32,
}

/// Does this many steps of this name and size, and returns the error of the first that was refused.
#[handler(name = "test.bad-steps", max_attempts = 1)]
pub(crate) fn bad_steps(ctx: &Ctx, payload: BadSteps) -> Value {
    for _ in 0..payload.count {
        let step = ctx.step(&payload.name, || Ok("x".repeat(payload.bytes)));
        if let Err(error) = step {
            return json!({"kind": error.kind, "message": error.message});
        }
    }
    json!("all recorded")
}

/// Reads a number from a step for which the first attempt has recorded a text.
#[handler(
    name = "test.changed-step",
    max_attempts = 2,
    retry_initial = "10ms",
    retry_max = "10ms"
)]
pub(crate) fn changed_step(ctx: &Ctx, _payload: Value) -> Result<u32, Error> {
    if ctx.job().attempt == 1 {
        ctx.step("it", || Ok("a text".to_owned()))?;
        return Err(Error::retryable("the next version comes"));
    }
    ctx.step("it", || Ok(7))
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct RetryAt {
    unix_ms: u64,
}

/// Fails once, and requests its next attempt at this time.
#[handler(name = "test.retry-at", max_attempts = 2)]
pub(crate) fn retry_at(ctx: &Ctx, payload: RetryAt) -> Result<u32, Error> {
    let at = SystemTime::UNIX_EPOCH + Duration::from_millis(payload.unix_ms);
    match ctx.job().attempt {
        1 => Err(Error::retryable("not yet").retry_at(at)),
        attempt => Ok(attempt),
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Wordy {
    step: String,
}

/// Reports this as its progress, and waits for the abort.
#[handler(name = "test.wordy-progress", max_attempts = 1)]
pub(crate) async fn wordy_progress(ctx: &Ctx, payload: Wordy) -> Value {
    ctx.progress(1, payload.step);
    json!(ctx.abort().wait().await.as_str())
}
