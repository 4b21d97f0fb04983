//! The looks of a host: from the attempts that have ended to the plan of the next look.

use super::{Engine, SWEEP_EVERY};
use crate::events::Event;
use crate::gates::Order;
use crate::host::{Health, Sent};
use crate::server::Job;
use crate::{MS, Nanos, Sabotage};

/// The maximum number of lanes in one claim, as in the host.
const LANES_PER_CLAIM: usize = 256;
/// The interval of searches for the newest jobs, as in the host.
const SEARCH_EVERY: Nanos = 5 * MS;
/// The maximum number of jobs that a search reads, as in the host.
const SEARCH_JOBS_MAX: usize = 2_000;
/// While claims are in line, settlements are collected for this time, as in the host.
const COLLECTED_FOR: Nanos = 2 * MS;
/// The interval between looks of a busy host, so that a look handles several ends. Starts and ends keep their exact
/// times.
const LOOK_EVERY: Nanos = MS;

impl<P: FnMut(u64)> Engine<'_, P> {
    pub(super) fn look(&mut self, host: u32, now: Nanos) {
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

    pub(super) fn sweep(&mut self, host: u32, now: Nanos) {
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

    /// Handles the attempts of a host that have ended by now, and starts those that follow them.
    pub(super) fn advance(&mut self, host: u32, now: Nanos) {
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

    pub(super) fn count_ended(&mut self, job: Job, at: Nanos) {
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
    pub(super) fn fill(&mut self, host: u32, now: Nanos) {
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
}
