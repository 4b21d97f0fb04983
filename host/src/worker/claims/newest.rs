//! Finds jobs in lanes that had none, while a worker is busy with other lanes of fair queues, or serves so many lanes
//! that only sweeps read all of them.
//!
//! The sweep finds them too, but only once a second, and a busy worker receives no notifications.

use std::time::{Duration, Instant};

use super::{Claims, Found};
use crate::job::LaneId;
use crate::store::StoreError;

/// The interval of these searches.
const EVERY: Duration = Duration::from_millis(5);
/// The interval at which a search also reads slightly older jobs, whose transactions took longer.
const FURTHER_EVERY: Duration = Duration::from_millis(25);
/// Each search reads at most this many of the last ids. It skips older jobs, which the next sweep finds.
const IDS_MAX: i32 = 2_000;

/// The ids after which the newest jobs are read.
#[derive(Debug)]
pub(super) struct Newest {
    next_at: Instant,
    /// The last id that was assigned at the last two searches, older first: ids are assigned before their jobs are
    /// committed. `None`: nothing is read.
    last: [Option<i64>; 2],
    further_at: Instant,
    /// The time of the next update of [`Self::further`].
    look_back_at: Instant,
    /// The same for two earlier times.
    further: [Option<i64>; 2],
}

impl Newest {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            next_at: now,
            last: [None; 2],
            further_at: now,
            look_back_at: now,
            further: [None; 2],
        }
    }
}

impl Claims<'_> {
    /// When the next search is due. `None` if there are only a few lanes, and no fair queue.
    pub(in crate::worker) fn next_search(&self) -> Option<Instant> {
        let searches = self.lanes.serves_fair() || !self.lanes.fit_one_claim();
        searches.then_some(self.newest.next_at)
    }

    /// Searches the newest jobs, if it is time, and notes which lanes have jobs now.
    pub(in crate::worker) async fn find_new(&mut self) -> Result<(), StoreError> {
        let now = Instant::now();
        if self.next_search().is_none_or(|at| at > now) {
            return Ok(());
        }
        self.newest.next_at = now + EVERY;
        let mut after = self.newest.last[0];
        if now >= self.newest.further_at {
            self.newest.further_at = now + FURTHER_EVERY;
            after = self.newest.further[0];
        }
        let (lanes, last) = self.shared.store.newest_lanes(after, IDS_MAX).await?;
        let moved = |positions: [Option<i64>; 2]| [positions[1].or(Some(last)), Some(last)];
        self.newest.last = moved(self.newest.last);
        if now >= self.newest.look_back_at {
            self.newest.look_back_at = now + self.shared.settings.intervals.look_back;
            self.newest.further = moved(self.newest.further);
        }
        let lanes: Vec<(LaneId, bool)> = lanes
            .into_iter()
            .map(|lane| (lane, self.lanes.knows(lane)))
            .collect();
        if lanes.iter().any(|(_, was_known)| !was_known) {
            self.read_catalog().await?;
        }
        for (lane, was_known) in lanes {
            self.lanes.wake(lane, was_known);
        }
        Ok(())
    }

    /// Claims one job of each lane that had none until a moment ago, and at most `wanted` in all. These jobs do not
    /// wait for a claim of many jobs of other lanes. Claims nothing while there are orphans, which the next claim
    /// finds, too.
    pub(in crate::worker) async fn claim_first(
        &mut self,
        wanted: usize,
    ) -> Result<Found, StoreError> {
        let orders = self.lanes.first_orders(wanted);
        if orders.is_empty() {
            return Ok(Found::default());
        }
        let wanted = orders.len();
        let (found, _) = self.claim_from(orders, wanted, true).await?;
        // No such claim until the orphans are adopted.
        self.orphans_left |= found.orphans.is_some();
        Ok(Found {
            jobs: found.jobs,
            ..Found::default()
        })
    }
}
