//! The lanes of one class that wait for a limit, in the order in which they open.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

use super::{Number, Waiter};

/// The lanes of one class that wait for a limit.
#[derive(Debug)]
pub(super) struct Waiting<L, S> {
    /// The lanes that go first, in the order in which they were closed.
    first: BTreeSet<(Number, L)>,
    /// The lanes of each member, in the order in which they were closed.
    members: HashMap<S, MemberLanes<L>>,
    /// The members by their usage, and among equals by their first closing.
    order: BTreeMap<(u64, Number), S>,
    /// The number of lanes in `first` and `members`.
    pub(super) len: usize,
    /// The lanes that are not known to have jobs, in the order in which they were closed.
    pub(super) idle: BTreeSet<(Number, L)>,
}

#[derive(Debug)]
pub(super) struct MemberLanes<L> {
    pub(super) had: u64,
    lanes: BTreeSet<(Number, L)>,
}

impl<L, S> Default for Waiting<L, S> {
    fn default() -> Self {
        Self {
            first: BTreeSet::new(),
            members: HashMap::new(),
            order: BTreeMap::new(),
            len: 0,
            idle: BTreeSet::new(),
        }
    }
}

impl<L: Copy + Ord, S: Clone + Eq + Hash> Waiting<L, S> {
    /// Adds a lane that is known to have jobs. `had`: the usage of its member.
    pub(super) fn join(&mut self, lane: L, waiter: &Waiter<S>, number: Number, had: u64) {
        self.len += 1;
        if waiter.goes_first {
            self.first.insert((number, lane));
            return;
        }
        self.change(&waiter.member, |member| {
            // If it has other lanes, the member keeps its position.
            if member.lanes.is_empty() {
                member.had = had;
            }
            member.lanes.insert((number, lane));
        });
    }

    pub(super) fn leave(&mut self, lane: L, waiter: &Waiter<S>, number: Number) {
        self.len -= 1;
        if waiter.goes_first {
            self.first.remove(&(number, lane));
            return;
        }
        self.change(&waiter.member, |member| {
            member.lanes.remove(&(number, lane));
        });
    }

    /// Changes the lanes of a member, or its usage, and with that its position.
    pub(super) fn change(&mut self, member: &S, change: impl FnOnce(&mut MemberLanes<L>)) {
        let mut lanes = self.members.remove(member).unwrap_or(MemberLanes {
            had: 0,
            lanes: BTreeSet::new(),
        });
        if let Some(key) = lanes.sort_key() {
            self.order.remove(&key);
        }
        change(&mut lanes);
        if let Some(key) = lanes.sort_key() {
            self.order.insert(key, member.clone());
            self.members.insert(member.clone(), lanes);
        }
    }

    /// Up to this many lanes, in order: those that go first, then the first lane of each member, then the second of
    /// each.
    pub(super) fn first(&self, lanes: usize) -> Vec<L> {
        let first = self.first.iter().map(|(_, lane)| *lane);
        let mut first: Vec<L> = first.take(lanes).collect();
        let members = self.order.values().take(lanes);
        let members: Vec<&MemberLanes<L>> = members.filter_map(|it| self.members.get(it)).collect();
        for nth in 0..lanes {
            let nth_lanes = members
                .iter()
                .filter_map(|member| member.lanes.iter().nth(nth));
            first.extend(nth_lanes.map(|(_, lane)| *lane));
        }
        first.truncate(lanes);
        first
    }
}

impl<L: Ord> MemberLanes<L> {
    /// `None` without lanes.
    fn sort_key(&self) -> Option<(u64, Number)> {
        let (number, _) = self.lanes.first()?;
        Some((self.had, *number))
    }
}
