//! From how a call came back to how the run ended.

use wasmtime::{Trap, WasmBacktrace};
use wasmtime_wasi::I32Exit;

use super::bindings::exports::rouse::handler::handlers::Failure as GuestFailure;
use super::capability::printable;
use super::limits::{Denial, hostcall_bytes_max};
use super::state::AttemptState;
use crate::job::{Failure, RunEnd};

/// One frame is one line of a listing.
const FRAME_BYTES_MAX: usize = 512;

/// What wasmtime says when a call carries more than it may; the error's type is private.
const TOO_MUCH_DATA: &str = "fuel allocated for hostcalls has been exhausted";

/// Why a call did not return a result.
pub(super) enum Stop {
    /// The instance did not come up.
    Starting(wasmtime::Error),
    /// The call did not come back in order.
    Running(wasmtime::Error),
    /// The handler said so.
    Failed(GuestFailure),
}

/// Says how a run ended that nobody aborted.
pub(super) fn classify(
    stop: Result<Vec<u8>, Stop>,
    state: &AttemptState,
    result_bytes_max: usize,
) -> RunEnd {
    match stop {
        Ok(result) if result.len() > result_bytes_max => RunEnd::OutputTooLarge {
            bytes: result.len(),
            limit_bytes: result_bytes_max,
        },
        Ok(result) => RunEnd::Returned(result),
        Err(Stop::Failed(failure)) => RunEnd::Failed(Failure {
            kind: failure.kind,
            message: failure.message,
            details: failure.details,
            permanent: failure.permanent,
            retry_after: failure.retry_after_ms.map(std::time::Duration::from_millis),
        }),
        Err(Stop::Starting(error)) => match state.limiter.denial() {
            Some(denial) => out_of_memory(denial, state),
            // The module's own code runs at the start too (constructors).
            None if is_guests_fault(&error) => trapped(&error, state),
            None => RunEnd::Unrunnable(format!("no instance could be made: {error:#}")),
        },
        // Without a frame of the guest it failed on its way out: the result was too large even
        // to be looked at.
        Err(Stop::Running(error)) if is_too_much_data(&error) && backtrace(&error).is_empty() => {
            RunEnd::OutputTooLarge {
                bytes: hostcall_bytes_max(result_bytes_max),
                limit_bytes: result_bytes_max,
            }
        }
        Err(Stop::Running(error)) => match state.limiter.denial() {
            Some(denial) => out_of_memory(denial, state),
            None => trapped(&error, state),
        },
    }
}

fn out_of_memory(denial: Denial, state: &AttemptState) -> RunEnd {
    match denial {
        Denial::OfAttempt => RunEnd::OutOfMemory {
            limit_bytes: state.limiter.limit_bytes(),
        },
        Denial::OfHost => RunEnd::Unrunnable(
            "the attempts of this host together have used up its memory; run fewer at once, or \
             raise the total"
                .into(),
        ),
    }
}

fn is_guests_fault(error: &wasmtime::Error) -> bool {
    error.is::<WasmBacktrace>() || error.is::<Trap>() || error.is::<I32Exit>()
}

fn trapped(error: &wasmtime::Error, state: &AttemptState) -> RunEnd {
    let backtrace = backtrace(error);
    if let Some(panic) = &state.panic {
        return RunEnd::Panicked {
            message: panic.message.clone(),
            location: panic.location.clone(),
            backtrace,
        };
    }
    RunEnd::Trapped {
        message: trap_message(error),
        backtrace,
    }
}

/// What went wrong, in one line.
pub(super) fn trap_message(error: &wasmtime::Error) -> String {
    if let Some(exit) = error.downcast_ref::<I32Exit>() {
        return format!(
            "the guest ended its process (exit status {}) instead of returning",
            exit.0
        );
    }
    if is_too_much_data(error) {
        return "the guest handed the host too much in one call (8 MiB are allowed)".into();
    }
    error.root_cause().to_string()
}

fn is_too_much_data(error: &wasmtime::Error) -> bool {
    error.root_cause().to_string().contains(TOO_MUCH_DATA)
}

/// One string for each frame, innermost first: `function at file:line:column` where the module
/// has its line tables.
pub(super) fn backtrace(error: &wasmtime::Error) -> Vec<String> {
    let Some(backtrace) = error.downcast_ref::<WasmBacktrace>() else {
        return Vec::new();
    };
    let mut lines = Vec::new();
    for frame in backtrace.frames() {
        let function = |name: Option<&str>| match name.or(frame.func_name()) {
            Some(name) => format!("{:#}", rustc_demangle::demangle(name)),
            None => format!("function {}", frame.func_index()),
        };
        if frame.symbols().is_empty() {
            lines.push(function(None));
        }
        // More than one where the compiler has inlined calls.
        for symbol in frame.symbols() {
            let mut line = function(symbol.name());
            if let Some(file) = symbol.file() {
                line += &format!(" at {file}");
                for number in [symbol.line(), symbol.column()].into_iter().flatten() {
                    line += &format!(":{number}");
                }
            }
            lines.push(line);
        }
    }
    lines
        .iter()
        .map(|line| printable(line, FRAME_BYTES_MAX))
        .collect()
}
