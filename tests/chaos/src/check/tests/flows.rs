//! Violated guarantees about flows.

use serde_json::json;

use super::super::super::flows::{FlowSpec, OnFailure};
use super::super::super::ledger::{Request, Response};
use super::super::super::world::{Call, Dependency, World};
use super::healthy::flow::*;
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of, evidence, job};

/// The enqueue of this flow.
fn enqueue(world: &mut World, flow: i64) -> &mut Call {
    let mut calls = world.calls.iter_mut();
    let found = calls.find(|call| {
        matches!(call.request, Request::EnqueueFlow { .. }) && call.response == Response::Ok(flow)
    });
    found.expect("the healthy world has it")
}

fn spec(world: &mut World, flow: i64) -> &mut FlowSpec {
    match &mut enqueue(world, flow).request {
        Request::EnqueueFlow { spec } => spec,
        other => panic!("{other:?}"),
    }
}

/// Makes the attempt at this job start at this time, regardless of what the database knows about its parents.
fn starts(world: &mut World, id: i64, at_us: i64) {
    let attempt = evidence(world, id);
    (attempt.started_us, attempt.ended_us) = (at_us + 1_000, Some(at_us + 2_000));
    let job = job(world, id);
    (job.claimed_us, job.after) = (Some(at_us), None);
}

/// The calls that have retried the flow, in order.
fn retries(world: &mut World) -> impl Iterator<Item = &mut Call> {
    let calls = world.calls.iter_mut();
    calls.filter(|call| matches!(call.request, Request::RetryFlow { .. }))
}

/// Another attempt at the cancelled job starts at this time.
fn starts_late(world: &mut World, at_us: i64) {
    let mut late = evidence(world, STOPPED_FLOW[0]).clone();
    (late.nonce, late.started_us, late.ended_us) = ("late".into(), at_us, None);
    world.evidence.push(late);
}

#[test]
fn a_flow_that_lacks_a_job_or_has_one_twice_is_found() {
    breaks("flow_whole", |world| {
        world.jobs.retain(|job| job.id != STOPPED_FLOW[1]);
    });
    breaks("flow_whole", |world| {
        let mut twin = job(world, STOPPED_FLOW[1]).clone();
        twin.id = 99;
        world.jobs.push(twin);
    });
}

#[test]
fn a_refused_flow_that_has_jobs_and_half_of_one_without_a_response_are_found() {
    breaks("flow_whole", |world| {
        enqueue(world, FLOWS[3]).response = Response::Refused("no".into());
    });
    breaks("flow_whole", |world| {
        spec(world, FLOWS[3]).rolled_back = true;
    });
    breaks("flow_whole", |world| {
        enqueue(world, FLOWS[3]).response = Response::Unknown("cut".into());
        world.jobs.retain(|job| job.id != HELD[1]);
    });
    let mut world = healthy();
    enqueue(&mut world, FLOWS[3]).response = Response::Unknown("cut".into());
    breaks_nothing(&world);
}

#[test]
fn a_job_with_a_unique_key_may_be_that_of_another_flow() {
    let mut world = healthy();
    spec(&mut world, FLOWS[3]).nodes[0].spec.unique_key = Some("k".into());
    world.jobs.retain(|job| job.id != HELD[0]);
    world.evidence.retain(|evidence| evidence.job != HELD[0]);
    // The row of the other flow.
    let mut other = job(&mut world, QUICK).clone();
    (other.id, other.chain, other.state) = (98, 98, "cancelled".into());
    (other.n, other.result, other.cancelled_after) = (HOPELESS * 100, None, Some(HOPELESS));
    (other.retried_from, other.worker, other.claimed_us) = (Some(HOPELESS), None, None);
    world.jobs.push(other);
    job(&mut world, HELD[1]).after = Some(json!({"job 0": {"job": 98, "on_failure": "wait"}}));
    breaks_nothing(&world);
}

#[test]
fn a_job_that_starts_before_its_parents_is_found_although_the_database_does_not_know_them() {
    breaks("flow_in_order", |world| {
        starts(world, DIAMOND[2], 501 * S + 500_000);
    });
    breaks("flow_in_order", |world| {
        starts(world, REPEATED[1], 521 * S + 500_000);
    });
}

#[test]
fn a_failed_parent_lets_a_job_run_only_if_its_on_failure_says_so() {
    breaks("flow_in_order", |world| {
        spec(world, FLOWS[0]).nodes[2].after[0].from = 1;
        spec(world, FLOWS[0]).nodes[2].after[0].on_failure = OnFailure::Wait;
        starts(world, DIAMOND[2], 504 * S + 100_000);
        job(world, DIAMOND[2]).finished_us = Some(505 * S);
    });
    let mut world = healthy();
    spec(&mut world, FLOWS[0]).nodes[2].after[0].from = 1;
    spec(&mut world, FLOWS[0]).nodes[2].after[0].on_failure = OnFailure::Run;
    starts(&mut world, DIAMOND[2], 504 * S + 100_000);
    job(&mut world, DIAMOND[2]).finished_us = Some(505 * S);
    breaks_nothing(&world);
}

#[test]
fn a_retried_job_that_does_not_wait_for_the_retry_of_its_parent_is_found() {
    breaks("flow_in_order", |world| {
        for edge in &mut spec(world, FLOWS[0]).nodes[3].after {
            edge.on_failure = OnFailure::Run;
        }
        starts(world, REPEATED[1], 521 * S + 500_000);
    });
}

