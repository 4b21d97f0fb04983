//! Gates of a run, and the keys of the jobs behind them.
//!
//! All jobs of the handler pass two gates when they are claimed, whatever their queue is: one limits how many jobs of a
//! tenant run, and the other limits how many jobs of two tenants start. Each queue also has a gate of its own, which
//! acts when a job is enqueued.

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use tokio_postgres::Client;

use super::load::GATED;
use super::random::Random;

/// The maximum number of jobs of a tenant that run at the same time.
pub(super) const RUNNING_MAX: usize = 2;
/// The maximum number of jobs of an API that start in a period. Two tenants share an API, and want to start more than
/// that, so that jobs wait for this gate as well as for the other gate.
pub(super) const STARTS_MAX: usize = 6;
pub(super) const STARTS_PERIOD_US: i64 = 4_000_000;
/// A burst ends when no job has been enqueued for the first of these times, or when it has lasted for the second.
pub(super) const BURST_PERIOD_US: i64 = 2_000_000;
pub(super) const BURST_MAX_WAIT_US: i64 = 5_000_000;
/// Less than `keyed_lanes_max` with three queues and two priorities, so that no two keys share a lane.
const TENANTS: u64 = 1_000;
/// At any moment, the jobs belong to only a few tenants, so that they compete.
const TENANTS_AT_ONCE: u64 = 6;
/// After this many jobs of a producer, five of these tenants are replaced: the jobs that wait for their gates can then
/// run, and a long run has many keys.
const REPLACED_AFTER: u64 = 300;
const REPLACED: u64 = 5;
const DOCS: u64 = 2;

/// The gate of a queue that acts when a job is enqueued.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum GateKind {
    /// A singleton that keeps others out while it waits.
    #[default]
    Queued,
    /// A singleton that keeps others out until it has ended.
    Running,
    /// A trailing debounce.
    Calm,
}

/// The keys of a job behind gates, besides its tenant.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Gated {
    pub(super) door: GateKind,
    pub(super) tenant: String,
    pub(super) api: String,
    pub(super) doc: String,
}

impl GateKind {
    pub(super) const ALL: [Self; 3] = [Self::Queued, Self::Running, Self::Calm];

    /// The queue behind this gate.
    pub(super) fn queue(self) -> &'static str {
        match self {
            Self::Queued => "gated-queued",
            Self::Running => "gated-running",
            Self::Calm => "gated-calm",
        }
    }

    /// The arguments of `rouse.set_gate`.
    fn gate(self) -> String {
        match self {
            Self::Queued => "'singleton', during => 'queued'".into(),
            Self::Running => "'singleton', during => 'running'".into(),
            Self::Calm => format!(
                "'debounce', period => '{BURST_PERIOD_US} us', max_wait => '{BURST_MAX_WAIT_US} us'"
            ),
        }
    }
}

impl Gated {
    /// The keys of the job with this index of a producer. All producers use the same keys at about the same time.
    pub(super) fn draw(random: &mut Random, index: u32) -> Self {
        let first = u64::from(index) / REPLACED_AFTER * REPLACED;
        let tenant = (first + random.below(TENANTS_AT_ONCE)) % TENANTS;
        Self {
            door: *random.pick(&[
                GateKind::Queued,
                GateKind::Queued,
                GateKind::Running,
                GateKind::Calm,
            ]),
            tenant: format!("tenant-{tenant}"),
            api: format!("api-{}", tenant / 2),
            doc: format!("doc-{}", random.below(DOCS)),
        }
    }

    /// The key of the gate that acts when this job is enqueued.
    pub(super) fn door_key(&self) -> (&str, &str) {
        (&self.tenant, &self.doc)
    }
}

/// Sets the gates.
pub(super) async fn create(client: &Client) -> Result<()> {
    let period = STARTS_PERIOD_US;
    let mut sql = format!(
        "SELECT rouse.set_gate('chaos-running', 'max_concurrent', handler => '{GATED}',
                               key => '{{tenant}}', max => {RUNNING_MAX});
         SELECT rouse.set_gate('chaos-starts', 'throttle', handler => '{GATED}',
                               key => '{{$.api}}', max => {STARTS_MAX}, period => '{period} us');"
    );
    for door in GateKind::ALL {
        let (queue, gate) = (door.queue(), door.gate());
        sql.push_str(&format!(
            "SELECT rouse.set_gate('{queue}', {gate}, handler => '{GATED}', queue => '{queue}',
                                   key => '{{$.doc}}');"
        ));
    }
    client.batch_execute(&sql).await.context("set the gates")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn few_tenants_compete_at_a_time_and_a_long_run_has_many() {
        let mut random = Random::new(1, "gates");
        let mut draw = |indexes: std::ops::Range<u32>| -> BTreeSet<String> {
            indexes
                .map(|index| Gated::draw(&mut random, index).tenant)
                .collect()
        };
        assert_eq!(draw(0..300).len(), 6);
        // 30 minutes at 30 jobs a second of each producer.
        let all = draw(0..54_000).len() as u64;
        assert!((900..=TENANTS).contains(&all), "{all}");
    }
}
