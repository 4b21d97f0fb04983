//! Decides the outcome of an attempt from how its run ended.

use std::time::Duration;

use serde_json::json;

use super::result::json_from;
use super::{
    AbortReason, AttemptError, ErrorKind, Failure, JsonText, NextAttempt, RetryAt, RetryPolicy,
    RunEnd, SqlFailure, Suspension,
};
use crate::sanitize::{line, lines};

/// What happens to a job after an attempt. The settler writes it behind the fence.
#[derive(Debug, Clone, PartialEq)]
pub enum Outcome {
    /// `succeeded`, with this result.
    Succeeded(JsonText),
    /// Back to `queued`, for another attempt.
    Retry {
        /// The time and the memory of that attempt.
        again: NextAttempt,
        /// Why this attempt did not succeed.
        error: AttemptError,
    },
    /// `failed`, with this error.
    Failed(AttemptError),
    /// `timed_out`: the last attempt ran longer than its run timeout.
    TimedOut(AttemptError),
    /// Back to `queued`, suspended until its wait ends. The attempt does not count.
    Suspended(Suspension),
    /// Back to `queued` at once, with a new turn: the host gave the job back unfinished. The attempt does not count; if
    /// it has started, it keeps its number.
    Released,
}

/// The tries of this job so far, and the limits on further ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tries {
    /// Attempts that ended in an error, including this one. Those that were lost, suspended or given back are counted
    /// separately.
    pub failed: u32,
    /// The maximum number of such attempts.
    pub max: u32,
    /// Memory for the next attempt if this one ran out of memory, in bytes. `None` if this attempt already had more
    /// than usual, or if the operator does not allow more.
    pub more_memory_bytes: Option<u64>,
    /// The limits that the job itself sets.
    pub own: OwnLimits,
}

/// The limits of an attempt that the job itself sets, by its grants or when it was enqueued. Errors then name the job
/// instead of rouse.toml.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct OwnLimits {
    /// True if its grants lower the memory limit.
    pub memory: bool,
    /// True if its grants lower the limit on CPU time.
    pub cpu: bool,
    /// True if its grants lower the run timeout.
    pub timeout: bool,
    /// True if the run timeout is the one with which it was enqueued.
    pub enqueued_timeout: bool,
}

