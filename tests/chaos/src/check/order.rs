//! Whether orphans go first.

use std::collections::{HashMap, HashSet};

use super::{Found, Known};

/// A claim looks for leases that have ended before it, and claims the rest of its jobs in a second statement without looking again; an
/// expiry of a worker may be committed late.
const LATE_US: i64 = 500_000;

/// A claim: which job and attempt, when.
type Claim = (i64, i32, i64);

/// Between the end of the lease of an orphan and its adoption, who adopts it claims no queued job. Left out is the time in which the
/// server was down: it may have forgotten claims and adoptions.
pub(super) fn orphans_first(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let claims = claims_of(known);
    let adoptions: HashSet<(i64, i32, i64)> = known
        .world
        .attempts
        .iter()
        .filter(|lost| lost.lost)
        .map(|lost| (lost.job, lost.attempt + 1, lost.ended_us))
        .collect();
    for lost in known.world.attempts.iter().filter(|a| a.lost) {
        let Some(ended_us) = lost.lease_ended_us else {
            continue;
        };
        let again = (lost.job, lost.attempt + 1, lost.ended_us);
        let Some((adopter, of_it)) = claims.iter().find(|(_, of_it)| of_it.contains(&again)) else {
            // It waits for another attempt, or has failed, or the adoption was given back.
            continue;
        };
        if known.crashes(ended_us, lost.ended_us) > 0 {
            continue;
        }
        let queued = of_it.iter().find(|claim| {
            (ended_us + LATE_US..lost.ended_us).contains(&claim.2) && !adoptions.contains(claim)
        });
        found.case(lost.job, queued.is_some(), || {
            format!(
                "{} claimed job {:?} (job, attempt, when) while the orphan {} waited, from {ended_us} to {}",
                known.worker_id(*adopter),
                queued,
                lost.job,
                lost.ended_us
            )
        });
    }
    found
}

/// The claims of each worker, as far as they are kept: one that was given back is not.
fn claims_of(known: &Known<'_>) -> HashMap<i64, HashSet<Claim>> {
    let mut claims: HashMap<i64, HashSet<Claim>> = HashMap::new();
    for attempt in &known.world.attempts {
        let claim = (attempt.job, attempt.attempt, attempt.claimed_us);
        claims.entry(attempt.worker).or_default().insert(claim);
    }
    for job in &known.world.jobs {
        if let (Some(worker), Some(at_us)) = (job.worker, job.claimed_us) {
            let claim = (job.id, job.attempt, at_us);
            claims.entry(worker).or_default().insert(claim);
        }
    }
    claims
}
