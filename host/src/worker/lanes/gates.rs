//! Lanes in which gates do not let any job start for now. Claims skip them until they open: after a while, or when a
//! job of their key has ended. Lanes that the worker pauses (`worker/unbound.rs`), and those from which its login may
//! not claim, are closed in the same way.
//!
//! The database decides what a gate permits, and reports to the worker which lanes are closed. Other workers do not
//! announce the ends of their jobs: a worker whose job has ended claims the next one itself. In case that worker has
//! died, the sweep opens some of the lanes of each limit, and if these have free capacity or no more jobs, the others
//! follow. The order is decided in `host/turns/src/closings.rs`. Lanes without known jobs are closed like the others,
//! so that claims through other gates do not read them, but they open in addition to those.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use rouse_turns::Closings;

use super::shares::Shares;
use super::{Known, Lanes};
use crate::job::{ClaimGate, ClaimLimit, LaneId};
use crate::sandbox::BootTime;
use crate::store::{ClosedGate, ClosedLane};

/// The name of a limit on running jobs, or on the rate at which they start, with its key.
pub(super) type Limit = Arc<str>;

/// A lane or key that shares a limit with others.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Member {
    /// A key of a fair queue.
    Key { queue: Arc<str>, key: Arc<str> },
    /// A lane of another queue.
    Lane(LaneId),
}

