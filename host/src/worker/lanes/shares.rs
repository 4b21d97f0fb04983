//! Fair queues: their settings, applied to lanes, and the statistics of claims for their keys.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::orders::rotate_after;
use super::{After, Known, LANES_PER_CLAIM, Lanes, Serving};
use crate::job::{FairShare, LaneId};
use crate::store::{ClaimOrder, FairQueueStats, FairQueues, FairVersion};
use crate::worker::QueueOrder;
use crate::worker::fairness::Fairness;
use crate::worker::turns::{Class, Part, Place};

#[derive(Debug, Default)]
pub(super) struct Shares {
    /// The settings, by queue.
    settings: HashMap<String, FairShare>,
    /// The version of the settings that was read last. `None` if the next read of the catalog covers them in any case.
    version: Option<FairVersion>,
    /// True if any served queue is fair.
    any_served: bool,
    /// For each wait after which jobs starve: the last lane that was searched for them.
    starving_after: HashMap<Duration, LaneId>,
    /// The statistics of claims.
    fairness: Fairness,
}

impl Shares {
    /// Forgets the served lanes, before they are chosen again.
    pub(super) fn start_over(&mut self) {
        self.any_served = false;
    }

    /// Makes the next read of the catalog cover the settings.
    pub(super) fn forget_version(&mut self) {
        self.version = None;
    }

    /// Sets how a lane is served, according to the settings of its queue. True if these settings limit the running jobs
    /// of each key.
    pub(super) fn choose(
        &mut self,
        known: &mut Known,
        serving: Option<Serving>,
        order: QueueOrder,
    ) -> bool {
        known.serving = serving;
        let fair = self.settings.get(&known.lane.queue);
        let key = fair.map(|fair| fair.key_of(&known.lane.handler, &known.lane.values));
        known.place = Place {
            class: known.class(order),
            queue: known.lane.queue.as_str().into(),
            share: match (fair, &key) {
                (Some(fair), Some(key)) => fair.turns_of(key),
                _ => 1.0,
            },
            key: key.unwrap_or_default().into(),
        };
        let quantum = fair.map_or(1.0, |fair| f64::from(fair.quantum));
        known.weight = known.place.share / quantum;
        known.cost = 1.0;
        known.is_charged = fair.is_some_and(|fair| fair.charges_cpu);
        self.any_served |= known.serving.is_some() && fair.is_some();
        fair.is_some_and(|fair| fair.max_in_flight.is_some())
    }

    /// True if the queue of this lane is fair.
    pub(super) fn is_fair(&self, known: &Known) -> bool {
        self.settings.contains_key(&known.lane.queue)
    }
}

impl Lanes {
    /// True if a served queue is fair.
    pub(in crate::worker) fn serves_fair(&self) -> bool {
        self.shares.any_served
    }

    /// The version of the settings of fair queues that the next read of the catalog leaves out.
    pub(in crate::worker) fn fair_version(&self) -> Option<FairVersion> {
        self.shares.version
    }

    /// Sets the settings of fair queues if they were read. True if they have changed, so the served lanes have to be
    /// chosen again.
    pub(in crate::worker) fn learn_fair(&mut self, read: Option<FairQueues>) -> bool {
        let Some(FairQueues { version, queues }) = read else {
            return false;
        };
        self.shares.version = Some(version);
        self.set_fair(queues)
    }

    /// Sets the settings of fair queues. True if they have changed.
    pub(super) fn set_fair(&mut self, settings: HashMap<String, FairShare>) -> bool {
        let shares = &mut self.shares;
        if shares.settings == settings {
            return false;
        }
        for (queue, share) in &settings {
            shares.fairness.watch(queue, share.key.name());
        }
        shares.fairness.retain(|queue| settings.contains_key(queue));
        shares.settings = settings;
        true
    }

    /// The statistics of claims in fair queues.
    pub(in crate::worker) fn fairness(&self) -> Vec<FairQueueStats> {
        self.shares.fairness.report(&self.active)
    }

