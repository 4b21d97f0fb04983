//! Flows, and the actions on each of them after its enqueue.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::load::{JobSpec, Kind, QUEUES, WORK};
use super::random::Random;

/// Above the numbers of all producers, and below those of the jobs that attempts enqueue.
const START: i64 = 500_000_000_000;
/// Distance between the first numbers of two flows.
const STRIDE: i64 = 100;
/// The jobs between the first and the last of a fan.
const FAN_MAX: u64 = 18;
/// There are few unique keys, so that flows share jobs. No other job has these keys.
const KEYS: u64 = 3;
/// The number of consecutive flows that share these keys. The flows after them use other keys: a job that waits for the
/// retry of a hopeless one keeps its key, and each flow that uses this job waits too.
const KEYS_LAST: i64 = 20;

/// The effect of a job's failure on a job that waits for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum OnFailure {
    #[default]
    Cancel,
    Run,
    Wait,
}

/// A job that another job waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Edge {
    /// Its place in the flow.
    pub(super) from: usize,
    pub(super) on_failure: OnFailure,
}

/// A job of a flow.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Node {
    pub(super) spec: JobSpec,
    pub(super) after: Vec<Edge>,
}

/// A flow as it is enqueued: each job comes after those that it waits for.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct FlowSpec {
    pub(super) nodes: Vec<Node>,
    /// Whether the enqueueing transaction is rolled back.
    pub(super) rolled_back: bool,
    /// The caller disconnects after this many microseconds, with or without a response.
    pub(super) hangs_up_us: Option<u64>,
}

/// The actions on a flow after its enqueue.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Plan {
    /// It is cancelled after this time.
    pub(super) cancel_ms: Option<u64>,
    /// The number of times that it is retried, if it has not succeeded by then.
    pub(super) retries: u32,
    /// The number of jobs that one call cancels or retries.
    pub(super) max: i32,
    /// The first call of each retry does not wait for a response for longer than this many microseconds.
    pub(super) hangs_up_us: Option<u64>,
    /// Whether it is deleted in the end.
    pub(super) deletes: bool,
}

impl FlowSpec {
    /// The flow with this index. Some jobs fail for the first seconds after `now_us`.
    pub(super) fn nth(seed: u64, index: i64, now_us: i64) -> Self {
        let mut random = Random::new(seed, &format!("flow {index}"));
        let parents: Vec<Vec<usize>> = match random.below(3) {
            0 => vec![vec![], vec![0], vec![0], vec![1, 2]],
            1 => (0..random.between(3, 6))
                .map(|nth| (nth as usize).checked_sub(1).into_iter().collect())
                .collect(),
            _ => {
                let width = random.between(1, FAN_MAX) as usize;
                let mut fan = vec![vec![]];
                fan.extend((0..width).map(|_| vec![0]));
                fan.push((1..=width).collect());
                fan
            }
        };
        let mut nodes: Vec<Node> = (START + index * STRIDE..)
            .zip(&parents)
            .map(|(n, parents)| Node {
                spec: spec(&mut random, n),
                after: edges(&mut random, parents),
            })
            .collect();
        let place = |random: &mut Random| random.below(parents.len() as u64) as usize;
        if random.per_mille(700) {
            let failing = &mut nodes[place(&mut random)].spec;
            failing.hopeless = random.per_mille(300);
            if !failing.hopeless {
                let fails_us = random.between(1_000, 5_000) as i64 * 1000;
                failing.fails_until_us = Some(now_us + fails_us);
            }
        }
        if random.per_mille(250) {
            let key = format!("flow-{}-{}", index / KEYS_LAST, random.below(KEYS));
            nodes[place(&mut random)].spec.unique_key = Some(key);
        }
        Self {
            nodes,
            rolled_back: random.per_mille(50),
            hangs_up_us: random.per_mille(50).then(|| random.between(100, 8_000)),
        }
    }

    /// The argument of `rouse.enqueue_flow`.
    pub(super) fn argument(&self) -> Value {
        let jobs = self.nodes.iter().enumerate().map(|(place, node)| {
            let spec = &node.spec;
            let after = node.after.iter().map(|edge| {
                let entry = json!({"job": name(edge.from), "on_failure": edge.on_failure});
                (name(edge.from), entry)
            });
            json!({
                "name": name(place),
                "handler": spec.handler,
                "payload": spec.payload(),
                "queue": spec.queue,
                "priority": spec.priority,
                "tags": spec.tags,
                "unique_key": spec.unique_key,
                "max_attempts": spec.max_attempts,
                "after": after.collect::<serde_json::Map<_, _>>(),
            })
        });
        jobs.collect()
    }
}

impl Plan {
    /// The actions on the flow with this index.
    pub(super) fn nth(seed: u64, index: i64) -> Self {
        let mut random = Random::new(seed, &format!("plan of flow {index}"));
        Self {
            cancel_ms: random.per_mille(300).then(|| random.below(2_500)),
            retries: *random.pick(&[0, 1, 1, 2]),
            max: *random.pick(&[1, 3, 1_000]),
            hangs_up_us: random.per_mille(300).then(|| random.between(100, 8_000)),
            deletes: random.per_mille(500),
        }
    }
}