impl Member {
    /// The member from whose share of a limit the jobs of a lane are taken.
    fn new(known: &Known, shares: &Shares) -> Self {
        match shares.is_fair(known) {
            true => Self::Key {
                queue: known.place.queue.clone(),
                key: known.place.key.clone(),
            },
            false => Self::Lane(known.lane.id),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Gates {
    gates: Vec<ClaimGate>,
    /// By a clock that runs while the machine is suspended: a lane may wait for days.
    closings: Closings<LaneId, Limit, Member, BootTime>,
}

impl Gates {
    /// Opens all lanes; returns those of them that are known to have jobs.
    pub(super) fn start_over(&mut self) -> HashSet<LaneId> {
        let closed = self.closings.with_jobs().collect();
        self.closings.clear();
        closed
    }

    /// Forgets the use of limits by lanes that no longer exist, and by keys without lanes. `known`: all lanes.
    pub(super) fn keep_members(&mut self, known: &HashMap<LaneId, Known>, shares: &Shares) {
        let members = known.values().flat_map(|known| {
            let member = Member::new(known, shares);
            let limits = known.limits_and_rates();
            limits.map(move |(_, limit)| (limit, member.clone()))
        });
        self.closings.keep_members(members);
    }

    /// The number of limits that lanes or keys have used.
    #[cfg(test)]
    pub(super) fn shared_limits(&self) -> usize {
        self.closings.shared_limits()
    }

    /// True if no job of this lane may start now.
    pub(super) fn is_closed(&self, id: LaneId) -> bool {
        self.closings.is_closed(id)
    }

    /// The lanes that are known to have jobs, of which none may start now.
    pub(super) fn closed_lanes(&self) -> impl Iterator<Item = LaneId> {
        self.closings.with_jobs()
    }

    /// Sets the gates that a lane is behind. Its queue and its handler may have their own limits.
    pub(super) fn choose(&self, known: &mut Known, is_capped_queue: bool) {
        let lane = &known.lane;
        known.limits.clear();
        known.rates.clear();
        known.batch = None;
        if is_capped_queue {
            let name = format!("queue {}", lane.queue);
            let limit = format!("{name}\n{}", known.place.key).into();
            known.limits.push((name, limit));
        }
        known.host_limit = known.max_at_once.map(|_| {
            let name = host_limit_name(&lane.handler);
            let limit = name.as_str().into();
            (name, limit)
        });
        for gate in &self.gates {
            if let Some(key) = gate.key_of(&lane.queue, &lane.handler, &lane.values) {
                let limit = || format!("gate {}\n{}", gate.name, key.join("\n")).into();
                match gate.limit {
                    ClaimLimit::Starts => known.rates.push((gate.name.clone(), limit())),
                    ClaimLimit::Running => known.limits.push((gate.name.clone(), limit())),
                    ClaimLimit::Batch(max) => {
                        known.batch = Some(known.batch.map_or(max, |other| other.min(max)));
                    }
                }
            }
        }
    }
}

impl Lanes {
    /// Sets the gates. True if they have changed, so the served lanes have to be chosen again.
    pub(in crate::worker) fn set_gates(&mut self, gates: Vec<ClaimGate>) -> bool {
        let is_new = self.gates.gates != gates;
        self.gates.gates = gates;
        is_new
    }

    /// Notes that no job of this lane may start now, because its handler has no free capacity on this host. True if
    /// other lanes, which share a limit with it, were opened instead.
    pub(in crate::worker) fn close_for_handler(&mut self, id: LaneId, now: BootTime) -> bool {
        let Some(known) = self.known.get(&id) else {
            return false;
        };
        let full = ClosedGate {
            name: host_limit_name(&known.lane.handler),
            wait: None,
        };
        let closed = ClosedLane {
            lane: id,
            by: vec![full],
        };
        self.close(&closed, true, now);
        self.open_instead(&closed, &HashSet::new())
    }

    /// The limits that have no free capacity after a claim that has closed these lanes. Lanes that had their turn
    /// earlier may have found some, which the last ones have used up.
    pub(super) fn used_up_limits(&self, closed: &[ClosedLane]) -> HashSet<Limit> {
        let of_lane = |closed: &ClosedLane| {
            let known = self.known.get(&closed.lane).into_iter();
            let limits = known.flat_map(Known::limits_and_rates);
            let used_up = limits.filter(|(gate, _)| closed.is_closed_by(gate));
            used_up
                .map(|(_, limit)| limit.clone())
                .collect::<Vec<Limit>>()
        };
        closed.iter().flat_map(of_lane).collect()
    }

    /// Closes a lane until the gates that are at their limit have free capacity again, or else until the last of the
    /// others lets a job start. If that is a rate, the lane opens in the order of the lanes behind this rate. The sweep
    /// finds lanes behind a gate that this worker does not know yet. `has_jobs`: the lane is known to have jobs.
    pub(super) fn close(&mut self, closed: &ClosedLane, has_jobs: bool, now: BootTime) {
        let ClosedLane { lane: id, by } = closed;
        self.active.remove(*id);
        let Some(known) = self.known.get(id) else {
            self.gates.closings.open(*id);
            return;
        };
        let (class, member) = (known.place.class, Member::new(known, &self.shares));
        let closings = &mut self.gates.closings;
        let mut last: Option<(BootTime, Option<&Limit>)> = None;
        for gate in by {
            let Some(wait) = gate.wait else { continue };
            let at = now.plus(wait);
            let mut rates = known.rates.iter();
            let rate = rates.find(|(name, _)| *name == gate.name);
            let rate = rate.map(|(_, rate)| rate);
            if let Some(rate) = rate {
                closings.note_start(rate, at);
            }
            last = last.max(Some((at, rate)));
        }
        match last.filter(|_| by.iter().all(|gate| gate.wait.is_some())) {
            Some((at, Some(rate))) => {
                closings.close_until_start(*id, class, rate, at, &member, has_jobs);
            }
            Some((at, None)) => closings.close_until(*id, at, has_jobs),
            None => {
                let limits = known.limits_and_host_limit();
                let limits = limits.filter(|(gate, _)| closed.is_closed_by(gate));
                let limits: Vec<Limit> = limits.map(|(_, limit)| limit.clone()).collect();
                closings.close_until_end(*id, class, &limits, &member, has_jobs);
            }
        }
    }

    /// Closes a lane until this time, regardless of gates: until then, the worker claims nothing from it. If such a
    /// lane stayed among those that are known to have jobs, it would get the first turns of each claim, and give them
    /// back.
    pub(in crate::worker) fn close_until(&mut self, id: LaneId, at: BootTime) {
        let has_jobs = self.active.contains(id);
        self.active.remove(id);
        self.gates.closings.close_until(id, at, has_jobs);
    }

    /// Counts the jobs that a claim has taken from lanes behind limits.
    pub(super) fn count_behind_limits(&mut self, claimed: &HashMap<LaneId, usize>) {
        for (id, jobs) in claimed {
            let known = self.known.get(id);
            let Some(known) = known.filter(|it| it.limits_and_rates().next().is_some()) else {
                continue;
            };
            let member = Member::new(known, &self.shares);
            #[expect(clippy::cast_precision_loss, reason = "the size of a claim")]
            let turns = *jobs as f64 * known.cost / known.weight;
            let limits = known.limits_and_rates().map(|(_, limit)| limit);
            self.gates.closings.take(limits, &member, turns);
        }
    }

    /// The handler of a lane whose jobs start in batches, and the maximum number of jobs of a batch.
    pub(in crate::worker) fn batch(&self, id: LaneId) -> Option<(&str, usize)> {
        let known = self.known.get(&id)?;
        Some((&known.lane.handler, known.batch?))
    }

    /// True if no job of this lane may start now.
    pub(super) fn is_closed(&self, id: LaneId) -> bool {
        self.gates.is_closed(id)
    }

    /// Notes that there may be a job in this lane, if it is closed: then it opens in its turn. False if it is open.
    pub(in crate::worker) fn note_in_closed(&mut self, id: LaneId) -> bool {
        self.gates.closings.note_jobs(id)
    }

    /// True if some lane is closed.
    pub(in crate::worker) fn has_closed(&self) -> bool {
        !self.gates.closings.is_empty()
    }

    /// True if lanes that are known to have jobs wait for the end of a job.
    pub(in crate::worker) fn wait_for_ends(&self) -> bool {
        self.gates.closings.wait_for_ends()
    }

    /// The time at which the next lane opens because its wait ends.
    pub(in crate::worker) fn next_opening(&self) -> Option<BootTime> {
        self.gates.closings.next_opening()
    }

    /// Opens the lanes whose time has come, and that no other limit is known to keep closed. True if there are any.
    pub(in crate::worker) fn open_due(&mut self, now: BootTime) -> bool {
        let closings = &mut self.gates.closings;
        let due = closings.due(now, |id| limits_of(&self.known, id));
        self.open_all(due)
    }

    /// Notes that a job of this lane has ended, so others behind its limits may start. This does not apply to the limit
    /// of its handler on this host: see [`Self::free_handler`]. True if there may be such jobs.
    pub(in crate::worker) fn free(&mut self, id: LaneId) -> bool {
        let Some(known) = self.known.get(&id) else {
            return false;
        };
        let limits: Vec<Limit> = known
            .limits
            .iter()
            .map(|(_, limit)| limit.clone())
            .collect();
        self.open_behind(&limits, Closings::by_end)
    }

    /// Notes that an attempt of this handler has ended on this host, regardless of the lane of its job, so another one
    /// may start. True if there may be a job for it.
    pub(in crate::worker) fn free_handler(&mut self, handler: &str) -> bool {
        let limit: Limit = host_limit_name(handler).into();
        self.open_behind(&[limit], Closings::by_end)
    }

    /// Opens some lanes of each limit: jobs of other workers may have ended.
    pub(in crate::worker) fn open_some(&mut self) {
        let some = self.gates.closings.some();
        self.open_all(some);
    }

    /// Opens those of these lanes that are closed. They have no jobs, so they leave their capacity to others. They do
    /// not count as active: as with all lanes without jobs, the next job of each is announced, or a peek finds it.
    pub(in crate::worker) fn open_empty(&mut self, empty: &[LaneId]) {
        for id in empty {
            self.gates.closings.open(*id);
        }
    }

    /// Opens other lanes behind the limits of a lane that had free capacity or no more jobs, except those that the
    /// claim has used up. True if there are any.
    pub(super) fn open_others(&mut self, id: LaneId, used_up: &HashSet<Limit>) -> bool {
        if !self.gates.closings.wait_for_limits() {
            return false;
        }
        let mut limits = limits_of(&self.known, id);
        limits.retain(|limit| !used_up.contains(limit));
        self.open_behind(&limits, Closings::others)
    }

    /// Opens other lanes behind those limits of a closed lane that have free capacity: other limits have kept its jobs
    /// from starting. Lanes that these other limits also keep closed now wait for them, without another claim. True if
    /// any lane was opened.
    fn open_instead(&mut self, closed: &ClosedLane, used_up: &HashSet<Limit>) -> bool {
        let Some(known) = self.known.get(&closed.lane) else {
            return false;
        };
        let full = known
            .limits_and_host_limit()
            .filter(|(gate, _)| closed.is_closed_by(gate));
        let full: Vec<Limit> = full.map(|(_, limit)| limit.clone()).collect();
        let with_room = known
            .limits_and_rates()
            .filter(|(gate, limit)| !closed.is_closed_by(gate) && !used_up.contains(limit));
        let closings = &mut self.gates.closings;
        let mut others = Vec::new();
        for (_, limit) in with_room {
            closings.move_closed(limit, &full, |id| limits_of(&self.known, id));
            others.extend(closings.others(limit));
        }
        self.open_all(others)
    }

    fn open_behind(
        &mut self,
        limits: &[Limit],
        opened: impl Fn(&mut Closings<LaneId, Limit, Member, BootTime>, &Limit) -> Vec<LaneId>,
    ) -> bool {
        let closings = &mut self.gates.closings;
        for limit in limits {
            closings.move_closed(limit, &[], |id| limits_of(&self.known, id));
        }
        // In the order of the limit that most of them share: a lane that waited for another limit does not go ahead.
        let shared = limits.iter().max_by_key(|limit| closings.waiting(limit));
        let mut ids = Vec::new();
        for limit in limits {
            ids.extend(opened(closings, limit));
        }
        let closings = &self.gates.closings;
        let had = |id: &LaneId| {
            let member = Member::new(self.known.get(id)?, &self.shares);
            Some(closings.had(shared?, &member))
        };
        if limits.len() > 1 {
            ids.sort_by_cached_key(|id| Reverse(had(id)));
        }
        self.open_all(ids)
    }

    /// Opens lanes, of which the last one goes first. True if any of them is served as a whole.
    fn open_all(&mut self, ids: Vec<LaneId>) -> bool {
        let opened = ids.into_iter().filter(|id| self.open(*id));
        opened.count() > 0
    }

    /// Opens a lane. False if it is not served as a whole.
    pub(in crate::worker) fn open(&mut self, id: LaneId) -> bool {
        self.gates.closings.open(id);
        self.activate(id)
    }

    /// Lets closed lanes with overdue jobs open ahead of the others of their class.
    pub(in crate::worker) fn go_first(&mut self, ids: impl IntoIterator<Item = LaneId>) {
        for id in ids {
            self.gates.closings.go_first(id);
        }
    }

    /// Notes which lanes of a claim are closed, first those from which it has taken nothing. `with_jobs`: the lanes
    /// that are known to have jobs. `used_up`: the limits that have no free capacity. True if others were opened
    /// instead.
    pub(super) fn note_closed(
        &mut self,
        closed: &[ClosedLane],
        claimed: &HashMap<LaneId, usize>,
        with_jobs: &HashSet<LaneId>,
        used_up: &HashSet<Limit>,
        now: BootTime,
    ) -> bool {
        let (taken, others): (Vec<&ClosedLane>, Vec<&ClosedLane>) = closed
            .iter()
            .partition(|closed| claimed.contains_key(&closed.lane));
        for closed in others.iter().chain(&taken) {
            self.close(closed, with_jobs.contains(&closed.lane), now);
        }
        let mut is_any = false;
        for closed in closed {
            is_any |= with_jobs.contains(&closed.lane) && self.open_instead(closed, used_up);
        }
        is_any
    }
}

/// All limits of a lane.
fn limits_of(known: &HashMap<LaneId, Known>, id: LaneId) -> Vec<Limit> {
    let known = known.get(&id).into_iter();
    let limits = known.flat_map(Known::limits_and_rates);
    limits.map(|(_, limit)| limit.clone()).collect()
}

/// The name of the limit on the number of attempts of a handler that run on this host. No gate has a name like this.
fn host_limit_name(handler: &str) -> String {
    format!("handler {handler}")
}
