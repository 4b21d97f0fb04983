//! What a running attempt knows of itself, with what it may tell the host.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::task::Source;
use crate::{AbortReason, AbortSignal};

/// One attempt at one job.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JobInfo {
    /// The job's id, the same for all its attempts.
    pub id: i64,
    /// The name under which the job was enqueued.
    pub handler: String,
    /// The queue that the job is in.
    pub queue: String,
    /// Whose job it is.
    pub tenant: Option<String>,
    /// What triggered the job.
    pub source: Option<String>,
    /// 1 for the first attempt.
    pub attempt: u32,
    /// How many attempts may fail before the job does.
    pub max_attempts: u32,
    /// When the job was enqueued: milliseconds since 1970-01-01 UTC, by the database's clock.
    pub requested_at_ms: i64,
}

/// How loud a log line is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Every step.
    Trace,
    /// For whoever looks for a fault.
    Debug,
    /// Worth knowing.
    Info,
    /// Worth a look.
    Warn,
    /// Wrong.
    Error,
}

/// What the world around an attempt offers: the host's imports in a module, a recorder in a
/// native test.
pub(crate) trait Host {
    fn log(&self, level: Level, message: String);
    fn progress(&self, percent: u8, step: &str);
    fn abort_reason(&self) -> Option<AbortReason>;
    fn grace_remaining(&self) -> Option<Duration>;
    fn abort_source(&self) -> Source;
}

/// A handler's view of its attempt.
///
/// In native tests `TestCtx` takes its place: `&TestCtx` is accepted where `&Ctx` is asked for.
pub struct Ctx {
    job: JobInfo,
    host: Rc<dyn Host>,
}

impl Ctx {
    pub(crate) fn new(job: JobInfo, host: Rc<dyn Host>) -> Self {
        Self { job, host }
    }

    /// The job and the number of this attempt.
    pub fn job(&self) -> &JobInfo {
        &self.job
    }

    /// Writes one line to the host's log, beside the job's id.
    pub fn log(&self, level: Level, message: impl fmt::Display) {
        self.host.log(level, message.to_string());
    }

    /// [`log`](Self::log) at [`Level::Trace`].
    pub fn trace(&self, message: impl fmt::Display) {
        self.log(Level::Trace, message);
    }

    /// [`log`](Self::log) at [`Level::Debug`].
    pub fn debug(&self, message: impl fmt::Display) {
        self.log(Level::Debug, message);
    }

    /// [`log`](Self::log) at [`Level::Info`].
    pub fn info(&self, message: impl fmt::Display) {
        self.log(Level::Info, message);
    }

    /// [`log`](Self::log) at [`Level::Warn`].
    pub fn warn(&self, message: impl fmt::Display) {
        self.log(Level::Warn, message);
    }

    /// [`log`](Self::log) at [`Level::Error`].
    pub fn error(&self, message: impl fmt::Display) {
        self.log(Level::Error, message);
    }

    /// Says how far the attempt is, 0 to 100 (more counts as 100), with the step it is in.
    pub fn progress(&self, percent: u8, step: impl AsRef<str>) {
        self.host.progress(percent.min(100), step.as_ref());
    }

    /// This attempt's abort signal.
    pub fn abort(&self) -> AbortSignal {
        AbortSignal::new(Rc::clone(&self.host))
    }
}

impl fmt::Debug for Ctx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ctx").field("job", &self.job).finish()
    }
}
