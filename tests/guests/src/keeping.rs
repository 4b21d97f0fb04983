//! Guests that keep state, well-behaved and otherwise.

use rouse_sdk::{Ctx, Error, Result, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Calls {
    calls: Vec<Call>,
    /// Continue after a failed call, and return the kind and message of its error as the response.
    #[serde(default)]
    continue_after_errors: bool,
}

#[derive(Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum Call {
    Get(String),
    /// Gets the bytes of a value.
    Bytes(String),
    Set(String, Value),
    /// Sets this many keys with this prefix, to values of this many bytes.
    Fill(String, u32, usize),
    /// Sets a key of this many characters.
    SetLong(usize),
    Delete(String),
    Keys(String),
    /// Adds 1 to a number this many times.
    Add(String, u32),
    /// Reports `waiting` as its progress, then waits for the abort.
    Wait,
    Fail,
}

async fn answer(ctx: &Ctx, call: Call) -> Result<Value> {
    let state = ctx.state();
    Ok(match call {
        Call::Get(key) => json!(state.get::<Value>(key)?),
        Call::Bytes(key) => json!(state.get_bytes(key)?),
        Call::Set(key, value) => {
            state.set(key, &value)?;
            Value::Null
        }
        Call::Fill(prefix, count, bytes) => {
            for n in 0..count {
                state.set_bytes(format!("{prefix}{n:05}"), vec![b'x'; bytes])?;
            }
            json!(count)
        }
        Call::SetLong(chars) => {
            state.set("k".repeat(chars), &1)?;
            Value::Null
        }
        Call::Delete(key) => json!(state.delete(key)?),
        Call::Keys(prefix) => json!(state.keys(prefix)?),
        Call::Add(key, times) => {
            let mut last = 0;
            for _ in 0..times {
                last = state.update(&key, |n: Option<u64>| Ok(n.unwrap_or(0) + 1))?;
            }
            json!(last)
        }
        Call::Wait => {
            ctx.progress(50, "waiting");
            json!(ctx.abort().wait().await.as_str())
        }
        Call::Fail => return Err(Error::permanent("as the payload requests")),
    })
}

async fn make(ctx: &Ctx, payload: Calls) -> Result<Vec<Value>> {
    let mut answers = Vec::new();
    for call in payload.calls {
        match answer(ctx, call).await {
            Ok(answer) => answers.push(answer),
            Err(error) if payload.continue_after_errors => {
                answers.push(json!({"kind": error.kind, "message": error.message}));
            }
            Err(error) => return Err(error),
        }
    }
    Ok(answers)
}

/// Makes these calls, one after the other.
#[handler(name = "test.state.one", max_attempts = 2, grace = "200ms", capabilities = ["state"])]
pub(crate) async fn one(ctx: &Ctx, payload: Calls) -> Result<Vec<Value>> {
    make(ctx, payload).await
}

/// Makes these calls, with a state of its own.
#[handler(name = "test.state.other", max_attempts = 2, capabilities = ["state"])]
pub(crate) async fn other(ctx: &Ctx, payload: Calls) -> Result<Vec<Value>> {
    make(ctx, payload).await
}

/// Has no grants.
#[handler(name = "test.state.none", max_attempts = 2, capabilities = ["state"])]
pub(crate) async fn none(ctx: &Ctx, payload: Calls) -> Result<Vec<Value>> {
    make(ctx, payload).await
}
