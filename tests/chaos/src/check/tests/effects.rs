//! Violated guarantees about effects.

use super::super::super::cuts::{At, How};
use super::super::super::ledger::{Event, Incident};
use super::super::super::tally;
use super::super::super::world::{BankLine, World};
use super::breaks;
use super::healthy::*;

fn pay_again(world: &mut World, job: i64, attempt: i32, part: &str) {
    world.lines.push(BankLine {
        job,
        attempt,
        part: part.into(),
        amount: 0,
    });
}

#[test]
fn missing_and_duplicate_effects_of_a_success_are_found() {
    breaks("effects_once", |world| {
        let of_step = |line: &BankLine| line.job == STAGED && line.part == "end";
        world.lines.retain(|line| !of_step(line));
    });
    breaks("effects_once", |world| pay_again(world, PAID, 2, "end"));
}

#[test]
fn effects_of_an_attempt_that_has_not_settled_its_job_are_found() {
    breaks("effects_once", |world| {
        let line = world.lines.iter_mut().find(|line| line.job == PAID);
        line.expect("it is paid").attempt = 1;
    });
    breaks("effects_once", |world| pay_again(world, UNPAID, 1, "end"));
    breaks("effects_once", |world| pay_again(world, QUICK, 1, "end"));
}

#[test]
fn effects_of_a_step_that_is_not_recorded_or_was_repeated_are_found() {
    breaks("effects_once", |world| pay_again(world, PAID, 1, "step"));
    breaks("effects_once", |world| pay_again(world, STAGED, 2, "step"));
}

#[test]
fn a_balance_that_is_not_the_sum_of_the_effects_is_found() {
    breaks("sums_are_exact", |world| world.accounts[0].balance += 5);
    breaks("sums_are_exact", |world| {
        world.accounts.pop();
    });
}

#[test]
fn cuts_are_counted_for_each_boundary() {
    let mut world = healthy();
    world.happened.push(Incident {
        from_us: 0,
        until_us: 1,
        event: Event::EffectsCut {
            at: At::Commit,
            how: How::CrashServer,
            worker: "host-1".into(),
        },
    });
    let cuts = tally::cuts(&world);
    assert_eq!(cuts.len(), 12);
    assert_eq!(cuts[&(At::Commit, How::CrashServer)], 1);
    assert_eq!(cuts.values().sum::<u64>(), 1);
}
