//! The scenarios of the command line.

use super::{Class, Costs, Fault, FaultKind, Gate, Load, Scenario};
use crate::gates::{Limit, Rate};
use crate::{MS, SECOND};

/// A scenario of the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Name {
    /// One tenant with a long backlog alongside many whose jobs trickle in
    Fair,
    /// Two classes of tenants with the weights 3 and 1, all with a backlog
    Weights,
    /// Limits on running jobs and on starts for each tenant, both together, one limit for all tenants, and no gate
    Gates,
    /// One limit on running jobs for all tenants: some of weight 3, some of weight 1, one whose jobs trickle in
    SharedLimit,
    /// The same tenants behind one limit on starts
    SharedRate,
    /// Hosts that die and freeze, with a limit on running jobs
    Deaths,
    /// 1,000 hosts with shards, 100,000 tenants, 100,000,000 jobs
    Fleet,
}

/// The size of a scenario; `None`: its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct Sizes {
    /// The number of hosts.
    pub hosts: Option<usize>,
    /// The number of tenants.
    pub tenants: Option<u32>,
    /// The number of jobs.
    pub jobs: Option<u64>,
    /// The slots of a host.
    pub slots: Option<usize>,
}

impl Name {
    /// Its name.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fair => "fair",
            Self::Weights => "weights",
            Self::Gates => "gates",
            Self::SharedLimit => "shared-limit",
            Self::SharedRate => "shared-rate",
            Self::Deaths => "deaths",
            Self::Fleet => "fleet",
        }
    }

    /// The scenario of this name.
    pub fn scenario(self, seed: u64, sizes: Sizes) -> Scenario {
        let scenario = Scenario::new(self.as_str(), seed);
        match self {
            Self::Fair => fair(scenario, sizes),
            Self::Weights => weights(scenario, sizes),
            Self::Gates => gates(scenario, sizes),
            Self::SharedLimit => shared(scenario, sizes, Limit::Running { max: 10 }),
            Self::SharedRate => shared(scenario, sizes, Limit::Starts(SHARED_RATE)),
            Self::Deaths => deaths(scenario, sizes),
            Self::Fleet => fleet(scenario, sizes),
        }
    }
}

fn class(name: &str, tenants: u32, load: Load) -> Class {
    Class {
        name: name.to_owned(),
        tenants: tenants.max(1),
        weight: 1.0,
        load,
        run_time: 5 * MS,
        gates: Vec::new(),
    }
}

fn backlog(jobs: u64, tenants: u32) -> Load {
    let jobs_each = u32::try_from(jobs / u64::from(tenants.max(1))).unwrap_or(u32::MAX);
    Load::Backlog {
        jobs_each: jobs_each.max(1),
    }
}

/// The number of jobs that all slots run in a second.
fn capacity(scenario: &Scenario, run_time: u64) -> f64 {
    (scenario.hosts * scenario.slots) as f64 * SECOND as f64 / run_time as f64
}

fn sized(mut scenario: Scenario, sizes: Sizes, hosts: usize, slots: usize) -> Scenario {
    scenario.hosts = sizes.hosts.unwrap_or(hosts).max(1);
    scenario.slots = sizes.slots.unwrap_or(slots).max(1);
    scenario
}

fn fair(scenario: Scenario, sizes: Sizes) -> Scenario {
    let mut scenario = sized(scenario, sizes, 3, 16);
    let jobs = sizes.jobs.unwrap_or(1_200_000);
    let tenants = sizes.tenants.unwrap_or(1_001).max(2);
    // The trickle takes 10 % of all slots, and lasts as long as the backlog.
    let per_s = capacity(&scenario, 5 * MS) / 10.0;
    scenario.classes = vec![
        class("backlog", 1, backlog(jobs - jobs / 10, 1)),
        class(
            "trickle",
            tenants - 1,
            Load::Poisson {
                jobs: jobs / 10,
                per_s,
            },
        ),
    ];
    scenario
}

fn weights(scenario: Scenario, sizes: Sizes) -> Scenario {
    let mut scenario = sized(scenario, sizes, 3, 16);
    let jobs = sizes.jobs.unwrap_or(1_000_000);
    let half = (sizes.tenants.unwrap_or(20) / 2).max(1);
    scenario.classes = vec![
        Class {
            weight: 3.0,
            ..class("weight 3", half, backlog(jobs / 4 * 3, half))
        },
        class("weight 1", half, backlog(jobs / 4, half)),
    ];
    scenario
}

