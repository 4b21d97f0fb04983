//! Guests that continue their chain.

use rouse_sdk::{Ctx, Error, Job, Result, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::spec::{Spec, once};

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Next {
    next: Spec,
    /// Continues this many times; the second and later ones are refused.
    #[serde(default = "once")]
    times: u32,
}

/// Continues its chain with this job. Its own result is `{"own": true}`.
#[handler(name = "flow.next", max_attempts = 1, capabilities = ["enqueue:flow.*"])]
pub(crate) fn next(ctx: &Ctx, payload: Next) -> Result<Value> {
    for _ in 0..payload.times {
        ctx.continue_with(payload.next.job(&[])?)?;
    }
    Ok(serde_json::json!({"own": true}))
}

#[derive(Deserialize, Serialize, JsonSchema)]
pub(crate) struct Hop {
    /// The number of hops to come.
    n: u32,
    #[serde(default)]
    done: u32,
    /// Fails once, when this number of hops is to come.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    fail_at: Option<u32>,
}

/// Continues its chain with itself until no hops are left; the result of the last job is the number of hops.
#[handler(
    name = "flow.hop",
    max_attempts = 2,
    retry_initial = "10ms",
    retry_max = "10ms",
    capabilities = ["enqueue:flow.hop"]
)]
pub(crate) fn hop(ctx: &Ctx, payload: Hop) -> Result<u32> {
    let Some(n) = payload.n.checked_sub(1) else {
        return Ok(payload.done);
    };
    ctx.continue_with(Job::of::<hop>(&Hop {
        n,
        done: payload.done + 1,
        fail_at: payload.fail_at,
    }))?;
    if payload.fail_at == Some(payload.n) && ctx.job().attempt == 1 {
        return Err(Error::retryable("it stumbles once"));
    }
    Ok(payload.done)
}
