//! Whether work continues after hosts and the server have failed.

use super::super::ledger::{Event, Incident};
use super::super::load::PATIENT;
use super::super::settings;
use super::known::{IN_LINE_US, is_suspended};
use super::{Found, Known};

/// Allowed in addition to the lease, at the 99th percentile.
const LATE_US: i64 = 2_000_000;
/// The exit status of a host that gives up.
const GAVE_UP: &str = "exit status: 1";
/// Compiling the module takes seconds on a busy machine.
const STARTS_WITHIN_US: i64 = 30_000_000;

/// Every job has finished, is scheduled for later, is suspended, or waits for other jobs.
pub(super) fn nothing_stuck(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for job in &known.world.jobs {
        let stuck = job.finished_us.is_none()
            && (job.state == "running"
                || !job.is_waiting
                    && !is_suspended(job)
                    && job.available_us < known.world.dumped_us);
        found.case(job.id, stuck, || {
            format!("job {} is still {} at the end", job.id, job.state)
        });
    }
    found
}

/// For each attempt lost with a killed host, the time from the kill to the next start. Left out are jobs with another
/// reason to wait: the server was down, the queue was paused, it was a second loss (which waits 10 s), only the killed
/// host may have had the tags, the lease was longer, or an admin action ended the job.
pub(super) fn runs_again_after_kill(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for killed in &known.world.happened {
        let Event::HostKilled { worker } = &killed.event else {
            continue;
        };
        let lost_with_host = known.world.attempts.iter().filter(|a| {
            a.lost
                && known.worker_id(a.worker) == worker
                && a.claimed_us <= killed.from_us
                && a.ended_us >= killed.from_us
        });
        for lost in lost_with_host {
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
                .filter(|e| e.attempt == lost.attempt + 1 && e.started_us > killed.from_us)
                .map(|e| e.started_us)
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
                || job.handler == PATIENT
                || !job.tags.is_empty()
                || known.crashes(killed.from_us, again_us) > 0
            {
                continue;
            }
            found.took(job.id, again_us - killed.from_us);
        }
    }
    found.p99_within(
        known.world.run.lease_us + LATE_US,
        "from the kill of a host to its job running again",
    )
}

/// A host that gets a stop request, and can reach the server, loses no attempt. Each attempt that ran on it at that
/// moment is a case. Stops at the end of the run have no cases, because no attempt runs then.
pub(super) fn stop_loses_nothing(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for stopped in &known.world.happened {
        let Event::HostStopped { worker, .. } = &stopped.event else {
            continue;
        };
        let ran = known.world.evidence.iter().filter(|e| {
            e.worker == *worker
                && e.started_us < stopped.from_us
                && known.over_us(e).is_none_or(|at| at > stopped.from_us)
                // An earlier host may have had the same id.
                && !known.is_gone(worker, e.started_us, stopped.from_us)
        });
        for attempt in ran {
            if was_disturbed(known, attempt.started_us - IN_LINE_US, stopped, worker) {
                continue;
            }
            let lost = known.attempts(attempt.job).iter().any(|a| {
                a.lost
                    && a.attempt == attempt.attempt
                    && known.worker_id(a.worker) == worker
                    && a.claimed_us <= attempt.started_us
                    && a.ended_us >= stopped.from_us
            });
            found.case(attempt.job, lost, || {
                format!("{worker} was stopped cleanly and lost an attempt: {attempt:?}")
            });
        }
    }
    found
}

/// Whether the host may have lost the lease of the attempt before it was stopped, or could not release the job.
fn was_disturbed(known: &Known<'_>, since_us: i64, stopped: &Incident, worker: &str) -> bool {
    known.world.happened.iter().any(|other| {
        let since_us = match &other.event {
            Event::ServerCrashed { .. } => since_us,
            Event::HostFrozen { worker: frozen, .. } if frozen == worker => since_us,
            Event::BackendsTerminated { .. } => stopped.from_us,
            Event::HostKilled { .. }
            | Event::HostFrozen { .. }
            | Event::HostStopped { .. }
            | Event::HostEnded { .. }
            | Event::ListenersCut { .. }
            | Event::LineCancelled { .. }
            | Event::IdShared { .. }
            | Event::JobCrashed { .. }
            | Event::EffectsCut { .. }
            | Event::SleepersForgotten { .. }
            | Event::ModuleReplaced { .. }
            | Event::Skipped { .. }
            | Event::LoadEnded => return false,
        };
        other.from_us <= stopped.until_us && other.until_us >= since_us
    })
}

/// A host may give up while it starts if it cannot read the schema from the server, or if another host has its id.
/// Otherwise, it exits only on request, with a clean status if the server was up.
pub(super) fn hosts_stay_up(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for happened in &known.world.happened {
        match &happened.event {
            Event::HostEnded {
                worker,
                status,
                up_us,
            } => {
                // `one_holder` checks which of two hosts with the same id exits.
                let excused = status == GAVE_UP
                    && (known.is_shared(worker)
                        || gave_up_at_its_start(known, happened, worker, *up_us));
                found.case(None, !excused, || {
                    format!(
                        "{worker} exited on its own after {} ms: {status}",
                        up_us / 1000
                    )
                });
            }
            Event::HostStopped {
                worker,
                status,
                clean,
            } => {
                let down = known.crashes(happened.from_us, happened.until_us) > 0;
                let excused = status == GAVE_UP && down;
                found.case(None, !clean && !excused, || {
                    format!("{worker} exited with {status} on a stop request")
                });
            }
            Event::HostKilled { .. }
            | Event::HostFrozen { .. }
            | Event::BackendsTerminated { .. }
            | Event::ListenersCut { .. }
            | Event::LineCancelled { .. }
            | Event::IdShared { .. }
            | Event::JobCrashed { .. }
            | Event::ServerCrashed { .. }
            | Event::EffectsCut { .. }
            | Event::SleepersForgotten { .. }
            | Event::ModuleReplaced { .. }
            | Event::Skipped { .. }
            | Event::LoadEnded => {}
        }
    }
    found
}

/// Of two hosts with the same id, only the one that does not hold the id exits. Exits while the server cannot be
/// reached are left out.
pub(super) fn one_holder(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    for happened in &known.world.happened {
        let Event::IdShared { worker, exits } = &happened.event else {
            continue;
        };
        let exits_of = |host: usize| {
            let exits = exits.iter().filter(|exit| {
                exit.host == host
                    && !known.cuts(exit.from_us, exit.until_us)
                    && known.crashes(exit.from_us, exit.until_us) == 0
            });
            exits.count()
        };
        let (first, second) = (exits_of(0), exits_of(1));
        if first + second == 0 {
            continue;
        }
        found.case(None, first > 0 && second > 0, || {
            format!("two hosts have taken the id {worker} from each other: the first exited {first} times, the second {second} times")
        });
    }
    found
}

fn gave_up_at_its_start(known: &Known<'_>, ended: &Incident, worker: &str, up_us: i64) -> bool {
    let is_cut = known.crashes(ended.from_us, ended.until_us) > 0
        || known.world.happened.iter().any(|h| {
            matches!(h.event, Event::BackendsTerminated { .. })
                && h.from_us <= ended.until_us
                && h.until_us >= ended.from_us
        });
    // If the id is also that of the previous host, it is unknown whether this one has registered.
    let was_starting = match settings::keeps_its_id(worker) {
        true => up_us < STARTS_WITHIN_US,
        false => !known.has_registered(worker),
    };
    is_cut && was_starting
}
