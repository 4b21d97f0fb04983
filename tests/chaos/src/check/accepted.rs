//! Whether all that was accepted is there, and nothing that was not.

use std::collections::{BTreeSet, HashSet};

use super::super::ledger::{Answer, Ask};
use super::{Found, Known};

/// Accepted and lost: 0.
pub(super) fn kept(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for call in &known.world.calls {
        let (Answer::Ok(id), Ask::Enqueue { wish, .. }) = (&call.answer, &call.ask) else {
            if let (Answer::Ok(id), Ask::Retry { job }) = (&call.answer, &call.ask) {
                let there = known.rows(*id).iter().any(|r| r.retried_from == Some(*job));
                found.case(*id, !there, || {
                    format!("the retry {id} of job {job} is not there")
                });
            }
            continue;
        };
        let there = known.rows(*id).iter().any(|row| {
            row.handler == wish.handler
                && match &wish.unique_key {
                    None => row.n == wish.n && row.queue == wish.queue,
                    // It may be another's, with the same key and tenant.
                    key => row.unique_key == *key && row.tenant == wish.tenant,
                }
        });
        let times = ids_of(known, wish.n).len();
        found.case(*id, !there || times > 1, || {
            format!(
                "job {id} (n = {}) was accepted, and is {} and {times} times",
                wish.n,
                if there { "there" } else { "not there" }
            )
        });
    }
    found
}

/// The jobs that this enqueue has made. The same id twice is another fault.
fn ids_of(known: &Known<'_>, n: i64) -> BTreeSet<i64> {
    known.originals(n).iter().map(|row| row.id).collect()
}

/// Refused, rolled back: no row. Unknown: none or one. Nobody's: none at all.
pub(super) fn nothing_else(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut asked = HashSet::new();
    for call in &known.world.calls {
        let Ask::Enqueue { wish, .. } = &call.ask else {
            continue;
        };
        asked.insert(wish.n);
        let most = match &call.answer {
            _ if wish.rolled_back => 0,
            Answer::Refused(_) => 0,
            Answer::Unknown(_) => 1,
            // Whether it is there once, the other rule looks.
            Answer::Ok(_) => continue,
        };
        let ids = ids_of(known, wish.n);
        let job = ids.first().copied();
        found.case(job, ids.len() > most, || {
            format!(
                "n = {} was answered with {:?} and is there {} times",
                wish.n,
                call.answer,
                ids.len()
            )
        });
    }
    for job in &known.world.jobs {
        found.unless(job.id, !asked.contains(&job.n), || {
            format!(
                "job {} has n = {}, which nobody has asked for",
                job.id, job.n
            )
        });
    }
    found
}
