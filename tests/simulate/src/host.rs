//! A modelled host: its slots, its line, and what it knows of lanes.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::time::{Duration, Instant};

use rouse_turns::{Closings, Prefetch, START_TIMEOUT, Turns};

use crate::gates::{Key, Order};
use crate::lanes::Lane;
use crate::server::{Job, Response, Server};
use crate::{Nanos, Sabotage, Scenario};

/// The maximum size of a claim, and the size of a job without its payload, as in `rouse.claim`.
const CLAIM_BYTES_MAX: usize = 8 << 20;
const COLUMNS_BYTES: usize = 120;

/// A claim that waits for a slot.
#[derive(Debug, Clone, Copy)]
pub(crate) struct InLine {
    pub(crate) job: Job,
    pub(crate) sent_at: Nanos,
    pub(crate) received_at: Nanos,
    /// The maximum time from sending the claim to the start, if a gate limits how many jobs of its key start in a
    /// period.
    pub(crate) start_within: Option<Duration>,
}

impl InLine {
    /// True if it may not start any more: the rules of `Line::startable` and `release_late_claims`.
    fn is_late(&self, now: Nanos) -> bool {
        let since = |then: Nanos| Duration::from_nanos(now.saturating_sub(then));
        let is_too_old = |max: Duration| since(self.sent_at) > max;
        since(self.received_at) > START_TIMEOUT || self.start_within.is_some_and(is_too_old)
    }
}

/// A claim on its way.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) orders: Vec<Order>,
    pub(crate) wanted: usize,
    pub(crate) at: Nanos,
}

/// Whether a host is running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Health {
    Up,
    Frozen { until: Nanos },
    Down,
}

/// A host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) health: Health,
    slots: usize,
    /// The attempts that run, by their ends.
    pub(crate) running: BinaryHeap<Reverse<(Nanos, Job)>>,
    /// Claims that go ahead of the line: the first jobs of lanes that had none.
    pub(crate) ahead: VecDeque<InLine>,
    pub(crate) line: VecDeque<InLine>,
    /// The number of attempts that have ended.
    ended: usize,
    /// Jobs that have ended, and are not settled yet.
    pub(crate) unsettled: Vec<Job>,
    pub(crate) unsettled_since: Nanos,
    /// Settlements on their way.
    pub(crate) settling: VecDeque<Vec<Job>>,
    /// Settlements whose responses are on their way.
    pub(crate) freed: VecDeque<Vec<Job>>,
    pub(crate) sent: Option<Sent>,
    pub(crate) response: Option<Response>,
    pub(crate) turns: Turns<u32>,
    pub(crate) closings: Closings<u32, Key, u32, Nanos>,
    /// Lanes that had no jobs until a moment ago, and that no claim has read since.
    pub(crate) woken: HashSet<u32>,
    /// The position up to which the newest jobs were read.
    pub(crate) read_to: usize,
    pub(crate) next_search: Nanos,
    /// The time of the next look that is planned.
    pub(crate) next_look: Nanos,
    prefetch: Prefetch,
    /// The time that the response to the last claim of jobs behind a rate took.
    pub(crate) throttled_response: Duration,
    /// The run times of all attempts that have started.
    run_times: Nanos,
    /// Virtual time zero.
    zero: Instant,
}

impl Host {
    pub(crate) fn new(scenario: &Scenario, zero: Instant, now: Nanos) -> Self {
        let started = zero + Duration::from_nanos(now);
        Self {
            health: Health::Up,
            slots: scenario.slots,
            running: BinaryHeap::new(),
            ahead: VecDeque::new(),
            line: VecDeque::new(),
            ended: 0,
            unsettled: Vec::new(),
            unsettled_since: 0,
            settling: VecDeque::new(),
            freed: VecDeque::new(),
            sent: None,
            response: None,
            turns: Turns::default(),
            closings: Closings::default(),
            woken: HashSet::new(),
            read_to: 0,
            next_search: now,
            next_look: Nanos::MAX,
            prefetch: Prefetch::new(started, scenario.slots, CLAIM_BYTES_MAX, COLUMNS_BYTES),
            throttled_response: Duration::ZERO,
            run_times: 0,
            zero,
        }
    }

    /// The claimed jobs whose attempts have not ended.
    pub(crate) fn in_hand(&self) -> usize {
        self.running.len() + self.ahead.len() + self.line.len()
    }

    /// True if no claim waits for a slot.
    pub(crate) fn has_empty_line(&self) -> bool {
        self.ahead.is_empty() && self.line.is_empty()
    }

    /// True if a slot is free.
    pub(crate) fn has_free_slot(&self) -> bool {
        self.running.len() < self.slots
    }

    /// When the next attempt ends.
    pub(crate) fn next_end(&self) -> Option<Nanos> {
        self.running.peek().map(|Reverse((end, _))| *end)
    }

