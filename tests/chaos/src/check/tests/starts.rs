//! Violated guarantees about when jobs may start.

use serde_json::json;

use super::super::super::ledger::Request;
use super::super::super::world::{LoginAway, World};
use super::super::{Known, order};
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of, evidence, job};

#[test]
fn a_start_before_run_at_is_found() {
    breaks("no_early_start", |world| {
        evidence(world, LATER).started_us = 15 * S - 1;
        job(world, LATER).claimed_us = Some(15 * S - 1_000);
    });
}

#[test]
fn a_start_before_the_rescheduled_time_is_found() {
    breaks("no_early_start", |world| {
        evidence(world, MOVED).started_us = 17 * S;
        job(world, MOVED).claimed_us = Some(17 * S - 1_000);
    });
}

#[test]
fn a_claim_of_a_paused_queue_is_found() {
    breaks("pause_holds", |world| {
        for call in &mut world.calls {
            if matches!(call.request, Request::Pause { .. }) {
                (call.sent_us, call.answered_us) = (72 * S, 72 * S + 1_000);
            }
        }
    });
}

#[test]
fn a_pause_without_new_jobs_is_not_a_case() {
    let mut world = healthy();
    assert_eq!(cases_of("pause_holds", &world), 1);
    job(&mut world, WAITED).requested_us = 99 * S;
    assert_eq!(cases_of("pause_holds", &world), 0);
}

#[test]
fn a_queued_job_claimed_before_an_orphan_is_found() {
    breaks("orphans_first", |world| {
        let lost = world.attempts.iter_mut().find(|a| a.job == ORPHAN);
        // Its adopter has claimed other jobs since then.
        lost.expect("it was lost").lease_ended_us = Some(10 * S);
    });
}

#[test]
fn a_queued_job_may_go_first_while_the_handler_of_an_orphan_is_not_served() {
    let mut world = healthy();
    let lost = world.attempts.iter_mut().find(|a| a.job == ORPHAN);
    lost.expect("it was lost").lease_ended_us = Some(10 * S);
    // The adoption is the first claim of this handler.
    job(&mut world, ORPHAN).handler = "chaos.other".into();
    let found = order::orphans_first(&Known::of(&world));
    assert!(found.checked > 0 && found.violations.is_empty());
}

#[test]
fn a_queued_job_may_go_first_while_the_login_of_an_orphans_handler_does_not_respond() {
    let mut world = healthy();
    let lost = world.attempts.iter_mut().find(|a| a.job == ORPHAN);
    let lost = lost.expect("it was lost");
    lost.lease_ended_us = Some(10 * S);
    let adopted_us = lost.ended_us;
    let orphan = job(&mut world, ORPHAN);
    let handler = orphan.handler.clone();
    let adopter = orphan.worker.expect("it was adopted");
    world.logins_away.push(LoginAway {
        worker: Known::of(&world).worker_id(adopter).to_owned(),
        handler,
        from_us: 9 * S,
        until_us: Some(adopted_us - 1),
    });
    breaks_nothing(&world);
    // It answered again before the lease ended.
    world.logins_away[0].until_us = Some(10 * S - 1);
    let found = order::orphans_first(&Known::of(&world));
    assert!(!found.violations.is_empty());
}

#[test]
fn a_job_that_runs_before_the_jobs_that_it_waits_for_is_found() {
    let ends = |at_us| move |world: &mut World| job(world, QUICK).finished_us = Some(at_us);
    breaks("no_child_before_parents", ends(13 * S + 1_001));
    // A claim that has read the clock a moment before the end.
    let mut world = healthy();
    ends(13 * S + 999)(&mut world);
    breaks_nothing(&world);
    breaks("no_child_before_parents", |world| {
        // A claim from which no attempt has started.
        evidence(world, CHILD).started_us = 15 * S;
        (job(world, CHILD).claimed_us, job(world, CHILD).finished_us) =
            (Some(10 * S), Some(16 * S));
    });
    breaks("no_child_before_parents", |world| {
        job(world, CHILD).after = Some(json!({"h": HOPELESS}));
    });
    breaks("no_child_before_parents", |world| {
        job(world, CHILD).after = None;
    });
}

#[test]
fn a_job_that_waits_without_a_dependency_or_is_cancelled_without_a_failure_is_found() {
    breaks("no_child_stranded", |world| {
        let child = job(world, DROPPED);
        (child.state, child.finished_us) = ("queued".into(), None);
        (child.is_waiting, child.cancelled_after) = (true, None);
    });
    breaks("no_child_stranded", |world| {
        job(world, DROPPED).after = Some(json!({"q": QUICK}));
        job(world, DROPPED).cancelled_after = Some(QUICK);
    });
}
