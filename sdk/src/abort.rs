//! The signal that an attempt has to stop.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use crate::World;
use crate::host::Host as _;
use crate::task::Wait;

/// Why an attempt has to stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AbortReason {
    /// The lease expired, and another worker now has the job.
    TakenByAnotherWorker,
    /// The job was settled by an admin action or by another worker.
    AlreadyCompleted,
    /// The job no longer exists.
    NotFound,
    /// The worker no longer knows whether it owns the job.
    Error,
    /// The attempt ran longer than its run timeout.
    TimedOut,
    /// The job was cancelled.
    Cancelled,
    /// The host is shutting down, and its drain timeout has passed.
    Shutdown,
}

impl AbortReason {
    /// The name of this reason in the host's logs and in SQL.
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

/// Fires once, when the attempt has to stop, and is never reset.
///
/// From that moment the host drops the attempt's result and refuses further effects. The rest of the grace period is
/// for cleaning up; then the attempt is stopped by force.
#[derive(Clone)]
pub struct AbortSignal {
    world: Rc<World>,
}

impl AbortSignal {
    pub(crate) fn new(world: Rc<World>) -> Self {
        Self { world }
    }

    /// `None` while the attempt may continue. Costs a host call: check once per chunk of work, not once per byte.
    pub fn reason(&self) -> Option<AbortReason> {
        self.world.abort_reason()
    }

    /// The time until the attempt is stopped by force; `None` while it may continue.
    pub fn grace_remaining(&self) -> Option<Duration> {
        self.world.grace_remaining()
    }

    /// Completes when the attempt has to stop. [`race`](crate::race) it against the work.
    pub async fn wait(&self) -> AbortReason {
        if let Some(reason) = self.reason() {
            return reason;
        }
        Wait::new(self.world.abort_source()).await;
        // A signal that is ready without a reason means that the host has lost track of the job.
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
