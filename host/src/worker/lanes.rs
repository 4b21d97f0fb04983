//! The claimer's knowledge of lanes.

mod catalog;
mod cursors;
mod gates;
mod orders;
mod shards;
mod shares;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::QueueOrder;
use super::turns::{Class, Place, Turns};
use crate::job::LaneId;
use crate::store::{ClaimOrder, ClaimedJob, Lane};
use gates::{Gates, Limit};
use shards::Shards;
use shares::Shares;

/// The maximum number of lanes in one claim: each costs an index lookup, even if it is empty. If more lanes are served,
/// claims cover the lanes that are known to have jobs.
const LANES_PER_CLAIM: usize = 256;

/// The lanes, with a cursor for each. Cursors are hints: turns are assigned before they are committed, so a turn may
/// appear behind the cursor. The next sweep finds it.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    known: HashMap<LaneId, Known>,
    /// The lanes that are served as a whole: looks and claims go through these, and not through the whole catalog.
    served: HashSet<LaneId>,
    /// New lanes, for which it has not been decided yet whether they are served.
    unchosen: Vec<LaneId>,
    /// Lanes that are served by source.
    by_source: VecDeque<LaneId>,
    /// Served lanes that are known to have jobs. They take turns.
    active: Turns,
    /// Lanes of fair queues that had no jobs until a moment ago, and from which no job has been claimed since.
    woken: HashSet<LaneId>,
    /// The last lane that was probed.
    probed: Option<LaneId>,
    /// The last lane of a later class that was searched for overdue jobs.
    behind_after: Option<LaneId>,
    /// The known positions of the catalog that the next reading covers again.
    newest: BTreeSet<i64>,
    catalog_end: i64,
    queue_order: QueueOrder,
    /// The settings of fair queues, and the statistics of their claims.
    shares: Shares,
    /// The lanes that are behind gates, and those that are closed.
    gates: Gates,
    /// The lanes of sharded queues that are served.
    shards: Shards,
}

/// The turn after which a lane is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// The cursor. Used during a backlog: jobs that are being committed now are far beyond the backlog.
    Cursor,
    /// The cursor of a moment ago. Used in a lane without a backlog: the cursor is among jobs that are being committed
    /// now, in any order.
    Recent,
    /// The last turn that was ever claimed, or up to which the lane was found empty. No sweep moves it back. Jobs that
    /// were committed late before it are left out.
    Reached,
}

/// How a lane is served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Serving {
    /// The lease of claims from it.
    pub(super) lease_ms: i64,
    /// The position of its queue in the settings.
    pub(super) queue_index: usize,
    /// Only jobs of sources that are bound to a handler of this host are claimed, because this host does not have the
    /// lane's own handler. Such a lane has no cursor.
    pub(super) by_source: bool,
    /// Only orphans are adopted from it, because it is the inbox of another worker. Such a lane has no cursor either.
    pub(super) orphans_only: bool,
    /// The maximum number of attempts of its handler that run at the same time on this host.
    pub(super) max_at_once: Option<usize>,
}

/// A lane that is served, for a claimed job.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) lane: Arc<Lane>,
    /// The lease of claims from it.
    pub(super) lease: Duration,
    pub(super) class: Class,
    /// True if the CPU time of its jobs counts towards the share of its key.
    pub(super) is_charged: bool,
    /// True if the end of one of its jobs may let others start.
    pub(super) is_limited: bool,
    /// True if the rate at which its jobs start is limited.
    pub(super) is_throttled: bool,
}

#[derive(Debug)]
struct Known {
    lane: Arc<Lane>,
    /// `None` if it is not served.
    serving: Option<Serving>,
    /// The same, whether or not its shard is leased: its orphans are adopted in any case.
    adopts: Option<Serving>,
    /// The class, queue and key with which it takes its turns.
    place: Place,
    /// True if the CPU time of its jobs counts towards the share of its key.
    is_charged: bool,
    /// The limits on running jobs that it is behind, by the name of their gate.
    limits: Vec<(String, Limit)>,
    /// The limit on the number of attempts of its handler that run on this host, by its name.
    host_limit: Option<(String, Limit)>,
    /// The limits on the rate at which its jobs start, by the name of their gate.
    rates: Vec<(String, Limit)>,
    /// The maximum size of the batches in which its jobs start. `None` if they start one by one.
    batch: Option<usize>,
    /// The maximum number of attempts of its handler that run at the same time on this host.
    max_at_once: Option<usize>,
    /// The cost of a job of this lane, in turns.
    cost: f64,
    /// The weight of its key.
    weight: f64,
    cursor: i64,
    /// The cursor at the last two calls of [`Lanes::look_back`], older first.
    recent: [i64; 2],
    /// The turns up to which it was read at the last two sweeps, older first. `i64::MIN` if it was not served then.
    marks: [i64; 2],
    /// The last turn that was ever claimed from it, or up to which it was found empty. No sweep moves it back.
    reached: i64,
}

