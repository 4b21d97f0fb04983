//! Checks worlds in which exactly one guarantee is violated.

mod effects;
mod flows;
mod gates;
mod healthy;
mod suspended;

use std::collections::BTreeMap;

use serde_json::json;

use super::super::ledger::{Event, Incident, Request, Response, Run};
use super::super::load::ATTEMPTS_MAX;
use super::super::plan::Fault;
use super::super::world::{Attempt, Due, Evidence, Job, LoginAway, Worker, World};
use super::{Known, RULES, Rule, check};
use healthy::*;

/// Violates one guarantee in the healthy world, and asserts that exactly its rule has violations.
fn breaks(rule: &str, mutate: impl FnOnce(&mut World)) {
    let mut world = healthy();
    mutate(&mut world);
    let broken: Vec<_> = check(&Known::of(&world))
        .into_iter()
        .filter(|(_, found)| !found.violations.is_empty())
        .map(|(rule, _)| rule.name)
        .collect();
    assert_eq!(broken, [rule]);
}

/// The number of cases of this rule.
fn cases_of(name: &str, world: &World) -> u64 {
    let all = check(&Known::of(world));
    let found = all.into_iter().find(|(rule, _)| rule.name == name);
    found.expect("the rule exists").1.checked
}

fn breaks_nothing(world: &World) {
    for (rule, found) in check(&Known::of(world)) {
        assert!(
            found.violations.is_empty(),
            "{}: {:?}",
            rule.name,
            found.violations
        );
    }
}

fn job(world: &mut World, id: i64) -> &mut Job {
    let job = world.jobs.iter_mut().find(|job| job.id == id);
    job.expect("the healthy world has it")
}

fn evidence(world: &mut World, id: i64) -> &mut Evidence {
    let evidence = world.evidence.iter_mut().find(|e| e.job == id);
    evidence.expect("the healthy world has it")
}

#[test]
fn a_healthy_world_violates_no_rule_and_has_a_case_of_every_rule() {
    for (rule, found) in check(&Known::of(&healthy())) {
        assert!(
            found.violations.is_empty(),
            "{}: {:?}",
            rule.name,
            found.violations
        );
        assert!(found.checked > 0, "{}", rule.name);
    }
    let names: std::collections::HashSet<_> = RULES.iter().map(|rule| rule.name).collect();
    assert_eq!(names.len(), RULES.len());
}

#[test]
fn the_reliability_page_lists_every_rule_with_its_guarantee() {
    let page = include_str!("../../../../docs/explanation/reliability.md");
    let listed: BTreeMap<&str, &str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split_once("` | "))
        .filter(|(name, _)| !name.contains('`'))
        .filter_map(
            |(name, rest)| match rest.split(" | ").collect::<Vec<_>>()[..] {
                [guarantee, _cases, _violations] => Some((name, guarantee)),
                _ => None,
            },
        )
        .collect();
    let rules: BTreeMap<&str, &str> = RULES
        .iter()
        .map(|rule| (rule.name, rule.guarantee))
        .collect();
    assert_eq!(listed, rules);
}

#[test]
fn an_accepted_job_that_does_not_exist_is_found() {
    breaks("accepted_jobs_exist", |world| {
        world.jobs.retain(|job| job.id != FAR)
    });
}

#[test]
fn a_retry_that_does_not_exist_is_found() {
    breaks("accepted_jobs_exist", |world| {
        world.jobs.retain(|job| job.id != AGAIN[1])
    });
}

#[test]
fn a_job_whose_enqueue_was_refused_or_rolled_back_is_found() {
    let answered = |world: &mut World, response: Response| {
        let call = world
            .calls
            .iter_mut()
            .find(|c| c.response == Response::Ok(QUICK));
        call.expect("the call exists").response = response;
    };
    breaks("refused_leaves_nothing", |world| {
        answered(world, Response::Refused("no".into()));
    });
    breaks("refused_leaves_nothing", |world| {
        answered(world, Response::Unknown("rolled back".into()));
        for call in &mut world.calls {
            if let Request::Enqueue { spec, .. } = &mut call.request {
                spec.rolled_back |= spec.n == QUICK * 100;
            }
        }
    });
}

#[test]
fn a_job_that_exists_under_two_ids_is_found() {
    breaks("accepted_jobs_exist", |world| {
        let mut twin = job(world, FAR).clone();
        twin.id = 99;
        world.jobs.push(twin);
    });
}

