//! Handlers that leave evidence of each of their attempts outside the database.
//!
//! The evidence is the names of empty files: `JOB.ATTEMPT.NONCE.MICROSECONDS.start`, `….did`, `….step`, `….tick` and
//! `….end`. One system call creates a file, so a kill cannot leave half of it.

mod pay;
mod suspending;

use std::collections::hash_map::RandomState;
use std::fs::File;
use std::hash::{BuildHasher as _, Hasher as _};
use std::time::{Duration, SystemTime};

use rouse_sdk::{Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

/// The time between two ticks, in milliseconds.
const TICK_MS: u64 = 100;
/// The mount point of the operator's grant.
const EVIDENCE: &str = "/evidence";

/// The task of an attempt.
#[derive(Deserialize, JsonSchema)]
struct Work {
    /// The job's number in the ledger.
    n: i64,
    /// How long it sleeps before it ends.
    #[serde(default)]
    sleep_ms: u64,
    /// Attempts up to this one fail.
    #[serde(default)]
    fail_attempts: u32,
    /// It fails permanently.
    #[serde(default)]
    hopeless: bool,
    /// It also fails permanently before this time, in microseconds since 1970.
    #[serde(default)]
    fails_until_us: u64,
    /// It does a step in the middle of its sleep, and reports its progress.
    #[serde(default)]
    steps: bool,
    /// It leaves evidence every 100 ms while it sleeps, until it is refused.
    #[serde(default)]
    ticks: bool,
}

/// Identifies this attempt independently of the database.
struct Witness {
    job: i64,
    attempt: u32,
    nonce: String,
}

impl Witness {
    /// Leaves evidence that an attempt has started.
    fn start(ctx: &Ctx) -> Result<Self, Error> {
        let witness = Self {
            job: ctx.job().id,
            attempt: ctx.job().attempt,
            // The keys come from the host's random numbers, and differ for each instance.
            nonce: format!("{:016x}", RandomState::new().build_hasher().finish()),
        };
        witness.leave("start")?;
        Ok(witness)
    }

    fn leave(&self, event: &str) -> Result<(), Error> {
        let at_us = now_us()?;
        let Self {
            job,
            attempt,
            nonce,
        } = self;
        File::create_new(format!(
            "{EVIDENCE}/{job}.{attempt}.{nonce}.{at_us}.{event}"
        ))?;
        Ok(())
    }

    fn to_json(&self) -> Value {
        json!({"attempt": self.attempt, "nonce": self.nonce})
    }
}

/// Sleeps, then fails or succeeds as its payload requests. The result, or the details of the error, identify the
/// attempt.
#[handler(name = "chaos.work", capabilities = ["dirs"])]
async fn work(ctx: &Ctx, work: Work) -> Result<Value, Error> {
    attempt(ctx, work).await
}

/// Like `chaos.work`; the run sets a lease so long that it is not renewed during the attempt.
#[handler(name = "chaos.patient", capabilities = ["dirs"])]
async fn patient(ctx: &Ctx, work: Work) -> Result<Value, Error> {
    attempt(ctx, work).await
}

/// Like `chaos.work`; the run sets gates for it.
#[handler(name = "chaos.gated", capabilities = ["dirs"])]
async fn gated(ctx: &Ctx, work: Work) -> Result<Value, Error> {
    attempt(ctx, work).await
}

async fn attempt(ctx: &Ctx, work: Work) -> Result<Value, Error> {
    let witness = Witness::start(ctx)?;
    let mut result = witness.to_json();
    result["n"] = work.n.into();
    let mut sleep_ms = work.sleep_ms;
    if work.steps {
        ctx.progress(10, &witness.nonce);
        sleep(sleep_ms / 2).await;
        sleep_ms -= sleep_ms / 2;
        let first: String = ctx.step("first", || Ok(witness.nonce.clone()))?;
        if first == witness.nonce {
            witness.leave("step")?;
        }
        result["first"] = first.into();
        ctx.progress(50, &witness.nonce);
    }
    while work.ticks && sleep_ms > TICK_MS {
        sleep(TICK_MS).await;
        witness.leave("tick")?;
        sleep_ms -= TICK_MS;
    }
    sleep(sleep_ms).await;
    witness.leave("end")?;
    if work.hopeless || now_us()? < u128::from(work.fails_until_us) {
        return Err(Error::permanent("as the payload requests")
            .kind("hopeless")
            .details(witness.to_json()));
    }
    if witness.attempt <= work.fail_attempts {
        return Err(Error::retryable("as the payload requests")
            .kind("flaky")
            .details(witness.to_json()));
    }
    Ok(result)
}

fn now_us() -> Result<u128, Error> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(since.as_micros())
}

async fn sleep(ms: u64) {
    if ms > 0 {
        rouse_sdk::sleep(Duration::from_millis(ms)).await;
    }
}

/// Computes until its run timeout stops it.
#[handler(name = "chaos.spin", capabilities = ["dirs"])]
fn spin(ctx: &Ctx, work: Work) -> Result<Value, Error> {
    Witness::start(ctx)?;
    let mut n = work.n;
    loop {
        n = std::hint::black_box(n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
    }
}

export!(work, patient, gated, spin, suspending::suspending, pay::pay);
