//! Lanes from which gates let no job start for now: in which order they open again.
//!
//! Behind a limit, they open in the order of what they, or their keys, have had of it, each by its share (start-time fair
//! queueing): the limit often has room for a single job, and the rounds of [`Turns`](crate::Turns) end before any of
//! them has used up its credit. (`docs/decisions/closed-lanes-open-by-share.md`)

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::hash::Hash;

use crate::Class;

/// How many lanes of each class of a limit are opened when a job of it has ended: the first ones may be empty by now.
const OPENED_BY_END: usize = 2;
/// How many are opened when one of them had room, or no jobs any more.
const OPENED_MAX: usize = 8;
/// A sweep opens lanes of each class of a limit, until there are so many, but at least one. The next sweep goes on with
/// the next limit: a claim is limited to so many lanes, and behind a gate, claims wait for each other.
const OPENED_BY_SWEEP: usize = 256;

/// Parts of a turn: what a member has had is counted in whole ones, so that it can be a key.
const PARTS: f64 = 1_000_000.0;
/// With more limits than this, those that have one member, and for whose end no lane waits, are forgotten.
const LIMITS_MIN: usize = 1024;
/// With more members of one limit than this, all start again with what the foremost has had: most of them have come once.
const MEMBERS_MAX: usize = 32_768;

/// The closed lanes of a worker. `L` is the id of a lane, `K` a limit, `S` a member that shares limits with others, `T`
/// a time.
#[derive(Debug)]
pub struct Closings<L, K, S, T> {
    closed: HashMap<L, Closed<K, T>>,
    /// Closed lanes that wait for the end of a job, by the limits that they are behind and by class.
    waiting: BTreeMap<K, BTreeMap<Class, BTreeSet<(Place, L)>>>,
    /// Closed lanes that open by themselves.
    opening: BTreeMap<T, BTreeSet<(Place, L)>>,
    shared: HashMap<K, Sharing<S>>,
    /// The number of limits with which those that make no difference are forgotten.
    shared_max: usize,
    /// The last limit that a sweep has opened lanes of.
    swept: Option<K>,
    /// The number of lanes that were closed so far.
    closings: u64,
}

/// What the member had when the lane was closed, and the number of the closing.
type Place = (u64, u64);

/// Until when a lane is closed.
#[derive(Debug)]
enum Until<K, T> {
    /// A job of one of these limits has ended.
    End(Class, Vec<(K, Place)>),
    Time(T, Place),
}

#[derive(Debug)]
struct Closed<K, T> {
    until: Until<K, T>,
    /// It is known to have jobs.
    has_jobs: bool,
}

impl<L, K, S, T> Default for Closings<L, K, S, T> {
    fn default() -> Self {
        Self {
            closed: HashMap::new(),
            waiting: BTreeMap::new(),
            opening: BTreeMap::new(),
            shared: HashMap::new(),
            shared_max: LIMITS_MIN,
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

    /// The closed lanes, in any order.
    pub fn lanes(&self) -> impl Iterator<Item = L> {
        self.closed.keys().copied()
    }

    /// Those that are known to have jobs.
    pub fn with_jobs(&self) -> impl Iterator<Item = L> {
        let closed = self.closed.iter().filter(|(_, closed)| closed.has_jobs);
        closed.map(|(lane, _)| *lane)
    }

    /// The number of lanes that wait for the end of a job of this limit.
    pub fn waiting(&self, limit: &K) -> usize {
        let classes = self.waiting.get(limit).into_iter().flatten();
        classes.map(|(_, of_class)| of_class.len()).sum()
    }

    /// What a member has had of a limit: whoever has had less goes first.
    pub fn had(&self, limit: &K, member: &S) -> u64 {
        self.shared
            .get(limit)
            .map_or(0, |shared| shared.had(member))
    }

    /// Counts what a member has taken of these limits: `turns` is the number of jobs, times what one costs, divided by
    /// its share. Called before the lanes of the claim are closed.
    pub fn take<'a>(&mut self, limits: impl IntoIterator<Item = &'a K>, member: &S, turns: f64)
    where
        K: 'a,
    {
        for limit in limits {
            let shared = self.shared.entry(limit.clone()).or_default();
            shared.take(member, turns);
        }
        if self.shared.len() > self.shared_max {
            self.shared
                .retain(|limit, shared| self.waiting.contains_key(limit) || shared.had.len() > 1);
            self.shared_max = LIMITS_MIN.max(2 * self.shared.len());
        }
    }

    /// Closes a lane until a job of one of these limits, which have no room for it, has ended. Without a limit, it stays
    /// open. `has_jobs`: it is known to have some.
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
        self.closings += 1;
        // From 1 on: 0 is for those that go first.
        let place = |limit: &K| (self.had(limit, member).saturating_add(1), self.closings);
        let places = limits.iter().map(|limit| (limit.clone(), place(limit)));
        let places: Vec<(K, Place)> = places.collect();
        self.wait(lane, class, places, has_jobs);
    }

