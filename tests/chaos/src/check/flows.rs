//! Whether flows are enqueued as a whole, run in their order, and are cancelled, retried and deleted as requested.
//!
//! The ledger determines which jobs a flow has and which of them wait for others, regardless of what the database
//! contains.

use std::collections::HashSet;

use super::super::flows::{Edge, FlowSpec, Node, OnFailure};
use super::super::ledger::{Request, Response};
use super::super::world::{Call, Evidence, Job};
use super::cancellations::RELEASED_WITHIN_US;
use super::{Found, Known};

/// A settlement takes effect when it commits, a moment after the time that it records.
const COMMITS_WITHIN_US: i64 = 1_000_000;

/// A flow whose enqueue was answered with its id.
struct Flow<'a> {
    spec: &'a FlowSpec,
    /// When the enqueue was answered.
    enqueued_us: i64,
    /// All its jobs, retries included.
    jobs: Vec<&'a Job>,
    calls: &'a [&'a Call],
}

fn flows<'a>(known: &'a Known<'a>) -> impl Iterator<Item = Flow<'a>> {
    known.flow_specs().iter().filter_map(move |&(call, spec)| {
        let Response::Ok(flow) = call.response else {
            return None;
        };
        let jobs = spec.nodes.iter().flat_map(|node| jobs_of(known, node));
        Some(Flow {
            spec,
            enqueued_us: call.answered_us,
            jobs: jobs.copied().collect(),
            calls: known.calls_of_flow(flow),
        })
    })
}

/// The first job of a node and its retries. None if another flow's job with its unique key was used.
fn jobs_of<'a>(known: &'a Known<'a>, node: &Node) -> &'a [&'a Job] {
    known.numbered(node.spec.n)
}

impl<'a> Flow<'a> {
    /// The retries that were requested during this call.
    fn retried_during(&self, call: &Call) -> impl Iterator<Item = &'a Job> {
        let during = call.sent_us..=call.answered_us;
        let jobs = self.jobs.iter().copied();
        jobs.filter(move |job| job.retried_from.is_some() && during.contains(&job.requested_us))
    }

    /// Whether a retry without a response may still have been under way at this time.
    fn may_be_retried(&self, at_us: i64) -> bool {
        self.calls.iter().any(|call| {
            matches!(call.request, Request::RetryFlow { .. })
                && matches!(call.response, Response::Unknown(_))
                && call.sent_us <= at_us
        })
    }
}

/// The jobs that an enqueue or a retry of a flow has made, with the time of its response. Left out are retries that
/// another call without a response may have made in the meantime.
pub(super) fn made(known: &Known<'_>) -> Vec<(i64, i64)> {
    let mut made = Vec::new();
    for flow in flows(known) {
        let originals = flow.jobs.iter().filter(|job| job.retried_from.is_none());
        made.extend(originals.map(|job| (job.id, flow.enqueued_us)));
        for call in flow.calls {
            let is_retry = matches!(call.request, Request::RetryFlow { .. })
                && matches!(call.response, Response::Ok(_));
            if is_retry && !flow.may_be_retried(call.answered_us) {
                let retries = flow.retried_during(call);
                made.extend(retries.map(|job| (job.id, call.answered_us)));
            }
        }
    }
    made
}

/// Each job of a flow that was accepted exists once, and none of one that was refused or rolled back. Without a
/// response, all of them exist or none. A job with a unique key may be the job of another flow.
pub(super) fn whole(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for (call, spec) in known.flow_specs() {
        let times = spec.nodes.iter().map(|node| {
            let ids: HashSet<i64> = known
                .originals(node.spec.n)
                .iter()
                .map(|job| job.id)
                .collect();
            (node.spec.unique_key.is_some(), ids.len())
        });
        let times: Vec<(bool, usize)> = times.collect();
        let is_all = times.iter().all(|(keyed, times)| *keyed || *times == 1);
        let is_none = times.iter().all(|(_, times)| *times == 0);
        let right = match &call.response {
            _ if spec.rolled_back => is_none,
            Response::Ok(_) => is_all,
            Response::Refused(_) => is_none,
            Response::Unknown(_) => is_all || is_none,
        };
        let is_twice = times.iter().any(|(_, times)| *times > 1);
        let first = spec
            .nodes
            .iter()
            .flat_map(|node| jobs_of(known, node))
            .next();
        found.case(first.map(|job| job.id), !right || is_twice, || {
            format!(
                "the enqueue of a flow was answered with {:?} and created its jobs this often (has a key, times): {times:?}",
                call.response
            )
        });
    }
    found
}

