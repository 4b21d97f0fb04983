//! Suspended jobs in the healthy world: one was suspended three times, with children, a call and a job that continues
//! its chain; one still waits for its signal.

use serde_json::{Value, json};

use super::super::super::super::ledger::{Request, Response};
use super::super::super::super::load::{JobSpec, WORK};
use super::super::super::super::suspending::{Part, Suspending};
use super::super::super::super::world::{Attempt, Job, KeptSignal, Step};
use super::{A, B, Builder, S, nonce};

pub(crate) const SUSPENDED: i64 = 40;
pub(crate) const CHILDREN: [i64; 2] = [41, 42];
pub(crate) const CALLED: i64 = 43;
pub(crate) const NEXT: i64 = 44;
pub(crate) const UNSIGNALLED: i64 = 45;
pub(crate) const AFTER_CHAIN: i64 = 46;
/// The marks of the signals to [`SUSPENDED`]: one was taken, and one is kept.
pub(crate) const TAKEN: i64 = 40_001;
pub(crate) const KEPT: i64 = 40_002;

impl Builder {
    /// The attempt is suspended, and leaves no evidence of its end.
    fn suspend(&mut self, id: i64, wait: &Value, ended_us: i64) {
        self.0.evidence.last_mut().expect("it has started").ended_us = None;
        let job = self.of(id);
        let (attempt, worker) = (job.attempt, job.worker.take().expect("it has started"));
        let claimed_us = job.claimed_us.take().expect("it has started");
        job.uncounted += 1;
        self.0.attempts.push(Attempt {
            job: id,
            attempt,
            worker,
            wait: Some(wait.clone()),
            claimed_us,
            ended_us,
            ..Attempt::default()
        });
    }

    /// A row of rouse.step: with a result, or with the start of a wait.
    fn step(&mut self, name: &str, result: Value, wait: Option<Value>, attempt: i32, at_us: i64) {
        self.0.steps.push(Step {
            job: SUSPENDED,
            name: name.into(),
            result,
            wait,
            attempt,
            worker: A,
            at_us,
        });
    }

    /// A job that [`SUSPENDED`] has enqueued.
    fn made(&mut self, id: i64, part: Part, at_us: i64) -> &mut Job {
        self.0.jobs.push(Job {
            id,
            queue: "default".into(),
            handler: WORK.into(),
            state: "queued".into(),
            n: Suspending::number(SUSPENDED * 100, part),
            chain: id,
            parent: Some(SUSPENDED),
            requested_us: at_us,
            available_us: at_us,
            ..Job::default()
        });
        self.of(id)
    }

    fn runs(&mut self, id: i64, at_us: i64) {
        self.start(id, 1, B, at_us);
        self.succeed(id, at_us + S / 2);
    }
}

pub(super) fn add(b: &mut Builder) {
    let spec = |suspending| JobSpec {
        suspending: Some(suspending),
        ..JobSpec::default()
    };
    let whole = Suspending {
        waits: 1,
        calls: true,
        children: 2,
        continues: true,
        ..Suspending::default()
    };
    b.job(SUSPENDED, 400 * S, spec(whole));
    let sleep = json!({"kind": "sleep", "step": "sleep:nap"});
    b.start(SUSPENDED, 1, A, 401 * S);
    let first = b.0.evidence.last_mut().expect("it has started");
    first.did_us = Some(401 * S + 1_300);
    first.stepped_us = Some(401 * S + 1_600);
    let by = nonce(SUSPENDED, 1);
    b.step("first", json!(by), None, 1, 401 * S + 1_500);
    b.step("sleep:nap", Value::Null, Some(sleep.clone()), 1, 402 * S);
    b.suspend(SUSPENDED, &sleep, 402 * S);

    let signal = json!({"kind": "signal", "step": "signal:go", "name": "go"});
    b.start(SUSPENDED, 2, A, 405 * S);
    b.step("signal:go", Value::Null, Some(signal.clone()), 2, 406 * S);
    b.suspend(SUSPENDED, &signal, 406 * S);
    for mark in [TAKEN, KEPT] {
        let request = Request::Signal {
            job: SUSPENDED,
            mark,
        };
        b.call(407 * S, request, Response::Ok(1));
    }
    b.0.signals.push(KeptSignal {
        job: SUSPENDED,
        name: "go".into(),
        mark: KEPT,
    });

    b.start(SUSPENDED, 3, A, 408 * S);
    let payload = json!({"payload": {"mark": TAKEN}});
    b.step("signal:go", payload, None, 3, 408 * S + 1_200);
    let call = json!({"kind": "call", "step": "call:chaos.work", "jobs": [CALLED]});
    let started = json!({"kind": "call", "job": CALLED});
    b.step("call:chaos.work", Value::Null, Some(started), 3, 409 * S);
    b.suspend(SUSPENDED, &call, 409 * S);
    b.made(CALLED, Part::Call, 409 * S);
    b.runs(CALLED, 410 * S);

    b.start(SUSPENDED, 4, A, 412 * S);
    let output = b.of(CALLED).result.clone().expect("it has succeeded");
    let returned = json!({"output": output});
    b.step(
        "call:chaos.work",
        returned.clone(),
        None,
        4,
        412 * S + 1_200,
    );
    b.succeed(SUSPENDED, 413 * S);
    let result = b.of(SUSPENDED).result.as_mut().expect("it has succeeded");
    result["first"] = json!(by);
    result["signals"] = json!([{"mark": TAKEN}]);
    result["called"] = returned;
    result["children"] = json!(2);
    result["continued"] = json!(true);
    for (nth, id) in (1..).zip(CHILDREN) {
        b.made(id, Part::Child(nth), 413 * S);
        b.runs(id, (413 + i64::from(nth)) * S);
    }
    b.of(CHILDREN[1]).after = Some(json!({"the one before": {"job": CHILDREN[0]}}));
    let next = b.made(NEXT, Part::Next, 413 * S);
    (next.chain, next.parent) = (SUSPENDED, None);
    b.runs(NEXT, 416 * S);
    let after = JobSpec {
        after: Some(json!({"f": SUSPENDED})),
        ..JobSpec::default()
    };
    b.job(AFTER_CHAIN, 400 * S, after);
    b.runs(AFTER_CHAIN, 417 * S);

    let waiting = Suspending {
        waits: 1,
        children: 2,
        ..Suspending::default()
    };
    b.job(UNSIGNALLED, 400 * S, spec(waiting));
    b.start(UNSIGNALLED, 1, A, 401 * S);
    b.suspend(UNSIGNALLED, &signal, 402 * S);
    let dumped_us = b.0.dumped_us;
    let job = b.of(UNSIGNALLED);
    (job.wait, job.available_us) = (Some(signal), 100 * dumped_us);
    b.0.add_parts();
}
