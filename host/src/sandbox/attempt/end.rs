//! From how a call came back to how the run ended.

use std::time::{Duration, SystemTime};

use wasmtime::{Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use super::memory::Denial;
use super::stack::{Called, called};
use super::state::AttemptState;
use crate::harmless::{paragraphs, printable};
use crate::job::{Failure, RunEnd};
use crate::sandbox::Limits;
use crate::sandbox::bindings::exports::rouse::handler::handlers::Failure as GuestFailure;
use crate::sandbox::module::code::BACKTRACE_FRAMES_MAX;
use crate::sandbox::module::lines::Lines;

/// A class is a word, a message a paragraph; both are stored with each attempt.
const KIND_BYTES_MAX: usize = 128;
const MESSAGE_BYTES_MAX: usize = 16 << 10;

/// A handler that asks for more has made a mistake with its units.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(365 * 24 * 60 * 60);

/// One frame is one line of a listing.
const FRAME_BYTES_MAX: usize = 512;

/// What wasmtime says when a call carries more than it may; the error's type is private.
const TOO_MUCH_DATA: &str = "fuel allocated for hostcalls has been exhausted";

/// Why a call did not return a result.
pub(in crate::sandbox) enum Stop {
    /// The instance did not come up.
    Starting(wasmtime::Error),
    /// The call did not come back in order.
    Running(wasmtime::Error),
    /// The handler said so.
    Failed(GuestFailure),
}

/// Says how a run ended that nobody aborted.
pub(in crate::sandbox) fn classify(
    stop: Result<Vec<u8>, Stop>,
    state: &AttemptState,
    limits: &Limits,
) -> RunEnd {
    let result_bytes_max = limits.result_bytes;
    match stop {
        Ok(result) if result.len() > result_bytes_max => RunEnd::OutputTooLarge {
            bytes: result.len(),
            limit_bytes: result_bytes_max,
        },
        Ok(result) => RunEnd::Returned(result),
        Err(Stop::Failed(failure)) => {
            let mut failed = failed(failure, result_bytes_max);
            failed.retry_at = state.retry_at_ms.map(retry_at);
            denied(RunEnd::Failed(failed), state)
        }
        Err(Stop::Starting(error)) => match state.limiter.denial() {
            Some(denial) => out_of_memory(denial, state),
            // The module's own code runs at the start too (constructors).
            None if is_guests_fault(&error) => denied(trapped(&error, state, limits), state),
            None => RunEnd::Unrunnable(format!("no instance could be made: {error:#}")),
        },
        // Without a frame of the guest it failed on its way out: the result was too large even
        // to be looked at.
        Err(Stop::Running(error)) if is_too_much_data(&error) && !has_frames(&error) => {
            RunEnd::OutputTooLarge {
                bytes: limits.hostcall_bytes_max(),
                limit_bytes: result_bytes_max,
            }
        }
        Err(Stop::Running(error)) => match state.limiter.denial() {
            Some(denial) => out_of_memory(denial, state),
            None => denied(trapped(&error, state, limits), state),
        },
    }
}

/// True when the guest came back by itself, with a result or an error of its own.
pub(in crate::sandbox) fn left_in_order(end: &RunEnd) -> bool {
    match end {
        RunEnd::Returned(_) | RunEnd::Failed(_) | RunEnd::ResultRefused(_) => true,
        RunEnd::Panicked { .. }
        | RunEnd::Trapped { .. }
        | RunEnd::StackOverflow { .. }
        | RunEnd::Denied { .. }
        | RunEnd::OutOfMemory { .. }
        | RunEnd::OutOfCpu { .. }
        | RunEnd::OutputTooLarge { .. }
        | RunEnd::PayloadRefused(_)
        | RunEnd::Aborted(_)
        | RunEnd::NotStarted
        | RunEnd::NoHandler
        | RunEnd::GrantsRefused(_)
        | RunEnd::Unrunnable(_) => false,
    }
}

/// The handler's own words, as far as they are of a size that people read.
fn failed(failure: GuestFailure, details_bytes_max: usize) -> Failure {
    let mut message = paragraphs(&failure.message, MESSAGE_BYTES_MAX);
    let details = failure.details.filter(|details| {
        let fit = details.len() <= details_bytes_max;
        if !fit {
            message += &format!(" (its details of {} bytes are left out)", details.len());
        }
        fit
    });
    Failure {
        kind: printable(&failure.kind, KIND_BYTES_MAX),
        message,
        details,
        permanent: failure.permanent,
        retry_after: failure
            .retry_after_ms
            .map(|ms| Duration::from_millis(ms).min(RETRY_AFTER_MAX)),
        retry_at: None,
    }
}

/// A time as Postgres can hold it; times before 1970 have passed as well as any.
fn retry_at(unix_ms: i64) -> SystemTime {
    let latest = SystemTime::now() + RETRY_AFTER_MAX;
    let ms = u64::try_from(unix_ms).unwrap_or(0);
    let at = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
    at.map_or(latest, |at| at.min(latest))
}

/// The end of a guest to which something was denied for want of a grant.
fn denied(end: RunEnd, state: &AttemptState) -> RunEnd {
    let denial = state.http.denial().or_else(|| state.denial.clone());
    let elsewhere = || {
        let said = said(&end)?;
        state.elsewhere.denial(&state.granted, said)
    };
    match denial.or_else(elsewhere) {
        None => end,
        Some(denial) => RunEnd::Denied {
            denial,
            then: Box::new(end),
        },
    }
}

/// What a guest says of its failure.
fn said(end: &RunEnd) -> Option<&str> {
    match end {
        RunEnd::Failed(failure) => Some(&failure.message),
        RunEnd::Panicked { message, .. } | RunEnd::Trapped { message, .. } => Some(message),
        RunEnd::Returned(_)
        | RunEnd::StackOverflow { .. }
        | RunEnd::Denied { .. }
        | RunEnd::OutOfMemory { .. }
        | RunEnd::OutOfCpu { .. }
        | RunEnd::OutputTooLarge { .. }
        | RunEnd::PayloadRefused(_)
        | RunEnd::ResultRefused(_)
        | RunEnd::Aborted(_)
        | RunEnd::NotStarted
        | RunEnd::NoHandler
        | RunEnd::GrantsRefused(_)
        | RunEnd::Unrunnable(_) => None,
    }
}

fn out_of_memory(denial: Denial, state: &AttemptState) -> RunEnd {
    match denial {
        Denial::OfAttempt => RunEnd::OutOfMemory {
            limit_bytes: state.limiter.limit_bytes(),
        },
        Denial::OfHost => RunEnd::Unrunnable(
            "the attempts of this host together have used up its memory; run fewer at once, or \
             raise memory_total_mb"
                .into(),
        ),
    }
}

fn is_guests_fault(error: &wasmtime::Error) -> bool {
    error.is::<WasmBacktrace>() || error.is::<Trap>() || error.is::<I32Exit>()
}

fn trapped(error: &wasmtime::Error, state: &AttemptState, limits: &Limits) -> RunEnd {
    let backtrace = backtrace(error, &state.lines);
    if let Some(panic) = &state.panic {
        return RunEnd::Panicked {
            message: panic.message.clone(),
            location: panic.location.clone(),
            backtrace,
        };
    }
    if is_stack_overflow(error) {
        return RunEnd::StackOverflow { backtrace };
    }
    RunEnd::Trapped {
        message: trap_message(error, limits),
        backtrace,
        stderr: state.log.last_errors(),
    }
}

/// True for the stack of calls, and for the one that languages keep in memory besides: it lies at the lower end
/// of memory, and whoever goes deeper than it has room for reaches below address 0.
fn is_stack_overflow(error: &wasmtime::Error) -> bool {
    match error.downcast_ref::<Trap>() {
        Some(Trap::StackOverflow) => true,
        Some(Trap::MemoryOutOfBounds) => error
            .downcast_ref::<WasmBacktrace>()
            .is_some_and(|backtrace| backtrace.frames().len() >= BACKTRACE_FRAMES_MAX),
        _ => false,
    }
}

/// What went wrong, in one line.
pub(in crate::sandbox) fn trap_message(error: &wasmtime::Error, limits: &Limits) -> String {
    if let Some(exit) = error.downcast_ref::<I32Exit>() {
        return format!(
            "the guest ended its process (exit status {}) instead of returning",
            exit.0
        );
    }
    if is_too_much_data(error) {
        return format!(
            "the guest handed the host too much in one call ({} bytes are allowed: hostcall_bytes in rouse.toml)",
            limits.hostcall_bytes_max()
        );
    }
    // It may name what the guest imports.
    printable(&error.root_cause().to_string(), MESSAGE_BYTES_MAX)
}

fn is_too_much_data(error: &wasmtime::Error) -> bool {
    error.root_cause().to_string().contains(TOO_MUCH_DATA)
}

/// One string for each frame, innermost first: `function at file:line:column` where the module
/// has its line tables.
pub(in crate::sandbox) fn backtrace(error: &wasmtime::Error, lines: &Lines) -> Vec<String> {
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else {
        return Vec::new();
    };
    let line = |called: Called| {
        let mut line = called.function;
        if let Some(file) = called.file {
            line += &format!(" at {file}");
            for number in [called.line, called.column].into_iter().flatten() {
                line += &format!(":{number}");
            }
        }
        printable(&line, FRAME_BYTES_MAX)
    };
    called(backtrace, lines).into_iter().map(line).collect()
}

fn has_frames(error: &wasmtime::Error) -> bool {
    error
        .downcast_ref::<WasmBacktrace>()
        .is_some_and(|backtrace| !backtrace.frames().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failure() -> GuestFailure {
        GuestFailure {
            kind: "busy".into(),
            message: "not now".into(),
            details: Some(b"[1]".into()),
            permanent: false,
            retry_after_ms: Some(20),
        }
    }

    #[test]
    fn a_failure_of_ordinary_size_is_kept_as_it_is() {
        let failed = failed(failure(), 3);
        assert_eq!(
            (failed.kind.as_str(), failed.message.as_str()),
            ("busy", "not now")
        );
        assert_eq!(failed.details.as_deref(), Some(&b"[1]"[..]));
        assert_eq!(failed.retry_after, Some(Duration::from_millis(20)));
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown_in_a_failure_and_its_lines_stay() {
        let failed = failed(
            GuestFailure {
                kind: "a\nb\u{9b}".into(),
                message: "one\n\ttwo\r\u{1b}[2J\u{202e}\0".into(),
                ..failure()
            },
            3,
        );
        assert_eq!(failed.kind, "a b\\u{9b}");
        assert_eq!(failed.message, "one\n\ttwo\\u{d}\\u{1b}[2J\\u{202e}\\u{0}");
    }

    #[test]
    fn what_nobody_would_read_is_cut() {
        let long = failed(
            GuestFailure {
                kind: "k".repeat(1000),
                message: "ü".repeat(100_000),
                retry_after_ms: Some(u64::MAX),
                ..failure()
            },
            2,
        );
        assert!(long.kind.len() <= KIND_BYTES_MAX + '…'.len_utf8());
        assert!(long.message.starts_with('ü') && long.message.len() < MESSAGE_BYTES_MAX + 100);
        assert!(
            long.message
                .ends_with("(its details of 3 bytes are left out)")
        );
        assert_eq!(long.details, None);
        assert_eq!(long.retry_after, Some(RETRY_AFTER_MAX));
    }
}
