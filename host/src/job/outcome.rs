//! From how a run ended to what becomes of the job.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{AbortReason, RetryPolicy, RunEnd, State};

/// What becomes of the job after an attempt. Settled behind the fence.
#[derive(Debug)]
pub enum Outcome {
    /// `succeeded`, with this result.
    Succeeded(Box<RawValue>),
    /// Back to `queued`: the next attempt starts after `delay`.
    Retry {
        /// How long to wait, from the settlement on.
        delay: Duration,
        /// Why this attempt did not succeed.
        error: AttemptError,
    },
    /// A final state that is not success.
    Ended {
        /// `failed` or `timed_out`.
        state: State,
        /// Why.
        error: AttemptError,
    },
    /// Back to `queued` at once, and the attempt does not count: the host gave it up unfinished.
    Released,
    /// Nothing may be said about the job any more: another has it, or it is settled already.
    Dropped(AbortReason),
}

/// Why an attempt did not succeed, as it is stored with the attempt and shown to people.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AttemptError {
    /// The class.
    pub kind: ErrorKind,
    /// For [`ErrorKind::GuestError`], the handler's own class.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub guest_kind: Option<String>,
    /// What went wrong, for people.
    pub message: String,
    /// `file:line:column` of a panic.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub location: Option<String>,
    /// Frames, innermost first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub backtrace: Vec<String>,
    /// The handler's own details.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
}

/// The class of an attempt's error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ErrorKind {
    /// The handler returned an error.
    GuestError,
    /// The handler panicked.
    Panic,
    /// WebAssembly trapped.
    Trap,
    /// The handler ran into its memory limit.
    OutOfMemory,
    /// The result is too large.
    OutputTooLarge,
    /// The result is no JSON, or JSON that Postgres cannot store.
    InvalidResult,
    /// The attempt ran longer than its run timeout.
    TimedOut,
    /// The host could not run the handler.
    Unrunnable,
}

/// How often this job has been tried, and how often it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tries {
    /// Attempts that ended in an error, this one included; lost ones are counted apart.
    pub failed: u32,
    /// How many there may be.
    pub max: u32,
}

/// Decides what becomes of a job whose attempt ended like this. `random` is uniform in
/// `0.0..1.0` and is used for the jitter of the backoff.
///
/// Retried while tries are left: errors of the guest (unless permanent), panics, traps, memory,
/// results that are too large or invalid, time-outs, and runs that the host could not start.
pub fn decide(end: RunEnd, tries: Tries, policy: &RetryPolicy, random: f64) -> Outcome {
    let (error, verdict) = match end {
        RunEnd::Returned(bytes) => match result_from(&bytes) {
            Ok(result) => return Outcome::Succeeded(result),
            Err(why) => (
                AttemptError::new(ErrorKind::InvalidResult, why),
                Verdict::default(),
            ),
        },
        RunEnd::Aborted(AbortReason::TimedOut) => (
            AttemptError::new(
                ErrorKind::TimedOut,
                "the attempt ran longer than its run timeout (`timeout` of the handler; rouse.toml can change it)",
            ),
            Verdict {
                last: State::TimedOut,
                ..Verdict::default()
            },
        ),
        RunEnd::Aborted(AbortReason::Shutdown) => return Outcome::Released,
        RunEnd::Aborted(
            reason @ (AbortReason::TakenByAnotherWorker
            | AbortReason::AlreadyCompleted
            | AbortReason::NotFound
            | AbortReason::Error
            | AbortReason::Cancelled),
        ) => return Outcome::Dropped(reason),
        RunEnd::Failed(failure) => {
            let verdict = Verdict {
                permanent: failure.permanent,
                retry_after: failure.retry_after,
                ..Verdict::default()
            };
            let details = failure
                .details
                .as_deref()
                .and_then(|bytes| serde_json::from_slice(bytes).ok())
                .map(without_nul);
            let error = AttemptError {
                guest_kind: Some(clean(&failure.kind)),
                details,
                ..AttemptError::new(ErrorKind::GuestError, failure.message)
            };
            (error, verdict)
        }
        RunEnd::Panicked {
            message,
            location,
            backtrace,
        } => (
            AttemptError {
                location: Some(clean(&location)),
                backtrace: backtrace.iter().map(|frame| clean(frame)).collect(),
                ..AttemptError::new(ErrorKind::Panic, message)
            },
            Verdict::default(),
        ),
        RunEnd::Trapped { message, backtrace } => (
            AttemptError {
                backtrace: backtrace.iter().map(|frame| clean(frame)).collect(),
                ..AttemptError::new(ErrorKind::Trap, message)
            },
            Verdict::default(),
        ),
        RunEnd::OutOfMemory { limit_bytes } => (
            AttemptError::new(
                ErrorKind::OutOfMemory,
                format!(
                    "the handler needed more than its {limit_bytes} bytes of memory (`memory_mb` in rouse.toml)"
                ),
            ),
            Verdict::default(),
        ),
        RunEnd::OutputTooLarge { bytes, limit_bytes } => (
            AttemptError::new(
                ErrorKind::OutputTooLarge,
                format!("the result has {bytes} bytes; {limit_bytes} are allowed"),
            ),
            Verdict::default(),
        ),
        RunEnd::Unrunnable(why) => (
            AttemptError::new(ErrorKind::Unrunnable, why),
            Verdict::default(),
        ),
    };

    if verdict.permanent || tries.failed >= tries.max {
        return Outcome::Ended {
            state: verdict.last,
            error,
        };
    }
    let delay = verdict
        .retry_after
        .unwrap_or_else(|| policy.delay(tries.failed, random));
    Outcome::Retry { delay, error }
}

