//! The claimer's knowledge about lanes: which lanes it serves, which of them have jobs, and from which turn to read
//! them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::QueueOrder;
use super::fairness::Fairness;
use super::turns::{Class, Part, Place, Turns};
use crate::job::{FairShare, LaneId};
use crate::store::{ClaimOrder, ClaimedJob, FairQueueStats, Lane, Only};

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
    /// The settings of fair queues, by name.
    fair: HashMap<String, FairShare>,
    /// The served lanes of limited keys, by queue and key.
    capped: HashMap<(Arc<str>, Arc<str>), Vec<LaneId>>,
    /// A served queue is fair.
    serves_fair: bool,
    /// The number of claims so far.
    claims: u64,
    /// Where the search for starving jobs goes on.
    starving_after: Option<LaneId>,
    /// What claims did in these queues.
    fairness: Fairness,
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
}

/// The result of reading the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CatalogChange {
    /// There are new lanes, which may have jobs.
    pub(super) new: bool,
    /// Lanes were removed, so all served lanes have to be chosen again.
    pub(super) removed: bool,
}

#[derive(Debug)]
struct Known {
    lane: Arc<Lane>,
    /// `None` if it is not served.
    serving: Option<Serving>,
    /// Where it takes its turns.
    place: Place,
    /// The jobs in flight of its key are limited.
    is_capped: bool,
    /// What a job of it costs, in turns.
    cost: f64,
    /// The number of the last claim that has taken jobs of it.
    claimed_at: u64,
    cursor: i64,
    /// The cursor at the last two calls of [`Lanes::look_back`], older first.
    recent: [i64; 2],
    /// The cursor at the last two sweeps, older first. `i64::MIN` if there was no such sweep.
    marks: [i64; 2],
    /// The last turn that was ever claimed from it, or up to which it was found empty. Sweeps do not reset it.
    reached: i64,
}

impl Known {
    /// True if it is served as a whole.
    fn is_served_whole(&self) -> bool {
        self.serving.is_some_and(|serving| !serving.by_source)
    }

    fn order(&self, after: After) -> Option<ClaimOrder> {
        let serving = self.serving.filter(|serving| !serving.by_source)?;
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

    /// Applies the settings of its queue, if that is fair.
    fn set_share(&mut self, order: QueueOrder, fair: Option<&FairShare>) {
        let key = fair.map(|fair| fair.key_of(&self.lane.handler, &self.lane.key));
        self.place = Place {
            class: self.class(order),
            queue: self.lane.queue.as_str().into(),
            share: match (fair, &key) {
                (Some(fair), Some(key)) => fair.turns_of(key),
                _ => 1.0,
            },
            key: key.unwrap_or_default().into(),
        };
        self.cost = 1.0;
        self.is_capped = fair.is_some_and(|fair| fair.max_in_flight.is_some());
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
        known.is_some_and(|known| known.serving.is_some())
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
                    place: Place::default(),
                    is_capped: false,
                    cost: 1.0,
                    claimed_at: 0,
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
            known.serving = serving(&known.lane);
            known.set_share(self.queue_order, self.fair.get(&known.lane.queue));
            if known.serving.is_some() {
                self.serves_fair |= self.fair.contains_key(&known.lane.queue);
                if known.is_capped {
                    self.capped.entry(known.place.of()).or_default().push(id);
                }
            }
            match known.serving {
                Some(serving) if serving.by_source => self.by_source.push_front(id),
                Some(_) => {
                    self.served += 1;
                    self.active.insert(id, known.place.clone());
                }
                None => {}
            }
        }
    }

