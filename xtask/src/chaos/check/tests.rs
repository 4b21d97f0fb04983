//! The checker is held against worlds in which exactly one promise is broken.

use serde_json::json;

use super::super::ledger::{Answer, Ask, Happened, Run, What};
use super::super::load::{ATTEMPTS_MAX, WORK, Wish};
use super::super::plan::Fault;
use super::super::world::{Attempt, Call, Evidence, Job, Record, Worker, World};
use super::{RULES, check};

const S: i64 = 1_000_000;
const A: i64 = 1;
const B: i64 = 2;
const C: i64 = 3;

// The jobs of the healthy world.
const QUICK: i64 = 10;
const FLAKY: i64 = 11;
const HOPELESS: i64 = 12;
const ORPHAN: i64 = 13;
const DOOMED: i64 = 14;
const LATER: i64 = 15;
const FAR: i64 = 16;
const CANCELLED: i64 = 17;
const COMPLETED: i64 = 18;
const FAILED: i64 = 19;
const KEYED: [i64; 2] = [20, 21];
const AGAIN: [i64; 2] = [22, 23];
const RELEASED: i64 = 24;
const MOVED: i64 = 25;

/// Puts jobs into a world, one at a time.
#[derive(Default)]
struct Builder(World);

impl Builder {
    fn call(&mut self, at_us: i64, ask: Ask, answer: Answer) {
        self.0.calls.push(Call {
            number: self.0.calls.len() as u64,
            ask,
            asked_us: at_us,
            answered_us: at_us + 1_000,
            answer,
        });
    }

    /// A job that was enqueued at `at_us`, and is live.
    fn job(&mut self, id: i64, at_us: i64, wish: Wish) -> &mut Job {
        let wish = Wish {
            n: id * 100,
            handler: WORK.into(),
            queue: "default".into(),
            ..wish
        };
        let run_at_us = wish.run_in_ms.map(|ms| at_us + ms * 1000);
        let job = Job {
            id,
            queue: wish.queue.clone(),
            handler: wish.handler.clone(),
            state: "queued".into(),
            unique_key: wish.unique_key.clone(),
            n: wish.n,
            requested_us: at_us,
            available_us: run_at_us.unwrap_or(at_us),
            ..Job::default()
        };
        self.call(at_us, Ask::Enqueue { wish, run_at_us }, Answer::Ok(id));
        self.0.jobs.push(job);
        self.of(id)
    }

    fn of(&mut self, id: i64) -> &mut Job {
        let job = self.0.jobs.iter_mut().find(|job| job.id == id);
        job.expect("the job was built")
    }

    /// An attempt begins on a worker, a millisecond after its claim.
    fn begin(&mut self, id: i64, attempt: i32, worker: i64, claimed_us: i64) {
        let evidence = Evidence {
            worker: format!("host-{worker}"),
            job: id,
            attempt,
            nonce: nonce(id, attempt),
            begun_us: claimed_us + 1_000,
            ended_us: Some(claimed_us + 2_000),
        };
        self.0.evidence.push(evidence);
        let job = self.of(id);
        job.attempt = attempt;
        job.worker = Some(worker);
        job.claimed_us = Some(claimed_us);
    }

    /// The attempt has ended, and the job has not.
    fn attempt(&mut self, id: i64, lost: bool, ended_us: i64) {
        let job = self.of(id).clone();
        let details = json!({"attempt": job.attempt, "nonce": nonce(id, job.attempt)});
        self.0.attempts.push(Attempt {
            job: id,
            attempt: job.attempt,
            lost,
            worker: job.worker.expect("it has begun"),
            error: match lost {
                true => json!({"kind": "lost"}),
                false => json!({"kind": "guest_error", "guest_kind": "flaky", "details": details}),
            },
            claimed_us: job.claimed_us.expect("it has begun"),
            ended_us,
        });
        let job = self.of(id);
        job.lost += i32::from(lost);
        job.worker = None;
        job.claimed_us = None;
    }

    fn succeed(&mut self, id: i64, at_us: i64) {
        let job = self.of(id);
        job.state = "succeeded".into();
        job.result =
            Some(json!({"n": job.n, "attempt": job.attempt, "nonce": nonce(job.id, job.attempt)}));
        job.finished_us = Some(at_us);
    }

    fn end(&mut self, id: i64, state: &str, error: serde_json::Value, at_us: i64) {
        let job = self.of(id);
        job.state = state.into();
        job.error = (!error.is_null()).then_some(error);
        job.finished_us = Some(at_us);
    }

    fn happen(&mut self, from_us: i64, until_us: i64, what: What) {
        self.0.happened.push(Happened {
            from_us,
            until_us,
            what,
        });
    }
}

fn nonce(id: i64, attempt: i32) -> String {
    format!("{id}-{attempt}")
}

