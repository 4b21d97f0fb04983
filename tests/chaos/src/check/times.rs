//! When jobs may start.

use super::super::ledger::{Answer, Ask};
use super::super::world::Job;
use super::{Found, Known};

/// Started before run_at: 0. The database and the host share a clock here.
pub(super) fn not_early(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for call in &known.world.calls {
        let Ask::Enqueue {
            wish,
            run_at_us: Some(run_at_us),
        } = &call.ask
        else {
            continue;
        };
        let Some(job) = known.originals(wish.n).first() else {
            continue;
        };
        for evidence in known.evidence(job.id) {
            let earliest = earliest_us(known, job, *run_at_us, evidence.started_us);
            let early_us = earliest - evidence.started_us;
            found.case(job.id, early_us > 0, || {
                format!(
                    "attempt {} of job {} started {early_us} µs before its time",
                    evidence.attempt, job.id
                )
            });
        }
    }
    found
}

/// From when on the job might start, as it was known at `at_us`. While a move is under way, either time may hold.
fn earliest_us(known: &Known<'_>, job: &Job, run_at_us: i64, at_us: i64) -> i64 {
    let mut earliest = run_at_us;
    for call in known.calls(job.id) {
        let Ask::Reschedule { run_at_us, .. } = call.ask else {
            continue;
        };
        let moved = run_at_us.unwrap_or(call.asked_us);
        match &call.answer {
            Answer::Refused(_) => {}
            Answer::Ok(_) if at_us >= call.answered_us => earliest = moved,
            Answer::Ok(_) | Answer::Unknown(_) if at_us >= call.asked_us => {
                earliest = earliest.min(moved);
            }
            Answer::Ok(_) | Answer::Unknown(_) => {}
        }
    }
    earliest
}

/// No claim of a queue falls into a time in which it was certainly paused. One in which nothing came that could be claimed shows
/// nothing.
pub(super) fn pause_holds(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for queue in super::super::load::QUEUES {
        for (from_us, until_us) in known.pauses(queue) {
            let within = |at_us: i64| from_us < at_us && at_us < until_us;
            let mut jobs = known.world.jobs.iter().filter(|job| job.queue == queue);
            let claimed = jobs.clone().find(|job| {
                let of_attempts = known.attempts(job.id).iter().map(|a| a.claimed_us);
                job.claimed_us.into_iter().chain(of_attempts).any(within)
            });
            let what = || {
                format!(
                    "job {:?} was claimed although {queue} was paused from {from_us} to {until_us}",
                    claimed.map(|job| job.id)
                )
            };
            let has_come = jobs.any(|job| within(job.requested_us) && job.available_us < until_us);
            let job = claimed.map(|job| job.id);
            match has_come {
                true => found.case(job, claimed.is_some(), what),
                false => found.unless(job, claimed.is_some(), what),
            }
        }
    }
    found
}
