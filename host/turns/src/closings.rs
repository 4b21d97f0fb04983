//! Lanes in which gates do not let any job start for now, and the order in which they open again.
//!
//! Behind a limit on running jobs or on starts, lanes open in order of how much of the limit they, or their keys, have
//! used in relation to their shares (start-time fair queueing). The rounds of [`Turns`](crate::Turns) would not work
//! here: the limit often has room for a single job, and the rounds end before any lane has used up its credit. The
//! lanes of one key share its position. (`docs/decisions/closed-lanes-open-by-share.md`)

mod sharing;
mod waiting;

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::Hash;

use self::sharing::Sharing;
use self::waiting::Waiting;
use crate::Class;

/// The number of lanes of each class behind a limit that are opened when one of its jobs has ended, or may start: the
/// first ones may have become empty.
const OPENED_FIRST: usize = 2;
/// The number of lanes of each class behind a limit that are opened when a claim from one of them has found room, or no
/// more jobs; and the number of lanes without known jobs that are opened in addition to others.
const OPENED_MAX: usize = 8;
/// The number of lanes that a sweep opens, at least one of each class behind a limit. A claim is limited to this number
/// of lanes, and claims behind the same gate wait for each other. The next sweep continues with the next limit.
const OPENED_BY_SWEEP: usize = 256;

/// The closed lanes of a worker. `L` is the id of a lane, `K` a limit, `S` a member that shares limits with others, `T`
/// a time.
#[derive(Debug)]
pub struct Closings<L, K, S, T> {
    closed: HashMap<L, Closed<K, S, T>>,
    /// Closed lanes that wait for a limit, by class.
    waiting: BTreeMap<K, BTreeMap<Class, Waiting<L, S>>>,
    /// The number of these that wait for the end of a job, and are known to have jobs.
    for_ends: usize,
    /// Closed lanes that open at a given time.
    opening: BTreeMap<T, BTreeSet<(Number, L)>>,
    /// The limits that let the next job start at a given time, by time, whether or not a lane waits for that.
    starts: BTreeSet<(T, K)>,
    /// The same times, by limit.
    starts_at: HashMap<K, T>,
    /// The usage of each limit by its members.
    shared: HashMap<K, Sharing<S>>,
    /// The last limit whose lanes a sweep has opened.
    swept: Option<K>,
    /// The number of closings so far.
    closings: u64,
}

/// The sequence number of a closing.
type Number = u64;

/// The event or time at which a closed lane opens.
#[derive(Debug)]
enum Until<K, S, T> {
    /// A job of one of these limits has ended.
    End(Vec<K>, Waiter<S>),
    /// This limit lets a job start.
    Start(K, Waiter<S>),
    Time(T),
}

/// How a lane waits for a limit.
#[derive(Debug)]
struct Waiter<S> {
    class: Class,
    member: S,
    /// True if it goes ahead of the others of its class.
    goes_first: bool,
}

#[derive(Debug)]
struct Closed<K, S, T> {
    until: Until<K, S, T>,
    number: Number,
    /// True if it is known to have jobs.
    has_jobs: bool,
}

impl<L, K, S, T> Default for Closings<L, K, S, T> {
    fn default() -> Self {
        Self {
            closed: HashMap::new(),
            waiting: BTreeMap::new(),
            for_ends: 0,
            opening: BTreeMap::new(),
            starts: BTreeSet::new(),
            starts_at: HashMap::new(),
            shared: HashMap::new(),
            swept: None,
            closings: 0,
        }
    }
}

