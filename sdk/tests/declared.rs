//! Calls that do not fit the declaration of their handler are refused natively, as on a host.

use std::time::Duration;

use rouse_sdk::{BatchJob, Ctx, Error, Job, Result, TestCtx, handler};
use serde_json::{Value, json};

/// Makes the call that its payload names.
fn call(ctx: &Ctx, name: &str) -> Result<()> {
    let day = Duration::from_secs(24 * 3600);
    match name {
        "step" => ctx.step("it", || Ok(())),
        "step_with" => ctx.step_with("it", |_| Ok(())),
        "sleep" => ctx.sleep("it", day),
        "signal" => ctx.wait_signal::<()>("it", day).map(drop),
        "call" => ctx.call(Job::new("a", &())).map(|_: Value| ()),
        "results" => ctx.results().map(drop),
        "enqueue" => ctx.enqueue(Job::new("a", &())).map(drop),
        "continue_with" => ctx.continue_with(Job::new("a", &())),
        "sql" => ctx.sql("write", ()),
        "query" => ctx.query("read", ()).map(|_: Vec<Value>| ()),
        other => Err(Error::permanent(format_args!("no call {other}"))),
    }
}

const CALLS: [(&str, &str); 9] = [
    ("step", "step_refused"),
    ("step_with", "step_refused"),
    ("sleep", "wait_refused"),
    ("signal", "wait_refused"),
    ("call", "job_refused"),
    ("results", "results_refused"),
    ("enqueue", "job_refused"),
    ("continue_with", "job_refused"),
    ("sql", "sql_refused"),
];

#[handler(
    name = "demo.one",
    sql(write = "DELETE FROM t"),
    sql(read = "SELECT 1 AS n")
)]
fn one(ctx: &Ctx, name: String) -> Result<()> {
    call(ctx, &name)
}

#[handler(
    name = "demo.many",
    batch(max = 10),
    sql(write = "DELETE FROM t"),
    sql(read = "SELECT 1 AS n")
)]
fn many(ctx: &Ctx, jobs: Vec<BatchJob<String>>) -> Vec<Result<()>> {
    jobs.iter().map(|job| call(ctx, &job.payload)).collect()
}

fn test_ctx() -> TestCtx {
    let ctx = TestCtx::new();
    ctx.on_call(|_| Ok(json!(null)));
    ctx.on_query(|_| Ok(vec![json!({"n": 1})]));
    ctx
}

#[test]
fn a_handler_of_batches_cannot_use_steps_waits_jobs_or_effects() {
    for (name, kind) in CALLS {
        let ctx = test_ctx();
        let alone = ctx.run::<many>(json!(name)).unwrap_err();
        assert_eq!((&*alone.kind, alone.permanent), (kind, true), "{name}");
        assert!(alone.message.starts_with("a handler that takes batches"));
        for outcome in ctx.run_batch::<many>(vec![json!(name); 2]) {
            assert_eq!(outcome.unwrap_err().kind, kind, "{name}");
        }
        assert!(ctx.enqueued().is_empty() && ctx.waits().is_empty());
        // Other handlers have all of these.
        assert_eq!(test_ctx().run::<one>(json!(name)).unwrap(), json!(null));
    }
    let read = test_ctx().run_batch::<many>(vec![json!("query"); 2]);
    assert!(read.iter().all(|outcome| outcome.is_ok()), "{read:?}");
}

/// Runs statements, one of which it does not declare.
#[handler(
    name = "demo.sql",
    sql(one_row = "SELECT n FROM t WHERE id = $1", rows = 1),
    sql(
        some_row = "SELECT n FROM t WHERE id = $1",
        rows = 1,
        on_error = "retry"
    ),
    sql(mark = "UPDATE t SET n = 1")
)]
fn sql(ctx: &Ctx, name: String) -> Result<usize> {
    match name.as_str() {
        "query" => Ok(ctx.query::<Value>("markt", ())?.len()),
        "step" => ctx.step_with("it", |tx| tx.sql("markt", ()).map(|()| 0)),
        "effect" => ctx.sql("markt", ()).map(|()| 0),
        "nul" => ctx.sql("mark", ("a\0b",)).map(|()| 0),
        rows => Ok(ctx.query::<Value>(rows, (7,))?.len()),
    }
}

