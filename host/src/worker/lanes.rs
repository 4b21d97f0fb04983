//! What the claimer knows of the lanes: which it serves, which have jobs, and from which turn on.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::QueueOrder;
use crate::job::LaneId;
use crate::store::{ClaimOrder, ClaimedJob, Lane, Only};

/// The most lanes that one claim looks at: an empty lane costs it one look into the index. Where
/// more are served, claims go to those that are known to have jobs.
const LANES_PER_CLAIM: usize = 256;
/// The catalog is read again from this far behind its known end, because a lane's row may be
/// committed after one that was numbered later.
const CATALOG_WINDOW: i64 = 256;

/// The lanes, and a cursor for each. Cursors are hints: turns are numbered before they are
/// committed, so one that is behind a cursor is found by the next sweep.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    known: HashMap<LaneId, Known>,
    /// How many of them are served as a whole.
    served: usize,
    /// Those that are served by source.
    by_source: VecDeque<LaneId>,
    /// Served lanes that had jobs when somebody last looked.
    active: HashSet<LaneId>,
    /// The newest rows of the catalog that were read: those in the window.
    newest: BTreeSet<i64>,
    catalog_end: i64,
    queue_order: QueueOrder,
}

/// From which turn on a lane is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum After {
    /// From the cursor: there is a backlog, and whatever is committed now stands behind it.
    Cursor,
    /// From where the cursor was a moment ago: it stands among jobs that are being committed now, not in
    /// the order of their turns.
    Recent,
    /// From the furthest turn that was ever claimed, which no sweep changes: what was committed behind it is left out.
    Reached,
}

/// How a lane is served.
#[derive(Debug, Clone, Copy)]
pub(super) struct Serving {
    /// How long claims from it are good for.
    pub(super) lease_ms: i64,
    /// The place of its queue among those that are served.
    pub(super) queue_place: usize,
    /// Only jobs of sources that are bound to a handler: the lane's own is not here. Such a lane has no cursor.
    pub(super) by_source: bool,
}

/// What a reading of the catalog has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct News {
    /// There are lanes that were not known, and may have jobs.
    pub(super) new: bool,
    /// Lanes have come or gone: which are served has to be decided anew.
    pub(super) changed: bool,
}

#[derive(Debug)]
struct Known {
    lane: Arc<Lane>,
    /// None: it is not served.
    serving: Option<Serving>,
    cursor: i64,
    /// The cursor at the last two calls of [`Lanes::look_back`], the older one first.
    recent: [i64; 2],
    /// The cursor at the last two sweeps, the older one first; the smallest turn: there was none.
    marks: [i64; 2],
    /// The furthest turn that was ever claimed from it, or up to which it was found empty; going back does not change this.
    reached: i64,
}

