//! Jobs that have waited too long go ahead of newer ones that would be first.
//!
//! By default all that is claimed goes to them while there are any; an operator can give them a share, so that a backlog which is
//! older than the limit does not keep new jobs of high priority waiting. (`docs/decisions/overdue-jobs-go-first.md`)

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::job::LaneId;
use crate::store::{ClaimOrder, ClaimedJob, Only, OverdueLane};

/// The most jobs of one lane that are known to have waited too long; it is asked again with each short sweep.
pub(super) const KNOWN_MAX: usize = 500;
/// Jobs that will have waited too long within this are known beforehand: until it is asked again.
pub(super) const KNOWN_AHEAD: Duration = Duration::from_millis(1500);
/// A lane that gave fewer jobs than were asked for is asked again after this: the next ones have not waited long enough.
const AGAIN: Duration = Duration::from_millis(100);

/// A share of each claim: of what cannot be divided, the rest goes over to the next one.
#[derive(Debug)]
pub(super) struct Share {
    percent: usize,
    /// Hundredths of a job.
    rest: usize,
}

impl Share {
    /// `percent`: 1 to 100.
    pub(super) fn new(percent: u8) -> Self {
        Self {
            percent: percent.into(),
            rest: 50,
        }
    }

    /// How many of so many jobs.
    pub(super) fn of(&mut self, wanted: usize) -> usize {
        let hundredths = wanted * self.percent + self.rest;
        self.rest = hundredths % 100;
        hundredths / 100
    }
}

/// What has waited too long, as far as it was known a moment ago.
#[derive(Debug)]
pub(super) struct Overdue {
    /// The one whose next job has waited longest first.
    lanes: Vec<Known>,
    share: Share,
}

#[derive(Debug)]
struct Known {
    lane: LaneId,
    /// From then on its next job has waited too long.
    at: Instant,
    /// How many of its next jobs have, or will have soon.
    left: usize,
}

impl Overdue {
    pub(super) fn new(share: Share) -> Self {
        Self {
            lanes: Vec::new(),
            share,
        }
    }

    /// Takes in what the database has said now.
    pub(super) fn learn(&mut self, lanes: &[OverdueLane], now: Instant) {
        let known = |lane: &OverdueLane| Known {
            lane: lane.lane,
            at: now + lane.after,
            left: lane.jobs,
        };
        self.lanes = lanes.iter().map(known).collect();
    }

    /// The lanes to take their share of a claim of so many jobs from, in order, and how many that is; a job may go ahead where
    /// it has waited for `wait`. None: there is nothing for them.
    pub(super) fn claim(
        &mut self,
        wanted: usize,
        wait: Duration,
        now: Instant,
    ) -> (Vec<(LaneId, Only)>, usize) {
        let due = self.lanes.iter().filter(|known| known.at <= now);
        let due: Vec<(LaneId, Only)> = due
            .map(|known| {
                let most = known.left;
                (known.lane, Only { most, waited: wait })
            })
            .collect();
        let share = match due.is_empty() {
            true => 0,
            false => self.share.of(wanted),
        };
        (due, share)
    }

    /// Takes in what a claim from these lanes has found; `is_all`: all that there was.
    pub(super) fn claimed(
        &mut self,
        orders: &[ClaimOrder],
        jobs: &[ClaimedJob],
        is_all: bool,
        now: Instant,
    ) {
        if self.lanes.is_empty() {
            return;
        }
        let mut gave: HashMap<LaneId, usize> = HashMap::new();
        for job in jobs {
            *gave.entry(job.lane).or_default() += 1;
        }
        // A claim that was filled has not looked behind the last lane that gave something.
        let last = orders
            .iter()
            .rposition(|order| gave.contains_key(&order.lane));
        for (place, order) in orders.iter().enumerate() {
            let is_exhausted = is_all || Some(place) < last;
            if order.only.is_none() || (!is_exhausted && Some(place) != last) {
                continue;
            }
            let found = gave.get(&order.lane).copied().unwrap_or(0);
            if let Some(known) = self.lanes.iter_mut().find(|known| known.lane == order.lane) {
                known.left = known.left.saturating_sub(found);
                if is_exhausted {
                    // Those that are left have not waited long enough, or somebody else has them.
                    known.at = now + AGAIN;
                    known.left = if found == 0 { 0 } else { known.left };
                }
            }
        }
        self.lanes.retain(|known| known.left > 0);
    }
}

#[cfg(test)]
mod tests;