#[test]
fn a_statement_that_the_handler_does_not_declare_is_refused() {
    for name in ["query", "step", "effect"] {
        let ctx = test_ctx();
        let error = ctx.run::<sql>(json!(name)).unwrap_err();
        assert_eq!((&*error.kind, error.permanent), ("sql_refused", true));
        assert!(
            error
                .message
                .contains("demo.sql declares no statement markt")
        );
        assert!(ctx.effects().is_empty() && ctx.steps_done().is_empty());
        // The declaration of a function that a test calls itself is not known.
        assert!(sql(&test_ctx(), name.to_owned()).is_ok());
    }
}

#[test]
fn a_parameter_with_nul_is_refused() {
    let error = test_ctx().run::<sql>(json!("nul")).unwrap_err();
    assert_eq!(error.kind, "sql_refused");
    assert!(error.message.contains("NUL character"), "{error}");
}

#[test]
fn a_query_returns_as_many_rows_as_its_statement_declares() {
    let ctx = test_ctx();
    assert_eq!(ctx.run::<sql>(json!("one_row")).unwrap(), json!(1));
    ctx.on_query(|_| Ok(vec![]));
    for (name, permanent) in [("one_row", true), ("some_row", false)] {
        let error = ctx.run::<sql>(json!(name)).unwrap_err();
        assert_eq!((&*error.kind, error.permanent), ("sql_failed", permanent));
        assert!(error.message.ends_with("expected 1, got 0"), "{error}");
        let details = json!({"statement": name, "code": "rows"});
        assert_eq!(error.details, Some(details));
    }
}

#[handler(name = "demo.job", max_attempts = 3)]
fn job(ctx: &Ctx, _payload: ()) -> (String, u32) {
    (ctx.job().handler.clone(), ctx.job().max_attempts)
}

#[handler(name = "demo.unset")]
fn unset(ctx: &Ctx, _payload: ()) -> u32 {
    ctx.job().max_attempts
}

#[test]
fn the_job_has_the_name_and_the_maximum_number_of_attempts_of_its_handler() {
    let ctx = TestCtx::new();
    assert_eq!(ctx.run::<job>(json!(null)).unwrap(), json!(["demo.job", 3]));
    assert_eq!(ctx.run::<unset>(json!(null)).unwrap(), json!(20));
    assert_eq!(ctx.job().handler, "test");
    let suspended = TestCtx::new();
    let day = Duration::from_secs(24 * 3600);
    let _ = suspended.attempt(|ctx| ctx.sleep("it", day)).suspended();
    let resumed = suspended.resumed();
    assert_eq!(resumed.run::<job>(json!(null)).unwrap()[1], 4);
    assert_eq!(resumed.run::<unset>(json!(null)).unwrap(), json!(21));
    let of_its_own = TestCtx::for_job(|job| job.max_attempts = 5);
    assert_eq!(of_its_own.run::<job>(json!(null)).unwrap()[1], 5);
}

/// Starts the same step twice, once through each of two runs of the same attempt.
#[test]
fn steps_of_an_attempt_keep_their_numbers_across_runs() {
    let ctx = TestCtx::new();
    ctx.step("it", || Ok(())).unwrap();
    ctx.run::<one>(json!("step")).unwrap();
    ctx.step("it", || Ok(())).unwrap();
    assert_eq!(ctx.steps_done(), ["it", "it#2", "it#3"]);
}

#[handler(name = "demo.nul")]
fn nul(_payload: ()) -> Vec<&'static str> {
    vec!["a", "b\0"]
}

#[test]
fn a_result_that_postgres_cannot_store_is_retried() {
    let error = TestCtx::new().run::<nul>(json!(null)).unwrap_err();
    assert_eq!((&*error.kind, error.permanent), ("invalid_result", false));
    assert!(error.message.contains("\\u0000"), "{error}");
}
