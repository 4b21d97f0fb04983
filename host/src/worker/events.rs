//! Logs every transition of a job as a structured event. The target is `rouse::job`; the fields are `event`, `job.id`,
//! `handler`, `attempt`, `worker.id` and, starting with the claim, `elapsed_ms`. An admin action has no claim, and
//! names the login instead. docs/reference/events.md lists all events.

use std::time::{Duration, SystemTime};

use tracing::{debug, error, info, warn};

use super::Settings;
use crate::job::{AbortReason, Attempt, AttemptError, Incarnation, JobId, Outcome, RetryAt};
use crate::sandbox::BootTime;
use crate::sanitize::printable;
use crate::store::{AdminAction, MissedDeadline};

const TARGET: &str = "rouse::job";
/// The target of events of the worker itself.
const WORKER_TARGET: &str = "rouse::worker";

/// The fields that identify the attempt of an event.
#[derive(Clone, Copy)]
pub(super) struct EventContext<'a> {
    pub(super) worker_id: &'a str,
    pub(super) id: JobId,
    pub(super) handler: &'a str,
    pub(super) attempt: Attempt,
    pub(super) since: Since,
}

/// The starting point of `elapsed_ms`.
#[derive(Clone, Copy)]
pub(super) enum Since {
    /// Just before this worker sent the claim.
    ClaimSent(BootTime),
    /// The claim of another worker, this long ago by the database's clock.
    ClaimedElsewhere(Duration),
}

impl EventContext<'_> {
    fn elapsed_ms(&self) -> u64 {
        let elapsed = match self.since {
            Since::ClaimSent(sent) => BootTime::now().since(sent),
            Since::ClaimedElsewhere(ago) => ago,
        };
        u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
    }
}

macro_rules! event {
    ($level:ident, $name:expr, $context:expr $(, $($field:tt)+)?) => {
        $level!(
            target: TARGET,
            event = $name,
            job.id = $context.id.0,
            handler = $context.handler,
            attempt = $context.attempt.0,
            worker.id = $context.worker_id,
            elapsed_ms = $context.elapsed_ms(),
            $($($field)+)?
        )
    };
}

/// Logs that a worker has started, is stopping, or has stopped.
pub(super) fn worker(event: &str, settings: &Settings, incarnation: Incarnation) {
    info!(
        target: WORKER_TARGET,
        event,
        worker.id = settings.worker_id,
        incarnation = incarnation.0,
        slots = settings.slots,
        "worker {event}"
    );
}

/// True if routine events of individual jobs are logged.
pub(super) fn routine_events_are_logged() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

/// Logs that the job was enqueued. A worker logs this when it claims the first attempt, and again if that claim was
/// given back.
pub(super) fn enqueued(context: EventContext<'_>, queue: &str, at: SystemTime) {
    let at = humantime::format_rfc3339_millis(at);
    event!(debug, "enqueued", context, queue, at = %at);
}

/// Logs that the job is due, and has received its turn.
pub(super) fn promoted(worker_id: &str, id: JobId) {
    debug!(target: TARGET, event = "promoted", job.id = id.0, worker.id = worker_id);
}

pub(super) fn claimed(context: EventContext<'_>) {
    event!(debug, "claimed", context);
}

pub(super) fn adopted(context: EventContext<'_>, uncounted: i32) {
    event!(
        info,
        "adopted",
        context,
        uncounted,
        "taken over from a worker that is dead or has stopped"
    );
}

/// Logs that the job was lost with its worker and is not claimed at once: it waits, or has failed.
pub(super) fn lost(context: EventContext<'_>, uncounted: i32, has_failed: bool) {
    match has_failed {
        false => event!(
            warn,
            "lost",
            context,
            uncounted,
            "its worker is dead or has stopped; the job waits for its next attempt"
        ),
        true => event!(
            warn,
            "failed",
            context,
            uncounted,
            error = r#"{"kind":"lost"}"#,
            "its worker is dead or has stopped; the job has crashed its workers too often"
        ),
    }
}

pub(super) fn started(context: EventContext<'_>) {
    event!(debug, "started", context);
}

/// Logs that the attempt was aborted.
pub(super) fn aborted(context: EventContext<'_>, reason: AbortReason, took: Duration) {
    let stopped_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    event!(
        info,
        "aborted",
        context,
        reason = reason.as_str(),
        stopped_ms
    );
}

