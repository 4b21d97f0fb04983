//! The states of a job and their legal transitions.

use serde::{Deserialize, Serialize};

/// The state of a job.
///
/// `queued → running → succeeded | failed | timed_out | cancelled`, `running → queued` for a retry, a suspension, a
/// released claim or a loss, `queued → succeeded | failed | cancelled` by an admin action, a deadline or the failure of
/// another job. The last four states are final.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum State {
    /// It waits for a worker, its time, a signal or other jobs.
    Queued,
    /// A worker has claimed it.
    Running,
    /// Its handler returned a result.
    Succeeded,
    /// It failed, and is not tried again.
    Failed,
    /// Its last attempt ran longer than its run timeout.
    TimedOut,
    /// It was cancelled.
    Cancelled,
}

impl State {
    /// The word used in SQL, logs and listings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
        }
    }
}

/// A job's priority. Ordered: high comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Priority {
    /// Before the others.
    High,
    /// The default.
    Normal,
    /// After the others.
    Low,
}

impl Priority {
    /// The word used in SQL, logs and listings.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::High => "high",
            Self::Normal => "normal",
            Self::Low => "low",
        }
    }

    /// Parses a word of [`as_str`](Self::as_str). `None` for any other word.
    pub fn parse(word: &str) -> Option<Self> {
        [Self::High, Self::Normal, Self::Low]
            .into_iter()
            .find(|p| p.as_str() == word)
    }
}
