//! Lanes from which gates let no job start for now, as one host knows them: the rules of
//! `host/src/worker/lanes/gates.rs`.

use std::collections::{BTreeSet, HashMap};

use crate::gates::Key;
use crate::{Nanos, Sabotage};

/// How many lanes of a limit are opened when a job of it has ended: the first ones may be empty by now.
const OPENED_BY_END: usize = 2;
/// How many are opened when one of them had room, or no jobs any more.
const OPENED_MAX: usize = 8;
/// A sweep opens so many lanes, but at least one of a limit. The next sweep goes on with the next limit.
const OPENED_BY_SWEEP: usize = 256;

/// Until when a lane is closed.
#[derive(Debug, Clone, Copy)]
enum Closed {
    /// Until a job of one of its limits has ended. The number of its closing.
    UntilEnd(u64),
    Until(Nanos),
}

/// The closed lanes of a host.
#[derive(Debug, Default)]
pub(crate) struct Closings {
    closed: HashMap<u32, Closed>,
    /// Lanes that wait for the end of a job, by limit, in the order in which they were closed.
    waiting: HashMap<Key, BTreeSet<(u64, u32)>>,
    /// Lanes that open by themselves.
    opening: BTreeSet<(Nanos, u32)>,
    /// The last limit that a sweep has opened a lane of.
    swept: Option<Key>,
    /// The number of lanes that were closed so far.
    closings: u64,
    sabotage: Option<Sabotage>,
}

impl Closings {
    pub(crate) fn new(sabotage: Option<Sabotage>) -> Self {
        Self {
            sabotage,
            ..Self::default()
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.closed.is_empty()
    }

    pub(crate) fn is_closed(&self, lane: u32) -> bool {
        self.closed.contains_key(&lane)
    }

    /// Closes a lane that is behind these limits of running jobs: for this time; `None`: until one of them has room.
    pub(crate) fn close(&mut self, lane: u32, until: Option<Nanos>, limits: &[Key]) {
        self.open(lane, limits);
        let closed = match until {
            Some(until) => {
                self.opening.insert((until, lane));
                Closed::Until(until)
            }
            None => {
                self.closings += 1;
                for limit in limits {
                    let waiting = self.waiting.entry(*limit).or_default();
                    waiting.insert((self.closings, lane));
                }
                Closed::UntilEnd(self.closings)
            }
        };
        self.closed.insert(lane, closed);
    }

    /// Opens a lane.
    pub(crate) fn open(&mut self, lane: u32, limits: &[Key]) {
        match self.closed.remove(&lane) {
            None => {}
            Some(Closed::Until(at)) => _ = self.opening.remove(&(at, lane)),
            Some(Closed::UntilEnd(number)) => {
                for limit in limits {
                    if let Some(waiting) = self.waiting.get_mut(limit) {
                        waiting.remove(&(number, lane));
                        if waiting.is_empty() {
                            self.waiting.remove(limit);
                        }
                    }
                }
            }
        }
    }

    /// When the next lane opens by itself.
    pub(crate) fn next_opening(&self) -> Option<Nanos> {
        self.opening.first().map(|(at, _)| *at)
    }

    /// The lanes whose time has come.
    pub(crate) fn due(&self, now: Nanos) -> Vec<u32> {
        let due = self.opening.iter().take_while(|(at, _)| *at <= now);
        due.map(|(_, lane)| *lane).collect()
    }

    /// The lanes that the end of a job of these limits opens, in the order in which they are opened.
    pub(crate) fn by_end(&self, limits: &[Key]) -> Vec<u32> {
        self.first_of(limits, OPENED_BY_END)
    }

    /// Other lanes of the limits of a lane that had room, or no jobs any more.
    pub(crate) fn others(&self, limits: &[Key]) -> Vec<u32> {
        self.first_of(limits, OPENED_MAX)
    }

    /// Some lanes of each limit: jobs of other hosts may have ended.
    pub(crate) fn some(&mut self) -> Vec<u32> {
        let mut limits: Vec<Key> = self.waiting.keys().copied().collect();
        limits.sort_unstable();
        let later = limits.partition_point(|limit| Some(*limit) <= self.swept);
        limits.rotate_left(later);
        limits.truncate(OPENED_BY_SWEEP);
        self.swept = limits.last().copied();
        let each = (OPENED_BY_SWEEP / limits.len().max(1)).clamp(1, OPENED_MAX);
        self.first_of(&limits, each)
    }

    /// The lane that is opened last goes first: that which was closed first.
    fn first_of(&self, limits: &[Key], lanes: usize) -> Vec<u32> {
        if self.sabotage == Some(Sabotage::Ends) {
            return Vec::new();
        }
        let mut opened = Vec::new();
        for limit in limits {
            let waiting = self.waiting.get(limit).into_iter().flatten();
            let first: Vec<u32> = waiting.take(lanes).map(|(_, lane)| *lane).collect();
            opened.extend(first.into_iter().rev());
        }
        opened
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: [Key; 1] = [Key { gate: 0, key: 7 }];

    #[test]
    fn an_end_opens_the_lanes_that_were_closed_first() {
        let mut closings = Closings::new(None);
        for lane in [3, 1, 2] {
            closings.close(lane, None, &LIMIT);
        }
        assert_eq!(closings.by_end(&LIMIT), [1, 3], "the last one goes first");
        closings.open(3, &LIMIT);
        assert_eq!(closings.by_end(&LIMIT), [2, 1]);
        assert!(closings.by_end(&[Key { gate: 1, key: 7 }]).is_empty());
        assert_eq!(closings.some(), [2, 1]);
        closings.open(1, &LIMIT);
        closings.open(2, &LIMIT);
        assert!(closings.some().is_empty() && !closings.is_closed(1));
    }

    #[test]
    fn a_lane_that_is_closed_for_a_time_opens_by_itself() {
        let mut closings = Closings::new(None);
        closings.close(1, Some(20), &LIMIT);
        closings.close(2, Some(10), &[]);
        assert_eq!(closings.next_opening(), Some(10));
        assert_eq!((closings.due(9), closings.due(20)), (vec![], vec![2, 1]));
        closings.open(2, &[]);
        assert_eq!(closings.next_opening(), Some(20));
        assert!(closings.by_end(&LIMIT).is_empty(), "ends do not open it");
    }
}