    /// Chooses which lanes are served, and how. A lane that was not served before counts as active: a new one is
    /// catalogued with its first job.
    pub(super) fn serve(&mut self, serving: impl Fn(&Lane) -> Option<Serving>) {
        self.unchosen.clear();
        self.capped.clear();
        self.serves_fair = false;
        let mut active = Vec::new();
        for known in self.known.values_mut() {
            let was_served = known.is_served_whole();
            known.serving = serving(&known.lane);
            known.set_share(self.queue_order, self.fair.get(&known.lane.queue));
            if known.serving.is_some() {
                self.serves_fair |= self.fair.contains_key(&known.lane.queue);
                if known.is_capped {
                    let lanes = self.capped.entry(known.place.of()).or_default();
                    lanes.push(known.lane.id);
                }
            }
            if known.is_served_whole() && (!was_served || self.active.contains(known.lane.id)) {
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
        let by_source = |id: &LaneId| {
            let serving = known.get(id).and_then(|lane| lane.serving);
            serving.is_some_and(|serving| serving.by_source)
        };
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

    /// True if a served queue is fair.
    pub(super) fn serves_fair(&self) -> bool {
        self.serves_fair
    }

    /// Notes that a lane has a job. True if it was not known to have any, and is served. In a fair queue, its first job
    /// then goes ahead of the jobs that wait in line.
    pub(super) fn wake(&mut self, id: LaneId) -> bool {
        let is_new = !self.active.contains(id) && self.activate(id);
        if is_new
            && self
                .known
                .get(&id)
                .is_some_and(|known| self.fair.contains_key(&known.lane.queue))
        {
            self.woken.insert(id);
        }
        is_new
    }

    /// Those of the lanes of a claim that had no jobs until a moment ago.
    pub(super) fn take_woken(&mut self, orders: &[ClaimOrder]) -> Vec<LaneId> {
        let lanes = orders.iter().map(|order| order.lane);
        lanes.filter(|lane| self.woken.remove(lane)).collect()
    }

    /// The class of a lane. `None` if it is unknown.
    pub(super) fn class_of(&self, id: LaneId) -> Option<Class> {
        self.known
            .get(&id)
            .map(|known| known.class(self.queue_order))
    }

    /// Sets the settings of fair queues. True if they have changed, so the served lanes have to be chosen again.
    pub(super) fn set_fair(&mut self, fair: HashMap<String, FairShare>) -> bool {
        let is_new = self.fair != fair;
        for (queue, share) in &fair {
            self.fairness.watch(queue, share.key.name());
        }
        self.fairness.retain(|queue| fair.contains_key(queue));
        self.fair = fair;
        is_new
    }

    /// What claims did in fair queues.
    pub(super) fn fairness(&self) -> Vec<FairQueueStats> {
        self.fairness.report(&self.active)
    }

    /// True if the CPU time of the jobs of this lane counts for the share of its key.
    pub(super) fn charges_cpu(&self, lane: LaneId) -> bool {
        let queue = self.known.get(&lane).map(|known| &known.lane.queue);
        let fair = queue.and_then(|queue| self.fair.get(queue));
        fair.is_some_and(|fair| fair.charges_cpu)
    }

    /// Sets what a job of this lane costs, in turns.
    pub(super) fn set_cost(&mut self, lane: LaneId, cost: f64) {
        if let Some(known) = self.known.get_mut(&lane) {
            known.cost = cost;
        }
    }

    /// True if the end of a job of this lane may let others of its key start.
    pub(super) fn is_capped(&self, lane: LaneId) -> bool {
        self.known.get(&lane).is_some_and(|known| known.is_capped)
    }

    /// True if only jobs of bound sources are claimed from this lane.
    pub(super) fn is_served_by_source(&self, lane: LaneId) -> bool {
        let serving = self.known.get(&lane).and_then(|known| known.serving);
        serving.is_some_and(|serving| serving.by_source)
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

    /// All lanes that are served by source, for adoption.
    pub(super) fn all_by_source(&self) -> Vec<ClaimOrder> {
        let known = self.by_source.iter().filter_map(|id| self.known.get(id));
        known
            .filter_map(|known| {
                Some(ClaimOrder {
                    lane: known.lane.id,
                    after: i64::MIN,
                    lease_ms: known.serving?.lease_ms,
                    most: None,
                    only: None,
                })
            })
            .collect()
    }

    /// Marks all lanes as having no jobs.
    pub(super) fn mark_all_empty(&mut self) {
        self.active.clear();
    }

    /// The lane of a claimed job, and the lease of claims from it. `None` if it is not served.
    pub(super) fn get(&self, id: LaneId) -> Option<(Arc<Lane>, Duration)> {
        let known = self.known.get(&id)?;
        let lease_ms = known.serving?.lease_ms;
        let lease = Duration::from_millis(u64::try_from(lease_ms).unwrap_or(0));
        Some((known.lane.clone(), lease))
    }

    /// Notes that a job of this lane has ended, so others of its key may start. True if any lane may have one.
    pub(super) fn free(&mut self, id: LaneId) -> bool {
        let place = self.known.get(&id).map(|known| &known.place);
        let Some(lanes) = place.and_then(|place| self.capped.get(&place.of())) else {
            return false;
        };
        let mut lanes = lanes.clone();
        // The last one goes first: that which has waited for the most claims.
        lanes.sort_unstable_by_key(|lane| {
            Reverse(self.known.get(lane).map(|known| known.claimed_at))
        });
        lanes
            .into_iter()
            .filter(|lane| self.activate(*lane))
            .count()
            > 0
    }

    /// Notes that there may be a job in this lane. True if the lane is served.
    pub(super) fn mark_active(&mut self, id: LaneId) -> bool {
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
        let class = |lane: LaneId| Some(self.known.get(&lane)?.class(self.queue_order));
        let first = parts.first().and_then(|part| class(part.lane));
        if let Some(first) = first {
            self.count_deferred(first, &parts);
        }
        let mut orders: Vec<(Class, u8, ClaimOrder)> = Vec::with_capacity(parts.len());
        for Part { lane, most } in parts {
            if let Some(order) = self.known.get(&lane).and_then(|known| known.order(after)) {
                let class = self.known[&lane].class(self.queue_order);
                orders.push((class, 1, ClaimOrder { most, ..order }));
            }
        }
        if self.served <= LANES_PER_CLAIM {
            self.add_idle(after, first, &mut orders);
            // Stable: the lanes of a class keep their order.
            orders.sort_by_key(|(class, rank, _)| (*class, *rank));
        }
        orders.into_iter().map(|(_, _, order)| order).collect()
    }

    /// Counts the keys of fair queues that have jobs of this class, and of which a claim takes none.
    fn count_deferred(&mut self, class: Class, parts: &[Part]) {
        for queue in self.fair.keys() {
            let places = parts
                .iter()
                .filter_map(|part| Some(&self.known.get(&part.lane)?.place));
            let chosen = places.filter(|place| place.class == class && *place.queue == **queue);
            let chosen = chosen.map(|place| place.key.clone()).collect();
            self.fairness.deferred(class, queue, &chosen, &self.active);
        }
    }

    /// Counts the jobs that a claim has taken of keys of fair queues.
    fn count_selected(&mut self, orders: &[ClaimOrder], claimed: &HashMap<LaneId, usize>) {
        if self.fair.is_empty() {
            return;
        }
        for order in orders {
            if let Some(jobs) = claimed.get(&order.lane)
                && let Some(known) = self.known.get(&order.lane)
            {
                let Place { queue, key, .. } = &known.place;
                self.fairness
                    .selected(queue, key, *jobs, order.only.is_some());
            }
        }
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
            .filter(|known| !self.active.contains(known.lane.id));
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

    /// Gives back the turns of a claim that claimed nothing because there were orphans.
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
    /// claim ended because of its size. Returns true if there may be more jobs although the claim was not filled,
    /// because a lane has used up its part.
    pub(super) fn claimed(
        &mut self,
        orders: &[ClaimOrder],
        jobs: &[ClaimedJob],
        wanted: usize,
        is_cut: bool,
    ) -> bool {
        let mut claimed: HashMap<LaneId, usize> = HashMap::new();
        self.claims += 1;
        for job in jobs {
            self.advance(job.lane, job.turn);
            if let Some(known) = self.known.get_mut(&job.lane) {
                known.claimed_at = self.claims;
            }
            *claimed.entry(job.lane).or_default() += 1;
        }
        self.count_selected(orders, &claimed);
        let is_filled = jobs.len() >= wanted || is_cut;
        let has_jobs = |order: &ClaimOrder| claimed.contains_key(&order.lane);
        let last = orders.iter().rposition(has_jobs);
        let mut may_have_more = false;
        for (position, order) in orders.iter().enumerate() {
            let jobs = claimed.get(&order.lane).copied().unwrap_or(0);
            let was_active = self.active.contains(order.lane);
            if order.only.is_some() {
                let cost = self.known.get(&order.lane).map_or(1.0, |known| known.cost);
                self.active.settle(order.lane, 0, jobs, cost);
            } else if let Some(most) = order.most {
                if jobs > 0 {
                    self.activate(order.lane);
                }
                let cost = self.known.get(&order.lane).map_or(1.0, |known| known.cost);
                let taken = if was_active { most } else { 0 };
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

    /// The lanes of fair queues among those that have jobs and take turns now, by the wait after which their jobs starve.
    /// If there are more than fit one query, each call returns other ones.
    pub(super) fn starving(&mut self, after: After) -> Vec<(Duration, Vec<ClaimOrder>)> {
        if !self.serves_fair {
            return Vec::new();
        }
        let active = || self.active.lanes().filter_map(|id| self.known.get(&id));
        let first = active().map(|lane| lane.place.class).min();
        let of_first = active().filter(|lane| Some(lane.place.class) == first);
        let mut lanes: Vec<&Known> = of_first.collect();
        lanes.sort_unstable_by_key(|lane| lane.lane.id);
        let next = lanes.partition_point(|lane| Some(lane.lane.id) <= self.starving_after);
        lanes.rotate_left(next);
        let mut waits: BTreeMap<Duration, Vec<ClaimOrder>> = BTreeMap::new();
        let mut last = None;
        for known in lanes {
            let fair = self.fair.get(&known.lane.queue);
            if let Some(wait) = fair.and_then(|fair| fair.starvation) {
                let orders = waits.entry(wait).or_default();
                if orders.len() < LANES_PER_CLAIM {
                    orders.extend(known.order(after));
                    last = Some(known.lane.id);
                }
            }
        }
        self.starving_after = last;
        waits.into_iter().collect()
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
            let order = self.known.get(id)?.order(After::Recent)?;
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

    /// Makes the cursors at the previous call of this the recent ones.
    pub(super) fn look_back(&mut self) {
        for known in self.known.values_mut() {
            known.recent = [known.recent[1], known.cursor];
        }
    }

    /// The short sweep: resets every cursor to its position two sweeps ago, or to turn `starts_at` if there is no such
    /// position. In a lane that still has jobs, the cursor never moves forward: since a restart, the jobs may be before
    /// that position.
    pub(super) fn rewind(&mut self, starts_at: i64) {
        for (id, known) in &mut self.known {
            let [oldest, newer] = known.marks;
            known.marks = [newer, known.cursor];
            known.cursor = match oldest {
                i64::MIN => known.cursor.min(starts_at),
                oldest if self.active.contains(*id) => known.cursor.min(oldest),
                oldest => oldest,
            };
        }
    }

    /// The restart: resets every cursor to the start.
    pub(super) fn restart(&mut self) {
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
        }
    }

    /// True if one claim can cover all lanes.
    pub(super) fn fit_one_claim(&self) -> bool {
        self.served <= LANES_PER_CLAIM
    }

    /// After a sweep that found everything: moves the cursors forward to the last turn reached, so that the next look
    /// does not read the same rows again. Lanes without jobs move forward to `empty_to`, a turn that was assigned a
    /// while ago: looks then skip the dead rows of finished jobs that an open transaction keeps. Not those whose jobs in
    /// flight are limited: they may have jobs that no claim could take.
    pub(super) fn swept(&mut self, empty_to: Option<i64>) {
        for (id, known) in &mut self.known {
            if known.is_served_whole() && !known.is_capped && !self.active.contains(*id) {
                known.reached = known.reached.max(empty_to.unwrap_or(i64::MIN));
            }
            known.cursor = known.reached;
        }
    }

    /// Forgets the catalog's end and all cursors: the remembered state of the database may be wrong.
    pub(super) fn forget(&mut self) {
        self.forget_catalog();
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
            known.recent = [i64::MIN; 2];
            known.marks = [i64::MIN; 2];
            known.reached = i64::MIN;
        }
    }
}

#[cfg(test)]
mod tests;
