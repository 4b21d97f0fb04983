//! What was done to jobs from outside.

use super::super::ledger::{Answer, Ask};
use super::super::world::{Call, Job};
use super::known::ended_by_an_admin;
use super::{Found, Known};

/// How the row of a job would look if this call had ended it.
fn ended_by(call: &Call, job: &Job) -> bool {
    match &call.ask {
        Ask::Cancel { .. } => job.state == "cancelled",
        Ask::Complete { mark, .. } => {
            let result = job.result.as_ref();
            job.state == "succeeded" && result.is_some_and(|r| r["by_admin"].as_str() == Some(mark))
        }
        Ask::Fail { mark, .. } => {
            let error = job.error.as_ref();
            job.state == "failed" && error.is_some_and(|e| e["message"].as_str() == Some(mark))
        }
        Ask::Enqueue { .. }
        | Ask::Retry { .. }
        | Ask::Reschedule { .. }
        | Ask::Pause { .. }
        | Ask::Resume { .. } => false,
    }
}

/// True: the job has ended so. Refused, or false: it has not.
pub(super) fn answers_hold(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for call in &known.world.calls {
        let (Ask::Cancel { job } | Ask::Complete { job, .. } | Ask::Fail { job, .. }) = call.ask
        else {
            continue;
        };
        let done = match &call.answer {
            Answer::Ok(value) => *value == 1,
            Answer::Refused(_) => false,
            Answer::Unknown(_) => continue,
        };
        let rows = known.rows(job);
        let ended = rows.iter().any(|row| ended_by(call, row));
        found.case(job, ended != done, || {
            format!(
                "{:?} was answered with {:?}; the job is {rows:?}",
                call.ask, call.answer
            )
        });
    }
    found
}

/// Whoever has ended it has asked, and was not refused.
pub(super) fn were_asked(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in known.world.jobs.iter().filter(|job| ended_by_an_admin(job)) {
        let asked = known
            .calls(job.id)
            .iter()
            .any(|call| ended_by(call, job) && !matches!(call.answer, Answer::Refused(_)));
        found.case(job.id, !asked, || {
            format!(
                "job {} is {} from outside, and nobody has asked for it",
                job.id, job.state
            )
        });
    }
    found
}
