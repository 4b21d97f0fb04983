//! Whether hosts hear of what was done from outside to the jobs that they have.

use super::super::ledger::{Answer, Ask};
use super::super::settings;
use super::super::world::{Call, Job};
use super::known::{IN_LINE_US, ended_by_an_admin};
use super::{Found, Known};

/// For a host that listens. The notification goes out with the commit, and a claim of which something was heard starts only once the
/// database has answered. What remains is its way to the host, some milliseconds, the way from the start of an attempt to the
/// evidence of it, and a machine whose cores are all busy. A claim of which nothing is heard starts when a slot comes free, up to a
/// second later: with notifications left out 20 of 33 started, 19 of these after more than 300 ms; with them none did.
const STARTS_WITHIN_US: i64 = 250_000;
/// For a host that was not notified: its claim has started, or was given back. One of which something was heard waits a second
/// more for an answer.
const GIVEN_BACK_WITHIN_US: i64 = IN_LINE_US + 1_000_000;
/// A host that was cut off listens again within a second, and then asks for all that it runs. One that does not would notice
/// with the renewal, after 0.4 of the lease (8 s for the jobs that are cancelled then).
const HEARD_WITHIN_US: i64 = 2_500_000;

/// A claim that has ended a job from outside, and where the job was.
struct Ended<'a> {
    job: &'a Job,
    call: &'a Call,
    worker: &'a str,
    claimed_us: i64,
}

/// Each job that was claimed when a call has ended it, with that call.
fn ended<'a>(known: &Known<'a>) -> Vec<Ended<'a>> {
    let calls = known.world.calls.iter().filter_map(|call| {
        let (Ask::Cancel { job } | Ask::Complete { job, .. } | Ask::Fail { job, .. }) = call.ask
        else {
            return None;
        };
        let job = *known.rows(job).first()?;
        let finished_us = job.finished_us?;
        // It was that call, and no earlier one.
        let is_it = call.answer == Answer::Ok(1)
            && ended_by_an_admin(job)
            && (call.asked_us..=call.answered_us).contains(&finished_us);
        is_it.then_some(Ended {
            job,
            call,
            worker: known.worker_id(job.worker?),
            claimed_us: job.claimed_us?,
        })
    });
    calls.collect()
}

/// An attempt of a claim that had not started when its job was ended does not start. Where the host was frozen or is gone,
/// it shows nothing.
pub(super) fn ended_in_line(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for Ended {
        job,
        call,
        worker,
        claimed_us,
    } in ended(known)
    {
        let started: Vec<i64> = known
            .evidence(job.id)
            .iter()
            .filter(|e| {
                e.attempt == job.attempt && e.worker == worker && e.started_us >= claimed_us
            })
            .map(|e| e.started_us)
            .collect();
        let before = job.finished_us.unwrap_or(call.asked_us);
        let latest_us = call.answered_us + GIVEN_BACK_WITHIN_US;
        if started.iter().any(|at| *at <= before)
            || known.is_disturbed(worker, claimed_us, latest_us)
        {
            continue;
        }
        let allowed_us = match known.hears(worker, claimed_us, call.answered_us + STARTS_WITHIN_US)
        {
            true => STARTS_WITHIN_US,
            false => GIVEN_BACK_WITHIN_US,
        };
        let late_us = started.iter().map(|at| at - call.answered_us).max();
        found.case(job.id, late_us.is_some_and(|late| late > allowed_us), || {
            format!(
                "attempt {} of job {} started on {worker} {} µs after {:?} was answered; {allowed_us} µs are allowed",
                job.attempt,
                job.id,
                late_us.unwrap_or_default(),
                call.ask
            )
        });
    }
    found
}

/// What an attempt leaves every tenth of a second ends soon after its job was cancelled, also where its host could not
/// listen at that moment. One that would have ended by then anyway shows nothing, nor does one whose host or server had other troubles.
pub(super) fn cancels_arrive(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for Ended {
        job,
        call,
        worker,
        claimed_us,
    } in ended(known)
    {
        let until_us = call.answered_us + HEARD_WITHIN_US;
        let Some(wish) = known.wish(job).filter(|wish| wish.ticks) else {
            continue;
        };
        let attempt = known.evidence(job.id).iter().find(|e| {
            e.attempt == job.attempt
                && e.worker == worker
                && (claimed_us..call.asked_us).contains(&e.started_us)
        });
        let Some(attempt) = attempt else {
            continue;
        };
        let sleeps_us = wish.sleep_ms as i64 * 1000;
        if attempt.started_us + sleeps_us <= until_us
            || !settings::listens(worker)
            || known.has_other_trouble(call.asked_us, until_us)
            || known.is_disturbed(worker, claimed_us, until_us)
        {
            continue;
        }
        let last_us = attempt.last_us().unwrap_or(attempt.started_us);
        found.took(job.id, (last_us - call.answered_us).max(0));
    }
    found.p99_within(
        HEARD_WITHIN_US,
        "from a cancellation to the last that its attempt has done",
    )
}