#[test]
fn a_job_that_nobody_enqueued_is_found() {
    breaks("refused_leaves_nothing", |world| {
        let mut stray = job(world, FAR).clone();
        (stray.id, stray.n) = (99, 9_900);
        world.jobs.push(stray);
    });
}

#[test]
fn a_job_that_is_finished_and_live_is_found() {
    breaks("settled_once", |world| {
        let mut live = job(world, QUICK).clone();
        (live.state, live.finished_us) = ("queued".into(), None);
        (live.claimed_us, live.worker, live.result) = (None, None, None);
        live.available_us = world.dumped_us + S;
        world.jobs.push(live);
    });
}

#[test]
fn an_attempt_that_has_ended_twice_is_found() {
    breaks("settled_once", |world| {
        let mut again = world.attempts.clone();
        again.retain(|attempt| attempt.job == FLAKY);
        world.attempts.append(&mut again);
    });
}

#[test]
fn an_outcome_with_the_nonce_of_another_attempt_is_found() {
    breaks("stale_outcome", |world| {
        let result = job(world, RELEASED).result.as_mut();
        result.expect("it has succeeded")["nonce"] = json!("given back");
    });
}

#[test]
fn an_outcome_of_another_worker_is_found() {
    breaks("stale_outcome", |world| job(world, QUICK).worker = Some(B));
}

#[test]
fn an_outcome_of_an_attempt_that_never_started_is_found() {
    breaks("stale_outcome", |world| {
        world.evidence.retain(|e| e.job != QUICK)
    });
}

#[test]
fn a_failed_attempt_with_the_nonce_of_another_is_found() {
    breaks("stale_outcome", |world| {
        let failed = world.attempts.iter_mut().find(|a| a.job == FLAKY);
        failed.expect("it has failed once").error["details"]["nonce"] = json!("other");
    });
}

/// Another attempt at the first job starts after its end.
fn starts_again(world: &mut World) -> i64 {
    let finished_us = job(world, QUICK).finished_us.expect("it has ended");
    let mut again = evidence(world, QUICK).clone();
    again.nonce = "again".into();
    (again.started_us, again.ended_us) = (finished_us + S / 4, None);
    let started_us = again.started_us;
    world.evidence.push(again);
    started_us
}

#[test]
fn an_attempt_that_starts_after_the_end_of_its_job_is_found() {
    breaks("no_start_after_end", |world| {
        starts_again(world);
    });
}

#[test]
fn an_attempt_that_starts_after_an_end_by_an_admin_is_not_a_case() {
    let mut world = healthy();
    let mut late = evidence(&mut world, QUICK).clone();
    (late.job, late.nonce) = (CANCELLED, "late".into());
    late.started_us = 11 * S + 500_000;
    world.evidence.push(late);
    breaks_nothing(&world);
}

#[test]
fn an_attempt_that_continues_after_it_has_lost_its_job_is_found() {
    breaks("revoked", |world| {
        evidence(world, FROZEN).ended_us = Some(129 * S + 2_000);
    });
}

#[test]
fn an_attempt_whose_host_was_killed_is_not_a_case_of_revocation() {
    let mut world = healthy();
    let cases = |world: &World| cases_of("revoked", world);
    assert_eq!(cases(&world), 1);
    world.happened.push(Incident {
        from_us: 126 * S,
        until_us: 126 * S,
        event: Event::HostKilled {
            worker: "host-2".into(),
        },
    });
    assert_eq!(cases(&world), 0);
}

#[test]
fn an_attempt_that_starts_from_the_line_under_a_forgotten_claim_does_not_revoke_another() {
    let mut world = healthy();
    evidence(&mut world, FROZEN).ended_us = Some(129 * S + 2_000);
    let frozen = evidence(&mut world, FROZEN).clone();
    let mut all = world.evidence.iter_mut();
    let next = all.find(|it| it.job == FROZEN && it.started_us > frozen.started_us);
    let next = next.expect("it has run again");
    (next.attempt, next.started_us) = (frozen.attempt, frozen.started_us + S);
    let crashed_us = frozen.started_us - 1;
    let violations = |world: &World| super::settled::revoked(&Known::of(world)).violations.len();
    assert_eq!(violations(&world), 1);
    world.happened.push(Incident {
        from_us: crashed_us,
        until_us: crashed_us,
        event: Event::ServerCrashed {
            how: Fault::CrashServer,
        },
    });
    assert_eq!(violations(&world), 0);
}

