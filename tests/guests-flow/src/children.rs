//! Guests that enqueue jobs.

use std::time::Duration;

use rouse_sdk::{Ctx, Error, Job, Result, handler};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::spec::{Spec, once};

/// The behaviour after the jobs are enqueued.
#[derive(Deserialize, JsonSchema, Clone, Copy, Default)]
#[serde(rename_all = "kebab-case")]
enum Then {
    #[default]
    Succeed,
    Fail,
    /// Fail in the first attempt, and succeed in the second.
    FailOnce,
    FailPermanently,
    Panic,
    Trap,
    /// Report `waiting` as the progress, wait for the abort, and enqueue another job of the first kind.
    Wait,
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Children {
    /// Enqueued in this order.
    jobs: Vec<Spec>,
    /// Enqueues all of them this many times.
    #[serde(default = "once")]
    times: u32,
    /// Then sleeps durably for this long.
    nap_ms: Option<u64>,
    /// Continues the chain with this one, before the sleep.
    next: Option<Spec>,
    #[serde(default)]
    then: Then,
}

/// Enqueues jobs, and ends as the payload says. Returns their number.
#[handler(
    name = "flow.children",
    max_attempts = 2,
    retry_initial = "10ms",
    retry_max = "10ms",
    grace = "500ms",
    capabilities = ["enqueue:flow.*"]
)]
pub(crate) async fn children(ctx: &Ctx, payload: Children) -> Result<Value> {
    let mut enqueued = Vec::new();
    for _ in 0..payload.times {
        for job in &payload.jobs {
            enqueued.push(ctx.enqueue(job.job(&enqueued)?)?);
        }
    }
    if let Some(next) = &payload.next {
        ctx.continue_with(next.job(&enqueued)?)?;
    }
    if let Some(ms) = payload.nap_ms {
        ctx.sleep("nap", Duration::from_millis(ms))?;
    }
    match payload.then {
        Then::Succeed => {}
        Then::Fail => return Err(Error::retryable("it fails after its jobs")),
        Then::FailOnce if ctx.job().attempt == 1 => {
            return Err(Error::retryable("it fails once after its jobs"));
        }
        Then::FailOnce => {}
        Then::FailPermanently => return Err(Error::permanent("it fails after its jobs")),
        Then::Panic => panic!("it panics after its jobs"),
        Then::Trap => std::process::abort(),
        Then::Wait => {
            ctx.progress(50, "waiting");
            ctx.abort().wait().await;
            if let Some(job) = payload.jobs.first() {
                ctx.enqueue(job.job(&enqueued)?)?;
            }
        }
    }
    Ok(json!(enqueued.len()))
}

#[derive(Deserialize, Serialize, JsonSchema)]
pub(crate) struct Tree {
    depth: u32,
    width: u32,
}

/// Enqueues itself again and again: a tree of jobs of this depth and width.
#[handler(name = "flow.tree", max_attempts = 1, capabilities = ["enqueue:flow.tree"])]
pub(crate) fn tree(ctx: &Ctx, payload: Tree) -> Result<()> {
    if let Some(depth) = payload.depth.checked_sub(1) {
        let width = payload.width;
        for _ in 0..width {
            ctx.enqueue(Job::of::<tree>(&Tree { depth, width }))?;
        }
    }
    Ok(())
}
