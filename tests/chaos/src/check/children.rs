//! Whether the jobs that attempts enqueue exist once, and only if their attempt has succeeded.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::super::suspending::{Part, Suspending};
use super::super::world::Job;
use super::known::{ended_by_an_admin, has_continued};
use super::{Found, Known};

/// The jobs whose handler enqueues other jobs, with what their payload requests.
fn suspending<'a>(known: &Known<'a>) -> impl Iterator<Item = (&'a Job, &'a Suspending)> {
    let jobs = known.world.jobs.iter();
    jobs.filter_map(|job| Some((job, known.spec(job)?.suspending.as_ref()?)))
}

/// The jobs of this part that attempts of the job have enqueued.
fn parts<'a>(known: &Known<'a>, job: &Job, is_part: fn(Part) -> bool) -> Vec<&'a Job> {
    let all = known.enqueued_by(job.id).iter().copied();
    all.filter(|made| Part::of(made.n).is_some_and(is_part))
        .collect()
}

/// When the first attempt at the job started.
fn first_start_us(known: &Known<'_>, job: &Job) -> Option<i64> {
    known.evidence(job.id).first().map(|e| e.started_us)
}

/// A job that has succeeded has the children that its result announces, and any other job has none, no matter how many
/// of its attempts have enqueued some. A child starts after the success.
pub(super) fn only_of_successes(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let is_child = |part| matches!(part, Part::Child(_));
    for (job, _) in suspending(known) {
        let result = job.result.as_ref().filter(|_| !ended_by_an_admin(job));
        let announced = result.map_or(0, |result| result["children"].as_i64().unwrap_or(-1));
        let children = parts(known, job, is_child);
        let expected: BTreeSet<i64> = (1..=announced)
            .filter_map(|nth| u8::try_from(nth).ok())
            .map(|nth| Suspending::number(job.n, Part::Child(nth)))
            .collect();
        let numbers: BTreeSet<i64> = children.iter().map(|child| child.n).collect();
        found.case(
            job.id,
            numbers != expected || children.len() != expected.len(),
            || {
                let ids: Vec<i64> = children.iter().map(|child| child.id).collect();
                format!(
                    "job {} is {} and announces {announced} children, but has {ids:?}",
                    job.id, job.state
                )
            },
        );
        for child in children {
            let started_us = first_start_us(known, child);
            let is_early = started_us
                .is_some_and(|started| job.finished_us.is_none_or(|ended| started < ended));
            found.unless(child.id, is_early, || {
                format!(
                    "child {} started at {started_us:?}, before its parent {} succeeded at {:?}",
                    child.id, job.id, job.finished_us
                )
            });
        }
    }
    for child in &known.world.jobs {
        let is_stray = Part::of(child.n).is_some_and(is_child)
            && !child.parent.is_some_and(|parent| {
                known
                    .rows(parent)
                    .iter()
                    .any(|row| row.n == Suspending::root(child.n))
            });
        found.unless(child.id, is_stray, || {
            format!(
                "child {} has the parent {:?}, which is not the job that enqueues it",
                child.id, child.parent
            )
        });
    }
    found
}

/// A chain has one further job for each of its jobs that has succeeded and announces one; it starts after that success.
pub(super) fn chain_continues_once(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let is_next = |job: &&&Job| Part::of(job.n) == Some(Part::Next);
    for (job, _) in suspending(known) {
        let chain = known.chain(job.chain);
        let nexts: Vec<&&Job> = chain.iter().filter(is_next).collect();
        let announced: Vec<&&Job> = chain
            .iter()
            .filter(|job| has_continued(job) && !ended_by_an_admin(job))
            .collect();
        let starts_us = nexts.iter().filter_map(|next| first_start_us(known, next));
        let ends_us = announced.iter().filter_map(|job| job.finished_us);
        let is_early = starts_us
            .min()
            .zip(ends_us.min())
            .is_some_and(|(s, e)| s < e);
        let fits = nexts
            .iter()
            .all(|next| next.n == Suspending::number(job.n, Part::Next));
        found.case(
            job.id,
            nexts.len() != announced.len() || is_early || !fits,
            || {
                let ids: Vec<i64> = nexts.iter().map(|next| next.id).collect();
                format!(
                    "the jobs in the chain of job {} announce {} further jobs, but it has {ids:?}{}",
                    job.id,
                    announced.len(),
                    if is_early { ", of which one started too early" } else { "" }
                )
            },
        );
    }
    for next in known.world.jobs.iter().filter(|job| is_next(&job)) {
        let chain = known.chain(next.chain).iter();
        let is_stray = !chain
            .clone()
            .any(|job| job.n == Suspending::root(next.n) && job.id != next.id);
        found.unless(next.id, is_stray, || {
            format!("job {} continues no chain", next.id)
        });
    }
    found
}

/// Each call that an attempt has started has one job, and returns the end of that job.
pub(super) fn calls_once(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (job, _) in suspending(known) {
        let started = known.steps(job.id).iter().filter_map(|step| {
            let wait = step.wait.as_ref()?;
            (wait["kind"] == "call").then(|| wait["job"].as_i64())
        });
        let mut started: Vec<i64> = started.flatten().collect();
        let called = parts(known, job, |part| part == Part::Call);
        let mut ids: Vec<i64> = called.iter().map(|call| call.id).collect();
        started.sort_unstable();
        ids.sort_unstable();
        let returned: Vec<&Value> = known
            .steps(job.id)
            .iter()
            .map(|step| &step.result)
            .filter(|result| result.get("output").is_some() || result.get("failed").is_some())
            .collect();
        if started.is_empty() && ids.is_empty() && returned.is_empty() {
            continue;
        }
        let is_true = match (called.first(), returned.first()) {
            (Some(called), Some(result)) => match called.state.as_str() {
                "succeeded" => result.get("output") == called.result.as_ref(),
                _ => called.finished_us.is_some() && result.get("failed").is_some(),
            },
            (_, returned) => returned.is_none(),
        };
        let own = job.result.as_ref().filter(|_| !ended_by_an_admin(job));
        let is_received = own.is_none_or(|own| match returned.first() {
            Some(result) => match result.get("output") {
                Some(output) => own["called"] == json!({"output": output}),
                None => own["called"].get("failed").is_some(),
            },
            None => false,
        });
        let violated =
            started != ids || ids.len() > 1 || returned.len() > 1 || !is_true || !is_received;
        found.case(job.id, violated, || {
            format!(
                "job {} has called {started:?} and enqueued {ids:?}, which returned {returned:?}: {called:?}, {own:?}",
                job.id
            )
        });
    }
    found
}
