//! Schemas that are designed to be checked forever.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rouse::job::{AbortReason, JobId, RunEnd};
use rouse::sandbox::{AbortHandle, JobInput, Journal, Limits, RunReport, Sandbox, Settings};
use tokio::time::timeout;

use super::Harmless;
use crate::sandbox_guest::{Handlers, MEMORY_BYTES_MAX, TIMEOUT, assemble, guest, job, sandbox};
use crate::support::{Progress, attempt, rouse_binary};

/// Concurrent attempts: more than there are threads for guests on the machines that run the tests.
const ATTEMPTS: usize = 8;

/// Each level of the schema tries both alternatives of the next and needs the evaluated members of each: 2^40 steps in
/// all.
fn doubling_schema() -> String {
    let levels: String = (0..40)
        .map(|n| {
            let next = format!(r##"{{"$ref": "#/$defs/l{}"}}"##, n + 1);
            format!(r#""l{n}": {{"anyOf": [{next}, {next}]}},"#)
        })
        .collect();
    format!(
        r##"{{"$ref": "#/$defs/l0", "unevaluatedProperties": false, "$defs": {{{levels} "l40": true}}}}"##
    )
}

fn doubling(which: &str) -> Vec<u8> {
    let schema = doubling_schema();
    guest(
        &format!(r#"{{"handlers": [{{"name": "test.doubling", "{which}": {schema}}}]}}"#),
        "(call $return_ok (local.get $payload) (local.get $payload_len))",
    )
}

#[tokio::test]
async fn a_schema_that_needs_endless_work_ends_its_attempt_and_does_not_block_others() {
    let harmless = Harmless::measure().await;
    for (which, refused_as) in [
        (
            "input_schema",
            "payload cannot be checked against the schema: that would take too many steps",
        ),
        (
            "output_schema",
            "result cannot be checked against the schema: that would take too many steps",
        ),
    ] {
        let handlers = Handlers::with(&[("hostile.wasm", &doubling(which))]).await;
        let handler = handlers.handler("test.doubling");
        let checks = async || {
            let running: Vec<_> = (0..ATTEMPTS)
                .map(|_| attempt(&sandbox(), &handler, job(r#"{"a": 7}"#), AbortHandle::new()))
                .collect();
            for running in running {
                let run = tokio::time::timeout(TIMEOUT, running).await;
                match run.expect("the check ends").end {
                    RunEnd::PayloadRefused(why) | RunEnd::ResultRefused(why) => {
                        assert!(why.starts_with(refused_as), "{why}");
                    }
                    other => panic!("{which}: {other:?}"),
                }
            }
        };
        harmless.is_not_slowed_by(which, checks).await;
    }
}

#[tokio::test]
async fn an_aborted_attempt_does_not_wait_for_its_schema_check() {
    let handlers = Handlers::with(&[("hostile.wasm", &doubling("input_schema"))]).await;
    let handler = handlers.handler("test.doubling");
    // Enough steps for several seconds.
    let payload = format!(r#"{{"a": [{}7]}}"#, "1234567890,".repeat(90_000));
    let until = Instant::now() + TIMEOUT;
    // If this machine is so slow that the checks end before the abort, there is another round.
    loop {
        let aborts: Vec<AbortHandle> = (0..ATTEMPTS).map(|_| AbortHandle::new()).collect();
        let running: Vec<_> = aborts
            .iter()
            .map(|abort| attempt(&sandbox(), &handler, job(&payload), abort.clone()))
            .collect();
        tokio::time::sleep(Duration::from_millis(20)).await;
        for abort in &aborts {
            abort.abort(AbortReason::Cancelled, Duration::from_secs(3600));
        }
        let mut ends = Vec::new();
        for running in running {
            let run = tokio::time::timeout(TIMEOUT, running).await;
            ends.push(run.expect("the attempt does not wait").end);
        }
        let is_aborted = |end: &RunEnd| matches!(end, RunEnd::Aborted(AbortReason::Cancelled));
        if ends.iter().all(is_aborted) {
            return;
        }
        assert!(Instant::now() < until, "{ends:?}");
    }
}

#[tokio::test]
async fn the_cpu_time_of_a_check_is_that_of_its_attempt_and_has_the_same_limit() {
    let files = [
        ("input.wasm", doubling("input_schema")),
        ("output.wasm", doubling("output_schema")),
    ];
    let limit = Duration::from_millis(5);
    let small = Sandbox::start(Settings {
        attempts_max: 2,
        limits: Limits {
            memory_bytes: MEMORY_BYTES_MAX,
            cpu: limit,
            ..Limits::default()
        },
        compiler: Some(rouse_binary()),
        ..Settings::default()
    });
    let small = small.expect("a sandbox");
    for (name, module) in &files {
        // Two million steps take a tenth of a second.
        let handlers = Handlers::on(small.clone(), &[(*name, module.as_slice())]).await;
        let handler = handlers.handler("test.doubling");
        let run = attempt(&small, &handler, job(r#"{"a": 7}"#), AbortHandle::new());
        let run = timeout(TIMEOUT, run).await.expect("the check ends");
        assert_eq!(run.end, RunEnd::OutOfCpu { limit }, "{name}");
        let used = run.used.expect("the check has used CPU time");
        assert!(used.cpu > limit, "{name}: {used:?}");
    }

    let handlers = Handlers::with(&[("output.wasm", &files[1].1)]).await;
    let handler = handlers.handler("test.doubling");
    let run = attempt(&sandbox(), &handler, job(r#"{"a": 7}"#), AbortHandle::new());
    let run = timeout(TIMEOUT, run).await.expect("the check ends");
    assert!(matches!(run.end, RunEnd::ResultRefused(_)), "{:?}", run.end);
    let used = run.used.expect("a guest ran");
    assert!(used.cpu > limit, "{used:?}");
}

/// As in a batch whose jobs run again one by one.
#[tokio::test]
async fn a_payload_that_was_checked_before_is_not_checked_again_and_the_check_counts() {
    let handlers = Handlers::with(&[("hostile.wasm", &doubling("input_schema"))]).await;
    let handler = handlers.handler("test.doubling");
    let checked = Duration::from_secs(60);
    let input = JobInput {
        payload_checked: Some(checked),
        ..job(r#"{"a": 7}"#)
    };
    let run = attempt(&sandbox(), &handler, input, AbortHandle::new());
    let run = timeout(TIMEOUT, run).await.expect("the attempt ends");
    // Another check would refuse it.
    assert_eq!(run.end, RunEnd::Returned(br#"{"a": 7}"#.into()));
    let used = run.used.expect("a guest ran");
    assert!(used.cpu > checked, "{used:?}");
}

/// A guest that gives each of the jobs 1 to `jobs` the payload of the first as its outcome, reports progress, and
/// waits.
fn settles(jobs: usize, output_schema: &str) -> Vec<u8> {
    let manifest = format!(
        r#"{{"handlers": [{{"name": "test.batch", "gates": [{{"kind": "batch", "max": {jobs}}}], "output_schema": {output_schema}}}]}}"#
    );
    let describe = format!(
        "(call $text (i32.const 4096) (i32.const {}))",
        manifest.len()
    );
    let import = r#"(import "rouse:handler/batch@0.1.0" "settle" (func $settle
        (param i64) (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i32) (param i64) (param i32)))"#;
    let run = format!(
        "(local $n i64)
         (local.set $n (i64.const {jobs}))
         (loop $more
            (call $settle (local.get $n)
                (i32.const 0) (local.get $payload) (local.get $payload_len)
                (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 0)
                (i64.const 0) (i32.const 200))
            (if (i32.load8_u (i32.const 200)) (then unreachable))
            (local.set $n (i64.sub (local.get $n) (i64.const 1)))
            (br_if $more (i32.wrap_i64 (local.get $n))))
         (call $progress (i32.const 50) (i32.const 4096) (i32.const 4))
         (call $wait_for_abort)
         (call $return_ok (local.get $payload) (local.get $payload_len))"
    );
    assemble(import, &describe, &manifest, &run)
}

/// Runs this many jobs as a batch, and stops the attempt at once when all of them have an outcome.
async fn stop_settled(jobs: usize, output_schema: &str) -> RunReport {
    let handlers = Handlers::with(&[("batch.wasm", &settles(jobs, output_schema))]).await;
    let handler = handlers.handler("test.batch");
    let (abort, progress) = (AbortHandle::new(), Progress::new());
    let ids = 1..=i64::try_from(jobs).expect("it fits");
    let inputs = ids.map(|id| JobInput {
        id: JobId(id),
        ..job(r#"{"a": 7}"#)
    });
    let run = sandbox().run_batch(
        &handler,
        inputs.collect(),
        abort.clone(),
        Some(progress.clone() as Arc<dyn Journal>),
    );
    let running = sandbox().guests().spawn(run);
    // All jobs have an outcome.
    progress.reported(1).await;
    abort.abort(AbortReason::TimedOut, Duration::ZERO);
    let run = timeout(TIMEOUT, running).await;
    run.expect("the attempt ends soon after the hard stop")
        .expect("it does not panic")
}

#[tokio::test]
async fn the_outcomes_of_a_batch_are_checked_only_for_a_few_seconds_after_the_hard_stop() {
    let timed_out = RunEnd::Aborted(AbortReason::TimedOut);
    // Each of these checks takes a tenth of a second or more: in all, the better part of a minute.
    let run = stop_settled(500, &doubling_schema()).await;
    assert_eq!(run.end, timed_out);
    assert!(run.of_jobs.len() < 500, "{}", run.of_jobs.len());
    // Outcomes that were given before the stop count.
    let run = stop_settled(3, r#"{"type": "object"}"#).await;
    assert_eq!(run.end, timed_out);
    let mut settled = run.of_jobs;
    settled.sort_by_key(|(job, _)| job.0);
    let returned = RunEnd::Returned(br#"{"a": 7}"#.into());
    let each = [1, 2, 3].map(|id| (JobId(id), returned.clone()));
    assert_eq!(settled, each);
}