    fn wait(&mut self, lane: L, class: Class, places: Vec<(K, Place)>, has_jobs: bool) {
        for (limit, place) in &places {
            let waiting = self.waiting.entry(limit.clone()).or_default();
            waiting.entry(class).or_default().insert((*place, lane));
        }
        let until = Until::End(class, places);
        self.closed.insert(lane, Closed { until, has_jobs });
    }

    /// Closes a lane until this time. `limits`: those that let jobs start at a rate.
    pub fn close_until(&mut self, lane: L, at: T, limits: &[K], member: &S, has_jobs: bool) {
        self.open(lane);
        self.closings += 1;
        let had = limits.iter().map(|limit| self.had(limit, member)).max();
        let place = (had.unwrap_or(0), self.closings);
        self.opening.entry(at).or_default().insert((place, lane));
        let until = Until::Time(at, place);
        self.closed.insert(lane, Closed { until, has_jobs });
    }

    /// Lets a lane that waits for the end of a job go ahead of the others of its class: it has overdue jobs. Several such
    /// lanes take turns, as they were closed.
    pub fn go_first(&mut self, lane: L) {
        if let Some(Closed {
            until: Until::End(class, places),
            has_jobs,
        }) = self.closed.get(&lane)
        {
            let (class, has_jobs) = (*class, *has_jobs);
            let first = |(limit, (_, number)): &(K, Place)| (limit.clone(), (0, *number));
            let places = places.iter().map(first);
            let places = places.collect();
            self.open(lane);
            self.wait(lane, class, places, has_jobs);
        }
    }

    /// Opens a lane. False if it was open.
    pub fn open(&mut self, lane: L) -> bool {
        let Some(closed) = self.closed.remove(&lane) else {
            return false;
        };
        match closed.until {
            Until::Time(at, place) => {
                if let Some(opening) = self.opening.get_mut(&at) {
                    opening.remove(&(place, lane));
                    if opening.is_empty() {
                        self.opening.remove(&at);
                    }
                }
            }
            Until::End(class, places) => {
                for (limit, place) in places {
                    let Some(waiting) = self.waiting.get_mut(&limit) else {
                        continue;
                    };
                    if let Some(of_class) = waiting.get_mut(&class) {
                        of_class.remove(&(place, lane));
                        if of_class.is_empty() {
                            waiting.remove(&class);
                        }
                    }
                    if waiting.is_empty() {
                        self.waiting.remove(&limit);
                    }
                }
            }
        }
        true
    }

    /// Opens all lanes.
    pub fn clear(&mut self) {
        self.closed.clear();
        self.waiting.clear();
        self.opening.clear();
    }

