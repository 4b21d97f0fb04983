//! Violated guarantees about the processes of hosts.

use super::super::super::ledger::{Event, Incident};
use super::super::super::world::{Worker, World};
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of};

#[test]
fn two_hosts_that_keep_taking_their_id_from_each_other_are_found() {
    let both = |world: &mut World| {
        for happened in &mut world.happened {
            if let Event::IdShared { exits, .. } = &mut happened.event {
                exits[1].host = 1;
            }
        }
    };
    breaks("one_holder", both);
    let mut world = healthy();
    both(&mut world);
    world.happened.push(Incident {
        from_us: 191 * S,
        until_us: 191 * S,
        event: Event::BackendsTerminated { count: 1 },
    });
    breaks_nothing(&world);
    assert_eq!(cases_of("one_holder", &world), 1);
}

#[test]
fn a_host_that_crashes_because_another_has_its_id_is_found() {
    breaks("hosts_stay_up", |world| {
        world.happened.push(ended("host-9", "signal: 6 (SIGABRT)"));
    });
}

/// The host exits on its own, shortly after its start, with this status.
fn ended(worker: &str, status: &str) -> Incident {
    Incident {
        from_us: 45 * S,
        until_us: 46 * S,
        event: Event::HostEnded {
            worker: worker.into(),
            status: status.into(),
            up_us: S,
        },
    }
}

#[test]
fn a_host_that_exits_on_its_own_is_found() {
    breaks("hosts_stay_up", |world| {
        world.happened.push(ended("host-1", "exit status: 1"));
    });
}

#[test]
fn a_host_may_give_up_at_its_start_only_if_it_is_cut_off() {
    let is_cut = |world: &mut World| {
        world.happened.push(Incident {
            from_us: 45 * S + 500_000,
            until_us: 45 * S + 501_000,
            event: Event::BackendsTerminated { count: 1 },
        });
    };
    for worker in ["host-1", "host-4-9"] {
        let mut world = healthy();
        is_cut(&mut world);
        world.happened.push(ended(worker, "exit status: 1"));
        breaks_nothing(&world);
        breaks("hosts_stay_up", |world| {
            is_cut(world);
            world.happened.push(ended(worker, "signal: 6 (SIGABRT)"));
        });
    }
    // A host that has registered has completed its start.
    breaks("hosts_stay_up", |world| {
        is_cut(world);
        world.workers.push(Worker {
            incarnation: 9,
            worker_id: "host-4-9".into(),
        });
        world.happened.push(ended("host-4-9", "exit status: 1"));
    });
}

#[test]
fn a_host_that_does_not_stop_cleanly_is_found() {
    breaks("hosts_stay_up", |world| {
        for happened in &mut world.happened {
            if let Event::HostStopped { clean, .. } = &mut happened.event {
                *clean = false;
            }
        }
    });
}

#[test]
fn a_host_that_reconnects_before_its_backoff_is_found() {
    breaks("one_backoff", |world| world.tries[3].at_us = 301_200_000);
    breaks("one_backoff", |world| {
        let concurrent = world.tries[1].clone();
        world.tries.splice(2..2, vec![concurrent; 20]);
    });
}

#[test]
fn a_stopping_host_may_reconnect_sooner() {
    let mut world = healthy();
    let mut hurried = world.tries[5].clone();
    (hurried.at_us, hurried.failures) = (920_000_000, 3);
    hurried.worker = "host-1".into();
    world.tries.push(hurried.clone());
    (hurried.at_us, hurried.failures) = (920_010_000, 4);
    world.tries.push(hurried);
    breaks_nothing(&world);
}
