//! Whether jobs that wait for others run after them, and no job is left waiting.

use serde_json::Value;

use super::super::flows::OnFailure;
use super::super::world::Job;
use super::known::has_continued;
use super::{Found, Known};

/// A claim reads the clock before it looks for jobs, so its time may be before the end of a parent that it has seen.
/// The start of the attempt is not.
const CLAIM_LOOKS_US: i64 = 1_000_000;

/// A chain that a job waits for.
struct Parent<'a> {
    chain: Option<i64>,
    /// The jobs of the chain: the first one, its retries, and those that continue it.
    jobs: Vec<&'a Job>,
    on_failure: OnFailure,
}

impl Parent<'_> {
    /// When the chain first let the job run: the first end of a job that no other job continues and that succeeded
    /// (with `on_failure => run`, any end). `None`: it never let the job run.
    fn released_us(&self) -> Option<i64> {
        let ended = self.jobs.iter().filter(|job| !has_continued(job));
        let ended =
            ended.filter(|job| self.on_failure == OnFailure::Run || job.state == "succeeded");
        ended.filter_map(|job| job.finished_us).min()
    }

    /// When a job of the chain first ended without success. `None`: no job did.
    fn failed_us(&self) -> Option<i64> {
        let failed = self.jobs.iter().filter(|job| job.state != "succeeded");
        failed.filter_map(|job| job.finished_us).min()
    }

    /// True if the chain has failed, and the job waits for its retry.
    fn holds(&self) -> bool {
        let last = self.jobs.iter().max_by_key(|job| job.id);
        self.on_failure == OnFailure::Wait
            && last.is_some_and(|job| job.finished_us.is_some() && job.state != "succeeded")
    }

    /// True if a job of the chain has not ended.
    fn is_live(&self) -> bool {
        self.jobs.iter().any(|job| job.finished_us.is_none())
    }
}

fn parents<'a>(known: &Known<'a>, job: &Job) -> Vec<Parent<'a>> {
    let after = job.after.as_ref().and_then(Value::as_object);
    let entries = after.into_iter().flatten();
    entries
        .map(|(_, entry)| {
            let chain = entry.as_i64().or_else(|| entry["job"].as_i64());
            Parent {
                chain,
                jobs: chain.map_or_else(Vec::new, |chain| known.chain(chain).to_vec()),
                on_failure: match entry["on_failure"].as_str() {
                    Some("run") => OnFailure::Run,
                    Some("wait") => OnFailure::Wait,
                    _ => OnFailure::Cancel,
                },
            }
        })
        .collect()
}

/// Jobs with their parents, and the latest time at which their first claim may have found them.
fn children<'a>(
    known: &Known<'a>,
) -> impl Iterator<Item = (&'a Job, Vec<Parent<'a>>, Option<i64>)> {
    let waiting = known.world.jobs.iter().filter(|job| job.after.is_some());
    waiting.map(|job| {
        let claimed = known.attempts(job.id).iter().map(|a| a.claimed_us);
        let claimed = claimed.chain(job.claimed_us).map(|at| at + CLAIM_LOOKS_US);
        let started = known.evidence(job.id).iter().map(|e| e.started_us);
        (job, parents(known, job), claimed.chain(started).min())
    })
}

/// No job is claimed before each chain that it waits for has ended in a way that lets it run.
pub(super) fn no_child_before_parents(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (job, parents, claimed_us) in children(known) {
        let Some(claimed_us) = claimed_us else {
            continue;
        };
        for parent in &parents {
            let released_us = parent.released_us();
            found.case(job.id, released_us.is_none_or(|at| claimed_us < at), || {
                format!("claimed at {claimed_us}, but a chain that it waits for let it run at {released_us:?}")
            });
        }
    }
    for job in &known.world.jobs {
        let is_lost =
            known.spec(job).is_some_and(|spec| spec.after.is_some()) && job.after.is_none();
        found.unless(job.id, is_lost, || {
            "it was enqueued with `after`, but its row names no job to wait for".into()
        });
    }
    found
}

/// No job still waits when all its chains have ended, unless one has failed and the job waits for its retry. A job that
/// was cancelled because of a chain has not run, and the chain has failed.
pub(super) fn no_child_stranded(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (job, parents, claimed_us) in children(known) {
        match job.finished_us {
            None => {
                let has_reason = |parent: &Parent<'_>| parent.is_live() || parent.holds();
                let waits = job.is_waiting && !parents.iter().any(has_reason);
                found.case(job.id, waits, || {
                    "it waits for chains that have all ended".into()
                });
            }
            Some(finished_us) => {
                // `admin_ends_were_requested` checks the other cancellations.
                let violated = job.cancelled_after.is_some_and(|chain| {
                    let failed = parents.iter().any(|parent| {
                        parent.chain == Some(chain)
                            && parent.on_failure == OnFailure::Cancel
                            && parent.failed_us().is_some_and(|at| at <= finished_us)
                    });
                    claimed_us.is_some() || !failed
                });
                found.case(job.id, violated, || {
                    format!(
                        "it was cancelled because of chain {:?}, which had not failed",
                        job.cancelled_after
                    )
                });
            }
        }
    }
    found
}
