//! The line of claims that wait for a slot: their order, and which of them may start next.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use super::claim::{Claim, HostLimit};
use crate::sandbox::BootTime;

/// The claims that wait for a slot.
#[derive(Default)]
pub(super) struct Line {
    waiting: VecDeque<Claim>,
    /// The running attempts and the claims in line of handlers whose concurrent attempts this host limits.
    by_handler: HashMap<Arc<str>, HandlerCounts>,
}

#[derive(Debug, Default)]
struct HandlerCounts {
    running: usize,
    waiting: usize,
}

impl Line {
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// The number of claims in line and running attempts of a limited handler.
    pub(super) fn in_hand_of(&self, handler: &str) -> usize {
        let counts = self.by_handler.get(handler);
        counts.map_or(0, |counts| counts.running + counts.waiting)
    }

    /// Puts a claim in line.
    pub(super) fn put(&mut self, claim: Claim) {
        let place = match claim.goes_ahead {
            true => self.place_ahead(&claim),
            false => self.waiting.len(),
        };
        self.count(claim.host_limit.as_ref(), |counts| counts.waiting += 1);
        self.waiting.insert(place, claim);
    }

    /// The place in line for a claim that goes ahead of others of its class, and of later classes.
    fn place_ahead(&self, claim: &Claim) -> usize {
        let is_behind = |other: &Claim| {
            !other.goes_ahead && other.class.is_some() && other.class >= claim.class
        };
        let place = self.waiting.iter().position(is_behind);
        place.unwrap_or(self.waiting.len())
    }

    /// Takes the next claim that may start out of the line, and counts its attempt as running until
    /// [`note_end`](Self::note_end). `None` if no claim in line may start.
    pub(super) fn start_next(&mut self) -> Option<Claim> {
        let place = self.startable()?;
        let claim = self.waiting.remove(place)?;
        self.count(claim.host_limit.as_ref(), |counts| {
            counts.waiting -= 1;
            counts.running += 1;
        });
        Some(claim)
    }

    /// Notes that the attempt of a claim has ended.
    pub(super) fn note_end(&mut self, host_limit: Option<&HostLimit>) {
        self.count(host_limit, |counts| counts.running -= 1);
    }

    /// True if a claim may start that may have waited for the end of another attempt of its handler.
    pub(super) fn has_startable_behind_limit(&self) -> bool {
        !self.by_handler.is_empty() && self.startable().is_some()
    }

    /// The index of the next claim that may start.
    fn startable(&self) -> Option<usize> {
        let may_start = |claim: &Claim| {
            // It counted as started when it was claimed. After a freeze, that may be too long ago: then it is given
            // back.
            let is_late = claim
                .start_within
                .is_some_and(|max| BootTime::now().since(claim.sent) > max);
            let has_room = claim.host_limit.as_ref().is_none_or(|limit| {
                let running = self
                    .by_handler
                    .get(&limit.handler)
                    .map_or(0, |counts| counts.running);
                running < limit.max
            });
            !is_late && has_room
        };
        self.waiting.iter().position(may_start)
    }

    /// Takes the claims that arrived up to `then` out of the line.
    pub(super) fn take_late(&mut self, then: Instant) -> VecDeque<Claim> {
        // The claims in line are not exactly in their order of arrival.
        let all = std::mem::take(&mut self.waiting);
        let (late, rest): (VecDeque<Claim>, _) =
            all.into_iter().partition(|claim| claim.received <= then);
        self.waiting = rest;
        for claim in &late {
            self.count(claim.host_limit.as_ref(), |counts| counts.waiting -= 1);
        }
        late
    }

    fn count(&mut self, limit: Option<&HostLimit>, change: impl Fn(&mut HandlerCounts)) {
        if let Some(limit) = limit {
            let counts = self.by_handler.entry(limit.handler.clone()).or_default();
            change(counts);
            if counts.running + counts.waiting == 0 {
                self.by_handler.remove(&limit.handler);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rouse_turns::{START_TIMEOUT, throttled_within};

    use super::super::claim::tests::claim;
    use super::*;
    use crate::job::JobId;

    #[test]
    fn a_claim_that_goes_ahead_stays_behind_earlier_classes_and_adopted_jobs() {
        let mut line = Line::default();
        let with = |id, class, goes_ahead| Claim {
            class,
            goes_ahead,
            ..claim(id, Instant::now())
        };
        for claim in [
            with(1, None, false),
            with(2, Some([0, 0]), false),
            with(3, Some([1, 0]), false),
            with(4, Some([2, 0]), false),
            with(5, Some([1, 0]), true),
            with(6, Some([1, 0]), true),
            with(7, Some([2, 0]), true),
        ] {
            line.put(claim);
        }
        let next = || line.start_next().map(|claim| claim.job.id.0);
        let taken: Vec<i64> = std::iter::from_fn(next).collect();
        assert_eq!(taken, [1, 2, 5, 6, 3, 7, 4]);
    }

    #[test]
    fn only_claims_that_have_waited_too_long_are_taken_out_of_the_line() {
        let mut line = Line::default();
        let start = Instant::now();
        let second = start + Duration::from_millis(1);
        for claim in [claim(1, start), claim(2, start), claim(3, second)] {
            line.put(claim);
        }
        line.start_next();
        let late: Vec<i64> = line.take_late(start).iter().map(|c| c.job.id.0).collect();
        assert_eq!(late, [2]);
        assert_eq!(line.len(), 1, "one waits");
    }

    #[test]
    fn a_throttled_claim_does_not_start_long_after_it_was_made() {
        let mut line = Line::default();
        let then = Instant::now().checked_sub(START_TIMEOUT * 2).unwrap();
        let throttled = |id, sent, received| Claim {
            start_within: Some(throttled_within(Duration::from_millis(1))),
            sent,
            ..claim(id, received)
        };
        line.put(throttled(1, BootTime::default(), then));
        // Recent, however slow this test is.
        let recent = BootTime::now().plus(Duration::from_secs(3600));
        line.put(throttled(2, recent, Instant::now()));
        assert_eq!(line.start_next().unwrap().job.id, JobId(2));
        assert_eq!(line.take_late(then).len(), 1);
    }
}
