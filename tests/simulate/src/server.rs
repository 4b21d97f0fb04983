//! The modelled Postgres: waiting and orphaned jobs, claims within gates, and how long statements take.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, VecDeque};

use crate::gates::{ClosedLane, Gates, Key, Order};
use crate::lanes::Lane;
use crate::scenario::Costs;
use crate::{Nanos, Sabotage, Scenario, US};

/// A job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Job {
    pub(crate) enqueued_at: Nanos,
    pub(crate) lane: u32,
    /// The class of its lane; a copy, because there are many lanes.
    pub(crate) class: u16,
    /// A gate limits how many jobs of its key run.
    pub(crate) is_limited: bool,
    /// No attempt at it has started.
    pub(crate) is_new: bool,
}

/// Consecutive jobs of a lane that were enqueued at the same time.
#[derive(Debug)]
struct Run {
    job: Job,
    jobs: u32,
}

/// The response to a claim.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) jobs: Vec<Job>,
    pub(crate) closed: Vec<ClosedLane>,
    /// The jobs are orphans, and nothing else was claimed.
    pub(crate) is_adoption: bool,
    /// The time of the claim.
    pub(crate) at: Nanos,
    /// When it is committed.
    pub(crate) done: Nanos,
    /// The number of jobs that were taken from each lane, and the number that are left in it.
    pub(crate) taken: Vec<(u32, usize, usize)>,
}

/// The server.
#[derive(Debug)]
pub(crate) struct Server {
    costs: Costs,
    sabotage: Option<Sabotage>,
    waiting: Vec<VecDeque<Run>>,
    counts: Vec<u32>,
    pub(crate) gates: Gates,
    /// When each core is free.
    cores: BinaryHeap<Reverse<Nanos>>,
    /// When the lock of each gate is free.
    locks: Vec<Nanos>,
    /// The orphans, by the end of their leases.
    orphans: BTreeMap<(Nanos, u64), Job>,
    orphaned: u64,
    /// The time that all cores have worked.
    pub(crate) busy: Nanos,
    pub(crate) claims: u64,
}

impl Server {
    pub(crate) fn new(scenario: &Scenario, lanes: usize) -> Self {
        let limits = scenario.gates.iter().map(|gate| gate.limit);
        Self {
            costs: scenario.costs,
            sabotage: scenario.sabotage,
            waiting: std::iter::repeat_with(VecDeque::new).take(lanes).collect(),
            counts: vec![0; lanes],
            gates: Gates::new(limits.collect()),
            cores: vec![Reverse(0); scenario.costs.cores.max(1)].into(),
            locks: vec![0; scenario.gates.len()],
            orphans: BTreeMap::new(),
            orphaned: 0,
            busy: 0,
            claims: 0,
        }
    }

    /// The number of jobs that wait in a lane.
    pub(crate) fn waiting(&self, lane: u32) -> usize {
        self.counts[lane as usize] as usize
    }

    /// Adds jobs at the end of their lane.
    pub(crate) fn enqueue(&mut self, job: Job, jobs: u32) {
        self.counts[job.lane as usize] += jobs;
        let waiting = &mut self.waiting[job.lane as usize];
        match waiting.back_mut().filter(|last| last.job == job) {
            Some(last) => last.jobs += jobs,
            None => waiting.push_back(Run { job, jobs }),
        }
    }

    fn take(&mut self, lane: u32, jobs: usize, into: &mut Vec<Job>) -> usize {
        let waiting = &mut self.waiting[lane as usize];
        let mut taken = 0;
        while taken < jobs
            && let Some(first) = waiting.front_mut()
        {
            let part = usize::min(first.jobs as usize, jobs - taken);
            into.extend(std::iter::repeat_n(first.job, part));
            taken += part;
            first.jobs -= part as u32;
            if first.jobs == 0 {
                waiting.pop_front();
            }
        }
        self.counts[lane as usize] -= taken as u32;
        taken
    }

    /// The time at which a statement that arrives now starts. The caller then calls [`Self::occupy`].
    fn start(&mut self, now: Nanos) -> Nanos {
        let free = self.cores.pop().map_or(0, |Reverse(free)| free);
        free.max(now)
    }

    fn occupy(&mut self, from: Nanos, cost: Nanos) -> Nanos {
        self.busy += cost;
        self.cores.push(Reverse(from + cost));
        from + cost
    }

    /// Settles this many jobs with a statement that arrives now. Returns when it is committed.
    pub(crate) fn settle(&mut self, now: Nanos, jobs: usize) -> Nanos {
        let from = self.start(now);
        self.occupy(from, self.costs.settle * jobs as Nanos)
    }

