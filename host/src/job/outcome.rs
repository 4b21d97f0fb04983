//! From how a run ended to what becomes of the job.

use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::{AbortReason, Again, RetryAt, RetryPolicy, RunEnd, State};
use crate::harmless::{line, lines};

/// What becomes of the job after an attempt. Settled behind the fence.
#[derive(Debug)]
pub enum Outcome {
    /// `succeeded`, with this result.
    Succeeded(Box<RawValue>),
    /// Back to `queued`, for another attempt.
    Retry {
        /// When, and with how much memory.
        again: Again,
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

/// Why an attempt did not succeed, as it is stored with the attempt and shown to people. All of it but the details, which are data
/// for programs, is text without anything that a terminal would obey; a message may have several lines.
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
    /// For [`ErrorKind::Trap`], the last lines that the handler wrote to standard error.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub stderr: Vec<String>,
    /// The handler's own details.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub details: Option<Value>,
    /// How many attempts there may be in all, lost ones not counted; none where nobody counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<u32>,
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
    /// Calls went deeper than the stack.
    StackOverflow,
    /// The handler did something that it is not granted.
    Denied,
    /// The handler ran into its memory limit.
    OutOfMemory,
    /// The handler computed for too long.
    OutOfCpu,
    /// The result is too large.
    OutputTooLarge,
    /// The payload does not fit the handler's schema.
    InvalidPayload,
    /// The result is no JSON, JSON that Postgres cannot store, or does not fit the handler's schema.
    InvalidResult,
    /// The attempt ran longer than its run timeout.
    TimedOut,
    /// The host could not run the handler.
    Unrunnable,
}

impl ErrorKind {
    /// The word under which it is stored and counted.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::GuestError => "guest_error",
            Self::Panic => "panic",
            Self::Trap => "trap",
            Self::StackOverflow => "stack_overflow",
            Self::Denied => "denied",
            Self::OutOfMemory => "out_of_memory",
            Self::OutOfCpu => "out_of_cpu",
            Self::OutputTooLarge => "output_too_large",
            Self::InvalidPayload => "invalid_payload",
            Self::InvalidResult => "invalid_result",
            Self::TimedOut => "timed_out",
            Self::Unrunnable => "unrunnable",
        }
    }
}

/// How often this job has been tried, and how often it may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tries {
    /// Attempts that ended in an error, this one included; lost ones are counted apart.
    pub failed: u32,
    /// How many there may be.
    pub max: u32,
    /// What the next attempt may have if this one ran out of memory, bytes; none: this one had more than
    /// usual already, or the operator allows no more.
    pub more_memory_bytes: Option<u64>,
    /// Which limits the job has set itself.
    pub own: OwnLimits,
}

/// Which limits of an attempt are lower than those of its handler, because the grants of the job say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OwnLimits {
    /// Its memory.
    pub memory: bool,
    /// Its CPU time.
    pub cpu: bool,
    /// Its run timeout.
    pub timeout: bool,
    /// Its run timeout is the one that it was enqueued with, longer or shorter than that of its handler.
    pub enqueued_timeout: bool,
}

/// Decides what becomes of a job whose attempt ended like this. `random` is uniform in
/// `0.0..1.0` and is used for the jitter of the backoff.
///
/// | How it ended | Another attempt, while tries are left |
/// |---|---|
/// | an error of the handler | after the backoff, or when the handler says; never where it is permanent |
/// | a panic, a trap, too deep a stack | after the backoff |
/// | out of memory | once, at once, with twice the memory |
/// | too much CPU time | after the backoff |
/// | something that it is not granted | never |
/// | a payload that does not fit the schema | never |
/// | a result that is too large or invalid | after the backoff |
/// | the run timeout | after the backoff; the last one ends the job as `timed_out` |
/// | the host could not run it | after the backoff |
/// | what the job leaves of its grants is not understood | never |
/// | a shutdown, or it never started: no slot in time, no handler | at once, and this one does not count |
pub fn decide(end: RunEnd, tries: Tries, policy: &RetryPolicy, random: f64) -> Outcome {
    let (mut error, verdict) = match judge(end, tries) {
        Judged::Decided(outcome) => return outcome,
        Judged::Failed(error, verdict) => (error, verdict),
    };
    error.max_attempts = Some(tries.max);
    let (at, memory_bytes) = match verdict.again {
        When::Never => (None, None),
        When::Backoff => (
            Some(RetryAt::After(policy.delay(tries.failed, random))),
            None,
        ),
        When::At(at) => (Some(at), None),
        When::WithMemory(bytes) => (Some(RetryAt::After(Duration::ZERO)), Some(bytes)),
    };
    match at {
        Some(at) if tries.failed < tries.max => Outcome::Retry {
            again: Again { at, memory_bytes },
            error,
        },
        _ => Outcome::Ended {
            state: verdict.last,
            error,
        },
    }
}

