//! Who has settled a job, and how often.

use std::collections::{HashMap, HashSet};

use super::super::world::Evidence;
use super::known::{ended_by_an_admin, kind, nonce};
use super::{Found, Known};

/// Settled twice: 0.
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
            format!("job {} is there {} times: {states:?}", job.id, rows.len())
        });
        let mut numbers = HashSet::new();
        for attempt in known.attempts(job.id) {
            let number = attempt.attempt;
            let again = !numbers.insert(number);
            // The end that came while it ran is the end of that attempt.
            let twice =
                job.finished_us.is_some() && job.claimed_us.is_some() && job.attempt == number;
            found.case(job.id, again || twice, || {
                format!("attempt {number} of job {} has ended twice", job.id)
            });
        }
    }
    found
}

/// An end that a worker has written, of a job or of an attempt.
struct Written<'a> {
    job: i64,
    attempt: i32,
    worker: &'a str,
    nonce: Option<String>,
    claimed_us: i64,
    ended_us: i64,
}

/// The attempt that an outcome names has really run: on that worker, with that number, after that claim. One with
/// the same number from an earlier claim (given back, or forgotten in a crash) has started before it.
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
        let wrong = !evidence.iter().any(fits);
        found.case(written.job, wrong, || {
            format!(
                "attempt {} of job {} was settled by {} with the nonce {:?}, and no such attempt has started there \
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

/// Whoever starts a job after its end has claimed what was over, or has settled it as somebody else. Not so where the end
/// came from outside, while a claim stood in line; nor where the server has forgotten the claim.
pub(super) fn over_at_its_end(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let Some(finished_us) = job.finished_us.filter(|_| !ended_by_an_admin(job)) else {
            continue;
        };
        for evidence in known.evidence(job.id) {
            // A host whose id another has taken hears of it a moment after others may have its jobs.
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

/// An attempt leaves nothing outside of the database any more once another has started: its host refuses that as soon as
/// it cannot trust the lease. Where the server has forgotten the claim, or another host has taken the id, the host cannot know at that
/// moment. What remains is a freeze between the host's look and what it then does: some microseconds. One whose host is gone by then
/// shows nothing.
pub(super) fn revoked(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut next: HashMap<i64, &Evidence> = HashMap::new();
    // From the last start to the first.
    for evidence in known.world.evidence.iter().rev() {
        let Some(next) = next.insert(evidence.job, evidence) else {
            continue;
        };
        let last_us = evidence.last_us();
        let forgotten = known.crashes(evidence.started_us, next.started_us) > 0;
        if forgotten
            || known.is_shared(&evidence.worker)
            || evidence.ended_us.is_some_and(|at| at < next.started_us)
            || known.is_gone(&evidence.worker, evidence.started_us, next.started_us)
        {
            continue;
        }
        found.case(
            evidence.job,
            last_us.is_some_and(|at| at > next.started_us),
            || {
                format!(
                    "attempt {} of job {} on {} went on {} µs after attempt {} had started on {}",
                    evidence.attempt,
                    evidence.job,
                    evidence.worker,
                    last_us.unwrap_or_default() - next.started_us,
                    next.attempt,
                    next.worker
                )
            },
        );
    }
    found
}