    /// True if lanes wait for the end of a job.
    pub fn wait_for_ends(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// When the next lane opens by itself.
    pub fn next_opening(&self) -> Option<T> {
        self.opening.keys().next().copied()
    }

    /// The lanes whose time has come. Like all lists of this type, in the order in which the caller opens them: the last
    /// one goes first.
    pub fn due(&self, now: T) -> Vec<L> {
        let mut due: Vec<(Place, L)> = (self.opening.range(..=now))
            .flat_map(|(_, lanes)| lanes.iter().copied())
            .collect();
        due.sort_unstable_by(|left, right| right.cmp(left));
        due.into_iter().map(|(_, lane)| lane).collect()
    }

    /// The lanes that the end of a job of this limit opens.
    pub fn by_end(&self, limit: &K) -> Vec<L> {
        self.first_of(limit, OPENED_BY_END)
    }

    /// Other lanes of a limit, of which a lane had room, or no jobs any more.
    pub fn others(&self, limit: &K) -> Vec<L> {
        self.first_of(limit, OPENED_MAX)
    }

    /// Some lanes of each limit, of which there may be too many for one sweep: jobs of other workers may have ended.
    pub fn some(&mut self) -> Vec<L> {
        let before = self.swept.take();
        let is_later = |limit: &&K| before.as_ref().is_none_or(|before| *limit > before);
        let later = self.waiting.keys().filter(is_later);
        let earlier = self.waiting.keys().filter(|limit| !is_later(limit));
        let limits: Vec<K> = later
            .chain(earlier)
            .take(OPENED_BY_SWEEP)
            .cloned()
            .collect();
        // Several: a lane may be behind another limit, too, which is full.
        let each = (OPENED_BY_SWEEP / limits.len().max(1)).clamp(1, OPENED_MAX);
        let mut listed = HashSet::new();
        let mut some = Vec::new();
        for limit in limits {
            if some.len() >= OPENED_BY_SWEEP {
                break;
            }
            let lanes = self.first_of(&limit, each);
            some.extend(lanes.into_iter().filter(|lane| listed.insert(*lane)));
            self.swept = Some(limit);
        }
        some
    }

    /// Up to this many lanes of each class of a limit. Their claim decides between the classes.
    fn first_of(&self, limit: &K, lanes: usize) -> Vec<L> {
        let classes = self.waiting.get(limit).into_iter().flatten();
        let first = classes.flat_map(|(_, of_class)| of_class.iter().take(lanes));
        let first: Vec<L> = first.map(|(_, lane)| *lane).collect();
        first.into_iter().rev().collect()
    }
}

/// What those who share a limit have had of it, in [`PARTS`] of a turn.
#[derive(Debug)]
struct Sharing<S> {
    /// What the one that was last served had before. Whoever comes later starts with this: it saves nothing.
    clock: u64,
    had: HashMap<S, u64>,
}

impl<S> Default for Sharing<S> {
    fn default() -> Self {
        Self {
            clock: 0,
            had: HashMap::new(),
        }
    }
}

impl<S: Clone + Eq + Hash> Sharing<S> {
    fn had(&self, member: &S) -> u64 {
        let had = self.had.get(member).copied().unwrap_or(0);
        had.max(self.clock)
    }

