//! Whether all that was accepted is there, and nothing that was not.

use std::collections::HashSet;

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
                    // It may be another's, with the same key.
                    key => row.unique_key == *key,
                }
        });
        found.case(*id, !there, || {
            format!("job {id} (n = {}) was accepted and is not there", wish.n)
        });
    }
    found
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
        // The same id twice is another fault.
        let ids: HashSet<i64> = known.originals(wish.n).iter().map(|row| row.id).collect();
        let most = match &call.answer {
            _ if wish.rolled_back => 0,
            Answer::Refused(_) => 0,
            Answer::Ok(_) | Answer::Unknown(_) => 1,
        };
        let job = ids.iter().min().copied();
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
        found.case(job.id, !asked.contains(&job.n), || {
            format!(
                "job {} has n = {}, which nobody has asked for",
                job.id, job.n
            )
        });
    }
    found
}