impl Serving {
    /// True if any of its jobs may be claimed.
    fn is_whole(&self) -> bool {
        !self.by_source && !self.orphans_only
    }

    /// True if only its jobs of bound sources may be claimed.
    fn is_by_source(&self) -> bool {
        self.by_source && !self.orphans_only
    }
}

impl Known {
    /// The limits on running jobs and attempts that it is behind, by their names.
    fn limits_and_host_limit(&self) -> impl Iterator<Item = &(String, Limit)> {
        self.limits.iter().chain(&self.host_limit)
    }

    /// The limits that it is behind, by their names.
    fn limits_and_rates(&self) -> impl Iterator<Item = &(String, Limit)> {
        self.limits_and_host_limit().chain(&self.rates)
    }

    /// True if it is served as a whole.
    fn is_served_whole(&self) -> bool {
        self.serving.is_some_and(|serving| serving.is_whole())
    }

    /// True if only jobs of bound sources are claimed from it.
    fn is_served_by_source(&self) -> bool {
        self.serving.is_some_and(|serving| serving.is_by_source())
    }

    fn order(&self, after: After) -> Option<ClaimOrder> {
        let serving = self.serving.filter(Serving::is_whole)?;
        Some(ClaimOrder {
            lane: self.lane.id,
            after: match after {
                After::Cursor => self.cursor,
                After::Recent => self.cursor.min(self.recent[0]),
                After::Reached => self.reached,
            },
            lease_ms: serving.lease_ms,
            max: None,
            overdue: None,
        })
    }

    /// The position of a lane without known jobs: by class, then by the last turn reached. The cursor does not decide:
    /// each restart resets it.
    fn sort_key(&self, order: QueueOrder) -> (Class, i64, LaneId) {
        (self.class(order), self.reached, self.lane.id)
    }

    /// Its class. Lanes of one class take turns; lanes of a later class wait until the earlier classes are empty.
    fn class(&self, order: QueueOrder) -> Class {
        let queue_index = self.serving.map_or(0, |serving| serving.queue_index);
        let priority = self.lane.priority as usize;
        match order {
            QueueOrder::Priority => [priority, queue_index],
            QueueOrder::Strict => [queue_index, priority],
        }
    }

    /// Its tier. Lanes of a later tier wait until the earlier tiers are empty, even if their jobs are overdue.
    fn tier(&self, order: QueueOrder) -> usize {
        match order {
            QueueOrder::Priority => 0,
            QueueOrder::Strict => self.serving.map_or(0, |serving| serving.queue_index),
        }
    }
}

impl Lanes {
    pub(super) fn new(queue_order: QueueOrder) -> Self {
        Self {
            queue_order,
            ..Self::default()
        }
    }

    /// The lanes that are served as a whole.
    fn served(&self) -> impl Iterator<Item = &Known> {
        let served = self.served.iter().filter_map(|id| self.known.get(id));
        // A lane that was forgotten, and added to the catalog again, has not been chosen yet.
        served.filter(|known| known.is_served_whole())
    }

    /// True if this lane was read from the catalog.
    pub(super) fn knows(&self, lane: LaneId) -> bool {
        self.known.contains_key(&lane)
    }

    /// True if jobs are claimed from this lane.
    pub(super) fn serves(&self, lane: LaneId) -> bool {
        let known = self.known.get(&lane);
        known.is_some_and(|known| known.is_served_whole() || known.is_served_by_source())
    }

    /// Notes that a lane has a job. In a fair queue, the first job of a lane that was not known to have any is claimed
    /// before the others, and goes ahead of the jobs that wait in line. `was_known`: the lane was already in the
    /// catalog; a new lane has counted as active since it was read.
    pub(super) fn wake(&mut self, id: LaneId, was_known: bool) {
        let had_jobs = was_known && self.active.contains(id);
        if had_jobs || self.note_in_closed(id) || !self.activate(id) {
            return;
        }
        let known = self.known.get(&id);
        if known.is_some_and(|known| self.shares.is_fair(known)) {
            self.woken.insert(id);
        }
    }

    /// The lanes whose first jobs are claimed before the others: those of the class that goes first.
    pub(super) fn woken(&self) -> impl Iterator<Item = LaneId> {
        let first = self.active.first_class();
        let goes_first = move |lane: &LaneId| {
            let known = self.known.get(lane);
            self.active.contains(*lane)
                && known
                    .is_some_and(|known| Some(known.place.class) == first && known.batch.is_none())
        };
        self.woken.iter().copied().filter(goes_first)
    }

