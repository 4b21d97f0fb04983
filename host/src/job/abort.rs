//! Why a running attempt has to stop.

use serde::{Deserialize, Serialize};

/// Why a running attempt has to stop. The WIT world has the same closed list (`rouse:handler/types.abort-reason`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AbortReason {
    /// The lease expired and another worker has taken over the job.
    TakenByAnotherWorker,
    /// The job has already been settled.
    AlreadyCompleted,
    /// The job no longer exists.
    NotFound,
    /// The worker no longer knows whether it owns the job.
    Error,
    /// The attempt ran longer than its run timeout.
    TimedOut,
    /// The job was cancelled.
    Cancelled,
    /// The host is shutting down, and the time to finish has expired.
    Shutdown,
}

impl AbortReason {
    /// The word used in logs, errors and SQL.
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

    /// Parses a word of [`as_str`](Self::as_str). `None` for any other word.
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
