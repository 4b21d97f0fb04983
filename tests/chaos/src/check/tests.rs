//! Checks worlds in which exactly one guarantee is violated.

mod healthy;

mod accepted;
mod admin_actions;
mod attempts;
mod effects;
mod flows;
mod gates;
mod hosts;
mod recovery;
mod settled;
mod starts;
mod suspended;

use std::collections::BTreeMap;

use super::super::ledger::Run;
use super::super::plan::Fault;
use super::super::world::{Evidence, Job, World};
use super::{Known, RULES, Rule, check};
use healthy::healthy;

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
