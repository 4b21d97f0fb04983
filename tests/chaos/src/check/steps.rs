//! Whether only the current attempt writes steps and progress.

use std::collections::{BTreeSet, HashSet};

use super::super::world::Evidence;
use super::known::ended_by_an_admin;
use super::{Found, Known};

/// The database reads the time before it waits for locks, which takes no longer than this.
const LOCK_US: i64 = 1_000_000;

/// No step of a stale attempt is accepted. The row has the nonce of the attempt that did the step; that attempt held
/// the job when the row was written. The rows of waits have no nonce.
pub(super) fn stale_step(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for step in &known.world.steps {
        let nonce = step.result.as_str();
        let worker = known.worker_id(step.worker);
        let mut done_by = known.evidence(step.job).iter().filter(|e| {
            e.attempt == step.attempt
                && e.worker == worker
                && nonce.is_none_or(|nonce| nonce == e.nonce)
        });
        let violation = match done_by.clone().next() {
            None => Some("no such attempt started there"),
            Some(_) => done_by
                .all(|evidence| is_late(known, evidence, step.at_us))
                .then_some("that attempt no longer held the job"),
        };
        found.case(step.job, violation.is_some(), || {
            let why = violation.unwrap_or_default();
            format!("{step:?} was written by {worker}, but {why}")
        });
    }
    found
}

/// Whether this time is after the end of the attempt, or after a later claim with the same number.
fn is_late(known: &Known<'_>, evidence: &Evidence, at_us: i64) -> bool {
    let attempts = known.attempts(evidence.job).iter();
    let attempts = attempts.map(|a| (a.attempt, Some(a.claimed_us), Some(a.ended_us)));
    let rows = known.rows(evidence.job).iter();
    let rows = rows.map(|j| (j.attempt, j.claimed_us, j.finished_us));
    attempts
        .chain(rows)
        .filter(|(attempt, _, _)| *attempt == evidence.attempt)
        .any(|(_, claimed_us, ended_us)| {
            let after_the_end = ended_us.is_some_and(|ended| at_us > ended + LOCK_US);
            let after_a_claim = claimed_us
                .is_some_and(|claimed| evidence.started_us < claimed && at_us > claimed + LOCK_US);
            after_the_end || after_a_claim
        })
}

/// A recorded step is done once, and every later attempt gets its result.
pub(super) fn steps_are_kept(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let has_steps = known.spec(job).is_some_and(|spec| spec.steps);
        if !has_steps || known.evidence(job.id).is_empty() {
            continue;
        }
        // Results that attempts have received: their own nonce according to evidence, any nonce according to a result.
        let mut received: BTreeSet<&str> = known
            .evidence(job.id)
            .iter()
            .filter(|e| e.stepped_us.is_some())
            .map(|e| e.nonce.as_str())
            .collect();
        let result = job.result.as_ref().filter(|_| !ended_by_an_admin(job));
        received.extend(result.map(|result| result["first"].as_str().unwrap_or("none")));
        let recorded: BTreeSet<&str> = known
            .steps(job.id)
            .iter()
            .map(|step| step.result.as_str().unwrap_or_default())
            .collect();
        let violated = known.steps(job.id).len() > 1 || !received.is_subset(&recorded);
        found.case(job.id, violated, || {
            format!(
                "job {} has recorded {recorded:?} for its step, but attempts received {received:?}",
                job.id
            )
        });
    }
    found
}

/// No progress of a stale attempt is accepted. The attempt that wrote a row of rouse.progress held the job at that
/// time, and a row under the job's fence comes from the running attempt. A row outlives its attempt for a moment, so
/// its presence does not prove anything.
pub(super) fn stale_progress(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut seen = HashSet::new();
    for progress in &known.world.progress {
        if !seen.insert((
            progress.job,
            &progress.step,
            progress.reported_us,
            progress.attempt,
        )) {
            continue;
        }
        let written_by = known
            .evidence(progress.job)
            .iter()
            .find(|e| e.nonce == progress.step);
        let violation = match written_by {
            None => Some("no such attempt started"),
            Some(evidence) => {
                let runs = progress.attempt.zip(progress.worker);
                let is_another = runs.is_some_and(|(attempt, worker)| {
                    evidence.attempt != attempt || evidence.worker != known.worker_id(worker)
                });
                match is_another {
                    true => Some("another attempt holds the job"),
                    false => is_late(known, evidence, progress.reported_us)
                        .then_some("that attempt no longer held the job"),
                }
            }
        };
        found.case(progress.job, violation.is_some(), || {
            format!(
                "{progress:?} was written by {written_by:?}: {}",
                violation.unwrap_or_default()
            )
        });
    }
    found
}
