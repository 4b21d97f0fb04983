//! The cursors of lanes: the turns after which they are read.

use std::collections::HashSet;

use super::Lanes;
use crate::job::LaneId;
use crate::store::{ClaimOrder, Peek};

impl Lanes {
    /// Remembers the current cursors; those of the previous call become the recent ones.
    pub(in crate::worker) fn look_back(&mut self) {
        for id in &self.served {
            if let Some(known) = self.known.get_mut(id) {
                known.recent = [known.recent[1], known.cursor];
            }
        }
    }

    /// The short sweep: resets every cursor to its position two sweeps ago, or to the start in lanes that were not
    /// served then. In a lane that has jobs, or was not read, the cursor never moves forward: the jobs may be before
    /// that position. `paused`: the queues whose lanes the last sweep has not read.
    pub(in crate::worker) fn rewind(&mut self, paused: &HashSet<String>) {
        for id in &self.served {
            let Some(known) = self.known.get_mut(id) else {
                continue;
            };
            let [oldest, newer] = known.marks;
            let was_read = !self.gates.is_closed(*id) && !paused.contains(&*known.lane.queue);
            let is_empty = was_read && !self.active.contains(*id);
            // An empty lane was read to its end, starting at the position to which the last sweep set its cursor.
            known.marks = [
                newer,
                if is_empty {
                    known.reached
                } else {
                    known.cursor
                },
            ];
            known.cursor = match is_empty {
                true => oldest,
                false => known.cursor.min(oldest),
            };
        }
    }

    /// The restart: resets every cursor to the start.
    pub(in crate::worker) fn restart(&mut self) {
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
        }
    }

    /// Called when the restart got no response: restores the cursors from just before it.
    pub(in crate::worker) fn undo_restart(&mut self) {
        for known in self.known.values_mut() {
            if known.cursor == i64::MIN {
                known.cursor = known.recent[0];
            }
        }
    }

    /// The lanes that a peek has found to have no ready jobs.
    pub(in crate::worker) fn empty(&self, peeked: &[ClaimOrder], peek: &Peek) -> Vec<LaneId> {
        let ready: HashSet<LaneId> = peek.ready.iter().copied().collect();
        let is_read = |id: &LaneId| {
            let known = self.known.get(id);
            known.is_some_and(|known| !peek.paused.contains(&*known.lane.queue))
        };
        let peeked = peeked.iter().map(|order| order.lane);
        let empty = peeked.filter(|id| !ready.contains(id));
        empty.filter(is_read).collect()
    }

    /// After a sweep that found everything: moves the cursors of the lanes that its peek found empty forward to the
    /// last turn reached, and the last turn reached to `empty_to`, a turn that was assigned a while ago. The next looks
    /// then do not read the same rows again, and skip the dead rows of finished jobs that an open transaction keeps.
    /// The other lanes may have jobs that no claim could take, because their queue has been paused since the peek, or
    /// because of a gate.
    pub(in crate::worker) fn swept(&mut self, empty: &[LaneId], empty_to: i64) {
        for id in empty {
            let Some(known) = self.known.get_mut(id) else {
                continue;
            };
            if self.gates.is_closed(*id) || self.active.contains(*id) {
                continue;
            }
            if known.is_served_whole() {
                known.reached = known.reached.max(empty_to);
            }
            known.cursor = known.reached;
        }
    }

    /// Forgets the catalog's end and all cursors: the remembered state of the database may be wrong.
    pub(in crate::worker) fn forget(&mut self) {
        self.forget_catalog();
        self.woken.clear();
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
            known.recent = [i64::MIN; 2];
            known.marks = [i64::MIN; 2];
            known.reached = i64::MIN;
        }
    }
}
