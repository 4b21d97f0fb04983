//! The file on one job: everything that was asked, seen and written down about it, in order.

use super::super::ledger::{Answer, Ask, What};
use super::Known;

/// All that is known of one job, for whoever looks into a violation.
pub(crate) fn file_on(known: &Known<'_>, job: i64) -> String {
    let world = known.world;
    let mut lines = Vec::new();
    let id = Some(job);
    for call in &world.calls {
        let of_it = match &call.ask {
            Ask::Enqueue { wish, .. } => {
                call.answer == Answer::Ok(job) || known.rows(job).iter().any(|row| row.n == wish.n)
            }
            _ => known.calls(job).iter().any(|one| one.number == call.number),
        };
        if of_it {
            lines.push((call.asked_us, format!("asked {:?}", call.ask)));
            lines.push((call.answered_us, format!("answered {:?}", call.answer)));
        }
    }
    for one in known.evidence(job) {
        let name = format!("attempt {} ({}) on {}", one.attempt, one.nonce, one.worker);
        lines.push((one.started_us, format!("evidence: {name} has started")));
        if let Some(stepped_us) = one.stepped_us {
            lines.push((
                stepped_us,
                format!("evidence: {name} has recorded its step"),
            ));
        }
        if let Some(ended_us) = one.ended_us {
            lines.push((ended_us, format!("evidence: {name} has come to its end")));
        }
    }
    for one in known.attempts(job) {
        let worker = known.worker_id(one.worker);
        lines.push((one.ended_us, format!("rouse.attempt on {worker}: {one:?}")));
    }
    for one in known.steps(job) {
        lines.push((one.at_us, format!("rouse.step: {one:?}")));
    }
    for one in world.records.iter().filter(|record| record.job == id) {
        lines.push((one.at_us, format!("rouse.record: {one:?}")));
    }
    for one in known.rows(job) {
        let at_us = one.finished_us.unwrap_or(world.dumped_us);
        lines.push((at_us, format!("rouse.jobs: {one:?}")));
    }
    let (first, last) = (
        lines.iter().map(|line| line.0).min().unwrap_or(0),
        lines.iter().map(|line| line.0).max().unwrap_or(0),
    );
    for one in &world.happened {
        let skipped = matches!(one.what, What::Skipped { .. });
        if one.from_us <= last && one.until_us >= first && !skipped {
            let took_ms = (one.until_us - one.from_us) / 1000;
            lines.push((one.from_us, format!("fault ({took_ms} ms): {:?}", one.what)));
        }
    }
    lines.sort();
    let lines = lines
        .into_iter()
        .map(|(at_us, text)| format!("{}.{:06} {text}\n", at_us / 1_000_000, at_us % 1_000_000));
    lines.collect()
}
