//! Whether a singleton keeps other jobs of its key out.

use std::collections::{BTreeMap, HashMap};

use super::super::gates::{GateKind, Gated};
use super::super::ledger::{Request, Response};
use super::super::world::{Call, Job};
use super::{Found, Known, keys, limits};

/// A settlement takes effect when it commits, a moment after the time that it records.
const COMMITS_WITHIN_US: i64 = 1_000_000;
/// Allowed in addition to the lease until the claims of a host that does not respond have ended.
const LATE_US: i64 = 2_000_000;

/// While a job of a key waits, or has not ended, no other job of that key is enqueued. Retries of ended jobs do not
/// pass through singletons.
pub(super) fn hold(known: &Known<'_>) -> Found {
    let mut found = waiting(known);
    let until_ended = |job: &Job, gated: &Gated| {
        let is_counted = gated.door == GateKind::Running && job.retried_from.is_none();
        is_counted.then(|| (gated.tenant.clone(), gated.doc.clone()))
    };
    let live = keys::one_at_a_time(known, |job| {
        until_ended(job, known.spec(job)?.gated.as_ref()?)
    });
    found.add(live);
    found.add(limits::at_once(known, 1, until_ended));
    found
}

/// The singleton that is closed while its job waits. A case is an enqueue that returned an earlier job, or should have.
fn waiting(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut jobs: BTreeMap<(&str, &str), Vec<&Job>> = BTreeMap::new();
    for (job, gated) in known.gated() {
        if gated.door == GateKind::Queued && job.retried_from.is_none() {
            jobs.entry(gated.door_key()).or_default().push(job);
        }
    }
    let enqueues = enqueues(known);
    for (key, mut jobs) in jobs {
        jobs.sort_by_key(|job| (job.requested_us, job.id));
        for (nth, job) in jobs.iter().enumerate() {
            let calls = enqueues.get(&job.id).map_or(&[][..], Vec::as_slice);
            let (own, others): (Vec<&Call>, Vec<&Call>) =
                calls.iter().partition(|call| enqueues_itself(call, job));
            for _ in others {
                found.case(job.id, false, String::new);
            }
            // Without the response to its enqueue, it is not known when the job was enqueued.
            let ([own], Some(earlier)) = (&own[..], nth.checked_sub(1).map(|nth| jobs[nth])) else {
                continue;
            };
            let kept_out = waits(known, &enqueues, earlier, own, jobs.get(nth + 1).copied());
            if kept_out {
                found.case(job.id, true, || {
                    format!(
                        "job {} with {key:?} was enqueued while job {} waited",
                        job.id, earlier.id
                    )
                });
            }
        }
    }
    found
}

/// Whether this job certainly waited during the whole call that enqueued another job. `next`: the job after that one.
fn waits(
    known: &Known<'_>,
    enqueues: &HashMap<i64, Vec<&Call>>,
    job: &Job,
    call: &Call,
    next: Option<&Job>,
) -> bool {
    let id = job.id;
    // A claim that was given back is recorded nowhere else, and the job did not wait until then.
    let gone_us = call.answered_us + known.world.run.lease_us + LATE_US;
    let mut records = known.records(id).iter();
    let given_back =
        records.any(|r| r.event == "released" && (call.sent_us..=gone_us).contains(&r.at_us));
    // A singleton considers only the last job that it let through.
    let overtaken = next.is_some_and(|next| next.requested_us <= call.answered_us);
    let responses = enqueues.get(&id).into_iter().flatten();
    let Some(enqueued_us) = responses.map(|call| call.answered_us).min() else {
        return false;
    };
    if given_back || overtaken {
        return false;
    }
    let attempts = known.attempts(id);
    let claims = attempts.iter().map(|attempt| attempt.claimed_us);
    let ends: Vec<i64> = claims
        .chain(job.claimed_us)
        .chain(job.finished_us)
        .collect();
    let retries = attempts.iter().map(|attempt| attempt.ended_us);
    let mut starts = std::iter::once((job.requested_us, enqueued_us))
        .chain(retries.map(|ended_us| (ended_us, ended_us + COMMITS_WITHIN_US)));
    starts.any(|(from_us, sure_us)| {
        let claimed_us = ends.iter().copied().filter(|at| *at >= from_us).min();
        sure_us <= call.sent_us && claimed_us.is_none_or(|at| at >= call.answered_us)
    })
}

/// The enqueues that were answered with the id of each job.
fn enqueues<'a>(known: &Known<'a>) -> HashMap<i64, Vec<&'a Call>> {
    let mut enqueues: HashMap<i64, Vec<&Call>> = HashMap::new();
    for call in &known.world.calls {
        if let (Request::Enqueue { .. }, Response::Ok(id)) = (&call.request, &call.response) {
            enqueues.entry(*id).or_default().push(call);
        }
    }
    enqueues
}

/// Whether this call created the job, and not an earlier call.
fn enqueues_itself(call: &Call, job: &Job) -> bool {
    matches!(&call.request, Request::Enqueue { spec, .. } if spec.n == job.n)
}
