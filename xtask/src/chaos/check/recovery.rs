//! Whether work goes on after hosts and server have failed.

use super::super::ledger::{Happened, What};
use super::{Found, Known, Violation};
use crate::bench::percentiles::Percentiles;

/// On top of the lease, for the 99th of a hundred.
const LATE_US: i64 = 2_000_000;

/// Neither finished nor waiting for a time to come: 0.
pub(super) fn nothing_stuck(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let stuck = job.finished_us.is_none()
            && (job.state == "running" || job.available_us < known.world.dumped_us);
        found.case(job.id, stuck, || {
            format!("job {} is still {} at the end", job.id, job.state)
        });
    }
    found
}

/// For each attempt that was lost with a host that was killed, from the kill to the next begin. Left out is what has
/// another reason to wait: a server that was down, a queue that was paused, a second loss (which waits 10 s), tags that
/// only the killed host may have had, and a job whose end came from outside.
pub(super) fn taken_up_again(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let limit_ms = (known.world.run.lease_us + LATE_US) as f64 / 1000.0;
    let mut slowest = (0, None);
    for killed in &known.world.happened {
        let What::HostKilled { worker } = &killed.what else {
            continue;
        };
        let of_it = known.world.attempts.iter().filter(|a| {
            a.lost
                && known.worker_id(a.worker) == worker
                && a.claimed_us <= killed.from_us
                && a.ended_us >= killed.from_us
        });
        for lost in of_it {
            let Some(job) = known.rows(lost.job).first() else {
                continue;
            };
            let earlier = known.attempts(lost.job).iter();
            let losses = earlier
                .filter(|a| a.lost && a.attempt < lost.attempt)
                .count();
            let again = known
                .evidence(lost.job)
                .iter()
                .filter(|e| e.attempt == lost.attempt + 1 && e.begun_us > killed.from_us)
                .map(|e| e.begun_us)
                .min();
            let Some(again_us) = again else {
                continue;
            };
            let pauses = known.pauses(&job.queue);
            let paused = pauses
                .iter()
                .any(|(from, until)| *from <= again_us && *until >= killed.from_us);
            if losses > 0
                || paused
                || !job.tags.is_empty()
                || known.crashes(killed.from_us, again_us) > 0
            {
                continue;
            }
            let took_us = again_us - killed.from_us;
            slowest = slowest.max((took_us, Some(job.id)));
            found.checked += 1;
            found.measured_ms.push(took_us as f64 / 1000.0);
        }
    }
    if let Ok(Percentiles { p99, .. }) = Percentiles::of(found.measured_ms.clone())
        && p99 > limit_ms
    {
        found.violations.push(Violation {
            job: slowest.1,
            what: format!(
                "p99 from a kill to the job running again is {p99:.0} ms; {limit_ms:.0} ms are allowed; the slowest is job {:?}",
                slowest.1
            ),
        });
    }
    found
}

/// No attempt that had begun was lost with a host that was asked to stop and did, while it could reach the server.
pub(super) fn stop_burns_nothing(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for stopped in &known.world.happened {
        let What::HostStopped { worker, .. } = &stopped.what else {
            continue;
        };
        if was_disturbed(known, stopped, worker) {
            continue;
        }
        let lost = known.world.attempts.iter().find(|a| {
            a.lost
                && known.worker_id(a.worker) == worker
                && (stopped.from_us..=stopped.until_us + known.world.run.lease_us)
                    .contains(&a.ended_us)
                && a.claimed_us < stopped.from_us
                && known
                    .evidence(a.job)
                    .iter()
                    .any(|e| e.attempt == a.attempt && e.worker == *worker)
        });
        found.case(lost.map(|a| a.job), lost.is_some(), || {
            format!("{worker} was stopped in order, and an attempt was lost with it: {lost:?}")
        });
    }
    found
}

/// Whether the host may have lost leases before it was stopped, or could not say that it gives them back.
fn was_disturbed(known: &Known<'_>, stopped: &Happened, worker: &str) -> bool {
    let before_us = stopped.from_us - known.world.run.lease_us;
    known.world.happened.iter().any(|other| {
        let since_us = match &other.what {
            What::ServerCrashed { .. } => before_us,
            What::HostFrozen { worker: frozen } if frozen == worker => before_us,
            What::BackendsTerminated { .. } => stopped.from_us,
            What::HostKilled { .. }
            | What::HostFrozen { .. }
            | What::HostStopped { .. }
            | What::HostEnded { .. }
            | What::SleepersForgotten { .. }
            | What::ModuleReplaced { .. }
            | What::Skipped { .. }
            | What::LoadEnded => return false,
        };
        other.from_us <= stopped.until_us && other.until_us >= since_us
    })
}

/// A host may give up at its start where the server is down: it checks the schema then. Nothing else ends it but
/// what it is told.
pub(super) fn hosts_live(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for happened in &known.world.happened {
        match &happened.what {
            What::HostEnded {
                worker,
                status,
                up_us,
            } => {
                let excused =
                    known.crashes(happened.from_us, happened.until_us) > 0 && *up_us < 30_000_000;
                found.case(None, !excused, || {
                    format!(
                        "{worker} ended by itself after {} ms: {status}",
                        up_us / 1000
                    )
                });
            }
            What::HostStopped {
                worker,
                status,
                clean,
            } => {
                let down = known.crashes(happened.from_us, happened.until_us) > 0;
                found.case(None, !clean && !down, || {
                    format!("{worker} was told to stop and ended with {status}")
                });
            }
            What::HostKilled { .. } | What::HostFrozen { .. } => {
                found.case(None, false, String::new)
            }
            What::BackendsTerminated { .. }
            | What::ServerCrashed { .. }
            | What::SleepersForgotten { .. }
            | What::ModuleReplaced { .. }
            | What::Skipped { .. }
            | What::LoadEnded => {}
        }
    }
    found
}
