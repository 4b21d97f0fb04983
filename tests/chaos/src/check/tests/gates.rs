//! Violated guarantees about gates.

use super::super::super::gates::GateKind;
use super::super::super::ledger::{Event, Incident, Request, Response};
use super::super::super::load::JobSpec;
use super::super::super::world::{Attempt, Call, Evidence, Record, World};
use super::super::{Known, limits, singletons, throttles};
use super::healthy::gate::*;
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of, evidence, job};

/// Moves the claim of this job, and the evidence of its only attempt.
fn claim_at(world: &mut World, id: i64, claimed_us: i64) {
    let row = job(world, id);
    row.claimed_us = Some(claimed_us);
    row.finished_us = Some(claimed_us + S / 2);
    let attempt = evidence(world, id);
    (attempt.started_us, attempt.ended_us) = (claimed_us + 1_000, Some(claimed_us + 2_000));
}

/// The enqueue that has created this job.
fn enqueue(world: &mut World, id: i64) -> &mut Call {
    let mut calls = world.calls.iter_mut();
    let call = calls.find(|call| {
        matches!(&call.request, Request::Enqueue { spec, .. } if spec.n == id * 100)
            && call.response == Response::Ok(id)
    });
    call.expect("it was enqueued")
}

fn killed(worker: &str, at_us: i64) -> Incident {
    Incident {
        from_us: at_us,
        until_us: at_us,
        event: Event::HostKilled {
            worker: worker.into(),
        },
    }
}

#[test]
fn a_job_that_runs_beyond_the_limit_of_its_gate_is_found() {
    breaks("limit_holds", |world| claim_at(world, LIMITED[2], 400 * S));
}

#[test]
fn two_attempts_of_one_job_count_once() {
    let mut world = healthy();
    let mut again: Evidence = evidence(&mut world, LIMITED[0]).clone();
    again.nonce = "again".into();
    again.started_us += 100;
    world.evidence.push(again);
    assert!(limits::hold(&Known::of(&world)).violations.is_empty());
}

/// The first job runs until its host is killed or until an admin action ends it, and the next two start after that.
#[test]
fn an_attempt_without_an_end_runs_until_its_host_is_dead_or_its_job_is_taken_from_it() {
    let mut world = healthy();
    evidence(&mut world, LIMITED[0]).ended_us = None;
    let row = job(&mut world, LIMITED[0]);
    row.finished_us = Some(402 * S);
    let violations = |world: &World| limits::hold(&Known::of(world)).violations.len();
    assert_eq!(violations(&world), 1, "the second of the two at 401 s");
    let mut with_kill = world.clone();
    with_kill.happened.push(killed("host-1", 400 * S + 500_000));
    assert_eq!(violations(&with_kill), 0);
    job(&mut world, LIMITED[0]).finished_us = Some(400 * S + 500_000);
    evidence(&mut world, LIMITED[0]).ended_us = Some(403 * S);
    assert_eq!(violations(&world), 0, "it was cancelled");
    let started_us = evidence(&mut world, LIMITED[0]).started_us;
    job(&mut world, LIMITED[0]).finished_us = Some(started_us - 1);
    assert_eq!(violations(&world), 0, "just before its guest started");
}

#[test]
fn a_start_without_a_claim_is_found_unless_its_host_was_frozen() {
    let mut world = healthy();
    let mut stale = evidence(&mut world, LIMITED[6]).clone();
    (stale.nonce, stale.attempt) = ("stale".into(), 7);
    (stale.started_us, stale.ended_us) = (401 * S + 1_500, Some(401 * S + 1_800));
    (stale.worker, stale.job) = ("host-2".into(), LIMITED[6]);
    world.evidence.push(stale);
    let violations = |world: &World| limits::hold(&Known::of(world)).violations.len();
    assert_eq!(violations(&world), 1);
    world.happened.push(Incident {
        from_us: 390 * S,
        until_us: 401 * S,
        event: Event::HostFrozen {
            worker: "host-2".into(),
            jobs: Vec::new(),
        },
    });
    assert_eq!(violations(&world), 0);
}

#[test]
fn a_claim_beyond_the_rate_of_its_gate_is_found() {
    breaks("throttle_holds", |world| {
        claim_at(world, LIMITED[6], 404 * S - 1);
    });
}

/// Claims that are given back leave no rows, only the evidence of their starts.
#[test]
fn unexplained_starts_are_found_if_there_are_too_many_of_them_in_a_shorter_period() {
    let mut world = healthy();
    for nth in 0..4 {
        let mut start = evidence(&mut world, LIMITED[5]).clone();
        (start.nonce, start.attempt) = (format!("given back {nth}"), 10 + nth);
        start.started_us += i64::from(nth) * 1_000;
        world.evidence.push(start);
    }
    let violations = |world: &World| throttles::hold(&Known::of(world)).violations.len();
    assert!(violations(&world) > 0);
    world.happened.push(Incident {
        from_us: 395 * S,
        until_us: 402 * S,
        event: Event::HostFrozen {
            worker: "host-2".into(),
            jobs: Vec::new(),
        },
    });
    assert_eq!(violations(&world), 0, "it has started all of them late");
}