impl Known {
    /// Served as a whole.
    fn is_ours(&self) -> bool {
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
            only: None,
        })
    }

    /// The place in the order in which lanes are claimed from: by class, and of these the lane
    /// that has come least far first. Turns are numbered across lanes, so that one has the oldest jobs.
    /// Not by the cursor: after each sweep the lanes with the smallest ids would go first, and the
    /// others have to wait until those are empty.
    fn place(&self, order: QueueOrder) -> ([usize; 2], i64, LaneId) {
        (self.class(order), self.reached, self.lane.id)
    }

    /// Lanes of one class take turns; those of a later one wait until the earlier ones are empty.
    fn class(&self, order: QueueOrder) -> [usize; 2] {
        let queue_place = self.serving.map_or(0, |serving| serving.queue_place);
        let priority = self.lane.priority as usize;
        match order {
            QueueOrder::Priority => [priority, queue_place],
            QueueOrder::Strict => [queue_place, priority],
        }
    }

    /// Lanes of a later tier wait until the earlier ones are empty, however long their jobs have waited.
    fn tier(&self, order: QueueOrder) -> usize {
        match order {
            QueueOrder::Priority => 0,
            QueueOrder::Strict => self.serving.map_or(0, |serving| serving.queue_place),
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

    /// From where to read the catalog next.
    pub(super) fn read_after(&self) -> i64 {
        self.catalog_end - CATALOG_WINDOW
    }

    /// How many rows of the catalog after that place have been read.
    pub(super) fn read_rows(&self) -> usize {
        self.newest.len()
    }

    /// From now on the whole catalog is unread: a lane may be committed long after it was numbered.
    pub(super) fn forget_catalog(&mut self) {
        self.catalog_end = 0;
        self.newest.clear();
    }

    /// True for a lane of the catalog, as far as it was read.
    pub(super) fn knows(&self, lane: LaneId) -> bool {
        self.known.contains_key(&lane)
    }

    /// True for a lane that jobs are claimed from.
    pub(super) fn serves(&self, lane: LaneId) -> bool {
        let known = self.known.get(&lane);
        known.is_some_and(|known| known.serving.is_some())
    }

    /// Takes in all that the catalog said after [`Self::read_after`]. A new lane counts as one that
    /// has jobs: it is catalogued with its first. Where the whole catalog was read, lanes that it has no more are forgotten.
    pub(super) fn learn(&mut self, lanes: Vec<Lane>) -> News {
        let whole = self.read_after() < 1;
        let mut new = false;
        let mut there = HashSet::new();
        // Rows that were read before and are gone do not count any more.
        self.newest.clear();
        for lane in lanes {
            self.catalog_end = self.catalog_end.max(lane.seq);
            self.newest.insert(lane.seq);
            if lane.retired {
                continue;
            }
            there.insert(lane.id);
            self.known.entry(lane.id).or_insert_with(|| {
                new = true;
                self.active.insert(lane.id);
                Known {
                    lane: Arc::new(lane),
                    serving: None,
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
            self.known.retain(|id, _| there.contains(id));
        }
        News {
            new,
            changed: new || self.known.len() < all,
        }
    }

    /// Decides anew which lanes are served, and how.
    pub(super) fn serve(&mut self, serving: impl Fn(&Lane) -> Option<Serving>) {
        for known in self.known.values_mut() {
            let was_ours = known.is_ours();
            known.serving = serving(&known.lane);
            if known.is_ours() && !was_ours {
                self.active.insert(known.lane.id);
            }
        }
        let known = &self.known;
        let is_ours = |id: &LaneId| known.get(id).is_some_and(Known::is_ours);
        self.active.retain(is_ours);
        self.served = known.keys().filter(|id| is_ours(id)).count();
        let by_source = |id: &LaneId| {
            let serving = known.get(id).and_then(|lane| lane.serving);
            serving.is_some_and(|serving| serving.by_source)
        };
        self.by_source.retain(by_source);
        let there: HashSet<LaneId> = self.by_source.iter().copied().collect();
        let new = known
            .keys()
            .filter(|id| by_source(id) && !there.contains(id));
        // A new lane is catalogued with its first job.
        for id in new {
            self.by_source.push_front(*id);
        }
    }

    /// Whether only jobs of bound sources are claimed from it.
    pub(super) fn is_served_by_source(&self, lane: LaneId) -> bool {
        let serving = self.known.get(&lane).and_then(|known| known.serving);
        serving.is_some_and(|serving| serving.by_source)
    }

    /// Whether any lane is served by source.
    pub(super) fn serves_by_source(&self) -> bool {
        !self.by_source.is_empty()
    }

    /// Lanes that are served by source, for the next claim, by priority and queue: of one class another one goes first
    /// each time, and of more than fit others come each time.
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

    /// Every lane that is served by source, for adoption.
    pub(super) fn all_by_source(&self) -> Vec<ClaimOrder> {
        let known = self.by_source.iter().filter_map(|id| self.known.get(id));
        known
            .filter_map(|known| {
                Some(ClaimOrder {
                    lane: known.lane.id,
                    after: i64::MIN,
                    lease_ms: known.serving?.lease_ms,
                    only: None,
                })
            })
            .collect()
    }

    /// No lane is known to have jobs.
    pub(super) fn rest(&mut self) {
        self.active.clear();
    }

    /// The lane of a claimed job, and how long claims from it are good for; none where it is not
    /// served.
    pub(super) fn get(&self, id: LaneId) -> Option<(Arc<Lane>, Duration)> {
        let known = self.known.get(&id)?;
        let lease_ms = known.serving?.lease_ms;
        let lease = Duration::from_millis(u64::try_from(lease_ms).unwrap_or(0));
        Some((known.lane.clone(), lease))
    }

    /// Somebody says that there is a job in this lane. True where the lane is served.
    pub(super) fn touch(&mut self, id: LaneId) -> bool {
        if self.known.get(&id).is_some_and(Known::is_ours) {
            self.active.insert(id);
        } else if let Some(place) = self.by_source.iter().position(|it| *it == id) {
            // The next claim by source starts with it.
            self.by_source.remove(place);
            self.by_source.push_front(id);
        }
        self.serves(id)
    }

    /// The lanes for the next claim, in order.
    pub(super) fn orders(&self, after: After) -> Vec<ClaimOrder> {
        let mut lanes: Vec<&Known> = if self.served > LANES_PER_CLAIM {
            let active = self.active.iter();
            active.filter_map(|id| self.known.get(id)).collect()
        } else {
            let known = self.known.values();
            known.filter(|lane| lane.is_ours()).collect()
        };
        if lanes.len() > LANES_PER_CLAIM {
            lanes.select_nth_unstable_by_key(LANES_PER_CLAIM, |lane| lane.place(self.queue_order));
            lanes.truncate(LANES_PER_CLAIM);
        }
        lanes.sort_unstable_by_key(|lane| lane.place(self.queue_order));
        let orders = lanes.into_iter().filter_map(|lane| lane.order(after));
        orders.collect()
    }

    /// Takes in what a claim from these lanes found; `is_all`: everything that was there.
    pub(super) fn claimed(&mut self, orders: &[ClaimOrder], jobs: &[ClaimedJob], is_all: bool) {
        let mut gave = HashSet::new();
        for job in jobs {
            self.advance(job.lane, job.turn);
            gave.insert(job.lane);
        }
        // A claim that was filled has not looked into the lanes behind the last that gave something.
        let looked_at = if is_all {
            orders.len()
        } else {
            let last = orders.iter().rposition(|order| gave.contains(&order.lane));
            last.map_or(0, |last| last + 1)
        };
        for order in &orders[..looked_at] {
            if order.only.is_none() && !gave.contains(&order.lane) {
                self.active.remove(&order.lane);
            }
        }
    }

    /// Lanes that have jobs and stand behind others that have some; of more than fit a claim, any.
    pub(super) fn behind(&self, after: After) -> Vec<ClaimOrder> {
        let known = &self.known;
        let active = || self.active.iter().filter_map(|id| known.get(id));
        let class = |lane: &Known| lane.class(self.queue_order);
        let first = active().map(class).min();
        active()
            .filter(|lane| Some(class(lane)) > first)
            .filter_map(|lane| lane.order(after))
            .take(LANES_PER_CLAIM)
            .collect()
    }

    /// The orders for jobs that have waited too long, ahead of others of their tier: with more than one tier those of the
    /// first, after the lanes of earlier tiers.
    pub(super) fn promoted(&self, overdue: &[(LaneId, Only)]) -> Vec<ClaimOrder> {
        let tier_of = |id: &LaneId| Some(self.known.get(id)?.tier(self.queue_order));
        let Some(tier) = overdue.iter().filter_map(|(id, _)| tier_of(id)).min() else {
            return Vec::new();
        };
        let mut orders = match tier {
            0 => Vec::new(),
            _ => self.orders(After::Recent),
        };
        orders.retain(|order| tier_of(&order.lane) < Some(tier));
        let of_tier = overdue.iter().filter(|(id, _)| tier_of(id) == Some(tier));
        orders.extend(of_tier.filter_map(|(id, only)| {
            let order = self.known.get(id)?.order(After::Recent)?;
            let only = Some(*only);
            Some(ClaimOrder { only, ..order })
        }));
        orders
    }

    /// Every served lane, in the order in which to claim from them.
    pub(super) fn all(&self) -> Vec<ClaimOrder> {
        self.looked_at(|_| true)
    }

    /// Every served lane that is not known to have jobs, in the order in which to claim from them.
    pub(super) fn idle(&self) -> Vec<ClaimOrder> {
        self.looked_at(|lane| !self.active.contains(&lane))
    }

    fn looked_at(&self, wanted: impl Fn(LaneId) -> bool) -> Vec<ClaimOrder> {
        let mut lanes: Vec<&Known> = self
            .known
            .values()
            .filter(|known| wanted(known.lane.id))
            .collect();
        lanes.sort_unstable_by_key(|lane| lane.place(self.queue_order));
        let orders = lanes
            .into_iter()
            .filter_map(|lane| lane.order(After::Recent));
        orders.collect()
    }

    /// A claim has come this far in the lane.
    fn advance(&mut self, lane: LaneId, turn: i64) {
        if let Some(known) = self.known.get_mut(&lane) {
            known.cursor = known.cursor.max(turn);
            known.reached = known.reached.max(turn);
        }
    }

    /// From now on, "recent" is where the cursors were at the call before this one.
    pub(super) fn look_back(&mut self) {
        for known in self.known.values_mut() {
            known.recent = [known.recent[1], known.cursor];
        }
    }

    /// The short sweep: every cursor goes back to where it was two sweeps ago; where it was at the start then, or there were no two
    /// sweeps, to turn `starts_at`. In a lane that still has jobs no cursor goes forward: they may be behind that place, since a restart.
    pub(super) fn rewind(&mut self, starts_at: i64) {
        for (id, known) in &mut self.known {
            let [oldest, newer] = known.marks;
            known.marks = [newer, known.cursor];
            known.cursor = match oldest {
                i64::MIN => known.cursor.min(starts_at),
                oldest if self.active.contains(id) => known.cursor.min(oldest),
                oldest => oldest,
            };
        }
    }

    /// The long sweep: every cursor starts over.
    pub(super) fn restart(&mut self) {
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
        }
    }

    /// Whether a claim looks at every lane.
    pub(super) fn fit_one_claim(&self) -> bool {
        self.served <= LANES_PER_CLAIM
    }

    /// The look after a sweep has found all that there was: the cursors are as far as they ever were, so that the next look does not go
    /// through the same rows again. Lanes without jobs come as far as `empty_to`, a turn that was given out a while ago: no
    /// look goes through the rows that an open transaction keeps of jobs that others have finished.
    pub(super) fn swept(&mut self, empty_to: Option<i64>) {
        for (id, known) in &mut self.known {
            if known.is_ours() && !self.active.contains(id) {
                known.reached = known.reached.max(empty_to.unwrap_or(i64::MIN));
            }
            known.cursor = known.reached;
        }
    }

    /// Nothing that is remembered of the database holds any more.
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
