//! Scenarios: everything that determines a simulation.

mod named;

use crate::gates::Limit;
use crate::{MS, Nanos, SECOND, US};

pub use named::{Name, Sizes};

/// Everything that determines a simulation.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// Its name in the report.
    pub name: String,
    /// Determines all that is random.
    pub seed: u64,
    /// The number of hosts.
    pub hosts: usize,
    /// The number of attempts that run at the same time on a host.
    pub slots: usize,
    /// Each lane is served by one host only, as with shards. Otherwise each host serves all lanes.
    pub sharded: bool,
    /// The tenants.
    pub classes: Vec<Class>,
    /// The gates.
    pub gates: Vec<Gate>,
    /// The deaths and freezes of hosts.
    pub faults: Vec<Fault>,
    /// The lease of claims.
    pub lease: Nanos,
    /// What the server and the network cost.
    pub costs: Costs,
    /// The windows in which shares are compared.
    pub window: Nanos,
    /// The virtual time after which the simulation ends, whether or not all jobs have ended.
    pub until: Option<Nanos>,
    /// Violates a guarantee on purpose.
    pub sabotage: Option<Sabotage>,
}

/// Tenants of the same kind. Each has one lane.
#[derive(Debug, Clone)]
pub struct Class {
    /// Its name in the report.
    pub name: String,
    /// The number of tenants.
    pub tenants: u32,
    /// The weight of each.
    pub weight: f64,
    /// Their jobs.
    pub load: Load,
    /// The mean run time of a job; run times are distributed exponentially.
    pub run_time: Nanos,
    /// The gates that its jobs pass: indexes of [`Scenario::gates`].
    pub gates: Vec<usize>,
}

/// When jobs are enqueued.
#[derive(Debug, Clone, Copy)]
pub enum Load {
    /// All jobs are enqueued at the start.
    Backlog {
        /// The jobs of each tenant.
        jobs_each: u32,
    },
    /// One after another, at random times, for random tenants: a Poisson process.
    Poisson {
        /// The jobs of all tenants together.
        jobs: u64,
        /// The mean number of jobs per second, of all tenants together.
        per_s: f64,
    },
}

/// A gate.
#[derive(Debug, Clone)]
pub struct Gate {
    /// Its name.
    pub name: String,
    /// What it permits.
    pub limit: Limit,
    /// Each tenant is a key; otherwise all jobs are one key.
    pub by_tenant: bool,
}

/// Something that happens to a host.
#[derive(Debug, Clone, Copy)]
pub struct Fault {
    /// When it happens.
    pub at: Nanos,
    /// The host to which it happens.
    pub host: usize,
    /// What happens.
    pub kind: FaultKind,
}

/// What happens to a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// It is killed, and a new process starts after this time.
    Death {
        /// The time until then.
        restarts_after: Nanos,
    },
    /// It does nothing for this time.
    Freeze {
        /// The time until it continues.
        lasts: Nanos,
    },
}

/// What the server and the network cost.
#[derive(Debug, Clone, Copy)]
pub struct Costs {
    /// The number of cores of the server, which is the number of statements that run at the same time.
    pub cores: usize,
    /// A round trip between a host and the server.
    pub round_trip: Nanos,
    /// A claim, regardless of what it claims.
    pub claim: Nanos,
    /// Each lane of a claim.
    pub lane: Nanos,
    /// Each job of a claim.
    pub job: Nanos,
    /// Each settled job.
    pub settle: Nanos,
    /// A commit that waits for the disk.
    pub flush: Nanos,
}

impl Default for Costs {
    /// Of the same order as the measurements in `docs/explanation/performance.md`: 14 µs per job, two cores.
    fn default() -> Self {
        Self {
            cores: 2,
            round_trip: 300 * US,
            claim: 150 * US,
            lane: 20 * US,
            job: 6 * US,
            settle: 8 * US,
            flush: MS,
        }
    }
}

/// A guarantee that is violated on purpose, to see whether the simulator notices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Sabotage {
    /// Claims through a gate take one job more than it permits
    Gates,
    /// The first tenant has twice its weight, in the turns and behind limits
    Weights,
    /// No host ever serves the first tenant
    Starve,
    /// Lanes that wait for the end of a job are never opened
    Ends,
}

impl Scenario {
    /// An empty scenario with one host.
    pub fn new(name: &str, seed: u64) -> Self {
        Self {
            name: name.to_owned(),
            seed,
            hosts: 1,
            slots: 16,
            sharded: false,
            classes: Vec::new(),
            gates: Vec::new(),
            faults: Vec::new(),
            lease: 60 * SECOND,
            costs: Costs::default(),
            window: 10 * SECOND,
            until: None,
            sabotage: None,
        }
    }

    /// The number of jobs.
    pub fn jobs(&self) -> u64 {
        let jobs = self.classes.iter().map(|class| match class.load {
            Load::Backlog { jobs_each } => u64::from(jobs_each) * u64::from(class.tenants),
            Load::Poisson { jobs, .. } => jobs,
        });
        jobs.sum()
    }

    /// The number of tenants.
    pub fn tenants(&self) -> u32 {
        self.classes.iter().map(|class| class.tenants).sum()
    }
}
