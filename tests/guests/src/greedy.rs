//! Guests that use too much: time, memory, stack, space for a result.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};

use rouse_sdk::{Error, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

/// Runs forever.
#[handler(name = "test.spin", max_attempts = 1)]
pub(crate) fn spin(_payload: Value) -> Value {
    let mut rounds = 0_u64;
    loop {
        rounds = black_box(rounds.wrapping_add(1));
    }
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Burn {
    rounds: u64,
}

/// Counts to this number.
#[handler(name = "test.burn", max_attempts = 1)]
pub(crate) fn burn(payload: Burn) -> u64 {
    let mut rounds = 0_u64;
    while rounds < payload.rounds {
        rounds = black_box(rounds.wrapping_add(1));
    }
    rounds
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Alloc {
    bytes: usize,
    /// Handle the refusal and return an error, instead of aborting.
    #[serde(default)]
    gently: bool,
}

/// The size of one allocation of `test.alloc`.
const STEP_BYTES: usize = 1 << 20;

/// Allocates at least this many bytes, and returns how many it holds.
#[handler(name = "test.alloc", max_attempts = 1)]
pub(crate) fn alloc(payload: Alloc) -> Result<usize, Error> {
    let mut held: Vec<Vec<u8>> = Vec::new();
    let mut held_bytes = 0;
    while held_bytes < payload.bytes {
        let mut step = Vec::new();
        if payload.gently {
            step.try_reserve_exact(STEP_BYTES)?;
        }
        step.resize(STEP_BYTES, 1);
        held.push(black_box(step));
        held_bytes += STEP_BYTES;
    }
    Ok(held.iter().map(Vec::len).sum())
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct Recurse {
    depth: u64,
}

/// Calls itself this many times, with some data on the stack each time.
#[handler(name = "test.recurse", max_attempts = 1)]
pub(crate) fn recurse(payload: Recurse) -> u64 {
    fn deeper(depth: u64) -> u64 {
        let here = black_box([depth; 64]);
        if depth == 0 {
            return 0;
        }
        deeper(depth - 1) + here[0] / depth
    }
    deeper(payload.depth)
}

#[derive(Deserialize, JsonSchema)]
pub(crate) struct BigResult {
    bytes: usize,
}

/// Returns a text of this many bytes.
#[handler(name = "test.big-result", max_attempts = 1)]
pub(crate) fn big_result(payload: BigResult) -> String {
    "x".repeat(payload.bytes)
}

/// Returns a text that Postgres cannot store.
#[handler(name = "test.nul-result", max_attempts = 1)]
pub(crate) fn nul_result(_payload: Value) -> &'static str {
    "\0"
}

/// Counts its calls; its instances may serve many jobs.
#[handler(name = "test.reuse.state", instances = "reuse")]
pub(crate) fn reuse_state(_payload: Value) -> u32 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed) + 1
}

/// Counts its calls, as far as one instance remembers them.
#[handler(name = "test.state")]
pub(crate) fn state(_payload: Value) -> u32 {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    CALLS.fetch_add(1, Ordering::Relaxed) + 1
}