    /// Takes the next attempt that has ended by this time.
    pub(crate) fn take_ended(&mut self, until: Nanos) -> Option<(Nanos, Job)> {
        self.next_end().filter(|end| *end <= until)?;
        self.ended += 1;
        self.running.pop().map(|Reverse(ended)| ended)
    }

    /// Starts an attempt, which ends at `end`.
    pub(crate) fn start(&mut self, end: Nanos, job: Job, now: Nanos) {
        self.run_times += end - now;
        self.running.push(Reverse((end, job)));
    }

    /// The next claim for a free slot, or one that has waited too long and is released (`Err`).
    pub(crate) fn next_in_line(&mut self, now: Nanos) -> Option<Result<Job, Job>> {
        if !self.has_free_slot() {
            return None;
        }
        let next = self.ahead.pop_front().or_else(|| self.line.pop_front())?;
        Some(match next.is_late(now) {
            true => Err(next.job),
            false => Ok(next.job),
        })
    }

    /// The number of jobs to claim beyond the free slots, as decided by the code of the host.
    pub(crate) fn claim_ahead(&mut self, now: Nanos) -> usize {
        let left = self.running.iter();
        let left: Nanos = left.map(|Reverse((end, _))| end.saturating_sub(now)).sum();
        let taken = Duration::from_nanos(self.run_times.saturating_sub(left));
        let now = self.zero + Duration::from_nanos(now);
        self.prefetch.jobs(self.ended, taken, now)
    }

    /// The maximum number of jobs for one claim.
    pub(crate) fn claim_max(&self) -> usize {
        self.prefetch.claim_max()
    }

    /// The number of jobs that may be claimed, and the number that is worth a claim: the rules of `Slots::capacity`.
    pub(crate) fn capacity(&self, ahead: usize) -> (usize, usize) {
        let capacity = (self.slots + ahead).saturating_sub(self.in_hand());
        (capacity, (ahead / 2).max(1))
    }

    /// The number of jobs that may be claimed beyond a full line, because they go ahead in it: the rule of
    /// `Slots::extra`.
    pub(crate) fn extra(&self, ahead: usize) -> usize {
        (2 * self.slots + ahead).saturating_sub(self.in_hand())
    }

    /// Records that a lane may have jobs.
    pub(crate) fn activate(&mut self, lane: u32, lanes: &[Lane], sabotage: Option<Sabotage>) {
        if lane == 0 && sabotage == Some(Sabotage::Starve) {
            return;
        }
        self.insert(lane, lanes);
    }

    fn insert(&mut self, lane: u32, lanes: &[Lane]) {
        // The place of a lane never changes.
        if !self.turns.contains(lane) {
            self.turns.insert(lane, lanes[lane as usize].place.clone());
        }
    }

    /// Opens a lane that a gate has closed.
    pub(crate) fn open(&mut self, lane: u32, lanes: &[Lane], sabotage: Option<Sabotage>) {
        self.closings.open(lane);
        self.activate(lane, lanes, sabotage);
    }

    /// Updates the turns after a claim: the rules of `Lanes::claimed`.
    pub(crate) fn claimed(&mut self, sent: &Sent, response: &Response, lanes: &[Lane]) -> Vec<u32> {
        let mut taken = response.taken.iter().peekable();
        let used: Vec<usize> = sent
            .orders
            .iter()
            .map(|order| {
                let of_lane = taken.next_if(|(lane, ..)| *lane == order.lane);
                of_lane.map_or(0, |(_, jobs, _)| *jobs)
            })
            .collect();
        let is_filled = response.jobs.len() >= sent.wanted;
        let last = used.iter().rposition(|jobs| *jobs > 0);
        let mut emptied = Vec::new();
        for (position, (order, jobs)) in sent.orders.iter().zip(used).enumerate() {
            if let Some(most) = order.max {
                let taken = if self.turns.contains(order.lane) {
                    most
                } else {
                    0
                };
                if jobs > 0 {
                    self.insert(order.lane, lanes);
                }
                self.turns.settle(order.lane, taken, jobs, 1.0);
            }
            // A claim that was filled has not read the lanes after the last lane that had jobs, and only part of that
            // lane.
            if is_filled && Some(position) > last {
                continue;
            }
            let is_used_up = order.max.is_some_and(|most| jobs >= most);
            let was_read = !is_filled || Some(position) < last;
            if jobs == 0 && self.turns.contains(order.lane) {
                emptied.push(order.lane);
            }
            if jobs == 0 || order.max.is_some() && !is_used_up && was_read {
                self.turns.remove(order.lane);
            } else {
                self.insert(order.lane, lanes);
            }
        }
        emptied
    }

    /// Gives back the turns of a claim that adopted instead, or was lost: the rules of `Lanes::not_claimed`.
    pub(crate) fn not_claimed(&mut self, sent: &Sent) {
        for order in sent.orders.iter().rev() {
            self.turns
                .settle(order.lane, order.max.unwrap_or(0), 0, 1.0);
        }
    }