impl<L, K, S, T> Closings<L, K, S, T>
where
    L: Copy + Ord + Hash,
    K: Clone + Ord + Hash,
    S: Clone + Eq + Hash,
    T: Copy + Ord,
{
    /// True if no lane is closed.
    pub fn is_empty(&self) -> bool {
        self.closed.is_empty()
    }

    /// True if no job of this lane may start now.
    pub fn is_closed(&self, lane: L) -> bool {
        self.closed.contains_key(&lane)
    }

    /// The closed lanes that are known to have jobs, in any order.
    pub fn with_jobs(&self) -> impl Iterator<Item = L> {
        let closed = self.closed.iter().filter(|(_, closed)| closed.has_jobs);
        closed.map(|(lane, _)| *lane)
    }

    /// The number of lanes that wait for this limit, and are known to have jobs.
    pub fn waiting(&self, limit: &K) -> usize {
        let classes = self.waiting.get(limit).into_iter().flatten();
        classes.map(|(_, of_class)| of_class.len).sum()
    }

    /// The usage of a limit by a member: the member with less usage goes first.
    pub fn had(&self, limit: &K, member: &S) -> u64 {
        self.shared
            .get(limit)
            .map_or(0, |shared| shared.had(member))
    }

    /// Counts a member's usage of these limits: `turns` is the number of jobs, times the cost of a job, divided by the
    /// member's share. Called before the lanes of the claim are closed. The member's lanes that already wait move back
    /// with it.
    pub fn take<'a>(&mut self, limits: impl IntoIterator<Item = &'a K>, member: &S, turns: f64)
    where
        K: 'a,
    {
        for limit in limits {
            let shared = self.shared.entry(limit.clone()).or_default();
            shared.take(member, turns);
            let had = shared.had(member);
            let classes = self.waiting.get_mut(limit).into_iter();
            for of_class in classes.flat_map(BTreeMap::values_mut) {
                of_class.change(member, |lanes| lanes.had = had);
            }
        }
    }

    /// Forgets the usage of limits by members that are no longer behind them. `members`: all members with the limits
    /// that they are behind. The caller calls this after it has removed lanes, so there are never more counts than
    /// lanes that were known at one time.
    pub fn keep_members<'a>(&mut self, members: impl IntoIterator<Item = (&'a K, S)>)
    where
        K: 'a,
    {
        let before = std::mem::take(&mut self.shared);
        for (limit, member) in members {
            if let Some(old) = before.get(limit)
                && let Some(had) = old.had.get(&member)
            {
                let kept = self.shared.entry(limit.clone()).or_default();
                kept.clock = old.clock;
                kept.had.insert(member, *had);
            }
        }
    }

    /// The number of limits that members have used.
    pub fn shared_limits(&self) -> usize {
        self.shared.len()
    }

    /// Closes a lane until a job of one of these limits, which have no room for it, has ended. Without a limit, it
    /// stays open. `has_jobs`: it is known to have some.
    pub fn close_until_end(
        &mut self,
        lane: L,
        class: Class,
        limits: &[K],
        member: &S,
        has_jobs: bool,
    ) {
        self.open(lane);
        if limits.is_empty() {
            return;
        }
        let waiter = Waiter {
            class,
            member: member.clone(),
            goes_first: false,
        };
        let until = Until::End(limits.to_vec(), waiter);
        self.close(lane, until, has_jobs);
    }

    /// Closes a lane until `at`, the time at which this limit lets a job start. The lanes that wait for the limit open
    /// in order, regardless of how long each was to wait when it was closed. If several limits let jobs start at given
    /// times, `limit` is the last one.
    pub fn close_until_start(
        &mut self,
        lane: L,
        class: Class,
        limit: &K,
        at: T,
        member: &S,
        has_jobs: bool,
    ) {
        self.open(lane);
        let waiter = Waiter {
            class,
            member: member.clone(),
            goes_first: false,
        };
        let until = Until::Start(limit.clone(), waiter);
        self.close(lane, until, has_jobs);
        self.note_start(limit, at);
    }

    /// Notes that this limit lets no job start before `at`. Lanes behind it that wait for another limit then need no
    /// claim that finds them closed: see [`Self::move_closed`].
    pub fn note_start(&mut self, limit: &K, at: T) {
        // The last claim is the most accurate.
        if let Some(before) = self.starts_at.insert(limit.clone(), at) {
            self.starts.remove(&(before, limit.clone()));
        }
        self.starts.insert((at, limit.clone()));
    }

    /// Closes a lane until this time.
    pub fn close_until(&mut self, lane: L, at: T, has_jobs: bool) {
        self.open(lane);
        self.close(lane, Until::Time(at), has_jobs);
    }

    fn close(&mut self, lane: L, until: Until<K, S, T>, has_jobs: bool) {
        self.closings += 1;
        let closed = Closed {
            until,
            number: self.closings,
            has_jobs,
        };
        self.insert(lane, closed);
    }

    fn insert(&mut self, lane: L, closed: Closed<K, S, T>) {
        let Closed {
            number, has_jobs, ..
        } = closed;
        match &closed.until {
            Until::End(limits, waiter) => {
                for limit in limits {
                    self.wait(lane, limit, waiter, number, has_jobs);
                }
                self.for_ends += usize::from(has_jobs);
            }
            Until::Start(limit, waiter) => self.wait(lane, limit, waiter, number, has_jobs),
            Until::Time(at) => {
                self.opening.entry(*at).or_default().insert((number, lane));
            }
        }
        self.closed.insert(lane, closed);
    }

    /// Notes that a lane waits for this limit.
    fn wait(&mut self, lane: L, limit: &K, waiter: &Waiter<S>, number: Number, has_jobs: bool) {
        let had = self.had(limit, &waiter.member);
        let waiting = self.waiting.entry(limit.clone()).or_default();
        let of_class = waiting.entry(waiter.class).or_default();
        match has_jobs {
            true => of_class.join(lane, waiter, number, had),
            false => _ = of_class.idle.insert((number, lane)),
        }
    }

    /// Notes that a job in this lane was announced or found. If the lane waits for a limit, it opens in its turn. False
    /// if it is not closed.
    pub fn note_jobs(&mut self, lane: L) -> bool {
        let closed = self.closed.get(&lane);
        if closed.is_some_and(|closed| !closed.has_jobs)
            && let Some(mut closed) = self.remove(lane)
        {
            closed.has_jobs = true;
            self.insert(lane, closed);
        }
        self.closed.contains_key(&lane)
    }

    /// A lane that waits for this limit may also be behind others that are known to keep it closed. Moves such lanes to
    /// the lists of those limits, until none of them would open next: a claim could only find them closed. `full`:
    /// limits that have no room now. Limits that let the next job start at a given time have no room before it.
    /// `behind`: all limits of a lane. A lane keeps its position among equals, and whether it goes first.
    pub fn move_closed(&mut self, limit: &K, full: &[K], behind: impl Fn(L) -> Vec<K>) {
        if self.starts_at.contains_key(limit) {
            return;
        }
        loop {
            let mut has_moved = false;
            for lane in self.first_of(limit, OPENED_MAX) {
                let mut others = behind(lane);
                // Each lane that moves leaves the list, so the loop ends.
                others.retain(|other| other != limit);
                has_moved |= self.move_to(lane, others, full);
            }
            if !has_moved {
                return;
            }
        }
    }

    /// Moves a lane to those of its limits that are full, or else to the limit that lets the next job start last. False
    /// if neither is known for any of them.
    fn move_to(&mut self, lane: L, limits: Vec<K>, full: &[K]) -> bool {
        let of_full = limits.iter().filter(|limit| full.contains(limit));
        let of_full: Vec<K> = of_full.cloned().collect();
        let starts = limits
            .into_iter()
            .filter_map(|limit| Some((*self.starts_at.get(&limit)?, limit)));
        let last = starts.max().map(|(_, limit)| limit);
        if of_full.is_empty() && last.is_none() {
            return false;
        }
        let Some(mut closed) = self.remove(lane) else {
            return false;
        };
        closed.until = match (closed.until, last) {
            (Until::Time(at), _) => Until::Time(at),
            (Until::End(_, waiter) | Until::Start(_, waiter), Some(rate)) if of_full.is_empty() => {
                Until::Start(rate, waiter)
            }
            (Until::End(_, waiter) | Until::Start(_, waiter), _) => Until::End(of_full, waiter),
        };
        self.insert(lane, closed);
        true
    }

    /// Lets a lane that waits for a limit go ahead of the others of its class: it has overdue jobs. Several such lanes
    /// take turns, in the order in which they were closed.
    pub fn go_first(&mut self, lane: L) {
        let closed = self.closed.get(&lane);
        if closed.is_none_or(|closed| matches!(closed.until, Until::Time(_))) {
            return;
        }
        // The time at which its limit lets a job start is kept.
        let Some(mut closed) = self.remove(lane) else {
            return;
        };
        if let Until::End(_, waiter) | Until::Start(_, waiter) = &mut closed.until {
            waiter.goes_first = true;
        }
        closed.has_jobs = true;
        self.insert(lane, closed);
    }

    /// Opens a lane. False if it was open.
    pub fn open(&mut self, lane: L) -> bool {
        self.remove(lane).is_some()
    }

    fn remove(&mut self, lane: L) -> Option<Closed<K, S, T>> {
        let closed = self.closed.remove(&lane)?;
        let Closed {
            number, has_jobs, ..
        } = closed;
        match &closed.until {
            Until::Time(at) => {
                if let Some(opening) = self.opening.get_mut(at) {
                    opening.remove(&(number, lane));
                    if opening.is_empty() {
                        self.opening.remove(at);
                    }
                }
            }
            Until::End(limits, waiter) => {
                self.for_ends -= usize::from(has_jobs);
                for limit in limits {
                    self.leave(lane, limit, waiter, number, has_jobs);
                }
            }
            Until::Start(limit, waiter) => self.leave(lane, limit, waiter, number, has_jobs),
        }
        Some(closed)
    }

    /// Notes that a lane no longer waits for this limit.
    fn leave(&mut self, lane: L, limit: &K, waiter: &Waiter<S>, number: Number, has_jobs: bool) {
        let Some(waiting) = self.waiting.get_mut(limit) else {
            return;
        };
        if let Some(of_class) = waiting.get_mut(&waiter.class) {
            match has_jobs {
                true => of_class.leave(lane, waiter, number),
                false => _ = of_class.idle.remove(&(number, lane)),
            }
            if of_class.len == 0 && of_class.idle.is_empty() {
                waiting.remove(&waiter.class);
            }
        }
        if waiting.is_empty() {
            self.waiting.remove(limit);
        }
    }

    /// Opens all lanes.
    pub fn clear(&mut self) {
        self.closed.clear();
        self.waiting.clear();
        self.for_ends = 0;
        self.opening.clear();
        self.starts.clear();
        self.starts_at.clear();
    }

    /// True if lanes that are known to have jobs wait for the end of a job.
    pub fn wait_for_ends(&self) -> bool {
        self.for_ends > 0
    }

    /// True if lanes wait for a limit.
    pub fn wait_for_limits(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// The time at which the next lane opens because its wait ends. Lanes without known jobs do not count if they wait
    /// for a limit.
    pub fn next_opening(&self) -> Option<T> {
        let opening = self.opening.keys().next().copied();
        let mut starts = self.starts.iter();
        let awaited = starts.find(|(_, limit)| self.waiting(limit) > 0);
        let start = awaited.map(|(at, _)| *at);
        opening.into_iter().chain(start).min()
    }

    /// The lanes whose opening time has come, except those that other limits are known to keep closed. Like all lists
    /// of this type, in the order in which the caller opens them: the last one goes first. `behind`: all limits of a
    /// lane.
    pub fn due(&mut self, now: T, behind: impl Fn(L) -> Vec<K>) -> Vec<L> {
        let mut due: Vec<(Number, L)> = (self.opening.range(..=now))
            .flat_map(|(_, lanes)| lanes.iter().copied())
            .collect();
        due.sort_unstable_by(|left, right| right.cmp(left));
        let mut due: Vec<L> = due.into_iter().map(|(_, lane)| lane).collect();
        let is_due = |(at, _): &&(T, K)| *at <= now;
        let mut limits = Vec::new();
        while let Some(start) = self.starts.first().filter(is_due).cloned() {
            self.starts.remove(&start);
            let (_, limit) = start;
            self.starts_at.remove(&limit);
            limits.push(limit);
        }
        for limit in limits {
            self.move_closed(&limit, &[], &behind);
            due.extend(self.opened(&limit, OPENED_FIRST));
        }
        due
    }

    /// The lanes that the end of a job of this limit opens.
    pub fn by_end(&mut self, limit: &K) -> Vec<L> {
        self.opened(limit, OPENED_FIRST)
    }

    /// More lanes behind a limit, after a claim from one of them has found room, or no more jobs.
    pub fn others(&mut self, limit: &K) -> Vec<L> {
        if self.starts_at.contains_key(limit) {
            return Vec::new();
        }
        self.open_idle(limit, usize::MAX);
        self.first_of(limit, OPENED_MAX)
    }

    /// Some lanes behind each limit: jobs of other workers may have ended. There may be too many limits for one sweep.
    pub fn some(&mut self) -> Vec<L> {
        let before = self.swept.take();
        let is_later = |limit: &&K| before.as_ref().is_none_or(|before| *limit > before);
        // Limits that let a job start at a given time have no room before it.
        let waiting = || {
            self.waiting
                .keys()
                .filter(|limit| !self.starts_at.contains_key(*limit))
        };
        let later = waiting().filter(is_later);
        let earlier = waiting().filter(|limit| !is_later(limit));
        let limits: Vec<K> = later
            .chain(earlier)
            .take(OPENED_BY_SWEEP)
            .cloned()
            .collect();
        // Several lanes, because a lane may also be behind another limit that is full.
        let each = (OPENED_BY_SWEEP / limits.len().max(1)).clamp(1, OPENED_MAX);
        let mut listed = HashSet::new();
        let mut some = Vec::new();
        for limit in limits {
            if some.len() >= OPENED_BY_SWEEP {
                break;
            }
            let lanes = self.opened(&limit, each);
            some.extend(lanes.into_iter().filter(|lane| listed.insert(*lane)));
            self.swept = Some(limit);
        }
        some
    }

    /// Up to this many lanes of each class of a limit that may have room. Also opens lanes that are not known to have
    /// jobs: a few of each class, or all if no other lanes wait. The caller need not know these, because a claim reads
    /// them as it reads any lane without known jobs: if they have none, that does not open others.
    fn opened(&mut self, limit: &K, lanes: usize) -> Vec<L> {
        let first = self.first_of(limit, lanes);
        let idle = match first.is_empty() {
            true => usize::MAX,
            false => OPENED_MAX,
        };
        self.open_idle(limit, idle);
        first
    }

    fn open_idle(&mut self, limit: &K, lanes: usize) {
        let classes = self.waiting.get(limit).into_iter().flatten();
        let idle: Vec<L> = classes
            .flat_map(|(_, of_class)| of_class.idle.iter().take(lanes))
            .map(|(_, lane)| *lane)
            .collect();
        for lane in idle {
            self.open(lane);
        }
    }

    /// Up to this many lanes of each class of a limit that are known to have jobs. The claim decides between the
    /// classes.
    fn first_of(&self, limit: &K, lanes: usize) -> Vec<L> {
        let classes = self.waiting.get(limit).into_iter().flatten();
        let mut first: Vec<L> = classes
            .flat_map(|(_, of_class)| of_class.first(lanes))
            .collect();
        first.reverse();
        first
    }
}

#[cfg(test)]
mod tests;
