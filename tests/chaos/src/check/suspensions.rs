//! Whether suspended jobs resume with their recorded steps, and without using up an attempt.

use serde_json::Value;

use super::super::world::Job;
use super::known::{ended_by_an_admin, is_suspended, kind};
use super::{Found, Known};

/// How late a job may resume after its sleep, or the timeout of its wait, has ended.
const LATE_US: i64 = 2_000_000;

/// The jobs that were suspended at least once.
fn suspended<'a>(known: &Known<'a>) -> impl Iterator<Item = &'a Job> {
    let jobs = known.world.jobs.iter();
    jobs.filter(|job| known.attempts(job.id).iter().any(|a| a.wait.is_some()))
}

/// At the end of the run, no job is still suspended although its wait is over: its time has passed, the jobs that it
/// called have ended, or the signal that it waits for has arrived.
pub(super) fn not_stranded(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in suspended(known) {
        let wait = job.wait.as_ref().filter(|_| is_suspended(job));
        let why = wait.and_then(|wait| stranded(known, job, wait));
        found.case(job.id, why.is_some(), || {
            format!(
                "job {} is still suspended, but {}: {wait:?}",
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
            have_ended.then_some("the jobs that it called have ended")
        }
        Some("signal" | "sleep") => {
            let mut signals = known.world.signals.iter();
            if signals.any(|kept| kept.job == job.id && wait["name"] == kept.name.as_str()) {
                return Some("the signal that it waits for has arrived");
            }
            (job.available_us + LATE_US < known.world.dumped_us).then_some("its time has passed")
        }
        _ => Some("its kind of wait is unknown"),
    }
}

/// The uncounted attempts are exactly those that were lost, suspended, or given back after their start. The others
/// do not exceed the maximum.
pub(super) fn not_counted(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in suspended(known) {
        let Some(spec) = known.spec(job) else {
            continue;
        };
        // If the job failed because of its last loss, that loss is in the job's own row, and not among its attempts.
        let gave_up = job.state == "failed" && kind(job.error.as_ref()) == "lost";
        let attempts = known.attempts(job.id).iter();
        let uncounted = attempts.filter(|a| a.lost || a.wait.is_some()).count();
        let released = known.records(job.id).iter();
        let released = released
            .filter(|r| r.event == "released" && r.started)
            .count();
        let uncounted = (uncounted + released) as i32 + i32::from(gave_up);
        let counted = job.attempt - job.uncounted;
        let violated = job.uncounted != uncounted || counted > spec.attempts_max();
        found.case(job.id, violated, || {
            format!(
                "job {} had {} attempts, of which {uncounted} were lost, suspended or given back; {} are recorded as uncounted, and at most {} may count",
                job.id,
                job.attempt,
                job.uncounted,
                spec.attempts_max()
            )
        });
    }
    found
}

/// A recorded step is not repeated, and its result is that of the attempt that recorded it. A case is a job with an
/// attempt after the record.
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
            let was_recorded =
                own.is_some() || evidence.iter().any(|attempt| attempt.stepped_us.is_some());
            found.unless(job.id, was_recorded, || {
                format!("the step of job {} is no longer recorded", job.id)
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
        let violated = first.len() > 1 || repeats || differs;
        let message = || {
            format!(
                "the step of job {} was repeated after {step:?}, or its result differs: {own:?}, {evidence:?}",
                job.id
            )
        };
        match others.clone().any(|next| next.started_us > step.at_us) {
            true => found.case(job.id, violated, message),
            false => found.unless(job.id, violated, message),
        }
    }
    found
}
