//! Decides whose turn it is: the lanes with jobs share the claims of a worker.
//!
//! Within a class, the queues take turns. Within a queue, its keys take turns by deficit round robin, each according to
//! its share. Within a key, its lanes take turns. The code is pure: the caller passes in what was claimed.
//! (`docs/decisions/lanes-take-turns.md`)

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;

/// The maximum number of turns that a lane takes at once.
const BURST_MAX: usize = 8;

/// A job is cheap if it costs less than this.
const CHEAP: f64 = 0.01;

/// A claim ends once a lane of cheap jobs has taken this many of its turns. The cost of its jobs is an estimate; the
/// next claim has a newer one, from the jobs that have ended.
const CHEAP_TURNS_MAX: usize = 100;

/// If a claim is for at least twice as many jobs, and at least twice as many lanes have jobs, each lane takes several
/// turns at once: 500 jobs from 64 lanes cost Postgres much less than 500 jobs from 250 lanes, especially behind gates,
/// which are counted for each lane.
const SINGLE_TURNS_MAX: usize = 64;

/// The maximum credit that is lost to rounding.
const CREDIT_LOST: f64 = 1e-6;

/// A position in the order of claims: lanes of a later class wait until the earlier classes are empty.
pub type Class = [usize; 2];

/// The position at which a lane takes its turns.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Place {
    /// Its class.
    pub class: Class,
    /// Its queue.
    pub queue: Arc<str>,
    /// The lanes of one key share its turns. All lanes of a queue that is not fair have the same key.
    pub key: Arc<str>,
    /// The turns of the key in each round: its weight times the quantum of the queue, above zero.
    pub share: f64,
}

/// The share of a claim that a lane gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part<L> {
    /// The lane.
    pub lane: L,
    /// `None`: no other lane of its class has jobs, so it gets everything.
    pub max: Option<usize>,
}

/// The lanes that are known to have jobs. `L` is the id of a lane.
#[derive(Debug)]
pub struct Turns<L> {
    lanes: HashMap<L, Place>,
    /// The cost of a job of these lanes, in turns. Jobs of other lanes cost 1.
    costs: HashMap<L, f64>,
    classes: BTreeMap<Class, QueueRing<L>>,
}

impl<L> Default for Turns<L> {
    fn default() -> Self {
        Self {
            lanes: HashMap::new(),
            costs: HashMap::new(),
            classes: BTreeMap::new(),
        }
    }
}

impl<L: Copy + Eq + Hash> Turns<L> {
    /// Adds a lane, which may be there already.
    pub fn insert(&mut self, lane: L, place: Place) {
        if self.lanes.get(&lane) == Some(&place) {
            return;
        }
        self.remove(lane);
        let queues = self.classes.entry(place.class).or_default();
        let keys = queues.join(&place.queue, 1.0);
        let lanes = keys.join(&place.key, place.share);
        lanes.join(&lane, 1.0);
        self.lanes.insert(lane, place);
    }

    /// Removes a lane, which has no jobs. It keeps its remaining credit in this round, or is forgotten if it would have
    /// as much as a new lane.
    pub fn remove(&mut self, lane: L) {
        let Some(place) = self.lanes.remove(&lane) else {
            return;
        };
        self.costs.remove(&lane);
        let Some(queues) = self.classes.get_mut(&place.class) else {
            return;
        };
        if let Some(keys) = queues.child(&place.queue) {
            if let Some(lanes) = keys.child(&place.key) {
                lanes.leave(&lane);
                lanes.forget(&lane);
                if lanes.is_empty() {
                    keys.leave(&place.key);
                    keys.forget(&place.key);
                }
            }
            if keys.is_empty() {
                queues.leave(&place.queue);
            }
        }
    }

    /// Sets the number of turns that a job of a lane costs its key, from the next claim on. It always costs its queue
    /// one turn.
    pub fn set_cost(&mut self, lane: L, cost: f64) {
        if cost == 1.0 {
            self.costs.remove(&lane);
        } else if self.lanes.contains_key(&lane) {
            self.costs.insert(lane, cost);
        }
    }