    /// Divides the next claims by the cost of a job of this lane. Called when no claim that is under way has taken
    /// turns of the lane.
    pub(super) fn divide_by_cost(&mut self, lane: LaneId) {
        if let Some(known) = self.known.get(&lane) {
            self.active.set_cost(lane, known.cost);
        }
    }

    /// The queue of this lane, if it charges CPU time.
    pub(in crate::worker) fn charged_queue(&self, lane: LaneId) -> Option<&str> {
        let known = self.known.get(&lane).filter(|known| known.is_charged)?;
        Some(&known.lane.queue)
    }

    /// Sets the cost of a job of this lane, in turns. By default, a job costs 1.
    pub(in crate::worker) fn set_cost(&mut self, lane: LaneId, cost: f64) {
        if let Some(known) = self.known.get_mut(&lane) {
            known.cost = cost;
        }
    }

    /// Counts the keys of fair queues that have jobs of this class, but none in a claim.
    pub(super) fn count_deferred(&mut self, class: Class, parts: &[Part]) {
        if !self.serves_fair() {
            return;
        }
        let mut chosen: HashMap<Arc<str>, HashSet<Arc<str>>> = HashMap::new();
        for queue in self.active.queues(class) {
            if self.shares.settings.contains_key(&**queue) {
                chosen.insert(queue.clone(), HashSet::new());
            }
        }
        let places = parts.iter().filter_map(|part| self.known.get(&part.lane));
        for place in places.map(|known| &known.place) {
            if place.class == class
                && let Some(keys) = chosen.get_mut(&place.queue)
            {
                keys.insert(place.key.clone());
            }
        }
        for (queue, keys) in chosen {
            let fairness = &mut self.shares.fairness;
            fairness.deferred(class, &queue, &keys, &self.active);
        }
    }

    /// Counts the jobs that a claim has taken from each key of fair queues.
    pub(super) fn count_selected(
        &mut self,
        orders: &[ClaimOrder],
        claimed: &HashMap<LaneId, usize>,
    ) {
        if !self.serves_fair() {
            return;
        }
        let now = Instant::now();
        for order in orders {
            if let Some(jobs) = claimed.get(&order.lane)
                && let Some(known) = self.known.get(&order.lane)
            {
                let Place { queue, key, .. } = &known.place;
                let fairness = &mut self.shares.fairness;
                let is_promotion = order.overdue.is_some();
                fairness.selected(queue, key, *jobs, is_promotion, &self.active, now);
            }
        }
    }

    /// The lanes of fair queues among those of the first class that has jobs, by the wait after which their jobs
    /// starve. If there are more than fit into one query, each call returns different ones.
    pub(in crate::worker) fn starving(&mut self, after: After) -> Vec<(Duration, Vec<ClaimOrder>)> {
        if !self.serves_fair() {
            return Vec::new();
        }
        // If there are lanes from which jobs may start, they decide which class is first.
        let class = |lane: &Known| lane.place.class;
        let first = self.active_lanes().map(class).min();
        let first = first.or_else(|| self.closed_lanes().map(class).min());
        let all = self.active_lanes().chain(self.closed_lanes());
        let of_first = all.filter(|lane| Some(class(lane)) == first);
        let mut waits: BTreeMap<Duration, Vec<&Known>> = BTreeMap::new();
        for known in of_first {
            let fair = self.shares.settings.get(&known.lane.queue);
            if let Some(wait) = fair.and_then(|fair| fair.starvation) {
                waits.entry(wait).or_default().push(known);
            }
        }
        let mut searched = HashMap::new();
        let mut orders = Vec::new();
        for (wait, mut lanes) in waits {
            rotate_after(&mut lanes, self.shares.starving_after.get(&wait).copied());
            lanes.truncate(LANES_PER_CLAIM);
            searched.extend(lanes.last().map(|lane| (wait, lane.lane.id)));
            let of_wait = lanes.into_iter().filter_map(|lane| lane.order(after));
            orders.push((wait, of_wait.collect()));
        }
        self.shares.starving_after = searched;
        orders
    }
}
