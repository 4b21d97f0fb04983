//! How often jobs are attempted, and how they end.

use super::super::load::SPIN;
use super::super::world::Job;
use super::known::{IN_LINE_US, ended_by_an_admin, kind};
use super::{Found, Known};

/// A job fails as lost only after the worker of its last attempt has been silent for this long (`SILENT_FOR` in
/// host/src/job/loss.rs).
const SILENT_US: i64 = 10_000_000;

/// The server may execute a claim that was sent this long before its host was killed.
const CLAIM_UNDER_WAY_US: i64 = 500_000;

/// No job has more counted attempts than its maximum. Uncounted, released and forgotten attempts may have started in
/// addition.
pub(super) fn within_max(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let Some(spec) = known.spec(job) else {
            continue;
        };
        let max = spec.attempts_max();
        let failed = job.attempt - job.uncounted;
        found.case(job.id, failed > max, || {
            format!(
                "job {} has {failed} attempts that count, more than {max}",
                job.id
            )
        });
        let records = known.records(job.id).iter();
        let released = records.filter(|r| r.event == "released").count();
        let until = job.finished_us.unwrap_or(known.world.dumped_us);
        let crashes = known.crashes(job.requested_us, until);
        let started_max = max as usize + job.uncounted as usize + released + crashes;
        let started = known.evidence(job.id).len();
        found.case(job.id, started > started_max, || {
            format!(
                "job {} has started {started} times, more than {max} plus {} uncounted, {released} released and {crashes} crashes",
                job.id, job.uncounted
            )
        });
    }
    found
}

/// One loss of a job.
#[derive(Clone, Copy)]
struct Loss<'a> {
    worker: &'a str,
    claimed_us: i64,
    ended_us: i64,
    /// After this time, any message from its host shows that the host has not crashed.
    silent_from_us: i64,
}

impl Loss<'_> {
    /// True if its host was killed, or crashed, while it held the job. An exit because another host has the id is not a
    /// crash.
    fn is_crash(&self, known: &Known<'_>) -> bool {
        !known.is_shared(self.worker) && known.crashed(self.worker, self.claimed_us, self.ended_us)
    }

    /// True if another fault of its host, or of the server, may have caused the loss.
    fn is_disturbed(&self, known: &Known<'_>) -> bool {
        known.is_frozen(self.worker, self.claimed_us, self.ended_us)
            || known.is_shared(self.worker)
            || known.cuts(self.claimed_us, self.ended_us)
            || known.crashes(self.claimed_us - IN_LINE_US, self.ended_us) > 0
    }

    /// True if the loss may have counted as a crash at `judged_us`, when a host decided about the job: the lost host
    /// was killed while its claim was under way, or could not send a heartbeat before this decision.
    fn may_count(&self, known: &Known<'_>, judged_us: i64) -> bool {
        let claim_sent_us = self.claimed_us - CLAIM_UNDER_WAY_US;
        self.is_crash(known)
            || known.crashed(self.worker, claim_sent_us, self.claimed_us)
            || (self.is_disturbed(known)
                && !known.could_heartbeat(self.worker, self.silent_from_us, judged_us))
    }
}

/// A job whose workers have crashed too often fails as lost, and no other job does. A loss for another reason may count
/// if the host could not send a heartbeat before the decision about the job, some time after the end of the last lease.
/// A job with fewer crashes that did not fail as lost is not a case.
pub(super) fn lost_after_crashes(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let lost_max = known.world.run.lost_max;
    for job in &known.world.jobs {
        let gave_up = job.state == "failed" && kind(job.error.as_ref()) == "lost";
        if job.uncounted < lost_max && !gave_up {
            continue;
        }
        let losses = losses(known, job, gave_up);
        let crashes = losses.iter().filter(|loss| loss.is_crash(known));
        let crashes = crashes.count() as i32;
        let sure = losses
            .iter()
            .filter(|loss| loss.is_crash(known) && !loss.is_disturbed(known));
        let sure = sure.count() as i32;
        let judged_us = losses.last().map_or(0, |last| last.ended_us);
        let perhaps = losses
            .iter()
            .filter(|loss| loss.may_count(known, judged_us))
            .count() as i32;
        let violated = match gave_up {
            true => perhaps < lost_max,
            false => sure >= lost_max,
        };
        let message = || {
            format!(
                "job {} was lost {} times, {crashes} times by a crash of its host (the limit is {lost_max}), and is {}: {:?}",
                job.id, job.uncounted, job.state, job.error
            )
        };
        match gave_up || crashes >= lost_max {
            true => found.case(job.id, violated, message),
            false => found.unless(job.id, violated, message),
        }
    }
    found
}

