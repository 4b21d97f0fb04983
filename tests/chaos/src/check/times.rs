//! Whether jobs start too early.

use super::super::ledger::{Request, Response};
use super::super::world::Job;
use super::{Found, Known};

/// No attempt starts before the job's run_at. The database and the hosts share a clock here.
pub(super) fn no_early_start(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for call in &known.world.calls {
        let Request::Enqueue {
            spec,
            run_at_us: Some(run_at_us),
        } = &call.request
        else {
            continue;
        };
        let Some(job) = known.originals(spec.n).first() else {
            continue;
        };
        for evidence in known.evidence(job.id) {
            let earliest = earliest_us(known, job, *run_at_us, evidence.started_us);
            let early_us = earliest - evidence.started_us;
            found.case(job.id, early_us > 0, || {
                format!(
                    "attempt {} of job {} started {early_us} µs early",
                    evidence.attempt, job.id
                )
            });
        }
    }
    found
}

/// The earliest permitted start of the job, as known at `at_us`. During a reschedule, either time may apply.
fn earliest_us(known: &Known<'_>, job: &Job, run_at_us: i64, at_us: i64) -> i64 {
    let mut earliest = run_at_us;
    for call in known.calls(job.id) {
        let Request::Reschedule { run_at_us, .. } = call.request else {
            continue;
        };
        let moved = run_at_us.unwrap_or(call.sent_us);
        match &call.response {
            Response::Refused(_) => {}
            Response::Ok(_) if at_us >= call.answered_us => earliest = moved,
            Response::Ok(_) | Response::Unknown(_) if at_us >= call.sent_us => {
                earliest = earliest.min(moved);
            }
            Response::Ok(_) | Response::Unknown(_) => {}
        }
    }
    earliest
}

/// No job of a queue is claimed while the queue is certainly paused. A pause is a case only if a claimable job was
/// enqueued during it.
pub(super) fn pause_holds(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for queue in super::super::load::QUEUES {
        for (from_us, until_us) in known.pauses(queue) {
            let within = |at_us: i64| from_us < at_us && at_us < until_us;
            let mut jobs = known.world.jobs.iter().filter(|job| job.queue == queue);
            let claimed = jobs.clone().find(|job| {
                let earlier = known.attempts(job.id).iter().map(|a| a.claimed_us);
                job.claimed_us.into_iter().chain(earlier).any(within)
            });
            let message = || {
                format!(
                    "job {:?} was claimed although {queue} was paused from {from_us} to {until_us}",
                    claimed.map(|job| job.id)
                )
            };
            let has_claimable =
                jobs.any(|job| within(job.requested_us) && job.available_us < until_us);
            let job = claimed.map(|job| job.id);
            match has_claimable {
                true => found.case(job, claimed.is_some(), message),
                false => found.unless(job, claimed.is_some(), message),
            }
        }
    }
    found
}
