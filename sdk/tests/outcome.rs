//! What an attempt leaves behind natively, as on a host.

use std::time::Duration;

use rouse_sdk::{AbortReason, Attempt, BatchJob, Ctx, Error, Job, Result, TestCtx, Wait, handler};
use serde_json::json;

const DAY: Duration = Duration::from_secs(24 * 3600);

/// An effect, a step with another one, a job, and what the payload requests.
#[handler(
    name = "demo.leave",
    sql(one = "INSERT INTO one VALUES ($1)"),
    sql(two = "INSERT INTO two VALUES ($1)")
)]
fn leave(ctx: &Ctx, end: String) -> Result<String> {
    ctx.step_with("first", |tx| tx.sql("one", (1,)))?;
    ctx.sql("two", (2,))?;
    ctx.enqueue(Job::new("demo.other", &()))?;
    match end.as_str() {
        "fail" => return Err(Error::retryable("as requested")),
        "sleep" => ctx.sleep("a day", DAY)?,
        _ => {}
    }
    ctx.info("done");
    ctx.progress(100, "done");
    Ok(end)
}

fn left(ctx: &TestCtx) -> (Vec<String>, usize) {
    let effects = ctx.effects().into_iter();
    let effects = effects.map(|effect| effect.statement).collect();
    (effects, ctx.enqueued().len())
}

fn names(names: &[&str]) -> Vec<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[test]
fn an_attempt_that_fails_or_is_suspended_leaves_only_the_effects_of_its_steps() {
    let ended = TestCtx::new();
    let result = ended.attempt(|ctx| leave(ctx, "succeed".to_owned()));
    assert_eq!(result.ended().unwrap(), "succeed");
    assert_eq!(left(&ended), (names(&["one", "two"]), 1));

    let failed = TestCtx::new();
    let result = failed.attempt(|ctx| leave(ctx, "fail".to_owned()));
    assert_eq!(result.ended().unwrap_err().message, "as requested");
    assert_eq!(left(&failed), (names(&["one"]), 0));

    let suspended = TestCtx::new();
    let result = suspended.attempt(|ctx| leave(ctx, "sleep".to_owned()));
    assert!(matches!(result.suspended(), Wait::Sleep { .. }));
    assert_eq!(left(&suspended), (names(&["one"]), 0));
    let resumed = suspended.resumed();
    let result = resumed.attempt(|ctx| leave(ctx, "sleep".to_owned()));
    assert_eq!(result.ended().unwrap(), "sleep");
    assert_eq!(left(&resumed), (names(&["two"]), 1));
}

/// Ignores the abort signal, which fires while it runs.
#[handler(name = "demo.ignore")]
fn ignore(ctx: &Ctx, _payload: ()) -> &'static str {
    ctx.info("after the signal");
    ctx.progress(50, "after the signal");
    "a result"
}

#[test]
fn a_result_after_the_abort_signal_is_dropped_with_lines_and_progress() {
    let ctx = TestCtx::new();
    ctx.info("before the signal");
    ctx.progress(10, "before the signal");
    ctx.fire_abort(AbortReason::TimedOut);
    let error = ctx.run::<ignore>(json!(null)).unwrap_err();
    assert_eq!((&*error.kind, error.permanent), ("aborted", false));
    assert_eq!(ctx.logs().len(), 1);
    assert_eq!(ctx.progress_reports().len(), 1);
}

#[test]
fn jobs_and_effects_from_before_the_abort_signal_are_dropped() {
    let ctx = TestCtx::new();
    let attempt = ctx.attempt(|ctx| {
        let result = leave(ctx, "succeed".to_owned());
        ctx.fire_abort(AbortReason::Cancelled);
        result
    });
    let Attempt::Ended(Err(error)) = attempt else {
        panic!("the result is dropped: {attempt:?}");
    };
    assert_eq!(error.kind, "aborted");
    assert_eq!(left(&ctx), (names(&["one"]), 0));
}

/// Gives its jobs their outcomes.
#[handler(name = "demo.batch", batch(max = 10))]
fn batch(jobs: Vec<BatchJob<u32>>) -> Vec<Result<u32>> {
    jobs.iter().map(|job| Ok(job.payload)).collect()
}

#[test]
fn jobs_of_a_batch_have_no_outcome_after_the_abort_signal() {
    for payloads in [vec![json!(1)], vec![json!(1), json!(2)]] {
        let ctx = TestCtx::new();
        ctx.fire_abort(AbortReason::Shutdown);
        for outcome in ctx.run_batch::<batch>(payloads) {
            assert_eq!(outcome.unwrap_err().kind, "aborted");
        }
    }
}
