//! Whether unique keys and retries are unique among live jobs.

use std::collections::HashMap;

use super::super::ledger::{Request, Response};
use super::super::world::Job;
use super::{Found, Known, flows};

/// The time in which a job was certainly live: from the response that returned its id, or that of its flow, to its end.
/// A job without such a response is left out.
struct Lifetime {
    job: i64,
    from_us: i64,
    until_us: i64,
}

/// No two live jobs of a handler and a tenant have the same unique key.
pub(super) fn one_live_job(known: &Known<'_>) -> Found {
    let key = |job: &Job| {
        let key = job.unique_key.as_ref()?;
        Some((job.handler.clone(), job.tenant.clone(), key.clone()))
    };
    one_at_a_time(known, key)
}

/// A finished job has at most one live retry.
pub(super) fn one_live_retry(known: &Known<'_>) -> Found {
    one_at_a_time(known, |job| job.retried_from)
}

/// No two jobs with the same key are certainly live at the same time.
pub(super) fn one_at_a_time<K: Eq + std::hash::Hash + std::fmt::Debug>(
    known: &Known<'_>,
    key: impl Fn(&Job) -> Option<K>,
) -> Found {
    let answered = answered(known);
    let mut lifetimes: HashMap<K, Vec<Lifetime>> = HashMap::new();
    for job in &known.world.jobs {
        if let (Some(key), Some(from_us)) = (key(job), answered.get(&job.id)) {
            lifetimes.entry(key).or_default().push(Lifetime {
                job: job.id,
                from_us: *from_us,
                until_us: job.finished_us.unwrap_or(known.world.dumped_us),
            });
        }
    }
    let mut found = Found::default();
    for (key, mut lifetimes) in lifetimes {
        // A job that ended before its response arrived was never certainly live.
        lifetimes.retain(|lifetime| lifetime.from_us < lifetime.until_us);
        lifetimes.sort_by_key(|lifetime| lifetime.from_us);
        for (index, lifetime) in lifetimes.iter().enumerate() {
            let other = lifetimes[..index]
                .iter()
                .find(|other| lifetime.from_us < other.until_us);
            found.case(lifetime.job, other.is_some(), || {
                let other = other.map(|other| other.job);
                format!(
                    "jobs {} and {other:?} were live at the same time with {key:?}",
                    lifetime.job
                )
            });
        }
    }
    found
}

/// The time of the first response after which each job was certainly there.
fn answered(known: &Known<'_>) -> HashMap<i64, i64> {
    let calls = known.world.calls.iter();
    let returned = calls.filter_map(|call| match (&call.request, &call.response) {
        (Request::Enqueue { .. } | Request::Retry { .. }, Response::Ok(id)) => {
            Some((*id, call.answered_us))
        }
        _ => None,
    });
    let mut answered = HashMap::new();
    for (job, at_us) in returned.chain(flows::made(known)) {
        let first = answered.entry(job).or_insert(at_us);
        *first = at_us.min(*first);
    }
    answered
}
