//! Flows in the healthy world: one was retried, one cancelled and one deleted, and one waits for a retry at the end.

use serde_json::{Value, json};

use super::super::super::super::flows::{Edge, FlowSpec, Node, OnFailure};
use super::super::super::super::ledger::{Request, Response};
use super::super::super::super::load::{JobSpec, Kind, WORK};
use super::super::super::super::world::{Dependency, Job};
use super::{A, B, Builder, S, nonce};

/// A diamond, of which the second job failed and the last job was cancelled because of that.
pub(crate) const DIAMOND: [i64; 4] = [70, 71, 72, 73];
/// The retries of the second and the last job of [`DIAMOND`].
pub(crate) const REPEATED: [i64; 2] = [74, 75];
/// The first one ran when its flow was cancelled, and the second one waited for it.
pub(crate) const STOPPED_FLOW: [i64; 2] = [80, 81];
/// The second one waited for a retry of the first one when its flow was deleted.
pub(crate) const DELETED: [i64; 2] = [82, 83];
/// The second job waits for a retry of the first job at the end of the run.
pub(crate) const HELD: [i64; 2] = [84, 85];
/// The ids of these flows.
pub(crate) const FLOWS: [i64; 4] = [7_001, 7_002, 7_003, 7_004];

fn node(id: i64, after: &[(usize, OnFailure)]) -> Node {
    let edges = after.iter().map(|(from, on_failure)| Edge {
        from: *from,
        on_failure: *on_failure,
    });
    Node {
        spec: JobSpec {
            n: id * 100,
            kind: Kind::IsInFlow,
            handler: WORK.into(),
            queue: "default".into(),
            ..JobSpec::default()
        },
        after: edges.collect(),
    }
}

impl Builder {
    /// Adds a flow whose jobs have these ids and are queued.
    fn flow(&mut self, flow: i64, ids: &[i64], nodes: Vec<Node>, at_us: i64) {
        for (id, node) in ids.iter().zip(&nodes) {
            let after = node.after.iter().map(|edge| {
                let entry = match edge.on_failure {
                    OnFailure::Cancel => json!(ids[edge.from]),
                    OnFailure::Run => json!({"job": ids[edge.from], "on_failure": "run"}),
                    OnFailure::Wait => json!({"job": ids[edge.from], "on_failure": "wait"}),
                };
                (format!("job {}", edge.from), entry)
            });
            let after: serde_json::Map<String, Value> = after.collect();
            self.0.jobs.push(Job {
                id: *id,
                queue: "default".into(),
                handler: WORK.into(),
                state: "queued".into(),
                n: node.spec.n,
                chain: *id,
                after: (!after.is_empty()).then_some(Value::Object(after)),
                requested_us: at_us + 500,
                available_us: at_us + 500,
                ..Job::default()
            });
        }
        let spec = FlowSpec {
            nodes,
            ..FlowSpec::default()
        };
        self.call(at_us, Request::EnqueueFlow { spec }, Response::Ok(flow));
    }

    fn fails(&mut self, id: i64, claimed_us: i64) {
        self.start(id, 1, A, claimed_us);
        let details = json!({"attempt": 1, "nonce": nonce(id, 1)});
        let error = json!({"kind": "guest_error", "guest_kind": "hopeless", "details": details});
        self.end(id, "failed", error, claimed_us + S);
    }

    fn repeated(&mut self, id: i64, was: i64, at_us: i64) {
        let was = self.of(was).clone();
        self.0.jobs.push(Job {
            id,
            state: "queued".into(),
            retried_from: Some(was.id),
            requested_us: at_us,
            available_us: at_us,
            attempt: 0,
            worker: None,
            claimed_us: None,
            finished_us: None,
            cancelled_after: None,
            error: None,
            ..was
        });
    }
}

fn add_diamond(b: &mut Builder) {
    use OnFailure::{Cancel, Run};
    let mut nodes = vec![
        node(DIAMOND[0], &[]),
        node(DIAMOND[1], &[(0, Cancel)]),
        node(DIAMOND[2], &[(0, Run)]),
        node(DIAMOND[3], &[(1, Cancel), (2, Cancel)]),
    ];
    nodes[1].spec.fails_until_us = Some(510 * S);
    b.flow(FLOWS[0], &DIAMOND, nodes, 500 * S);
    b.start(DIAMOND[0], 1, A, 501 * S);
    b.succeed(DIAMOND[0], 502 * S);
    b.fails(DIAMOND[1], 503 * S);
    b.start(DIAMOND[2], 1, B, 503 * S);
    b.succeed(DIAMOND[2], 504 * S);
    b.end(DIAMOND[3], "cancelled", json!(null), 504 * S);
    b.of(DIAMOND[3]).cancelled_after = Some(DIAMOND[1]);

    for (at_us, count) in [(520 * S, 2), (520 * S + 10_000, 0)] {
        let request = Request::RetryFlow {
            flow: FLOWS[0],
            before_us: 519 * S,
        };
        b.call(at_us, request, Response::Ok(count));
    }
    b.repeated(REPEATED[0], DIAMOND[1], 520 * S + 500);
    b.repeated(REPEATED[1], DIAMOND[3], 520 * S + 500);
    for (id, at) in REPEATED.into_iter().zip([521, 523]) {
        b.start(id, 1, A, at * S);
        b.succeed(id, (at + 1) * S);
    }
}

pub(super) fn add(b: &mut Builder) {
    add_diamond(b);

    let nodes = vec![
        node(STOPPED_FLOW[0], &[]),
        node(STOPPED_FLOW[1], &[(0, OnFailure::Run)]),
    ];
    b.flow(FLOWS[1], &STOPPED_FLOW, nodes, 528 * S);
    b.start(STOPPED_FLOW[0], 1, A, 529 * S);
    for (at_us, count) in [(530 * S, 2), (530 * S + 10_000, 0)] {
        let request = Request::CancelFlow { flow: FLOWS[1] };
        b.call(at_us, request, Response::Ok(count));
    }
    for id in STOPPED_FLOW {
        b.end(id, "cancelled", json!(null), 530 * S + 500);
    }

    for (flow, ids) in [(FLOWS[2], DELETED), (FLOWS[3], HELD)] {
        let mut nodes = vec![node(ids[0], &[]), node(ids[1], &[(0, OnFailure::Wait)])];
        nodes[0].spec.hopeless = true;
        b.flow(flow, &ids, nodes, 535 * S);
        b.fails(ids[0], 536 * S);
    }
    let request = Request::DeleteFlow { flow: FLOWS[2] };
    b.call(540 * S, request, Response::Ok(1));
    b.end(DELETED[1], "cancelled", json!(null), 540 * S + 500);
    b.of(HELD[1]).is_waiting = true;
    b.0.dependencies.push(Dependency {
        job: HELD[1],
        chain: HELD[0],
    });
}
