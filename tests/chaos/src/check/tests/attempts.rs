//! Violated guarantees about how often jobs are attempted.

use serde_json::json;

use super::super::super::ledger::{Event, Incident, Request};
use super::super::super::load::ATTEMPTS_MAX;
use super::super::super::plan::Fault;
use super::super::super::world::{Attempt, World};
use super::super::{Known, attempts};
use super::healthy::*;
use super::{breaks, breaks_nothing, cases_of, evidence, job};

#[test]
fn more_failed_attempts_than_the_maximum_are_found() {
    breaks("attempts_within_max", |world| {
        for call in &mut world.calls {
            if let Request::Enqueue { spec, .. } = &mut call.request
                && spec.n == FLAKY * 100
            {
                spec.max_attempts = Some(1);
            }
        }
    });
}

#[test]
fn more_starts_than_claims_are_found() {
    breaks("attempts_within_max", |world| {
        for number in 0..ATTEMPTS_MAX {
            let mut more = evidence(world, QUICK).clone();
            more.nonce = format!("more {number}");
            (more.started_us, more.ended_us) = (more.started_us + S / 4, None);
            world.evidence.push(more);
        }
    });
}

/// The job whose host was killed three times runs again, in a fourth attempt.
fn run_again(world: &mut World) {
    let doomed = job(world, DOOMED).clone();
    world.attempts.push(Attempt {
        job: DOOMED,
        attempt: 3,
        lost: true,
        worker: B,
        error: json!({"kind": "lost"}),
        sha256: None,
        claimed_us: doomed.claimed_us.expect("it was claimed"),
        ended_us: 66 * S,
        lease_ended_us: None,
        wait: None,
    });
    let mut fourth = evidence(world, QUICK).clone();
    (fourth.job, fourth.attempt, fourth.nonce) = (DOOMED, 4, nonce(DOOMED, 4));
    (fourth.started_us, fourth.ended_us) = (67 * S + 1_000, None);
    world.evidence.push(fourth);
    let doomed = job(world, DOOMED);
    (doomed.state, doomed.error) = ("succeeded".into(), None);
    (doomed.attempt, doomed.worker) = (4, Some(A));
    (doomed.claimed_us, doomed.finished_us) = (Some(67 * S), Some(68 * S));
    doomed.result = Some(json!({"n": doomed.n, "attempt": 4, "nonce": nonce(DOOMED, 4)}));
}

/// Replaces these kills of host B (0 is the first) with another event.
fn instead_of_kills(world: &mut World, which: &[usize], event: impl Fn() -> Event) {
    let kills = world
        .happened
        .iter_mut()
        .filter(|h| matches!(&h.event, Event::HostKilled { worker } if worker == "host-2"));
    for (_, kill) in kills.enumerate().filter(|(n, _)| which.contains(n)) {
        kill.event = event();
    }
}

fn frozen() -> Event {
    Event::HostFrozen {
        worker: "host-2".into(),
        jobs: Vec::new(),
    }
}

#[test]
fn a_job_that_runs_again_after_too_many_crashes_is_found() {
    breaks("lost_after_crashes", run_again);
}

#[test]
fn a_job_may_run_again_after_losses_that_were_not_crashes() {
    let mut world = healthy();
    run_again(&mut world);
    instead_of_kills(&mut world, &[1], frozen);
    breaks_nothing(&world);
    assert_eq!(cases_of("lost_after_crashes", &world), 0);
}

#[test]
fn a_job_that_fails_as_lost_although_its_hosts_survived_is_found() {
    breaks("lost_after_crashes", |world| {
        instead_of_kills(world, &[0], frozen);
    });
    breaks("lost_after_crashes", |world| {
        instead_of_kills(world, &[2], || Event::Skipped {
            fault: Fault::KillHost,
            why: "not injected".into(),
        });
    });
}

#[test]
fn a_job_may_fail_as_lost_before_its_last_host_can_send_a_heartbeat() {
    let mut world = healthy();
    instead_of_kills(&mut world, &[2], frozen);
    let freeze =
        |h: &&mut Incident| matches!(h.event, Event::HostFrozen { .. }) && h.from_us == 64 * S;
    let freeze = world.happened.iter_mut().find(freeze);
    freeze.expect("it was frozen").until_us = 80 * S;
    breaks_nothing(&world);
    assert_eq!(cases_of("lost_after_crashes", &world), 1);
}

#[test]
fn a_job_that_fails_as_lost_although_its_last_host_is_alive_again_is_found() {
    breaks("lost_after_crashes", |world| {
        instead_of_kills(world, &[2], frozen);
    });
}

#[test]
fn a_kill_may_take_effect_at_any_time_within_its_incident() {
    let mut world = healthy();
    // The host claimed the job a moment after the start of the incident.
    for h in world.happened.iter_mut() {
        if matches!(&h.event, Event::HostKilled { worker } if worker == "host-2")
            && h.from_us == 35 * S
        {
            (h.from_us, h.until_us) = (31 * S - 10_000, 31 * S + 10_000);
        }
    }
    breaks_nothing(&world);
    assert_eq!(cases_of("lost_after_crashes", &world), 1);
}

#[test]
fn a_host_may_be_killed_while_its_claim_is_under_way() {
    let mut world = healthy();
    for h in world.happened.iter_mut() {
        if matches!(&h.event, Event::HostKilled { worker } if worker == "host-2")
            && h.from_us == 35 * S
        {
            (h.from_us, h.until_us) = (31 * S - 45_000, 31 * S - 23_000);
        }
    }
    breaks_nothing(&world);
    assert_eq!(cases_of("lost_after_crashes", &world), 1);
    // If the kill came long before the claim, it ended an earlier process of the host.
    for h in world.happened.iter_mut() {
        if matches!(&h.event, Event::HostKilled { worker } if worker == "host-2")
            && h.from_us == 31 * S - 45_000
        {
            (h.from_us, h.until_us) = (28 * S, 28 * S);
        }
    }
    let found = attempts::lost_after_crashes(&Known::of(&world));
    assert!(!found.violations.is_empty());
}

#[test]
fn a_loss_may_count_as_a_crash_if_its_host_exits_before_the_next_heartbeat() {
    let mut world = healthy();
    instead_of_kills(&mut world, &[0], frozen);
    // The job was lost at 36 s, and its host was killed a second later.
    world.happened.push(Incident {
        from_us: 37 * S,
        until_us: 37 * S,
        event: Event::HostKilled {
            worker: "host-2".into(),
        },
    });
    breaks_nothing(&world);
}

#[test]
fn a_job_that_fails_as_lost_because_two_hosts_share_an_id_is_found() {
    breaks("lost_after_crashes", |world| {
        instead_of_kills(world, &[0, 1, 2], || Event::HostEnded {
            worker: "host-2".into(),
            status: "exit status: 1".into(),
            up_us: S,
        });
        world.happened.push(Incident {
            from_us: 29 * S,
            until_us: 70 * S,
            event: Event::IdShared {
                worker: "host-2".into(),
                exits: Vec::new(),
            },
        });
    });
}
