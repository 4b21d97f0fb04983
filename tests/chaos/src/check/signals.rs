//! Whether each signal ends one wait.

use std::collections::BTreeSet;

use super::super::ledger::{Request, Response};
use super::super::world::{Call, Job, Step};
use super::known::ended_by_an_admin;
use super::{Found, Known};

/// Maintenance deletes signals that are an hour old and whose job has ended.
const KEPT_FOR_US: i64 = 3_600_000_000;

/// The mark of the signal that a step has taken.
fn mark(step: &Step) -> Option<i64> {
    step.result["payload"]["mark"].as_i64()
}

/// If the response to a sent signal was true, the signal was taken by one wait, or is still kept. If the signal was
/// refused, or the response was false because the job had ended, it does not exist anywhere. No wait times out while a
/// signal is there, and the handler has received what its waits have taken.
pub(super) fn not_lost(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for call in &known.world.calls {
        let Request::Signal { job, mark } = call.request else {
            continue;
        };
        let taken = taken(known, job, mark).count();
        let kept = kept(known, job, mark);
        let may_be_deleted = known.world.dumped_us - call.sent_us > KEPT_FOR_US
            && had_ended(known, job, known.world.dumped_us);
        let violated = match &call.response {
            Response::Ok(1) => taken + kept != 1 && (taken > 0 || !may_be_deleted),
            Response::Ok(_) => taken + kept != 0 || !had_ended(known, job, call.answered_us),
            Response::Refused(_) => taken + kept != 0,
            Response::Unknown(_) => taken + kept > 1,
        };
        found.case(job, violated, || {
            format!(
                "signal {mark} to job {job} was answered with {:?}, was taken {taken} times and is kept {kept} times",
                call.response
            )
        });
        if let Some(missed) = missed_by(known, call, job, mark) {
            found.unless(job, true, || {
                format!("signal {mark} to job {job} was there, but this wait timed out: {missed:?}")
            });
        }
    }
    for job in &known.world.jobs {
        let result = job.result.as_ref().filter(|_| !ended_by_an_admin(job));
        let Some(signals) = result.and_then(|result| result["signals"].as_array()) else {
            continue;
        };
        let received = signals.iter().filter_map(|signal| signal["mark"].as_i64());
        let received: BTreeSet<i64> = received.collect();
        let steps: BTreeSet<i64> = known.steps(job.id).iter().filter_map(|s| mark(s)).collect();
        found.unless(job.id, received != steps, || {
            format!(
                "the waits of job {} have taken {steps:?}, but its handler received {received:?}",
                job.id
            )
        });
    }
    found
}

fn taken<'a>(known: &Known<'a>, job: i64, wanted: i64) -> impl Iterator<Item = &'a Step> {
    let steps: Vec<&Step> = known.steps(job).to_vec();
    steps
        .into_iter()
        .filter(move |step| mark(step) == Some(wanted))
}

fn kept(known: &Known<'_>, job: i64, mark: i64) -> usize {
    let all = known.world.signals.iter();
    all.filter(|kept| kept.job == job && kept.mark == mark)
        .count()
}

fn had_ended(known: &Known<'_>, job: i64, at_us: i64) -> bool {
    let ended = |job: &&Job| job.finished_us.is_some_and(|ended| ended <= at_us);
    known.rows(job).iter().any(ended)
}

/// The wait that timed out although this signal had been committed and not taken.
fn missed_by<'a>(known: &Known<'a>, call: &Call, job: i64, mark: i64) -> Option<&'a Step> {
    if call.response != Response::Ok(1) {
        return None;
    }
    let taken_us = taken(known, job, mark).map(|step| step.at_us).min();
    let steps = known.steps(job).iter().copied();
    let mut timed_out = steps.filter(|step| step.result["timed_out"] == true);
    timed_out.find(|step| {
        call.answered_us < step.at_us && taken_us.is_none_or(|taken| taken > step.at_us)
    })
}