    /// Takes the woken lanes to which the jobs of a claim belong. These jobs are the first of their lanes.
    pub(super) fn take_woken(&mut self, jobs: &[ClaimedJob]) -> Vec<LaneId> {
        if self.woken.is_empty() {
            return Vec::new();
        }
        let lanes = jobs.iter().map(|job| job.lane);
        lanes.filter(|lane| self.woken.remove(lane)).collect()
    }

    /// The class of a lane. `None` if it is unknown.
    pub(super) fn class_of(&self, id: LaneId) -> Option<Class> {
        self.known.get(&id).map(|known| known.place.class)
    }

    /// True if only jobs of bound sources are claimed from this lane.
    pub(super) fn is_served_by_source(&self, lane: LaneId) -> bool {
        let known = self.known.get(&lane);
        known.is_some_and(Known::is_served_by_source)
    }

    /// True if any lane is served by source.
    pub(super) fn serves_by_source(&self) -> bool {
        !self.by_source.is_empty()
    }

    /// Up to `max` of the lanes that are served by source, for the next claim, ordered by class. The lanes of a class
    /// take turns going first. If there are more than fit into one claim, each call returns different ones.
    pub(super) fn by_source(&mut self, max: usize) -> Vec<LaneId> {
        let (count, max) = (self.by_source.len(), max.min(LANES_PER_CLAIM));
        let mut lanes: Vec<LaneId> = self.by_source.iter().take(max).copied().collect();
        let next = if count > max { max } else { 1 };
        self.by_source.rotate_left(next.min(count));
        lanes.sort_by_key(|id| {
            self.known
                .get(id)
                .map(|known| known.class(self.queue_order))
        });
        lanes
    }

    /// All lanes from which orphans are adopted, including those in other shards and the inboxes of other workers:
    /// either those whose jobs are taken by source, or the others.
    pub(super) fn adoptable(&self, by_source: bool) -> Vec<LaneId> {
        let is_wanted = |known: &&Known| {
            let adopts = known.adopts;
            adopts.is_some_and(|serving| serving.by_source == by_source)
        };
        let known = self.known.values().filter(is_wanted);
        known.map(|known| known.lane.id).collect()
    }

    /// Marks all lanes as having no jobs.
    pub(super) fn mark_all_empty(&mut self) {
        self.active.clear();
        self.woken.clear();
    }

    /// The lane of a claimed or adopted job, and how it is served. `None` if neither its jobs nor its orphans are
    /// claimed.
    pub(super) fn get(&self, id: LaneId) -> Option<Served> {
        let known = self.known.get(&id)?;
        let lease_ms = known.adopts?.lease_ms;
        Some(Served {
            lane: known.lane.clone(),
            lease: Duration::from_millis(u64::try_from(lease_ms).unwrap_or(0)),
            class: known.place.class,
            is_charged: known.is_charged,
            is_limited: !known.limits.is_empty(),
            is_throttled: !known.rates.is_empty(),
        })
    }

    /// Notes that there may be a job in this lane. True if the lane is served, and not closed.
    pub(super) fn mark_active(&mut self, id: LaneId) -> bool {
        if self.note_in_closed(id) {
            return false;
        }
        if !self.activate(id)
            && let Some(index) = self.by_source.iter().position(|lane| *lane == id)
        {
            // The next claim by source starts with it.
            self.by_source.remove(index);
            self.by_source.push_front(id);
        }
        self.serves(id)
    }

    /// Notes the lanes in which a peek has found jobs, in the order in which it read them. True if any of them is
    /// served, and not closed.
    pub(super) fn mark_ready(&mut self, ready: &[LaneId]) -> bool {
        let mut is_any = false;
        // The lane that is marked last goes first. Without the reversal, the lanes that were served last would go
        // first.
        for lane in ready.iter().rev() {
            is_any |= self.mark_active(*lane);
        }
        is_any
    }

    /// Notes that a lane may have jobs. False if it is not served as a whole.
    fn activate(&mut self, id: LaneId) -> bool {
        let Some(known) = self.known.get(&id).filter(|known| known.is_served_whole()) else {
            return false;
        };
        let is_new = !self.active.contains(id);
        self.active.insert(id, known.place.clone());
        if is_new {
            self.divide_by_cost(id);
        }
        true
    }

    /// True if this lane is known to have jobs.
    pub(super) fn has_jobs(&self, id: LaneId) -> bool {
        self.active.contains(id)
    }

    /// The handler of a lane, if this host limits how many of its attempts run at the same time, and the limit.
    pub(super) fn host_limit(&self, id: LaneId) -> Option<(&str, usize)> {
        let known = self.known.get(&id)?;
        Some((&known.lane.handler, known.max_at_once?))
    }

    /// True if one claim can cover all lanes.
    pub(super) fn fit_one_claim(&self) -> bool {
        self.served.len() <= LANES_PER_CLAIM
    }
}

#[cfg(test)]
mod tests;
