//! Whether more jobs of a key run at the same time than their gate permits.

use std::collections::BTreeMap;

use super::super::gates::{Gated, RUNNING_MAX};
use super::super::world::{Evidence, Job};
use super::{Found, Known};

/// No more jobs of a tenant run at the same time than the gate permits. `nothing_stuck` checks that the gate does
/// not keep jobs waiting for ever.
pub(super) fn hold(known: &Known<'_>) -> Found {
    at_once(known, RUNNING_MAX, |_, gated| Some(&gated.tenant))
}

/// No more than `max` jobs with the same key run at the same time. A case is a start after which that many or more run.
///
/// An attempt runs from its evidence of the start to its evidence of the end. It ends earlier if its host was killed,
/// or if the job was taken from it: an admin action ends a job before its attempt learns of it, and the guest of a host
/// that was frozen beyond the lease may run for a moment when the host wakes up. Attempts of one job count once.
pub(super) fn at_once<'a, K: Ord + std::fmt::Debug>(
    known: &Known<'a>,
    max: usize,
    key: impl Fn(&'a Job, &'a Gated) -> Option<K>,
) -> Found {
    let mut found = Found::default();
    let mut runs: BTreeMap<K, Vec<(&Evidence, i64)>> = BTreeMap::new();
    for (job, gated) in known.gated() {
        if let Some(key) = key(job, gated) {
            let evidence = known.evidence(job.id).iter();
            let counted = evidence.filter(|attempt| !is_excused(known, attempt));
            let ran = counted.map(|attempt| (*attempt, until_us(known, attempt)));
            // The guest of an attempt may start shortly after an admin action has ended the job.
            let ran = ran.filter(|(attempt, until_us)| *until_us > attempt.started_us);
            runs.entry(key).or_default().extend(ran);
        }
    }
    for (key, mut runs) in runs {
        runs.sort_by_key(|(attempt, _)| attempt.started_us);
        let mut running: Vec<(&Evidence, i64)> = Vec::new();
        for (attempt, until_us) in runs {
            let at_us = attempt.started_us;
            running.retain(|(other, until)| *until > at_us && other.job != attempt.job);
            running.push((attempt, until_us));
            if running.len() >= max {
                found.case(attempt.job, running.len() > max, || {
                    let jobs: Vec<_> = running.iter().map(|(run, _)| run.job).collect();
                    format!("jobs {jobs:?} with {key:?} ran at {at_us}, more than {max}")
                });
            }
        }
    }
    found
}

/// Whether the attempt was started without a valid claim for a permitted reason: the server forgot the claim in a
/// crash, or the host learned a moment late that it had lost the claim, because it was frozen or another host has its
/// id.
fn is_excused(known: &Known<'_>, attempt: &Evidence) -> bool {
    let started_us = attempt.started_us;
    let lease_us = known.world.run.lease_us;
    !known.is_claimed(attempt)
        && (known.forgotten(attempt)
            || known.is_shared(&attempt.worker)
            || known.is_frozen(&attempt.worker, started_us - lease_us, started_us))
}

fn until_us(known: &Known<'_>, attempt: &Evidence) -> i64 {
    let job_ends = known.rows(attempt.job).iter();
    let ended_before = job_ends
        .filter_map(|job| job.finished_us)
        .any(|at| at <= attempt.started_us);
    if ended_before {
        return attempt.started_us;
    }
    let over_us = known.over_us(attempt);
    let gone_us = known.gone_us(&attempt.worker, attempt.started_us, known.world.dumped_us);
    let ends = [attempt.ended_us, over_us, gone_us];
    ends.into_iter()
        .flatten()
        .min()
        .unwrap_or(known.world.dumped_us)
}
