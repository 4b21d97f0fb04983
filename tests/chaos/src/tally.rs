//! Counts of a run: faults, kinds of jobs, attempts.

use std::collections::{BTreeMap, BTreeSet};

use super::cuts::{At, How};
use super::ledger::{Event, Request, Response};
use super::load::{GATED, Kind};
use super::plan::Fault;
use super::world::World;

/// How often each fault was injected, and how often it was skipped.
pub(super) fn faults(world: &World) -> BTreeMap<Fault, (u64, u64)> {
    let mut counts: BTreeMap<Fault, (u64, u64)> = BTreeMap::new();
    // A build counts only if an attempt has run it.
    let ran: BTreeSet<&String> = {
        let of_attempts = world.attempts.iter().filter_map(|a| a.sha256.as_ref());
        let of_the_end = world.jobs.iter().filter_map(|job| job.sha256.as_ref());
        of_attempts.chain(of_the_end).collect()
    };
    // Hosts that share an id are stopped when the fault ends.
    let shared: BTreeSet<&String> = {
        let happened = world.happened.iter();
        let shared = happened.filter_map(|happened| match &happened.event {
            Event::IdShared { worker, .. } => Some(worker),
            _ => None,
        });
        shared.collect()
    };
    let mut done = |fault: Fault| counts.entry(fault).or_default().0 += 1;
    for happened in &world.happened {
        match &happened.event {
            Event::HostKilled { .. } => done(Fault::KillHost),
            Event::HostFrozen { jobs, .. } if jobs.is_empty() => done(Fault::FreezeHost),
            Event::HostFrozen { .. } => done(Fault::FreezeInClaim),
            // All hosts are stopped at the end of the run: that is not a fault.
            Event::HostStopped { worker, .. }
                if is_load(world, happened.from_us) && !shared.contains(worker) =>
            {
                done(Fault::StopHost);
            }
            Event::ListenersCut { count } if *count > 0 => done(Fault::CutListeners),
            Event::LineCancelled { count } if *count > 0 => done(Fault::CancelLine),
            Event::JobCrashed { .. } => done(Fault::CrashJob),
            Event::IdShared { exits, .. } if !exits.is_empty() => done(Fault::SameId),
            Event::BackendsTerminated { count } if *count > 0 => done(Fault::TerminateBackends),
            Event::ServerCrashed { how } => done(*how),
            Event::EffectsCut { .. } => done(Fault::CutEffects),
            Event::SleepersForgotten { rows } if *rows > 0 => done(Fault::ForgetSleepers),
            Event::ModuleReplaced { sha256 } if ran.contains(sha256) => done(Fault::ReplaceModule),
            Event::ModuleReplaced { .. }
            | Event::HostStopped { .. }
            | Event::BackendsTerminated { .. }
            | Event::ListenersCut { .. }
            | Event::LineCancelled { .. }
            | Event::IdShared { .. }
            | Event::SleepersForgotten { .. }
            | Event::HostEnded { .. }
            | Event::Skipped { .. }
            | Event::LoadEnded => {}
        }
    }
    for call in &world.calls {
        match (&call.request, &call.response) {
            (Request::Pause { .. }, Response::Ok(_)) => done(Fault::PauseQueue),
            // 0: the job had already ended, and the call changed nothing.
            (Request::Cancel { .. }, Response::Ok(1)) => done(Fault::Cancel),
            (Request::Complete { .. }, Response::Ok(1)) => done(Fault::Complete),
            (Request::Fail { .. }, Response::Ok(1)) => done(Fault::Fail),
            (Request::Retry { .. }, Response::Ok(_)) => done(Fault::Retry),
            (Request::Reschedule { .. }, Response::Ok(_)) => done(Fault::Reschedule),
            (
                Request::Enqueue { .. }
                | Request::Cancel { .. }
                | Request::Complete { .. }
                | Request::Fail { .. }
                | Request::Retry { .. }
                | Request::Reschedule { .. }
                | Request::Signal { .. }
                | Request::EnqueueFlow { .. }
                | Request::CancelFlow { .. }
                | Request::RetryFlow { .. }
                | Request::DeleteFlow { .. }
                | Request::Pause { .. }
                | Request::Resume { .. },
                _,
            ) => {}
        }
    }
    for happened in &world.happened {
        if let Event::Skipped { fault, .. } = &happened.event {
            counts.entry(*fault).or_default().1 += 1;
        }
    }
    counts
}

/// How often the transaction of effects was cut at each of its boundaries.
pub(super) fn cuts(world: &World) -> BTreeMap<(At, How), u64> {
    let mut counts = BTreeMap::new();
    for at in At::ALL {
        counts.extend(How::ALL.map(|how| ((at, how), 0)));
    }
    for happened in &world.happened {
        if let Event::EffectsCut { at, how, .. } = happened.event {
            *counts.entry((at, how)).or_default() += 1;
        }
    }
    counts
}

/// The kinds of jobs in the run. A job that was rolled back, or whose producer disconnected, need not exist: its
/// request is enough.
pub(super) fn kinds(world: &World) -> BTreeSet<Kind> {
    let there: BTreeSet<i64> = world.jobs.iter().map(|job| job.n).collect();
    let specs = world.calls.iter().filter_map(|call| match &call.request {
        Request::Enqueue { spec, .. } => Some(spec),
        Request::Cancel { .. }
        | Request::Complete { .. }
        | Request::Fail { .. }
        | Request::Retry { .. }
        | Request::Reschedule { .. }
        | Request::Signal { .. }
        | Request::EnqueueFlow { .. }
        | Request::CancelFlow { .. }
        | Request::RetryFlow { .. }
        | Request::DeleteFlow { .. }
        | Request::Pause { .. }
        | Request::Resume { .. } => None,
    });
    specs
        .filter(|w| w.rolled_back || w.hangs_up_us.is_some() || there.contains(&w.n))
        .map(|spec| spec.kind)
        .collect()
}

