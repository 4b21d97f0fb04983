//! Guests that sleep, or wait for signals.

use std::time::{Duration, SystemTime};

use rouse_sdk::{Ctx, Error, Result, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::spec::once;

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Sleeps {
    ms: Vec<u64>,
    /// Repeats all of them this many times.
    #[serde(default = "once")]
    times: u32,
    /// Fails once after the sleeps.
    #[serde(default)]
    fail: bool,
}

/// Sleeps for these times, one after the other; returns the number of its attempt.
#[handler(
    name = "flow.sleeps",
    max_attempts = 2,
    retry_initial = "10ms",
    retry_max = "10ms"
)]
pub(crate) fn sleeps(ctx: &Ctx, payload: Sleeps) -> Result<u32> {
    for _ in 0..payload.times {
        for ms in &payload.ms {
            ctx.sleep("nap", Duration::from_millis(*ms))?;
        }
    }
    match ctx.job().attempt {
        1 if payload.fail => Err(Error::retryable("it fails after its sleeps")),
        attempt => Ok(attempt),
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct SleepUntil {
    unix_ms: u64,
}

/// Sleeps until this time; returns the number of its attempt.
#[handler(name = "flow.sleep-until", max_attempts = 1)]
pub(crate) fn sleep_until(ctx: &Ctx, payload: SleepUntil) -> Result<u32> {
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(payload.unix_ms);
    ctx.sleep_until("then", time)?;
    Ok(ctx.job().attempt)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Naps {
    n: u32,
    ms: u64,
}

/// Does a step before each of n sleeps. Each step logs a line, and returns how many steps its attempt has done: 1 if
/// recorded steps are not repeated and each sleep suspends the attempt.
#[handler(name = "flow.naps", max_attempts = 1)]
pub(crate) fn naps(ctx: &Ctx, payload: Naps) -> Result<Vec<u32>> {
    let mut done = 0;
    let mut counts = Vec::new();
    for nth in 0..payload.n {
        counts.push(ctx.step("work", || {
            done += 1;
            ctx.info(format_args!("work {nth}"));
            Ok(done)
        })?);
        ctx.sleep("nap", Duration::from_millis(payload.ms))?;
    }
    Ok(counts)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Signals {
    name: String,
    timeout_ms: Option<u64>,
    #[serde(default = "once")]
    times: u32,
}

/// Waits for a signal this many times, and returns the payloads: `{"got": …}`, or null after a timeout.
#[handler(name = "flow.signals", max_attempts = 1)]
pub(crate) fn signals(ctx: &Ctx, payload: Signals) -> Result<Vec<Value>> {
    let timeout = payload.timeout_ms.map(Duration::from_millis);
    let mut got = Vec::new();
    for _ in 0..payload.times {
        let signal: Option<Value> = ctx.wait_signal(&payload.name, timeout)?;
        got.push(signal.map_or(Value::Null, |signal| json!({"got": signal})));
    }
    Ok(got)
}
