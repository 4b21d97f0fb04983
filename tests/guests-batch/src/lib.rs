//! A handler that takes batches, for the tests of the host. Each job determines its own outcome, or that of the whole
//! batch.

use std::time::{Duration, SystemTime};

use rouse_sdk::{BatchJob, Ctx, Error, export, handler};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Deserialize, JsonSchema, Default, PartialEq, Clone, Copy)]
#[serde(rename_all = "kebab-case")]
enum Does {
    #[default]
    Succeeds,
    /// From here to `ReturnsTooMuch`: the outcome of this job only.
    Fails,
    FailsForNow,
    FailsForAMinute,
    RetriesInAMinute,
    ReturnsTooMuch,
    /// From here to `LeavesOneOut`: the whole attempt.
    Panics,
    Spins,
    Sleeps,
    FailsAll,
    LeavesOneOut,
    /// From here on: calls that an attempt at several jobs must not make.
    RunsAStep,
    Waits,
    ReadsResults,
}

#[derive(Deserialize, JsonSchema)]
struct Payload {
    #[serde(default)]
    does: Does,
    /// How long the attempt takes, for `sleeps`, in milliseconds.
    #[serde(default)]
    ms: u64,
}

/// Returns the size and the first job of its batch, and its own attempt and tenant.
#[handler(
    name = "batch.any",
    batch(max = 4, period = "400ms"),
    max_attempts = 2,
    retry_initial = "10ms",
    retry_jitter = 0.0,
    lease = "20s",
    timeout = "3s",
    grace = "100ms"
)]
async fn any(ctx: &Ctx, jobs: Vec<BatchJob<Payload>>) -> Result<Vec<Result<Value, Error>>, Error> {
    let does = |what: Does| jobs.iter().any(|job| job.payload.does == what);
    let ms = jobs.iter().map(|job| job.payload.ms).max();
    if does(Does::Panics) {
        panic!("one of {} jobs panics", jobs.len());
    }
    while does(Does::Spins) {
        std::hint::black_box(0);
    }
    if does(Does::Sleeps) {
        ctx.progress(1, "sleeping");
        rouse_sdk::sleep(Duration::from_millis(ms.unwrap_or_default())).await;
    }
    if does(Does::FailsAll) {
        return Err(Error::permanent("the whole batch is wrong").kind("all"));
    }
    if does(Does::RunsAStep) {
        ctx.step("step", || Ok::<_, Error>(1))?;
    }
    if does(Does::Waits) {
        ctx.sleep("wait", Duration::from_secs(60))?;
    }
    if does(Does::ReadsResults) {
        ctx.results()?;
    }
    ctx.info(format_args!("a batch of {}", jobs.len()));
    let mut outcomes: Vec<Result<Value, Error>> = jobs
        .iter()
        .map(|job| match job.payload.does {
            Does::Fails => Err(Error::permanent("this job is wrong").kind("own")),
            Does::FailsForNow => Err(Error::retryable("not now")),
            Does::FailsForAMinute => {
                Err(Error::retryable("not now").retry_after(Duration::from_secs(60)))
            }
            Does::RetriesInAMinute => {
                let at = SystemTime::now() + Duration::from_secs(60);
                Err(Error::retryable("not now").retry_at(at))
            }
            Does::ReturnsTooMuch => Ok(Value::String("x".repeat(2 << 20))),
            _ => Ok(json!({
                "size": jobs.len(),
                "first": jobs[0].info.id,
                "attempt": job.info.attempt,
                "tenant": job.info.tenant,
            })),
        })
        .collect();
    if does(Does::LeavesOneOut) {
        outcomes.pop();
    }
    Ok(outcomes)
}

export!(any);