    /// Closes the lanes that a claim found closed, starting with those from which it took nothing. Opens others that
    /// wait for keys with room left: keys of these lanes, and of lanes that it took jobs from or found empty.
    pub(crate) fn note_closed(
        &mut self,
        response: &Response,
        emptied: &[u32],
        lanes: &[Lane],
        now: Nanos,
        sabotage: Option<Sabotage>,
    ) {
        for (lane, jobs, _) in &response.taken {
            let Lane { keys, place, .. } = &lanes[*lane as usize];
            #[expect(clippy::cast_precision_loss, reason = "the size of a claim")]
            self.closings.take(keys, lane, *jobs as f64 / place.share);
        }
        if response.closed.is_empty() && self.closings.is_empty() {
            return;
        }
        let taken: HashSet<u32> = response.taken.iter().map(|(lane, ..)| *lane).collect();
        for of_taken in [false, true] {
            for closed in &response.closed {
                if taken.contains(&closed.lane) == of_taken {
                    let (lane, closings) = (closed.lane, &mut self.closings);
                    let of = &lanes[lane as usize];
                    self.turns.remove(lane);
                    let class = of.place.class;
                    let mut full = Vec::new();
                    let mut last = None;
                    for (key, wait_ms) in &closed.by {
                        match wait_ms.map(|ms| now + ms as Nanos * 1_000_000) {
                            Some(at) => {
                                closings.note_start(key, at);
                                last = last.max(Some((at, key)));
                            }
                            None => full.push(*key),
                        }
                    }
                    match last.filter(|_| full.is_empty()) {
                        Some((at, rate)) => {
                            closings.close_until_start(lane, class, rate, at, &lane, true);
                        }
                        None => closings.close_until_end(lane, class, &full, &lane, true),
                    }
                }
            }
        }
        let used_up = response.closed.iter().flat_map(|closed| &closed.by);
        let used_up: HashSet<Key> = used_up.map(|(key, _)| *key).collect();
        let has_room = |key: &&Key| !used_up.contains(*key);
        for closed in &response.closed {
            let Lane { keys, limits, .. } = &lanes[closed.lane as usize];
            let full = limits.iter().filter(|key| closed.is_closed_by(key));
            let full: Vec<Key> = full.copied().collect();
            let mut others = Vec::new();
            for key in keys.iter().filter(has_room) {
                self.move_closed(key, &full, lanes);
                others.extend(self.closings.others(key));
            }
            for other in others {
                self.open(other, lanes, sabotage);
            }
        }
        let taken = response.taken.iter().map(|(lane, ..)| lane);
        for lane in taken.chain(emptied) {
            if self.closings.is_closed(*lane) || sabotage == Some(Sabotage::Ends) {
                continue;
            }
            for key in lanes[*lane as usize].keys.iter().filter(has_room) {
                self.move_closed(key, &[], lanes);
                for other in self.closings.others(key) {
                    self.open(other, lanes, sabotage);
                }
            }
        }
    }

    /// Moves lanes that wait for this key, and that other keys are known to keep closed as well, to the lists of those
    /// keys. `full`: keys that have no room now.
    pub(crate) fn move_closed(&mut self, key: &Key, full: &[Key], lanes: &[Lane]) {
        let behind = |lane: u32| lanes[lane as usize].keys.clone();
        self.closings.move_closed(key, full, behind);
    }

    /// Forgets a lane that this host no longer serves.
    pub(crate) fn give_up(&mut self, lane: u32) {
        self.closings.open(lane);
        self.turns.remove(lane);
        self.woken.remove(&lane);
    }

    /// True if no claim is on its way, and no jobs are known that could be claimed.
    pub(crate) fn is_idle(&self) -> bool {
        self.sent.is_none() && self.turns.lanes().next().is_none()
    }

    /// The lanes of this list that have jobs of which this host does not know.
    pub(crate) fn unknown<'a>(
        &'a self,
        lanes: impl Iterator<Item = u32> + 'a,
        server: &'a Server,
    ) -> impl Iterator<Item = u32> + 'a {
        lanes.filter(|lane| {
            server.waiting(*lane) > 0
                && !self.turns.contains(*lane)
                && !self.closings.is_closed(*lane)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SECOND;

    #[test]
    fn only_claims_behind_a_rate_are_late_because_of_a_slow_response() {
        let job = Job {
            enqueued_at: 0,
            lane: 0,
            class: 0,
            is_limited: false,
            is_new: true,
        };
        let received_at = 3 * SECOND;
        let is_late = |start_within: Option<u64>, now| {
            let start_within = start_within.map(Duration::from_secs);
            let in_line = InLine {
                job,
                sent_at: 0,
                received_at,
                start_within,
            };
            in_line.is_late(now)
        };
        assert!(!is_late(None, received_at));
        assert!(is_late(Some(1), received_at));
        assert!(!is_late(Some(6), received_at));
        for start_within in [None, Some(6)] {
            assert!(!is_late(start_within, received_at + SECOND));
            assert!(is_late(start_within, received_at + SECOND + 1));
        }
    }
}
