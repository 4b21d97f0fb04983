//! Gates that modules declare for their handlers.

use serde::{Deserialize, Serialize};

/// A gate. It is serialised with the keys of a manifest, which `rouse.declare_gates` takes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DeclaredGate {
    /// The limit.
    #[serde(flatten)]
    pub limit: GateLimit,
    /// The values that divide jobs, so that each combination has a limit of its own: `tenant`, `source`, `handler`,
    /// `queue`, or a path in the payload such as `$.customer.id`. If empty, there is one limit for all jobs of the
    /// handler.
    pub key: Vec<String>,
}

/// The limit of a gate, by its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum GateLimit {
    /// The number of jobs of a key that run at the same time, across all workers.
    MaxConcurrent {
        /// The maximum.
        max: u32,
    },
    /// The number of jobs of a key that start in a period.
    Throttle {
        /// The maximum; with a burst, on average.
        max: u32,
        /// The period, in milliseconds.
        period_ms: u64,
        /// The number that may start at once after a pause.
        #[serde(skip_serializing_if = "Option::is_none")]
        burst: Option<u32>,
    },
    /// Jobs of a key start together, in one attempt.
    Batch {
        /// The maximum size of a batch.
        max: u32,
        /// The time that the first job waits for others, in milliseconds. `None`: it does not wait.
        #[serde(skip_serializing_if = "Option::is_none")]
        period_ms: Option<u64>,
    },
    /// While there is a job of a key, no other job of the key is enqueued.
    Singleton {
        /// The time for which the job counts.
        during: During,
        /// The period of [`During::Period`], in milliseconds.
        #[serde(skip_serializing_if = "Option::is_none")]
        period_ms: Option<u64>,
        /// The result of an enqueue during that time.
        on_conflict: OnConflict,
    },
    /// A burst of jobs of a key becomes one job.
    Debounce {
        /// The pause that ends a burst, in milliseconds.
        period_ms: u64,
        /// The maximum duration of a burst, in milliseconds. `None`: no limit.
        #[serde(skip_serializing_if = "Option::is_none")]
        max_wait_ms: Option<u64>,
        /// The job of a burst that runs.
        edge: Edge,
    },
}

/// The time for which a job keeps others of its key out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum During {
    /// Until it has started.
    #[default]
    Queued,
    /// Until it has ended.
    Running,
    /// For a period after it was enqueued.
    Period,
}

/// The result of an enqueue while a job of its key keeps others out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnConflict {
    /// Nothing is enqueued: the earlier job is kept.
    #[default]
    Keep,
    /// The earlier job gets the payload of the new job, unless it has started.
    Replace,
    /// The enqueue fails with an error.
    Refuse,
}

/// The job of a burst that runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Edge {
    /// The last one, after the burst.
    #[default]
    Trailing,
    /// The first one, at once.
    Leading,
}

impl GateLimit {
    /// The kind, as in the database.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::MaxConcurrent { .. } => "max_concurrent",
            Self::Throttle { .. } => "throttle",
            Self::Batch { .. } => "batch",
            Self::Singleton { .. } => "singleton",
            Self::Debounce { .. } => "debounce",
        }
    }
}

/// The names that these gates of a handler get in the database (`rouse._declared_gates`): `mail.send/throttle`, and
/// `mail.send/throttle.2` for the second one of a kind.
pub fn names(handler: &str, gates: &[DeclaredGate]) -> Vec<String> {
    let name = |(at, gate): (usize, &DeclaredGate)| {
        let kind = gate.limit.kind();
        let earlier = gates[..at].iter();
        match earlier
            .filter(|earlier| earlier.limit.kind() == kind)
            .count()
        {
            0 => format!("{handler}/{kind}"),
            count => format!("{handler}/{kind}.{}", count + 1),
        }
    };
    gates.iter().enumerate().map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_gates_of_a_kind_are_numbered() {
        let gate = |limit| DeclaredGate {
            limit,
            key: Vec::new(),
        };
        let running = gate(GateLimit::MaxConcurrent { max: 1 });
        let burst = gate(GateLimit::Debounce {
            period_ms: 1,
            max_wait_ms: None,
            edge: Edge::Leading,
        });
        assert_eq!(
            names("a.b", &[running.clone(), burst, running.clone(), running]),
            [
                "a.b/max_concurrent",
                "a.b/debounce",
                "a.b/max_concurrent.2",
                "a.b/max_concurrent.3"
            ]
        );
    }
}
