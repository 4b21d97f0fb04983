//! Caches the results of subschemas that are reached on more than one path for the same part of the value.
//!
//! The alternatives of a recursive type each evaluate the contents, so without a cache the work would double with each
//! level of the value.

use std::collections::HashMap;

use super::json::Location;
use super::mismatch::Mismatch;
use super::node::NodeId;

/// The maximum number of results, about 64 bytes each.
const RESULTS_MAX: usize = 1 << 16;

/// Results that took fewer steps are not cached: computing them again is just as fast.
const STEPS_MIN: u64 = 32;

/// Results of one check.
pub(super) struct Cache<'s> {
    results: HashMap<(NodeId, Location), Result<'s>>,
    results_max: usize,
    steps_min: u64,
}

struct Result<'s> {
    /// `None` if it matches.
    mismatch: Option<Mismatch<'s>>,
    /// The steps that it took.
    steps: u64,
}

impl<'s> Cache<'s> {
    pub(super) fn new() -> Self {
        Self::bounded(RESULTS_MAX, STEPS_MIN)
    }

    pub(super) fn bounded(results_max: usize, steps_min: u64) -> Self {
        Self {
            results: HashMap::new(),
            results_max,
            steps_min,
        }
    }

    /// The cached result: unknown, a match, or the mismatch.
    pub(super) fn get(&self, node: NodeId, at: Location) -> Option<Option<Mismatch<'s>>> {
        if self.results.is_empty() {
            return None;
        }
        self.results.get(&(node, at)).map(|result| result.mismatch)
    }

    /// Caches a result that took this many steps. If the cache is full, the cheapest results are dropped, and equally
    /// cheap results are no longer cached.
    pub(super) fn insert(
        &mut self,
        node: NodeId,
        at: Location,
        mismatch: Option<Mismatch<'s>>,
        steps: u64,
    ) {
        if steps < self.steps_min {
            return;
        }
        while self.results.len() >= self.results_max {
            self.steps_min *= 2;
            let steps_min = self.steps_min;
            self.results.retain(|_, result| result.steps >= steps_min);
        }
        if steps >= self.steps_min {
            self.results.insert((node, at), Result { mismatch, steps });
        }
    }
}