/// A world with something of everything, in which every promise was kept.
fn healthy() -> World {
    let mut b = Builder::default();
    b.0.run = Run {
        lease_us: 5 * S,
        lost_max: 3,
        rate: 1,
        minutes: 1.0,
        faults: vec![Fault::KillHost],
        ..Run::default()
    };
    b.0.dumped_us = 1_000 * S;
    for incarnation in [A, B, C] {
        b.0.workers.push(Worker {
            incarnation,
            worker_id: format!("host-{incarnation}"),
        });
    }
    let plain = Wish::default;

    b.job(QUICK, 10 * S, plain());
    b.begin(QUICK, 1, A, 11 * S);
    b.succeed(QUICK, 12 * S);

    let flaky = Wish {
        fail_attempts: 1,
        ..plain()
    };
    b.job(FLAKY, 10 * S, flaky);
    b.begin(FLAKY, 1, A, 11 * S);
    b.attempt(FLAKY, false, 12 * S);
    b.begin(FLAKY, 2, B, 13 * S);
    b.succeed(FLAKY, 14 * S);

    let hopeless = Wish {
        hopeless: true,
        ..plain()
    };
    b.job(HOPELESS, 10 * S, hopeless);
    b.begin(HOPELESS, 1, A, 11 * S);
    let details = json!({"attempt": 1, "nonce": nonce(HOPELESS, 1)});
    let error = json!({"kind": "guest_error", "guest_kind": "hopeless", "details": details});
    b.end(HOPELESS, "failed", error, 12 * S);

    // Host C is killed while it runs this one.
    b.job(ORPHAN, 20 * S, plain());
    b.begin(ORPHAN, 1, C, 21 * S);
    b.happen(
        22 * S,
        22 * S,
        What::HostKilled {
            worker: "host-3".into(),
        },
    );
    b.attempt(ORPHAN, true, 26 * S);
    b.begin(ORPHAN, 2, A, 26 * S);
    b.succeed(ORPHAN, 27 * S);

    // This one loses its host three times.
    b.job(DOOMED, 30 * S, plain());
    for (attempt, at) in [(1, 31), (2, 41)] {
        b.begin(DOOMED, attempt, B, at * S);
        b.attempt(DOOMED, true, (at + 5) * S);
    }
    b.begin(DOOMED, 3, B, 60 * S);
    b.of(DOOMED).lost = 3;
    b.end(DOOMED, "failed", json!({"kind": "lost"}), 66 * S);

    let later = Wish {
        run_in_ms: Some(5_000),
        ..plain()
    };
    b.job(LATER, 10 * S, later.clone());
    b.begin(LATER, 1, A, 15 * S);
    b.succeed(LATER, 16 * S);
    b.job(MOVED, 10 * S, later);
    let moved = Ask::Reschedule {
        job: MOVED,
        run_at_us: Some(18 * S),
    };
    b.call(11 * S, moved, Answer::Ok(1));
    b.begin(MOVED, 1, A, 18 * S);
    b.succeed(MOVED, 19 * S);
    let far = Wish {
        run_in_ms: Some(10_000_000),
        ..plain()
    };
    b.job(FAR, 10 * S, far);

    b.job(CANCELLED, 10 * S, plain());
    b.call(11 * S, Ask::Cancel { job: CANCELLED }, Answer::Ok(1));
    b.end(CANCELLED, "cancelled", json!(null), 11 * S);
    b.job(COMPLETED, 10 * S, plain());
    let mark = "by hand".to_string();
    let complete = Ask::Complete {
        job: COMPLETED,
        mark: mark.clone(),
    };
    b.call(11 * S, complete, Answer::Unknown("lost".into()));
    let job = b.of(COMPLETED);
    job.state = "succeeded".into();
    job.result = Some(json!({"outside": mark}));
    job.finished_us = Some(11 * S);
    b.job(FAILED, 10 * S, plain());
    let fail = Ask::Fail {
        job: FAILED,
        mark: mark.clone(),
    };
    b.call(11 * S, fail, Answer::Ok(1));
    b.end(
        FAILED,
        "failed",
        json!({"kind": "outside", "message": mark}),
        11 * S,
    );

    // One after the other with the same key.
    let keyed = Wish {
        unique_key: Some("k".into()),
        ..plain()
    };
    for (id, at) in KEYED.into_iter().zip([10, 20]) {
        b.job(id, at * S, keyed.clone());
        b.begin(id, 1, A, (at + 1) * S);
        b.succeed(id, (at + 2) * S);
    }

    // Retries of the first job, one after the other.
    for (id, at) in AGAIN.into_iter().zip([30, 40]) {
        b.call(at * S, Ask::Retry { job: QUICK }, Answer::Ok(id));
        b.0.jobs.push(Job {
            id,
            queue: "default".into(),
            handler: WORK.into(),
            retried_from: Some(QUICK),
            n: QUICK * 100,
            requested_us: at * S,
            available_us: at * S,
            ..Job::default()
        });
        b.begin(id, 1, A, (at + 1) * S);
        b.succeed(id, (at + 2) * S);
    }

    // The first claim of this one was given back.
    b.job(RELEASED, 70 * S, plain());
    b.begin(RELEASED, 1, B, 71 * S);
    b.0.evidence.last_mut().expect("it has begun").nonce = "given back".into();
    b.0.records.push(Record {
        job: Some(RELEASED),
        event: "released".into(),
        attempt: Some(1),
        worker: Some(B),
        at_us: 72 * S,
        ..Record::default()
    });
    b.begin(RELEASED, 1, A, 73 * S);
    b.succeed(RELEASED, 74 * S);

    let (queue, other) = ("default".to_string(), "default".to_string());
    b.call(100 * S, Ask::Pause { queue }, Answer::Ok(1));
    b.call(110 * S, Ask::Resume { queue: other }, Answer::Ok(1));
    let stopped = What::HostStopped {
        worker: "host-1".into(),
        status: "exit status: 0".into(),
        clean: true,
    };
    b.happen(900 * S, 901 * S, stopped);
    b.0
}

