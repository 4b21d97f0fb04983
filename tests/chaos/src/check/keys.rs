//! What there may be only one of at a time.

use std::collections::HashMap;

use super::super::ledger::{Answer, Ask};
use super::super::world::Job;
use super::{Found, Known};

/// A job, from when to when it was certainly live: from the answer that named it to its end. One that no answer
/// has named is left out.
struct Life {
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

/// Of a finished job at most one retry is live.
pub(super) fn one_live_retry(known: &Known<'_>) -> Found {
    one_at_a_time(known, |job| job.retried_from)
}

fn one_at_a_time<K: Eq + std::hash::Hash + std::fmt::Debug>(
    known: &Known<'_>,
    key: impl Fn(&Job) -> Option<K>,
) -> Found {
    let answered = answered(known);
    let mut lives: HashMap<K, Vec<Life>> = HashMap::new();
    for job in &known.world.jobs {
        if let (Some(key), Some(from_us)) = (key(job), answered.get(&job.id)) {
            lives.entry(key).or_default().push(Life {
                job: job.id,
                from_us: *from_us,
                until_us: job.finished_us.unwrap_or(known.world.dumped_us),
            });
        }
    }
    let mut found = Found::default();
    for (key, mut lives) in lives {
        // Ended before the answer came: there is no time in which it was certainly live.
        lives.retain(|life| life.from_us < life.until_us);
        lives.sort_by_key(|life| life.from_us);
        for (place, life) in lives.iter().enumerate() {
            let other = lives[..place]
                .iter()
                .find(|other| life.from_us < other.until_us);
            found.case(life.job, other.is_some(), || {
                let other = other.map(|other| other.job);
                format!(
                    "jobs {} and {other:?} were live at the same time with {key:?}",
                    life.job
                )
            });
        }
    }
    found
}

/// When a call first named the job as its answer.
fn answered(known: &Known<'_>) -> HashMap<i64, i64> {
    let mut answered = HashMap::new();
    for call in &known.world.calls {
        if let (Ask::Enqueue { .. } | Ask::Retry { .. }, Answer::Ok(id)) = (&call.ask, &call.answer)
        {
            let first = answered.entry(*id).or_insert(call.answered_us);
            *first = call.answered_us.min(*first);
        }
    }
    answered
}
