//! Whether orphans go ahead of queued jobs.

use std::collections::{HashMap, HashSet};

use super::super::load::PAY;
use super::{Found, Known};

/// A claim checks for expired leases only before its first statement, not before the one that claims the rest of its
/// jobs; and the expiry of a worker may commit late.
const LATE_US: i64 = 500_000;

/// The transaction of a host that was frozen before COMMIT locks the job for this long (`NEXT_MESSAGE_TIMEOUT` of the
/// host).
const UNLOCKED_WITHIN_US: i64 = 5_000_000;

/// A claim: job, attempt, time.
type Claim = (i64, i32, i64);

/// A worker that adopts an orphan claims no queued job between the end of the orphan's lease and the adoption, while it
/// serves the orphan's handler: a handler with SQL statements is parked on a new worker until they have been checked,
/// and on any worker while its login does not respond. Intervals with a crash of the server are left out: the server
/// may have forgotten claims and adoptions.
pub(super) fn orphans_first(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let claims = claims_of(known);
    let handlers: HashMap<i64, &str> = known
        .world
        .jobs
        .iter()
        .map(|job| (job.id, &*job.handler))
        .collect();
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
        let Some((adopter, claimed)) = claims.iter().find(|(_, claimed)| claimed.contains(&again))
        else {
            // The job waits for another attempt, or has failed, or the adoption was released.
            continue;
        };
        let parked = handlers.get(&lost.job).is_some_and(|handler| {
            known.waits_for_login(known.worker_id(*adopter), handler, ended_us, lost.ended_us)
        });
        if parked || known.crashes(ended_us, lost.ended_us) > 0 {
            continue;
        }
        let is_same = |claim: &&Claim| handlers.get(&claim.0) == handlers.get(&lost.job);
        let served_from = claimed.iter().filter(is_same).map(|claim| claim.2).min();
        let mut from_us = served_from.unwrap_or_default().max(ended_us + LATE_US);
        // The attempt may have been about to commit its effects.
        let has_effects = known.rows(lost.job).iter().any(|job| job.handler == PAY);
        let worker = known.worker_id(lost.worker);
        if has_effects && known.is_frozen(worker, lost.claimed_us, ended_us) {
            from_us = from_us.max(ended_us + UNLOCKED_WITHIN_US + LATE_US);
        }
        let queued = claimed.iter().find(|claim| {
            (from_us..lost.ended_us).contains(&claim.2) && !adoptions.contains(claim)
        });
        found.case(lost.job, queued.is_some(), || {
            format!(
                "{} claimed {:?} (job, attempt, time) while the orphan {} waited, from {ended_us} to {}",
                known.worker_id(*adopter),
                queued,
                lost.job,
                lost.ended_us
            )
        });
    }
    found
}

/// The recorded claims of each worker. Released claims are not recorded.
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