/// How an error is to be treated.
struct Verdict {
    permanent: bool,
    retry_after: Option<Duration>,
    /// The state when no tries are left.
    last: State,
}

impl Default for Verdict {
    fn default() -> Self {
        Self {
            permanent: false,
            retry_after: None,
            last: State::Failed,
        }
    }
}

impl AttemptError {
    /// An error with a class and a message, and nothing else.
    pub fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        Self {
            kind,
            guest_kind: None,
            message: clean(message.as_ref()),
            location: None,
            backtrace: Vec::new(),
            details: None,
        }
    }

    /// As it is stored.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("an AttemptError has only strings for keys")
    }
}

/// Checks that a result is JSON which `jsonb` can hold. Postgres refuses `\u0000` in text and
/// would otherwise fail the whole batch of settlements for it.
fn result_from(bytes: &[u8]) -> Result<Box<RawValue>, String> {
    let text =
        std::str::from_utf8(bytes).map_err(|error| format!("the result is no UTF-8: {error}"))?;
    let raw: Box<RawValue> =
        serde_json::from_str(text).map_err(|error| format!("the result is no JSON: {error}"))?;
    if let Some(exponent) = huge_exponent(text) {
        return Err(format!(
            "the result has a number with the exponent {exponent}: Postgres would write it out in full; the largest that is taken is {EXPONENT_MAX}"
        ));
    }
    // Only an escape can bring a NUL or a lone surrogate into a string, so results without
    // escapes, the ordinary case, are not parsed any further.
    if text.contains("\\u") {
        let value: Value = serde_json::from_str(text)
            .map_err(|error| format!("the result has a string that is no Unicode: {error}"))?;
        if has_nul(&value) {
            return Err(
                "the result has a NUL character (\\u0000), which Postgres cannot store in jsonb"
                    .into(),
            );
        }
    }
    Ok(raw)
}

/// The largest power of ten in a result. `jsonb` keeps numbers exactly and shows them without an
/// exponent: a few bytes of `1e131071` are 128 KiB each time that somebody looks.
const EXPONENT_MAX: u32 = 400;

/// The first exponent beyond the limit in this text, which is JSON.
fn huge_exponent(text: &str) -> Option<&str> {
    let bytes = text.as_bytes();
    let (mut at, mut in_string) = (0, false);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'\\' if in_string => at += 1,
            b'"' => in_string = !in_string,
            // Outside of strings, digits stand before an e only in a number.
            b'e' | b'E' if !in_string && at > 0 && bytes[at - 1].is_ascii_digit() => {
                let rest = text[at + 1..].trim_start_matches(['+', '-']);
                let end = rest.find(|c: char| !c.is_ascii_digit());
                let digits = &rest[..end.unwrap_or(rest.len())];
                if digits
                    .parse::<u32>()
                    .map_or(true, |exponent| exponent > EXPONENT_MAX)
                {
                    return Some(digits);
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

fn has_nul(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().any(has_nul),
        Value::Object(map) => map
            .iter()
            .any(|(key, item)| key.contains('\0') || has_nul(item)),
    }
}

fn without_nul(value: Value) -> Value {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
        Value::String(text) => Value::String(clean(&text)),
        Value::Array(items) => items.into_iter().map(without_nul).collect(),
        Value::Object(map) => map
            .into_iter()
            .map(|(key, item)| (clean(&key), without_nul(item)))
            .collect(),
    }
}

/// Postgres text cannot hold NUL; the replacement character shows where one was.
fn clean(text: &str) -> String {
    text.replace('\0', "\u{fffd}")
}