fn gates(scenario: Scenario, sizes: Sizes) -> Scenario {
    let mut scenario = sized(scenario, sizes, 10, 64);
    let jobs = sizes.jobs.unwrap_or(500_000);
    let each = (sizes.tenants.unwrap_or(600) / 6).max(1);
    let rate = |max, burst| {
        let period_ms = 1000;
        Limit::Starts(Rate {
            max,
            period_ms,
            burst,
        })
    };
    let gate = |name: &str, limit, by_tenant| Gate {
        name: name.to_owned(),
        limit,
        by_tenant,
    };
    scenario.gates = vec![
        gate("few", Limit::Running { max: 2 }, true),
        gate("window", rate(20, None), true),
        gate("bucket", rate(20, Some(5)), true),
        gate("all", Limit::Running { max: 10 }, false),
    ];
    let limited = |name: &str, gates: &[usize], share: u64| Class {
        run_time: 20 * MS,
        gates: gates.to_vec(),
        ..class(name, each, backlog(jobs * share / 100, each))
    };
    scenario.classes = vec![
        limited("2 at once", &[0], 30),
        limited("20/s", &[1], 8),
        limited("20/s, burst 5", &[2], 8),
        limited("2 at once, 20/s", &[0, 1], 8),
        limited("10 of all", &[3], 2),
        limited("no gate", &[], 44),
    ];
    scenario
}

/// About as many starts as there are in a second if ten jobs of 20 ms run at a time.
const SHARED_RATE: Rate = Rate {
    max: 400,
    period_ms: 1000,
    burst: Some(10),
};

/// Tenants behind one limit, which permits fewer jobs at a time than there are tenants.
fn shared(scenario: Scenario, sizes: Sizes, limit: Limit) -> Scenario {
    let mut scenario = sized(scenario, sizes, 3, 16);
    let jobs = sizes.jobs.unwrap_or(100_000);
    let half = (sizes.tenants.unwrap_or(21).saturating_sub(1) / 2).max(1);
    scenario.gates = vec![Gate {
        name: "all".to_owned(),
        limit,
        by_tenant: false,
    }];
    let limited = |name: &str, tenants, weight, load| Class {
        weight,
        run_time: 20 * MS,
        gates: vec![0],
        ..class(name, tenants, load)
    };
    // A third of what its weight entitles the tenant to, for as long as the backlog lasts.
    let trickle = (jobs / (3 * (4 * u64::from(half) + 1))).max(1);
    let per_s = f64::from(SHARED_RATE.max) * trickle as f64 / jobs as f64;
    let backlogs = jobs - trickle;
    scenario.classes = vec![
        limited("weight 3", half, 3.0, backlog(backlogs / 4 * 3, half)),
        limited("weight 1", half, 1.0, backlog(backlogs / 4, half)),
        limited(
            "trickle",
            1,
            1.0,
            Load::Poisson {
                jobs: trickle,
                per_s,
            },
        ),
    ];
    scenario
}

fn deaths(scenario: Scenario, sizes: Sizes) -> Scenario {
    let mut scenario = sized(scenario, sizes, 10, 32);
    let jobs = sizes.jobs.unwrap_or(2_000_000);
    let half = (sizes.tenants.unwrap_or(100) / 2).max(1);
    scenario.lease = 15 * SECOND;
    scenario.gates = vec![Gate {
        name: "few".to_owned(),
        limit: Limit::Running { max: 3 },
        by_tenant: true,
    }];
    scenario.classes = vec![
        Class {
            run_time: 20 * MS,
            ..class("no gate", half, backlog(jobs * 2 / 3, half))
        },
        Class {
            run_time: 20 * MS,
            gates: vec![0],
            ..class("3 at once", half, backlog(jobs / 3, half))
        },
    ];
    let hosts = scenario.hosts;
    let fault = |at: u64, host: usize, kind| Fault {
        at: at * SECOND,
        host: host % hosts,
        kind,
    };
    let death = FaultKind::Death {
        restarts_after: 20 * SECOND,
    };
    let freeze = |lasts: u64| FaultKind::Freeze {
        lasts: lasts * SECOND,
    };
    scenario.faults = vec![
        fault(5, 0, death),
        fault(7, 1, freeze(3)),
        fault(9, 2, freeze(30)),
        fault(12, 3, death),
        fault(12, 4, death),
        fault(50, 5, freeze(14)),
        fault(60, 0, death),
    ];
    scenario
}

fn fleet(scenario: Scenario, sizes: Sizes) -> Scenario {
    let mut scenario = sized(scenario, sizes, 1_000, 64);
    scenario.sharded = true;
    scenario.costs = Costs {
        cores: 64,
        ..Costs::default()
    };
    let jobs = sizes.jobs.unwrap_or(100_000_000);
    let tenants = sizes.tenants.unwrap_or(100_000).max(10);
    let run_time = 100 * MS;
    let with = |name: &str, tenants, weight, load| Class {
        weight,
        run_time,
        ..class(name, tenants, load)
    };
    // 10 % of the tenants have a backlog. The others have 5 % of all jobs, enqueued while the backlogs last.
    let (heavy, light) = (tenants / 20, tenants / 20);
    let trickle = jobs / 20;
    let per_s = capacity(&scenario, run_time) / 20.0;
    scenario.classes = vec![
        with(
            "backlog, weight 3",
            heavy,
            3.0,
            backlog((jobs - trickle) / 4 * 3, heavy),
        ),
        with(
            "backlog, weight 1",
            light,
            1.0,
            backlog((jobs - trickle) / 4, light),
        ),
        with(
            "trickle",
            tenants - heavy - light,
            1.0,
            Load::Poisson {
                jobs: trickle,
                per_s,
            },
        ),
    ];
    scenario
}
