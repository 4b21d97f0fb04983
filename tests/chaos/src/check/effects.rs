//! Whether effects are committed with the success of their job, or with their step, and only then.

use std::collections::BTreeMap;

use super::super::bank::Payment;
use super::super::world::{BankLine, Job};
use super::known::ended_by_an_admin;
use super::{Found, Known};

/// The jobs that move money.
fn payments<'a>(known: &Known<'a>) -> impl Iterator<Item = (&'a Job, &'a Payment)> {
    let jobs = known.world.jobs.iter();
    jobs.filter_map(|job| Some((job, known.spec(job)?.payment.as_ref()?)))
}

/// A job that has succeeded has the effects of its last attempt once, and any other job has none. The effects of a step
/// exist once if the step is recorded, whatever happens to the job, and are those of the attempt that has recorded it.
pub(super) fn once(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut attributed = 0;
    for (job, payment) in payments(known) {
        if known.evidence(job.id).is_empty() {
            continue;
        }
        let has_succeeded = job.state == "succeeded" && !ended_by_an_admin(job);
        let recorded = known.steps(job.id).first();
        let steps = recorded.filter(|_| payment.staged);
        let moves = |is_moving: bool| match is_moving {
            true => payment.amount,
            false => 0,
        };
        let ends = has_succeeded.then_some(("end", job.attempt, moves(!payment.staged)));
        let expected: Vec<(&str, i32, i64)> = steps
            .map(|step| ("step", step.attempt, moves(true)))
            .into_iter()
            .chain(ends)
            .collect();
        let lines = known.lines(job.id);
        attributed += lines.len();
        let mut there: Vec<(&str, i32, i64)> = lines
            .iter()
            .map(
                |BankLine {
                     part,
                     attempt,
                     amount,
                     ..
                 }| (part.as_str(), *attempt, *amount),
            )
            .collect();
        // The step comes before the end.
        there.sort_by(|one, other| other.0.cmp(one.0));
        found.case(job.id, there != expected, || {
            format!(
                "job {} is {}: its effects should be {expected:?}, but they are {there:?}",
                job.id, job.state
            )
        });
    }
    let all = known.world.lines.len();
    found.unless(None, attributed != all, || {
        format!(
            "of {all} transactions with effects, {} belong to no job that has started",
            all.abs_diff(attributed)
        )
    });
    found
}

/// The balance of each account is the sum of the committed transactions of jobs.
pub(super) fn sums_are_exact(known: &Known<'_>) -> Found {
    let mut found = Found::default();
    let mut sums: BTreeMap<i64, i64> = BTreeMap::new();
    for (job, payment) in payments(known) {
        for line in known.lines(job.id) {
            *sums.entry(payment.from).or_default() -= line.amount;
            *sums.entry(payment.to).or_default() += line.amount;
        }
    }
    for account in &known.world.accounts {
        let sum = sums.remove(&account.id).unwrap_or_default();
        found.case(None, account.balance != sum, || {
            format!(
                "the balance of account {} is {}, not {sum}",
                account.id, account.balance
            )
        });
    }
    found.unless(None, !sums.is_empty(), || {
        format!("these accounts are missing: {sums:?}")
    });
    found
}
