//! The settings of a worker.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use serde::Deserialize;

use super::Overrides;
use crate::store::{NewFairShare, WorkerKey};
use crate::traces::Traces;

/// The settings of a worker. [`Default`] documents the defaults.
#[derive(Debug, Clone)]
pub struct Settings {
    /// 1 to 64 letters, digits, `-` and `_`.
    pub worker_id: String,
    /// The secret that the worker shows with each write. A host that has it may take over the id.
    pub key: WorkerKey,
    /// The machine's name, for listings.
    pub hostname: String,
    /// The queues to serve, in order. Empty means all queues, in no particular order.
    pub queues: Vec<String>,
    /// The meaning of the order of queues.
    pub queue_order: QueueOrder,
    /// The worker's tags. A job that requires tags is claimed only if the worker has all of them.
    pub tags: Vec<String>,
    /// The maximum number of concurrent attempts.
    pub slots: usize,
    /// True if the worker listens for notifications. Otherwise only the poll finds jobs.
    pub notify: bool,
    /// True if the worker fires schedules. False while it drains a single queue.
    pub schedules: bool,
    /// The first wait after a look that found nothing. Lowered to `poll_max` if it is longer.
    pub poll_min: Duration,
    /// The longest wait between two looks.
    pub poll_max: Duration,
    /// A job that has waited this long goes ahead of newer jobs that would otherwise be first. `None` means never.
    pub promote_after: Option<Duration>,
    /// The share of each claim for such jobs, in percent: 1 to 100.
    pub promote_share: u8,
    /// The number of crashes of its workers after which a job fails.
    pub lost_max: u32,
    /// The time that a slot waits after an attempt before it starts the next one.
    pub job_delay: Duration,
    /// The time for which running attempts may continue after a stop.
    pub drain_timeout: Duration,
    /// Handlers by source: jobs from such a source run this handler instead of the one that their producer named.
    pub sources: HashMap<String, String>,
    /// The fair shares of queues, by name. The worker sets them in the database when it starts.
    pub fair_share: BTreeMap<String, NewFairShare>,
    /// The operator's settings for handlers, which override those of their modules.
    pub overrides: Overrides,
    /// How often the worker looks behind its cursors.
    pub intervals: Intervals,
    /// The limits on outcomes that wait for their settlement.
    pub unsettled_limits: UnsettledLimits,
    /// Exports traces of attempts.
    pub traces: Traces,
}

/// The meaning of the order of queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum QueueOrder {
    /// Within a priority, jobs of the first queue go first.
    #[default]
    Priority,
    /// No job of a queue is claimed while an earlier queue has ready jobs, regardless of priority.
    Strict,
}

impl Settings {
    /// True if slots wait after some attempts.
    pub fn has_job_delay(&self) -> bool {
        let by_handler = self
            .overrides
            .0
            .values()
            .filter_map(|set| set.time("job_delay"));
        by_handler
            .chain([self.job_delay])
            .any(|delay| !delay.is_zero())
    }

    /// The handler that runs a job: the handler that the operator bound to its source, or else the one that its
    /// producer named.
    pub fn handler_for<'a>(&'a self, source: Option<&str>, named: &'a str) -> &'a str {
        let bound = source.and_then(|source| self.sources.get(source));
        bound.map_or(named, String::as_str)
    }
}

impl Default for Settings {
    /// All queues, 4 slots per core, notifications on, polls from 5 ms to 2 s, 100 % of each claim for jobs that have
    /// waited for 15 minutes, 3 crashes, no delay between jobs, 300 s to drain.
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
            schedules: true,
            poll_min: Duration::from_millis(5),
            poll_max: Duration::from_secs(2),
            promote_after: Some(Duration::from_secs(15 * 60)),
            promote_share: 100,
            lost_max: 3,
            job_delay: Duration::ZERO,
            drain_timeout: Duration::from_secs(300),
            sources: HashMap::new(),
            fair_share: BTreeMap::new(),
            overrides: Overrides::default(),
            intervals: Intervals::default(),
            unsettled_limits: UnsettledLimits::default(),
            traces: Traces::default(),
        }
    }
}

/// The intervals at which a worker looks behind its cursors, and related times. Tests set these; operators do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intervals {
    /// Turns are assigned before their jobs are committed, and jobs whose turns were assigned within the same few
    /// milliseconds are committed in any order. Without a backlog, looks therefore start from the cursors as they were
    /// this long ago, or up to twice as long ago. So do searches of the newest jobs.
    pub look_back: Duration,
    /// The time between two short sweeps. Jobs that were committed late are found within about two such intervals.
    pub sweep: Duration,
    /// The longest delay of a restart that has a reason, and the shortest interval of periodic restarts. A restart
    /// re-reads all lanes. Also the interval at which the catalog of lanes is re-read.
    pub restart: Duration,
    /// The longest interval of periodic restarts, even if the last one was slow: the server may have been slow only
    /// once.
    pub restart_max: Duration,
    /// The longest time for which a new deadline may pass unnoticed while the slots of all hosts are taken.
    pub deadlines: Duration,
    /// The time between two searches for jobs in inboxes of workers that no longer take them.
    pub recovery: Duration,
    /// The time after its last heartbeat after which a worker stops trusting its leases. Not longer than the time in
    /// `rouse.heartbeat` (`migrations/functions/workers.sql`) after which the worker is declared dead.
    pub silence: Duration,
}

impl Default for Intervals {
    /// 0.1 s, 1 s, 30 s, 5 minutes, 15 s, 2 minutes, 90 s.
    fn default() -> Self {
        Self {
            look_back: Duration::from_millis(100),
            sweep: Duration::from_secs(1),
            restart: Duration::from_secs(30),
            restart_max: Duration::from_secs(300),
            deadlines: Duration::from_secs(15),
            recovery: Duration::from_secs(120),
            silence: Duration::from_secs(90),
        }
    }
}

/// The limits on outcomes that wait for their settlement. Further attempts keep their slots until their outcomes fit.
/// Tests set these; operators do not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnsettledLimits {
    /// The maximum number of outcomes that wait for the settler, and separately of those that it has tried and keeps.
    pub count: usize,
    /// The maximum number of bytes of all large outcomes that are not settled. A larger outcome waits until it is the
    /// only one.
    pub bytes: u32,
    /// An outcome that locks of other transactions have blocked for this long is given up if others need its space.
    pub blocked: Duration,
}

impl Default for UnsettledLimits {
    /// 4000 outcomes, 256 MiB, 10 s.
    fn default() -> Self {
        Self {
            count: 4000,
            bytes: 256 << 20,
            blocked: Duration::from_secs(10),
        }
    }
}
