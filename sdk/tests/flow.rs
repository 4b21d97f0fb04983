//! Children, chains, parents and waits, natively.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, SystemTime};

use rouse_sdk::http::{self, Response};
use rouse_sdk::{
    AbortReason, Ctx, End, Error, Failure, Job, OnFailure, Result, TestCtx, Wait, block_on, handler,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

const DAY: Duration = Duration::from_secs(24 * 3600);

#[derive(Deserialize, Serialize, JsonSchema)]
struct Photo {
    path: String,
}

#[derive(Debug, PartialEq, Deserialize, Serialize, JsonSchema)]
struct Small {
    bytes: u64,
}

#[handler(name = "photo.resize", capabilities = ["enqueue:photo.*"])]
fn resize(photo: Photo) -> Small {
    Small {
        bytes: photo.path.len() as u64,
    }
}

/// Enqueues a job, continues with another, and then fails if the payload requests it.
#[handler(name = "photo.import")]
fn import(ctx: &Ctx, fails: bool) -> Result<()> {
    let path = "a".to_owned();
    let resized = ctx.enqueue(Job::of::<resize>(&Photo { path }).queue("bulk"))?;
    let report = Job::new("photo.report", &json!({"n": 1}));
    ctx.continue_with(report.after_or("a", &resized, OnFailure::Run))?;
    match fails {
        true => Err(Error::retryable("as requested")),
        false => Ok(()),
    }
}

#[test]
fn a_successful_attempt_enqueues_jobs() {
    let ctx = TestCtx::new();
    ctx.run::<import>(json!(false)).unwrap();
    let enqueued = ctx.enqueued();
    assert_eq!(enqueued.len(), 1);
    assert_eq!(enqueued[0].handler, "photo.resize");
    assert_eq!(enqueued[0].payload, json!({"path": "a"}));
    assert_eq!(enqueued[0].options, json!({"queue": "bulk"}));
    let next = ctx.continued_with().unwrap();
    assert_eq!(next.handler, "photo.report");
    let after = json!({"after": {"a": {"job": -1, "on_failure": "run"}}});
    assert_eq!(next.options, after);
}

#[test]
fn an_attempt_that_fails_or_is_suspended_enqueues_nothing() {
    let ctx = TestCtx::new();
    ctx.run::<import>(json!(true)).unwrap_err();
    assert_eq!((ctx.enqueued(), ctx.continued_with()), (vec![], None));

    let ctx = TestCtx::new();
    let suspended = ctx.attempt(|ctx| {
        import(ctx, false)?;
        ctx.sleep("later", DAY)
    });
    assert!(matches!(suspended.suspended(), Wait::Sleep { .. }));
    assert_eq!((ctx.enqueued(), ctx.continued_with()), (vec![], None));
    let resumed = ctx.resumed();
    let ended = resumed.attempt(|ctx| {
        import(ctx, false)?;
        ctx.sleep("later", DAY)
    });
    ended.ended().unwrap();
    assert_eq!(resumed.enqueued().len(), 1);
}

#[test]
fn a_chain_is_continued_once() {
    let ctx = TestCtx::new();
    ctx.continue_with(Job::new("a", &())).unwrap();
    let error = ctx.continue_with(Job::new("b", &())).unwrap_err();
    assert_eq!(error.kind, "job_refused");
    assert_eq!(ctx.continued_with().unwrap().handler, "a");
}

#[test]
fn parents_are_read_by_name() {
    let ctx = TestCtx::new();
    assert!(ctx.results().unwrap().is_empty());
    ctx.set_parent("b", End::Succeeded, json!({"bytes": 7}));
    let error = json!({"kind": "guest_error", "guest_kind": "no_stock", "message": "none left"});
    ctx.set_parent("a", End::Failed, error.clone());
    ctx.set_parent("c", End::Deleted, json!(null));

    let parents = ctx.results().unwrap();
    let names: Vec<&str> = parents.iter().map(|parent| parent.name()).collect();
    assert_eq!((names, parents.len()), (vec!["a", "b", "c"], 3));
    assert_eq!(parents.get::<Small>("b").unwrap(), Small { bytes: 7 });
    assert_eq!(parents.parent("b").unwrap().failure(), None);

    let failed = parents.get::<Small>("a").unwrap_err();
    assert_eq!(failed.kind, "parent_failed");
    assert!(failed.permanent && failed.message.contains("none left"));
    assert_eq!(failed.details.unwrap()["error"], error);
    let failure = parents.parent("a").unwrap().failure().unwrap();
    assert_eq!(failure.kind, "no_stock");
    let deleted = parents.parent("c").unwrap();
    assert_eq!((deleted.end(), deleted.job()), (End::Deleted, None));
    assert_eq!(deleted.failure().unwrap().kind, "deleted");

    let missing = parents.get::<Small>("d").unwrap_err();
    assert!(missing.kind == "no_parent" && missing.permanent);
    let mismatch = parents.get::<String>("b").unwrap_err();
    assert!(mismatch.kind == "result_mismatch" && !mismatch.permanent);
}

#[test]
fn without_an_attempt_time_passes_at_once() {
    let ctx = TestCtx::new();
    let time = SystemTime::UNIX_EPOCH + Duration::from_millis(4_102_444_800_123);
    for _ in 0..2 {
        ctx.sleep("nap", DAY).unwrap();
    }
    ctx.sleep("short", Duration::from_millis(1999)).unwrap();
    ctx.sleep_until("2100", time).unwrap();
    ctx.sleep_until("1970", SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(ctx.wait_signal::<u32>("go", DAY).unwrap(), None);
    ctx.send_signal("go", json!(1));
    ctx.send_signal("go", json!(2));
    assert_eq!(ctx.wait_signal::<u32>("go", DAY).unwrap(), Some(1));
    assert_eq!(ctx.wait_signal::<u32>("go", None).unwrap(), Some(2));
    let sleep = |name: &str| Wait::Sleep {
        name: name.to_owned(),
        duration: DAY,
    };
    let until = Wait::SleepUntil {
        name: "2100".to_owned(),
        time,
    };
    let signal = Wait::Signal {
        name: "go".to_owned(),
        timeout: Some(DAY),
    };
    assert_eq!(ctx.waits(), [sleep("nap"), sleep("nap#2"), until, signal]);
}

#[test]
#[should_panic(expected = "the handler waits for the signal \"go\" without a timeout")]
fn a_signal_that_nobody_sends_is_reported() {
    let _ = TestCtx::new().wait_signal::<u32>("go", None);
}

/// A step, then a sleep, three times.
fn nap_thrice(ctx: &Ctx, works: &Cell<u32>) -> Result<u32> {
    for _ in 0..3 {
        ctx.step("work", || {
            works.set(works.get() + 1);
            Ok(())
        })?;
        ctx.sleep("nap", DAY)?;
    }
    Ok(works.get())
}

#[test]
fn a_resumed_attempt_does_not_repeat_steps_or_waits() {
    let works = Cell::new(0);
    let mut ctx = TestCtx::for_job(|job| job.attempt = 4);
    for nth in 1..=3 {
        let wait = ctx.attempt(|ctx| nap_thrice(ctx, &works)).suspended();
        let name = match nth {
            1 => "nap".to_owned(),
            nth => format!("nap#{nth}"),
        };
        assert_eq!(
            wait,
            Wait::Sleep {
                name,
                duration: DAY
            }
        );
        ctx = ctx.resumed();
        // As on a host: suspended attempts have a number, and do not count.
        assert_eq!(
            (ctx.job().attempt, ctx.job().max_attempts),
            (4 + nth, 20 + nth)
        );
    }
    let ended = ctx.attempt(|ctx| nap_thrice(ctx, &works)).ended();
    assert_eq!(ended.unwrap(), 3);
    assert_eq!(ctx.waits().len(), 3);
    // Nor does the attempt after a failure.
    let retried = ctx.next_attempt();
    let ended = retried.attempt(|ctx| nap_thrice(ctx, &works)).ended();
    assert_eq!((ended.unwrap(), retried.job().attempt), (3, 8));
    let other = retried.next_job();
    assert_eq!((other.job().attempt, other.job().max_attempts), (1, 20));
}

#[test]
fn a_signal_ends_one_wait_before_its_timeout() {
    let wait = |ctx: &TestCtx| ctx.wait_signal::<u32>("go", DAY);
    let first = TestCtx::new();
    let signal = Wait::Signal {
        name: "go".to_owned(),
        timeout: Some(DAY),
    };
    assert_eq!(first.attempt(wait).suspended(), signal);
    let timed_out = first.resumed();
    assert_eq!(timed_out.attempt(wait).ended().unwrap(), None);
    first.send_signal("go", json!(7));
    let signalled = first.resumed();
    assert_eq!(signalled.attempt(wait).ended().unwrap(), Some(7));
    // A signal that was sent early.
    let early = TestCtx::new();
    early.send_signal("go", json!(8));
    assert_eq!(early.attempt(wait).ended().unwrap(), Some(8));
}

#[test]
fn a_wait_for_a_signal_with_a_timeout_of_zero_ends_at_once() {
    let poll = |ctx: &TestCtx| ctx.wait_signal::<u32>("go", Duration::ZERO);
    let none = TestCtx::new();
    assert_eq!(none.attempt(poll).ended().unwrap(), None);
    assert!(none.waits().is_empty());
    let sent = TestCtx::new();
    sent.send_signal("go", json!(7));
    assert_eq!(sent.attempt(poll).ended().unwrap(), Some(7));
}

#[test]
fn without_a_signal_and_a_timeout_the_next_attempt_waits_again() {
    let wait = |ctx: &TestCtx| ctx.wait_signal::<String>("go", None);
    let first = TestCtx::new();
    let _ = first.attempt(wait).suspended();
    let second = first.resumed();
    let _ = second.attempt(wait).suspended();
    second.send_signal("go", json!(1));
    let error = second.resumed().attempt(wait).ended().unwrap_err();
    assert_eq!((&*error.kind, error.permanent), ("result_mismatch", false));
}

#[test]
fn calls_return_results_and_failures_in_their_order() {
    fn all(ctx: &Ctx) -> Result<Vec<Result<Small, Failure>>> {
        let photo = |n: usize| Photo {
            path: "x".repeat(n),
        };
        ctx.call_all((0..3).map(|n| Job::of::<resize>(&photo(n))))
    }
    let ctx = TestCtx::new();
    let called = Rc::new(Cell::new(0));
    let counter = Rc::clone(&called);
    ctx.on_call(move |job| {
        counter.set(counter.get() + 1);
        match job.payload["path"].as_str().map(str::len) {
            Some(1) => Err(Error::permanent("no such file")
                .kind("no_file")
                .details(json!({"n": 1}))),
            len => Ok(json!({"bytes": len})),
        }
    });
    let Wait::Calls(jobs) = ctx.attempt(|ctx| all(ctx)).suspended() else {
        panic!("the attempt waits for calls");
    };
    assert_eq!((jobs.len(), called.get()), (3, 0));
    let resumed = ctx.resumed();
    let ends = resumed.attempt(|ctx| all(ctx)).ended().unwrap();
    assert_eq!(ends[0].as_ref().unwrap(), &Small { bytes: 0 });
    assert_eq!(ends[2].as_ref().unwrap(), &Small { bytes: 2 });
    let failure = ends.into_iter().nth(1).unwrap().unwrap_err();
    assert_eq!(failure.kind, "no_file");
    assert_eq!(failure.error["details"], json!({"n": 1}));
    let error = Error::from(failure);
    assert!(error.permanent && error.kind == "call_failed");
    assert_eq!(error.details.unwrap()["handler"], "photo.resize");
    // Another attempt gets the same ends.
    assert_eq!(
        resumed
            .next_attempt()
            .attempt(|ctx| all(ctx))
            .ended()
            .unwrap()
            .len(),
        3
    );
    assert_eq!(called.get(), 3);
}

#[test]
fn calling_no_jobs_does_not_wait() {
    let ctx = TestCtx::new();
    let none = ctx.attempt(|ctx| ctx.call_all(Vec::<Job>::new())).ended();
    assert!(none.unwrap().is_empty() && ctx.waits().is_empty());
}

#[test]
fn a_failed_call_is_an_error() {
    let ctx = TestCtx::new();
    let call = || ctx.call(Job::new("a.b", &1).returning::<String>());
    let error = call().unwrap_err();
    assert_eq!(error.kind, "denied");
    assert!(error.message.contains("TestCtx::on_call"), "{error}");

    ctx.on_call(|_| Err(Error::retryable("busy")));
    let error = call().unwrap_err();
    assert_eq!((&*error.kind, error.permanent), ("call_failed", true));
    assert!(error.message.contains("a.b") && error.message.contains("busy"));
    // Recorded: a call is made once.
    ctx.on_call(|_| Ok(json!("done")));
    assert_eq!(call().unwrap(), "done");
    let retried = ctx.next_attempt();
    let again = retried.call(Job::new("a.b", &1).returning::<String>());
    assert_eq!(again.unwrap_err().kind, "call_failed");
}

#[test]
fn a_call_cannot_wait_for_a_child() {
    let ctx = TestCtx::new();
    let child = ctx.enqueue(Job::new("a", &())).unwrap();
    let error = ctx.call(Job::new("b", &()).after("a", &child)).unwrap_err();
    assert_eq!(error.kind, "job_refused");
}

#[test]
fn jobs_that_the_host_refuses_are_refused() {
    let second = |job: Job| job.lease(Duration::from_secs(1));
    let long = "k".repeat(513);
    let child = TestCtx::new().enqueue(Job::new("a", &())).unwrap();
    let job = || Job::new("a.b", &1);
    let nul = "a\0b";
    let invalid = || {
        [
            (
                Job::new("Mail.Send", &1),
                "'Mail.Send' is not a handler name",
            ),
            (Job::new("a.b", nul), "the payload has a NUL character"),
            (job().queue("my queue"), "'my queue' is not a queue name"),
            (
                job().max_attempts(0),
                "max_attempts must be between 1 and 1000",
            ),
            (job().unique_key(&long), "unique_key must have 1 to 512"),
            (
                job().unique_key(nul),
                "the options object has a NUL character",
            ),
            (
                job().tags(["gpu", "=eu"]),
                "tags must be a list of at most 16 tags",
            ),
            (
                second(job()),
                "lease must be between 2000 and 86400000 milliseconds",
            ),
            (
                job().timeout(Duration::ZERO),
                "timeout must be between 1 and",
            ),
            (
                job().job_timeout(Duration::MAX),
                "job_timeout must be between",
            ),
        ]
    };
    let ctx = TestCtx::new();
    ctx.on_call(|_| Ok(json!(null)));
    let refused = |result: Result<()>, why: &str| {
        let error = result.unwrap_err();
        assert_eq!((&*error.kind, error.permanent), ("job_refused", true));
        assert!(error.message.contains(why), "{error} has no {why}");
    };
    for (job, why) in invalid() {
        refused(ctx.enqueue(job).map(drop), why);
    }
    for (job, why) in invalid() {
        refused(ctx.continue_with(job), why);
    }
    for (job, why) in invalid() {
        refused(ctx.call(job).map(drop), why);
    }
    // A job of another attempt.
    let after = ctx.enqueue(job().after("it", &child)).map(drop);
    refused(
        after,
        "must be the number of a job that this attempt has enqueued",
    );
    assert!(ctx.enqueued().is_empty() && ctx.waits().is_empty());
    assert_eq!(ctx.continued_with(), None);
}

#[test]
fn within_a_step_nothing_is_enqueued_and_nothing_waits_and_no_step_starts() {
    let ctx = TestCtx::new();
    let job = || Job::new("a", &());
    let refused = |work: &dyn Fn() -> Result<()>| {
        let error = ctx.step("it", work).unwrap_err();
        assert_eq!((&*error.kind, error.permanent), ("in_step", true));
        let error = block_on(ctx.step_async("it", async { work() })).unwrap_err();
        assert_eq!(error.kind, "in_step");
    };
    refused(&|| ctx.enqueue(job()).map(drop));
    refused(&|| ctx.continue_with(job()));
    refused(&|| ctx.sleep("nap", DAY));
    refused(&|| ctx.sleep_until("nap", SystemTime::now()));
    refused(&|| ctx.wait_signal::<()>("go", None).map(drop));
    refused(&|| ctx.call(job()).map(drop));
    refused(&|| ctx.call_all([job(), job()]).map(drop));
    refused(&|| ctx.step("inner", || Ok(())));
    refused(&|| block_on(ctx.step_async("inner", async { Ok(()) })));
    refused(&|| ctx.step_with("inner", |_| Ok(())));
    // Even if the work ignores the error of the first.
    refused(&|| {
        let _ = ctx.step("inner", || Ok(()));
        ctx.sleep("nap", DAY)
    });
    assert!(ctx.enqueued().is_empty() && ctx.waits().is_empty());
    // Between the polls of an asynchronous step, and after the steps, everything is allowed.
    block_on(async {
        let pending = ctx.step_async("pending", std::future::pending::<Result<()>>());
        let beside = async { ctx.enqueue(job()).map(drop) };
        match rouse_sdk::race(pending, beside).await {
            rouse_sdk::Either::Second(enqueued) => enqueued.unwrap(),
            rouse_sdk::Either::First(_) => panic!("the step never ends"),
        }
    });
    ctx.sleep("nap", DAY).unwrap();
    assert_eq!(ctx.enqueued().len(), 1);
}

#[test]
fn a_wait_after_a_step_that_panicked_is_not_refused() {
    let ctx = TestCtx::new();
    let panics = std::panic::AssertUnwindSafe(|| ctx.step("it", || -> Result<()> { panic!("no") }));
    assert!(std::panic::catch_unwind(panics).is_err());
    ctx.sleep("nap", DAY).unwrap();
}

#[test]
fn names_of_waits_are_checked() {
    let ctx = TestCtx::new();
    for name in ["", "a#2"] {
        let error = ctx.sleep(name, DAY).unwrap_err();
        assert_eq!((&*error.kind, error.permanent), ("wait_refused", true));
        let error = ctx.wait_signal::<Value>(name, None).unwrap_err();
        assert_eq!(error.kind, "wait_refused");
    }
}

#[test]
fn names_that_the_host_refuses_are_refused() {
    let ctx = TestCtx::new();
    let refused = |result: Result<()>, kind: &str, what: &str| {
        let error = result.unwrap_err();
        assert_eq!((&*error.kind, error.permanent), (kind, true));
        let why = format!("the name of a {what} must have 1 to 200 printable characters");
        assert_eq!(error.message, why);
    };
    for name in ["", "a\nb", &"ä".repeat(201)] {
        refused(ctx.step(name, || Ok(())), "step_refused", "step");
        let done = ctx.step_with(name, |_| Ok(()));
        refused(done, "step_refused", "step");
    }
    for name in ["a\u{7f}", &"ä".repeat(200)] {
        refused(ctx.sleep(name, DAY), "wait_refused", "step");
        let time = SystemTime::now() + DAY;
        refused(ctx.sleep_until(name, time), "wait_refused", "step");
        refused(
            ctx.call(Job::new(name, &())).map(drop),
            "job_refused",
            "step",
        );
    }
    for (name, what) in [
        ("a\u{7f}", "signal"),
        (&*"ä".repeat(201), "signal"),
        (&*"ä".repeat(194), "step"),
    ] {
        let signal = ctx.wait_signal::<()>(name, DAY).map(drop);
        refused(signal, "wait_refused", what);
    }
    // The number of a second step or wait counts.
    let longest = "ä".repeat(200);
    ctx.step(&longest, || Ok(())).unwrap();
    refused(ctx.step(&longest, || Ok(())), "step_refused", "step");
    let longest = "ä".repeat(194);
    ctx.sleep(&longest, DAY).unwrap();
    refused(ctx.sleep(&longest, DAY), "wait_refused", "step");
}

#[test]
fn after_the_abort_nothing_is_enqueued_and_nothing_waits() {
    let ctx = TestCtx::new();
    ctx.fire_abort(AbortReason::Cancelled);
    let kinds = [
        ctx.enqueue(Job::new("a", &())).map(drop),
        ctx.continue_with(Job::new("a", &())),
        ctx.results().map(drop),
        ctx.sleep("nap", DAY),
        ctx.sleep_until("nap", SystemTime::now()),
        ctx.wait_signal::<()>("go", None).map(drop),
        ctx.call(Job::new("a", &())).map(drop),
    ]
    .map(|result| result.unwrap_err().kind);
    assert_eq!(kinds, ["aborted"; 7]);
}

#[test]
fn the_resumed_attempt_keeps_responses_and_settings() {
    let ctx = TestCtx::new();
    ctx.set_settings(json!({"limit": 3}));
    ctx.on_call(|_| Ok(json!(null)));
    ctx.state().set("k", &1).unwrap();
    let _ = ctx.attempt(|ctx| ctx.call(Job::new("a", &()))).suspended();
    let resumed = ctx.resumed();
    assert_eq!(resumed.settings::<Value>().unwrap(), json!({"limit": 3}));
    assert_eq!(resumed.state().get::<u32>("k").unwrap(), Some(1));
}

#[test]
fn the_next_job_keeps_responses_and_settings_and_nothing_of_this_job() {
    let ctx = TestCtx::new();
    ctx.set_settings(json!({"limit": 3}));
    ctx.on_call(|_| Ok(json!(7)));
    ctx.on_query(|_| Ok(vec![json!(8)]));
    ctx.on_http(|_| Ok(Response::new(204, "")));
    ctx.send_signal("go", json!(9));
    ctx.set_parent("charge", End::Succeeded, json!(10));
    ctx.step("s", || Ok(1)).unwrap();
    let _ = ctx.attempt(|ctx| ctx.call(Job::new("a", &()))).suspended();
    let next = ctx.resumed().next_job();
    assert_eq!(next.settings::<Value>().unwrap(), json!({"limit": 3}));
    let called = next.call(Job::new("a", &()).returning::<u32>());
    assert_eq!(called.unwrap(), 7);
    assert_eq!(next.query::<u32>("q", ()).unwrap(), [8]);
    let response = block_on(http::get("https://a.example/").send(&next)).unwrap();
    assert_eq!(response.status, 204);

    let other = ctx.next_job();
    assert!(other.waits().is_empty());
    assert_eq!(other.step("s", || Ok(2)).unwrap(), 2);
    assert_eq!(other.wait_signal::<u32>("go", DAY).unwrap(), None);
    assert!(other.results().unwrap().parent("charge").is_none());
}

#[test]
#[should_panic(expected = "the attempt is not suspended")]
fn only_a_suspended_attempt_is_resumed() {
    let ctx = TestCtx::new();
    assert_eq!(ctx.attempt(|_| Ok(1)).ended().unwrap(), 1);
    let _ = ctx.resumed();
}

#[test]
#[should_panic(expected = "this test does not answer calls")]
fn a_call_without_a_result_is_not_resumed() {
    let ctx = TestCtx::new();
    let _ = ctx.attempt(|ctx| ctx.call(Job::new("a", &()))).suspended();
    let _ = ctx.resumed();
}

#[test]
#[should_panic(expected = "as requested")]
fn an_attempt_passes_panics_on() {
    let _ = TestCtx::new().attempt(|_| -> Result<()> { panic!("as requested") });
}

#[test]
fn an_async_handler_waits_too() {
    async fn nap(ctx: &Ctx) -> Result<&'static str> {
        rouse_sdk::sleep(Duration::from_millis(1)).await;
        ctx.sleep("nap", DAY)?;
        Ok("rested")
    }
    let ctx = TestCtx::new();
    let _ = ctx.attempt(|ctx| block_on(nap(ctx))).suspended();
    let resumed = ctx.resumed();
    assert_eq!(
        resumed.attempt(|ctx| block_on(nap(ctx))).ended().unwrap(),
        "rested"
    );
}
