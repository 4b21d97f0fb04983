//! How often a job is tried, and how that ends.

use super::super::load::SPIN;
use super::super::world::Job;
use super::known::{ended_from_outside, kind};
use super::{Found, Known};

/// Attempts over max: 0. Of those that have begun, each that was lost, given back or forgotten is one more.
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
        let begun = known.evidence(job.id).len();
        found.case(job.id, begun > most, || {
            format!(
                "job {} has begun {begun} times: more than {max}, {} lost, {released} given back, {crashes} crashes",
                job.id, job.lost
            )
        });
    }
    found
}

/// A job that is lost too often fails, with that as the reason; before that it goes on. One that was lost less often,
/// and has not been given up, shows nothing.
pub(super) fn losses_end(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let most = known.world.run.lost_max;
    for job in &known.world.jobs {
        let gave_up = job.state == "failed" && kind(job.error.as_ref()) == "lost";
        if job.lost < most && !gave_up {
            continue;
        }
        found.case(job.id, job.lost != most || !gave_up, || {
            format!(
                "job {} was lost {} times (at most {most}) and is {}: {:?}",
                job.id, job.lost, job.state, job.error
            )
        });
    }
    found
}

/// What the payload says has happened, where nobody has ended the job from outside, and its hosts have not gone too often.
pub(super) fn ends_as_asked(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in known.world.jobs.iter().filter(|j| j.finished_us.is_some()) {
        if ended_from_outside(job) || kind(job.error.as_ref()) == "lost" {
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
                "job {} was to {} and is {} after {tried} attempts: {:?} {:?}",
                job.id,
                wish.payload(),
                job.state,
                job.result,
                job.error
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