#[test]
fn an_adopted_attempt_is_not_counted_as_a_start() {
    let mut world = healthy();
    claim_at(&mut world, LIMITED[6], 404 * S - 1);
    let row = job(&mut world, LIMITED[6]);
    (row.attempt, row.uncounted) = (2, 1);
    world.attempts.push(Attempt {
        job: LIMITED[6],
        attempt: 1,
        lost: true,
        worker: B,
        claimed_us: 390 * S,
        ended_us: 404 * S - 1,
        lease_ended_us: Some(403 * S),
        ..Attempt::default()
    });
    evidence(&mut world, LIMITED[6]).attempt = 2;
    assert!(throttles::hold(&Known::of(&world)).violations.is_empty());
}

#[test]
fn a_job_that_is_enqueued_while_the_singleton_waits_is_found() {
    breaks("singleton_holds", |world| {
        let call = enqueue(world, QUEUED[1]);
        (call.sent_us, call.answered_us) = (411 * S, 411 * S + 1_000);
        job(world, QUEUED[1]).requested_us = 411 * S;
    });
}

#[test]
fn a_singleton_that_waits_for_its_retry_keeps_others_out() {
    let retried = |world: &mut World| {
        // It fails at 412.5 s, and runs again at 415 s.
        let row = job(world, QUEUED[0]);
        (row.attempt, row.claimed_us, row.finished_us) = (2, Some(415 * S), Some(416 * S));
        world.attempts.push(Attempt {
            job: QUEUED[0],
            attempt: 1,
            worker: A,
            claimed_us: 412 * S,
            ended_us: 412 * S + 500_000,
            ..Attempt::default()
        });
        let call = enqueue(world, QUEUED[1]);
        (call.sent_us, call.answered_us) = (414 * S, 414 * S + 1_000);
        job(world, QUEUED[1]).requested_us = 414 * S;
    };
    let mut world = healthy();
    retried(&mut world);
    let violations = |world: &World| singletons::hold(&Known::of(world)).violations.len();
    assert_eq!(violations(&world), 1);
    // A claim that was given back a moment later has interrupted the wait.
    world.records.push(Record {
        job: Some(QUEUED[0]),
        event: "released".into(),
        attempt: Some(2),
        at_us: 415 * S - 1,
        ..Record::default()
    });
    assert_eq!(violations(&world), 0);
}

#[test]
fn a_claim_before_the_response_to_its_enqueue_ends_the_wait_of_a_singleton() {
    let mut world = healthy();
    let call = enqueue(&mut world, QUEUED[0]);
    call.answered_us = 412 * S + 500_000;
    world
        .calls
        .retain(|call| !matches!(&call.request, Request::Enqueue { spec, .. } if spec.n == 9_101));
    breaks_nothing(&world);
}

#[test]
fn a_job_that_is_enqueued_while_the_singleton_runs_is_found() {
    breaks("singleton_holds", |world| {
        let call = enqueue(world, RUNNING[1]);
        (call.sent_us, call.answered_us) = (421 * S, 421 * S + 1_000);
        job(world, RUNNING[1]).requested_us = 421 * S;
    });
}

#[test]
fn two_jobs_of_a_singleton_that_run_at_the_same_time_are_found() {
    breaks("singleton_holds", |world| {
        evidence(world, RUNNING[0]).ended_us = Some(431 * S + 1_500);
        job(world, RUNNING[0]).finished_us = Some(431 * S + 1_600);
        // The responses to their enqueues came too late to know how long they were live.
        enqueue(world, RUNNING[0]).answered_us = 433 * S;
        enqueue(world, RUNNING[1]).answered_us = 433 * S;
    });
}

#[test]
fn singletons_do_not_apply_to_a_retry() {
    let mut world = healthy();
    let mut retry = job(&mut world, RUNNING[1]).clone();
    (retry.id, retry.retried_from) = (98, Some(RUNNING[1]));
    retry.n = RUNNING[0] * 100;
    world.jobs.push(retry);
    assert!(singletons::hold(&Known::of(&world)).violations.is_empty());
}

#[test]
fn a_job_that_starts_before_the_end_of_its_burst_is_found() {
    breaks("debounce_holds", |world| {
        claim_at(world, CALM, 442 * S - 10_000);
    });
    // The maximum duration of a burst ends it.
    let mut world = healthy();
    job(&mut world, CALM).requested_us = 437 * S - 10_000;
    claim_at(&mut world, CALM, 442 * S - 10_000);
    assert_eq!(cases_of("debounce_holds", &world), 2);
    breaks_nothing(&world);
}

#[test]
fn a_burst_that_runs_with_an_earlier_payload_is_found() {
    breaks("debounce_holds", |world| {
        let call = enqueue(world, CALM);
        (call.sent_us, call.answered_us) = (438 * S, 438 * S + 1_000);
    });
}

#[test]
fn the_job_of_another_key_is_not_the_one_that_was_accepted() {
    breaks("accepted_jobs_exist", |world| {
        let mut calls = world.calls.iter_mut();
        let of_call = calls.find_map(|call| match &mut call.request {
            Request::Enqueue { spec, .. } if spec.n == 9_101 => Some(spec),
            _ => None,
        });
        let other = spec(RUNNING[0], GateKind::Queued);
        *of_call.expect("it was enqueued") = JobSpec { n: 9_101, ..other };
    });
}
