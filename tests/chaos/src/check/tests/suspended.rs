//! Violated guarantees about suspended jobs, and about the jobs that attempts enqueue.

use serde_json::{Value, json};

use super::super::super::ledger::{Request, Response};
use super::super::super::suspending::{Part, Suspending};
use super::super::super::world::{Evidence, Job, KeptSignal, Step, World};
use super::healthy::suspension::*;
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of, evidence, job};

/// A live copy of this job.
fn twin(world: &mut World, id: i64) -> Job {
    let mut twin = job(world, id).clone();
    (twin.id, twin.state) = (99, "queued".into());
    (twin.worker, twin.claimed_us, twin.finished_us) = (None, None, None);
    (twin.attempt, twin.result) = (0, None);
    twin.available_us = world.dumped_us + S;
    twin
}

/// The evidence of this attempt at [`SUSPENDED`].
fn attempt(world: &mut World, number: i32) -> &mut Evidence {
    let mut all = world.evidence.iter_mut();
    let found = all.find(|e| e.job == SUSPENDED && e.attempt == number);
    found.expect("the healthy world has it")
}

fn step<'a>(world: &'a mut World, name: &str) -> &'a mut Step {
    let mut steps = world.steps.iter_mut();
    let found = steps.find(|s| s.job == SUSPENDED && s.name == name && s.wait.is_none());
    found.expect("the healthy world has it")
}

fn result(world: &mut World) -> &mut Value {
    job(world, SUSPENDED)
        .result
        .as_mut()
        .expect("it has succeeded")
}

#[test]
fn a_missing_an_additional_and_a_repeated_child_are_found() {
    let rule = "children_only_of_successes";
    breaks(rule, |world| world.jobs.retain(|job| job.id != CHILDREN[1]));
    breaks(rule, |world| {
        let twin = twin(world, CHILDREN[0]);
        world.jobs.push(twin);
    });
    breaks(rule, |world| result(world)["children"] = json!(1));
}

#[test]
fn a_child_of_a_suspended_attempt_and_one_that_starts_before_the_success_are_found() {
    let rule = "children_only_of_successes";
    breaks(rule, |world| {
        let mut child = twin(world, CHILDREN[0]);
        child.parent = Some(UNSIGNALLED);
        child.n = Suspending::number(UNSIGNALLED * 100, Part::Child(1));
        world.jobs.push(child);
    });
    breaks(rule, |world| job(world, CHILDREN[0]).parent = Some(QUICK));
    breaks(rule, |world| {
        evidence(world, CHILDREN[0]).started_us = 412 * S + 1_000;
        job(world, CHILDREN[0]).claimed_us = Some(412 * S);
    });
}

#[test]
fn a_chain_that_is_continued_twice_or_not_at_all_is_found() {
    let rule = "chain_continues_once";
    breaks(rule, |world| {
        let twin = twin(world, NEXT);
        world.jobs.push(twin);
    });
    breaks(rule, |world| {
        let mut next = twin(world, NEXT);
        next.chain = UNSIGNALLED;
        next.n = Suspending::number(UNSIGNALLED * 100, Part::Next);
        world.jobs.push(next);
    });
    breaks(rule, |world| {
        job(world, AFTER_CHAIN).after = Some(json!({"c": CHILDREN[0]}));
        world.jobs.retain(|job| job.id != NEXT);
    });
    breaks(rule, |world| {
        evidence(world, NEXT).started_us = 412 * S + 1_000;
        job(world, NEXT).claimed_us = Some(412 * S);
    });
}

#[test]
fn a_job_that_does_not_wait_for_the_whole_chain_is_found() {
    breaks("no_child_before_parents", |world| {
        evidence(world, AFTER_CHAIN).started_us = 414 * S + 1_000;
        job(world, AFTER_CHAIN).claimed_us = Some(414 * S);
    });
}

#[test]
fn a_repeated_call_a_lost_one_and_an_unexpected_return_are_found() {
    breaks("calls_once", |world| {
        let twin = twin(world, CALLED);
        world.jobs.push(twin);
    });
    breaks("calls_once", |world| {
        world.jobs.retain(|job| job.id != CALLED)
    });
    breaks("calls_once", |world| {
        step(world, "call:chaos.work").result = json!({"failed": {"kind": "lost"}});
    });
    breaks("calls_once", |world| result(world)["called"] = json!(null));
}