/// Logs that the outcome is not settled, because the job no longer belongs to this worker.
pub(super) fn dropped(context: EventContext<'_>, reason: AbortReason) {
    event!(debug, "dropped", context, reason = reason.as_str());
}

/// Logs that the database refused the outcome, because its lease was lost.
pub(super) fn refused(context: EventContext<'_>) {
    event!(
        info,
        "refused",
        context,
        "outcome refused: the lease is lost"
    );
}

/// Logs that the outcome was sent, but the response was lost; a later try found that the claim has ended.
pub(super) fn unconfirmed(context: EventContext<'_>) {
    event!(
        info,
        "unconfirmed",
        context,
        "outcome unconfirmed: the response to its settlement was lost; either it was written, or the lease is lost"
    );
}

/// Logs that the outcome is not written any more, for this reason.
pub(super) fn given_up(context: EventContext<'_>, why: &str) {
    event!(
        error,
        "given_up",
        context,
        "outcome given up: {why}; the job runs again"
    );
}

/// Logs that the outcome is settled.
pub(super) fn settled(context: EventContext<'_>, outcome: &Outcome) {
    match outcome {
        Outcome::Succeeded(_) => event!(debug, "succeeded", context),
        Outcome::Failed(error) => event!(warn, "failed", context, error = %summary(error)),
        Outcome::TimedOut(error) => event!(warn, "timed_out", context, error = %summary(error)),
        Outcome::Retry { again, error } => {
            let error = summary(error);
            match again.at {
                RetryAt::After(delay) => {
                    let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
                    event!(info, "retried", context, delay_ms, error = %error);
                }
                RetryAt::Time(at) => {
                    let at = humantime::format_rfc3339_millis(at);
                    event!(info, "retried", context, retry_at = %at, error = %error);
                }
            }
        }
        Outcome::Suspended(suspension) => {
            let (wait, step) = (
                suspension.wait.kind().as_str(),
                printable(&suspension.step, 200),
            );
            event!(debug, "suspended", context, wait, step);
        }
        Outcome::Released => event!(debug, "released", context),
    }
}

/// Logs that the deadline of the job has passed, and that the job has failed.
pub(super) fn missed_deadline(worker_id: &str, missed: &MissedDeadline) {
    warn!(
        target: TARGET,
        event = "failed",
        job.id = missed.id.0,
        handler = missed.handler,
        attempt = (missed.attempt.0 > 0).then_some(missed.attempt.0),
        worker.id = worker_id,
        error = %missed.error,
        "the job timeout has expired"
    );
}

/// True if admin actions are logged.
pub(super) fn admin_actions_are_logged() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::INFO)
}

/// Logs that an operator or a program took this action.
pub(super) fn admin_action(worker_id: &str, action: &AdminAction) {
    info!(
        target: TARGET,
        event = action.event,
        job.id = action.job.map(|job| job.0),
        handler = action.handler,
        queue = action.queue,
        attempt = action.attempt,
        by = action.who,
        at = action.at,
        detail = action.detail,
        worker.id = worker_id,
        "admin action"
    );
}

/// The error for the log, as JSON. It leaves out the backtrace and the handler's details, which are stored with the
/// attempt (`rouse job ID`): a backtrace would add two thousand characters to the line of each retry, and details can
/// be of any size. The guest's standard error has already been logged.
fn summary(error: &AttemptError) -> String {
    let short = AttemptError {
        kind: error.kind,
        guest_kind: error.guest_kind.clone(),
        message: error.message.clone(),
        location: error.location.clone(),
        backtrace: Vec::new(),
        stderr: Vec::new(),
        details: None,
        max_attempts: error.max_attempts,
    };
    short.to_json()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::{ErrorKind, JsonText};

    #[test]
    fn logged_errors_leave_out_backtrace_standard_error_and_details() {
        let error = AttemptError {
            backtrace: vec!["abort".into(), "main".into()],
            stderr: vec!["why".into()],
            details: Some(JsonText(r#"{"a": [1]}"#.into())),
            location: Some("lib.rs:1:2".into()),
            max_attempts: Some(5),
            ..AttemptError::new(ErrorKind::Panic, "no")
        };
        assert_eq!(
            summary(&error),
            r#"{"kind":"panic","message":"no","location":"lib.rs:1:2","max_attempts":5}"#
        );
    }
}