/// No job of a flow starts before each job that it waits for has ended in a way that lets it run. A job that was
/// retried without having run waits again for those that are live by then.
pub(super) fn in_order(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for Flow { spec, .. } in flows(known) {
        for node in &spec.nodes {
            for job in jobs_of(known, node) {
                let started = known.evidence(job.id).iter().map(|e| e.started_us);
                let Some(started_us) = started.min() else {
                    continue;
                };
                for edge in &node.after {
                    let parents = jobs_of(known, &spec.nodes[edge.from]);
                    // `no_child_before_parents` checks it if the parent is a job of another flow.
                    if parents.is_empty() {
                        continue;
                    }
                    let violated = !let_run(known, job, *edge, parents, started_us);
                    found.case(job.id, violated, || {
                        format!(
                            "job {} started at {started_us} before job {} of its flow had let it run ({:?}): {parents:?}",
                            job.id, edge.from, edge.on_failure
                        )
                    });
                }
            }
        }
    }
    found
}

/// Whether one of these jobs had let another one run at this time.
fn let_run(known: &Known<'_>, job: &Job, edge: Edge, parents: &[&Job], at_us: i64) -> bool {
    let was = job.retried_from.and_then(|id| known.rows(id).first());
    let waits_again = was.is_none_or(|was| was.attempt == 0);
    let was_live = parents.iter().any(|parent| {
        parent.requested_us <= job.requested_us
            && parent.finished_us.is_none_or(|at| at > job.requested_us)
    });
    let from_us = match waits_again && was_live {
        true => job.requested_us,
        false => i64::MIN,
    };
    parents.iter().any(|parent| {
        (edge.on_failure == OnFailure::Run || parent.state == "succeeded")
            && parent
                .finished_us
                .is_some_and(|at| (from_us..=at_us).contains(&at))
    })
}

/// When `rouse.cancel_flow` has returned 0, each job of the flow has ended, and no attempt starts unless its claim was
/// in line. A case is a job that the cancellation has ended. A flow is retried only after its cancellation.
pub(super) fn cancelled_rests(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for flow in flows(known) {
        let is_cancel = |call: &&&Call| matches!(call.request, Request::CancelFlow { .. });
        let mut cancels = flow.calls.iter().filter(is_cancel);
        let Some(from_us) = cancels.clone().map(|call| call.sent_us).min() else {
            continue;
        };
        let Some(last) = cancels.find(|call| call.response == Response::Ok(0)) else {
            continue;
        };
        let earlier = flow.jobs.iter();
        for job in earlier.filter(|job| job.requested_us <= last.answered_us) {
            let is_live = job.finished_us.is_none_or(|at| at > last.answered_us);
            let latest_us = last.answered_us + RELEASED_WITHIN_US;
            let late = late_start(known, job, latest_us);
            let message = || {
                format!(
                    "the flow of job {} was cancelled before {}, but the job ended at {:?}, or started late: {late:?}",
                    job.id, last.answered_us, job.finished_us
                )
            };
            let is_its_end = job.state == "cancelled"
                && job.cancelled_after.is_none()
                && job.finished_us.is_some_and(|at| at >= from_us);
            match is_its_end {
                true => found.case(job.id, is_live || late.is_some(), message),
                false => found.unless(job.id, is_live || late.is_some(), message),
            }
        }
    }
    found
}

/// An attempt at the job that started after this time. Left out are claims that the server has forgotten, and hosts
/// that could not learn of the end.
fn late_start<'a>(known: &'a Known<'a>, job: &Job, at_us: i64) -> Option<&'a Evidence> {
    let disturbed_from_us = at_us - RELEASED_WITHIN_US - known.world.run.lease_us;
    let mut started = known.evidence(job.id).iter().copied();
    started.find(|e| {
        e.started_us > at_us
            && !known.forgotten(e)
            && !known.is_shared(&e.worker)
            && !known.is_disturbed(&e.worker, disturbed_from_us, e.started_us)
    })
}

/// Each retry within a flow was requested, and repeats a job that had failed or was cancelled, at most once; none
/// repeats a job that has succeeded. A call makes as many jobs as it returns, and when it returns 0, each job that had
/// failed before was retried, unless it would be cancelled at once.
pub(super) fn retries(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for flow in flows(known) {
        let mut retried = HashSet::new();
        for job in &flow.jobs {
            let Some(from) = job.retried_from else {
                continue;
            };
            let was = flow.jobs.iter().find(|was| was.id == from);
            let may_be = was.is_some_and(|was| {
                was.n == job.n
                    && was.state != "succeeded"
                    && was.finished_us.is_some_and(|at| at <= job.requested_us)
            });
            let is_requested = flow.calls.iter().any(|call| {
                matches!(call.request, Request::RetryFlow { .. })
                    && !matches!(call.response, Response::Refused(_))
                    && call.sent_us <= job.requested_us
            });
            let is_again = !retried.insert(from);
            found.case(job.id, !may_be || !is_requested || is_again, || {
                format!(
                    "job {} repeats {was:?} (requested: {is_requested}, again: {is_again})",
                    job.id
                )
            });
        }
        for call in flow.calls {
            let (Request::RetryFlow { before_us, .. }, Response::Ok(count)) =
                (&call.request, &call.response)
            else {
                continue;
            };
            let made = flow.retried_during(call).count() as i64;
            let violated = made != *count && !flow.may_be_retried(call.answered_us);
            found.case(None, violated, || {
                format!("{:?} returned {count} and made {made} jobs", call.request)
            });
            if *count == 0 {
                let before_us = (*before_us).min(call.sent_us - COMMITS_WITHIN_US);
                found.add(left_out(known, &flow, before_us, call.answered_us));
            }
        }
    }
    found
}

