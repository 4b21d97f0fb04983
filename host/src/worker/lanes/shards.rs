//! Lanes of sharded queues are served only while their shard is leased.

use std::collections::HashSet;
use std::sync::Arc;

use super::{Known, Lanes};
use crate::store::Lane;
use crate::worker::shards::Own;

#[derive(Debug, Default)]
pub(super) struct Shards {
    /// The sharded queues.
    queues: HashSet<String>,
    /// Those of which this worker serves a lane, whether or not its shard is leased.
    served: HashSet<String>,
    /// The leased shards.
    own: Arc<Own>,
}

impl Shards {
    /// True if this lane belongs to a shard: its queue has some, and it is not the inbox of a worker.
    fn divide(&self, lane: &Lane) -> bool {
        self.queues.contains(&lane.queue) && lane.inbox_of().is_none()
    }

    /// Called before all lanes are chosen again.
    pub(super) fn start_over(&mut self) {
        self.served.clear();
    }

    /// Notes that this worker serves a lane, whether or not its shard is leased.
    pub(super) fn note_served(&mut self, lane: &Lane) {
        if self.divide(lane) && !self.served.contains(&lane.queue) {
            self.served.insert(lane.queue.clone());
        }
    }

    /// True if this worker may claim from a lane.
    pub(super) fn are_own(&self, lane: &Lane) -> bool {
        !self.divide(lane) || self.own.has(&lane.queue, lane.id)
    }
}

impl Known {
    /// Called for a lane that was not served as a whole: there may be jobs before the turns that were read earlier.
    pub(super) fn forget_turns(&mut self) {
        self.cursor = i64::MIN;
        self.recent = [i64::MIN; 2];
        self.marks = [i64::MIN; 2];
        self.reached = i64::MIN;
    }
}

impl Lanes {
    /// Sets which queues have shards. True if they have changed, so the served lanes have to be chosen again.
    pub(in crate::worker) fn set_sharded(&mut self, queues: HashSet<String>) -> bool {
        let is_new = self.shards.queues != queues;
        self.shards.queues = queues;
        is_new
    }

    /// The sharded queues of which this worker serves a lane, whether or not its shard is leased.
    pub(in crate::worker) fn sharded(&self) -> &HashSet<String> {
        &self.shards.served
    }

    /// Sets the leased shards. True if they have changed, so the served lanes have to be chosen again.
    pub(in crate::worker) fn set_own(&mut self, own: Arc<Own>) -> bool {
        let is_new = !Arc::ptr_eq(&self.shards.own, &own);
        self.shards.own = own;
        is_new && !self.shards.queues.is_empty()
    }
}
