//! The limits of an attempt, each with its default and the reason for it. The limits on time are in `worker/policy.rs`,
//! and the quotas are in `sandbox/grants/`.

use std::time::Duration;

/// The size of the WebAssembly call stack, in bytes: wasmtime's default; JSON with 128 levels needs 60 KiB. One value
/// for the whole host, because it is part of the engine.
pub(in crate::sandbox) const WASM_STACK_BYTES_MAX: usize = 512 << 10;

/// Small hosts often have a gigabyte; 128 MiB leaves room for several attempts at once, and is enough for a
/// 24-megapixel photograph (96 MiB decoded).
const MEMORY_BYTES: usize = 128 << 20;

/// Most jobs wait for other systems and compute for milliseconds. Video encoding needs more; an endless loop occupies a
/// core for no longer than this.
const CPU: Duration = Duration::from_secs(600);

/// Results are stored with the job in Postgres and read by people; larger ones belong in a file or an object store.
const RESULT_BYTES: usize = 4 << 20;

/// People read output to find an error; a loop that prints would fill the host's log.
const LOG_BYTES: usize = 256 << 10;

/// A loop that prints would use up its 256 KiB within a millisecond, and hide the start of an error.
const LOG_LINES_PER_SECOND: u32 = 1_000;

/// Tables hold functions whose address is taken; large Rust programs have a few thousand.
pub(in crate::sandbox) const TABLE_ELEMENTS: usize = 20_000;

/// The amount of data that the host copies for one guest call.
const HOSTCALL_BYTES: usize = 8 << 20;

/// A host has a few thousand files for all attempts and for itself (1,024 on many machines; it raises its limit as far
/// as allowed). A handler that walks a directory has one or two open, an external merge sort a few dozen.
const FILES: usize = 64;

/// A program that holds a thousand streams and pollables has forgotten to drop them.
const RESOURCES: usize = 1_024;

/// Includes the guest's own resources, of which language runtimes have a few.
const HANDLES: usize = 4_096;

/// Seeds and keys are a few dozen bytes long.
const RANDOM_BYTES: u64 = 1 << 20;

/// An endless loop of steps would fill the database.
const STEPS: usize = 1_000;

/// The result of a step tells the next attempt what was done; the data itself belongs elsewhere.
const STEP_BYTES: usize = 256 << 10;

/// A later attempt reads the results of the earlier steps again.
const STEPS_BYTES: usize = 8 << 20;

/// A handler that needs more should be split into several jobs; a loop that sends requests would be an attack.
const HTTP_REQUESTS: usize = 1_000;

/// Both directions, heads and bodies together: a job that moves more data should use a file.
const HTTP_BYTES: u64 = 1 << 30;

/// A body is not held in the host's memory, so this limits time and traffic, and unexpected responses.
const HTTP_BODY_BYTES: u64 = 256 << 20;

/// Each write is a commit; an endless loop of writes would fill the database's log.
const STATE_CALLS: usize = 10_000;

/// A thousand values of the default maximum size.
const STATE_BYTES: usize = 64 << 20;

/// A loop that enqueues would fill the database. Larger graphs are enqueued by jobs of their own.
const JOBS: usize = 1_000;

/// Large data belongs elsewhere, as for a producer; one settlement carries all of it.
const JOBS_BYTES: usize = 8 << 20;

/// Effects run in one transaction, which holds locks; to write more rows, use one statement and an array.
const EFFECTS: usize = 1_000;

/// One transaction carries all effects.
const EFFECTS_BYTES: usize = 8 << 20;

/// Each query is a transaction; a loop of queries belongs in one statement.
const QUERIES: usize = 1_000;

