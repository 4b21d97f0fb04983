//! The signal that tells an attempt to stop.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::ctx::{Host as _, World};
use crate::task::Wait;

/// Why an attempt has to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortReason {
    /// The lease ran out and another worker has the job now.
    TakenByAnotherWorker,
    /// Someone else settled the job.
    AlreadyCompleted,
    /// The job is gone.
    NotFound,
    /// The worker cannot tell any more whether it owns the job.
    Error,
    /// The attempt ran longer than its run timeout.
    TimedOut,
    /// The job was cancelled.
    Cancelled,
    /// The host is shutting down and its patience has ended.
    Shutdown,
}

impl AbortReason {
    /// The word that the host uses for it in logs and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::TakenByAnotherWorker => "taken_by_another_worker",
            Self::AlreadyCompleted => "already_completed",
            Self::NotFound => "not_found",
            Self::Error => "error",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Shutdown => "shutdown",
        }
    }
}

impl fmt::Display for AbortReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Turns once, when the attempt has to stop, and never back.
///
/// From that moment the host drops whatever the attempt returns and refuses its further effects.
/// What is left of the grace is for tidying up; then the attempt is stopped where it stands.
#[derive(Clone)]
pub struct AbortSignal {
    world: Rc<World>,
}

impl AbortSignal {
    pub(crate) fn new(world: Rc<World>) -> Self {
        Self { world }
    }

    /// None while the attempt may go on. Costs a host call: ask once per chunk of work, not
    /// once per byte.
    pub fn reason(&self) -> Option<AbortReason> {
        self.world.abort_reason()
    }

    /// The time until the attempt is stopped by force; none while it may go on.
    pub fn grace_remaining(&self) -> Option<Duration> {
        self.world.grace_remaining()
    }

    /// Ends when the attempt has to stop. [`race`](crate::race) it against the work.
    pub async fn wait(&self) -> AbortReason {
        if let Some(reason) = self.reason() {
            return reason;
        }
        Wait::new(self.world.abort_source()).await;
        // A host that says "stop" but not why has lost track of the job.
        self.reason().unwrap_or(AbortReason::Error)
    }
}

impl fmt::Debug for AbortSignal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AbortSignal")
            .field("reason", &self.reason())
            .finish()
    }
}
