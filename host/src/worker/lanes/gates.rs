//! Lanes from which gates let no job start for now. Claims leave them out until they open: after a while, or when a job
//! of their key has ended.
//!
//! The database decides what a gate permits, and tells the worker which lanes are closed. Other workers do not announce
//! the ends of their jobs: a worker whose job has ended claims the next one itself. Should it be gone, the sweep opens
//! some of the lanes of each limit, and if they have room, or no jobs any more, the others follow.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Class, Known, Lanes};
use crate::job::{ClaimGate, ClaimLimit, LaneId};
use crate::store::ClosedLane;

/// How many lanes of each class of a limit are opened when a job of it has ended: the first ones may be empty by now.
const OPENED_BY_END: usize = 2;
/// How many are opened when one of them had room, or no jobs any more.
const OPENED_MAX: usize = 8;
/// A sweep opens lanes of each class of a limit, until there are so many, but at least one. The next sweep goes on with
/// the next limit: a claim is limited to so many lanes, and behind a gate, claims wait for each other.
const OPENED_BY_SWEEP: usize = 256;

/// A limit of running jobs, and its key.
pub(super) type Limit = Arc<str>;

#[derive(Debug, Default)]
pub(super) struct Gates {
    gates: Vec<ClaimGate>,
    /// Closed lanes that wait for the end of a job, by the limits that they are behind and by class, in the order in which
    /// they were closed.
    waiting: BTreeMap<Limit, BTreeMap<Class, BTreeSet<(u64, LaneId)>>>,
    /// The last limit that a sweep has opened lanes of.
    swept: Option<Limit>,
    /// Closed lanes that open by themselves.
    opening: BTreeSet<(Instant, LaneId)>,
    /// The number of lanes that were closed so far.
    closings: u64,
}

/// Until when a lane is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closed {
    /// Until a job of one of its limits has ended. The number of its closing, and its class then.
    UntilEnd(u64, Class),
    Until(Instant),
}

impl Gates {
    /// Opens all lanes.
    pub(super) fn start_over(&mut self) {
        self.waiting.clear();
        self.opening.clear();
    }

