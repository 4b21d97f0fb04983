//! The lanes of the catalog, from which this worker chooses those that it serves.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::sync::Arc;

use super::gates::Gates;
use super::shards::Shards;
use super::shares::Shares;
use super::{Known, Lanes, Serving};
use crate::job::LaneId;
use crate::store::{CATALOG_WINDOW, Lane};
use crate::worker::QueueOrder;
use crate::worker::turns::Place;

/// The result of reading the catalog.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::worker) struct CatalogChange {
    /// There are new lanes, which may have jobs.
    pub(in crate::worker) new: bool,
    /// Lanes were removed, so all served lanes have to be chosen again.
    pub(in crate::worker) removed: bool,
}

impl Lanes {
    /// The position after which the catalog is read next.
    pub(in crate::worker) fn read_after(&self) -> i64 {
        self.catalog_end - CATALOG_WINDOW
    }

    /// The sum of the known positions of the catalog after [`Self::read_after`].
    pub(in crate::worker) fn read_sum(&self) -> i64 {
        self.newest.iter().sum()
    }

    /// Makes the next read cover the whole catalog: a lane may be committed long after it was numbered. It also covers
    /// the settings of fair queues.
    pub(in crate::worker) fn forget_catalog(&mut self) {
        self.shares.forget_version();
        self.catalog_end = 0;
        self.newest.clear();
    }

    /// Adds the lanes of the catalog after [`Self::read_after`]. If this is the whole catalog, lanes that are missing
    /// from it are forgotten.
    pub(in crate::worker) fn learn(&mut self, lanes: Vec<Lane>) -> CatalogChange {
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
                    host_limit: None,
                    rates: Vec::new(),
                    batch: None,
                    max_at_once: None,
                    cost: 1.0,
                    weight: 1.0,
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

    /// Like [`Self::serve`], but for new lanes only: the others stay as they are.
    pub(in crate::worker) fn serve_new(&mut self, serving: impl Fn(&Lane) -> Option<Serving>) {
        let mut new = std::mem::take(&mut self.unchosen);
        // The lane that is inserted last goes first, so the oldest does.
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
                &mut self.shards,
                self.queue_order,
            );
            if known.is_served_by_source() {
                self.by_source.push_front(id);
            } else if known.is_served_whole() {
                self.served.insert(id);
                self.active.insert(id, known.place.clone());
            }
        }
    }

    /// Chooses which lanes are served, and how. A lane that was not served before counts as active: a new one is
    /// catalogued with its first job.
    pub(in crate::worker) fn serve(&mut self, serving: impl Fn(&Lane) -> Option<Serving>) {
        self.unchosen.clear();
        self.shares.start_over();
        self.shards.start_over();
        let closed: HashSet<LaneId> = self.gates.start_over();
        let mut active = Vec::new();
        for known in self.known.values_mut() {
            let was_served = known.is_served_whole();
            let id = known.lane.id;
            let may_have_jobs = closed.contains(&id) || self.active.contains(id);
            choose(
                known,
                serving(&known.lane),
                &mut self.shares,
                &self.gates,
                &mut self.shards,
                self.queue_order,
            );
            if !was_served && known.serving.is_some() {
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
        // The lane that is inserted last goes first, so the oldest does.
        active.sort_unstable_by(|left, right| right.cmp(left));
        for (_, id) in active {
            self.active.insert(id, known[&id].place.clone());
        }
        // While a worker is busy, nothing else removes lanes that are no longer served.
        self.woken.retain(|id| self.active.contains(*id));
        self.gates.keep_members(known, &self.shares);
        self.served = known.keys().copied().filter(is_served_whole).collect();
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

    /// True if there are new lanes, for which it has not been decided yet whether they are served.
    pub(in crate::worker) fn has_unchosen(&self) -> bool {
        !self.unchosen.is_empty()
    }
}

/// Sets how a lane is served, and applies the settings, gates and shards of its queue.
fn choose(
    known: &mut Known,
    serving: Option<Serving>,
    shares: &mut Shares,
    gates: &Gates,
    shards: &mut Shards,
    order: QueueOrder,
) {
    known.adopts = serving;
    if serving.is_some() {
        shards.note_served(&known.lane);
    }
    let serving = serving.filter(|_| shards.are_own(&known.lane));
    let is_capped = shares.choose(known, serving, order);
    known.max_at_once = serving.and_then(|serving| serving.max_at_once);
    gates.choose(known, is_capped);
}
