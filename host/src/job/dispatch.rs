//! The choice of workers for the jobs of a queue.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// Which worker gets each job that is enqueued into a queue (`rouse.queue.dispatch`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatch {
    /// No worker in particular: any of them takes the job.
    Shared,
    /// The workers in turn.
    RoundRobin,
    /// The same worker for the same key.
    Hash,
    /// A random worker.
    Random,
}
