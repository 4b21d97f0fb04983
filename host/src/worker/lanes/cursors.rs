//! The cursors of lanes: the turns after which they are read.

use super::Lanes;

impl Lanes {
    /// Makes the cursors at the previous call of this the recent ones.
    pub(in crate::worker) fn look_back(&mut self) {
        for known in self.known.values_mut() {
            known.recent = [known.recent[1], known.cursor];
        }
    }

    /// The short sweep: resets every cursor to its position two sweeps ago, which is the start of lanes that were not
    /// served then. In a lane that still has jobs, the cursor never moves forward: since a restart, the jobs may be
    /// before that position.
    pub(in crate::worker) fn rewind(&mut self) {
        for (id, known) in &mut self.known {
            let [oldest, newer] = known.marks;
            known.marks = [newer, known.cursor];
            known.cursor = match self.active.contains(*id) {
                true => known.cursor.min(oldest),
                false => oldest,
            };
        }
    }

    /// The restart: resets every cursor to the start.
    pub(in crate::worker) fn restart(&mut self) {
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
        }
    }

    /// After a sweep that found everything: moves the cursors forward to the last turn reached, so that the next look
    /// does not read the same rows again. Lanes without jobs move forward to `empty_to`, a turn that was assigned a
    /// while ago: looks then skip the dead rows of finished jobs that an open transaction keeps. Not those
    /// behind gates or in shards: they may have jobs that no claim could take.
    pub(in crate::worker) fn swept(&mut self, empty_to: Option<i64>) {
        for (id, known) in &mut self.known {
            let may_have_jobs = known.is_gated() || self.shards.divide(&known.lane);
            if known.is_served_whole() && !may_have_jobs && !self.active.contains(*id) {
                known.reached = known.reached.max(empty_to.unwrap_or(i64::MIN));
            }
            known.cursor = known.reached;
        }
    }

    /// Forgets the catalog's end and all cursors: the remembered state of the database may be wrong.
    pub(in crate::worker) fn forget(&mut self) {
        self.forget_catalog();
        for known in self.known.values_mut() {
            known.cursor = i64::MIN;
            known.recent = [i64::MIN; 2];
            known.marks = [i64::MIN; 2];
            known.reached = i64::MIN;
        }
    }
}