/// The losses in order. The last loss of a job that failed as lost is in the job's own row.
fn losses<'a>(known: &Known<'a>, job: &Job, gave_up: bool) -> Vec<Loss<'a>> {
    let lost = known.attempts(job.id).iter().filter(|a| a.lost);
    let mut losses: Vec<_> = lost
        .map(|attempt| Loss {
            worker: known.worker_id(attempt.worker),
            claimed_us: attempt.claimed_us,
            ended_us: attempt.ended_us,
            silent_from_us: attempt.lease_ended_us.unwrap_or(attempt.ended_us),
        })
        .collect();
    losses.sort_by_key(|loss| loss.ended_us);
    if let (true, Some(worker), Some(claimed_us), Some(ended_us)) =
        (gave_up, job.worker, job.claimed_us, job.finished_us)
    {
        losses.push(Loss {
            worker: known.worker_id(worker),
            claimed_us,
            ended_us,
            // The silence began then at the latest.
            silent_from_us: ended_us - SILENT_US,
        });
    }
    losses
}

/// The job has ended as its payload says, unless an admin action ended it or it failed as lost.
pub(super) fn ends_as_decided(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in known.world.jobs.iter().filter(|j| j.finished_us.is_some()) {
        if ended_by_an_admin(job)
            || job.cancelled_after.is_some()
            || kind(job.error.as_ref()) == "lost"
        {
            continue;
        }
        let Some(spec) = known.spec(job) else {
            continue;
        };
        let tried = job.attempt - job.uncounted;
        let max = spec.attempts_max();
        // The attempt decides at its end whether it fails this time.
        let fails_for_now = spec
            .fails_until_us
            .is_some_and(|until_us| job.claimed_us < Some(until_us));
        let succeeds_now = spec
            .fails_until_us
            .is_none_or(|until_us| job.finished_us >= Some(until_us));
        let right = match job.state.as_str() {
            "succeeded" => {
                !spec.hopeless
                    && succeeds_now
                    && spec.handler != SPIN
                    && succeeds(job, spec.fail_attempts)
            }
            "failed" if guest_kind(job) == "hopeless" => {
                (spec.hopeless || fails_for_now) && tried == 1
            }
            "failed" => {
                guest_kind(job) == "flaky"
                    && job.attempt <= spec.fail_attempts as i32
                    && tried >= max
            }
            "timed_out" => spec.handler == SPIN && tried >= max,
            _ => false,
        };
        found.case(job.id, !right, || {
            format!(
                "job {} was enqueued with {:?} and is {} after {tried} attempts: {:?} {:?}",
                job.id, spec, job.state, job.result, job.error
            )
        });
    }
    found
}

fn succeeds(job: &Job, fail_attempts: u32) -> bool {
    let is_its_result = job.result.as_ref().is_some_and(|result| {
        result["n"].as_i64() == Some(job.n)
            && result["attempt"].as_i64() == Some(i64::from(job.attempt))
    });
    is_its_result && job.attempt > fail_attempts as i32
}

fn guest_kind(job: &Job) -> &str {
    let error = job.error.as_ref();
    error
        .and_then(|error| error["guest_kind"].as_str())
        .unwrap_or_default()
}
