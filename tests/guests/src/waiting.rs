//! Guests that wait, or do not stop waiting.

use std::time::Duration;

use rouse_sdk::{Ctx, Either, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Sleep {
    ms: u64,
}

/// Reports `asleep` as its progress, sleeps, ignores the abort signal, and returns its payload.
#[handler(name = "test.sleep", max_attempts = 1)]
pub(crate) async fn sleep(ctx: &Ctx, payload: Sleep) -> u64 {
    ctx.progress(1, "asleep");
    rouse_sdk::sleep(Duration::from_millis(payload.ms)).await;
    payload.ms
}

/// Sleeps for this time or until the abort, and returns which came first.
#[handler(name = "test.race", max_attempts = 1)]
pub(crate) async fn race(ctx: &Ctx, payload: Sleep) -> Value {
    let nap = rouse_sdk::sleep(Duration::from_millis(payload.ms));
    match rouse_sdk::race(ctx.abort().wait(), nap).await {
        Either::First(reason) => json!({"aborted": reason.as_str()}),
        Either::Second(()) => json!({"slept_ms": payload.ms}),
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct WaitAbort {
    /// Log the reason too: an effect after the abort, which the host refuses.
    #[serde(default)]
    log: bool,
}

/// Waits for the abort, then stops.
#[handler(name = "test.wait-abort", max_attempts = 1, grace = "5s")]
pub(crate) async fn wait_abort(ctx: &Ctx, payload: WaitAbort) -> Value {
    ctx.progress(1, "waiting for the abort");
    let signal = ctx.abort();
    let before = signal.grace_remaining();
    let reason = signal.wait().await;
    if payload.log {
        ctx.info(format_args!("aborted: {reason}"));
    }
    json!({
        "reason": reason.as_str(),
        "grace_before": before.is_some(),
        "grace_left": signal.grace_remaining().is_some(),
    })
}

/// Sleeps forever in blocking calls, and ignores the abort signal.
#[handler(name = "test.ignore-abort", max_attempts = 1, grace = "100ms")]
pub(crate) fn ignore_abort(ctx: &Ctx, _payload: Value) -> Value {
    ctx.progress(1, "asleep");
    loop {
        std::thread::sleep(Duration::from_secs(3600));
    }
}

/// Waits for something that never happens.
#[handler(name = "test.deadlock", max_attempts = 1)]
pub(crate) async fn deadlock(_payload: Value) -> Value {
    std::future::pending().await
}
