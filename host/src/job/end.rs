//! How a run in the sandbox ended, before anything is decided about the job.

use std::time::{Duration, SystemTime};

use super::AbortReason;

/// How a run in the sandbox ended. A fact, not a decision: [`decide`](super::decide) makes an
/// [`Outcome`](super::Outcome) of it.
#[derive(Debug, Clone, PartialEq)]
pub enum RunEnd {
    /// The handler returned; these bytes are UTF-8 JSON, not yet checked.
    Returned(Vec<u8>),
    /// The handler returned an error of its own.
    Failed(Failure),
    /// The handler panicked.
    Panicked {
        /// The panic message.
        message: String,
        /// `file:line:column`.
        location: String,
        /// One frame a line, innermost first.
        backtrace: Vec<String>,
    },
    /// WebAssembly trapped (unreachable, out of bounds …).
    Trapped {
        /// What wasmtime says of it.
        message: String,
        /// One frame a line, innermost first.
        backtrace: Vec<String>,
        /// The last lines that it wrote to standard error: there, most languages say why.
        stderr: Vec<String>,
    },
    /// Calls went deeper than the stack.
    StackOverflow {
        /// One frame a line, innermost first.
        backtrace: Vec<String>,
    },
    /// The guest did something that it is not granted, and did not get over it.
    Denied {
        /// What was denied, with what the operator can do about it.
        denial: String,
        /// How it ended then.
        then: Box<Self>,
    },
    /// The guest asked for more memory than its limit, and stopped because of it.
    OutOfMemory {
        /// The limit that it ran into, bytes.
        limit_bytes: usize,
    },
    /// The guest computed for longer than it may, and was stopped.
    OutOfCpu {
        /// How much CPU time it may use.
        limit: Duration,
    },
    /// The result is larger than the operator allows.
    OutputTooLarge {
        /// Its size, bytes.
        bytes: usize,
        /// The limit, bytes.
        limit_bytes: usize,
    },
    /// The payload does not fit what the handler takes, and there was no guest.
    PayloadRefused(String),
    /// The handler returned something that does not fit what it says of its results.
    ResultRefused(String),
    /// The attempt was told to stop and did, or was stopped; or it had to stop before it started.
    Aborted(AbortReason),
    /// It never started: no slot came free in time, or its claim is too old.
    NotStarted,
    /// It never started: the handler that has to run it is not here, be it the job's own or the one that the operator bound
    /// to its source.
    NoHandler,
    /// It never started: this host does not understand what the job leaves of its grants.
    GrantsRefused(String),
    /// The host could not run the handler at all (no instance, a missing import …).
    Unrunnable(String),
}

/// An error in the handler's own words.
#[derive(Debug, Clone, PartialEq)]
pub struct Failure {
    /// A short class, for instance `smtp-timeout`.
    pub kind: String,
    /// What went wrong.
    pub message: String,
    /// Anything else worth keeping: UTF-8 JSON, not yet checked.
    pub details: Option<Vec<u8>>,
    /// True: do not try again.
    pub permanent: bool,
    /// Try again after this long, instead of the handler's own backoff.
    pub retry_after: Option<Duration>,
    /// Try again then, by the database's clock, instead of either.
    pub retry_at: Option<SystemTime>,
}