    /// Removes all lanes.
    pub fn clear(&mut self) {
        let lanes: Vec<L> = self.lanes.keys().copied().collect();
        for lane in lanes {
            self.remove(lane);
        }
    }

    /// True if this lane is known to have jobs.
    pub fn contains(&self, lane: L) -> bool {
        self.lanes.contains_key(&lane)
    }

    /// The number of lanes.
    pub fn len(&self) -> usize {
        self.lanes.len()
    }

    /// True if no lane is known to have jobs.
    pub fn is_empty(&self) -> bool {
        self.lanes.is_empty()
    }

    /// The queues that have lanes of this class.
    pub fn queues(&self, class: Class) -> impl Iterator<Item = &Arc<str>> {
        let queues = self.classes.get(&class).into_iter();
        let members = queues.flat_map(|queues| &queues.members);
        members.filter_map(|(queue, member)| member.number.map(|_| queue))
    }

    /// The number of keys of a queue that have lanes of this class.
    pub fn keys(&self, class: Class, queue: &str) -> usize {
        self.of_queue(class, queue).map_or(0, Ring::len)
    }

    /// True if a key of a queue has lanes of this class.
    pub fn has_key(&self, class: Class, queue: &str, key: &str) -> bool {
        let member = self
            .of_queue(class, queue)
            .and_then(|keys| keys.members.get(key));
        member.is_some_and(|member| member.number.is_some())
    }

    /// True if a key of a queue has lanes, of any class.
    pub fn has_lanes(&self, queue: &str, key: &str) -> bool {
        let mut classes = self.classes.keys();
        classes.any(|class| self.has_key(*class, queue, key))
    }

    /// The credit of a key of a queue, in all classes.
    pub fn credit(&self, queue: &str, key: &str) -> f64 {
        let queues = self
            .classes
            .keys()
            .filter_map(|class| self.of_queue(*class, queue));
        let members = queues.filter_map(|keys| keys.members.get(key));
        members.map(|member| member.credit).sum()
    }

    /// The rounds of the keys of a queue, in all classes.
    pub fn rounds(&self, queue: &str) -> u64 {
        let queues = self
            .classes
            .keys()
            .filter_map(|class| self.of_queue(*class, queue));
        queues.map(|keys| keys.round - 1).sum()
    }

    fn of_queue(&self, class: Class, queue: &str) -> Option<&KeyRing<L>> {
        let queue = self.classes.get(&class)?.members.get(queue)?;
        Some(&queue.child)
    }

    /// The lanes, in any order.
    pub fn lanes(&self) -> impl Iterator<Item = L> {
        self.lanes.keys().copied()
    }

    /// Divides a claim of `wanted` jobs among the lanes of each class, the first class first: at most `room` lanes.
    /// This takes the turns; [`Self::settle`] gives back those that were not used.
    ///
    /// If there are at least twice `SINGLE_TURNS_MAX` lanes, each takes several turns of a large claim at once, and
    /// then waits for as many rounds. A claim ends early with the last turn that a lane of cheap jobs may take; the
    /// next one continues.
    pub fn divide(&mut self, wanted: usize, room: usize) -> Vec<Part<L>> {
        let burst = (wanted.min(self.lanes.len()) / SINGLE_TURNS_MAX).clamp(1, BURST_MAX);
        self.divide_by(burst, wanted, room)
    }

    /// Like [`Self::divide`], but for a claim of one job from each lane, and from at most `room` lanes.
    pub fn one_each(&mut self, room: usize) -> Vec<Part<L>> {
        let mut parts = self.divide_by(1, room.min(self.lanes.len()), room);
        for part in &mut parts {
            if let Some(max) = part.max.filter(|max| *max > 1) {
                self.settle(part.lane, max - 1, 0, 1.0);
                part.max = Some(1);
            }
        }
        parts
    }