/// Breaks one promise in the healthy world: exactly that rule may say so.
fn breaks(rule: &str, mutate: impl FnOnce(&mut World)) {
    let mut world = healthy();
    mutate(&mut world);
    let broken: Vec<_> = check(&world)
        .into_iter()
        .filter(|(_, found)| !found.violations.is_empty())
        .map(|(rule, _)| rule.name)
        .collect();
    assert_eq!(broken, [rule]);
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
fn a_healthy_world_breaks_nothing_and_every_rule_has_a_case_in_it() {
    for (rule, found) in check(&healthy()) {
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
fn an_accepted_job_that_is_not_there_is_found() {
    breaks("accepted_is_kept", |world| {
        world.jobs.retain(|job| job.id != FAR)
    });
}

#[test]
fn a_retry_that_is_not_there_is_found() {
    breaks("accepted_is_kept", |world| {
        world.jobs.retain(|job| job.id != AGAIN[1])
    });
}

#[test]
fn a_job_whose_enqueue_was_refused_or_rolled_back_is_found() {
    let answered = |world: &mut World, answer: Answer| {
        let call = world
            .calls
            .iter_mut()
            .find(|c| c.answer == Answer::Ok(QUICK));
        call.expect("it was asked for").answer = answer;
    };
    breaks("refused_leaves_nothing", |world| {
        answered(world, Answer::Refused("no".into()));
    });
    breaks("refused_leaves_nothing", |world| {
        answered(world, Answer::Unknown("rolled back".into()));
        for call in &mut world.calls {
            if let Ask::Enqueue { wish, .. } = &mut call.ask {
                wish.rolled_back |= wish.n == QUICK * 100;
            }
        }
    });
}

#[test]
fn a_job_that_is_there_twice_under_two_ids_is_found() {
    breaks("refused_leaves_nothing", |world| {
        let mut twin = job(world, FAR).clone();
        twin.id = 99;
        world.jobs.push(twin);
    });
}

#[test]
fn a_job_that_nobody_has_asked_for_is_found() {
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
fn an_outcome_from_another_worker_is_found() {
    breaks("stale_outcome", |world| job(world, QUICK).worker = Some(B));
}

#[test]
fn an_outcome_of_an_attempt_that_never_began_is_found() {
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

#[test]
fn an_outcome_of_an_attempt_that_was_superseded_is_found() {
    breaks("superseded", |world| {
        let mut newer = evidence(world, QUICK).clone();
        (newer.attempt, newer.nonce) = (2, "newer".into());
        newer.begun_us += 100;
        world.evidence.push(newer);
    });
}

#[test]
fn a_superseding_attempt_whose_claim_the_server_has_forgotten_is_excused() {
    let mut world = healthy();
    let mut newer = evidence(&mut world, QUICK).clone();
    (newer.attempt, newer.nonce) = (2, "newer".into());
    let at_us = newer.begun_us + S / 2;
    world.evidence.push(newer);
    world.happened.push(Happened {
        from_us: at_us,
        until_us: at_us + S,
        what: What::ServerCrashed {
            how: Fault::CrashServer,
        },
    });
    for (rule, found) in check(&world) {
        assert!(
            found.violations.is_empty(),
            "{}: {:?}",
            rule.name,
            found.violations
        );
    }
}

#[test]
fn a_start_before_its_time_is_found() {
    breaks("not_early", |world| {
        evidence(world, LATER).begun_us = 15 * S - 1;
        job(world, LATER).claimed_us = Some(15 * S - 1_000);
    });
}

#[test]
fn a_start_before_the_time_that_the_job_was_moved_to_is_found() {
    breaks("not_early", |world| {
        evidence(world, MOVED).begun_us = 17 * S;
        job(world, MOVED).claimed_us = Some(17 * S - 1_000);
    });
}

#[test]
fn a_claim_of_a_paused_queue_is_found() {
    breaks("pause_holds", |world| {
        for call in &mut world.calls {
            if matches!(call.ask, Ask::Pause { .. }) {
                (call.asked_us, call.answered_us) = (72 * S, 72 * S + 1_000);
            }
        }
    });
}

#[test]
fn more_failed_attempts_than_may_be_are_found() {
    breaks("attempts_within_max", |world| {
        for call in &mut world.calls {
            if let Ask::Enqueue { wish, .. } = &mut call.ask
                && wish.n == FLAKY * 100
            {
                wish.max_attempts = Some(1);
            }
        }
    });
}

#[test]
fn a_job_that_begins_more_often_than_it_is_claimed_is_found() {
    breaks("attempts_within_max", |world| {
        for number in 0..ATTEMPTS_MAX {
            let mut more = evidence(world, QUICK).clone();
            more.nonce = format!("more {number}");
            world.evidence.push(more);
        }
    });
}

#[test]
fn a_job_that_goes_on_after_too_many_losses_is_found() {
    breaks("losses_end", |world| job(world, ORPHAN).lost = 3);
}

#[test]
fn a_job_that_is_given_up_too_soon_is_found() {
    breaks("losses_end", |world| job(world, DOOMED).lost = 2);
}

#[test]
fn a_job_that_ends_otherwise_than_its_handler_says_is_found() {
    breaks("ends_as_asked", |world| {
        job(world, HOPELESS).state = "timed_out".into()
    });
    breaks("ends_as_asked", |world| {
        job(world, QUICK).result.as_mut().expect("it has one")["n"] = json!(0);
    });
}

#[test]
fn a_cancellation_that_was_answered_and_does_not_hold_is_found() {
    breaks("outside_ends_hold", |world| {
        let ask = Ask::Cancel { job: QUICK };
        let mut call = world.calls[0].clone();
        (call.ask, call.answer) = (ask, Answer::Ok(1));
        world.calls.push(call);
    });
}

#[test]
fn an_end_from_outside_that_nobody_has_asked_for_is_found() {
    breaks("outside_ends_were_asked", |world| {
        world
            .calls
            .retain(|call| !matches!(call.ask, Ask::Cancel { .. }));
    });
    breaks("outside_ends_were_asked", |world| {
        world
            .calls
            .retain(|call| !matches!(call.ask, Ask::Complete { .. }));
    });
}

#[test]
fn two_live_jobs_with_one_key_are_found() {
    breaks("unique_key", |world| {
        job(world, KEYED[0]).finished_us = Some(21 * S)
    });
}

#[test]
fn two_live_retries_of_one_job_are_found() {
    breaks("one_retry", |world| {
        job(world, AGAIN[0]).finished_us = Some(41 * S)
    });
}

#[test]
fn a_job_that_waits_although_its_time_has_come_is_found() {
    breaks("nothing_stuck", |world| {
        job(world, FAR).available_us = world.dumped_us - S;
    });
}

#[test]
fn a_job_that_runs_without_anybody_is_found() {
    breaks("nothing_stuck", |world| {
        job(world, FAR).state = "running".into()
    });
}

#[test]
fn an_orphan_that_waits_too_long_is_found() {
    breaks("taken_up_again", |world| {
        for evidence in world.evidence.iter_mut() {
            if evidence.job == ORPHAN && evidence.attempt == 2 {
                evidence.begun_us = 29 * S + 1_000;
            }
        }
        job(world, ORPHAN).claimed_us = Some(29 * S);
        job(world, ORPHAN).finished_us = Some(30 * S);
    });
}

#[test]
fn an_attempt_that_is_lost_with_a_host_that_was_stopped_in_order_is_found() {
    breaks("stop_burns_nothing", |world| {
        let stopped = What::HostStopped {
            worker: "host-2".into(),
            status: "exit status: 0".into(),
            clean: true,
        };
        world.happened.push(Happened {
            from_us: 45 * S,
            until_us: 46 * S,
            what: stopped,
        });
    });
}

#[test]
fn a_host_that_ends_by_itself_is_found() {
    breaks("hosts_live", |world| {
        world.happened.push(Happened {
            from_us: 45 * S,
            until_us: 46 * S,
            what: What::HostEnded {
                worker: "host-1".into(),
                status: "exit status: 1".into(),
                up_us: S,
            },
        });
    });
}

#[test]
fn a_host_that_does_not_stop_in_order_is_found() {
    breaks("hosts_live", |world| {
        for happened in &mut world.happened {
            if let What::HostStopped { clean, .. } = &mut happened.what {
                *clean = false;
            }
        }
    });
}
