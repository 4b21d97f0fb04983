//! The claimer's knowledge about lanes: which lanes it serves, which of them have jobs, and from which turn to read
//! them.

mod cursors;
mod gates;
mod shards;
mod shares;

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::QueueOrder;
use super::turns::{Class, Part, Place, Turns};
use crate::job::LaneId;
use crate::store::{ClaimOrder, ClaimedJob, ClosedLane, Lane, Only};
use gates::{Closed, Gates, Limit};
use shards::Shards;
use shares::Shares;

/// The maximum number of lanes in one claim: each costs an index lookup, even if it is empty. If more lanes are served,
/// claims go to lanes that are known to have jobs.
const LANES_PER_CLAIM: usize = 256;
/// How many lanes without known jobs a claim looks at ahead of lanes with jobs, in turns. It finds new jobs before the
/// next sweep does.
const PROBES_PER_CLAIM: usize = 32;
/// The catalog is re-read from this far before its known end, because a lane's row may be committed after rows with
/// higher numbers.
const CATALOG_WINDOW: i64 = 256;

/// The lanes, with a cursor for each. Cursors are hints: turns are assigned before they are committed, so a turn may
/// appear behind the cursor. The next sweep finds it.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    known: HashMap<LaneId, Known>,
    /// The number of lanes that are served as a whole.
    served: usize,
    /// New lanes, of which it is not known whether they are served.
    unchosen: Vec<LaneId>,
    /// Lanes that are served by source.
    by_source: VecDeque<LaneId>,
    /// Served lanes that are known to have jobs, and whose turn it is.
    active: Turns,
    /// Lanes of fair queues that had no jobs until a moment ago, and that no claim has read since.
    woken: HashSet<LaneId>,
    /// The last lane that was probed.
    probed: Option<LaneId>,
    /// The numbers of the catalog's rows in the window.
    newest: BTreeSet<i64>,
    catalog_end: i64,
    queue_order: QueueOrder,
    /// How fair queues are shared.
    shares: Shares,
    /// Which lanes are behind gates, and closed.
    gates: Gates,
    /// Which lanes of sharded queues are served.
    shards: Shards,
}

/// The turn after which a lane is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// The cursor. Used during a backlog: jobs that are being committed now are far behind the backlog.
    Cursor,
    /// The cursor of a moment ago. Used without a backlog: the cursor is among jobs that are being committed now, in
    /// any order.
    Recent,
    /// The last turn that was ever claimed; sweeps do not change it. Jobs that were committed late before it are left
    /// out.
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
    pub(super) most_at_once: Option<usize>,
}

/// The result of reading the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CatalogChange {
    /// There are new lanes, which may have jobs.
    pub(super) new: bool,
    /// Lanes were removed, so all served lanes have to be chosen again.
    pub(super) removed: bool,
}

/// A lane that is served, for a claimed job.
#[derive(Debug)]
pub(super) struct Served {
    pub(super) lane: Arc<Lane>,
    /// The lease of claims from it.
    pub(super) lease: Duration,
    pub(super) class: Class,
    /// The CPU time of its jobs counts for the share of its key.
    pub(super) is_charged: bool,
    /// The end of one of its jobs may let others start.
    pub(super) is_limited: bool,
    /// How often its jobs start is limited.
    pub(super) is_throttled: bool,
}

#[derive(Debug)]
struct Known {
    lane: Arc<Lane>,
    /// `None` if it is not served.
    serving: Option<Serving>,
    /// The same, whether or not its shard is leased: its orphans are adopted in any case.
    adopts: Option<Serving>,
    /// Where it takes its turns.
    place: Place,
    /// The CPU time of its jobs counts for the share of its key.
    is_charged: bool,
    /// The limits of running jobs that it is behind.
    limits: Vec<Limit>,
    /// How often its jobs start is limited.
    is_throttled: bool,
    /// The maximum number of attempts of its handler that run at the same time on this host.
    most_at_once: Option<usize>,
    /// No job of it may start now.
    closed: Option<Closed>,
    /// What a job of it costs, in turns.
    cost: f64,
    cursor: i64,
    /// The cursor at the last two calls of [`Lanes::look_back`], older first.
    recent: [i64; 2],
    /// The cursor at the last two sweeps, older first. `i64::MIN` if there was no such sweep.
    marks: [i64; 2],
    /// The last turn that was ever claimed from it, or up to which it was found empty. Sweeps do not reset it.
    reached: i64,
}

impl Serving {
    /// Any job is claimed.
    fn is_whole(&self) -> bool {
        !self.by_source && !self.orphans_only
    }