    /// Applies to a lane which gates it is behind. Its queue may have a limit of its own, and so may its handler.
    pub(super) fn choose(&self, known: &mut Known, is_capped_queue: bool) {
        let lane = &known.lane;
        known.limits.clear();
        known.is_throttled = false;
        known.batch = None;
        if is_capped_queue {
            let limit = format!("queue {}\n{}", lane.queue, known.place.key);
            known.limits.push(limit.into());
        }
        if known.most_at_once.is_some() {
            known
                .limits
                .push(format!("handler {}", lane.handler).into());
        }
        for gate in &self.gates {
            if let Some(key) = gate.key_of(&lane.queue, &lane.handler, &lane.values) {
                match gate.limit {
                    ClaimLimit::Starts => known.is_throttled = true,
                    ClaimLimit::Running => {
                        let limit = format!("gate {}\n{}", gate.name, key.join("\n"));
                        known.limits.push(limit.into());
                    }
                    ClaimLimit::Batch(most) => {
                        known.batch = Some(known.batch.map_or(most, |other| other.min(most)));
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

    /// Notes that no job of this lane may start for a while; `None`: until one of its limits has room again.
    pub(in crate::worker) fn close(&mut self, id: LaneId, wait: Option<Duration>, now: Instant) {
        self.forget_closing(id);
        self.active.remove(id);
        let Some(known) = self.known.get_mut(&id) else {
            return;
        };
        let gates = &mut self.gates;
        known.closed = match wait {
            Some(wait) => {
                gates.opening.insert((now + wait, id));
                Some(Closed::Until(now + wait))
            }
            // A gate that this worker does not know yet: the sweep finds the lane.
            None if known.limits.is_empty() => None,
            None => {
                gates.closings += 1;
                let class = known.place.class;
                for limit in &known.limits {
                    let waiting = gates.waiting.entry(limit.clone()).or_default();
                    let of_class = waiting.entry(class).or_default();
                    of_class.insert((gates.closings, id));
                }
                Some(Closed::UntilEnd(gates.closings, class))
            }
        };
    }

    /// The handler of a lane whose jobs start in batches, and the maximum number of jobs of a batch.
    pub(in crate::worker) fn batch(&self, id: LaneId) -> Option<(&str, usize)> {
        let known = self.known.get(&id)?;
        Some((&known.lane.handler, known.batch?))
    }

    /// True if no job of this lane may start now.
    pub(in crate::worker) fn is_closed(&self, id: LaneId) -> bool {
        let known = self.known.get(&id);
        known.is_some_and(|known| known.closed.is_some())
    }

    /// True if lanes wait for the end of a job.
    pub(in crate::worker) fn wait_for_ends(&self) -> bool {
        !self.gates.waiting.is_empty()
    }

    /// When the next lane opens by itself.
    pub(in crate::worker) fn next_opening(&self) -> Option<Instant> {
        self.gates.opening.first().map(|(at, _)| *at)
    }

    /// Opens the lanes whose time has come. True if there are any.
    pub(in crate::worker) fn open_due(&mut self, now: Instant) -> bool {
        let mut is_any = false;
        while self.next_opening().is_some_and(|at| at <= now)
            && let Some((_, id)) = self.gates.opening.pop_first()
        {
            is_any |= self.open(id);
        }
        is_any
    }

    /// Notes that a job of this lane has ended, so others of its limits may start. True if there may be any.
    pub(in crate::worker) fn free(&mut self, id: LaneId) -> bool {
        self.open_behind_limits_of(id, OPENED_BY_END)
    }

    /// Opens some lanes of each limit, of which there may be too many for one sweep: jobs of other workers may have ended.
    pub(in crate::worker) fn open_some(&mut self) {
        let waiting = &self.gates.waiting;
        let before = self.gates.swept.take();
        let is_later = |limit: &&Limit| before.as_ref().is_none_or(|before| *limit > before);
        let later = waiting.keys().filter(is_later);
        let earlier = waiting.keys().filter(|limit| !is_later(limit));
        let limits: Vec<Limit> = later
            .chain(earlier)
            .take(OPENED_BY_SWEEP)
            .cloned()
            .collect();
        // Several: a lane may be behind another limit, too, which is full.
        let each = (OPENED_BY_SWEEP / limits.len().max(1)).clamp(1, OPENED_MAX);
        let mut opened = 0;
        for limit in limits {
            if opened >= OPENED_BY_SWEEP {
                break;
            }
            opened += self.open_behind(&limit, each);
            self.gates.swept = Some(limit);
        }
    }

    /// Opens other lanes of the limits of a lane that had room, or no jobs any more. True if there are any.
    pub(super) fn open_others(&mut self, id: LaneId) -> bool {
        !self.gates.waiting.is_empty() && self.open_behind_limits_of(id, OPENED_MAX)
    }

    fn open_behind_limits_of(&mut self, id: LaneId, lanes: usize) -> bool {
        let limits = self.known.get(&id).map(|known| known.limits.clone());
        let mut is_any = false;
        for limit in limits.iter().flatten() {
            is_any |= self.open_behind(limit, lanes) > 0;
        }
        is_any
    }

    /// Opens up to this many lanes of each class of a limit, those first that were closed first. Their claim decides
    /// between the classes, and overdue jobs of the later ones are found. Returns how many there are.
    fn open_behind(&mut self, limit: &Limit, lanes: usize) -> usize {
        let classes = self.gates.waiting.get(limit).into_iter().flatten();
        let first = classes.flat_map(|(_, of_class)| of_class.iter().take(lanes));
        let first: Vec<LaneId> = first.map(|(_, id)| *id).collect();
        // The lane that is opened last goes first: that which was closed first.
        let opened = first.into_iter().rev().filter(|id| self.open(*id));
        opened.count()
    }

    /// Opens a lane. False if it is not served as a whole.
    pub(in crate::worker) fn open(&mut self, id: LaneId) -> bool {
        self.forget_closing(id);
        self.activate(id)
    }

    fn forget_closing(&mut self, id: LaneId) {
        let gates = &mut self.gates;
        let known = self.known.get_mut(&id);
        match known.as_ref().and_then(|known| known.closed) {
            None => {}
            Some(Closed::Until(at)) => _ = gates.opening.remove(&(at, id)),
            Some(Closed::UntilEnd(number, class)) => {
                for limit in known.iter().flat_map(|known| &known.limits) {
                    let Some(waiting) = gates.waiting.get_mut(limit) else {
                        continue;
                    };
                    if let Some(of_class) = waiting.get_mut(&class) {
                        of_class.remove(&(number, id));
                        if of_class.is_empty() {
                            waiting.remove(&class);
                        }
                    }
                    if waiting.is_empty() {
                        gates.waiting.remove(limit);
                    }
                }
            }
        }
        if let Some(known) = known {
            known.closed = None;
        }
    }

    /// Notes which lanes of a claim are closed: first those of which it has taken nothing.
    pub(super) fn note_closed(
        &mut self,
        closed: &[ClosedLane],
        claimed: &HashMap<LaneId, usize>,
        now: Instant,
    ) {
        let (taken, others): (Vec<&ClosedLane>, Vec<&ClosedLane>) = closed
            .iter()
            .partition(|closed| claimed.contains_key(&closed.lane));
        for closed in others.into_iter().chain(taken) {
            self.close(closed.lane, closed.wait, now);
        }
    }
}
