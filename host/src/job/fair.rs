//! The settings by which the jobs of a fair queue share its workers.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

/// The order of the jobs of a priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FairPolicy {
    /// The keys do not count; the lanes take turns.
    Fifo,
    /// The keys share the workers by their weights: deficit round robin.
    Drr,
}

/// The cost of a job for its key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FairCharge {
    /// One turn.
    Jobs,
    /// The CPU time of the last jobs of its lane, compared with other lanes.
    Cpu,
}

/// The value by which the jobs of a queue are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum FairKey {
    /// The tenant.
    Tenant,
    /// The handler.
    Handler,
    /// The source.
    Source,
    /// The tenant and the handler.
    TenantAndHandler,
}

impl FairKey {
    /// Its name in `rouse.queue.fair_key`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tenant => "tenant",
            Self::Handler => "handler",
            Self::Source => "source",
            Self::TenantAndHandler => "tenant-and-handler",
        }
    }

    /// The key of this name in `rouse.queue.fair_key`.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "tenant" => Some(Self::Tenant),
            "handler" => Some(Self::Handler),
            "source" => Some(Self::Source),
            "tenant-and-handler" => Some(Self::TenantAndHandler),
            _ => None,
        }
    }
}

/// The settings of a fair queue: `rouse.set_fair_share`.
#[derive(Debug, Clone, PartialEq)]
pub struct FairShare {
    /// The value by which its jobs are divided.
    pub key: FairKey,
    /// The number of jobs of a key of weight 1 in each round.
    pub quantum: u32,
    /// The weights of some keys.
    pub weights: HashMap<String, f64>,
    /// The weight of all other keys.
    pub default_weight: f64,
    /// Jobs that have waited this long go first; `None`: never.
    pub starvation: Option<Duration>,
    /// The maximum number of running jobs of a key, across all workers; `None` means no limit.
    pub max_in_flight: Option<u32>,
    /// True if the cost of a job for its key is the CPU time of the last jobs of its lane, relative to that of other
    /// lanes. Otherwise a job costs one turn.
    pub charges_cpu: bool,
}

impl FairShare {
    /// The key of the jobs of a lane, from its handler and its values. A missing tenant or source counts as empty, also
    /// in a lane that is divided in a different way.
    pub fn key_of(&self, handler: &str, values: &BTreeMap<String, String>) -> String {
        let value = |by: &str| values.get(by).map_or("", String::as_str);
        match self.key {
            FairKey::Tenant => value("tenant").to_owned(),
            FairKey::Handler => handler.to_owned(),
            FairKey::Source => value("source").to_owned(),
            FairKey::TenantAndHandler => format!("{}/{handler}", value("tenant")),
        }
    }

    /// The turns of a key in each round: its weight times the quantum.
    pub fn turns_of(&self, key: &str) -> f64 {
        let weight = self
            .weights
            .get(key)
            .copied()
            .unwrap_or(self.default_weight);
        weight * f64::from(self.quantum)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(key: &str) -> FairShare {
        FairShare {
            key: FairKey::parse(key).expect("a key"),
            quantum: 2,
            weights: [("acme".to_owned(), 3.0)].into(),
            default_weight: 0.5,
            starvation: None,
            max_in_flight: None,
            charges_cpu: false,
        }
    }

    #[test]
    fn the_key_of_a_job_is_that_by_which_its_queue_is_divided() {
        let keys = |values: &[(&str, &str)]| {
            let values = values
                .iter()
                .map(|(by, value)| ((*by).into(), (*value).into()));
            let values = values.collect();
            ["tenant", "handler", "source", "tenant-and-handler"]
                .map(|key| share(key).key_of("email.send", &values))
        };
        assert_eq!(
            keys(&[("tenant", "a/b"), ("$.n", "1")]),
            ["a/b", "email.send", "", "a/b/email.send"]
        );
        assert_eq!(
            keys(&[("source", "import")]),
            ["", "email.send", "import", "/email.send"]
        );
        assert_eq!(keys(&[]), ["", "email.send", "", "/email.send"]);
        assert_eq!(FairKey::parse("queue"), None);
    }

    #[test]
    fn a_key_gets_its_weight_times_the_quantum() {
        let share = share("tenant");
        assert_eq!(
            [
                share.turns_of("acme"),
                share.turns_of("other"),
                share.turns_of("")
            ],
            [6.0, 1.0, 1.0]
        );
    }
}
