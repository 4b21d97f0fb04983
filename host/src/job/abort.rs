//! Why a running attempt has to stop.

use serde::{Deserialize, Serialize};

/// Why a running attempt has to stop. The same closed list stands in the WIT world
/// (`rouse:handler/types.abort-reason`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
    /// The word that stands in logs, errors and SQL.
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

    /// Reads the word that [`as_str`](Self::as_str) writes; none for any other.
    pub fn parse(word: &str) -> Option<Self> {
        [
            Self::TakenByAnotherWorker,
            Self::AlreadyCompleted,
            Self::NotFound,
            Self::Error,
            Self::TimedOut,
            Self::Cancelled,
            Self::Shutdown,
        ]
        .into_iter()
        .find(|reason| reason.as_str() == word)
    }
}
