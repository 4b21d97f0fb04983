//! Tests of the engine: small scenarios, and guarantees that are violated on purpose.

use super::*;
use crate::MS;
use crate::gates::{Limit, Rate};
use crate::scenario::{Class, Fault, FaultKind, Gate, Name, Sabotage, Sizes};

fn class(name: &str, tenants: u32, weight: f64, jobs_each: u32) -> Class {
    Class {
        name: name.to_owned(),
        tenants,
        weight,
        load: Load::Backlog { jobs_each },
        run_time: 5 * MS,
        gates: Vec::new(),
    }
}

fn simulate(scenario: &Scenario) -> Report {
    run(scenario, |_| {})
}

/// A scenario of the command line, with few jobs.
fn small(name: Name, seed: u64) -> Scenario {
    let sizes = Sizes {
        jobs: Some(40_000),
        hosts: Some(2),
        tenants: Some(60),
        slots: None,
    };
    let mut scenario = name.scenario(seed, sizes);
    scenario.window = SECOND;
    scenario
}

fn gated(limit: Limit, by_tenant: bool, tenants: u32, jobs_each: u32) -> Scenario {
    let mut scenario = Scenario::new("gated", 5);
    scenario.hosts = 2;
    scenario.gates.push(Gate {
        name: "limit".to_owned(),
        limit,
        by_tenant,
    });
    scenario.classes.push(Class {
        gates: vec![0],
        ..class("gated", tenants, 1.0, jobs_each)
    });
    scenario
}

fn rate(max: i32, burst: Option<i32>) -> Limit {
    Limit::Starts(Rate {
        max,
        period_ms: 1000,
        burst,
    })
}

#[test]
fn the_seed_determines_the_report() {
    for name in [Name::Fair, Name::Gates, Name::SharedLimit, Name::Deaths] {
        let report = simulate(&small(name, 1));
        assert_eq!(report, simulate(&small(name, 1)));
        assert_ne!(report, simulate(&small(name, 2)));
    }
}

#[test]
fn every_guarantee_holds_in_small_runs_of_the_scenarios() {
    for name in [
        Name::Fair,
        Name::Weights,
        Name::Gates,
        Name::SharedLimit,
        Name::SharedRate,
        Name::Deaths,
        Name::Fleet,
    ] {
        for seed in 1..4 {
            let scenario = small(name, seed);
            let report = simulate(&scenario);
            assert_eq!(
                report.faults(),
                Vec::<String>::new(),
                "{name:?}, seed {seed}"
            );
            assert_eq!(report.jobs, scenario.jobs(), "{name:?}, seed {seed}");
        }
    }
}

#[test]
fn tenants_share_by_weight_whether_hosts_share_the_lanes_or_each_has_its_own() {
    for sharded in [false, true] {
        let mut scenario = Scenario::new("weights", 3);
        scenario.hosts = 4;
        scenario.sharded = sharded;
        scenario.window = SECOND;
        scenario.classes = vec![class("a", 8, 3.0, 9_000), class("b", 8, 1.0, 3_000)];
        let report = simulate(&scenario);
        let shares = report.classes.iter().map(|class| class.share.unwrap());
        let off = shares.map(|share| (share - 1.0).abs()).fold(0.0, f64::max);
        assert!(off < 0.01 && report.jain_min.unwrap() > 0.999, "{report}");
    }
}

/// `tests/it/fair/simulated.rs` compares this with a real host.
#[test]
fn two_tenants_share_a_host_from_the_start() {
    let mut scenario = Scenario::new("agreement", 1);
    scenario.slots = 2;
    scenario.classes = vec![class("a", 1, 3.0, 4_000), class("b", 1, 1.0, 4_000)];
    scenario.until = Some(3 * SECOND / 2);
    let report = simulate(&scenario);
    let share = report.classes[0].jobs as f64 / report.jobs as f64;
    assert!((500..700).contains(&report.jobs), "{report}");
    assert!((0.74..0.76).contains(&share), "{report}");
}

#[test]
fn a_new_tenant_need_not_wait_for_the_backlog_of_another() {
    let report = simulate(&small(Name::Fair, 1));
    let trickle = &report.classes[1];
    assert!(trickle.delay_p50_ms < 10.0, "{report}");
    // Jobs are claimed 100 ms ahead.
    assert!(trickle.delay_p99_ms < 150.0, "{report}");
}

#[test]
fn as_many_jobs_start_as_their_limit_permits() {
    for (burst, least_s, most_s) in [(None, 9.0, 9.2), (Some(5), 9.7, 9.9)] {
        let report = simulate(&gated(rate(20, burst), true, 3, 200));
        assert_eq!(report.exceeded, 0, "{report}");
        let starts_s = report.classes[0].delay_max_ms / 1000.0;
        assert!((least_s..=most_s).contains(&starts_s), "{report}");
    }
}

#[test]
fn a_limit_of_one_for_all_tenants_runs_one_job_after_the_other() {
    let report = simulate(&gated(Limit::Running { max: 1 }, false, 5, 100));
    assert_eq!(report.faults(), Vec::<String>::new());
    // 500 jobs of 5 ms each, with a round trip or two between them.
    assert!((2.5..5.0).contains(&report.virtual_s), "{report}");
}

