//! Runs a scenario: handles one event after another.

mod looks;
mod responses;

mod faults;

use std::time::Instant;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::events::{Event, Events};
use crate::host::{Health, Host};
use crate::lanes::{self, Lane};
use crate::report::Report;
use crate::scenario::Load;
use crate::server::{Job, Server};
use crate::witness::Witness;
use crate::{Nanos, SECOND, Scenario};

/// The interval of sweeps, as in the host.
const SWEEP_EVERY: Nanos = SECOND;
/// If no attempt has started for this long, the simulation ends.
const IDLE_MAX: Nanos = 120 * SECOND;

/// Runs a scenario to its end. From time to time, `progress` receives the number of jobs that have ended.
pub fn run(scenario: &Scenario, progress: impl FnMut(u64)) -> Report {
    Engine::new(scenario, progress).run()
}

struct Engine<'a, P> {
    scenario: &'a Scenario,
    lanes: Vec<Lane>,
    /// The owner of each lane, if lanes are sharded.
    owners: Vec<usize>,
    /// The lanes of each host; those of all hosts are in the first list if lanes are not sharded.
    owned: Vec<Vec<u32>>,
    hosts: Vec<Host>,
    server: Server,
    events: Events,
    witness: Witness,
    random: StdRng,
    /// The lanes of the newest jobs, by pool.
    newest: Vec<Vec<u32>>,
    /// For each class, the number of jobs that are not enqueued yet, and its first lane.
    to_enqueue: Vec<u64>,
    first_lanes: Vec<u32>,
    /// The jobs that have not ended.
    left: u64,
    ended_at: Nanos,
    /// True if each end and settlement matters, because there are gates or faults.
    is_exact: bool,
    zero: Instant,
    progress: P,
}

impl<'a, P: FnMut(u64)> Engine<'a, P> {
    fn new(scenario: &'a Scenario, progress: P) -> Self {
        // Virtual time zero; nothing depends on it.
        let zero = Instant::now();
        let lanes = lanes::for_scenario(scenario);
        let pools = if scenario.sharded { scenario.hosts } else { 1 };
        let mut owned = vec![Vec::new(); pools];
        let mut owners = Vec::with_capacity(lanes.len());
        for lane in 0..lanes.len() {
            owners.push(lane % pools);
            owned[lane % pools].push(lane as u32);
        }
        let mut first_lanes = Vec::new();
        let mut next = 0;
        for class in &scenario.classes {
            first_lanes.push(next);
            next += class.tenants;
        }
        let hosts = (0..scenario.hosts).map(|_| Host::new(scenario, zero, 0));
        Self {
            scenario,
            owners,
            owned,
            hosts: hosts.collect(),
            server: Server::new(scenario, lanes.len()),
            events: Events::default(),
            witness: Witness::new(scenario, &lanes),
            random: StdRng::seed_from_u64(scenario.seed),
            newest: vec![Vec::new(); pools],
            to_enqueue: vec![0; scenario.classes.len()],
            first_lanes,
            left: scenario.jobs(),
            ended_at: 0,
            is_exact: !scenario.gates.is_empty() || !scenario.faults.is_empty(),
            lanes,
            zero,
            progress,
        }
    }

    fn run(mut self) -> Report {
        self.start();
        let until = self.scenario.until.unwrap_or(Nanos::MAX);
        let mut starts = 0;
        let mut idle_since = 0;
        let mut now = 0;
        let mut is_over = true;
        while self.left > 0
            && let Some((at, event)) = self.events.next()
        {
            if at > until {
                is_over = false;
                break;
            }
            now = at;
            match event {
                Event::Look(host) => {
                    let of = &mut self.hosts[host as usize];
                    // A look that is not the next one is obsolete.
                    if of.next_look == at {
                        of.next_look = Nanos::MAX;
                        self.look(host, at);
                    }
                }
                Event::Claim(host) => self.claim(host, at),
                Event::Response(host) => self.receive_response(host, at),
                Event::Settled(host) => self.settled(host, at),
                Event::Freed(host) => self.freed(host, at),
                Event::Sweep(host) => self.sweep(host, at),
                Event::Enqueue(class) => self.enqueue(class as usize, at),
                Event::Fault(number) => self.fault(number as usize, at),
                Event::Start(host) => self.restart(host, at),
                Event::Reassign(host) => self.reassign(host as usize),
                Event::Window => {
                    self.end_window(at);
                    if self.witness.starts != starts {
                        starts = self.witness.starts;
                        idle_since = at;
                    }
                    if at - idle_since >= IDLE_MAX {
                        break;
                    }
                }
            }
        }
        let (lanes, server) = (&self.lanes, &self.server);
        self.witness.finish(lanes, server, is_over);
        let time = if self.left == 0 { self.ended_at } else { now };
        Report::of(self.scenario, &self.witness, &self.server, time)
    }