#[test]
fn a_job_that_fails_after_its_time_or_succeeds_before_it_is_found() {
    for until_us in [502 * S, 525 * S] {
        breaks("ends_as_decided", |world| {
            spec(world, FLOWS[0]).nodes[1].spec.fails_until_us = Some(until_us);
        });
    }
}

#[test]
fn a_job_that_is_live_or_starts_after_its_flow_was_cancelled_is_found() {
    let rule = "flow_cancel_holds";
    assert_eq!(cases_of(rule, &healthy()), 2);
    breaks(rule, |world| {
        job(world, STOPPED_FLOW[1]).finished_us = Some(531 * S);
    });
    breaks(rule, |world| starts_late(world, 533 * S));
    let mut world = healthy();
    // Its claim was in line.
    starts_late(&mut world, 532 * S);
    breaks_nothing(&world);
}

#[test]
fn a_retry_of_a_success_an_unrequested_one_and_a_second_one_are_found() {
    let rule = "flow_retry_repeats_failures";
    let repeats = |world: &mut World, was: i64| {
        let mut again = job(world, REPEATED[0]).clone();
        (again.id, again.chain, again.retried_from) = (99, 99, Some(was));
        (again.n, again.state) = (was * 100, "queued".into());
        (again.worker, again.claimed_us, again.finished_us) = (None, None, None);
        (again.attempt, again.result, again.after) = (0, None, None);
        // The first retry has ended.
        (again.requested_us, again.available_us) = (530 * S, world.dumped_us + S);
        world.jobs.push(again);
    };
    breaks(rule, |world| repeats(world, DIAMOND[2]));
    breaks(rule, |world| repeats(world, DIAMOND[1]));
    breaks(rule, |world| {
        for call in retries(world) {
            call.response = Response::Refused("no".into());
        }
    });
}

#[test]
fn a_wrong_number_of_retried_jobs_and_one_that_is_left_out_are_found() {
    let rule = "flow_retry_repeats_failures";
    breaks(rule, |world| {
        let first = retries(world).next();
        first.expect("there are two").response = Response::Ok(3);
    });
    let left_out = |world: &mut World| {
        world.jobs.retain(|job| !REPEATED.contains(&job.id));
        world.evidence.retain(|e| !REPEATED.contains(&e.job));
        for call in retries(world) {
            call.response = Response::Ok(0);
        }
    };
    breaks(rule, left_out);
    let mut world = healthy();
    left_out(&mut world);
    for call in retries(&mut world) {
        if let Request::RetryFlow { before_us, .. } = &mut call.request {
            // They had not failed by then.
            *before_us = 503 * S;
        }
    }
    breaks_nothing(&world);
}

#[test]
fn a_retry_without_a_response_may_have_made_jobs() {
    let mut world = healthy();
    for call in retries(&mut world).take(1) {
        call.response = Response::Unknown("cut".into());
    }
    breaks_nothing(&world);
}

#[test]
fn two_live_jobs_of_flows_with_the_same_key_are_found() {
    let share = |world: &mut World, ids: [i64; 2]| {
        for id in ids {
            job(world, id).unique_key = Some("flow".into());
        }
    };
    // Jobs of two flows.
    breaks("unique_key", |world| share(world, [DELETED[0], HELD[0]]));
    // Retries.
    breaks("unique_key", |world| share(world, REPEATED));
    let mut world = healthy();
    // One after another.
    share(&mut world, [REPEATED[0], HELD[0]]);
    breaks_nothing(&world);
}

#[test]
fn jobs_that_a_retry_without_a_response_may_have_made_are_not_certainly_live() {
    let mut world = healthy();
    for id in REPEATED {
        job(&mut world, id).unique_key = Some("flow".into());
    }
    let first = retries(&mut world).next();
    let mut unanswered = first.expect("there are two").clone();
    unanswered.sent_us -= S;
    unanswered.response = Response::Unknown("cut".into());
    world.calls.push(unanswered);
    breaks_nothing(&world);
}

#[test]
fn a_job_that_waits_but_not_for_a_retry_is_found() {
    breaks("flow_not_stranded", |world| {
        spec(world, FLOWS[3]).nodes[1].after[0].on_failure = OnFailure::Run;
    });
    // The database says that the failure cancels the job.
    breaks("no_child_stranded", |world| {
        job(world, HELD[1]).after = Some(json!({"job 0": HELD[0]}));
    });
}

#[test]
fn a_live_job_and_a_dependency_of_a_deleted_flow_are_found() {
    let rule = "flow_delete_leaves_nothing";
    breaks(rule, |world| {
        let waits = job(world, DELETED[1]);
        (waits.state, waits.finished_us) = ("queued".into(), None);
        waits.is_waiting = true;
    });
    breaks(rule, |world| {
        world.dependencies.push(Dependency {
            job: DELETED[1],
            chain: DELETED[0],
        });
    });
}

#[test]
fn a_job_that_starts_after_its_flow_was_deleted_is_found_unless_its_claim_was_in_line() {
    // The flow was deleted as soon as it was cancelled.
    let starts_at = |world: &mut World, at_us: i64| {
        let mut calls = world.calls.iter_mut();
        let last = calls.find(|call| {
            matches!(call.request, Request::CancelFlow { .. }) && call.response == Response::Ok(0)
        });
        last.expect("the healthy world has it").request = Request::DeleteFlow { flow: FLOWS[1] };
        starts_late(world, at_us);
    };
    breaks("flow_delete_leaves_nothing", |world| {
        starts_at(world, 533 * S);
    });
    let mut world = healthy();
    starts_at(&mut world, 532 * S);
    breaks_nothing(&world);
}
