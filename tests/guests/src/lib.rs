//! Handlers that behave badly on purpose, one behaviour each, for the tests of the host.

mod effects;
mod failing;
mod greedy;
mod http;
mod keeping;
mod reaching;
mod steps;
mod waiting;

use rouse_sdk::{Ctx, Error, export, handler};
use serde_json::{Value, json};

use failing::{fail, flaky, panic, trap};
use greedy::{alloc, big_result, burn, nul_result, recurse, reuse_state, spin, state};
use http::{fields, none, other, private, public, secret};
use reaching::{connect, env, print, probe_file, read_file, settings, write_file};
use steps::{bad_steps, changed_step, open_steps, retry_at, two_steps, wordy_progress};
use waiting::{deadlock, ignore_abort, race, sleep, wait_abort};

/// Returns its payload and everything that it knows about its job.
#[handler(
    name = "test.echo",
    version = "9.8.7",
    max_attempts = 2,
    retry_initial = "10ms",
    retry_max = "20ms",
    retry_multiplier = 1.5,
    retry_jitter = 0.0,
    lease = "20s",
    timeout = "30s",
    grace = "1s",
    capabilities = ["dirs"]
)]
fn echo(ctx: &Ctx, payload: Value) -> Result<Value, Error> {
    let job = ctx.job();
    ctx.trace("a trace");
    ctx.debug("a debug");
    ctx.info("an info");
    ctx.warn("a warn");
    ctx.error("an error");
    ctx.progress(50, "half of it");
    Ok(json!({
        "payload": payload,
        "id": job.id,
        "handler": job.handler,
        "queue": job.queue,
        "tenant": job.tenant,
        "source": job.source,
        "attempt": job.attempt,
        "max_attempts": job.max_attempts,
        "requested_at_ms": job.requested_at_ms,
    }))
}

export!(
    echo,
    fail,
    flaky,
    panic,
    trap,
    spin,
    burn,
    sleep,
    race,
    wait_abort,
    ignore_abort,
    deadlock,
    alloc,
    recurse,
    big_result,
    nul_result,
    state,
    reuse_state,
    probe_file,
    read_file,
    write_file,
    env,
    print,
    connect,
    settings,
    two_steps,
    open_steps,
    wordy_progress,
    bad_steps,
    changed_step,
    retry_at,
    public,
    private,
    other,
    secret,
    none,
    fields,
    keeping::one,
    keeping::other,
    keeping::none,
    effects::effects,
);