enum Judged {
    /// Nothing is left to decide.
    Decided(Outcome),
    /// It did not succeed.
    Failed(AttemptError, Verdict),
}

/// How an error is to be treated.
struct Verdict {
    again: When,
    /// The state when no tries are left.
    last: State,
}

enum When {
    Never,
    Backoff,
    At(RetryAt),
    WithMemory(u64),
}

impl Judged {
    /// Ends in `failed` once there are no more tries.
    fn failed(error: AttemptError, again: When) -> Self {
        let last = State::Failed;
        Self::Failed(error, Verdict { again, last })
    }

    fn retried(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        Self::failed(AttemptError::new(kind, message), When::Backoff)
    }
}

fn judge(end: RunEnd, tries: Tries) -> Judged {
    match end {
        RunEnd::Returned(bytes) => match result_from(&bytes) {
            Ok(result) => Judged::Decided(Outcome::Succeeded(result)),
            Err(why) => Judged::retried(ErrorKind::InvalidResult, why),
        },
        RunEnd::Aborted(AbortReason::TimedOut) => Judged::Failed(
            AttemptError::new(
                ErrorKind::TimedOut,
                match (tries.own.timeout, tries.own.enqueued_timeout) {
                    (false, false) => "the attempt ran longer than its run timeout (`timeout` of the handler; rouse.toml can change it)".into(),
                    (false, true) => "the attempt ran longer than the run timeout that the job was enqueued with; \
                                      enqueue it with a longer `timeout`, or without one"
                        .into(),
                    (true, _) => format!("the attempt ran longer than its run timeout{}", left("timeout")),
                },
            ),
            Verdict {
                again: When::Backoff,
                last: State::TimedOut,
            },
        ),
        RunEnd::Aborted(AbortReason::Shutdown) | RunEnd::NotStarted | RunEnd::NoHandler => {
            Judged::Decided(Outcome::Released)
        }
        RunEnd::GrantsRefused(why) => {
            Judged::failed(AttemptError::new(ErrorKind::Denied, why), When::Never)
        }
        RunEnd::Aborted(
            reason @ (AbortReason::TakenByAnotherWorker
            | AbortReason::AlreadyCompleted
            | AbortReason::NotFound
            | AbortReason::Error
            | AbortReason::Cancelled),
        ) => Judged::Decided(Outcome::Dropped(reason)),
        RunEnd::Failed(failure) => {
            let again = match (failure.permanent, failure.retry_at, failure.retry_after) {
                (true, _, _) => When::Never,
                (false, Some(at), _) => When::At(RetryAt::Time(at)),
                (false, None, Some(after)) => When::At(RetryAt::After(after)),
                (false, None, None) => When::Backoff,
            };
            let details = failure
                .details
                .as_deref()
                .and_then(|bytes| serde_json::from_slice(bytes).ok())
                .map(without_nul);
            let error = AttemptError {
                guest_kind: Some(line(&failure.kind)),
                details,
                ..AttemptError::new(ErrorKind::GuestError, failure.message)
            };
            Judged::failed(error, again)
        }
        RunEnd::Panicked {
            message,
            location,
            backtrace,
        } => {
            let error = AttemptError {
                location: Some(line(&location)),
                ..AttemptError::new(ErrorKind::Panic, message).with(&backtrace)
            };
            Judged::failed(error, When::Backoff)
        }
        RunEnd::Trapped {
            message,
            backtrace,
            stderr,
        } => {
            let error = AttemptError {
                stderr: stderr.iter().map(|said| line(said)).collect(),
                ..AttemptError::new(ErrorKind::Trap, message).with(&backtrace)
            };
            Judged::failed(error, When::Backoff)
        }
        RunEnd::StackOverflow { backtrace } => {
            let message = "the handler's calls went deeper than its stack (512 KiB)";
            let error = AttemptError::new(ErrorKind::StackOverflow, message).with(&backtrace);
            Judged::failed(error, When::Backoff)
        }
        RunEnd::Denied { denial, then } => match judge(*then, tries) {
            Judged::Decided(outcome) => Judged::Decided(outcome),
            Judged::Failed(then, _) => {
                let message = lines(&denied(&denial, &then.message));
                let error = AttemptError {
                    kind: ErrorKind::Denied,
                    message,
                    ..then
                };
                Judged::failed(error, When::Never)
            }
        },
        RunEnd::OutOfMemory { limit_bytes } => {
            let setting = match tries.own.memory {
                false => " (`memory_mb` in rouse.toml)".into(),
                true => left("memory_mb"),
            };
            let limit = size(u64::try_from(limit_bytes).unwrap_or(u64::MAX));
            let mut message = format!("the handler needed more than its {limit} of memory{setting}");
            let again = match tries.more_memory_bytes {
                Some(bytes) if tries.failed < tries.max => {
                    message += &format!("; the next attempt may have {}", size(bytes));
                    When::WithMemory(bytes)
                }
                Some(_) | None => When::Never,
            };
            Judged::failed(AttemptError::new(ErrorKind::OutOfMemory, message), again)
        }
        RunEnd::OutOfCpu { limit } => Judged::retried(
            ErrorKind::OutOfCpu,
            format!(
                "the handler computed for more than its {} s of CPU time{}",
                limit.as_secs_f64(),
                match tries.own.cpu {
                    false => " (`cpu` in rouse.toml)".into(),
                    true => left("cpu"),
                }
            ),
        ),
        RunEnd::OutputTooLarge { bytes, limit_bytes } => Judged::retried(
            ErrorKind::OutputTooLarge,
            format!(
                "the result has {bytes} bytes; {limit_bytes} are allowed (`result_bytes` in rouse.toml)"
            ),
        ),
        RunEnd::PayloadRefused(why) => {
            let error = AttemptError::new(ErrorKind::InvalidPayload, why);
            Judged::failed(error, When::Never)
        }
        RunEnd::ResultRefused(why) => Judged::retried(ErrorKind::InvalidResult, why),
        RunEnd::Unrunnable(why) => Judged::retried(ErrorKind::Unrunnable, why),
    }
}