/// Decides what happens to a job whose attempt ended in this way. `random` is uniform in `0.0..1.0` and is used for the
/// jitter of the backoff.
///
/// | How the attempt ended | Next attempt, while tries are left |
/// |---|---|
/// | an error of the handler | after the backoff, or when the handler requests it; never if it is permanent |
/// | a panic, a trap, a stack overflow | after the backoff |
/// | out of memory | once, immediately, with twice the memory |
/// | out of CPU time | after the backoff |
/// | a denied capability | never |
/// | a payload that does not match the schema | never |
/// | a result that is too large or invalid | after the backoff |
/// | the run timeout | after the backoff; the last attempt ends the job as `timed_out` |
/// | the host could not run it | after the backoff |
/// | grants of the job that this host does not understand | never |
/// | suspended | when its wait ends; this attempt does not count |
/// | Postgres cannot store its result, or the jobs that it enqueues | never |
/// | Postgres refused an effect | as the statement declares: never, or after the backoff |
/// | its handler is parked, or its statement was replaced | immediately; this attempt does not count |
/// | a shutdown, or it never started (no slot in time, no handler) | immediately; this attempt does not count |
///
/// # Errors
/// The reason why the attempt has lost its job: another worker has it, or it has ended. Nothing more may be written
/// about the job.
pub fn decide(
    end: RunEnd,
    tries: Tries,
    policy: &RetryPolicy,
    random: f64,
) -> Result<Outcome, AbortReason> {
    let (mut error, next) = match end {
        RunEnd::Returned(bytes) => match json_from("result", bytes) {
            Ok(result) => return Ok(Outcome::Succeeded(result)),
            Err(why) => retried(ErrorKind::InvalidResult, why),
        },
        RunEnd::Suspended(suspension) => return Ok(Outcome::Suspended(suspension)),
        RunEnd::Aborted(AbortReason::Shutdown)
        | RunEnd::NotStarted
        | RunEnd::NoHandler
        | RunEnd::Parked => return Ok(Outcome::Released),
        RunEnd::Aborted(
            reason @ (AbortReason::TakenByAnotherWorker
            | AbortReason::AlreadyCompleted
            | AbortReason::NotFound
            | AbortReason::Error
            | AbortReason::Cancelled),
        ) => return Err(reason),
        RunEnd::Denied { denial, then } => {
            return Ok(decide(*then, tries, policy, random)?.denied(&denial));
        }
        RunEnd::Aborted(AbortReason::TimedOut) => {
            retried(ErrorKind::TimedOut, timed_out(tries.own))
        }
        RunEnd::Failed(failure) => guest_error(failure),
        RunEnd::Panicked {
            message,
            location,
            backtrace,
        } => {
            let error = AttemptError {
                location: Some(line(&location)),
                ..AttemptError::new(ErrorKind::Panic, message).with_backtrace(&backtrace)
            };
            (error, Next::Backoff)
        }
        RunEnd::Trapped {
            message,
            backtrace,
            stderr,
        } => {
            let error = AttemptError {
                stderr: stderr.iter().map(|text| line(text)).collect(),
                ..AttemptError::new(ErrorKind::Trap, message).with_backtrace(&backtrace)
            };
            (error, Next::Backoff)
        }
        RunEnd::StackOverflow { backtrace } => {
            let message = "the handler's calls exceeded its stack (512 KiB); nest them less deeply";
            let error = AttemptError::new(ErrorKind::StackOverflow, message);
            (error.with_backtrace(&backtrace), Next::Backoff)
        }
        RunEnd::OutOfMemory { limit_bytes } => out_of_memory(limit_bytes, tries),
        RunEnd::OutOfCpu { limit } => retried(
            ErrorKind::OutOfCpu,
            format!(
                "the handler used more than its {} s of CPU time{}",
                limit.as_secs_f64(),
                match tries.own.cpu {
                    false => " (`cpu` in rouse.toml)".into(),
                    true => set_by_the_job("cpu"),
                }
            ),
        ),
        RunEnd::OutputTooLarge { bytes, limit_bytes } => retried(
            ErrorKind::OutputTooLarge,
            format!(
                "the result is {bytes} bytes long; at most {limit_bytes} are allowed (`result_bytes` in rouse.toml)"
            ),
        ),
        RunEnd::PayloadRefused(why) => last(ErrorKind::InvalidPayload, why),
        RunEnd::ResultRefused(why) => retried(ErrorKind::InvalidResult, why),
        RunEnd::SettlementRefused(why) => last(ErrorKind::InvalidResult, why),
        RunEnd::GrantsRefused(why) => last(ErrorKind::Denied, why),
        RunEnd::EffectFailed(failure) => effect_failed(failure),
        RunEnd::Unrunnable(why) => retried(ErrorKind::Unrunnable, why),
    };
    error.max_attempts = Some(tries.max);
    let again = match next {
        _ if tries.failed >= tries.max => None,
        Next::Never => None,
        Next::Backoff => Some(policy.delay(tries.failed, random).into()),
        Next::At(at) => Some(NextAttempt {
            at,
            memory_bytes: None,
        }),
        Next::WithMemory(bytes) => Some(NextAttempt {
            at: RetryAt::After(Duration::ZERO),
            memory_bytes: Some(bytes),
        }),
    };
    Ok(match again {
        Some(again) => Outcome::Retry { again, error },
        None if error.kind == ErrorKind::TimedOut => Outcome::TimedOut(error),
        None => Outcome::Failed(error),
    })
}

/// The time of the next attempt of a failed job.
enum Next {
    Never,
    Backoff,
    At(RetryAt),
    /// Immediately, with this many bytes of memory.
    WithMemory(u64),
}

/// An error after which the job is tried again.
fn retried(kind: ErrorKind, message: impl AsRef<str>) -> (AttemptError, Next) {
    (AttemptError::new(kind, message), Next::Backoff)
}

/// An error with which every further attempt would also end.
fn last(kind: ErrorKind, message: impl AsRef<str>) -> (AttemptError, Next) {
    (AttemptError::new(kind, message), Next::Never)
}

fn guest_error(failure: Failure) -> (AttemptError, Next) {
    let next = match (failure.permanent, failure.retry_at, failure.retry_after) {
        (true, _, _) => Next::Never,
        (false, Some(at), _) => Next::At(RetryAt::Time(at)),
        (false, None, Some(after)) => Next::At(RetryAt::After(after)),
        (false, None, None) => Next::Backoff,
    };
    let error = AttemptError {
        guest_kind: Some(line(&failure.kind)),
        details: failure.details.and_then(super::error::details_from),
        ..AttemptError::new(ErrorKind::GuestError, failure.message)
    };
    (error, next)
}

