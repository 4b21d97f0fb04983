//! The lanes of each claim, in order.

use std::collections::{HashMap, HashSet};

use super::{After, Known, LANES_PER_CLAIM, Lanes};
use crate::job::LaneId;
use crate::sandbox::BootTime;
use crate::store::{ClaimOrder, ClaimedJob, ClosedLane, OverdueFilter};
use crate::worker::turns::{Class, Part};

/// Sorts lanes by id, and rotates them so that the one that follows `after` goes first.
pub(super) fn rotate_after(lanes: &mut Vec<&Known>, after: Option<LaneId>) {
    lanes.sort_unstable_by_key(|lane| lane.lane.id);
    let next = lanes.partition_point(|lane| Some(lane.lane.id) <= after);
    lanes.rotate_left(next);
}

/// The number of lanes without known jobs that a claim reads ahead of lanes with jobs. They take turns. This finds new
/// jobs before the next sweep does.
pub(super) const PROBES_PER_CLAIM: usize = 32;

/// The reasons why lanes may have more jobs after a claim. All are false if the claim was filled: then the next one
/// follows anyway.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::worker) struct MayHaveMore {
    /// A lane has used up its share.
    pub(in crate::worker) used_up: bool,
    /// Lanes were opened, because another lane behind their limit had free capacity or no more jobs.
    pub(in crate::worker) opened: bool,
}

impl Lanes {
    /// The lanes for the next claim of `wanted` jobs, in order. Classes go one after the other. Within a class, lanes
    /// that may have new jobs go first, and those that are known to have jobs share the claim.
    pub(in crate::worker) fn orders(&mut self, after: After, wanted: usize) -> Vec<ClaimOrder> {
        let parts = self.active.divide(wanted, LANES_PER_CLAIM);
        self.orders_for_parts(parts, after)
    }

    /// The lanes for the next claim after one that has taken no job: as many as fit, for one job each. If each claim
    /// covered only as many lanes as the number of wanted jobs, it would take a long time to get past a large number of
    /// lanes that are closed, or whose jobs are locked.
    pub(in crate::worker) fn orders_of_many(&mut self, after: After) -> Vec<ClaimOrder> {
        let parts = self.active.one_each(LANES_PER_CLAIM);
        self.orders_for_parts(parts, after)
    }

    fn orders_for_parts(&mut self, parts: Vec<Part>, after: After) -> Vec<ClaimOrder> {
        let first = parts.first().and_then(|part| self.class_of(part.lane));
        if let Some(first) = first {
            self.count_deferred(first, &parts);
        }
        let mut orders: Vec<(Class, u8, ClaimOrder)> = Vec::with_capacity(parts.len());
        for Part { lane, max } in parts {
            if let Some(order) = self.known.get(&lane).and_then(|known| known.order(after)) {
                orders.push((
                    self.known[&lane].place.class,
                    1,
                    ClaimOrder { max, ..order },
                ));
            }
        }
        if self.fit_one_claim() {
            self.add_idle(after, first, &mut orders);
            // Stable: the lanes of a class keep their order.
            orders.sort_by_key(|(class, rank, _)| (*class, *rank));
        }
        orders.into_iter().map(|(_, _, order)| order).collect()
    }

    /// A claim of one job from each of at most `room` lanes that had none until a moment ago. The lanes use their turns
    /// for it.
    pub(in crate::worker) fn first_orders(&mut self, room: usize) -> Vec<ClaimOrder> {
        let woken: Vec<LaneId> = self.woken().take(room).collect();
        let mut orders = Vec::new();
        for lane in woken {
            if let Some(order) = self.known[&lane].order(After::Recent) {
                self.active.take(lane);
                orders.push(ClaimOrder {
                    max: Some(1),
                    ..order
                });
            }
        }
        orders
    }