/// The name of a job in its flow.
fn name(place: usize) -> String {
    format!("job {place}")
}

fn spec(random: &mut Random, n: i64) -> JobSpec {
    JobSpec {
        n,
        kind: Kind::IsInFlow,
        handler: WORK.into(),
        queue: (*random.pick(&QUEUES)).into(),
        priority: (*random.pick(&["high", "normal", "normal", "low"])).into(),
        sleep_ms: random.below(600),
        fail_attempts: u32::from(random.per_mille(50)),
        ..JobSpec::default()
    }
}

fn edges(random: &mut Random, parents: &[usize]) -> Vec<Edge> {
    let kinds = [
        OnFailure::Cancel,
        OnFailure::Cancel,
        OnFailure::Run,
        OnFailure::Wait,
    ];
    let edges = parents.iter().map(|from| Edge {
        from: *from,
        on_failure: *random.pick(&kinds),
    });
    edges.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_have_every_shape_every_kind_of_edge_and_no_duplicate_number() {
        let flows: Vec<_> = (0..300).map(|index| FlowSpec::nth(1, index, 7)).collect();
        assert_eq!(flows[5], FlowSpec::nth(1, 5, 7));
        let sizes: Vec<_> = flows.iter().map(|flow| flow.nodes.len()).collect();
        assert_eq!(
            (sizes.iter().min(), sizes.iter().max()),
            (Some(&3), Some(&20))
        );
        let nodes: Vec<_> = flows.iter().flat_map(|flow| &flow.nodes).collect();
        let numbers: std::collections::HashSet<_> = nodes.iter().map(|node| node.spec.n).collect();
        assert_eq!(numbers.len(), nodes.len());
        for kind in [OnFailure::Cancel, OnFailure::Run, OnFailure::Wait] {
            let mut edges = nodes.iter().flat_map(|node| &node.after);
            assert!(edges.any(|edge| edge.on_failure == kind), "{kind:?}");
        }
        let has = |test: fn(&JobSpec) -> bool| nodes.iter().any(|node| test(&node.spec));
        assert!(has(|spec| spec.hopeless) && has(|spec| spec.unique_key.is_some()));
        assert!(has(|spec| spec
            .fails_until_us
            .is_some_and(|us| us > 1_000_000)));
        assert!(flows.iter().any(|flow| flow.rolled_back));
        for flow in &flows {
            let keyed = flow.nodes.iter().filter(|n| n.spec.unique_key.is_some());
            // Two of them could be the same job.
            assert!(keyed.count() <= 1);
            for (place, node) in flow.nodes.iter().enumerate() {
                assert!(node.after.iter().all(|edge| edge.from < place));
            }
        }
    }

    #[test]
    fn a_key_is_shared_only_by_flows_that_follow_each_other() {
        let mut users = std::collections::HashMap::<String, Vec<i64>>::new();
        for index in 0..300 {
            for node in FlowSpec::nth(1, index, 7).nodes {
                if let Some(key) = node.spec.unique_key {
                    users.entry(key).or_default().push(index);
                }
            }
        }
        assert!(users.values().any(|flows| flows.len() > 1));
        for (key, flows) in users {
            let (first, last) = (flows[0], flows[flows.len() - 1]);
            assert!(last - first < KEYS_LAST, "{key}: {flows:?}");
        }
    }

    #[test]
    fn an_argument_names_the_jobs_that_a_job_waits_for() {
        let edge = Edge {
            from: 0,
            on_failure: OnFailure::Wait,
        };
        let waits = Node {
            after: vec![edge],
            ..Node::default()
        };
        let flow = FlowSpec {
            nodes: vec![Node::default(), waits],
            ..FlowSpec::default()
        };
        let argument = flow.argument();
        assert_eq!(argument[0]["name"], "job 0");
        assert_eq!(argument[0]["after"], json!({}));
        let after = json!({"job 0": {"job": "job 0", "on_failure": "wait"}});
        assert_eq!(argument[1]["after"], after);
    }

    #[test]
    fn plans_cancel_retry_and_delete() {
        let plans: Vec<_> = (0..100).map(|index| Plan::nth(1, index)).collect();
        assert_eq!(plans[5], Plan::nth(1, 5));
        let has = |test: fn(&Plan) -> bool| plans.iter().any(test);
        assert!(has(|plan| plan.cancel_ms.is_some() && plan.retries > 0));
        assert!(has(|plan| plan.cancel_ms.is_none() && plan.retries == 2));
        assert!(has(|plan| plan.max == 1 && plan.hangs_up_us.is_some()));
        assert!(has(|plan| plan.deletes) && has(|plan| !plan.deletes));
    }
}