    fn divide_by(&mut self, burst: usize, wanted: usize, room: usize) -> Vec<Part<L>> {
        let mut parts = Vec::new();
        for queues in self.classes.values_mut() {
            let room = room - parts.len();
            let mut indices: HashMap<L, usize> = HashMap::new();
            let of_class = parts.len();
            let mut left = wanted;
            while left > 0 {
                let Some(lane) = queues.next() else {
                    break;
                };
                if indices.len() == room && !indices.contains_key(&lane) {
                    pay(queues, lane, &self.lanes, -1.0, -1.0);
                    break;
                }
                let index = *indices.entry(lane).or_insert_with(|| {
                    let max = Some(0);
                    parts.push(Part { lane, max });
                    parts.len() - 1
                });
                let turns = burst.min(left);
                left -= turns;
                parts[index].max = parts[index].max.map(|max| max + turns);
                #[expect(clippy::cast_precision_loss, reason = "at most BURST_MAX")]
                let turns = turns as f64;
                let of_one = cost_of(&self.costs, lane);
                let cost = turns * of_one;
                pay(queues, lane, &self.lanes, turns - 1.0, cost - 1.0);
                if queues.is_single() {
                    // The turns of a lane that has them all need not be counted.
                    pay(queues, lane, &self.lanes, -turns, -cost);
                    parts[of_class].max = None;
                    break;
                }
                if of_one < CHEAP && parts[index].max >= Some(CHEAP_TURNS_MAX) {
                    break;
                }
            }
        }
        parts
    }

    /// The first class that has lanes.
    pub fn first_class(&self) -> Option<Class> {
        let mut classes = self.classes.iter();
        let first = classes.find(|(_, queues)| !queues.is_empty());
        first.map(|(class, _)| *class)
    }

    /// Lets a lane take a turn before it is due. [`Self::settle`] gives it back if it is not used.
    pub fn take(&mut self, lane: L) {
        self.settle(lane, 0, 1, cost_of(&self.costs, lane));
    }

    /// Limits the credit of a lane, its key and its queue to the turns of one round.
    pub fn forfeit(&mut self, lane: L) {
        let Some(place) = self.lanes.get(&lane) else {
            return;
        };
        let Some(queues) = self.classes.get_mut(&place.class) else {
            return;
        };
        queues.cap(&place.queue);
        if let Some(keys) = queues.child(&place.queue) {
            keys.cap(&place.key);
            if let Some(lanes) = keys.child(&place.key) {
                lanes.cap(&lane);
            }
        }
    }

    /// Charges a lane for `used` jobs of this cost after it has taken turns for `taken` jobs. A lane that has left is
    /// not charged.
    pub fn settle(&mut self, lane: L, taken: usize, used: usize, cost: f64) {
        #[expect(clippy::cast_precision_loss, reason = "both are sizes of claims")]
        let (taken, used) = (taken as f64, used as f64);
        let rest = used * cost - taken * cost_of(&self.costs, lane);
        if let Some(place) = self.lanes.get(&lane)
            && let Some(queues) = self.classes.get_mut(&place.class)
        {
            pay(queues, lane, &self.lanes, used - taken, rest);
        }
    }
}

fn cost_of<L: Eq + Hash>(costs: &HashMap<L, f64>, lane: L) -> f64 {
    costs.get(&lane).copied().unwrap_or(1.0)
}

/// Charges the queue of a lane for turns, and its key and the lane itself for their cost; negative values give turns
/// back.
fn pay<L: Copy + Eq + Hash>(
    queues: &mut QueueRing<L>,
    lane: L,
    lanes: &HashMap<L, Place>,
    turns: f64,
    cost: f64,
) {
    let Some(place) = lanes.get(&lane) else {
        return;
    };
    if turns != 0.0 {
        queues.pay(&place.queue, turns);
    }
    if cost != 0.0
        && let Some(keys) = queues.child(&place.queue)
    {
        keys.pay(&place.key, cost);
        if let Some(lanes) = keys.child(&place.key) {
            lanes.pay(&lane, cost);
        }
    }
}

