//! Runs a scenario: handles one event after another.

use std::time::Instant;

use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::events::{Event, Events};
use crate::gates::Order;
use crate::host::{Health, Host, InLine, Sent};
use crate::lanes::{self, Lane};
use crate::report::Report;
use crate::scenario::{FaultKind, Load};
use crate::server::{Job, Server};
use crate::witness::Witness;
use crate::{MS, Nanos, SECOND, Sabotage, Scenario};

/// The maximum number of lanes in one claim, as in the host.
const LANES_PER_CLAIM: usize = 256;
/// The interval of searches for the newest jobs, as in the host.
const SEARCH_EVERY: Nanos = 5 * MS;
/// The maximum number of jobs that a search reads, as in the host.
const SEARCH_JOBS_MAX: usize = 2_000;
/// The interval of sweeps, as in the host.
const SWEEP_EVERY: Nanos = SECOND;
/// While claims are in line, settlements are collected for this time, as in the host.
const COLLECTED_FOR: Nanos = 2 * MS;
/// The interval between looks of a busy host, so that a look handles several ends. Starts and ends have their own
/// times.
const LOOK_EVERY: Nanos = MS;
/// The shards of a dead host get other owners after this time.
const SHARD_LEASE: Nanos = 5 * SECOND;
/// If no attempt has started for this long, the simulation ends.
const IDLE_MAX: Nanos = 120 * SECOND;
/// A claim always has at least this share of its lease left, because leases are renewed.
const LEASE_LEFT_MIN: f64 = 0.6;

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

    /// Handles the attempts of a host that have ended until now, and starts those that follow them.
    fn advance(&mut self, host: u32, now: Nanos) {
        let mut ended = 0;
        while let Some((at, job)) = self.hosts[host as usize].take_ended(now) {
            ended += 1;
            self.witness.ended(at, job);
            if self.is_exact {
                let of = &mut self.hosts[host as usize];
                if of.unsettled.is_empty() {
                    of.unsettled_since = at;
                }
                of.unsettled.push(job);
            } else {
                self.count_ended(job, at);
            }
            self.fill(host, at);
        }
        if ended > 0 && !self.is_exact {
            self.server.settle(now, ended);
        }
    }

    fn count_ended(&mut self, job: Job, at: Nanos) {
        let class = &mut self.witness.classes[usize::from(job.class)];
        class.ended += 1;
        class.ended_at = class.ended_at.max(at);
        self.left -= 1;
        self.ended_at = self.ended_at.max(at);
        if self.left.is_multiple_of(1 << 16) {
            (self.progress)(self.scenario.jobs() - self.left);
        }
    }

    /// Starts claims in line in the free slots.
    fn fill(&mut self, host: u32, now: Nanos) {
        while let Some(next) = self.hosts[host as usize].next_in_line(now) {
            match next {
                Ok(job) => {
                    self.witness.started(now, job);
                    let class = &self.scenario.classes[usize::from(job.class)];
                    let mean = class.run_time as f64;
                    let end = now + self.exponential(mean).max(1);
                    let host = &mut self.hosts[host as usize];
                    host.start(end, job, now);
                }
                Err(job) => {
                    self.witness.released += 1;
                    let keys = &self.lanes[job.lane as usize].keys;
                    self.server.ended(keys);
                    self.add_job(job, now);
                }
            }
        }
    }

    fn look(&mut self, host: u32, now: Nanos) {
        match self.hosts[host as usize].health {
            Health::Up => {}
            Health::Down => return,
            Health::Frozen { until } => return self.look_at(host, until),
        }
        self.advance(host, now);
        self.settle(host, now);
        let waits = self.send_claim(host, now);
        self.plan_look(host, now, waits);
    }

    /// Sends the settlements of jobs that have ended, once it is time.
    fn settle(&mut self, host: u32, now: Nanos) {
        let of = &mut self.hosts[host as usize];
        let is_time = of.has_empty_line() || now >= of.unsettled_since + COLLECTED_FOR;
        if !of.unsettled.is_empty() && is_time {
            let jobs = std::mem::take(&mut of.unsettled);
            let arrives = now + self.scenario.costs.round_trip / 2;
            let done = self.server.settle(arrives, jobs.len());
            of.settling.push_back(jobs);
            self.events.add(done, Event::Settled(host));
        }
    }

    /// Searches the newest jobs, if it is time. Returns how many lanes have jobs now and had none before.
    fn search(&mut self, host: u32, now: Nanos) -> usize {
        let pool = self.pool(host);
        let of = &mut self.hosts[host as usize];
        if now < of.next_search {
            return 0;
        }
        of.next_search = now + SEARCH_EVERY;
        let newest = &mut self.newest[pool];
        let end = newest.len();
        let from = of.read_to.max(end.saturating_sub(SEARCH_JOBS_MAX));
        of.read_to = end;
        let mut found = 0;
        for lane in &newest[from..] {
            let lane = *lane;
            let mut is_new = of.unknown(std::iter::once(lane), &self.server);
            if is_new.next().is_some() {
                drop(is_new);
                of.activate(lane, &self.lanes, self.scenario.sabotage);
                of.woken.insert(lane);
                found += 1;
            }
        }
        if self.scenario.sharded {
            newest.clear();
            of.read_to = 0;
        }
        found
    }

    /// Sends a claim if there is room for one, and there are jobs. Returns how many more attempts have to end before
    /// there is room, if jobs are known.
    fn send_claim(&mut self, host: u32, now: Nanos) -> Option<usize> {
        let sabotage = self.scenario.sabotage;
        let of = &mut self.hosts[host as usize];
        let behind = |lane: u32| self.lanes[lane as usize].keys.clone();
        for lane in of.closings.due(now, behind) {
            of.open(lane, &self.lanes, sabotage);
        }
        if of.sent.is_some() {
            return None;
        }
        let ahead = of.claim_ahead(now);
        let found = self.search(host, now);
        let of = &mut self.hosts[host as usize];
        let (capacity, worthwhile) = of.capacity(ahead);
        let wanted = match capacity >= worthwhile {
            true => capacity.min(of.claim_max()),
            false => found.min(of.extra(ahead)),
        };
        if wanted == 0 {
            let waits = worthwhile.saturating_sub(capacity);
            return (!of.is_idle()).then_some(waits);
        }
        let parts = of.turns.divide(wanted, LANES_PER_CLAIM);
        if parts.is_empty() && !self.server.has_orphans(now) {
            return None;
        }
        let orders = parts.into_iter().map(|part| Order {
            lane: part.lane,
            max: part.max,
        });
        of.sent = Some(Sent {
            orders: orders.collect(),
            wanted,
            at: now,
        });
        let arrives = now + self.scenario.costs.round_trip / 2;
        self.events.add(arrives, Event::Claim(host));
        None
    }

    /// Plans the next look of a host that waits for `waits` ends.
    fn plan_look(&mut self, host: u32, now: Nanos, waits: Option<usize>) {
        let is_exact = self.is_exact;
        let of = &mut self.hosts[host as usize];
        let mut at = of.closings.next_opening().unwrap_or(Nanos::MAX);
        if let Some(end) = of.next_end().filter(|_| is_exact || waits.is_some()) {
            // Half of the time that this many ends are expected to take.
            let ahead = of.claim_ahead(now).max(1) as Nanos;
            let expected = match waits {
                Some(waits) if !is_exact => waits as Nanos * 50 * MS / ahead,
                _ => 0,
            };
            at = at.min(end.max(now + expected.clamp(LOOK_EVERY, 50 * MS)));
        }
        if !of.unsettled.is_empty() {
            at = at.min((of.unsettled_since + COLLECTED_FOR).max(now + 1));
        }
        if at < Nanos::MAX {
            self.look_at(host, at.max(now + 1));
        }
    }

    fn claim(&mut self, host: u32, now: Nanos) {
        let of = &mut self.hosts[host as usize];
        let Some(sent) = &of.sent else {
            return;
        };
        let response = self
            .server
            .claim(now, &sent.orders, sent.wanted, &self.lanes);
        let arrives = response.done + self.scenario.costs.round_trip / 2;
        let pool = if self.scenario.sharded {
            host as usize
        } else {
            0
        };
        self.witness
            .claimed(response.at, &response.taken, &self.lanes, pool);
        of.response = Some(response);
        self.events.add(arrives, Event::Response(host));
    }

    fn receive_response(&mut self, host: u32, now: Nanos) {
        let lease = self.scenario.lease;
        let of = &mut self.hosts[host as usize];
        let Some(response) = of.response.take() else {
            return;
        };
        let is_lost = match of.health {
            Health::Up => response.at + lease <= now,
            Health::Down => true,
            Health::Frozen { until } if response.at + lease <= until => true,
            Health::Frozen { until } => {
                of.response = Some(response);
                return self.events.add(until, Event::Response(host));
            }
        };
        let Some(sent) = of.sent.take() else {
            return;
        };
        if is_lost {
            of.not_claimed(&sent);
            for job in response.jobs {
                self.server.orphan(job, response.at + lease);
            }
            return self.look_at(host, now + 1);
        }
        self.advance(host, now);
        let sabotage = self.scenario.sabotage;
        let of = &mut self.hosts[host as usize];
        if response.is_adoption {
            of.not_claimed(&sent);
            self.witness.adopted += response.jobs.len() as u64;
        } else {
            let emptied = of.claimed(&sent, &response, &self.lanes);
            of.note_closed(&response, &emptied, &self.lanes, now, sabotage);
        }
        for job in response.jobs {
            let sent_at = sent.at;
            let in_line = InLine { job, sent_at };
            match of.woken.remove(&job.lane) {
                true => of.ahead.push_back(in_line),
                false => of.line.push_back(in_line),
            }
        }
        for order in &sent.orders {
            of.woken.remove(&order.lane);
        }
        self.fill(host, now);
        self.look(host, now);
    }

    fn settled(&mut self, host: u32, now: Nanos) {
        let Some(jobs) = self.hosts[host as usize].settling.pop_front() else {
            return;
        };
        for job in &jobs {
            let keys = &self.lanes[job.lane as usize].keys;
            self.server.ended(keys);
            self.count_ended(*job, now);
        }
        self.hosts[host as usize].freed.push_back(jobs);
        let arrives = now + self.scenario.costs.round_trip / 2;
        self.events.add(arrives, Event::Freed(host));
    }

    fn freed(&mut self, host: u32, now: Nanos) {
        let of = &mut self.hosts[host as usize];
        match of.health {
            Health::Up => {}
            Health::Down => return of.freed.clear(),
            Health::Frozen { until } => return self.events.add(until, Event::Freed(host)),
        }
        let jobs = of.freed.pop_front();
        for job in jobs.iter().flatten() {
            if self.scenario.sabotage == Some(Sabotage::Ends) {
                continue;
            }
            for limit in &self.lanes[job.lane as usize].limits {
                of.move_closed(limit, &[], &self.lanes);
                for lane in of.closings.by_end(limit) {
                    of.open(lane, &self.lanes, self.scenario.sabotage);
                }
            }
        }
        self.look(host, now);
    }

    fn sweep(&mut self, host: u32, now: Nanos) {
        let pool = self.pool(host);
        let sabotage = self.scenario.sabotage;
        let of = &mut self.hosts[host as usize];
        match of.health {
            Health::Up => {}
            Health::Down => return,
            Health::Frozen { until } => return self.events.add(until, Event::Sweep(host)),
        }
        let some = of.closings.some();
        for lane in some
            .into_iter()
            .filter(|_| sabotage != Some(Sabotage::Ends))
        {
            of.open(lane, &self.lanes, sabotage);
        }
        let owned = self.owned[pool].iter().copied();
        let found: Vec<u32> = of.unknown(owned, &self.server).collect();
        for lane in found {
            of.activate(lane, &self.lanes, sabotage);
        }
        self.events.add(now + SWEEP_EVERY, Event::Sweep(host));
        self.look(host, now);
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
        // The jobs that every host has read.
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

    fn fault(&mut self, number: usize, now: Nanos) {
        let fault = self.scenario.faults[number];
        let host = fault.host as u32;
        if self.hosts[fault.host].health != Health::Up {
            return;
        }
        self.advance(host, now);
        match fault.kind {
            FaultKind::Death { restarts_after } => {
                self.lose(fault.host, now, Nanos::MAX);
                let of = &mut self.hosts[fault.host];
                of.health = Health::Down;
                of.next_look = Nanos::MAX;
                self.events.add(now + restarts_after, Event::Start(host));
                if self.scenario.sharded && restarts_after > SHARD_LEASE {
                    self.events.add(now + SHARD_LEASE, Event::Reassign(host));
                }
            }
            FaultKind::Freeze { lasts } => {
                let until = now + lasts;
                self.lose(fault.host, now, until);
                let of = &mut self.hosts[fault.host];
                of.health = Health::Frozen { until };
                let running = std::mem::take(&mut of.running);
                let later = running
                    .into_iter()
                    .map(|std::cmp::Reverse((end, job))| std::cmp::Reverse((end + lasts, job)));
                of.running = later.collect();
                of.next_look = Nanos::MAX;
                self.events.add(until, Event::Start(host));
            }
        }
    }

    /// Makes a host lose its claims whose leases end before `until`: all of these jobs run again.
    fn lose(&mut self, host: usize, now: Nanos, until: Nanos) {
        let of = &mut self.hosts[host];
        let running = std::mem::take(&mut of.running).into_sorted_vec();
        let waiting: Vec<InLine> = of.ahead.drain(..).chain(of.line.drain(..)).collect();
        let unsettled = std::mem::take(&mut of.unsettled);
        let lease = self.scenario.lease as f64;
        let random = &mut self.random;
        let mut lease_until = || {
            let left = LEASE_LEFT_MIN + (1.0 - LEASE_LEFT_MIN) * random.random::<f64>();
            now + (lease * left) as Nanos
        };
        for std::cmp::Reverse((end, job)) in running {
            let lease_until = lease_until();
            if lease_until < until {
                self.witness.ended(now, job);
                self.server.orphan(job, lease_until);
            } else {
                of.running.push(std::cmp::Reverse((end, job)));
            }
        }
        for in_line in waiting {
            let lease_until = lease_until();
            match lease_until < until {
                true => self.server.orphan(in_line.job, lease_until),
                false => of.line.push_back(in_line),
            }
        }
        for job in unsettled {
            let lease_until = lease_until();
            match lease_until < until {
                true => self.server.orphan(job, lease_until),
                false => of.unsettled.push(job),
            }
        }
    }

    /// A host continues after a freeze, or a new one starts after a death.
    fn restart(&mut self, host: u32, now: Nanos) {
        let of = &mut self.hosts[host as usize];
        match of.health {
            Health::Up => {}
            Health::Frozen { .. } => {
                of.health = Health::Up;
                self.look_at(host, now);
            }
            Health::Down => {
                let read_to = self.newest[if self.scenario.sharded {
                    host as usize
                } else {
                    0
                }]
                .len();
                *of = Host::new(self.scenario, self.zero, now);
                of.read_to = if self.scenario.sharded { 0 } else { read_to };
                if self.scenario.sharded {
                    self.take_back(host as usize, now);
                }
                self.events.add(now, Event::Sweep(host));
            }
        }
    }

    /// Gives the lanes of a dead host to the others, in turn.
    fn reassign(&mut self, gone: usize) {
        if self.hosts[gone].health != Health::Down {
            return;
        }
        let is_up = |host: &usize| *host != gone && self.hosts[*host].health == Health::Up;
        let up: Vec<usize> = (0..self.hosts.len()).filter(is_up).collect();
        if up.is_empty() {
            return;
        }
        let lanes = std::mem::take(&mut self.owned[gone]);
        self.newest[gone].clear();
        for (lane, new) in lanes.into_iter().zip(up.iter().cycle()) {
            self.move_lane(lane, *new);
        }
    }

    /// Gives a host back the lanes that it had at the start.
    fn take_back(&mut self, host: usize, now: Nanos) {
        let pools = self.owned.len();
        for lane in (host..self.lanes.len()).step_by(pools) {
            let owner = self.owners[lane];
            if owner != host {
                self.advance(owner as u32, now);
                self.owned[owner].retain(|owned| *owned != lane as u32);
                self.hosts[owner].give_up(lane as u32);
                self.move_lane(lane as u32, host);
            }
        }
    }

    fn move_lane(&mut self, lane: u32, to: usize) {
        let of = &self.lanes[lane as usize];
        let from = self.owners[lane as usize];
        self.witness.unwatch(lane, of, from);
        self.owners[lane as usize] = to;
        self.owned[to].push(lane);
    }
}

#[cfg(test)]
mod tests;
