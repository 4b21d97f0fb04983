//! Every transition of a job as a structured event (SPEC row Q10): target `rouse::job`, with `event`, `job.id`, `handler`,
//! `attempt`, `worker.id` and, from the claim on, `elapsed_ms`; what is done from outside has no claim, and tells who did it.
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
use crate::store::{Done, Fate, JsonText};

const TARGET: &str = "rouse::job";
/// Of the worker itself.
const WORKER_TARGET: &str = "rouse::worker";

/// Of an error that is no JSON object.
const ODD_BYTES_MAX: usize = 1 << 10;

/// Of which attempt an event tells.
#[derive(Clone, Copy)]
pub(super) struct Of<'a> {
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

impl Of<'_> {
    fn elapsed_ms(&self) -> u64 {
        let elapsed = match self.since {
            Since::Asked(asked) => BootTime::now().since(asked),
            Since::Told(ago) => ago,
        };
        u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX)
    }
}

macro_rules! event {
    ($level:ident, $name:expr, $of:expr $(, $($field:tt)+)?) => {
        $level!(
            target: TARGET,
            event = $name,
            job.id = $of.id.0,
            handler = $of.handler,
            attempt = $of.attempt.0,
            worker.id = $of.worker_id,
            elapsed_ms = $of.elapsed_ms(),
            $($($field)+)?
        )
    };
}

/// A worker has started, is told to stop, or has stopped (SPEC row Q2).
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
pub(super) fn enqueued(of: Of<'_>, queue: &str, at: SystemTime) {
    let at = humantime::format_rfc3339_millis(at);
    event!(debug, "enqueued", of, queue, at = %at);
}

/// Its time has come: it has got its turn.
pub(super) fn promoted(worker_id: &str, id: JobId) {
    debug!(target: TARGET, event = "promoted", job.id = id.0, worker.id = worker_id);
}

pub(super) fn claimed(of: Of<'_>) {
    event!(debug, "claimed", of);
}

pub(super) fn adopted(of: Of<'_>, lost: i32) {
    event!(info, "adopted", of, lost, "its worker is gone");
}

/// Its worker is gone, and nobody has claimed it at once: it waits, or has failed.
pub(super) fn lost(of: Of<'_>, lost: i32, has_failed: bool) {
    match has_failed {
        false => event!(
            warn,
            "lost",
            of,
            lost,
            "its worker is gone; it waits for its next attempt"
        ),
        true => event!(
            warn,
            "failed",
            of,
            lost,
            error = r#"{"kind":"lost"}"#,
            "its worker is gone, once too often"
        ),
    }
}

pub(super) fn started(of: Of<'_>) {
    event!(debug, "started", of);
}

/// The attempt was told to stop.
pub(super) fn aborted(of: Of<'_>, reason: AbortReason, took: Duration) {
    let stopped_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
    event!(info, "aborted", of, reason = reason.as_str(), stopped_ms);
}

/// Nothing is said about the job: it is not this worker's any more.
pub(super) fn dropped(of: Of<'_>, reason: AbortReason) {
    event!(debug, "dropped", of, reason = reason.as_str());
}

/// The outcome came too late.
pub(super) fn refused(of: Of<'_>) {
    event!(info, "refused", of, "outcome refused: the lease is lost");
}

/// The outcome could not be written before its lease ran out, or the host had to stop.
pub(super) fn given_up(of: Of<'_>) {
    event!(
        error,
        "given_up",
        of,
        "outcome given up: it could not be written before the lease ran out, or the host had to stop; the job runs again"
    );
}

/// The outcome is written.
pub(super) fn settled(of: Of<'_>, fate: &Fate) {
    match fate {
        Fate::Succeeded(_) => event!(debug, "succeeded", of),
        Fate::Ended(state, why) => {
            event!(warn, state.as_str(), of, error = %in_short(why));
        }
        Fate::Retry(again, why) => {
            let error = in_short(why);
            match again.at {
                RetryAt::After(delay) => {
                    let delay_ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
                    event!(info, "retried", of, delay_ms, error = %error);
                }
                RetryAt::Time(at) => {
                    let at = humantime::format_rfc3339_millis(at);
                    event!(info, "retried", of, retry_at = %at, error = %error);
                }
            }
        }
        Fate::Released => event!(debug, "released", of),
    }
}

/// Whether anybody hears of what is done from outside.
pub(super) fn outside_is_heard() -> bool {
    tracing::enabled!(target: TARGET, tracing::Level::INFO)
}

/// Somebody did this from outside.
pub(super) fn outside(worker_id: &str, done: &Done) {
    info!(
        target: TARGET,
        event = done.event,
        job.id = done.job.map(|job| job.0),
        handler = done.handler,
        queue = done.queue,
        attempt = done.attempt,
        by = done.who,
        at = done.at,
        detail = done.detail,
        worker.id = worker_id,
        "done from outside"
    );
}

impl Unsettled {
    pub(super) fn of<'a>(&'a self, shared: &'a Shared) -> Of<'a> {
        Of {
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
