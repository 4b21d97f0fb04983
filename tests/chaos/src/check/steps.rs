//! What attempts leave behind while they run: results of steps, and their progress.

use std::collections::{BTreeSet, HashSet};

use super::super::world::Evidence;
use super::known::ended_by_an_admin;
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
            None => Some("no such attempt has started there"),
            Some(evidence) => is_late(known, evidence, step.at_us)
                .then_some("that attempt did not have the job any more"),
        };
        found.case(step.job, wrong.is_some(), || {
            let why = wrong.unwrap_or_default();
            format!("{step:?} was written by {worker}, and {why}")
        });
    }
    found
}

/// Whether this is after the attempt had ended, or under a later claim with the same number.
fn is_late(known: &Known<'_>, evidence: &Evidence, at_us: i64) -> bool {
    let of_attempts = known.attempts(evidence.job).iter();
    let of_attempts = of_attempts.map(|a| (a.attempt, Some(a.claimed_us), Some(a.ended_us)));
    let of_the_end = known.rows(evidence.job).iter();
    let of_the_end = of_the_end.map(|j| (j.attempt, j.claimed_us, j.finished_us));
    of_attempts
        .chain(of_the_end)
        .filter(|(attempt, _, _)| *attempt == evidence.attempt)
        .any(|(_, claimed_us, ended_us)| {
            let after_the_end = ended_us.is_some_and(|ended| at_us > ended + LOCK_US);
            let after_a_claim = claimed_us
                .is_some_and(|claimed| evidence.started_us < claimed && at_us > claimed + LOCK_US);
            after_the_end || after_a_claim
        })
}

/// A step that was recorded is done once, and every later attempt gets its result.
pub(super) fn steps_are_kept(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let has_steps = known.wish(job).is_some_and(|wish| wish.steps);
        if !has_steps || known.evidence(job.id).is_empty() {
            continue;
        }
        // What attempts were told: their own nonce by evidence, any of them by a result.
        let mut told: BTreeSet<&str> = known
            .evidence(job.id)
            .iter()
            .filter(|e| e.stepped_us.is_some())
            .map(|e| e.nonce.as_str())
            .collect();
        let result = job.result.as_ref().filter(|_| !ended_by_an_admin(job));
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

/// Progress of a stale attempt accepted: 0. Whoever has said what was seen in rouse.progress had the job when it was written;
/// and what stands there under the fence of the job was said by the attempt that runs. What an attempt has left there is
/// deleted a little later: that it is still there says nothing.
pub(super) fn stale_progress(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut seen = HashSet::new();
    for progress in &known.world.progress {
        if !seen.insert((
            progress.job,
            &progress.step,
            progress.said_us,
            progress.attempt,
        )) {
            continue;
        }
        let said_by = known
            .evidence(progress.job)
            .iter()
            .find(|e| e.nonce == progress.step);
        let wrong = match said_by {
            None => Some("no such attempt has started"),
            Some(evidence) => {
                let runs = progress.attempt.zip(progress.worker);
                let is_another = runs.is_some_and(|(attempt, worker)| {
                    evidence.attempt != attempt || evidence.worker != known.worker_id(worker)
                });
                match is_another {
                    true => Some("another attempt has the job"),
                    false => is_late(known, evidence, progress.said_us)
                        .then_some("that attempt did not have the job any more"),
                }
            }
        };
        found.case(progress.job, wrong.is_some(), || {
            format!(
                "{progress:?} was said by {said_by:?}: {}",
                wrong.unwrap_or_default()
            )
        });
    }
    found
}
