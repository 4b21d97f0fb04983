//! Violated guarantees about what attempts leave behind.

use serde_json::json;

use super::super::super::ledger::{Event, Incident};
use super::super::super::plan::Fault;
use super::super::super::world::World;
use super::super::{Known, settled};
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of, evidence, job};

#[test]
fn a_job_that_is_finished_and_live_is_found() {
    breaks("settled_once", |world| {
        let mut live = job(world, QUICK).clone();
        (live.state, live.finished_us) = ("queued".into(), None);
        (live.claimed_us, live.worker, live.result) = (None, None, None);
        live.available_us = world.dumped_us + S;
        world.jobs.push(live);
    });
}

#[test]
fn an_attempt_that_has_ended_twice_is_found() {
    breaks("settled_once", |world| {
        let mut again = world.attempts.clone();
        again.retain(|attempt| attempt.job == FLAKY);
        world.attempts.append(&mut again);
    });
}

#[test]
fn an_outcome_with_the_nonce_of_another_attempt_is_found() {
    breaks("stale_outcome", |world| {
        let result = job(world, RELEASED).result.as_mut();
        result.expect("it has succeeded")["nonce"] = json!("given back");
    });
}

#[test]
fn an_outcome_of_another_worker_is_found() {
    breaks("stale_outcome", |world| job(world, QUICK).worker = Some(B));
}

#[test]
fn an_outcome_of_an_attempt_that_never_started_is_found() {
    breaks("stale_outcome", |world| {
        world.evidence.retain(|e| e.job != QUICK)
    });
}

#[test]
fn a_failed_attempt_with_the_nonce_of_another_is_found() {
    breaks("stale_outcome", |world| {
        let failed = world.attempts.iter_mut().find(|a| a.job == FLAKY);
        failed.expect("it has failed once").error["details"]["nonce"] = json!("other");
    });
}

/// Another attempt at the first job starts after its end.
fn starts_again(world: &mut World) -> i64 {
    let finished_us = job(world, QUICK).finished_us.expect("it has ended");
    let mut again = evidence(world, QUICK).clone();
    again.nonce = "again".into();
    (again.started_us, again.ended_us) = (finished_us + S / 4, None);
    let started_us = again.started_us;
    world.evidence.push(again);
    started_us
}

#[test]
fn an_attempt_that_starts_after_the_end_of_its_job_is_found() {
    breaks("no_start_after_end", |world| {
        starts_again(world);
    });
}

#[test]
fn an_attempt_that_starts_after_an_end_by_an_admin_is_not_a_case() {
    let mut world = healthy();
    let mut late = evidence(&mut world, QUICK).clone();
    (late.job, late.nonce) = (CANCELLED, "late".into());
    late.started_us = 11 * S + 500_000;
    world.evidence.push(late);
    breaks_nothing(&world);
}

#[test]
fn an_attempt_that_continues_after_it_has_lost_its_job_is_found() {
    breaks("revoked", |world| {
        evidence(world, FROZEN).ended_us = Some(129 * S + 2_000);
    });
}

#[test]
fn an_attempt_whose_host_was_killed_is_not_a_case_of_revocation() {
    let mut world = healthy();
    let cases = |world: &World| cases_of("revoked", world);
    assert_eq!(cases(&world), 1);
    world.happened.push(Incident {
        from_us: 126 * S,
        until_us: 126 * S,
        event: Event::HostKilled {
            worker: "host-2".into(),
        },
    });
    assert_eq!(cases(&world), 0);
}

#[test]
fn an_attempt_that_starts_from_the_line_under_a_forgotten_claim_does_not_revoke_another() {
    let mut world = healthy();
    evidence(&mut world, FROZEN).ended_us = Some(129 * S + 2_000);
    let frozen = evidence(&mut world, FROZEN).clone();
    let mut all = world.evidence.iter_mut();
    let next = all.find(|it| it.job == FROZEN && it.started_us > frozen.started_us);
    let next = next.expect("it has run again");
    (next.attempt, next.started_us) = (frozen.attempt, frozen.started_us + S);
    let crashed_us = frozen.started_us - 1;
    let violations = |world: &World| settled::revoked(&Known::of(world)).violations.len();
    assert_eq!(violations(&world), 1);
    world.happened.push(Incident {
        from_us: crashed_us,
        until_us: crashed_us,
        event: Event::ServerCrashed {
            how: Fault::CrashServer,
        },
    });
    assert_eq!(violations(&world), 0);
}

#[test]
fn a_late_start_under_a_forgotten_claim_is_excused() {
    let mut world = healthy();
    let at_us = starts_again(&mut world) + S / 2;
    world.happened.push(Incident {
        from_us: at_us,
        until_us: at_us + S,
        event: Event::ServerCrashed {
            how: Fault::CrashServer,
        },
    });
    breaks_nothing(&world);
}

#[test]
fn a_step_written_by_a_stale_attempt_is_found() {
    // Under the claim of its successor.
    breaks("stale_step", |world| world.steps[0].attempt = 2);
    // After it had ended.
    breaks("stale_step", |world| world.steps[0].at_us = 90 * S);
    // By a worker that did not hold the job.
    breaks("stale_step", |world| world.steps[0].worker = C);
}

#[test]
fn a_forgotten_or_repeated_step_is_found() {
    breaks("steps_are_kept", |world| {
        world.steps.retain(|step| step.job != STEPPED)
    });
    breaks("steps_are_kept", |world| {
        let result = job(world, STEPPED).result.as_mut();
        result.expect("it has succeeded")["first"] = json!(nonce(STEPPED, 2));
    });
    breaks("steps_are_kept", |world| {
        let mut all = world.evidence.iter_mut();
        let second = all.find(|e| e.job == STEPPED && e.attempt == 2);
        second.expect("it has started").stepped_us = Some(83 * S);
    });
}

#[test]
fn the_progress_of_a_stale_attempt_is_found() {
    // Under the fence of its successor.
    breaks("stale_progress", |world| {
        world.progress[0].step = nonce(STEPPED, 1)
    });
    // Under its own, long after it had lost the job.
    breaks("stale_progress", |world| {
        world.progress[1].reported_us = 83 * S + 500_000
    });
    // After the job had ended.
    breaks("stale_progress", |world| {
        world.progress[0].reported_us = 86 * S
    });
}

#[test]
fn a_job_that_ends_differently_from_its_handler_is_found() {
    breaks("ends_as_decided", |world| {
        job(world, HOPELESS).state = "timed_out".into()
    });
    breaks("ends_as_decided", |world| {
        job(world, QUICK).result.as_mut().expect("it has one")["n"] = json!(0);
    });
}
