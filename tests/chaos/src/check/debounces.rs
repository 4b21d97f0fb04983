//! Whether the last job of a burst runs, after the burst.

use std::collections::BTreeMap;

use super::super::gates::{BURST_MAX_WAIT_US, BURST_PERIOD_US, GateKind};
use super::super::ledger::{Request, Response};
use super::super::world::Call;
use super::{Found, Known};

/// A debounced job starts no earlier than a period after each enqueue that was merged into it, or the maximum duration
/// of a burst after the first; and it has the payload of the last of these enqueues. Each enqueue is a case.
pub(super) fn hold(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut merged: BTreeMap<i64, Vec<(&Call, i64)>> = BTreeMap::new();
    for call in &known.world.calls {
        if let (Request::Enqueue { spec, .. }, Response::Ok(id)) = (&call.request, &call.response)
            && spec
                .gated
                .as_ref()
                .is_some_and(|gated| gated.door == GateKind::Calm)
        {
            merged.entry(*id).or_default().push((call, spec.n));
        }
    }
    for (id, calls) in merged {
        let Some(job) = known.rows(id).first() else {
            continue;
        };
        let started_us = known.evidence(id).iter().map(|e| e.started_us).min();
        let own = calls.iter().find(|(_, n)| *n == job.n);
        for (call, n) in &calls {
            let ends_us = call.sent_us + BURST_PERIOD_US;
            let due_us = ends_us.min(job.requested_us + BURST_MAX_WAIT_US);
            let early_us = due_us - started_us.unwrap_or(due_us);
            let is_later = own.is_some_and(|(own, _)| call.sent_us > own.answered_us);
            found.case(id, early_us > 0 || is_later, || match is_later {
                true => format!("job {id} has n = {}, but n = {n} was merged later", job.n),
                false => format!("job {id} started {early_us} µs before the end of its burst"),
            });
        }
    }
    found
}
