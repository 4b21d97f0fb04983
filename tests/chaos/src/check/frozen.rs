//! Whether other hosts run the jobs of a host that was frozen during a claim.

use super::super::ledger::{Event, Incident, Request};
use super::known::ended_by_an_admin;
use super::{Found, Known};

/// Allowed in addition to the lease.
const LATE_US: i64 = 2_000_000;
/// Allowed for an admin action.
const ANSWERS_WITHIN_US: i64 = 2_000_000;
/// From the host's claim to the signal that froze it.
const SIGNALLED_WITHIN_US: i64 = 100_000;

/// The freezes during a claim: the event, the host, and the jobs enqueued for it.
fn freezes<'a>(known: &Known<'a>) -> impl Iterator<Item = (&'a Incident, &'a str, &'a [i64])> {
    known.world.happened.iter().filter_map(|h| match &h.event {
        Event::HostFrozen { worker, jobs } if !jobs.is_empty() => {
            Some((h, worker.as_str(), jobs.as_slice()))
        }
        _ => None,
    })
}

/// Each job runs on another host, or has ended, within the lease plus 2 s of the freeze. The cases are the jobs that
/// the frozen host had claimed. If its claim was not committed, the database does not know them, and any job that waits
/// longer breaks the rule, whichever host seems to hold it. Left out are jobs that an admin action ended, that waited
/// for another reason (the server was down, the queue was paused), or that were also lost elsewhere.
pub(super) fn claims_run(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (freeze, worker, jobs) in freezes(known) {
        let until_us = freeze.from_us + known.world.run.lease_us + LATE_US;
        for job in jobs.iter().flat_map(|id| known.rows(*id)) {
            let lost = known.attempts(job.id).iter().filter(|a| a.lost);
            let elsewhere = lost.clone().any(|a| known.worker_id(a.worker) != worker);
            let was_claimed = lost.clone().any(|a| {
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
            let Some(resumed_us) = started.chain(job.finished_us).min() else {
                continue;
            };
            if was_claimed || resumed_us > until_us {
                found.took(job.id, (resumed_us - freeze.from_us).max(0));
            }
        }
    }
    found.p99_within(
        known.world.run.lease_us + LATE_US,
        "from the freeze of a host during its claim to its jobs running elsewhere",
    )
}

/// A call about one of the jobs gets its response while the host is frozen.
pub(super) fn blocks_nothing(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (freeze, worker, jobs) in freezes(known) {
        for call in jobs.iter().flat_map(|job| known.calls(*job)) {
            let Request::Cancel { job } = call.request else {
                continue;
            };
            let meanwhile = (freeze.from_us..freeze.until_us).contains(&call.sent_us);
            if !meanwhile || known.has_other_trouble(call.sent_us, call.answered_us) {
                continue;
            }
            let took_us = call.answered_us - call.sent_us;
            found.case(job, took_us > ANSWERS_WITHIN_US, || {
                format!(
                    "{:?} took {took_us} µs while {worker} was frozen during its claim, and was answered with {:?}",
                    call.request, call.response
                )
            });
        }
    }
    found
}
