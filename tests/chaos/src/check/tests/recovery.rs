//! Violated guarantees about jobs that have to continue after a fault.

use serde_json::json;

use super::super::super::ledger::{Event, Incident, Request};
use super::super::super::plan::Fault;
use super::super::super::world::{Attempt, World};
use super::healthy::*;
use super::{breaks, cases_of, evidence, job};

/// The job that a frozen host had claimed runs only after the host is back.
fn runs_late(world: &mut World) {
    for evidence in &mut world.evidence {
        if evidence.job == LARGE[0] {
            evidence.started_us = 181 * S + 1_000;
            evidence.ended_us = None;
        }
    }
    let late = job(world, LARGE[0]);
    (late.claimed_us, late.finished_us) = (Some(181 * S), Some(182 * S));
}

#[test]
fn a_job_that_waits_for_a_host_frozen_during_its_claim_is_found() {
    breaks("frozen_claims_run", runs_late);
    // The claim was never committed, so the database does not know it.
    breaks("frozen_claims_run", |world| {
        runs_late(world);
        world.attempts.retain(|attempt| attempt.job != LARGE[0]);
        let late = job(world, LARGE[0]);
        (late.attempt, late.uncounted) = (1, 0);
        late.result.as_mut().expect("it has succeeded")["attempt"] = json!(1);
        evidence(world, LARGE[0]).attempt = 1;
    });
}

#[test]
fn a_call_that_waits_for_a_frozen_host_is_found() {
    breaks("frozen_blocks_nothing", |world| {
        for call in &mut world.calls {
            if matches!(call.request, Request::Cancel { job } if job == LARGE[1]) {
                call.answered_us = 174 * S;
            }
        }
    });
}

#[test]
fn a_due_job_that_still_waits_at_the_end_is_found() {
    breaks("nothing_stuck", |world| {
        job(world, FAR).available_us = world.dumped_us - S;
    });
}

#[test]
fn a_job_that_still_runs_at_the_end_is_found() {
    breaks("nothing_stuck", |world| {
        job(world, FAR).state = "running".into()
    });
}

#[test]
fn an_orphan_that_waits_too_long_is_found() {
    breaks("runs_again_after_kill", |world| {
        for evidence in world.evidence.iter_mut() {
            if evidence.job == ORPHAN && evidence.attempt == 2 {
                evidence.started_us = 29 * S + 1_000;
            }
        }
        job(world, ORPHAN).claimed_us = Some(29 * S);
        job(world, ORPHAN).finished_us = Some(30 * S);
    });
}

#[test]
fn an_attempt_lost_with_a_host_that_was_stopped_cleanly_is_found() {
    breaks("stop_loses_nothing", |world| {
        world.records.retain(|record| record.job != Some(STOPPED));
        world.attempts.push(Attempt {
            job: STOPPED,
            attempt: 1,
            lost: true,
            worker: B,
            claimed_us: 141 * S,
            ended_us: 146 * S,
            ..Attempt::default()
        });
        let stopped = job(world, STOPPED);
        (stopped.attempt, stopped.uncounted) = (2, 1);
        stopped.claimed_us = Some(146 * S);
        stopped.finished_us = Some(147 * S);
        let result = stopped.result.as_mut().expect("it has succeeded");
        (result["attempt"], result["nonce"]) = (json!(2), json!(nonce(STOPPED, 2)));
        let mut all = world.evidence.iter_mut();
        let second = all.rfind(|e| e.job == STOPPED).expect("it has started");
        (second.attempt, second.nonce) = (2, nonce(STOPPED, 2));
        (second.started_us, second.ended_us) = (146 * S + 1_000, Some(146 * S + 2_000));
    });
}

#[test]
fn a_stop_is_a_case_only_if_its_attempt_had_no_other_fault() {
    let mut world = healthy();
    assert_eq!(cases_of("stop_loses_nothing", &world), 1);
    world.happened.push(Incident {
        from_us: 141 * S + 500_000,
        until_us: 141 * S + 600_000,
        event: Event::ServerCrashed {
            how: Fault::KillBackend,
        },
    });
    assert_eq!(cases_of("stop_loses_nothing", &world), 0);
}