    fn take(&mut self, member: &S, turns: f64) {
        self.clock = self.had(member);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "above zero; it saturates"
        )]
        let had = self.clock.saturating_add((turns * PARTS) as u64);
        self.had.insert(member.clone(), had);
        if self.had.len() > MEMBERS_MAX {
            self.clock = self.had.values().copied().max().unwrap_or(0);
            self.had.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type OfTest = Closings<u32, &'static str, u32, u64>;

    const CLASS: Class = [0, 0];

    /// Closes a lane, which is a member by itself.
    fn close(closings: &mut OfTest, lane: u32) {
        closings.close_until_end(lane, CLASS, &["limit"], &lane, true);
    }

    #[test]
    fn an_end_opens_the_lanes_that_were_closed_first() {
        let mut closings = OfTest::default();
        for lane in [3, 1, 2] {
            close(&mut closings, lane);
        }
        assert_eq!(closings.by_end(&"limit"), [1, 3]);
        assert!(closings.open(3) && !closings.open(3));
        assert_eq!(closings.by_end(&"limit"), [2, 1]);
        assert!(closings.by_end(&"other").is_empty());
        assert_eq!(closings.some(), [2, 1]);
        assert!(closings.open(1) && closings.open(2) && closings.is_empty());
        assert!(closings.some().is_empty() && !closings.wait_for_ends());
    }

    #[test]
    fn a_lane_that_is_closed_for_a_time_opens_by_itself() {
        let mut closings = OfTest::default();
        closings.close_until(1, 20, &["limit"], &1, true);
        closings.close_until(2, 10, &[], &2, false);
        assert_eq!(closings.with_jobs().collect::<Vec<_>>(), [1]);
        assert_eq!(closings.next_opening(), Some(10));
        assert_eq!((closings.due(9), closings.due(20)), (vec![], vec![2, 1]));
        closings.open(2);
        assert_eq!(closings.next_opening(), Some(20));
        assert!(closings.by_end(&"limit").is_empty(), "ends do not open it");
        closings.clear();
        assert_eq!(closings.next_opening(), None);
    }

    /// Serves the lane that goes first, one job at a time, and counts how often each was served. The lanes have these
    /// shares; a lane that is served closes after those that were not.
    fn served(shares: &[f64], at_a_rate: bool, times: u64) -> Vec<u64> {
        let mut closings = OfTest::default();
        let mut counts = vec![0; shares.len()];
        let lanes: Vec<u32> = (0..).take(shares.len()).collect();
        let close = |closings: &mut OfTest, lane: u32, now: u64| match at_a_rate {
            true => closings.close_until(lane, now + 1, &["limit"], &lane, true),
            false => closings.close_until_end(lane, CLASS, &["limit"], &lane, true),
        };
        for lane in &lanes {
            close(&mut closings, *lane, 0);
        }
        for now in 1..=times {
            let opened = match at_a_rate {
                true => closings.due(now),
                false => closings.by_end(&"limit"),
            };
            for lane in &opened {
                closings.open(*lane);
            }
            let first = *opened.last().expect("a lane");
            let place = first as usize;
            counts[place] += 1;
            closings.take(&["limit"], &first, 1.0 / shares[place]);
            let others = opened.iter().filter(|lane| **lane != first);
            for lane in others.chain([&first]) {
                close(&mut closings, *lane, now);
            }
        }
        counts
    }

    #[test]
    fn lanes_behind_a_limit_are_served_by_their_shares() {
        for at_a_rate in [false, true] {
            assert_eq!(served(&[1.0; 5], at_a_rate, 200), [40; 5]);
            assert_eq!(served(&[3.0, 1.0], at_a_rate, 400), [300, 100]);
            let ten = [3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
            let counts = served(&ten, at_a_rate, 1200);
            assert_eq!((counts[0], counts[9]), (300, 100));
        }
    }

    #[test]
    fn whoever_had_no_jobs_for_a_while_has_saved_nothing() {
        let mut closings = OfTest::default();
        for _ in 0..1000 {
            closings.take(&["limit"], &1, 1.0);
        }
        for lane in [1, 2] {
            close(&mut closings, lane);
        }
        assert_eq!(closings.by_end(&"limit"), [1, 2]);
        closings.take(&["limit"], &2, 2.0);
        close(&mut closings, 2);
        assert_eq!(closings.by_end(&"limit"), [2, 1], "it had its turns");
        closings.go_first(2);
        assert_eq!(closings.by_end(&"limit"), [1, 2]);
    }

    /// As the sweep does, again and again.
    #[test]
    fn lanes_that_go_first_take_turns() {
        let mut closings = OfTest::default();
        let mut counts = vec![0; 10];
        (0..10).for_each(|lane| close(&mut closings, lane));
        for _ in 0..100 {
            (0..10).for_each(|lane| closings.go_first(lane));
            let opened = closings.by_end(&"limit");
            let first = *opened.last().expect("a lane");
            counts[first as usize] += 1;
            closings.take(&["limit"], &first, 1.0);
            for lane in opened {
                closings.open(lane);
                if lane != first {
                    close(&mut closings, lane);
                }
            }
            close(&mut closings, first);
        }
        assert!(counts.iter().all(|count| *count >= 5), "{counts:?}");
    }

    #[test]
    fn members_and_limits_that_make_no_difference_are_forgotten() {
        let mut closings: Closings<u32, u32, u32, u64> = Closings::default();
        closings.close_until_end(1, CLASS, &[7], &1, true);
        for n in 0..40_000 {
            closings.take(&[7], &n, 1.0);
            closings.take(&[n + 10], &0, 1.0);
        }
        assert!(closings.shared.len() <= 2 * LIMITS_MIN && closings.shared.contains_key(&7));
        assert_eq!(closings.shared[&7].had(&0), 1_000_000, "as all others");
        assert!(closings.shared[&7].had.len() < 10_000);
    }
}