/// The limits of one handler's attempts. The defaults apply to everything that the operator does not set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// The maximum size of all linear memories of an attempt together, in bytes. Default: 128 MiB.
    pub memory_bytes: usize,
    /// The maximum memory of an attempt that follows one that exhausted its memory, in bytes: it gets twice as much, up
    /// to this maximum. Default: twice `memory_bytes`.
    pub memory_retry_bytes: usize,
    /// CPU time of an attempt. Default: 10 minutes.
    pub cpu: Duration,
    /// The maximum size of a result, in bytes. Default: 4 MiB.
    pub result_bytes: usize,
    /// The maximum output of an attempt through `log`, standard output and standard error together, in bytes, with
    /// control characters escaped. Default: 256 KiB.
    pub log_bytes: usize,
    /// Lines that it may write within a second. Default: 1,000.
    pub log_lines_per_second: u32,
    /// Elements of one table; at most 20,000, which is the default.
    pub table_elements: usize,
    /// Bytes that one call may carry from the guest to the host. Default: 8 MiB, and at least twice the size of a
    /// result.
    pub hostcall_bytes: usize,
    /// Files that it may have open at once, and directories that it lists, except granted directories. Default: 64.
    pub files: usize,
    /// Resources of the host (open files, streams, pollables) that it may hold at once. Default: 1,024.
    pub resources: usize,
    /// Handles that it may hold at once, including its own resources. Default: 4,096.
    pub handles: usize,
    /// Bytes of one request for random numbers. Default: 1 MiB.
    pub random_bytes: u64,
    /// Steps of a job. Default: 1,000.
    pub steps: usize,
    /// The maximum size of the result of one step, in bytes. Default: 256 KiB.
    pub step_bytes: usize,
    /// The maximum size of the results of all steps of a job, in bytes. Default: 8 MiB.
    pub steps_bytes: usize,
    /// HTTP requests of an attempt. Default: 1,000.
    pub http_requests: usize,
    /// Bytes of all its requests and responses together. Default: 1 GiB.
    pub http_bytes: u64,
    /// Bytes of one body, in either direction. Default: 256 MiB.
    pub http_body_bytes: u64,
    /// Calls that an attempt may make for its handler's state. Default: 10,000.
    pub state_calls: usize,
    /// Bytes of state that it may read and write. Default: 64 MiB.
    pub state_bytes: usize,
    /// Jobs that an attempt may enqueue. Default: 1,000.
    pub jobs: usize,
    /// The maximum size of the payloads and options of these jobs together, in bytes. Default: 8 MiB.
    pub jobs_bytes: usize,
    /// SQL statements that an attempt may commit. Default: 1,000.
    pub effects: usize,
    /// The maximum size of their parameters together, in bytes. Default: 8 MiB.
    pub effects_bytes: usize,
    /// SQL queries of an attempt. Default: 1,000.
    pub queries: usize,
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
            jobs: JOBS,
            jobs_bytes: JOBS_BYTES,
            effects: EFFECTS,
            effects_bytes: EFFECTS_BYTES,
            queries: QUERIES,
        }
    }
}

impl Limits {
    /// The memory limit of an attempt, given the memory that an earlier attempt requested, if any.
    pub(crate) fn memory_bytes_of(&self, requested: Option<usize>) -> usize {
        let usual = self.memory_bytes;
        let max = self.memory_retry_bytes.max(usual);
        requested.map_or(usual, |requested| requested.clamp(usual, max))
    }

    /// The memory limit of an attempt that follows one that exhausted its memory; `None` if it does not get more.
    pub fn more_memory(&self) -> Option<usize> {
        let more = self.memory_bytes.saturating_mul(2);
        let more = more.min(self.memory_retry_bytes);
        (more > self.memory_bytes).then_some(more)
    }

    /// Bytes that one call may carry: enough for an allowed result, and for a slightly larger one to be measured.
    pub(in crate::sandbox) fn hostcall_bytes_max(&self) -> usize {
        self.hostcall_bytes.max(self.result_bytes.saturating_mul(2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clamp_requested_memory_between_the_usual_and_the_maximum() {
        let limits = Limits::default();
        for (requested, limit) in [
            (None, MEMORY_BYTES),
            (Some(1), MEMORY_BYTES),
            (Some(usize::MAX), 2 * MEMORY_BYTES),
        ] {
            assert_eq!(limits.memory_bytes_of(requested), limit);
        }
    }
}