    fn start(&mut self) {
        for (class, of) in self.scenario.classes.iter().enumerate() {
            match of.load {
                Load::Backlog { jobs_each } => {
                    for tenant in 0..of.tenants {
                        let lane = self.first_lanes[class] + tenant;
                        let job = self.lanes[lane as usize].job(lane, 0);
                        self.server.enqueue(job, jobs_each);
                    }
                }
                Load::Poisson { jobs: 0, .. } => {}
                Load::Poisson { jobs, .. } => {
                    self.to_enqueue[class] = jobs;
                    let first = self.gap(class);
                    self.events.add(first, Event::Enqueue(class as u32));
                }
            }
        }
        let pool_of = |lane: u32| self.owners[lane as usize];
        self.witness.start(&self.lanes, &self.server, pool_of);
        for host in 0..self.scenario.hosts {
            // The first sweep of each finds all lanes with jobs.
            let at = SWEEP_EVERY / 100 * host as Nanos / self.scenario.hosts as Nanos;
            self.events.add(at, Event::Sweep(host as u32));
        }
        for (number, fault) in self.scenario.faults.iter().enumerate() {
            self.events.add(fault.at, Event::Fault(number as u32));
        }
        self.events.add(self.scenario.window, Event::Window);
    }

    fn pool_of(&self, lane: u32) -> usize {
        self.owners[lane as usize]
    }

    /// The pool of a host's lanes.
    fn pool(&self, host: u32) -> usize {
        if self.scenario.sharded {
            host as usize
        } else {
            0
        }
    }

    fn exponential(&mut self, mean: f64) -> Nanos {
        let uniform: f64 = self.random.random();
        (-(1.0 - uniform).ln() * mean) as Nanos
    }

    /// The time until a class enqueues its next job.
    fn gap(&mut self, class: usize) -> Nanos {
        match self.scenario.classes[class].load {
            Load::Poisson { per_s, .. } => self.exponential(SECOND as f64 / per_s),
            Load::Backlog { .. } => 0,
        }
    }

    fn enqueue(&mut self, class: usize, now: Nanos) {
        let tenant = self
            .random
            .random_range(0..self.scenario.classes[class].tenants);
        let lane = self.first_lanes[class] + tenant;
        let job = self.lanes[lane as usize].job(lane, now);
        self.add_job(job, now);
        self.to_enqueue[class] -= 1;
        if self.to_enqueue[class] > 0 {
            let next = now + self.gap(class);
            self.events.add(next, Event::Enqueue(class as u32));
        }
    }

    /// Adds a job, which the next searches of the hosts of its lane find.
    fn add_job(&mut self, job: Job, now: Nanos) {
        self.server.enqueue(job, 1);
        let pool = self.pool_of(job.lane);
        self.newest[pool].push(job.lane);
        let hosts = match self.scenario.sharded {
            true => pool..pool + 1,
            false => 0..self.hosts.len(),
        };
        let round_trip = self.scenario.costs.round_trip;
        for number in hosts {
            let host = &self.hosts[number];
            // A host that has nothing to do gets a notification.
            let at = match host.is_idle() {
                true => now + round_trip / 2,
                false => host.next_search.max(now),
            };
            self.look_at(number as u32, at);
        }
    }

    /// Plans a look, unless an earlier one is planned.
    fn look_at(&mut self, host: u32, at: Nanos) {
        let of = &mut self.hosts[host as usize];
        if at < of.next_look && of.health != Health::Down {
            of.next_look = at;
            self.events.add(at, Event::Look(host));
        }
    }

    fn end_window(&mut self, now: Nanos) {
        self.witness.count_running(now, &self.lanes);
        let (scenario, owners, hosts) = (self.scenario, &self.owners, &self.hosts);
        let is_idle = |pool: usize| {
            let of_pool = match scenario.sharded {
                true => &hosts[pool..=pool],
                false => &hosts[..],
            };
            let is_free = |host: &Host| host.health == Health::Up && host.has_free_slot();
            of_pool.iter().any(is_free)
        };
        let pool_of = |lane: u32| owners[lane as usize];
        self.witness
            .end_window(now, &self.lanes, &self.server, pool_of, is_idle);
        // Forgets the jobs that every host has read.
        if !scenario.sharded {
            let up = hosts.iter().filter(|host| host.health != Health::Down);
            let read = up.map(|host| host.read_to).min().unwrap_or(0);
            self.newest[0].drain(..read);
            for host in &mut self.hosts {
                host.read_to = host.read_to.saturating_sub(read);
            }
        }
        self.events.add(now + scenario.window, Event::Window);
    }
}

#[cfg(test)]
mod tests;