type KeyRing<L> = Ring<Arc<str>, Ring<L, ()>>;
type QueueRing<L> = Ring<Arc<str>, KeyRing<L>>;

/// Members that take turns by deficit round robin. A member with credit pays 1 for its turn, and goes to the end. When
/// no member has any credit left, a round ends, and each member gets its share.
#[derive(Debug)]
struct Ring<K, C> {
    members: HashMap<K, Member<C>>,
    /// The members that have credit for a turn, in order.
    with_credit: BTreeMap<i64, K>,
    without: BTreeMap<i64, K>,
    /// The lowest and the highest number given so far.
    first: i64,
    last: i64,
    round: u64,
}

#[derive(Debug)]
struct Member<C> {
    child: C,
    share: f64,
    credit: f64,
    /// The last round in which it got its share.
    round: u64,
    /// Its number in one of the two orders. `None` if it has left.
    number: Option<i64>,
}

impl<K, C> Default for Ring<K, C> {
    fn default() -> Self {
        Self {
            members: HashMap::new(),
            with_credit: BTreeMap::new(),
            without: BTreeMap::new(),
            first: 0,
            last: 0,
            round: 1,
        }
    }
}

/// Something that takes the turn of a member.
trait Taker<K> {
    type Lane;

    fn take(&mut self, key: &K) -> Option<Self::Lane>;
    /// True if it can only give the turn to one lane.
    fn has_no_choice(&self) -> bool;
    /// True if it remembers nothing.
    fn is_blank(&self) -> bool;
}

impl<L: Copy> Taker<L> for () {
    type Lane = L;

    fn take(&mut self, lane: &L) -> Option<L> {
        Some(*lane)
    }

    fn has_no_choice(&self) -> bool {
        true
    }

    fn is_blank(&self) -> bool {
        true
    }
}

impl<K: Clone + Eq + Hash, C: Taker<K> + Default> Taker<Arc<str>> for Ring<K, C> {
    type Lane = C::Lane;

    fn take(&mut self, _: &Arc<str>) -> Option<C::Lane> {
        self.next()
    }

    fn has_no_choice(&self) -> bool {
        self.is_single()
    }

    fn is_blank(&self) -> bool {
        self.members.is_empty()
    }
}

impl<K: Clone + Eq + Hash, C: Taker<K> + Default> Ring<K, C> {
    /// Adds a member with a share above zero, or changes its share. A member that returns within the same round has the
    /// credit that it left with; others get their share at once, and go first.
    fn join(&mut self, key: &K, share: f64) -> &mut C {
        let round = self.round;
        let member = self.members.entry(key.clone()).or_insert_with(|| Member {
            child: C::default(),
            share,
            credit: 0.0,
            round: 0,
            number: None,
        });
        member.share = share;
        if member.number.is_none() {
            if member.round < round {
                // The rounds that it has missed pay off its debt.
                #[expect(clippy::cast_precision_loss, reason = "a number of rounds")]
                let missed = (round - member.round) as f64;
                member.credit = (member.credit.min(0.0) + share * missed).min(share);
                member.round = round;
            }
            if member.credit >= 1.0 {
                self.first -= 1;
                member.number = Some(self.first);
                self.with_credit.insert(self.first, key.clone());
            } else {
                self.last += 1;
                member.number = Some(self.last);
                self.without.insert(self.last, key.clone());
            }
        }
        &mut member.child
    }

    /// Removes a member. Its unused credit from earlier rounds is forfeited.
    fn leave(&mut self, key: &K) {
        let Some(member) = self.members.get_mut(key) else {
            return;
        };
        if let Some(number) = member.number.take() {
            self.with_credit.remove(&number);
            self.without.remove(&number);
            self.cap(key);
        }
    }

