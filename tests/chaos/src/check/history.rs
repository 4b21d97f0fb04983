//! The history of one job: all requests, evidence and rows about it, in order.

use super::super::ledger::{Event, Request, Response};
use super::Known;

/// The history of one job, to investigate a violation.
pub(crate) fn job_history(known: &Known<'_>, job: i64) -> String {
    let world = known.world;
    let mut lines = Vec::new();
    let id = Some(job);
    for call in &world.calls {
        let concerns_job = match &call.request {
            Request::Enqueue { spec, .. } => {
                call.response == Response::Ok(job)
                    || known.rows(job).iter().any(|row| row.n == spec.n)
            }
            Request::EnqueueFlow { spec } => {
                let mut nodes = spec.nodes.iter();
                nodes.any(|node| known.rows(job).iter().any(|row| row.n == node.spec.n))
            }
            _ => {
                let rows = known.rows(job).iter();
                let mut calls = known
                    .calls(job)
                    .iter()
                    .chain(rows.flat_map(|row| known.flow_calls(row)));
                calls.any(|of_job| of_job.number == call.number)
            }
        };
        if concerns_job {
            lines.push((call.sent_us, format!("sent {:?}", call.request)));
            lines.push((call.answered_us, format!("answered {:?}", call.response)));
        }
    }
    for evidence in known.evidence(job) {
        let name = format!(
            "attempt {} ({}) on {}",
            evidence.attempt, evidence.nonce, evidence.worker
        );
        lines.push((evidence.started_us, format!("evidence: {name} has started")));
        if let Some(stepped_us) = evidence.stepped_us {
            lines.push((
                stepped_us,
                format!("evidence: {name} has recorded its step"),
            ));
        }
        if let Some(ended_us) = evidence.ended_us {
            lines.push((ended_us, format!("evidence: {name} has ended")));
        }
    }
    for attempt in known.attempts(job) {
        let worker = known.worker_id(attempt.worker);
        lines.push((
            attempt.ended_us,
            format!("rouse.attempt on {worker}: {attempt:?}"),
        ));
    }
    for kept in world.signals.iter().filter(|kept| kept.job == job) {
        lines.push((world.dumped_us, format!("rouse.signal: {kept:?}")));
    }
    for made in known.enqueued_by(job) {
        let text = format!("has enqueued job {}: n {}, {}", made.id, made.n, made.state);
        lines.push((made.requested_us, text));
    }
    for step in known.steps(job) {
        lines.push((step.at_us, format!("rouse.step: {step:?}")));
    }
    for record in world.records.iter().filter(|record| record.job == id) {
        lines.push((record.at_us, format!("rouse.record: {record:?}")));
    }
    for row in known.rows(job) {
        let at_us = row.finished_us.unwrap_or(world.dumped_us);
        lines.push((at_us, format!("rouse.jobs: {row:?}")));
    }
    let (first, last) = (
        lines.iter().map(|line| line.0).min().unwrap_or(0),
        lines.iter().map(|line| line.0).max().unwrap_or(0),
    );
    for fault in &world.happened {
        let skipped = matches!(fault.event, Event::Skipped { .. });
        if fault.from_us <= last && fault.until_us >= first && !skipped {
            let took_ms = (fault.until_us - fault.from_us) / 1000;
            lines.push((
                fault.from_us,
                format!("fault ({took_ms} ms): {:?}", fault.event),
            ));
        }
    }
    lines.sort();
    let lines = lines
        .into_iter()
        .map(|(at_us, text)| format!("{}.{:06} {text}\n", at_us / 1_000_000, at_us % 1_000_000));
    lines.collect()
}