#[test]
fn a_late_start_under_a_forgotten_claim_is_excused() {
    let mut world = healthy();
    let at_us = starts_again(&mut world) + S / 2;
    world.happened.push(Incident {
        from_us: at_us,
        until_us: at_us + S,
        event: Event::ServerCrashed {
            how: Fault::CrashServer,
        },
    });
    breaks_nothing(&world);
}

#[test]
fn a_step_written_by_a_stale_attempt_is_found() {
    // Under the claim of its successor.
    breaks("stale_step", |world| world.steps[0].attempt = 2);
    // After it had ended.
    breaks("stale_step", |world| world.steps[0].at_us = 90 * S);
    // By a worker that did not hold the job.
    breaks("stale_step", |world| world.steps[0].worker = C);
}

#[test]
fn a_forgotten_or_repeated_step_is_found() {
    breaks("steps_are_kept", |world| {
        world.steps.retain(|step| step.job != STEPPED)
    });
    breaks("steps_are_kept", |world| {
        let result = job(world, STEPPED).result.as_mut();
        result.expect("it has succeeded")["first"] = json!(nonce(STEPPED, 2));
    });
    breaks("steps_are_kept", |world| {
        let mut all = world.evidence.iter_mut();
        let second = all.find(|e| e.job == STEPPED && e.attempt == 2);
        second.expect("it has started").stepped_us = Some(83 * S);
    });
}

#[test]
fn the_progress_of_a_stale_attempt_is_found() {
    // Under the fence of its successor.
    breaks("stale_progress", |world| {
        world.progress[0].step = nonce(STEPPED, 1)
    });
    // Under its own, long after it had lost the job.
    breaks("stale_progress", |world| {
        world.progress[1].reported_us = 83 * S + 500_000
    });
    // After the job had ended.
    breaks("stale_progress", |world| {
        world.progress[0].reported_us = 86 * S
    });
}

#[test]
fn a_start_before_run_at_is_found() {
    breaks("no_early_start", |world| {
        evidence(world, LATER).started_us = 15 * S - 1;
        job(world, LATER).claimed_us = Some(15 * S - 1_000);
    });
}

#[test]
fn a_start_before_the_rescheduled_time_is_found() {
    breaks("no_early_start", |world| {
        evidence(world, MOVED).started_us = 17 * S;
        job(world, MOVED).claimed_us = Some(17 * S - 1_000);
    });
}

#[test]
fn a_claim_of_a_paused_queue_is_found() {
    breaks("pause_holds", |world| {
        for call in &mut world.calls {
            if matches!(call.request, Request::Pause { .. }) {
                (call.sent_us, call.answered_us) = (72 * S, 72 * S + 1_000);
            }
        }
    });
}

#[test]
fn a_pause_without_new_jobs_is_not_a_case() {
    let mut world = healthy();
    assert_eq!(cases_of("pause_holds", &world), 1);
    job(&mut world, WAITED).requested_us = 99 * S;
    assert_eq!(cases_of("pause_holds", &world), 0);
}

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