    /// Adds the lanes without known jobs. Those of classes before the `first` class that has jobs precede it anyway;
    /// some of the same class take turns doing so, for one job each.
    fn add_idle(
        &mut self,
        after: After,
        first: Option<Class>,
        orders: &mut Vec<(Class, u8, ClaimOrder)>,
    ) {
        let idle = self
            .served()
            .filter(|known| !self.active.contains(known.lane.id) && !self.is_closed(known.lane.id));
        let mut idle: Vec<&Known> = idle.collect();
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
            let max = is_probe.then_some(1);
            let rank = if is_probe { 0 } else { 2 };
            orders.push((
                known.class(self.queue_order),
                rank,
                ClaimOrder { max, ..order },
            ));
        }
        if let Some(last) = probes.last() {
            self.probed = Some(*last);
        }
    }

    /// Restricts a claim to the first class of which several lanes share the claim, and the classes before it: if one
    /// of these lanes has fewer jobs than its share, the others may have more, ahead of those of later classes. True if
    /// lanes that are known to have jobs are not in this claim.
    pub(in crate::worker) fn leave_later_classes(&mut self, orders: &mut Vec<ClaimOrder>) -> bool {
        let shares = |order: &&ClaimOrder| {
            order.overdue.is_none() && order.max.is_some() && self.active.contains(order.lane)
        };
        // Overdue jobs go ahead of the classes.
        let is_overdue = orders.iter().any(|order| order.overdue.is_some());
        let Some(first) = orders.iter().find(shares).filter(|_| !is_overdue) else {
            return false;
        };
        let first = self.class_of(first.lane);
        let later = orders.extract_if(.., |order| self.class_of(order.lane) > first);
        let later: Vec<ClaimOrder> = later.collect();
        self.give_up_turns(&later);
        self.are_only_some(orders)
    }

    /// True if lanes that are known to have jobs are not in this claim.
    pub(in crate::worker) fn are_only_some(&self, orders: &[ClaimOrder]) -> bool {
        let with_jobs = orders
            .iter()
            .filter(|order| self.active.contains(order.lane));
        with_jobs.count() < self.active.len()
    }

    /// Gives back the turns of lanes from which nothing was claimed. They go first again, in the same order.
    pub(in crate::worker) fn not_claimed(&mut self, orders: &[ClaimOrder]) {
        for order in orders.iter().rev() {
            self.active
                .settle(order.lane, order.max.unwrap_or(0), 0, 1.0);
        }
    }

    /// Gives back the turns of classes that a claim skips, or of a claim that was not made, has failed, or claimed
    /// nothing because there were orphans. At most the turns of one round are given back: otherwise, a lane that is
    /// skipped again and again would collect turns, and lanes that come later would wait for them.
    pub(in crate::worker) fn give_up_turns(&mut self, orders: &[ClaimOrder]) {
        self.not_claimed(orders);
        for order in orders {
            self.active.forfeit(order.lane);
        }
    }

    /// Gives back the turns that a claim gave to lanes that are paused on this worker.
    pub(in crate::worker) fn leave_out(&mut self, orders: &[ClaimOrder]) {
        self.give_up_turns(orders);
        for order in orders {
            self.woken.remove(&order.lane);
        }
    }

    /// Updates cursors, active lanes and their turns after a claim from these lanes. `is_filled`: it returned as many
    /// jobs as were wanted, or ended because of its size. `closed`: lanes from which no job may start now.
    pub(in crate::worker) fn claimed(
        &mut self,
        orders: &[ClaimOrder],
        jobs: &[ClaimedJob],
        closed: &[ClosedLane],
        is_filled: bool,
    ) -> MayHaveMore {
        self.claimed_at(orders, jobs, closed, is_filled, BootTime::now())
    }

    /// The same for a claim whose response arrives at this time.
    pub(super) fn claimed_at(
        &mut self,
        orders: &[ClaimOrder],
        jobs: &[ClaimedJob],
        closed: &[ClosedLane],
        is_filled: bool,
        now: BootTime,
    ) -> MayHaveMore {
        let mut claimed: HashMap<LaneId, usize> = HashMap::new();
        for job in jobs {
            self.advance(job.lane, job.turn);
            *claimed.entry(job.lane).or_default() += 1;
        }
        let mut with_jobs: HashSet<LaneId> = HashSet::new();
        if !closed.is_empty() {
            with_jobs.extend(closed.iter().map(|closed| closed.lane));
            with_jobs.retain(|id| self.active.contains(*id) || claimed.contains_key(id));
        }
        self.count_selected(orders, &claimed);
        self.count_behind_limits(&claimed);
        let has_jobs = |order: &ClaimOrder| claimed.contains_key(&order.lane);
        let last = orders.iter().rposition(has_jobs);
        let mut is_any_used_up = false;
        let mut emptied = Vec::new();
        for (position, order) in orders.iter().enumerate() {
            let jobs = claimed.get(&order.lane).copied().unwrap_or(0);
            if order.overdue.is_some() || order.max.is_some() {
                // Overdue jobs, and those that a probe finds, take their turns in advance.
                let is_in_turn = order.overdue.is_none() && self.active.contains(order.lane);
                let taken = order.max.filter(|_| is_in_turn).unwrap_or(0);
                if jobs > 0 && order.overdue.is_none() {
                    self.activate(order.lane);
                }
                let cost = self.known.get(&order.lane).map_or(1.0, |known| known.cost);
                self.active.settle(order.lane, taken, jobs, cost);
            }
            self.divide_by_cost(order.lane);
            // A claim that was filled has not read the lanes after the last one that had jobs, and not all of that one.
            if order.overdue.is_some() || is_filled && Some(position) > last {
                continue;
            }
            let is_used_up = order.max.is_some_and(|max| jobs >= max);
            let was_read = !is_filled || Some(position) < last;
            is_any_used_up |= is_used_up;
            // An idle lane does not show anything about the other lanes behind its limits.
            if jobs == 0 && self.active.contains(order.lane) {
                emptied.push(order.lane);
            }
            if jobs == 0 || order.max.is_some() && !is_used_up && was_read {
                self.active.remove(order.lane);
                self.woken.remove(&order.lane);
            } else {
                self.activate(order.lane);
            }
        }
        self.forfeit_turns(orders, &claimed);
        // The database counts all ready jobs of a lane. If only the overdue ones are claimed, room may be left.
        let has_filter = orders.iter().any(|order| order.overdue.is_some());
        let used_up = match has_filter {
            true => HashSet::new(),
            false => self.used_up_limits(closed),
        };
        let mut is_any_opened = self.note_closed(closed, &claimed, &with_jobs, &used_up, now);
        for lane in claimed.keys().chain(&emptied) {
            if !self.is_closed(*lane) {
                is_any_opened |= self.open_others(*lane, &used_up);
            }
        }
        MayHaveMore {
            used_up: is_any_used_up && !is_filled,
            opened: is_any_opened && !is_filled,
        }
    }

    /// Gives back the turns of classes from which a claim has taken nothing. They keep no turns from the rounds that
    /// have passed: otherwise, lanes that arrive later would wait for them.
    fn forfeit_turns(&mut self, orders: &[ClaimOrder], claimed: &HashMap<LaneId, usize>) {
        let class = |id: &LaneId| self.known.get(id).map(|known| known.place.class);
        let served: HashSet<_> = claimed.keys().map(class).collect();
        let unserved = orders.iter().filter(|order| order.max.is_some());
        let unserved: Vec<LaneId> = unserved
            .map(|order| order.lane)
            .filter(|id| !served.contains(&class(id)))
            .collect();
        for id in unserved {
            self.active.forfeit(id);
        }
    }

    /// The lanes that are known to have jobs that may start.
    pub(super) fn active_lanes(&self) -> impl Iterator<Item = &Known> {
        self.active.lanes().filter_map(|id| self.known.get(&id))
    }

    /// The lanes that are known to have jobs, of which none may start now.
    pub(super) fn closed_lanes(&self) -> impl Iterator<Item = &Known> {
        let closed = self.gates.closed_lanes();
        closed.filter_map(|id| self.known.get(&id))
    }

    /// Lanes that are known to have jobs, of a later class than the first one that has any: among those whose jobs may
    /// start, and among the closed ones. If there are more than fit into one claim, each call returns different ones.
    pub(in crate::worker) fn behind(&mut self, after: After) -> Vec<ClaimOrder> {
        let class = |lane: &Known| lane.class(self.queue_order);
        let first = self.active_lanes().map(class).min();
        let active = self.active_lanes().filter(|it| Some(class(it)) > first);
        let first = self.closed_lanes().map(class).min();
        let closed = self.closed_lanes().filter(|it| Some(class(it)) > first);
        let mut later: Vec<&Known> = active.chain(closed).collect();
        rotate_after(&mut later, self.behind_after);
        later.truncate(LANES_PER_CLAIM);
        let last = later.last().map(|lane| lane.lane.id);
        let orders = later.into_iter().filter_map(|lane| lane.order(after));
        let orders = orders.collect();
        self.behind_after = last;
        orders
    }

    /// The claim orders for overdue jobs, which go ahead of other jobs of their tier. Only the overdue jobs of the
    /// first tier that has any are included, after the lanes of earlier tiers.
    pub(in crate::worker) fn promoted(
        &mut self,
        overdue: &[(LaneId, OverdueFilter)],
        wanted: usize,
    ) -> Vec<ClaimOrder> {
        let tier = |lanes: &Self, id: &LaneId| Some(lanes.known.get(id)?.tier(lanes.queue_order));
        // Other lanes do not wait for closed ones.
        let open = overdue.iter().filter(|(id, _)| !self.is_closed(*id));
        let open: Vec<&(LaneId, OverdueFilter)> = open.collect();
        let Some(first) = open.iter().filter_map(|(id, _)| tier(self, id)).min() else {
            return Vec::new();
        };
        let mut orders = match first {
            0 => Vec::new(),
            _ => self.orders(After::Recent, wanted),
        };
        let later = orders.extract_if(.., |order| tier(self, &order.lane) >= Some(first));
        let later: Vec<ClaimOrder> = later.collect();
        self.give_up_turns(&later);
        let of_tier = open.iter().filter(|(id, _)| tier(self, id) == Some(first));
        orders.extend(of_tier.filter_map(|(id, filter)| {
            let order = self.known.get(id)?.order(After::Recent)?;
            let overdue = Some(*filter);
            Some(ClaimOrder { overdue, ..order })
        }));
        orders
    }

    /// The lanes that are known to have jobs, in the order of claims.
    pub(in crate::worker) fn with_jobs(&self) -> Vec<ClaimOrder> {
        self.filtered(|lane| self.active.contains(lane))
    }

    /// All lanes that are served as a whole, in the order of claims.
    pub(in crate::worker) fn all(&self) -> Vec<ClaimOrder> {
        self.filtered(|_| true)
    }

    /// All lanes that are served as a whole and not known to have jobs, in the order of claims.
    pub(in crate::worker) fn idle(&self) -> Vec<ClaimOrder> {
        self.filtered(|lane| !self.active.contains(lane))
    }

    fn filtered(&self, wanted: impl Fn(LaneId) -> bool) -> Vec<ClaimOrder> {
        let mut lanes: Vec<&Known> = self
            .served()
            .filter(|known| wanted(known.lane.id))
            .collect();
        lanes.sort_unstable_by_key(|lane| lane.sort_key(self.queue_order));
        let orders = lanes
            .into_iter()
            .filter_map(|lane| lane.order(After::Recent));
        orders.collect()
    }

    /// Moves the cursor of a lane forward to a claimed turn.
    pub(super) fn advance(&mut self, lane: LaneId, turn: i64) {
        if let Some(known) = self.known.get_mut(&lane) {
            known.cursor = known.cursor.max(turn);
            known.reached = known.reached.max(turn);
        }
    }
}
