//! How much has happened in a run.

use std::collections::{BTreeMap, BTreeSet};

use super::ledger::{Answer, Ask, What};
use super::plan::Fault;
use super::world::World;

/// What was done of each kind, and what could not be.
pub(super) fn faults(world: &World) -> BTreeMap<Fault, (u64, u64)> {
    let mut counts: BTreeMap<Fault, (u64, u64)> = BTreeMap::new();
    let mut done = |fault: Fault| counts.entry(fault).or_default().0 += 1;
    for happened in &world.happened {
        match &happened.what {
            What::HostKilled { .. } => done(Fault::KillHost),
            What::HostFrozen { .. } => done(Fault::FreezeHost),
            // In the end all of them are stopped: that is no fault.
            What::HostStopped { .. } if is_load(world, happened.from_us) => done(Fault::StopHost),
            What::BackendsTerminated { count } if *count > 0 => done(Fault::TerminateBackends),
            What::ServerCrashed { how } => done(*how),
            What::SleepersForgotten { rows } if *rows > 0 => done(Fault::ForgetSleepers),
            What::ModuleReplaced { .. } => done(Fault::ReplaceModule),
            What::HostStopped { .. }
            | What::BackendsTerminated { .. }
            | What::SleepersForgotten { .. }
            | What::HostEnded { .. }
            | What::Skipped { .. }
            | What::LoadEnded => {}
        }
    }
    for call in &world.calls {
        match (&call.ask, &call.answer) {
            (Ask::Pause { .. }, Answer::Ok(_)) => done(Fault::PauseQueue),
            (Ask::Cancel { .. }, Answer::Ok(_)) => done(Fault::Cancel),
            (Ask::Complete { .. }, Answer::Ok(_)) => done(Fault::Complete),
            (Ask::Fail { .. }, Answer::Ok(_)) => done(Fault::Fail),
            (Ask::Retry { .. }, Answer::Ok(_)) => done(Fault::Retry),
            (Ask::Reschedule { .. }, Answer::Ok(_)) => done(Fault::Reschedule),
            (
                Ask::Enqueue { .. }
                | Ask::Cancel { .. }
                | Ask::Complete { .. }
                | Ask::Fail { .. }
                | Ask::Retry { .. }
                | Ask::Reschedule { .. }
                | Ask::Pause { .. }
                | Ask::Resume { .. },
                _,
            ) => {}
        }
    }
    for happened in &world.happened {
        if let What::Skipped { fault, .. } = &happened.what {
            counts.entry(*fault).or_default().1 += 1;
        }
    }
    counts
}

fn is_load(world: &World, at_us: i64) -> bool {
    let ended = world.happened.iter().find(|h| h.what == What::LoadEnded);
    ended.is_none_or(|ended| at_us < ended.from_us)
}

/// Jobs and attempts, in words.
pub(super) fn jobs(world: &World) -> Vec<(&'static str, u64)> {
    let enqueues = |what: fn(&Answer) -> bool| {
        let calls = world.calls.iter();
        calls
            .filter(|call| matches!(call.ask, Ask::Enqueue { .. }) && what(&call.answer))
            .count() as u64
    };
    let unknown = world.calls.iter();
    let unknown = unknown.filter(|call| matches!(call.answer, Answer::Unknown(_)));
    let lost = world.attempts.iter().filter(|attempt| attempt.lost);
    let released = world.records.iter().filter(|r| r.event == "released");
    let there: BTreeSet<i64> = world.jobs.iter().map(|job| job.n).collect();
    let kept = world.calls.iter().filter(|call| {
        matches!(call.answer, Answer::Unknown(_))
            && matches!(&call.ask, Ask::Enqueue { wish, .. } if there.contains(&wish.n))
    });
    vec![
        ("jobs accepted", enqueues(|a| matches!(a, Answer::Ok(_)))),
        (
            "refused or rolled back",
            enqueues(|a| matches!(a, Answer::Refused(_))),
        ),
        ("calls without an answer", unknown.count() as u64),
        ("of them enqueues that are there", kept.count() as u64),
        ("attempts begun", world.evidence.len() as u64),
        ("attempts lost", lost.count() as u64),
        ("claims given back", released.count() as u64),
        (
            "attempts that came to their end after another had begun",
            overtaken(world),
        ),
    ]
}

/// Attempts that went on although they had lost their job: what the fence is for. Hosts that were frozen have them, and
/// those whose claim the server has forgotten.
fn overtaken(world: &World) -> u64 {
    let mut last: BTreeMap<i64, i64> = BTreeMap::new();
    let mut overtaken = 0;
    // From the last begin to the first.
    for evidence in world.evidence.iter().rev() {
        let next = last.insert(evidence.job, evidence.begun_us);
        let ended_us = evidence.ended_us.unwrap_or(i64::MIN);
        overtaken += u64::from(next.is_some_and(|next| next < ended_us));
    }
    overtaken
}