/// The jobs that had failed before a time, and of which there was no retry at the end of the call.
fn left_out(known: &Known<'_>, flow: &Flow<'_>, before_us: i64, at_us: i64) -> Found {
    let mut found = Found::default();
    for node in &flow.spec.nodes {
        let Some(job) = latest(jobs_of(known, node), at_us) else {
            continue;
        };
        let had_failed =
            job.state != "succeeded" && job.finished_us.is_some_and(|at| at < before_us);
        // Another job may have its key.
        if !had_failed || node.spec.unique_key.is_some() {
            continue;
        }
        let would_be_cancelled = job.attempt == 0
            && node.after.iter().any(|edge| {
                let parent = latest(jobs_of(known, &flow.spec.nodes[edge.from]), at_us);
                edge.on_failure == OnFailure::Cancel
                    && parent.is_none_or(|parent| {
                        parent.state != "succeeded"
                            && parent.finished_us.is_some_and(|at| at <= at_us)
                    })
            });
        found.case(job.id, !would_be_cancelled, || {
            format!(
                "job {} had failed before {before_us}, and was not retried",
                job.id
            )
        });
    }
    found
}

/// The last of these jobs that had been requested at this time.
fn latest<'a>(jobs: &[&'a Job], at_us: i64) -> Option<&'a Job> {
    let requested = jobs.iter().filter(|job| job.requested_us <= at_us);
    requested.max_by_key(|job| job.id).copied()
}

/// No job of a flow waits at the end, unless one of its jobs has failed and this job waits for the retry of that job,
/// or for a job that does.
pub(super) fn not_stranded(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let end_us = known.world.dumped_us;
    for Flow { spec, .. } in flows(known) {
        // Each job comes after those that it waits for.
        let mut held: Vec<bool> = Vec::new();
        for node in &spec.nodes {
            let has_reason = node.after.iter().any(|edge| {
                match latest(jobs_of(known, &spec.nodes[edge.from]), end_us) {
                    Some(parent) if parent.finished_us.is_some() => {
                        edge.on_failure == OnFailure::Wait && parent.state != "succeeded"
                    }
                    Some(parent) => held[edge.from] || !parent.is_waiting,
                    // `no_child_stranded` checks it if the parent is a job of another flow.
                    None => true,
                }
            });
            let waits = latest(jobs_of(known, node), end_us).filter(|job| job.is_waiting);
            held.push(waits.is_some() && has_reason);
            if let Some(job) =
                latest(jobs_of(known, node), end_us).filter(|_| !node.after.is_empty())
            {
                found.case(job.id, waits.is_some() && !has_reason, || {
                    format!(
                        "job {} waits, but not for the retry of a failed job",
                        job.id
                    )
                });
            }
        }
    }
    found
}

/// A flow that was deleted has no live job and no dependency, and no attempt at one of its jobs starts unless its claim
/// was in line.
pub(super) fn deleted(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for flow in flows(known) {
        let deleted = flow.calls.iter().find(|call| {
            matches!(call.request, Request::DeleteFlow { .. })
                && matches!(call.response, Response::Ok(_))
        });
        let Some(call) = deleted else {
            continue;
        };
        if flow.may_be_retried(call.answered_us) {
            continue;
        }
        for job in &flow.jobs {
            let is_live = job.finished_us.is_none_or(|at| at > call.answered_us);
            let mut dependencies = known.world.dependencies.iter();
            let waits = dependencies.any(|dependency| dependency.job == job.id);
            // No job was running, but the claim of a job that was cancelled just before may still be in line.
            let late = late_start(known, job, call.answered_us + RELEASED_WITHIN_US);
            found.case(job.id, is_live || waits || late.is_some(), || {
                format!(
                    "the flow of job {} was deleted before {}, but the job ended at {:?}, waits ({waits}) or started late: {late:?}",
                    job.id, call.answered_us, job.finished_us
                )
            });
        }
    }
    found
}
