//! Violated guarantees about which jobs exist.

use super::super::super::ledger::{Request, Response};
use super::super::super::world::{Due, World};
use super::healthy::*;
use super::{breaks, job};

#[test]
fn an_accepted_job_that_does_not_exist_is_found() {
    breaks("accepted_jobs_exist", |world| {
        world.jobs.retain(|job| job.id != FAR)
    });
}

#[test]
fn a_retry_that_does_not_exist_is_found() {
    breaks("accepted_jobs_exist", |world| {
        world.jobs.retain(|job| job.id != AGAIN[1])
    });
}

#[test]
fn a_job_whose_enqueue_was_refused_or_rolled_back_is_found() {
    let answered = |world: &mut World, response: Response| {
        let call = world
            .calls
            .iter_mut()
            .find(|c| c.response == Response::Ok(QUICK));
        call.expect("the call exists").response = response;
    };
    breaks("refused_leaves_nothing", |world| {
        answered(world, Response::Refused("no".into()));
    });
    breaks("refused_leaves_nothing", |world| {
        answered(world, Response::Unknown("rolled back".into()));
        for call in &mut world.calls {
            if let Request::Enqueue { spec, .. } = &mut call.request {
                spec.rolled_back |= spec.n == QUICK * 100;
            }
        }
    });
}

#[test]
fn a_job_that_exists_under_two_ids_is_found() {
    breaks("accepted_jobs_exist", |world| {
        let mut twin = job(world, FAR).clone();
        twin.id = 99;
        world.jobs.push(twin);
    });
}

#[test]
fn a_job_that_nobody_enqueued_is_found() {
    breaks("refused_leaves_nothing", |world| {
        let mut stray = job(world, FAR).clone();
        (stray.id, stray.n) = (99, 9_900);
        world.jobs.push(stray);
    });
}

#[test]
fn two_live_jobs_with_the_same_key_are_found() {
    breaks("unique_key", |world| {
        job(world, KEYED[0]).finished_us = Some(21 * S)
    });
}

#[test]
fn an_enqueue_that_returned_the_live_job_of_another_tenant_is_found() {
    breaks("accepted_jobs_exist", |world| {
        job(world, KEYED[0]).tenant = Some("another".into());
    });
}

#[test]
fn two_live_retries_of_one_job_are_found() {
    breaks("one_retry", |world| {
        job(world, AGAIN[0]).finished_us = Some(41 * S)
    });
}

#[test]
fn a_due_time_with_two_jobs_or_none_is_found_and_so_is_one_that_is_left_out() {
    let twice = |world: &mut World| {
        let again = world.due[1].clone();
        world.due.push(again);
    };
    breaks("each_due_time_once", twice);
    breaks("each_due_time_once", |world| world.due[1].jobs = 0);
    breaks("each_due_time_once", |world| drop(world.due.remove(1)));
    breaks("each_due_time_once", |world| {
        world.due.push(Due {
            job: Some(1),
            jobs: 1,
            ..Due::default()
        });
    });
}
