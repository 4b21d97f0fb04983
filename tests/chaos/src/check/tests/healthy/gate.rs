//! Jobs behind gates in the healthy world, which use exactly as much as their gates permit.

use super::super::super::super::gates::{GateKind, Gated};
use super::super::super::super::ledger::{Request, Response};
use super::super::super::super::load::{GATED, JobSpec};
use super::{A, B, Builder, S};

/// Two run at a time, and the last one is claimed a period after the first one.
pub(crate) const LIMITED: [i64; 7] = [50, 51, 52, 53, 54, 55, 56];
/// The second one was enqueued after the start of the first one, which had kept another job out until then.
pub(crate) const QUEUED: [i64; 2] = [57, 58];
/// The second one was enqueued when the first one had ended.
pub(crate) const RUNNING: [i64; 2] = [59, 60];
/// Two enqueues were merged into this job.
pub(crate) const CALM: i64 = 61;

/// A job with keys that no other job has.
pub(crate) fn spec(id: i64, door: GateKind) -> JobSpec {
    let gated = Gated {
        door,
        tenant: format!("tenant-{id}"),
        api: format!("api-{id}"),
        doc: "doc-0".into(),
    };
    JobSpec {
        n: id * 100,
        handler: GATED.into(),
        queue: door.queue().into(),
        tenant: Some(gated.tenant.clone()),
        gated: Some(gated),
        ..JobSpec::default()
    }
}

impl Builder {
    fn gated(&mut self, id: i64, at_us: i64, spec: JobSpec) {
        let (handler, queue) = (spec.handler.clone(), spec.queue.clone());
        self.job(id, at_us, spec);
        let call = self.0.calls.last_mut().expect("it was enqueued");
        if let Request::Enqueue { spec, .. } = &mut call.request {
            spec.handler.clone_from(&handler);
            spec.queue.clone_from(&queue);
        }
        let job = self.of(id);
        (job.handler, job.queue) = (handler, queue);
    }

    /// An enqueue that returned this job, which an earlier enqueue had created.
    fn merged(&mut self, id: i64, n: i64, at_us: i64, spec: JobSpec) {
        let spec = JobSpec { n, ..spec };
        let request = Request::Enqueue {
            spec,
            run_at_us: None,
        };
        self.call(at_us, request, Response::Ok(id));
    }
}

pub(super) fn add(b: &mut Builder) {
    let claims_ms = [
        400_000, 400_000, 401_000, 401_000, 402_000, 402_000, 404_000,
    ];
    for (id, claimed_ms) in LIMITED.into_iter().zip(claims_ms) {
        let mut spec = spec(LIMITED[0], GateKind::Queued);
        let gated = spec.gated.as_mut().expect("it passes gates");
        gated.doc = format!("doc-{id}");
        b.gated(id, 399 * S, spec);
        b.start(id, 1, if id % 2 == 0 { A } else { B }, claimed_ms * 1000);
        b.succeed(id, claimed_ms * 1000 + 500_000);
    }

    let queued = || spec(QUEUED[0], GateKind::Queued);
    b.gated(QUEUED[0], 410 * S, queued());
    b.merged(QUEUED[0], 9_101, 411 * S, queued());
    b.start(QUEUED[0], 1, A, 412 * S);
    b.gated(QUEUED[1], 413 * S, queued());
    b.succeed(QUEUED[0], 414 * S);
    b.start(QUEUED[1], 1, A, 415 * S);
    b.succeed(QUEUED[1], 416 * S);

    for (id, at) in RUNNING.into_iter().zip([420, 430]) {
        b.gated(id, at * S, spec(RUNNING[0], GateKind::Running));
        b.start(id, 1, A, (at + 1) * S);
        b.succeed(id, (at + 2) * S);
    }

    let calm = || spec(CALM, GateKind::Calm);
    // The first one, whose payload is no longer there.
    b.merged(CALM, 9_102, 440 * S - S, calm());
    b.gated(CALM, 440 * S, calm());
    b.of(CALM).requested_us = 440 * S - S;
    b.start(CALM, 1, A, 442 * S);
    b.succeed(CALM, 443 * S);
}
