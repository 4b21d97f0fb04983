//! Whether more jobs of a key start in a period than their gate permits.

use std::collections::{BTreeMap, BTreeSet};

use super::super::gates::{STARTS_MAX, STARTS_PERIOD_US};
use super::super::world::{Evidence, Job};
use super::known::IN_LINE_US;
use super::{Found, Known};

/// The times of claims and of starts, each with its job.
#[derive(Default)]
struct Times {
    claims: Vec<(i64, i64)>,
    starts: Vec<(i64, i64)>,
}

/// According to the rows of the database, no more jobs of an API are claimed in any period than the gate permits.
/// According to the evidence, no more jobs start in any period that is shorter by the time that may pass between a
/// claim and its start.
///
/// Adoptions are not counted, and claims that were given back have left no rows. Starts on a host that was frozen
/// shortly before are left out: it may have been frozen between its last look at the clock and the start of the guest.
pub(super) fn hold(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut keys: BTreeMap<&str, Times> = BTreeMap::new();
    for (job, gated) in known.gated() {
        let times = keys.entry(&gated.api).or_default();
        let claims = claims(known, job).into_iter();
        times.claims.extend(claims.map(|at_us| (at_us, job.id)));
        let evidence = known.evidence(job.id).iter();
        let counted = evidence.filter(|attempt| {
            let started_us = attempt.started_us;
            !is_adopted(known, attempt)
                && !known.is_frozen(&attempt.worker, started_us - IN_LINE_US, started_us)
        });
        times
            .starts
            .extend(counted.map(|attempt| (attempt.started_us, job.id)));
    }
    for (key, times) in keys {
        in_windows(&mut found, key, "claimed", times.claims, STARTS_PERIOD_US);
        let period_us = STARTS_PERIOD_US - IN_LINE_US;
        in_windows(&mut found, key, "started", times.starts, period_us);
    }
    found
}

/// A case is a claim or start that follows [`STARTS_MAX`] others within two periods.
fn in_windows(
    found: &mut Found,
    key: &str,
    what: &str,
    mut times: Vec<(i64, i64)>,
    period_us: i64,
) {
    times.sort_unstable();
    for window in times.windows(STARTS_MAX + 1) {
        let ((from_us, _), (at_us, job)) = (window[0], window[STARTS_MAX]);
        let took_us = at_us - from_us;
        if took_us < period_us * 2 {
            found.case(job, took_us < period_us, || {
                let jobs: Vec<_> = window.iter().map(|(_, job)| job).collect();
                format!("jobs {jobs:?} of {key} were {what} within {took_us} µs, up to {at_us}")
            });
        }
    }
}

/// When this job was claimed, without adoptions: those are claims at the time of the loss.
fn claims(known: &Known<'_>, job: &Job) -> BTreeSet<i64> {
    let attempts = known.attempts(job.id);
    let claimed = attempts.iter().map(|attempt| attempt.claimed_us);
    let mut claims: BTreeSet<i64> = claimed.chain(job.claimed_us).collect();
    for lost in attempts.iter().filter(|attempt| attempt.lost) {
        claims.remove(&lost.ended_us);
    }
    claims
}

/// Whether a worker has adopted the job for this attempt.
fn is_adopted(known: &Known<'_>, evidence: &Evidence) -> bool {
    known.attempts(evidence.job).iter().any(|lost| {
        lost.lost
            && lost.attempt + 1 == evidence.attempt
            && (0..=IN_LINE_US).contains(&(evidence.started_us - lost.ended_us))
    })
}
