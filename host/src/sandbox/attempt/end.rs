//! Determines how a run ended from how the call to the guest returned.

use wasmtime::{Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use super::failure::{MESSAGE_BYTES_MAX, failed, retry_at};
use super::memory::Denial;
use super::stack::{StackFrame, stack_frames};
use super::state::AttemptState;
use crate::job::RunEnd;
use crate::sandbox::Limits;
use crate::sandbox::bindings::exports::rouse::handler::handlers::Failure as GuestFailure;
use crate::sandbox::module::code::BACKTRACE_FRAMES_MAX;
use crate::sandbox::module::lines::Lines;
use crate::sanitize::printable;

/// The maximum size of one frame of a backtrace, which is one line of a listing.
const FRAME_BYTES_MAX: usize = 512;

/// Parts of wasmtime's messages when a guest exceeds a limit. They are compared as text, because most types of these
/// errors are private.
const TOO_MUCH_DATA: &str = "fuel allocated for hostcalls has been exhausted";
const TOO_MANY_RESOURCES: &str = "resource table has no free keys";
const TOO_MANY_HANDLES: &str = "store handle limit exceeded";
const TOO_MUCH_RANDOM: &str = "requested len ";

/// Why a call did not return a result.
pub(in crate::sandbox) enum Stop {
    /// The instance failed to start.
    Starting(wasmtime::Error),
    /// The call did not return normally.
    Running(wasmtime::Error),
    /// The handler returned an error.
    Failed(GuestFailure),
}

/// Classifies the end of a run that was not aborted.
pub(in crate::sandbox) fn classify(
    stop: Result<Vec<u8>, Stop>,
    state: &AttemptState,
    limits: &Limits,
) -> RunEnd {
    let result_bytes_max = limits.result_bytes;
    if let (Err(_), Some(suspension)) = (&stop, &state.suspension) {
        return RunEnd::Suspended(suspension.clone());
    }
    if stop.is_err() && state.sql.is_parked {
        return RunEnd::Parked;
    }
    match stop {
        Ok(result) if result.len() > result_bytes_max => RunEnd::OutputTooLarge {
            bytes: result.len(),
            limit_bytes: result_bytes_max,
        },
        Ok(result) => RunEnd::Returned(result),
        Err(Stop::Failed(failure)) => {
            let mut failed = failed(failure, result_bytes_max);
            let now = state.clock.now();
            failed.retry_at = state.retry_at_ms.map(|unix_ms| retry_at(unix_ms, now));
            denied(RunEnd::Failed(failed), state)
        }
        Err(Stop::Starting(error)) => match state.limiter.denial() {
            Some(denial) => out_of_memory(denial, state),
            // The module's own code also runs when it starts (constructors).
            None if is_guests_fault(&error) => denied(trapped(&error, state, limits), state),
            None => RunEnd::Unrunnable(format!("no instance could be created: {error:#}")),
        },
        // Without a guest frame, the call failed while it returned: the result was too large even to be measured.
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

/// True if the guest returned without being stopped, with a result or an error.
pub(in crate::sandbox) fn returned_normally(end: &RunEnd) -> bool {
    match end {
        RunEnd::Returned(_) | RunEnd::Failed(_) | RunEnd::ResultRefused(_) => true,
        RunEnd::Suspended(_)
        | RunEnd::Panicked { .. }
        | RunEnd::Trapped { .. }
        | RunEnd::StackOverflow { .. }
        | RunEnd::Denied { .. }
        | RunEnd::OutOfMemory { .. }
        | RunEnd::OutOfCpu { .. }
        | RunEnd::OutputTooLarge { .. }
        | RunEnd::PayloadRefused(_)
        | RunEnd::SettlementRefused(_)
        | RunEnd::Aborted(_)
        | RunEnd::NotStarted
        | RunEnd::NoHandler
        | RunEnd::GrantsRefused(_)
        | RunEnd::EffectFailed(_)
        | RunEnd::Parked
        | RunEnd::Unrunnable(_) => false,
    }
}

/// Adds the denial to the end of a guest that lacked a grant.
fn denied(end: RunEnd, state: &AttemptState) -> RunEnd {
    let denial = state.http.denial().or_else(|| state.denial.clone());
    let outside = || {
        let paths = &state.outside_paths;
        paths.denial(&state.granted, guest_message(&end)?)
    };
    match denial.or_else(outside) {
        None => end,
        Some(denial) => RunEnd::Denied {
            denial,
            then: Box::new(end),
        },
    }
}

/// The guest's own error message.
fn guest_message(end: &RunEnd) -> Option<&str> {
    match end {
        RunEnd::Failed(failure) => Some(&failure.message),
        RunEnd::Panicked { message, .. } | RunEnd::Trapped { message, .. } => Some(message),
        RunEnd::Returned(_)
        | RunEnd::Suspended(_)
        | RunEnd::StackOverflow { .. }
        | RunEnd::Denied { .. }
        | RunEnd::OutOfMemory { .. }
        | RunEnd::OutOfCpu { .. }
        | RunEnd::OutputTooLarge { .. }
        | RunEnd::PayloadRefused(_)
        | RunEnd::ResultRefused(_)
        | RunEnd::SettlementRefused(_)
        | RunEnd::Aborted(_)
        | RunEnd::NotStarted
        | RunEnd::NoHandler
        | RunEnd::GrantsRefused(_)
        | RunEnd::EffectFailed(_)
        | RunEnd::Parked
        | RunEnd::Unrunnable(_) => None,
    }
}

fn out_of_memory(denial: Denial, state: &AttemptState) -> RunEnd {
    match denial {
        Denial::Attempt => RunEnd::OutOfMemory {
            limit_bytes: state.limiter.limit_bytes(),
        },
        Denial::Host => RunEnd::Unrunnable(
            "the attempts of this host together have used up its memory; run fewer at once, or \
             raise memory_total_mb"
                .into(),
        ),
    }
}

/// True if the guest's own code ended a call or a start.
pub(in crate::sandbox) fn is_guests_fault(error: &wasmtime::Error) -> bool {
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

/// True for an overflow of the call stack, or of the stack that languages keep in linear memory: that stack is at the
/// lower end of memory, so its overflow accesses addresses below 0, after so many calls that the backtrace is full.
fn is_stack_overflow(error: &wasmtime::Error) -> bool {
    match error.downcast_ref::<Trap>() {
        Some(Trap::StackOverflow) => true,
        Some(Trap::MemoryOutOfBounds) => error
            .downcast_ref::<WasmBacktrace>()
            .is_some_and(|backtrace| backtrace.frames().len() >= BACKTRACE_FRAMES_MAX),
        _ => false,
    }
}

/// The error message of a trap, on one line.
pub(in crate::sandbox) fn trap_message(error: &wasmtime::Error, limits: &Limits) -> String {
    if let Some(exit) = error.downcast_ref::<I32Exit>() {
        return format!(
            "the guest ended its process (exit status {}) instead of returning",
            exit.0
        );
    }
    let cause = error.root_cause().to_string();
    // The message may quote the names of imports.
    limit_message(&cause, limits).unwrap_or_else(|| printable(&cause, MESSAGE_BYTES_MAX))
}

/// A message that names the limit that the guest exceeded; `None` if it exceeded none.
fn limit_message(cause: &str, limits: &Limits) -> Option<String> {
    let (did, most, setting) = if cause.contains(TOO_MUCH_DATA) {
        (
            "passed too much data to the host in one call",
            format!("{} bytes", limits.hostcall_bytes_max()),
            "hostcall_bytes",
        )
    } else if cause.contains(TOO_MANY_RESOURCES) {
        (
            "opened too many files, streams and pollables",
            limits.resources.to_string(),
            "resources",
        )
    } else if cause.contains(TOO_MANY_HANDLES) {
        (
            "created too many handles",
            limits.handles.to_string(),
            "handles",
        )
    } else if cause.starts_with(TOO_MUCH_RANDOM) {
        (
            "requested too many random bytes at once",
            limits.random_bytes.to_string(),
            "random_bytes",
        )
    } else {
        return None;
    };
    Some(format!(
        "the guest {did} (at most {most} are allowed: limits.{setting} in rouse.toml)"
    ))
}

fn is_too_much_data(error: &wasmtime::Error) -> bool {
    error.root_cause().to_string().contains(TOO_MUCH_DATA)
}

/// One string for each frame, innermost first: `function at file:line:column` if the module has line tables.
pub(in crate::sandbox) fn backtrace(error: &wasmtime::Error, lines: &Lines) -> Vec<String> {
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else {
        return Vec::new();
    };
    let line = |frame: StackFrame| {
        let mut line = frame.function;
        if let Some(file) = frame.file {
            line += &format!(" at {file}");
            for number in [frame.line, frame.column].into_iter().flatten() {
                line += &format!(":{number}");
            }
        }
        printable(&line, FRAME_BYTES_MAX)
    };
    stack_frames(backtrace, lines)
        .into_iter()
        .map(line)
        .collect()
}

fn has_frames(error: &wasmtime::Error) -> bool {
    error
        .downcast_ref::<WasmBacktrace>()
        .is_some_and(|backtrace| !backtrace.frames().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_the_limit_that_ended_a_guest() {
        let limits = Limits::default();
        for (cause, setting) in [
            (TOO_MUCH_DATA, "hostcall_bytes"),
            (TOO_MANY_RESOURCES, "resources"),
            (
                "cannot allocate another handle: store handle limit exceeded",
                "handles",
            ),
            ("requested len 9 exceeds limit 8", "random_bytes"),
        ] {
            let message = trap_message(&wasmtime::Error::msg(cause), &limits);
            let expected = format!("limits.{setting} in rouse.toml");
            assert!(message.contains(&expected), "{message}");
        }
        let other = trap_message(&wasmtime::Error::msg("another\ncause"), &limits);
        assert_eq!(other, "another cause");
    }
}
