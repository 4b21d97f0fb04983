//! What one attempt may use: every limit with its default and the reason for it.

use std::time::Duration;

use wasmtime::Store;

use super::state::AttemptState;

/// Stack of WebAssembly calls, bytes: wasmtime's own default; deep JSON (128 levels) needs 60 KiB. One for the whole
/// host: it is part of how the engine is built.
pub(super) const WASM_STACK_BYTES_MAX: usize = 512 << 10;

/// A gigabyte is common on small hosts; 128 MiB leaves room for several attempts at once, and a photograph of 24
/// megapixels (96 MiB decoded) still fits.
const MEMORY_BYTES: usize = 128 << 20;

/// Most jobs wait for others and compute for milliseconds. Whoever encodes films sets more; a loop that never ends
/// costs a core for no longer than this.
const CPU: Duration = Duration::from_secs(600);

/// Results are kept with the job in Postgres and are read by people; larger ones belong in a file or an object store.
const RESULT_BYTES: usize = 4 << 20;

/// What a guest prints is for a person who looks for a fault; a loop that prints would fill the host's log.
const LOG_BYTES: usize = 256 << 10;

/// A guest that prints in a loop would have its 256 KiB, and with them the first words of the fault, behind it in a
/// millisecond.
const LOG_LINES_PER_SECOND: u32 = 1_000;

/// Tables hold functions whose address is taken; large Rust programs have some thousands of them.
pub(super) const TABLE_ELEMENTS: usize = 20_000;

/// As much as the host copies for one call of the guest.
const HOSTCALL_BYTES: usize = 8 << 20;

/// The host has some thousands for all attempts and for itself (1,024 on many machines, of which it takes as many as it may). Who works
/// through a directory has one or two open, who merges what was sorted some dozens.
const FILES: usize = 64;

/// A program that holds a thousand streams and pollables has forgotten to drop them.
const RESOURCES: usize = 1_024;

/// Its own resources included, which a language's runtime may have some of.
const HANDLES: usize = 4_096;

/// Seeds and keys have some dozens of bytes.
const RANDOM_BYTES: u64 = 1 << 20;

/// A loop that makes steps for ever would fill the database.
const STEPS: usize = 1_000;

/// The result of a step is what the next attempt has to know, not the data itself.
const STEP_BYTES: usize = 256 << 10;

/// A later attempt reads the results of all steps before its first one.
const STEPS_BYTES: usize = 8 << 20;

/// A handler that needs more should be several jobs; a loop that sends would be an attack.
const HTTP_REQUESTS: usize = 1_000;

/// Both ways, heads and bodies together: a job that moves more data is better off with a file.
const HTTP_BYTES: u64 = 1 << 30;

/// A body is not held in the host's memory, so this bounds time and traffic, and what a guest can be sent
/// that did not expect it.
const HTTP_BODY_BYTES: u64 = 256 << 20;
/// Each write is a commit; a loop that writes for ever would fill the database's log.
const STATE_CALLS: usize = 10_000;

/// A thousand values of the size that is allowed where nothing else is set.
const STATE_BYTES: usize = 64 << 20;

