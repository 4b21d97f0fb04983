//! Whether admin actions hold.

use super::super::ledger::{Request, Response};
use super::super::world::{Call, Job};
use super::known::ended_by_an_admin;
use super::{Found, Known};

/// Whether the row of the job looks as if this call had ended it.
fn ended_by(call: &Call, job: &Job) -> bool {
    match &call.request {
        Request::Cancel { .. } | Request::CancelFlow { .. } | Request::DeleteFlow { .. } => {
            job.state == "cancelled"
        }
        Request::Complete { mark, .. } => {
            let result = job.result.as_ref();
            job.state == "succeeded" && result.is_some_and(|r| r["by_admin"].as_str() == Some(mark))
        }
        Request::Fail { mark, .. } => {
            let error = job.error.as_ref();
            job.state == "failed" && error.is_some_and(|e| e["message"].as_str() == Some(mark))
        }
        Request::Enqueue { .. }
        | Request::Retry { .. }
        | Request::Reschedule { .. }
        | Request::Signal { .. }
        | Request::EnqueueFlow { .. }
        | Request::RetryFlow { .. }
        | Request::Pause { .. }
        | Request::Resume { .. } => false,
    }
}

/// If the response to the call was true, the call ended the job. If the call was refused, or the response was false, it
/// did not.
pub(super) fn answers_hold(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for call in &known.world.calls {
        let (Request::Cancel { job } | Request::Complete { job, .. } | Request::Fail { job, .. }) =
            call.request
        else {
            continue;
        };
        let done = match &call.response {
            Response::Ok(value) => *value == 1,
            Response::Refused(_) => false,
            Response::Unknown(_) => continue,
        };
        let rows = known.rows(job);
        let ended = rows.iter().any(|row| ended_by(call, row));
        found.case(job, ended != done, || {
            format!(
                "{:?} was answered with {:?}, but the job is {rows:?}",
                call.request, call.response
            )
        });
    }
    found
}

/// A job that an admin action has ended has a request for it that was not refused.
pub(super) fn were_requested(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in known.world.jobs.iter().filter(|job| ended_by_an_admin(job)) {
        let mut calls = known.calls(job.id).iter().chain(known.flow_calls(job));
        let requested =
            calls.any(|call| ended_by(call, job) && !matches!(call.response, Response::Refused(_)));
        found.case(job.id, !requested, || {
            format!(
                "job {} was {} by an admin action that nobody requested",
                job.id, job.state
            )
        });
    }
    found
}