/// The limit and the rate keep all lanes closed in turn. Lanes could move back and forth between the two, a few with
/// each claim.
#[test]
fn lanes_behind_a_limit_and_a_rate_cost_few_claims() {
    for tenants in [10, 200] {
        let jobs_each = 2_000 / tenants;
        let mut scenario = gated(Limit::Running { max: 1 }, false, tenants, jobs_each);
        scenario.hosts = 1;
        scenario.gates.push(Gate {
            name: "rate".to_owned(),
            limit: rate(100, Some(10)),
            by_tenant: false,
        });
        scenario.classes[0].gates = vec![0, 1];
        let report = simulate(&scenario);
        assert_eq!((report.jobs, report.exceeded), (2_000, 0), "{report}");
        assert!(report.claims < 3 * report.jobs, "{report}");
    }
}

/// Eight tenants with a backlog and one whose jobs trickle in, behind one limit.
fn behind_one_limit(name: Name, hosts: usize) -> Scenario {
    let sizes = Sizes {
        jobs: Some(6_000),
        hosts: Some(hosts),
        tenants: Some(9),
        slots: None,
    };
    let mut scenario = name.scenario(1, sizes);
    scenario.window = SECOND;
    scenario
}

#[test]
fn tenants_share_a_limit_by_weight() {
    for (name, hosts) in [Name::SharedLimit, Name::SharedRate]
        .into_iter()
        .flat_map(|name| [(name, 1), (name, 3)])
    {
        let report = simulate(&behind_one_limit(name, hosts));
        assert_eq!(report.faults(), Vec::<String>::new(), "{report}");
        for class in &report.classes[..2] {
            let share = class.share.unwrap();
            assert!((0.95..1.05).contains(&share), "{report}");
        }
        assert!(report.jain_min.unwrap() > 0.98, "{report}");
        // Alongside backlogs of many seconds.
        assert!(report.classes[2].delay_p99_ms < 500.0, "{report}");
    }
}

#[test]
fn shares_of_a_limit_that_do_not_follow_the_weights_are_noticed() {
    for name in [Name::SharedLimit, Name::SharedRate] {
        let mut scenario = behind_one_limit(name, 1);
        scenario.sabotage = Some(Sabotage::Weights);
        let report = simulate(&scenario);
        assert!(
            report.faults().iter().any(|fault| fault.contains("off by")),
            "{report}"
        );
    }
}

#[test]
fn a_gate_that_permits_too_much_is_noticed() {
    let limits = [Limit::Running { max: 2 }, rate(20, None), rate(20, Some(5))];
    for limit in limits {
        for by_tenant in [true, false] {
            let mut scenario = gated(limit, by_tenant, 3, 100);
            assert_eq!(simulate(&scenario).exceeded, 0, "{limit:?}");
            scenario.sabotage = Some(Sabotage::Gates);
            let report = simulate(&scenario);
            assert!(report.exceeded > 0, "{limit:?}: {report}");
            assert!(report.faults()[0].contains("exceeded"));
        }
    }
}

#[test]
fn a_scheduler_that_starves_a_tenant_is_noticed() {
    let mut scenario = small(Name::Weights, 1);
    scenario.sabotage = Some(Sabotage::Starve);
    let report = simulate(&scenario);
    assert_eq!(report.stuck, 1, "{report}");
    assert!(report.faults().iter().any(|fault| fault.contains("stuck")));
}

#[test]
fn shares_that_do_not_follow_the_weights_are_noticed() {
    let mut scenario = Name::Weights.scenario(1, Sizes::default());
    scenario.sabotage = Some(Sabotage::Weights);
    scenario.until = Some(21 * SECOND);
    let report = simulate(&scenario);
    assert!(report.faults()[0].contains("off by"), "{report}");
}

#[test]
fn lanes_that_no_end_opens_are_noticed() {
    let mut scenario = gated(Limit::Running { max: 2 }, true, 3, 100);
    scenario.sabotage = Some(Sabotage::Ends);
    let report = simulate(&scenario);
    assert_eq!(report.stuck, 3, "{report}");
}

#[test]
fn jobs_of_a_host_that_dies_or_freezes_run_elsewhere_and_no_limit_is_exceeded() {
    for sharded in [false, true] {
        let mut scenario = gated(Limit::Running { max: 3 }, true, 8, 4_000);
        scenario.hosts = 4;
        scenario.sharded = sharded;
        scenario.lease = 5 * SECOND;
        scenario.classes.push(class("free", 8, 1.0, 20_000));
        let death = FaultKind::Death {
            restarts_after: 20 * SECOND,
        };
        let fault = |at, host, kind| Fault { at, host, kind };
        scenario.faults = vec![
            fault(SECOND, 0, death),
            fault(2 * SECOND, 1, FaultKind::Freeze { lasts: SECOND }),
            fault(4 * SECOND, 2, FaultKind::Freeze { lasts: 10 * SECOND }),
        ];
        let report = simulate(&scenario);
        assert_eq!(report.jobs, scenario.jobs(), "{report}");
        assert_eq!((report.exceeded, report.stuck), (0, 0), "{report}");
        assert!(report.adopted > 0, "{report}");
    }
}

#[test]
fn a_simulation_ends_at_its_time() {
    let mut scenario = small(Name::Weights, 1);
    scenario.until = Some(SECOND);
    let report = simulate(&scenario);
    assert!(report.virtual_s <= 1.0 && report.jobs < scenario.jobs());
    assert_eq!(report.stuck, 0, "jobs that wait are not stuck yet");
}
