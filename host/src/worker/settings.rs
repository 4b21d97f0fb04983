//! What an operator can set about a worker.

use std::collections::HashMap;
use std::time::Duration;

use serde::Deserialize;

use super::{Intervals, Overrides};
use crate::store::WorkerKey;

/// What an operator can set about a worker. [`Default`] documents the defaults.
#[derive(Debug, Clone)]
pub struct Settings {
    /// 1 to 64 letters, digits, `-` and `_`.
    pub worker_id: String,
    /// What the worker shows with each write; who has it may take the id over.
    pub key: WorkerKey,
    /// The machine's name, for listings.
    pub hostname: String,
    /// The queues that are served, in order; empty: all, as they come.
    pub queues: Vec<String>,
    /// What the order of the queues means.
    pub queue_order: QueueOrder,
    /// Jobs that require tags are claimed only when all of them are here.
    pub tags: Vec<String>,
    /// Attempts that run at the same time.
    pub slots: usize,
    /// False: no LISTEN; the poll alone finds jobs.
    pub notify: bool,
    /// The first wait after a look that found nothing.
    pub poll_min: Duration,
    /// The longest wait between two looks.
    pub poll_max: Duration,
    /// A job that has waited for so long goes ahead of newer ones that would be first; none: never.
    pub promote_after: Option<Duration>,
    /// How much of each claim goes to such jobs, percent: 1 to 100.
    pub promote_share: u8,
    /// A job that was lost with its worker this often fails.
    pub lost_max: u32,
    /// Finished jobs are kept for this many days.
    pub keep_days: u32,
    /// How long a slot waits after an attempt before it starts the next one.
    pub job_delay: Duration,
    /// After a stop, how long running attempts may go on.
    pub drain_timeout: Duration,
    /// Jobs from this source run this handler, instead of the one that their producer named.
    pub sources: HashMap<String, String>,
    /// What the operator sets for handlers, over what their modules say.
    pub overrides: Overrides,
    /// How often the worker looks behind its cursors.
    pub intervals: Intervals,
}

/// What the order of the queues means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum QueueOrder {
    /// Within a priority, jobs of the first queue go first.
    #[default]
    Priority,
    /// Nothing of a queue is claimed while an earlier one has ready jobs, whatever their priorities.
    Strict,
}

impl Settings {
    /// Whether slots wait after some attempts.
    pub fn has_job_delay(&self) -> bool {
        let of_handlers = self
            .overrides
            .0
            .values()
            .filter_map(|set| set.time("job_delay"));
        of_handlers
            .chain([self.job_delay])
            .any(|delay| !delay.is_zero())
    }

    /// The handler that runs a job: the one that the operator bound to its source, else the one that its producer named.
    pub fn handler_for<'a>(&'a self, source: Option<&str>, named: &'a str) -> &'a str {
        let bound = source.and_then(|source| self.sources.get(source));
        bound.map_or(named, String::as_str)
    }
}

impl Default for Settings {
    /// All queues, 4 slots a core, notifications on, polls from 5 ms up to 2 s, all of a claim for what has waited 15 minutes, 3 losses,
    /// 7 days, no delay between jobs, 300 s to drain.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        Self {
            worker_id: format!("w-{:016x}", rand::random::<u64>()),
            key: WorkerKey::random(),
            hostname: "unknown".into(),
            queues: Vec::new(),
            queue_order: QueueOrder::Priority,
            tags: Vec::new(),
            slots: 4 * cores,
            notify: true,
            poll_min: Duration::from_millis(5),
            poll_max: Duration::from_secs(2),
            promote_after: Some(Duration::from_secs(15 * 60)),
            promote_share: 100,
            lost_max: 3,
            keep_days: 7,
            job_delay: Duration::ZERO,
            drain_timeout: Duration::from_secs(300),
            sources: HashMap::new(),
            overrides: Overrides::default(),
            intervals: Intervals::default(),
        }
    }
}