fn effect_failed(failure: SqlFailure) -> (AttemptError, Next) {
    let next = match failure.permanent {
        true => Next::Never,
        false => Next::Backoff,
    };
    let SqlFailure {
        statement,
        code,
        message,
        ..
    } = failure;
    let what = match statement.as_str() {
        SqlFailure::NO_STATEMENT => "the commit".to_owned(),
        _ => format!("the statement {statement}"),
    };
    let error = AttemptError {
        details: Some(JsonText(
            json!({"statement": statement, "code": code}).to_string(),
        )),
        ..AttemptError::new(
            ErrorKind::EffectFailed,
            format!("{what} failed, and nothing was committed: {message}"),
        )
    };
    (error, next)
}

fn timed_out(own: OwnLimits) -> String {
    match (own.timeout, own.enqueued_timeout) {
        (false, false) => "the attempt ran longer than its run timeout (`timeout` of the handler; rouse.toml can change it)".into(),
        (false, true) => "the attempt ran longer than the run timeout that the job was enqueued with; \
                          enqueue it with a longer `timeout`, or without one"
            .into(),
        (true, _) => format!("the attempt ran longer than its run timeout{}", set_by_the_job("timeout")),
    }
}

fn out_of_memory(limit_bytes: usize, tries: Tries) -> (AttemptError, Next) {
    let setting = match tries.own.memory {
        false => " (`memory_mb` in rouse.toml)".into(),
        true => set_by_the_job("memory_mb"),
    };
    let limit = size(u64::try_from(limit_bytes).unwrap_or(u64::MAX));
    let mut message = format!("the handler needed more than its {limit} of memory{setting}");
    let next = match tries.more_memory_bytes {
        Some(bytes) if tries.failed < tries.max => {
            message += &format!("; the next attempt may have {}", size(bytes));
            Next::WithMemory(bytes)
        }
        Some(_) | None => Next::Never,
    };
    (AttemptError::new(ErrorKind::OutOfMemory, message), next)
}

/// The end of a message about a limit that the job itself has set.
fn set_by_the_job(key: &str) -> String {
    format!(
        ", a limit that the grants of this job set; enqueue it with a higher value under \"{key}\" of its grants, or without that key"
    )
}

/// The size in MiB, as in `rouse.toml`, if it is a whole number of MiB.
fn size(bytes: u64) -> String {
    const MIB: u64 = 1 << 20;
    match bytes % MIB {
        0 => format!("{} MiB", bytes / MIB),
        _ => format!("{bytes} bytes"),
    }
}

impl Outcome {
    /// Why the attempt did not succeed. `None` if it did, or if it does not count.
    pub fn error(&self) -> Option<&AttemptError> {
        match self {
            Self::Retry { error, .. } | Self::Failed(error) | Self::TimedOut(error) => Some(error),
            Self::Succeeded(_) | Self::Suspended(_) | Self::Released => None,
        }
    }

    /// True if the jobs that the attempt has collected are enqueued with it.
    pub fn enqueues(&self) -> bool {
        match self {
            Self::Succeeded(_) | Self::Suspended(_) => true,
            Self::Retry { .. } | Self::Failed(_) | Self::TimedOut(_) | Self::Released => false,
        }
    }

    /// The outcome of an attempt that was denied a capability: an error becomes final, of kind `denied`, and its
    /// message starts with the denial. A handler that succeeded in spite of the denial has succeeded.
    fn denied(self, denial: &str) -> Self {
        match self {
            Self::Retry { error, .. } | Self::Failed(error) | Self::TimedOut(error) => {
                Self::Failed(AttemptError {
                    kind: ErrorKind::Denied,
                    message: lines(&denied(denial, &error.message)),
                    ..error
                })
            }
            Self::Succeeded(_) | Self::Suspended(_) | Self::Released => self,
        }
    }
}

/// The denial and the handler's own message. The handler got the first line of the denial; if its message repeats that
/// line, the repetition is left out.
fn denied(denial: &str, message: &str) -> String {
    let first = denial.lines().next().filter(|line| !line.is_empty());
    let message = match first.and_then(|first| message.strip_suffix(first)) {
        Some("") => return denial.to_owned(),
        Some(before) => format!("{before}…"),
        None => message.to_owned(),
    };
    // Lines for rouse.toml are set apart, so that they can be copied.
    let between = match denial.contains('\n') {
        true => "\n\n",
        false => "; ",
    };
    // Lines of the handler are marked, because it could write more lines for rouse.toml.
    match message.contains('\n') {
        true => {
            let marked: String = message
                .split('\n')
                .map(|line| format!("\n> {line}"))
                .collect();
            format!("{denial}{between}then, in the handler's words:{marked}")
        }
        false => format!("{denial}{between}then: {message}"),
    }
}