/// What was denied, and what the handler said then. It was told the first line of the denial, and need not say that once more.
fn denied(denial: &str, then: &str) -> String {
    let told = denial.lines().next().filter(|line| !line.is_empty());
    let then = match told.and_then(|told| then.strip_suffix(told)) {
        Some("") => return denial.to_owned(),
        Some(before) => format!("{before}…"),
        None => then.to_owned(),
    };
    // Lines that can be copied stand by themselves.
    let between = match denial.contains('\n') {
        true => "\n\n",
        false => "; ",
    };
    format!("{denial}{between}then: {then}")
}

/// As `rouse.toml` has it, in MiB, where it comes out even.
fn size(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    match bytes % MIB {
        0 => format!("{} MiB", bytes / MIB),
        _ => format!("{bytes} bytes"),
    }
}

/// That the job itself has set this limit, behind what it ran into.
fn left(key: &str) -> String {
    format!(
        ", which is what the grants of this job leave of it; enqueue it with more under \"{key}\" of its grants, or without"
    )
}

impl AttemptError {
    /// An error with a class and a message, and nothing else.
    pub fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        Self {
            kind,
            guest_kind: None,
            message: lines(message.as_ref()),
            location: None,
            backtrace: Vec::new(),
            stderr: Vec::new(),
            details: None,
            max_attempts: None,
        }
    }

    fn with(mut self, backtrace: &[String]) -> Self {
        self.backtrace = backtrace.iter().map(|frame| line(frame)).collect();
        self
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
