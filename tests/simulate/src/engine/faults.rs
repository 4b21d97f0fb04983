//! Applies the faults of a scenario to its hosts.

use rand::Rng as _;

use super::Engine;
use crate::events::Event;
use crate::host::{Health, Host, InLine};
use crate::scenario::FaultKind;
use crate::{Nanos, SECOND};

/// The shards of a dead host get other owners after this time.
const SHARD_LEASE: Nanos = 5 * SECOND;
/// A claim always has at least this share of its lease left, because leases are renewed.
const LEASE_LEFT_MIN: f64 = 0.6;

impl<P: FnMut(u64)> Engine<'_, P> {
    pub(super) fn fault(&mut self, number: usize, now: Nanos) {
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
    pub(super) fn restart(&mut self, host: u32, now: Nanos) {
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
    pub(super) fn reassign(&mut self, gone: usize) {
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