/// What the attempts of one handler may use. The defaults are those of a host whose operator has set nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// All linear memories of an attempt together, bytes. Default: 128 MiB.
    pub memory_bytes: usize,
    /// The most memory of an attempt after one that ran out of it, bytes: that one is tried again with twice as much, if
    /// it fits here. Default: twice `memory_bytes`.
    pub memory_retry_bytes: usize,
    /// CPU time of an attempt. Default: 10 minutes.
    pub cpu: Duration,
    /// Size of a result, bytes. Default: 4 MiB.
    pub result_bytes: usize,
    /// What an attempt may say through `log`, standard output and standard error together, bytes. Default: 256 KiB.
    pub log_bytes: usize,
    /// Lines that it may say within a second. Default: 1,000.
    pub log_lines_per_second: u32,
    /// Elements of one table; at most 20,000, which is the default.
    pub table_elements: usize,
    /// Bytes that one host call may carry from the guest to the host. Default: 8 MiB, and at least twice a result.
    pub hostcall_bytes: usize,
    /// Files that it has open at once, and directories that it lists, but for those that it is granted. Default: 64.
    pub files: usize,
    /// Things of the host (open files, streams, pollables) that it holds at once. Default: 1,024.
    pub resources: usize,
    /// Handles, its own resources included, that it holds at once. Default: 4,096.
    pub handles: usize,
    /// Bytes of one request for random numbers. Default: 1 MiB.
    pub random_bytes: u64,
    /// Steps of a job. Default: 1,000.
    pub steps: usize,
    /// The result of one step, bytes. Default: 256 KiB.
    pub step_bytes: usize,
    /// The results of all steps of a job, bytes. Default: 8 MiB.
    pub steps_bytes: usize,
    /// Requests over HTTP of an attempt. Default: 1,000.
    pub http_requests: usize,
    /// Bytes of all its requests and responses together. Default: 1 GiB.
    pub http_bytes: u64,
    /// Bytes of one body, either way. Default: 256 MiB.
    pub http_body_bytes: u64,
    /// How often an attempt may ask for its handler's state. Default: 10,000.
    pub state_calls: usize,
    /// What it may read and write of it, bytes. Default: 64 MiB.
    pub state_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            memory_bytes: MEMORY_BYTES,
            memory_retry_bytes: 2 * MEMORY_BYTES,
            cpu: CPU,
            result_bytes: RESULT_BYTES,
            log_bytes: LOG_BYTES,
            log_lines_per_second: LOG_LINES_PER_SECOND,
            table_elements: TABLE_ELEMENTS,
            hostcall_bytes: HOSTCALL_BYTES,
            files: FILES,
            resources: RESOURCES,
            handles: HANDLES,
            random_bytes: RANDOM_BYTES,
            steps: STEPS,
            step_bytes: STEP_BYTES,
            steps_bytes: STEPS_BYTES,
            http_requests: HTTP_REQUESTS,
            http_bytes: HTTP_BYTES,
            http_body_bytes: HTTP_BODY_BYTES,
            state_calls: STATE_CALLS,
            state_bytes: STATE_BYTES,
        }
    }
}

impl Limits {
    /// The memory of an attempt of which an earlier one may have asked for so much.
    pub(crate) fn memory_bytes_of(&self, asked: Option<usize>) -> usize {
        let usual = self.memory_bytes;
        let most = self.memory_retry_bytes.max(usual);
        asked.map_or(usual, |asked| asked.clamp(usual, most))
    }

    /// What an attempt may have after one that ran out of the usual memory; none: no more than that.
    pub fn more_memory(&self) -> Option<usize> {
        let more = self.memory_bytes.saturating_mul(2);
        let more = more.min(self.memory_retry_bytes);
        (more > self.memory_bytes).then_some(more)
    }

    /// Bytes that one host call may carry: a result that is allowed passes, and one that is a little too large can still
    /// be measured.
    pub(super) fn hostcall_bytes_max(&self) -> usize {
        self.hostcall_bytes.max(self.result_bytes.saturating_mul(2))
    }
}

/// Sets every limit of a fresh store.
pub(super) fn limit(store: &mut Store<AttemptState>, limits: &Limits) {
    store.limiter(|state| &mut state.limiter);
    store.set_hostcall_fuel(limits.hostcall_bytes_max());
    store.set_max_component_handles(limits.handles);
    store.data_mut().table.set_max_capacity(limits.resources);
    start(store);
    // Every tick, a guest that computes lets the others run, or is stopped.
    store.epoch_deadline_callback(|context| {
        let state = context.data();
        if let Some(profile) = &state.profile {
            profile.look(&context, &state.lines);
        }
        Ok(if context.data().abort.is_killed() {
            wasmtime::UpdateDeadline::Interrupt
        } else {
            wasmtime::UpdateDeadline::YieldCustom(1, Box::pin(tokio::task::yield_now()))
        })
    });
}

/// Counts the ticks from now on, at the start of each job.
pub(super) fn start(store: &mut Store<AttemptState>) {
    store.set_epoch_deadline(1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_that_was_asked_for_stays_between_the_usual_and_the_most() {
        let limits = Limits::default();
        for (asked, given) in [
            (None, MEMORY_BYTES),
            (Some(1), MEMORY_BYTES),
            (Some(usize::MAX), 2 * MEMORY_BYTES),
        ] {
            assert_eq!(limits.memory_bytes_of(asked), given);
        }
    }
}
