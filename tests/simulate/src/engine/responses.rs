//! Delivers statements of hosts to the server, and responses to the hosts.

use std::time::Duration;

use rouse_turns::throttled_within;

use super::Engine;
use crate::events::Event;
use crate::host::{Health, InLine};
use crate::{Nanos, Sabotage};

impl<P: FnMut(u64)> Engine<'_, P> {
    pub(super) fn claim(&mut self, host: u32, now: Nanos) {
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

    pub(super) fn receive_response(&mut self, host: u32, now: Nanos) {
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
        let start_within = throttled_within(of.throttled_response);
        for job in response.jobs {
            let is_throttled = self.lanes[job.lane as usize].is_throttled();
            if is_throttled {
                of.throttled_response = Duration::from_nanos(now.saturating_sub(sent.at));
            }
            let in_line = InLine {
                job,
                sent_at: sent.at,
                received_at: now,
                start_within: is_throttled.then_some(start_within),
            };
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

    pub(super) fn settled(&mut self, host: u32, now: Nanos) {
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

    pub(super) fn freed(&mut self, host: u32, now: Nanos) {
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
}