    /// Forgets a member that has left, if it would have the same credit as a new one. Otherwise, members that are
    /// always alone, so that no round ends, would be remembered forever.
    fn forget(&mut self, key: &K) {
        let is_like_new = |member: &Member<C>| {
            member.number.is_none()
                && (member.credit - member.share).abs() < CREDIT_LOST
                && member.child.is_blank()
        };
        if self.members.get(key).is_some_and(is_like_new) {
            self.members.remove(key);
        }
    }

    /// Limits the credit of a member to that of one round.
    fn cap(&mut self, key: &K) {
        if let Some(member) = self.members.get_mut(key) {
            member.credit = member.credit.min(member.share.max(1.0));
        }
    }

    fn child(&mut self, key: &K) -> Option<&mut C> {
        self.members.get_mut(key).map(|member| &mut member.child)
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.with_credit.len() + self.without.len()
    }

    /// True if only one lane takes turns.
    fn is_single(&self) -> bool {
        let mut keys = self.with_credit.values().chain(self.without.values());
        let first = keys.next().filter(|_| keys.next().is_none());
        let first = first.and_then(|key| self.members.get(key));
        first.is_some_and(|member| member.child.has_no_choice())
    }

    /// Takes the next turn. Its member pays 1, and goes to the end of its order.
    fn next(&mut self) -> Option<C::Lane> {
        if self.with_credit.is_empty() {
            self.start_round();
        }
        let (_, key) = self.with_credit.pop_first()?;
        let member = self.members.get_mut(&key)?;
        let lane = member.child.take(&key);
        member.credit -= 1.0;
        self.last += 1;
        member.number = Some(self.last);
        let order = match member.credit >= 1.0 {
            true => &mut self.with_credit,
            false => &mut self.without,
        };
        order.insert(self.last, key);
        lane
    }

    /// Charges a member; a negative cost gives turns back. A member that pays goes to the end of its order, one that
    /// gets turns back to the start.
    fn pay(&mut self, key: &K, cost: f64) {
        let Some(member) = self.members.get_mut(key) else {
            return;
        };
        member.credit -= cost;
        let Some(before) = member.number else {
            return;
        };
        let number = match cost > 0.0 {
            true => {
                self.last += 1;
                self.last
            }
            false => {
                self.first -= 1;
                self.first
            }
        };
        member.number = Some(number);
        let has_credit = member.credit >= 1.0;
        self.with_credit.remove(&before);
        self.without.remove(&before);
        let order = match has_credit {
            true => &mut self.with_credit,
            false => &mut self.without,
        };
        order.insert(number, key.clone());
    }

    /// Gives each member its share, as often as it takes until one has credit for a turn.
    fn start_round(&mut self) {
        let missing = self
            .without
            .values()
            .filter_map(|key| self.members.get(key));
        let rounds = missing.map(|member| ((1.0 - member.credit) / member.share).ceil());
        let Some(rounds) = rounds.min_by(f64::total_cmp) else {
            return;
        };
        let rounds = rounds.max(1.0);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "at least 1"
        )]
        let passed = rounds as u64;
        self.round += passed;
        let round = self.round;
        // A member that left before the last round keeps nothing, except a debt that it has not paid yet.
        if self.members.len() > self.len() {
            self.members.retain(|_, member| {
                #[expect(clippy::cast_precision_loss, reason = "a number of rounds")]
                let missed = (round - member.round) as f64;
                member.number.is_some()
                    || member.round + passed >= round
                    || member.credit + member.share * missed < 0.0
            });
        }
        // Usually, all members get credit, and nothing is allocated.
        let mut still = Vec::new();
        while let Some((number, key)) = self.without.pop_first() {
            let Some(member) = self.members.get_mut(&key) else {
                continue;
            };
            member.round = round;
            member.credit += member.share * rounds;
            // A member that was due lacks at most what is lost to rounding.
            if member.credit > 1.0 - CREDIT_LOST {
                member.credit = member.credit.max(1.0);
            }
            if member.credit >= 1.0 {
                self.with_credit.insert(number, key);
            } else {
                still.push((number, key));
            }
        }
        self.without.extend(still);
    }
}

#[cfg(test)]
mod tests;