/// The job whose host was killed three times continues with a fourth attempt.
fn continues(world: &mut World) {
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

/// Replaces these kills of host B (0 is the first) by another event.
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
fn a_job_that_continues_after_too_many_crashes_is_found() {
    breaks("lost_after_crashes", continues);
}

#[test]
fn a_job_may_continue_after_losses_that_were_not_crashes() {
    let mut world = healthy();
    continues(&mut world);
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
fn a_host_may_be_killed_at_any_time_of_the_entry_of_its_kill() {
    let mut world = healthy();
    // Its claim followed a moment later.
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
    // Long before the claim, it is the crash of another process.
    for h in world.happened.iter_mut() {
        if matches!(&h.event, Event::HostKilled { worker } if worker == "host-2")
            && h.from_us == 31 * S - 45_000
        {
            (h.from_us, h.until_us) = (28 * S, 28 * S);
        }
    }
    let found = super::attempts::lost_after_crashes(&Known::of(&world));
    assert!(!found.violations.is_empty());
}

#[test]
fn a_loss_may_count_if_its_host_exits_before_a_heartbeat() {
    let mut world = healthy();
    instead_of_kills(&mut world, &[0], frozen);
    // Lost at 36 s, and killed a second later.
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

/// An attempt at the job that was cancelled in line starts `late_us` after the response, on the worker with this id.
fn starts_late(world: &mut World, worker: &str, late_us: i64) {
    for known in &mut world.workers {
        if known.incarnation == A {
            known.worker_id = worker.into();
        }
    }
    for evidence in &mut world.evidence {
        if evidence.worker == "host-1" {
            evidence.worker = worker.into();
        }
    }
    let mut late = evidence(world, QUICK).clone();
    (late.job, late.nonce) = (IN_LINE, "late".into());
    (late.started_us, late.ended_us) = (150 * S + 301_000 + late_us, None);
    world.evidence.push(late);
}

#[test]
fn a_late_start_of_a_claim_that_was_cancelled_in_line_is_found() {
    breaks("ended_in_line", |world| {
        starts_late(world, "host-1", 350_000)
    });
    // The third seat polls: it releases claims that have not started within a second.
    breaks("ended_in_line", |world| {
        starts_late(world, "host-2-7", 2_600_000)
    });
    for (worker, late_us) in [("host-1", 150_000), ("host-2-7", 1_400_000)] {
        let mut world = healthy();
        starts_late(&mut world, worker, late_us);
        breaks_nothing(&world);
        assert_eq!(cases_of("ended_in_line", &world), 1);
    }
}

#[test]
fn a_host_that_was_cut_off_may_start_a_cancelled_claim() {
    let mut world = healthy();
    starts_late(&mut world, "host-1", 1_400_000);
    world.happened.push(Incident {
        from_us: 149 * S,
        until_us: 149 * S,
        event: Event::BackendsTerminated { count: 1 },
    });
    breaks_nothing(&world);
}

#[test]
fn a_job_that_had_started_when_it_was_cancelled_is_not_a_case_of_the_line() {
    let mut world = healthy();
    starts_late(&mut world, "host-1", -200_000);
    breaks_nothing(&world);
    assert_eq!(cases_of("ended_in_line", &world), 0);
}

#[test]
fn an_attempt_that_continues_after_its_host_missed_the_cancellation_is_found() {
    breaks("cancels_arrive", |world| {
        evidence(world, NOTIFIED).ticked_us = Some(164 * S);
    });
    breaks("cancels_arrive", |world| {
        evidence(world, NOTIFIED).ended_us = Some(167 * S);
    });
}

#[test]
fn a_cancellation_during_other_faults_is_not_a_case() {
    let mut world = healthy();
    assert_eq!(cases_of("cancels_arrive", &world), 1);
    for event in [
        Event::BackendsTerminated { count: 1 },
        Event::ServerCrashed {
            how: Fault::CrashServer,
        },
        Event::HostFrozen {
            worker: "host-1".into(),
            jobs: Vec::new(),
        },
    ] {
        world.happened.push(Incident {
            from_us: 162 * S,
            until_us: 162 * S,
            event,
        });
        assert_eq!(cases_of("cancels_arrive", &world), 0);
        world.happened.pop();
    }
}

/// The job that a frozen host had claimed runs only after the host is back.
fn runs_late(world: &mut World) {
    for evidence in &mut world.evidence {
        if evidence.job == LARGE[0] {
            evidence.started_us = 181 * S + 1_000;
            evidence.ended_us = None;
        }
    }
    let late = job(world, LARGE[0]);
    (late.claimed_us, late.finished_us) = (Some(181 * S), Some(182 * S));
}

#[test]
fn a_job_that_waits_for_a_host_frozen_during_its_claim_is_found() {
    breaks("frozen_claims_run", runs_late);
    // The claim was never committed, so the database does not know it.
    breaks("frozen_claims_run", |world| {
        runs_late(world);
        world.attempts.retain(|attempt| attempt.job != LARGE[0]);
        let late = job(world, LARGE[0]);
        (late.attempt, late.uncounted) = (1, 0);
        late.result.as_mut().expect("it has succeeded")["attempt"] = json!(1);
        evidence(world, LARGE[0]).attempt = 1;
    });
}

#[test]
fn a_call_that_waits_for_a_frozen_host_is_found() {
    breaks("frozen_blocks_nothing", |world| {
        for call in &mut world.calls {
            if matches!(call.request, Request::Cancel { job } if job == LARGE[1]) {
                call.answered_us = 174 * S;
            }
        }
    });
}

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

#[test]
fn a_job_that_ends_differently_from_its_handler_is_found() {
    breaks("ends_as_decided", |world| {
        job(world, HOPELESS).state = "timed_out".into()
    });
    breaks("ends_as_decided", |world| {
        job(world, QUICK).result.as_mut().expect("it has one")["n"] = json!(0);
    });
}

#[test]
fn an_answered_cancellation_that_does_not_hold_is_found() {
    breaks("admin_ends_hold", |world| {
        let request = Request::Cancel { job: QUICK };
        let mut call = world.calls[0].clone();
        (call.request, call.response) = (request, Response::Ok(1));
        world.calls.push(call);
    });
}

#[test]
fn an_end_by_an_admin_that_nobody_requested_is_found() {
    breaks("admin_ends_were_requested", |world| {
        world
            .calls
            .retain(|call| !matches!(call.request, Request::Cancel { .. }));
    });
    breaks("admin_ends_were_requested", |world| {
        world
            .calls
            .retain(|call| !matches!(call.request, Request::Complete { .. }));
    });
}

#[test]
fn two_live_jobs_with_the_same_key_are_found() {
    breaks("unique_key", |world| {
        job(world, KEYED[0]).finished_us = Some(21 * S)
    });
}

#[test]
fn an_enqueue_that_returned_the_live_job_of_another_tenant_is_found() {
    breaks("accepted_jobs_exist", |world| {
        job(world, KEYED[0]).tenant = Some("another".into());
    });
}

#[test]
fn two_live_retries_of_one_job_are_found() {
    breaks("one_retry", |world| {
        job(world, AGAIN[0]).finished_us = Some(41 * S)
    });
}

#[test]
fn a_due_job_that_still_waits_at_the_end_is_found() {
    breaks("nothing_stuck", |world| {
        job(world, FAR).available_us = world.dumped_us - S;
    });
}

#[test]
fn a_job_that_still_runs_at_the_end_is_found() {
    breaks("nothing_stuck", |world| {
        job(world, FAR).state = "running".into()
    });
}

#[test]
fn an_orphan_that_waits_too_long_is_found() {
    breaks("runs_again_after_kill", |world| {
        for evidence in world.evidence.iter_mut() {
            if evidence.job == ORPHAN && evidence.attempt == 2 {
                evidence.started_us = 29 * S + 1_000;
            }
        }
        job(world, ORPHAN).claimed_us = Some(29 * S);
        job(world, ORPHAN).finished_us = Some(30 * S);
    });
}

#[test]
fn an_attempt_lost_with_a_host_that_was_stopped_in_order_is_found() {
    breaks("stop_loses_nothing", |world| {
        world.records.retain(|record| record.job != Some(STOPPED));
        world.attempts.push(Attempt {
            job: STOPPED,
            attempt: 1,
            lost: true,
            worker: B,
            claimed_us: 141 * S,
            ended_us: 146 * S,
            ..Attempt::default()
        });
        let stopped = job(world, STOPPED);
        (stopped.attempt, stopped.uncounted) = (2, 1);
        stopped.claimed_us = Some(146 * S);
        stopped.finished_us = Some(147 * S);
        let result = stopped.result.as_mut().expect("it has succeeded");
        (result["attempt"], result["nonce"]) = (json!(2), json!(nonce(STOPPED, 2)));
        let mut all = world.evidence.iter_mut();
        let second = all.rfind(|e| e.job == STOPPED).expect("it has started");
        (second.attempt, second.nonce) = (2, nonce(STOPPED, 2));
        (second.started_us, second.ended_us) = (146 * S + 1_000, Some(146 * S + 2_000));
    });
}

#[test]
fn a_stop_is_a_case_only_if_its_attempt_had_no_other_fault() {
    let mut world = healthy();
    assert_eq!(cases_of("stop_loses_nothing", &world), 1);
    world.happened.push(Incident {
        from_us: 141 * S + 500_000,
        until_us: 141 * S + 600_000,
        event: Event::ServerCrashed {
            how: Fault::KillBackend,
        },
    });
    assert_eq!(cases_of("stop_loses_nothing", &world), 0);
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
fn a_host_that_does_not_stop_in_order_is_found() {
    breaks("hosts_stay_up", |world| {
        for happened in &mut world.happened {
            if let Event::HostStopped { clean, .. } = &mut happened.event {
                *clean = false;
            }
        }
    });
}

#[test]
fn a_rule_without_a_case_fails_a_run_that_needs_one() {
    let rule = |name: &str| -> &Rule {
        let found = RULES.iter().find(|rule| rule.name == name);
        found.expect("the rule exists")
    };
    let run = |minutes, faults: &[Fault]| Run {
        minutes,
        faults: faults.to_vec(),
        ..Run::default()
    };
    assert!(rule("settled_once").is_needed(&run(0.1, &[])));
    assert!(!rule("revoked").is_needed(&run(30.0, &[Fault::KillHost])));
    assert!(rule("revoked").is_needed(&run(1.0, &[Fault::FreezeHost])));
    assert!(!rule("stop_loses_nothing").is_needed(&run(1.0, &[Fault::StopHost])));
    assert!(rule("stop_loses_nothing").is_needed(&run(5.0, &[Fault::StopHost])));
}

#[test]
fn a_queued_job_claimed_before_an_orphan_is_found() {
    breaks("orphans_first", |world| {
        let lost = world.attempts.iter_mut().find(|a| a.job == ORPHAN);
        // Its adopter has claimed other jobs since then.
        lost.expect("it was lost").lease_ended_us = Some(10 * S);
    });
}

#[test]
fn a_queued_job_may_go_first_while_the_handler_of_an_orphan_is_not_served() {
    let mut world = healthy();
    let lost = world.attempts.iter_mut().find(|a| a.job == ORPHAN);
    lost.expect("it was lost").lease_ended_us = Some(10 * S);
    // The adoption is the first claim of this handler.
    job(&mut world, ORPHAN).handler = "chaos.other".into();
    let found = super::order::orphans_first(&Known::of(&world));
    assert!(found.checked > 0 && found.violations.is_empty());
}

#[test]
fn a_queued_job_may_go_first_while_the_login_of_an_orphans_handler_does_not_answer() {
    let mut world = healthy();
    let lost = world.attempts.iter_mut().find(|a| a.job == ORPHAN);
    let lost = lost.expect("it was lost");
    lost.lease_ended_us = Some(10 * S);
    let adopted_us = lost.ended_us;
    let orphan = job(&mut world, ORPHAN);
    let handler = orphan.handler.clone();
    let adopter = orphan.worker.expect("it was adopted");
    world.logins_away.push(LoginAway {
        worker: Known::of(&world).worker_id(adopter).to_owned(),
        handler,
        from_us: 9 * S,
        until_us: Some(adopted_us - 1),
    });
    breaks_nothing(&world);
    // It answered again before the lease ended.
    world.logins_away[0].until_us = Some(10 * S - 1);
    let found = super::order::orphans_first(&Known::of(&world));
    assert!(!found.violations.is_empty());
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

#[test]
fn a_job_that_runs_before_the_jobs_that_it_waits_for_is_found() {
    let ends = |at_us| move |world: &mut World| job(world, QUICK).finished_us = Some(at_us);
    breaks("no_child_before_parents", ends(13 * S + 1_001));
    // A claim that has read the clock a moment before the end.
    let mut world = healthy();
    ends(13 * S + 999)(&mut world);
    breaks_nothing(&world);
    breaks("no_child_before_parents", |world| {
        // A claim from which no attempt has started.
        evidence(world, CHILD).started_us = 15 * S;
        (job(world, CHILD).claimed_us, job(world, CHILD).finished_us) =
            (Some(10 * S), Some(16 * S));
    });
    breaks("no_child_before_parents", |world| {
        job(world, CHILD).after = Some(json!({"h": HOPELESS}));
    });
    breaks("no_child_before_parents", |world| {
        job(world, CHILD).after = None;
    });
}

#[test]
fn a_job_that_waits_without_a_dependency_or_is_cancelled_without_a_failure_is_found() {
    breaks("no_child_stranded", |world| {
        let child = job(world, DROPPED);
        (child.state, child.finished_us) = ("queued".into(), None);
        (child.is_waiting, child.cancelled_after) = (true, None);
    });
    breaks("no_child_stranded", |world| {
        job(world, DROPPED).after = Some(json!({"q": QUICK}));
        job(world, DROPPED).cancelled_after = Some(QUICK);
    });
}

#[test]
fn a_due_time_with_two_jobs_or_none_is_found_and_so_is_one_that_is_left_out() {
    let twice = |world: &mut World| {
        let again = world.due[1].clone();
        world.due.push(again);
    };
    breaks("each_due_time_once", twice);
    breaks("each_due_time_once", |world| world.due[1].jobs = 0);
    breaks("each_due_time_once", |world| drop(world.due.remove(1)));
    breaks("each_due_time_once", |world| {
        world.due.push(Due {
            job: Some(1),
            jobs: 1,
            ..Due::default()
        });
    });
}
