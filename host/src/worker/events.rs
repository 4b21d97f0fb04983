//! Every transition of a job as a structured event: target `rouse::job`, with `event`, `job.id`, `handler`,
//! `attempt`, `worker.id` and, from the claim on, `elapsed_ms`; an admin action has no claim, and names who did it.
//! docs/reference/events.md lists them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use serde_json::value::RawValue;
use tracing::{debug, error, info, warn};

use super::settler::Unsettled;
use super::{Settings, Shared};
use crate::harmless::printable;
use crate::job::{AbortReason, Attempt, Incarnation, JobId, RetryAt};
use crate::sandbox::BootTime;
use crate::store::{AdminAction, Fate, JsonText};

const TARGET: &str = "rouse::job";
/// Of the worker itself.
const WORKER_TARGET: &str = "rouse::worker";

/// Of an error that is no JSON object.
const ODD_BYTES_MAX: usize = 1 << 10;

/// Of which attempt an event tells.
#[derive(Clone, Copy)]
pub(super) struct EventContext<'a> {
    pub(super) worker_id: &'a str,
    pub(super) id: JobId,
    pub(super) handler: &'a str,
    pub(super) attempt: Attempt,
    pub(super) since: Since,
}

/// Since when an attempt has its job.
#[derive(Clone, Copy)]
pub(super) enum Since {
    /// Before this worker asked for the claim.
    Asked(BootTime),
    /// So long ago, by the database's clock: another worker had it.
    Told(Duration),
}

impl EventContext<'_> {
    fn elapsed_ms(&self) -> u64 {
        let elapsed = match self.since {
            Since::Asked(asked) => BootTime::now().since(asked),
            Since::Told(ago) => ago,
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

/// A worker has started, is told to stop, or has stopped.
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

/// Whether anybody hears of single jobs that nothing has gone wrong with.
pub(super) fn all_are_heard() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::DEBUG)
}

/// Somebody has enqueued it. A worker hears of that with the claim of its first attempt, and again where that claim is given back.
pub(super) fn enqueued(context: EventContext<'_>, queue: &str, at: SystemTime) {
    let at = humantime::format_rfc3339_millis(at);
    event!(debug, "enqueued", context, queue, at = %at);
}

/// Its time has come: it has got its turn.
pub(super) fn promoted(worker_id: &str, id: JobId) {
    debug!(target: TARGET, event = "promoted", job.id = id.0, worker.id = worker_id);
}

pub(super) fn claimed(context: EventContext<'_>) {
    event!(debug, "claimed", context);
}

pub(super) fn adopted(context: EventContext<'_>, lost: i32) {
    event!(info, "adopted", context, lost, "its worker is gone");
}

/// Its worker is gone, and nobody has claimed it at once: it waits, or has failed.
pub(super) fn lost(context: EventContext<'_>, lost: i32, has_failed: bool) {
    match has_failed {
        false => event!(
            warn,
            "lost",
            context,
            lost,
            "its worker is gone; it waits for its next attempt"
        ),
        true => event!(
            warn,
            "failed",
            context,
            lost,
            error = r#"{"kind":"lost"}"#,
            "its worker is gone, once too often"
        ),
    }
}

pub(super) fn started(context: EventContext<'_>) {
    event!(debug, "started", context);
}

/// The attempt was told to stop.
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

/// Nothing is said about the job: it is not this worker's any more.
pub(super) fn dropped(context: EventContext<'_>, reason: AbortReason) {
    event!(debug, "dropped", context, reason = reason.as_str());
}

/// The outcome came too late.
pub(super) fn refused(context: EventContext<'_>) {
    event!(
        info,
        "refused",
        context,
        "outcome refused: the lease is lost"
    );
}

/// The outcome could not be written before its lease ran out, or the host had to stop.
pub(super) fn given_up(context: EventContext<'_>) {
    event!(
        error,
        "given_up",
        context,
        "outcome given up: it could not be written before the lease ran out, or the host had to stop; the job runs again"
    );
}

/// The outcome is written.
pub(super) fn settled(context: EventContext<'_>, fate: &Fate) {
    match fate {
        Fate::Succeeded(_) => event!(debug, "succeeded", context),
        Fate::Ended(state, why) => {
            event!(warn, state.as_str(), context, error = %in_short(why));
        }
        Fate::Retry(again, why) => {
            let error = in_short(why);
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
        Fate::Released => event!(debug, "released", context),
    }
}

/// True where admin actions are logged.
pub(super) fn admin_actions_are_logged() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::INFO)
}

/// An operator or a program did this.
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

impl Unsettled {
    pub(super) fn event_context<'a>(&'a self, shared: &'a Shared) -> EventContext<'a> {
        EventContext {
            worker_id: &shared.settings.worker_id,
            id: self.settlement.id,
            handler: &self.meters.handler,
            attempt: self.attempt,
            since: Since::Asked(self.asked),
        }
    }
}

/// The error for the log. Its backtrace and the handler's details are with the attempt (`rouse job ID`), not here: the one would be two
/// thousand characters in the line of each retry, the other megabytes of whatever the guest likes. Its standard error is in the log already.
fn in_short(error: &JsonText) -> String {
    // Raw, as details may be nested deeper than a value is read.
    match serde_json::from_str::<BTreeMap<&str, &RawValue>>(&error.0) {
        Ok(mut error) => {
            error.remove("backtrace");
            error.remove("stderr");
            error.remove("details");
            serde_json::to_string(&error).expect("its keys are strings")
        }
        // Not what the host writes; all the more to be seen.
        Err(_) => printable(&error.0, ODD_BYTES_MAX),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_has_the_error_without_its_backtrace_its_details_and_what_is_there_already() {
        let error = r#"{"kind":"panic","message":"no","backtrace":["abort","main"],"stderr":["why"],"details":{"a":[1]}}"#;
        let shown = in_short(&JsonText(error.into()));
        assert_eq!(shown, r#"{"kind":"panic","message":"no"}"#);
        let deep = format!(
            r#"{{"kind":"guest_error","details":{}{}}}"#,
            "[".repeat(127),
            "]".repeat(127)
        );
        assert_eq!(in_short(&JsonText(deep)), r#"{"kind":"guest_error"}"#);
        let odd = in_short(&JsonText("no JSON".into()));
        assert_eq!(odd, "no JSON");
    }
}
