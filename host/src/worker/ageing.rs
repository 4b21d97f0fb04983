//! Overdue jobs, which have waited too long, go ahead of newer jobs that would otherwise be first.
//!
//! By default, overdue jobs get all claims as long as there are any. An operator can limit their share, so that an
//! overdue backlog does not delay new jobs of high priority. (`docs/decisions/overdue-jobs-go-first.md`)

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::job::LaneId;
use crate::store::{ClaimOrder, ClaimedJob, OverdueFilter, OverdueLane};

/// The maximum number of overdue jobs that are counted in one lane. Each short sweep counts again.
pub(super) const KNOWN_MAX: usize = 500;
/// Jobs that become overdue within this time are counted in advance: it covers the time until the next count.
pub(super) const KNOWN_AHEAD: Duration = Duration::from_millis(1500);
/// The pause for a lane that returned fewer jobs than wanted: its next jobs are not overdue yet.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// A share of each claim. The remaining fraction of a job is carried over to the next claim.
#[derive(Debug)]
pub(super) struct Share {
    percent: usize,
    /// The carried fraction, in hundredths of a job.
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

    /// The share of this many jobs.
    pub(super) fn take(&mut self, wanted: usize) -> usize {
        let hundredths = wanted * self.percent + self.rest;
        self.rest = hundredths % 100;
        hundredths / 100
    }
}

/// The lanes with overdue jobs, as of the last count.
#[derive(Debug)]
pub(super) struct Overdue {
    /// Ordered by how long their next job has waited, longest first.
    lanes: Vec<Known>,
    share: Share,
}

#[derive(Debug)]
struct Known {
    lane: LaneId,
    /// The time at which its next job becomes overdue.
    at: Instant,
    /// The number of its next jobs that are overdue, or will be soon.
    left: usize,
    /// The wait after which a job is overdue.
    wait: Duration,
}

impl Overdue {
    pub(super) fn new(share: Share) -> Self {
        Self {
            lanes: Vec::new(),
            share,
        }
    }

    /// Replaces the lanes with new counts from the database, each with the wait after which jobs are overdue.
    pub(super) fn learn(&mut self, counts: &[(Duration, Vec<OverdueLane>)], now: Instant) {
        let known = |wait: Duration, lane: &OverdueLane| Known {
            lane: lane.lane,
            at: now + lane.after,
            left: lane.jobs,
            wait,
        };
        let lanes = counts
            .iter()
            .flat_map(|(wait, lanes)| lanes.iter().map(|lane| known(*wait, lane)));
        self.lanes = lanes.collect();
        self.lanes.sort_by_key(|known| known.at);
    }

    /// The lanes with overdue jobs, in order, and their share of a claim of this many jobs: zero without such lanes.
    pub(super) fn claim(
        &mut self,
        wanted: usize,
        now: Instant,
    ) -> (Vec<(LaneId, OverdueFilter)>, usize) {
        let due = self.lanes.iter().filter(|known| known.at <= now);
        let due: Vec<(LaneId, OverdueFilter)> = due
            .map(|known| {
                let filter = OverdueFilter {
                    max: known.left,
                    waited: known.wait,
                };
                (known.lane, filter)
            })
            .collect();
        let share = match due.is_empty() {
            true => 0,
            false => self.share.take(wanted),
        };
        (due, share)
    }

    /// Updates the lanes after a claim from them. `is_all`: the claim returned all jobs that there were.
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
        let mut claimed: HashMap<LaneId, usize> = HashMap::new();
        for job in jobs {
            *claimed.entry(job.lane).or_default() += 1;
        }
        // A claim that was filled did not read the lanes after the last lane that had jobs.
        let last = orders
            .iter()
            .rposition(|order| claimed.contains_key(&order.lane));
        for (index, order) in orders.iter().enumerate() {
            let is_exhausted = is_all || Some(index) < last;
            if order.overdue.is_none() || (!is_exhausted && Some(index) != last) {
                continue;
            }
            let found = claimed.get(&order.lane).copied().unwrap_or(0);
            if let Some(known) = self.lanes.iter_mut().find(|known| known.lane == order.lane) {
                known.left = known.left.saturating_sub(found);
                if is_exhausted {
                    // The remaining jobs are not overdue yet, or other workers have claimed them.
                    known.at = now + RETRY_AFTER;
                    known.left = if found == 0 { 0 } else { known.left };
                }
            }
        }
        self.lanes.retain(|known| known.left > 0);
    }
}

#[cfg(test)]
mod tests;
