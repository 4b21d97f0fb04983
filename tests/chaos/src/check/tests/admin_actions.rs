//! Violated guarantees about admin actions.

use super::super::super::ledger::{Event, Incident, Request, Response};
use super::super::super::plan::Fault;
use super::super::super::world::World;
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of, evidence};

/// An attempt at the job that was cancelled in line starts `late_us` after the response, on the worker with this id.
fn starts_late(world: &mut World, worker: &str, late_us: i64) {
    for known in &mut world.workers {
        if known.incarnation == A {
            known.worker_id = worker.into();
        }
    }
    for evidence in &mut world.evidence {
        if evidence.worker == "host-1" {
            evidence.worker = worker.into();
        }
    }
    let mut late = evidence(world, QUICK).clone();
    (late.job, late.nonce) = (IN_LINE, "late".into());
    (late.started_us, late.ended_us) = (150 * S + 301_000 + late_us, None);
    world.evidence.push(late);
}

#[test]
fn a_late_start_of_a_claim_that_was_cancelled_in_line_is_found() {
    breaks("ended_in_line", |world| {
        starts_late(world, "host-1", 350_000)
    });
    // The third seat polls: it releases claims that have not started within a second.
    breaks("ended_in_line", |world| {
        starts_late(world, "host-2-7", 2_600_000)
    });
    for (worker, late_us) in [("host-1", 150_000), ("host-2-7", 1_400_000)] {
        let mut world = healthy();
        starts_late(&mut world, worker, late_us);
        breaks_nothing(&world);
        assert_eq!(cases_of("ended_in_line", &world), 1);
    }
}

#[test]
fn a_host_that_was_cut_off_may_start_a_cancelled_claim() {
    let mut world = healthy();
    starts_late(&mut world, "host-1", 1_400_000);
    world.happened.push(Incident {
        from_us: 149 * S,
        until_us: 149 * S,
        event: Event::BackendsTerminated { count: 1 },
    });
    breaks_nothing(&world);
}

#[test]
fn a_job_that_had_started_when_it_was_cancelled_is_not_a_case_of_ended_in_line() {
    let mut world = healthy();
    starts_late(&mut world, "host-1", -200_000);
    breaks_nothing(&world);
    assert_eq!(cases_of("ended_in_line", &world), 0);
}

#[test]
fn an_attempt_that_continues_after_its_host_missed_the_cancellation_is_found() {
    breaks("cancels_arrive", |world| {
        evidence(world, NOTIFIED).ticked_us = Some(164 * S);
    });
    breaks("cancels_arrive", |world| {
        evidence(world, NOTIFIED).ended_us = Some(167 * S);
    });
}

#[test]
fn a_cancellation_during_other_faults_is_not_a_case() {
    let mut world = healthy();
    assert_eq!(cases_of("cancels_arrive", &world), 1);
    for event in [
        Event::BackendsTerminated { count: 1 },
        Event::ServerCrashed {
            how: Fault::CrashServer,
        },
        Event::HostFrozen {
            worker: "host-1".into(),
            jobs: Vec::new(),
        },
    ] {
        world.happened.push(Incident {
            from_us: 162 * S,
            until_us: 162 * S,
            event,
        });
        assert_eq!(cases_of("cancels_arrive", &world), 0);
        world.happened.pop();
    }
}

#[test]
fn an_answered_cancellation_that_does_not_hold_is_found() {
    breaks("admin_ends_hold", |world| {
        let request = Request::Cancel { job: QUICK };
        let mut call = world.calls[0].clone();
        (call.request, call.response) = (request, Response::Ok(1));
        world.calls.push(call);
    });
}

#[test]
fn an_end_by_an_admin_that_nobody_requested_is_found() {
    breaks("admin_ends_were_requested", |world| {
        world
            .calls
            .retain(|call| !matches!(call.request, Request::Cancel { .. }));
    });
    breaks("admin_ends_were_requested", |world| {
        world
            .calls
            .retain(|call| !matches!(call.request, Request::Complete { .. }));
    });
}
