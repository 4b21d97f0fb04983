//! How often a job is tried, and how that ends.

use super::super::load::SPIN;
use super::super::world::Job;
use super::known::{IN_LINE_US, ended_by_an_admin, kind};
use super::{Found, Known};

/// Attempts over max: 0. Of those that have started, each that was lost, given back or forgotten is one more.
pub(super) fn within_max(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let Some(wish) = known.wish(job) else {
            continue;
        };
        let max = wish.attempts_max();
        let failed = job.attempt - job.lost;
        found.case(job.id, failed > max, || {
            format!(
                "job {} has {failed} attempts that were not lost, and may have {max}",
                job.id
            )
        });
        let records = known.records(job.id).iter();
        let released = records.filter(|r| r.event == "released").count();
        let until = job.finished_us.unwrap_or(known.world.dumped_us);
        let crashes = known.crashes(job.requested_us, until);
        let most = max as usize + job.lost as usize + released + crashes;
        let started = known.evidence(job.id).len();
        found.case(job.id, started > most, || {
            format!(
                "job {} has started {started} times: more than {max}, {} lost, {released} given back, {crashes} crashes",
                job.id, job.lost
            )
        });
    }
    found
}

/// How a job was lost.
#[derive(Clone, Copy)]
struct Loss<'a> {
    worker: &'a str,
    claimed_us: i64,
    ended_us: i64,
}

impl Loss<'_> {
    /// Its host was killed, or has ended of itself, while it had the job. One that ends because another has its id is no crash.
    fn is_crash(&self, known: &Known<'_>) -> bool {
        !known.is_shared(self.worker) && known.crashed(self.worker, self.claimed_us, self.ended_us)
    }

    /// Something else has happened to its host, or to the server, for which it may have been lost.
    fn is_disturbed(&self, known: &Known<'_>) -> bool {
        known.is_frozen(self.worker, self.claimed_us, self.ended_us)
            || known.is_shared(self.worker)
            || known.cuts(self.claimed_us, self.ended_us)
            || known.crashes(self.claimed_us - IN_LINE_US, self.ended_us) > 0
    }

    /// It may have been taken for a crash when the job was judged: its host could not say by then that it lives.
    fn may_count(&self, known: &Known<'_>, judged_us: i64) -> bool {
        self.is_crash(known)
            || (self.is_disturbed(known) && !known.was_heard(self.worker, self.ended_us, judged_us))
    }
}

/// A job whose workers have crashed too often fails, with that as the reason, and no other does. A loss for another reason may count
/// where the host could not say before the verdict that it lives: of the last one it never can. A job with fewer crashes that has not
/// been given up shows nothing.
pub(super) fn losses_end(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let most = known.world.run.lost_max;
    for job in &known.world.jobs {
        let gave_up = job.state == "failed" && kind(job.error.as_ref()) == "lost";
        if job.lost < most && !gave_up {
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
        let wrong = match gave_up {
            true => perhaps < most,
            false => sure >= most,
        };
        let what = || {
            format!(
                "job {} was lost {} times, {crashes} times with a crash of its host (at most {most}), and is {}: {:?}",
                job.id, job.lost, job.state, job.error
            )
        };
        match gave_up || crashes >= most {
            true => found.case(job.id, wrong, what),
            false => found.unless(job.id, wrong, what),
        }
    }
    found
}

/// In their order; that with which a job was given up is in its own row.
fn losses<'a>(known: &Known<'a>, job: &Job, gave_up: bool) -> Vec<Loss<'a>> {
    let of_attempts = known.attempts(job.id).iter().filter(|a| a.lost);
    let mut losses: Vec<_> = of_attempts
        .map(|attempt| Loss {
            worker: known.worker_id(attempt.worker),
            claimed_us: attempt.claimed_us,
            ended_us: attempt.ended_us,
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
        });
    }
    losses
}

/// What the payload says has happened, where nobody has ended the job from outside, and its hosts have not gone too often.
pub(super) fn ends_as_asked(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in known.world.jobs.iter().filter(|j| j.finished_us.is_some()) {
        if ended_by_an_admin(job) || kind(job.error.as_ref()) == "lost" {
            continue;
        }
        let Some(wish) = known.wish(job) else {
            continue;
        };
        let tried = job.attempt - job.lost;
        let max = wish.attempts_max();
        let right = match job.state.as_str() {
            "succeeded" => {
                !wish.hopeless && wish.handler != SPIN && succeeds(job, wish.fail_attempts)
            }
            "failed" if wish.hopeless => guest_kind(job) == "hopeless" && tried == 1,
            "failed" => {
                guest_kind(job) == "flaky"
                    && job.attempt <= wish.fail_attempts as i32
                    && tried >= max
            }
            "timed_out" => wish.handler == SPIN && tried >= max,
            _ => false,
        };
        found.case(job.id, !right, || {
            format!(
                "job {} was to {:?} and is {} after {tried} attempts: {:?} {:?}",
                job.id, wish, job.state, job.result, job.error
            )
        });
    }
    found
}

fn succeeds(job: &Job, fail_attempts: u32) -> bool {
    let names_it = job.result.as_ref().is_some_and(|result| {
        result["n"].as_i64() == Some(job.n)
            && result["attempt"].as_i64() == Some(i64::from(job.attempt))
    });
    names_it && job.attempt > fail_attempts as i32
}

fn guest_kind(job: &Job) -> &str {
    let error = job.error.as_ref();
    error
        .and_then(|error| error["guest_kind"].as_str())
        .unwrap_or_default()
}
