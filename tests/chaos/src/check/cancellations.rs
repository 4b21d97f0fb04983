//! Whether hosts learn of admin actions on the jobs that they hold.

use super::super::ledger::{Request, Response};
use super::super::settings;
use super::super::world::{Call, Job};
use super::known::{IN_LINE_US, ended_by_an_admin};
use super::{Found, Known};

/// For a host that listens. The notification is sent with the commit, and a claim whose host was notified starts only
/// after the database has confirmed it. The limit covers the delivery of the notification (a few milliseconds), the
/// time from the start of an attempt to its evidence, and a machine whose cores are all busy. A claim without a
/// notification starts when a slot comes free, up to a second later: without notifications, 20 of 33 claims of ended
/// jobs started, 19 of them after more than 300 ms; with notifications, none did.
const STARTS_WITHIN_US: i64 = 250_000;
/// For a host that was not notified: by then, its claim has started or was released. A claim whose host was notified
/// waits one more second for a response.
pub(super) const RELEASED_WITHIN_US: i64 = IN_LINE_US + 1_000_000;
/// A host that was cut off listens again within a second, and then queries all its running jobs. A host that does not
/// listen again would notice only at the renewal, after 0.4 of the lease (8 s for the cancelled jobs).
const STOPS_WITHIN_US: i64 = 2_500_000;

/// A claimed job that an admin action has ended, with the call and the claim.
struct Ended<'a> {
    job: &'a Job,
    call: &'a Call,
    worker: &'a str,
    claimed_us: i64,
}

/// Each claimed job that an admin action has ended.
fn ended<'a>(known: &Known<'a>) -> Vec<Ended<'a>> {
    let calls = known.world.calls.iter().filter_map(|call| {
        let (Request::Cancel { job } | Request::Complete { job, .. } | Request::Fail { job, .. }) =
            call.request
        else {
            return None;
        };
        let job = *known.rows(job).first()?;
        let finished_us = job.finished_us?;
        // This call ended the job, and not an earlier one.
        let has_ended_it = call.response == Response::Ok(1)
            && ended_by_an_admin(job)
            && (call.sent_us..=call.answered_us).contains(&finished_us);
        has_ended_it.then_some(Ended {
            job,
            call,
            worker: known.worker_id(job.worker?),
            claimed_us: job.claimed_us?,
        })
    });
    calls.collect()
}

/// A claim that had not started when its job was ended never starts. A host that was frozen or is dead is not a case.
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
        let before = job.finished_us.unwrap_or(call.sent_us);
        let latest_us = call.answered_us + RELEASED_WITHIN_US;
        if started.iter().any(|at| *at <= before)
            || known.is_disturbed(worker, claimed_us, latest_us)
        {
            continue;
        }
        let allowed_us =
            match known.gets_notifications(worker, claimed_us, call.answered_us + STARTS_WITHIN_US)
            {
                true => STARTS_WITHIN_US,
                false => RELEASED_WITHIN_US,
            };
        let late_us = started.iter().map(|at| at - call.answered_us).max();
        found.case(job.id, late_us.is_some_and(|late| late > allowed_us), || {
            format!(
                "attempt {} of job {} started on {worker} {} µs after the response to {:?}; the limit is {allowed_us} µs",
                job.attempt,
                job.id,
                late_us.unwrap_or_default(),
                call.request
            )
        });
    }
    found
}

/// The evidence that an attempt writes every 100 ms stops soon after its job was cancelled, even if its host could not
/// listen at that moment. An attempt that would have ended by then anyway is not a case, nor is one whose host or
/// server had other faults.
pub(super) fn cancels_arrive(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for Ended {
        job,
        call,
        worker,
        claimed_us,
    } in ended(known)
    {
        let until_us = call.answered_us + STOPS_WITHIN_US;
        let Some(spec) = known.spec(job).filter(|spec| spec.ticks) else {
            continue;
        };
        let attempt = known.evidence(job.id).iter().find(|e| {
            e.attempt == job.attempt
                && e.worker == worker
                && (claimed_us..call.sent_us).contains(&e.started_us)
        });
        let Some(attempt) = attempt else {
            continue;
        };
        let sleeps_us = spec.sleep_ms as i64 * 1000;
        if attempt.started_us + sleeps_us <= until_us
            || !settings::listens(worker)
            || known.has_other_trouble(call.sent_us, until_us)
            || known.is_disturbed(worker, claimed_us, until_us)
        {
            continue;
        }
        let last_us = attempt.last_us().unwrap_or(attempt.started_us);
        found.took(job.id, (last_us - call.answered_us).max(0));
    }
    found.p99_within(
        STOPS_WITHIN_US,
        "from a cancellation to the last evidence of its attempt",
    )
}
