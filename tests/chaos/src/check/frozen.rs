//! Whether others go on with what a host was claiming when it was frozen.

use super::super::ledger::{Ask, Happened, What};
use super::known::ended_by_an_admin;
use super::{Found, Known};

/// On top of the lease.
const LATE_US: i64 = 2_000_000;
/// For a call from outside.
const ANSWERS_WITHIN_US: i64 = 2_000_000;
/// From what the host had claimed to the signal that has frozen it.
const SIGNALLED_WITHIN_US: i64 = 100_000;

/// The freezes in a claim: what has happened, which host, and the jobs that were enqueued for it.
fn freezes<'a>(known: &Known<'a>) -> impl Iterator<Item = (&'a Happened, &'a str, &'a [i64])> {
    known.world.happened.iter().filter_map(|h| match &h.what {
        What::HostFrozen { worker, jobs } if !jobs.is_empty() => {
            Some((h, worker.as_str(), jobs.as_slice()))
        }
        _ => None,
    })
}

/// Each job runs on another host, or has ended, within the lease and 2 s of the freeze. Those that the frozen host had claimed are the
/// cases; where its claim was not committed the database does not know which, and a job that waits longer is against the rule
/// whoever seems to have it. Left out is what was ended from outside, waits for another reason (the server was down, the queue was
/// paused), or was lost elsewhere too.
pub(super) fn claims_run(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (freeze, worker, jobs) in freezes(known) {
        let until_us = freeze.from_us + known.world.run.lease_us + LATE_US;
        for job in jobs.iter().flat_map(|id| known.rows(*id)) {
            let lost = known.attempts(job.id).iter().filter(|a| a.lost);
            let elsewhere = lost.clone().any(|a| known.worker_id(a.worker) != worker);
            let was_its = lost.clone().any(|a| {
                known.worker_id(a.worker) == worker
                    && a.claimed_us <= freeze.from_us + SIGNALLED_WITHIN_US
                    && a.ended_us >= freeze.from_us
            });
            let pauses = known.pauses(&job.queue);
            let paused = pauses
                .iter()
                .any(|(from, until)| *from <= until_us && *until >= freeze.from_us);
            if elsewhere
                || paused
                || ended_by_an_admin(job)
                || known.crashes(job.requested_us, until_us) > 0
            {
                continue;
            }
            let started = known.evidence(job.id).iter();
            let started = started.filter(|e| e.worker != worker).map(|e| e.started_us);
            let Some(goes_on_us) = started.chain(job.finished_us).min() else {
                continue;
            };
            if was_its || goes_on_us > until_us {
                found.took(job.id, (goes_on_us - freeze.from_us).max(0));
            }
        }
    }
    found.p99_within(
        known.world.run.lease_us + LATE_US,
        "from the freeze of a host in its claim to its jobs running elsewhere",
    )
}

/// A call about one of the jobs is answered while the host is frozen.
pub(super) fn holds_nothing(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (freeze, worker, jobs) in freezes(known) {
        for call in jobs.iter().flat_map(|job| known.calls(*job)) {
            let Ask::Cancel { job } = call.ask else {
                continue;
            };
            let meanwhile = (freeze.from_us..freeze.until_us).contains(&call.asked_us);
            if !meanwhile || known.has_other_trouble(call.asked_us, call.answered_us) {
                continue;
            }
            let took_us = call.answered_us - call.asked_us;
            found.case(job, took_us > ANSWERS_WITHIN_US, || {
                format!(
                    "{:?} took {took_us} µs while {worker} was frozen in its claim, and was answered with {:?}",
                    call.ask, call.answer
                )
            });
        }
    }
    found
}