    /// Handles a claim that arrives now. If a lease has ended, the claim adopts orphans instead.
    pub(crate) fn claim(
        &mut self,
        now: Nanos,
        orders: &[Order],
        wanted: usize,
        lanes: &[Lane],
    ) -> Response {
        self.claims += 1;
        let from = self.start(now);
        if self.has_orphans(from) {
            return self.adopt(from, wanted);
        }
        let mut orders = orders.to_vec();
        let keys = |lane: u32| lanes[lane as usize].keys.as_slice();
        let used = orders.iter().flat_map(|order| keys(order.lane));
        let used: BTreeSet<usize> = used.map(|key| key.gate).collect();
        let locked = used.iter().map(|gate| self.locks[*gate]);
        // Postgres counts in microseconds.
        let at = locked.fold(from, Nanos::max).div_ceil(US) * US;
        let at_us = (at / US) as i64;
        let gated = match used.is_empty() {
            true => Vec::new(),
            false => {
                let ready = |lane: u32| self.waiting(lane);
                self.gates.restrict(&mut orders, wanted, at_us, keys, ready)
            }
        };
        let mut jobs = Vec::new();
        let mut taken = Vec::new();
        for order in &orders {
            let left = wanted - jobs.len();
            let mut most = order.max.unwrap_or(left);
            if self.sabotage == Some(Sabotage::Gates) && !keys(order.lane).is_empty() {
                most += 1;
            }
            let count = self.take(order.lane, most.min(left), &mut jobs);
            if count > 0 {
                taken.push((order.lane, count, self.waiting(order.lane)));
            }
            for key in keys(order.lane) {
                (0..count).for_each(|_| self.gates.started(*key));
            }
        }
        let closed = match gated.is_empty() {
            true => Vec::new(),
            false => {
                let claimed: HashMap<u32, usize> =
                    taken.iter().map(|(lane, jobs, _)| (*lane, *jobs)).collect();
                self.gates.charge(&gated, &claimed, at_us)
            }
        };
        let Costs {
            claim, lane, job, ..
        } = self.costs;
        let cost = claim + lane * orders.len() as Nanos + job * jobs.len() as Nanos;
        // A statement that waits for a lock, or for the disk, does not occupy a core.
        self.occupy(from, cost);
        let is_throttled = |(lane, ..): &(u32, usize, usize)| lanes[*lane as usize].is_throttled();
        let flush = match taken.iter().any(is_throttled) {
            true => self.costs.flush,
            false => 0,
        };
        let done = at + cost + flush;
        for gate in used {
            self.locks[gate] = done;
        }
        Response {
            jobs,
            closed,
            is_adoption: false,
            at,
            done,
            taken,
        }
    }

    /// True if leases have ended.
    pub(crate) fn has_orphans(&self, now: Nanos) -> bool {
        let first = self.orphans.first_key_value();
        first.is_some_and(|((until, _), _)| *until <= now)
    }

    fn adopt(&mut self, from: Nanos, wanted: usize) -> Response {
        let mut jobs = Vec::new();
        while jobs.len() < wanted && self.has_orphans(from) {
            jobs.extend(self.orphans.pop_first().map(|(_, job)| job));
        }
        let cost = self.costs.claim + self.costs.job * jobs.len() as Nanos;
        let done = self.occupy(from, cost);
        Response {
            jobs,
            closed: Vec::new(),
            is_adoption: true,
            at: from,
            done: done + self.costs.round_trip,
            taken: Vec::new(),
        }
    }

    /// Adds a job whose host is dead, or has lost its lease. It can be adopted when the lease has ended, and counts as
    /// running until the adopting host has settled it.
    pub(crate) fn orphan(&mut self, job: Job, lease_until: Nanos) {
        self.orphaned += 1;
        let is_new = false;
        self.orphans
            .insert((lease_until, self.orphaned), Job { is_new, ..job });
    }

    /// Records that a job behind these gates no longer runs.
    pub(crate) fn ended(&mut self, keys: &[Key]) {
        for key in keys {
            self.gates.ended(*key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::{Class, Load};

    fn server(tenants: u32) -> (Server, Vec<Lane>) {
        let mut scenario = Scenario::new("test", 1);
        scenario.classes.push(Class {
            name: "all".to_owned(),
            tenants,
            weight: 1.0,
            load: Load::Backlog { jobs_each: 1 },
            run_time: 1,
            gates: Vec::new(),
        });
        let lanes = crate::lanes::for_scenario(&scenario);
        (Server::new(&scenario, lanes.len()), lanes)
    }

    fn job(lane: u32, enqueued_at: Nanos) -> Job {
        Job {
            enqueued_at,
            lane,
            class: 0,
            is_limited: false,
            is_new: true,
        }
    }

    #[test]
    fn a_claim_takes_the_oldest_jobs_of_each_lane_in_the_order_of_its_lanes() {
        let (mut server, lanes) = server(2);
        server.enqueue(job(0, 5), 2);
        server.enqueue(job(0, 6), 1);
        server.enqueue(job(1, 1), 9);
        let orders = [(1, Some(1)), (0, None)].map(|(lane, max)| Order { lane, max });
        let response = server.claim(10, &orders, 4, &lanes);
        assert_eq!(response.jobs, [job(1, 1), job(0, 5), job(0, 5), job(0, 6)]);
        assert_eq!(response.taken, [(1, 1, 8), (0, 3, 0)]);
        assert_eq!((server.waiting(0), server.waiting(1)), (0, 8));
    }

    #[test]
    fn orphans_go_first_once_their_lease_has_ended() {
        let (mut server, lanes) = server(1);
        server.enqueue(job(0, 0), 1);
        server.orphan(job(0, 0), 100 * US);
        let orders = [Order { lane: 0, max: None }];
        assert_eq!(server.claim(99 * US, &orders, 9, &lanes).jobs, [job(0, 0)]);
        let adopted = server.claim(900 * US, &orders, 9, &lanes);
        assert!(adopted.is_adoption && !adopted.jobs[0].is_new);
    }

    #[test]
    fn statements_wait_for_a_core() {
        let (mut server, _) = server(1);
        let one = server.settle(0, 1);
        assert_eq!((server.settle(0, 1), server.settle(0, 1)), (one, 2 * one));
    }
}
