//! The choice of workers for the jobs of a queue.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// How a worker is chosen for each job of a queue when it is enqueued (`rouse.queue.dispatch`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Dispatch {
    /// No worker is chosen: any worker takes the job.
    Shared,
    /// The next one.
    RoundRobin,
    /// The same one for the same key.
    Hash,
    /// Any.
    Random,
}
