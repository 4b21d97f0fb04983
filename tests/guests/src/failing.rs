//! Guests that end without a result.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

/// How `test.fail` fails.
#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum As {
    Retryable,
    Permanent,
    RetryAfter,
    Details,
    Nul,
    Io,
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Fail {
    r#as: As,
}

/// Fails with the error that its payload selects.
#[handler(name = "test.fail", retry_initial = "10ms", retry_max = "10ms")]
pub(crate) fn fail(payload: Fail) -> Result<Value, Error> {
    Err(match payload.r#as {
        As::Retryable => Error::retryable("not this time").kind("busy"),
        As::Permanent => Error::permanent("never").kind("hopeless"),
        As::RetryAfter => Error::retryable("later").retry_after(Duration::from_micros(1_499_001)),
        As::Details => Error::permanent("see the details").details(json!({"code": [5, 5, 0]})),
        As::Nul => Error::permanent("before\0after")
            .kind("k\0k")
            .details(json!({"a\0b": "c\0d"})),
        As::Io => std::io::Error::other("the cable is cut").into(),
    })
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Flaky {
    fail_until: u32,
}

/// Fails in the attempts up to `fail_until`, then returns the number of the attempt.
#[handler(
    name = "test.flaky",
    max_attempts = 10,
    retry_initial = "10ms",
    retry_max = "50ms"
)]
pub(crate) fn flaky(ctx: &Ctx, payload: Flaky) -> Result<u32, Error> {
    let attempt = ctx.job().attempt;
    if attempt <= payload.fail_until {
        return Err(Error::retryable(format_args!("attempt {attempt} fails")).kind("flaky"));
    }
    Ok(attempt)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Panic {
    #[serde(default)]
    message: Option<String>,
}

/// Panics.
#[handler(
    name = "test.panic",
    max_attempts = 2,
    retry_initial = "10ms",
    retry_max = "10ms"
)]
pub(crate) fn panic(payload: Panic) -> Value {
    match payload.message {
        Some(message) => panic!("{message}"),
        None => panic!("a panic on purpose"),
    }
}

/// Traps, without a panic before it.
#[handler(
    name = "test.trap",
    max_attempts = 2,
    retry_initial = "10ms",
    retry_max = "10ms"
)]
pub(crate) fn trap(_payload: Value) -> Value {
    #[cfg(target_family = "wasm")]
    core::arch::wasm32::unreachable();
    #[cfg(not(target_family = "wasm"))]
    std::process::abort();
}