fn is_load(world: &World, at_us: i64) -> bool {
    let ended = world.happened.iter().find(|h| h.event == Event::LoadEnded);
    ended.is_none_or(|ended| at_us < ended.from_us)
}

/// Counts of jobs and attempts, with labels.
pub(super) fn jobs(world: &World) -> Vec<(&'static str, u64)> {
    let enqueues = |is_counted: fn(&Response) -> bool| {
        let calls = world.calls.iter();
        calls
            .filter(|call| {
                matches!(call.request, Request::Enqueue { .. }) && is_counted(&call.response)
            })
            .count() as u64
    };
    let flows = |is_counted: fn(&Request) -> bool| {
        let calls = world.calls.iter();
        let done = calls.filter(|call| is_counted(&call.request) && has_acted(&call.response));
        done.count() as u64
    };
    let unknown = world.calls.iter();
    let unknown = unknown.filter(|call| matches!(call.response, Response::Unknown(_)));
    let lost = world.attempts.iter().filter(|attempt| attempt.lost);
    let gated = world.jobs.iter().filter(|job| job.handler == GATED);
    let gated: BTreeSet<i64> = gated.map(|job| job.id).collect();
    let lost_gated = lost.clone().filter(|lost| gated.contains(&lost.job));
    let released = world.records.iter().filter(|r| r.event == "released");
    let there: BTreeSet<i64> = world.jobs.iter().map(|job| job.n).collect();
    let kept = world.calls.iter().filter(|call| {
        matches!(call.response, Response::Unknown(_))
            && matches!(&call.request, Request::Enqueue { spec, .. } if there.contains(&spec.n))
    });
    vec![
        ("jobs accepted", enqueues(|a| matches!(a, Response::Ok(_)))),
        (
            "refused or rolled back",
            enqueues(|a| matches!(a, Response::Refused(_))),
        ),
        ("calls without a response", unknown.count() as u64),
        ("of these, enqueues whose job exists", kept.count() as u64),
        (
            "flows enqueued",
            flows(|r| matches!(r, Request::EnqueueFlow { .. })),
        ),
        (
            "calls that cancelled jobs of flows",
            flows(|r| matches!(r, Request::CancelFlow { .. })),
        ),
        (
            "calls that retried jobs of flows",
            flows(|r| matches!(r, Request::RetryFlow { .. })),
        ),
        (
            "calls that deleted jobs of flows",
            flows(|r| matches!(r, Request::DeleteFlow { .. })),
        ),
        ("attempts started", world.evidence.len() as u64),
        ("attempts lost", lost.count() as u64),
        ("of these, behind gates", lost_gated.count() as u64),
        ("claims released", released.count() as u64),
    ]
}

/// An id, or a number of jobs that is not 0.
fn has_acted(response: &Response) -> bool {
    matches!(response, Response::Ok(count) if *count > 0)
}

#[cfg(test)]
mod tests {
    use super::super::ledger::Incident;
    use super::super::load::JobSpec;
    use super::super::world::{Call, Job};
    use super::*;

    fn call(request: Request, response: Response) -> Call {
        Call {
            number: 0,
            request,
            sent_us: 0,
            answered_us: 1,
            response,
        }
    }

    fn done(world: &World, fault: Fault) -> u64 {
        faults(world).get(&fault).map_or(0, |(done, _)| *done)
    }

    #[test]
    fn a_call_after_the_end_of_its_job_does_not_count() {
        let mut world = World::default();
        for response in [Response::Ok(0), Response::Refused("no".into())] {
            world.calls.push(call(Request::Cancel { job: 1 }, response));
        }
        assert_eq!(done(&world, Fault::Cancel), 0);
        let cancelled = call(Request::Cancel { job: 1 }, Response::Ok(1));
        world.calls.push(cancelled);
        assert_eq!(done(&world, Fault::Cancel), 1);
    }

    #[test]
    fn a_build_counts_only_if_an_attempt_has_run_it() {
        let mut world = World::default();
        world.happened.push(Incident {
            from_us: 0,
            until_us: 1,
            event: Event::ModuleReplaced {
                sha256: "aa".into(),
            },
        });
        let job = |sha256: &str| Job {
            sha256: Some(sha256.into()),
            ..Job::default()
        };
        world.jobs.push(job("bb"));
        assert_eq!(done(&world, Fault::ReplaceModule), 0);
        world.jobs.push(job("aa"));
        assert_eq!(done(&world, Fault::ReplaceModule), 1);
    }

    #[test]
    fn a_job_that_has_crashed_its_hosts_counts_and_its_kills_count_as_kills() {
        let mut world = World::default();
        for event in [
            Event::HostKilled {
                worker: "host-1".into(),
            },
            Event::JobCrashed { job: 1, kills: 1 },
        ] {
            world.happened.push(Incident {
                from_us: 0,
                until_us: 1,
                event,
            });
        }
        assert_eq!(done(&world, Fault::CrashJob), 1);
        assert_eq!(done(&world, Fault::KillHost), 1);
    }

    #[test]
    fn a_kind_counts_only_if_a_job_of_it_exists() {
        let spec = JobSpec {
            n: 7,
            kind: Kind::IsHopeless,
            ..JobSpec::default()
        };
        let request = Request::Enqueue {
            spec,
            run_at_us: None,
        };
        let mut world = World::default();
        world
            .calls
            .push(call(request, Response::Unknown("cut".into())));
        assert!(kinds(&world).is_empty());
        world.jobs.push(Job {
            n: 7,
            ..Job::default()
        });
        assert_eq!(kinds(&world), [Kind::IsHopeless].into());
    }
}
