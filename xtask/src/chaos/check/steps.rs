//! What attempts leave behind while they run: results of steps, and their progress.

use std::collections::BTreeSet;

use super::super::world::{Evidence, Step};
use super::known::ended_from_outside;
use super::{Found, Known};

/// Times are taken before locks are waited for.
const LOCK_US: i64 = 1_000_000;

/// Step of a stale attempt accepted: 0. The row names the attempt that has done the step, by its nonce; it had the job
/// when it was written.
pub(super) fn stale_step(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for step in &known.world.steps {
        let nonce = step.result.as_str().unwrap_or_default();
        let worker = known.worker_id(step.worker);
        let done_by = known
            .evidence(step.job)
            .iter()
            .find(|e| e.nonce == nonce && e.attempt == step.attempt && e.worker == worker);
        let wrong = match done_by {
            None => Some("no such attempt has begun there"),
            Some(evidence) => written_late(known, step, evidence)
                .then_some("that attempt did not have the job any more"),
        };
        found.case(step.job, wrong.is_some(), || {
            let why = wrong.unwrap_or_default();
            format!("{step:?} was written by {worker}, and {why}")
        });
    }
    found
}

/// Whether it was written after the attempt had ended, or under a later claim with the same number.
fn written_late(known: &Known<'_>, step: &Step, evidence: &Evidence) -> bool {
    let of_attempts = known.attempts(step.job).iter();
    let of_attempts = of_attempts.map(|a| (a.attempt, Some(a.claimed_us), Some(a.ended_us)));
    let of_the_end = known.rows(step.job).iter();
    let of_the_end = of_the_end.map(|j| (j.attempt, j.claimed_us, j.finished_us));
    of_attempts
        .chain(of_the_end)
        .filter(|(attempt, _, _)| *attempt == step.attempt)
        .any(|(_, claimed_us, ended_us)| {
            let after_the_end = ended_us.is_some_and(|at| step.at_us > at + LOCK_US);
            let after_a_claim =
                claimed_us.is_some_and(|at| evidence.begun_us < at && step.at_us > at + LOCK_US);
            after_the_end || after_a_claim
        })
}

/// A step that was recorded is done once, and every later attempt gets its result.
pub(super) fn steps_are_kept(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        if !known.wish(job).is_some_and(|wish| wish.steps) {
            continue;
        }
        // What attempts were told: their own nonce by evidence, any of them by a result.
        let mut told: BTreeSet<&str> = known
            .evidence(job.id)
            .iter()
            .filter(|e| e.stepped_us.is_some())
            .map(|e| e.nonce.as_str())
            .collect();
        let result = job.result.as_ref().filter(|_| !ended_from_outside(job));
        told.extend(result.map(|result| result["first"].as_str().unwrap_or("none")));
        let recorded: BTreeSet<&str> = known
            .steps(job.id)
            .iter()
            .map(|step| step.result.as_str().unwrap_or_default())
            .collect();
        let wrong = known.steps(job.id).len() > 1 || !told.is_subset(&recorded);
        found.case(job.id, wrong, || {
            format!(
                "of the step of job {} {recorded:?} is recorded, and attempts were told {told:?}",
                job.id
            )
        });
    }
    found
}

/// Progress of a stale attempt accepted: 0. What is said of a running attempt was said by that attempt.
pub(super) fn stale_progress(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for progress in &known.world.progress {
        let worker = known.worker_id(progress.worker);
        let said_by_it = known.evidence(progress.job).iter().any(|e| {
            e.nonce == progress.step && e.attempt == progress.attempt && e.worker == worker
        });
        found.case(progress.job, !said_by_it, || {
            format!("{progress:?} was not said by that attempt on {worker}")
        });
    }
    found
}
