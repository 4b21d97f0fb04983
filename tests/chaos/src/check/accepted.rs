//! Whether every accepted job exists, and no other job.

use std::collections::{BTreeSet, HashSet};

use super::super::ledger::{Request, Response};
use super::super::suspending::{Part, Suspending};
use super::{Found, Known};

/// Every accepted job and retry exists, exactly once.
pub(super) fn kept(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for call in &known.world.calls {
        let (Response::Ok(id), Request::Enqueue { spec, .. }) = (&call.response, &call.request)
        else {
            if let (Response::Ok(id), Request::Retry { job }) = (&call.response, &call.request) {
                let chains: Vec<i64> = known.rows(*job).iter().map(|row| row.chain).collect();
                // The live job of the chain, if an earlier retry continues it.
                let there = known.rows(*id).iter().any(|row| {
                    row.retried_from == Some(*job)
                        || (Part::of(row.n) == Some(Part::Next) && chains.contains(&row.chain))
                });
                found.case(*id, !there, || {
                    format!("the retry {id} of job {job} does not exist")
                });
            }
            continue;
        };
        let there = known.rows(*id).iter().any(|row| {
            row.handler == spec.handler
                && match (&spec.unique_key, &spec.gated) {
                    (None, None) => row.n == spec.n && row.queue == spec.queue,
                    // The id may be that of the job of another enqueue with the same key and tenant.
                    (None, Some(gated)) => {
                        let of_row = known.spec(row).and_then(|spec| spec.gated.as_ref());
                        row.queue == spec.queue
                            && of_row.is_some_and(|of_row| of_row.door_key() == gated.door_key())
                    }
                    (key, _) => row.unique_key == *key && row.tenant == spec.tenant,
                }
        });
        let times = ids_of(known, spec.n).len();
        found.case(*id, !there || times > 1, || {
            format!(
                "job {id} (n = {}) was accepted, but {} and was created {times} times",
                spec.n,
                if there { "exists" } else { "does not exist" }
            )
        });
    }
    found
}

/// The jobs that this enqueue has created. A duplicate id breaks another rule.
fn ids_of(known: &Known<'_>, n: i64) -> BTreeSet<i64> {
    known.originals(n).iter().map(|row| row.id).collect()
}

/// A refused or rolled-back enqueue leaves no row; an enqueue without a response leaves at most one. No job exists
/// without a request.
pub(super) fn nothing_else(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut requested = HashSet::new();
    for call in &known.world.calls {
        // `flow_whole` checks which jobs of a flow exist.
        if let Request::EnqueueFlow { spec } = &call.request {
            requested.extend(spec.nodes.iter().map(|node| node.spec.n));
        }
        let Request::Enqueue { spec, .. } = &call.request else {
            continue;
        };
        requested.insert(spec.n);
        let max = match &call.response {
            _ if spec.rolled_back => 0,
            Response::Refused(_) => 0,
            Response::Unknown(_) => 1,
            // Checked by `kept`.
            Response::Ok(_) => continue,
        };
        let ids = ids_of(known, spec.n);
        let job = ids.first().copied();
        found.case(job, ids.len() > max, || {
            format!(
                "the enqueue of n = {} was answered with {:?} and created {} jobs",
                spec.n,
                call.response,
                ids.len()
            )
        });
    }
    for job in &known.world.jobs {
        // The rules of children.rs check the jobs that attempts enqueue.
        found.unless(
            job.id,
            !requested.contains(&Suspending::root(job.n)),
            || format!("job {} has n = {}, which nobody requested", job.id, job.n),
        );
    }
    found
}