    /// Only jobs of bound sources are claimed.
    fn is_by_source(&self) -> bool {
        self.by_source && !self.orphans_only
    }
}

impl Known {
    /// True if it is served as a whole.
    fn is_served_whole(&self) -> bool {
        self.serving.is_some_and(|serving| serving.is_whole())
    }

    /// True if only jobs of bound sources are claimed from it.
    fn is_served_by_source(&self) -> bool {
        self.serving.is_some_and(|serving| serving.is_by_source())
    }

    /// True if it is behind a gate.
    fn is_gated(&self) -> bool {
        self.is_throttled || !self.limits.is_empty()
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
            most: None,
            only: None,
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

    /// The position after which the catalog is read next.
    pub(super) fn read_after(&self) -> i64 {
        self.catalog_end - CATALOG_WINDOW
    }

    /// The sum of the known positions of the catalog after that one.
    pub(super) fn read_sum(&self) -> i64 {
        self.newest.iter().sum()
    }

    /// Makes the next reading cover the whole catalog: a lane may be committed long after it was numbered.
    pub(super) fn forget_catalog(&mut self) {
        self.catalog_end = 0;
        self.newest.clear();
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

    /// Adds the lanes of the catalog after [`Self::read_after`]. If this is the whole catalog, lanes that are missing
    /// from it are forgotten.
    pub(super) fn learn(&mut self, lanes: Vec<Lane>) -> CatalogChange {
        let whole = self.read_after() < 1;
        let mut new = false;
        let mut listed = HashSet::new();
        // Rows that have been deleted no longer count.
        self.newest.clear();
        for lane in lanes {
            self.catalog_end = self.catalog_end.max(lane.seq);
            self.newest.insert(lane.seq);
            if lane.retired {
                continue;
            }
            listed.insert(lane.id);
            self.known.entry(lane.id).or_insert_with(|| {
                new = true;
                self.unchosen.push(lane.id);
                Known {
                    lane: Arc::new(lane),
                    serving: None,
                    adopts: None,
                    place: Place::default(),
                    is_charged: false,
                    limits: Vec::new(),
                    is_throttled: false,
                    most_at_once: None,
                    closed: None,
                    cost: 1.0,
                    cursor: i64::MIN,
                    recent: [i64::MIN; 2],
                    marks: [i64::MIN; 2],
                    reached: i64::MIN,
                }
            });
        }
        self.newest = self.newest.split_off(&(self.read_after() + 1));
        let all = self.known.len();
        if whole {
            self.known.retain(|id, _| listed.contains(id));
        }
        CatalogChange {
            new,
            removed: self.known.len() < all,
        }
    }

    /// [`Self::serve`] for new lanes only: the others stay as they are.
    pub(super) fn serve_new(&mut self, serving: impl Fn(&Lane) -> Option<Serving>) {
        let mut new = std::mem::take(&mut self.unchosen);
        // Those that come last go first.
        new.sort_unstable_by_key(|id| Reverse(self.known.get(id).map(|known| known.lane.seq)));
        for id in new {
            let Some(known) = self.known.get_mut(&id) else {
                continue;
            };
            choose(
                known,
                serving(&known.lane),
                &mut self.shares,
                &self.gates,
                &self.shards,
                self.queue_order,
            );
            if known.is_served_by_source() {
                self.by_source.push_front(id);
            } else if known.is_served_whole() {
                self.served += 1;
                self.active.insert(id, known.place.clone());
            }
        }
    }

    /// Chooses which lanes are served, and how. A lane that was not served before counts as active: a new one is
    /// catalogued with its first job.
    pub(super) fn serve(&mut self, serving: impl Fn(&Lane) -> Option<Serving>) {
        self.unchosen.clear();
        self.shares.start_over();
        self.gates.start_over();
        let mut active = Vec::new();
        for known in self.known.values_mut() {
            let was_served = known.is_served_whole();
            let was_elsewhere = known.is_elsewhere();
            let may_have_jobs =
                known.closed.take().is_some() || self.active.contains(known.lane.id);
            choose(
                known,
                serving(&known.lane),
                &mut self.shares,
                &self.gates,
                &self.shards,
                self.queue_order,
            );
            if was_elsewhere && known.serving.is_some() {
                known.forget_turns();
            }
            if known.is_served_whole() && (!was_served || may_have_jobs) {
                active.push((known.lane.seq, known.lane.id));
            }
        }
        let known = &self.known;
        let is_served_whole = |id: &LaneId| known.get(id).is_some_and(Known::is_served_whole);
        let gone: Vec<LaneId> = self
            .active
            .lanes()
            .filter(|id| !is_served_whole(id))
            .collect();
        for id in gone {
            self.active.remove(id);
        }
        // Those that come last go first.
        active.sort_unstable_by(|left, right| right.cmp(left));
        for (_, id) in active {
            self.active.insert(id, known[&id].place.clone());
        }
        self.served = known.keys().filter(|id| is_served_whole(id)).count();
        let by_source = |id: &LaneId| known.get(id).is_some_and(Known::is_served_by_source);
        self.by_source.retain(by_source);
        let before: HashSet<LaneId> = self.by_source.iter().copied().collect();
        let new = known
            .keys()
            .filter(|id| by_source(id) && !before.contains(id));
        // A new lane is catalogued with its first job.
        for id in new {
            self.by_source.push_front(*id);
        }
    }

    /// True if there are new lanes, of which it is not known whether they are served.
    pub(super) fn has_unchosen(&self) -> bool {
        !self.unchosen.is_empty()
    }

    /// Notes that a lane has a job. True if it was not known to have any, and is served. In a fair queue, its first job
    /// then goes ahead of the jobs that wait in line.
    pub(super) fn wake(&mut self, id: LaneId) -> bool {
        let is_new = !self.active.contains(id) && !self.is_closed(id) && self.activate(id);
        if is_new
            && self
                .known
                .get(&id)
                .is_some_and(|known| self.shares.are_set_for(known))
        {
            self.woken.insert(id);
        }
        is_new
    }

    /// Those of the lanes of a claim that had no jobs until a moment ago.
    pub(super) fn take_woken(&mut self, orders: &[ClaimOrder]) -> Vec<LaneId> {
        if self.woken.is_empty() {
            return Vec::new();
        }
        let lanes = orders.iter().map(|order| order.lane);
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

    /// The lanes that are served by source, for the next claim, ordered by class. The lanes of a class take turns in
    /// being the first. If there are more than fit one claim, each call returns other ones.
    pub(super) fn by_source(&mut self) -> Vec<LaneId> {
        let count = self.by_source.len();
        let mut lanes: Vec<LaneId> = self
            .by_source
            .iter()
            .take(LANES_PER_CLAIM)
            .copied()
            .collect();
        let next = if count > LANES_PER_CLAIM {
            LANES_PER_CLAIM
        } else {
            1
        };
        self.by_source.rotate_left(next.min(count));
        lanes.sort_by_key(|id| {
            self.known
                .get(id)
                .map(|known| known.class(self.queue_order))
        });
        lanes
    }

    /// All lanes from which orphans are adopted, also of other shards and inboxes of other workers: those whose jobs are taken by source,
    /// or the others.
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
    }

    /// The lane of a claimed or adopted job, and how it is served. `None` if neither its jobs nor its orphans are claimed.
    pub(super) fn get(&self, id: LaneId) -> Option<Served> {
        let known = self.known.get(&id)?;
        let lease_ms = known.adopts?.lease_ms;
        Some(Served {
            lane: known.lane.clone(),
            lease: Duration::from_millis(u64::try_from(lease_ms).unwrap_or(0)),
            class: known.place.class,
            is_charged: known.is_charged,
            is_limited: !known.limits.is_empty(),
            is_throttled: known.is_throttled,
        })
    }

    /// Notes that there may be a job in this lane. True if the lane is served, and not closed.
    pub(super) fn mark_active(&mut self, id: LaneId) -> bool {
        if self.is_closed(id) {
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

    /// The lanes for the next claim of `wanted` jobs, in order. Classes go one after the other. Within a class, lanes
    /// that may have new jobs go first, and those that are known to have jobs share the claim.
    pub(super) fn orders(&mut self, after: After, wanted: usize) -> Vec<ClaimOrder> {
        let parts = self.active.divide(wanted, LANES_PER_CLAIM);
        let first = parts.first().and_then(|part| self.class_of(part.lane));
        if let Some(first) = first {
            self.count_deferred(first, &parts);
        }
        let mut orders: Vec<(Class, u8, ClaimOrder)> = Vec::with_capacity(parts.len());
        for Part { lane, most } in parts {
            if let Some(order) = self.known.get(&lane).and_then(|known| known.order(after)) {
                orders.push((
                    self.known[&lane].place.class,
                    1,
                    ClaimOrder { most, ..order },
                ));
            }
        }
        if self.served <= LANES_PER_CLAIM {
            self.add_idle(after, first, &mut orders);
            // Stable: the lanes of a class keep their order.
            orders.sort_by_key(|(class, rank, _)| (*class, *rank));
        }
        orders.into_iter().map(|(_, _, order)| order).collect()
    }

    /// Adds the lanes without known jobs. Those of classes before the `first` that has jobs precede it anyway; some of
    /// the same class do so in turns, for one job.
    fn add_idle(
        &mut self,
        after: After,
        first: Option<Class>,
        orders: &mut Vec<(Class, u8, ClaimOrder)>,
    ) {
        let idle = self
            .known
            .values()
            .filter(|known| !self.active.contains(known.lane.id) && known.closed.is_none());
        let mut idle: Vec<&Known> = idle.filter(|known| known.is_served_whole()).collect();
        idle.sort_unstable_by_key(|lane| lane.sort_key(self.queue_order));
        let of_first = |known: &&&Known| Some(known.class(self.queue_order)) == first;
        let mut probes: Vec<LaneId> = idle
            .iter()
            .filter(of_first)
            .map(|known| known.lane.id)
            .collect();
        probes.sort_unstable();
        let next = probes.partition_point(|id| Some(*id) <= self.probed);
        probes.rotate_left(next);
        probes.truncate(PROBES_PER_CLAIM);
        for known in idle {
            let Some(order) = known.order(after) else {
                continue;
            };
            let is_probe = probes.contains(&order.lane);
            let most = is_probe.then_some(1);
            let rank = if is_probe { 0 } else { 2 };
            orders.push((
                known.class(self.queue_order),
                rank,
                ClaimOrder { most, ..order },
            ));
        }
        if let Some(last) = probes.last() {
            self.probed = Some(*last);
        }
    }

    /// Gives back the turns of a claim that was not made, or claimed nothing because there were orphans.
    pub(super) fn not_claimed(&mut self, orders: &[ClaimOrder]) {
        for order in orders {
            self.active
                .settle(order.lane, order.most.unwrap_or(0), 0, 1.0);
        }
    }

    /// Notes that a lane may have jobs. False if it is not served as a whole.
    fn activate(&mut self, id: LaneId) -> bool {
        let known = self.known.get(&id).filter(|known| known.is_served_whole());
        if let Some(known) = known {
            self.active.insert(id, known.place.clone());
        }
        known.is_some()
    }

    /// Updates cursors, active lanes and their turns after a claim of `wanted` jobs from these lanes. `is_cut`: the
    /// claim ended because of its size. `closed`: lanes from which no job may start now. Returns true if there may be more
    /// jobs although the claim was not filled, because a lane has used up its part.
    pub(super) fn claimed(
        &mut self,
        orders: &[ClaimOrder],
        jobs: &[ClaimedJob],
        closed: &[ClosedLane],
        wanted: usize,
        is_cut: bool,
    ) -> bool {
        let mut claimed: HashMap<LaneId, usize> = HashMap::new();
        for job in jobs {
            self.advance(job.lane, job.turn);
            *claimed.entry(job.lane).or_default() += 1;
        }
        self.count_selected(orders, &claimed);
        let is_filled = jobs.len() >= wanted || is_cut;
        let has_jobs = |order: &ClaimOrder| claimed.contains_key(&order.lane);
        let last = orders.iter().rposition(has_jobs);
        let mut may_have_more = false;
        for (position, order) in orders.iter().enumerate() {
            let jobs = claimed.get(&order.lane).copied().unwrap_or(0);
            if order.only.is_some() || order.most.is_some() {
                // Overdue jobs, and those that a probe finds, take their turns in advance.
                let is_in_turn = order.only.is_none() && self.active.contains(order.lane);
                let taken = order.most.filter(|_| is_in_turn).unwrap_or(0);
                if jobs > 0 && order.only.is_none() {
                    self.activate(order.lane);
                }
                let cost = self.known.get(&order.lane).map_or(1.0, |known| known.cost);
                self.active.settle(order.lane, taken, jobs, cost);
            }
            // A claim that was filled has not read the lanes after the last one that had jobs, and not all of that one.
            if order.only.is_some() || is_filled && Some(position) > last {
                continue;
            }
            let is_used_up = order.most.is_some_and(|most| jobs >= most);
            let was_read = !is_filled || Some(position) < last;
            may_have_more |= is_used_up;
            if jobs == 0 || order.most.is_some() && !is_used_up && was_read {
                self.active.remove(order.lane);
            } else {
                self.activate(order.lane);
            }
        }
        self.note_closed(closed, &claimed, Instant::now());
        for lane in claimed.keys() {
            if !self.is_closed(*lane) {
                may_have_more |= self.open_others(*lane);
            }
        }
        may_have_more && !is_filled
    }

    /// Active lanes of a later class than the first active one. If there are more than fit one claim, any of them.
    pub(super) fn behind(&self, after: After) -> Vec<ClaimOrder> {
        let known = &self.known;
        let active = || self.active.lanes().filter_map(|id| known.get(&id));
        let class = |lane: &Known| lane.class(self.queue_order);
        let first = active().map(class).min();
        active()
            .filter(|lane| Some(class(lane)) > first)
            .filter_map(|lane| lane.order(after))
            .take(LANES_PER_CLAIM)
            .collect()
    }

    /// The claim orders for overdue jobs, which go ahead of other jobs of their tier. They are those of the first tier
    /// that has any, after the lanes of earlier tiers.
    pub(super) fn promoted(
        &mut self,
        overdue: &[(LaneId, Only)],
        wanted: usize,
    ) -> Vec<ClaimOrder> {
        let tier = |lanes: &Self, id: &LaneId| Some(lanes.known.get(id)?.tier(lanes.queue_order));
        let Some(first) = overdue.iter().filter_map(|(id, _)| tier(self, id)).min() else {
            return Vec::new();
        };
        let mut orders = match first {
            0 => Vec::new(),
            _ => self.orders(After::Recent, wanted),
        };
        orders.retain(|order| tier(self, &order.lane) < Some(first));
        let of_tier = overdue
            .iter()
            .filter(|(id, _)| tier(self, id) == Some(first));
        orders.extend(of_tier.filter_map(|(id, only)| {
            let known = self.known.get(id).filter(|known| known.closed.is_none())?;
            let order = known.order(After::Recent)?;
            let only = Some(*only);
            Some(ClaimOrder { only, ..order })
        }));
        orders
    }

    /// The lanes that are known to have jobs, in the order of claims.
    pub(super) fn with_jobs(&self) -> Vec<ClaimOrder> {
        self.filtered(|lane| self.active.contains(lane))
    }

    /// All lanes that are served as a whole, in the order of claims.
    pub(super) fn all(&self) -> Vec<ClaimOrder> {
        self.filtered(|_| true)
    }

    /// All lanes that are served as a whole and not known to have jobs, in the order of claims.
    pub(super) fn idle(&self) -> Vec<ClaimOrder> {
        self.filtered(|lane| !self.active.contains(lane))
    }

    fn filtered(&self, wanted: impl Fn(LaneId) -> bool) -> Vec<ClaimOrder> {
        let mut lanes: Vec<&Known> = self
            .known
            .values()
            .filter(|known| wanted(known.lane.id))
            .collect();
        lanes.sort_unstable_by_key(|lane| lane.sort_key(self.queue_order));
        let orders = lanes
            .into_iter()
            .filter_map(|lane| lane.order(After::Recent));
        orders.collect()
    }

    /// Moves the cursor of a lane forward to a claimed turn.
    fn advance(&mut self, lane: LaneId, turn: i64) {
        if let Some(known) = self.known.get_mut(&lane) {
            known.cursor = known.cursor.max(turn);
            known.reached = known.reached.max(turn);
        }
    }

    /// True if this lane is known to have jobs.
    pub(super) fn has_jobs(&self, id: LaneId) -> bool {
        self.active.contains(id)
    }

    /// The handler of a lane, if this host limits how many of its attempts run at the same time, and the limit.
    pub(super) fn host_limit(&self, id: LaneId) -> Option<(&str, usize)> {
        let known = self.known.get(&id)?;
        Some((&known.lane.handler, known.most_at_once?))
    }

    /// True if one claim can cover all lanes.
    pub(super) fn fit_one_claim(&self) -> bool {
        self.served <= LANES_PER_CLAIM
    }
}

/// Applies to a lane how it is served, and the settings, gates and shards of its queue.
fn choose(
    known: &mut Known,
    serving: Option<Serving>,
    shares: &mut Shares,
    gates: &Gates,
    shards: &Shards,
    order: QueueOrder,
) {
    known.adopts = serving;
    let serving = serving.filter(|_| shards.are_own(&known.lane));
    let is_capped = shares.choose(known, serving, order);
    known.most_at_once = serving.and_then(|serving| serving.most_at_once);
    gates.choose(known, is_capped);
}

#[cfg(test)]
mod tests;
