//! Schemas that are designed to be checked forever.

use std::time::Duration;

use rouse::job::{AbortReason, RunEnd};
use rouse::sandbox::AbortHandle;

use super::{ALWAYS_ALLOWED, Neighbour, SLOWDOWN_MAX};
use crate::sandbox_guest::{Handlers, TIMEOUT, echo, guest, job, sandbox};
use crate::support::attempt;

/// Concurrent attempts: more than there are threads for guests on the machines that run the tests.
const ATTEMPTS: usize = 8;

/// Each level of the schema tries both alternatives of the next and needs the evaluated members of each: 2^40 steps in
/// all.
fn doubling(which: &str) -> Vec<u8> {
    let levels: String = (0..40)
        .map(|n| {
            let next = format!(r##"{{"$ref": "#/$defs/l{}"}}"##, n + 1);
            format!(r#""l{n}": {{"anyOf": [{next}, {next}]}},"#)
        })
        .collect();
    let schema = format!(
        r##"{{"$ref": "#/$defs/l0", "unevaluatedProperties": false, "$defs": {{{levels} "l40": true}}}}"##
    );
    guest(
        &format!(r#"{{"handlers": [{{"name": "test.doubling", "{which}": {schema}}}]}}"#),
        "(call $return_ok (local.get $payload) (local.get $payload_len))",
    )
}

#[tokio::test]
async fn a_schema_that_needs_endless_work_ends_its_attempt_and_does_not_block_others() {
    let others = Handlers::with(&[("harmless.wasm", &echo("test.echo", "1"))]).await;
    let neighbour = others.handler("test.echo");
    let alone = Neighbour::start(neighbour.clone());
    tokio::time::sleep(Duration::from_millis(200)).await;
    let alone = alone.end().await;
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
        let neighbour = Neighbour::start(neighbour.clone());
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
        let slowed = neighbour.end().await;
        assert!(
            slowed <= (alone * SLOWDOWN_MAX).max(ALWAYS_ALLOWED),
            "{which}: the neighbour took {slowed:?} instead of {alone:?}"
        );
    }
}

#[tokio::test]
async fn an_aborted_attempt_does_not_wait_for_its_schema_check() {
    let handlers = Handlers::with(&[("hostile.wasm", &doubling("input_schema"))]).await;
    let handler = handlers.handler("test.doubling");
    // Enough steps for several seconds.
    let payload = format!(r#"{{"a": [{}7]}}"#, "1234567890,".repeat(90_000));
    let aborts: Vec<AbortHandle> = (0..ATTEMPTS).map(|_| AbortHandle::new()).collect();
    let running: Vec<_> = aborts
        .iter()
        .map(|abort| attempt(&sandbox(), &handler, job(&payload), abort.clone()))
        .collect();
    tokio::time::sleep(Duration::from_millis(20)).await;
    for abort in &aborts {
        abort.abort(AbortReason::Cancelled, Duration::from_secs(60));
    }
    for running in running {
        let run = tokio::time::timeout(TIMEOUT, running).await;
        let end = run.expect("the attempt does not wait").end;
        assert!(
            matches!(end, RunEnd::Aborted(AbortReason::Cancelled)),
            "{end:?}"
        );
    }
}
