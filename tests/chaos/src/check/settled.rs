//! Whether jobs are settled once, and by the right attempt.

use std::collections::{HashMap, HashSet};

use super::super::world::Evidence;
use super::known::{ended_by_an_admin, kind, nonce};
use super::{Found, Known};

/// No job and no attempt is settled twice.
pub(super) fn once(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut seen = HashSet::new();
    for job in &known.world.jobs {
        if !seen.insert(job.id) {
            continue;
        }
        let rows = known.rows(job.id);
        found.case(job.id, rows.len() > 1, || {
            let states: Vec<_> = rows.iter().map(|row| row.state.as_str()).collect();
            format!("job {} has {} rows: {states:?}", job.id, rows.len())
        });
        let mut numbers = HashSet::new();
        for attempt in known.attempts(job.id) {
            let number = attempt.attempt;
            let again = !numbers.insert(number);
            // If the job ended during its last attempt, that end is also the end of the attempt.
            let twice =
                job.finished_us.is_some() && job.claimed_us.is_some() && job.attempt == number;
            found.case(job.id, again || twice, || {
                format!("attempt {number} of job {} has ended twice", job.id)
            });
        }
    }
    found
}

/// An end of a job or of an attempt, written by a worker.
struct Written<'a> {
    job: i64,
    attempt: i32,
    worker: &'a str,
    nonce: Option<String>,
    claimed_us: i64,
    ended_us: i64,
}

/// The attempt that an outcome names has really run: on that worker, with that number, after that claim. An attempt
/// with the same number under an earlier claim (released, or forgotten in a crash) started before the claim.
pub(super) fn by_its_claim(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for written in written(known) {
        let fits = |e: &&Evidence| {
            e.attempt == written.attempt
                && e.worker == written.worker
                && written.nonce.as_ref().is_none_or(|nonce| *nonce == e.nonce)
                && (written.claimed_us..=written.ended_us).contains(&e.started_us)
        };
        let evidence = known.evidence(written.job);
        let violated = !evidence.iter().any(fits);
        found.case(written.job, violated, || {
            format!(
                "attempt {} of job {} was settled by {} with the nonce {:?}, but no such attempt started there \
                 between its claim and its end; evidence: {evidence:?}",
                written.attempt, written.job, written.worker, written.nonce
            )
        });
    }
    found
}

fn written<'a>(known: &Known<'a>) -> Vec<Written<'a>> {
    let mut all = Vec::new();
    for job in &known.world.jobs {
        let (Some(worker), Some(claimed_us), Some(ended_us)) =
            (job.worker, job.claimed_us, job.finished_us)
        else {
            continue;
        };
        if !ended_by_an_admin(job) && kind(job.error.as_ref()) != "lost" {
            all.push(Written {
                job: job.id,
                attempt: job.attempt,
                worker: known.worker_id(worker),
                nonce: nonce(job.result.as_ref(), job.error.as_ref()),
                claimed_us,
                ended_us,
            });
        }
    }
    for attempt in known.world.attempts.iter().filter(|a| !a.lost) {
        all.push(Written {
            job: attempt.job,
            attempt: attempt.attempt,
            worker: known.worker_id(attempt.worker),
            nonce: nonce(None, Some(&attempt.error)),
            claimed_us: attempt.claimed_us,
            ended_us: attempt.ended_us,
        });
    }
    all
}

/// No attempt starts after the end of its job: its worker would have claimed an ended job, or another worker would have
/// settled it. Left out are ends by admin actions (the claim may have been in line), and claims that the server has
/// forgotten.
pub(super) fn no_start_after_end(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let Some(finished_us) = job.finished_us.filter(|_| !ended_by_an_admin(job)) else {
            continue;
        };
        for evidence in known.evidence(job.id) {
            // If another host has taken the id of this one, others may run its jobs a moment before it learns this.
            if known.forgotten(evidence) || known.is_shared(&evidence.worker) {
                continue;
            }
            let late_us = evidence.started_us - finished_us;
            found.case(job.id, late_us > 0, || {
                format!(
                    "attempt {} of job {} started on {} {late_us} µs after the job had ended",
                    evidence.attempt, job.id, evidence.worker
                )
            });
        }
    }
    found
}

/// An attempt changes nothing outside the database once the next attempt has started: its host refuses changes as soon
/// as it cannot trust the lease. If the server has forgotten the claim, or another host has taken the id, the host
/// cannot know this yet, and the case is left out. The remaining window is a freeze between the host's check and the
/// change: a few microseconds. An attempt whose host is dead by then, or that was suspended, is not a case.
pub(super) fn revoked(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut next: HashMap<i64, &Evidence> = HashMap::new();
    // In order from the last start to the first.
    for evidence in known.world.evidence.iter().rev() {
        let Some(next) = next.insert(evidence.job, evidence) else {
            continue;
        };
        let last_us = evidence.last_us();
        // Two attempts have the same number if one of them has started from the line after its claim was forgotten.
        let forgotten = known.crashes(evidence.started_us, next.started_us) > 0
            || (evidence.attempt == next.attempt && known.forgotten(next));
        if forgotten
            || known.is_shared(&evidence.worker)
            || evidence.ended_us.is_some_and(|at| at < next.started_us)
            || known.is_gone(&evidence.worker, evidence.started_us, next.started_us)
        {
            continue;
        }
        let violated = last_us.is_some_and(|at| at > next.started_us);
        let message = || {
            format!(
                "attempt {} of job {} on {} continued {} µs after attempt {} had started on {}",
                evidence.attempt,
                evidence.job,
                evidence.worker,
                last_us.unwrap_or_default() - next.started_us,
                next.attempt,
                next.worker
            )
        };
        match known.was_suspended(evidence) {
            true => found.unless(evidence.job, violated, message),
            false => found.case(evidence.job, violated, message),
        }
    }
    found
}
