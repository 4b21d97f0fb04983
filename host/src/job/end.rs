//! How a run in the sandbox ended, before the job's outcome is decided.

use std::time::{Duration, SystemTime};

use super::{AbortReason, SqlFailure, Suspension};

/// How a run in the sandbox ended. This is a fact; [`decide`](super::decide) turns it into an
/// [`Outcome`](super::Outcome).
#[derive(Debug, Clone, PartialEq)]
pub enum RunEnd {
    /// The handler returned these bytes. They should be UTF-8 JSON, but are not checked yet.
    Returned(Vec<u8>),
    /// The handler waits. The host has stopped it, and runs it again when the wait ends.
    Suspended(Suspension),
    /// The handler returned an error of its own.
    Failed(Failure),
    /// The handler panicked.
    Panicked {
        /// The panic message.
        message: String,
        /// `file:line:column`.
        location: String,
        /// Frames, innermost first.
        backtrace: Vec<String>,
    },
    /// WebAssembly trapped (unreachable, out of bounds …).
    Trapped {
        /// Wasmtime's message.
        message: String,
        /// Frames, innermost first.
        backtrace: Vec<String>,
        /// The last lines that the guest wrote to standard error: most languages print the reason there.
        stderr: Vec<String>,
    },
    /// The handler's calls exceeded its stack.
    StackOverflow {
        /// Frames, innermost first.
        backtrace: Vec<String>,
    },
    /// The guest used a capability that it had not been granted, and failed afterwards.
    Denied {
        /// The denial, and how the operator can grant the capability.
        denial: String,
        /// How the run ended after that.
        then: Box<Self>,
    },
    /// The guest requested more memory than its limit, and stopped because of that.
    OutOfMemory {
        /// The limit, in bytes.
        limit_bytes: usize,
    },
    /// The guest used more CPU time than its limit, and was stopped.
    OutOfCpu {
        /// The limit.
        limit: Duration,
    },
    /// The result is larger than the operator allows.
    OutputTooLarge {
        /// Its size, in bytes.
        bytes: usize,
        /// The limit, in bytes.
        limit_bytes: usize,
    },
    /// The payload does not match the handler's schema. No guest was started.
    PayloadRefused(String),
    /// The result does not match the handler's schema.
    ResultRefused(String),
    /// The handler returned, but Postgres cannot store its result, or the jobs that it enqueues: nothing was committed.
    SettlementRefused(String),
    /// The attempt was aborted: it stopped after the signal, was stopped, or was aborted before it started.
    Aborted(AbortReason),
    /// The attempt never started: no slot became free in time, or its claim is too old.
    NotStarted,
    /// The attempt never started: this host does not have the handler that the job names, or that the operator bound to
    /// its source.
    NoHandler,
    /// The attempt never started: this host does not understand the attenuation of the job's grants.
    GrantsRefused(String),
    /// The handler returned, but Postgres refused one of its effects: nothing was committed.
    EffectFailed(SqlFailure),
    /// A statement of the handler does not fit the database, and the handler is parked; or a new version of the module
    /// has replaced the statement.
    Parked,
    /// The host could not run the handler (no instance, a missing import …).
    Unrunnable(String),
}

/// An error that the handler returned.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// A short class, such as `smtp_timeout`.
    pub kind: String,
    /// What went wrong.
    pub message: String,
    /// Any details. They should be UTF-8 JSON, but are not checked yet.
    pub details: Option<Vec<u8>>,
    /// True if the job must not be tried again.
    pub permanent: bool,
    /// The wait before the next attempt, instead of the handler's backoff.
    pub retry_after: Option<Duration>,
    /// The time of the next attempt, by the database's clock. It overrides `retry_after` and the backoff.
    pub retry_at: Option<SystemTime>,
}
