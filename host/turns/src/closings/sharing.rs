//! How much of a limit the members that share it have used.

use std::collections::HashMap;
use std::hash::Hash;

/// The number of parts of a turn: the usage of a member is counted in whole parts, so that it can order the members.
const PARTS: f64 = 1_000_000.0;
/// If one limit has more members than this, all start again with the highest usage of any member: most of them appear
/// only once.
const MEMBERS_MAX: usize = 32_768;

/// The usage of a limit by the members that share it, in [`PARTS`] of a turn.
#[derive(Debug)]
pub(super) struct Sharing<S> {
    /// The usage that the last served member had before it was served. A new member starts with it, so that nothing is
    /// saved up.
    pub(super) clock: u64,
    pub(super) had: HashMap<S, u64>,
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
    pub(super) fn had(&self, member: &S) -> u64 {
        let had = self.had.get(member).copied().unwrap_or(0);
        had.max(self.clock)
    }

    pub(super) fn take(&mut self, member: &S, turns: f64) {
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
