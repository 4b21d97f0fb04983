//! Whether suspended jobs continue, with their recorded steps and without the loss of an attempt.

use serde_json::Value;

use super::super::world::Job;
use super::known::{ended_by_an_admin, is_suspended, kind};
use super::{Found, Known};

/// The time that is allowed after the end of a sleep or a timeout.
const LATE_US: i64 = 2_000_000;

/// The jobs that were suspended at least once.
fn suspended<'a>(known: &Known<'a>) -> impl Iterator<Item = &'a Job> {
    let jobs = known.world.jobs.iter();
    jobs.filter(|job| known.attempts(job.id).iter().any(|a| a.wait.is_some()))
}

/// No job is suspended at the end of the run past its time, after the jobs that it has called, or with the signal that
/// it waits for.
pub(super) fn not_stranded(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in suspended(known) {
        let wait = job.wait.as_ref().filter(|_| is_suspended(job));
        let why = wait.and_then(|wait| stranded(known, job, wait));
        found.case(job.id, why.is_some(), || {
            format!(
                "job {} is suspended {}: {wait:?}",
                job.id,
                why.unwrap_or_default()
            )
        });
    }
    found
}

fn stranded(known: &Known<'_>, job: &Job, wait: &Value) -> Option<&'static str> {
    match wait["kind"].as_str() {
        Some("call") => {
            let called = wait["jobs"].as_array().into_iter().flatten();
            let mut chains = called.filter_map(Value::as_i64).map(|id| {
                let chain = known.rows(id).first().map_or(id, |row| row.chain);
                known.chain(chain)
            });
            let have_ended = chains.all(|chain| chain.iter().all(|job| job.finished_us.is_some()));
            have_ended.then_some("after the jobs that it has called have ended")
        }
        Some("signal" | "sleep") => {
            let mut signals = known.world.signals.iter();
            if signals.any(|kept| kept.job == job.id && wait["name"] == kept.name.as_str()) {
                return Some("with the signal that it waits for");
            }
            (job.available_us + LATE_US < known.world.dumped_us).then_some("past its time")
        }
        _ => Some("in an unknown way"),
    }
}

/// The attempts that do not count are exactly the lost and the suspended ones, and those that a shutdown has stopped.
/// The others are within the maximum.
pub(super) fn not_counted(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in suspended(known) {
        let Some(spec) = known.spec(job) else {
            continue;
        };
        // The last loss of a job that failed because of it is in the job's own row.
        let gave_up = job.state == "failed" && kind(job.error.as_ref()) == "lost";
        let attempts = known.attempts(job.id).iter();
        let free = attempts.filter(|a| a.lost || a.wait.is_some()).count();
        let stopped = known.records(job.id).iter();
        let stopped = stopped
            .filter(|r| r.event == "released" && r.started)
            .count();
        let free = (free + stopped) as i32 + i32::from(gave_up);
        let counted = job.attempt - job.uncounted;
        let wrong = job.uncounted != free || counted > spec.attempts_max();
        found.case(job.id, wrong, || {
            format!(
                "job {} had {} attempts, of which {free} were lost, suspended or stopped; {} do not count, and {} may",
                job.id,
                job.attempt,
                job.uncounted,
                spec.attempts_max()
            )
        });
    }
    found
}

/// A step that a job has recorded is not done again, and its result is that of the attempt that recorded it. A case is
/// a job with an attempt after the record.
pub(super) fn steps_once(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        if known.spec(job).is_none_or(|spec| spec.suspending.is_none()) {
            continue;
        }
        let steps = known.steps(job.id).iter();
        let first: Vec<_> = steps.filter(|s| s.name == "first").collect();
        let evidence = known.evidence(job.id);
        let own = job.result.as_ref().filter(|_| !ended_by_an_admin(job));
        let Some(step) = first.first() else {
            let received =
                own.is_some() || evidence.iter().any(|attempt| attempt.stepped_us.is_some());
            found.unless(job.id, received, || {
                format!("the step of job {} is not recorded any more", job.id)
            });
            continue;
        };
        let by = step.result.as_str().unwrap_or_default();
        let others = evidence.iter().filter(|attempt| attempt.nonce != by);
        let repeats = others.clone().any(|attempt| {
            attempt.stepped_us.is_some()
                || (attempt.did_us.is_some() && attempt.started_us > step.at_us)
        });
        let differs = own.is_some_and(|own| own["first"] != by);
        let wrong = first.len() > 1 || repeats || differs;
        let message = || {
            format!(
                "the step of job {} was done again after {step:?}, or its result is another one: {own:?}, {evidence:?}",
                job.id
            )
        };
        match others.clone().any(|next| next.started_us > step.at_us) {
            true => found.case(job.id, wrong, message),
            false => found.unless(job.id, wrong, message),
        }
    }
    found
}