#[test]
fn a_signal_that_is_lost_or_taken_twice_is_found() {
    breaks("signals_not_lost", |world| world.signals.clear());
    breaks("signals_not_lost", |world| {
        world.signals[0].mark = TAKEN;
        world
            .calls
            .retain(|call| !matches!(call.request, Request::Signal { mark: KEPT, .. }));
    });
    breaks("signals_not_lost", |world| {
        result(world)["signals"] = json!([null]);
    });
}

#[test]
fn an_old_signal_to_a_job_that_has_ended_may_be_deleted() {
    let mut world = healthy();
    world.signals.clear();
    world.dumped_us = 407 * S + 3_601 * S;
    breaks_nothing(&world);
    breaks("signals_not_lost", |world| {
        world.signals.clear();
        world.dumped_us = 407 * S + 3_599 * S;
    });
}

#[test]
fn a_signal_that_was_refused_but_exists_is_found() {
    for response in [Response::Ok(0), Response::Refused("no".into())] {
        breaks("signals_not_lost", |world| {
            for call in &mut world.calls {
                if matches!(call.request, Request::Signal { mark: KEPT, .. }) {
                    call.response = response.clone();
                }
            }
        });
    }
    let mut world = healthy();
    for call in &mut world.calls {
        if matches!(call.request, Request::Signal { .. }) {
            call.response = Response::Unknown("cut".into());
        }
    }
    breaks_nothing(&world);
}

#[test]
fn a_wait_that_times_out_although_its_signal_is_there_is_found() {
    let timed_out = |world: &mut World, at_us: i64| {
        let mut missed = step(world, "signal:go").clone();
        missed.name = "signal:go#2".into();
        (missed.result, missed.at_us) = (json!({"timed_out": true}), at_us);
        world.steps.push(missed);
    };
    breaks("signals_not_lost", |world| {
        timed_out(world, 408 * S + 1_500)
    });
    let mut world = healthy();
    timed_out(&mut world, 408 * S + 1_500);
    for call in &mut world.calls {
        // Both came while the attempt ran.
        if matches!(call.request, Request::Signal { mark: KEPT, .. }) {
            call.answered_us = 408 * S + 1_600;
        }
    }
    breaks_nothing(&world);
}

#[test]
fn a_job_that_stays_suspended_without_a_reason_is_found() {
    let rule = "suspended_not_stranded";
    assert_eq!(cases_of(rule, &healthy()), 2);
    breaks(rule, |world| {
        world.signals.push(KeptSignal {
            job: UNSIGNALLED,
            name: "go".into(),
            mark: 1,
        });
    });
    breaks(rule, |world| {
        job(world, UNSIGNALLED).available_us = world.dumped_us - 3 * S;
    });
    breaks(rule, |world| {
        job(world, UNSIGNALLED).wait = Some(json!({"kind": "call", "jobs": [CALLED]}));
    });
    let mut world = healthy();
    job(&mut world, UNSIGNALLED).wait = Some(json!({"kind": "call", "jobs": [CALLED, FAR]}));
    breaks_nothing(&world);
}

#[test]
fn a_suspension_that_counts_as_an_attempt_is_found() {
    let rule = "suspensions_not_counted";
    breaks(rule, |world| job(world, SUSPENDED).uncounted = 2);
    breaks(rule, |world| job(world, UNSIGNALLED).uncounted = 0);
}

#[test]
fn a_step_that_is_done_again_after_a_suspension_is_found() {
    breaks("steps_once", |world| {
        attempt(world, 2).did_us = Some(405 * S + 1_500);
    });
    breaks("steps_once", |world| {
        result(world)["first"] = json!(nonce(SUSPENDED, 2));
    });
    breaks("steps_once", |world| {
        world
            .steps
            .retain(|step| step.name != "first" || step.job != SUSPENDED);
    });
    breaks("steps_once", |world| {
        let again = step(world, "first").clone();
        world.steps.push(again);
    });
}

#[test]
fn work_that_a_lost_attempt_did_before_the_record_is_not_a_repetition() {
    let mut world = healthy();
    let again = attempt(&mut world, 1);
    again.did_us = Some(401 * S + 1_200);
    let mut other = again.clone();
    (other.nonce, other.started_us) = ("released".into(), 400 * S + 500_000);
    (other.did_us, other.stepped_us) = (Some(400 * S + 600_000), None);
    world.evidence.push(other);
    world.evidence.sort_by_key(|e| e.started_us);
    breaks_nothing(&world);
}

#[test]
fn a_wait_that_a_worker_without_the_job_has_begun_is_found() {
    breaks("stale_step", |world| {
        let mut waits = world.steps.iter_mut().filter(|step| step.wait.is_some());
        waits.next().expect("there are some").worker = C;
    });
}
