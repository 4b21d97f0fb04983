//! Counts what the claims of this host did in fair queues, for metrics and `rouse queue ls --json`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use metrics::{counter, gauge};

use super::turns::{Class, Turns};
use crate::store::{FairKeyStats, FairQueueStats};

/// The maximum number of keys that are counted one by one, in all queues together: the first ones that had a turn. All
/// other keys are counted together.
const KEYS_MAX: usize = 100;
/// The maximum size of these keys, bytes: the statistics of a worker have at most 64 KiB.
const KEY_BYTES_MAX: usize = 16 << 10;
/// The name under which other keys are counted.
pub(super) const OTHERS: &str = "(other)";

/// The counts of this incarnation.
#[derive(Debug, Default)]
pub(super) struct Fairness {
    queues: HashMap<Arc<str>, Queue>,
    keys: usize,
    key_bytes: usize,
}

#[derive(Debug)]
struct Queue {
    /// By what it is divided.
    dimension: &'static str,
    keys: HashMap<Arc<str>, Counts>,
    others: Counts,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    selected: u64,
    deferred: u64,
    promoted: u64,
}

impl Fairness {
    /// Begins to count what a queue does that is divided by `dimension`, or goes on. Another division starts from zero.
    pub(super) fn watch(&mut self, queue: &str, dimension: &'static str) {
        if self
            .queues
            .get(queue)
            .is_some_and(|known| known.dimension == dimension)
        {
            return;
        }
        if let Some(before) = self.queues.remove(queue) {
            self.keys -= before.keys.len();
            self.key_bytes -= before.keys.keys().map(|key| key.len()).sum::<usize>();
        }
        let (keys, others) = Default::default();
        self.queues.insert(
            queue.into(),
            Queue {
                dimension,
                keys,
                others,
            },
        );
    }

    /// Forgets the queues that this refuses.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.queues.retain(|queue, _| keep(queue));
        let keys = || self.queues.values().flat_map(|queue| queue.keys.keys());
        self.keys = keys().count();
        self.key_bytes = keys().map(|key| key.len()).sum();
    }

    /// Counts claimed jobs of a key.
    pub(super) fn selected(
        &mut self,
        queue: &str,
        key: &Arc<str>,
        jobs: usize,
        is_promotion: bool,
    ) {
        let jobs = u64::try_from(jobs).unwrap_or(u64::MAX);
        let promoted = if is_promotion { jobs } else { 0 };
        self.add(
            queue,
            key,
            Counts {
                selected: jobs,
                deferred: 0,
                promoted,
            },
        );
    }

    /// Counts the keys of a class that have jobs, and of which the next claim takes none: all except the `chosen` ones.
    pub(super) fn deferred(
        &mut self,
        class: Class,
        queue: &str,
        chosen: &HashSet<Arc<str>>,
        turns: &Turns,
    ) {
        let Some(known) = self.queues.get_mut(queue) else {
            return;
        };
        let mut others = turns.keys(class, queue).saturating_sub(chosen.len());
        for (key, counts) in &mut known.keys {
            if !chosen.contains(key) && turns.has_key(class, queue, key) {
                others -= 1;
                let labels = labels(queue, known.dimension, key);
                counter!("rouse_fair_deferrals_total", &labels).increment(1);
                counts.deferred += 1;
            }
        }
        if others > 0 {
            let others = u64::try_from(others).unwrap_or(u64::MAX);
            let labels = labels(queue, known.dimension, OTHERS);
            counter!("rouse_fair_deferrals_total", &labels).increment(others);
            known.others.deferred += others;
        }
    }

    fn add(&mut self, queue: &str, key: &Arc<str>, more: Counts) {
        let Some(known) = self.queues.get_mut(queue) else {
            return;
        };
        let has_room = self.keys < KEYS_MAX && self.key_bytes + key.len() <= KEY_BYTES_MAX;
        if has_room && !known.keys.contains_key(key) {
            self.keys += 1;
            self.key_bytes += key.len();
            known.keys.insert(key.clone(), Counts::default());
        }
        let (counts, name) = match known.keys.get_mut(key) {
            Some(counts) => (counts, &**key),
            None => (&mut known.others, OTHERS),
        };
        counts.selected += more.selected;
        counts.promoted += more.promoted;
        let labels = labels(queue, known.dimension, name);
        counter!("rouse_fair_selections_total", &labels).increment(more.selected);
        if more.promoted > 0 {
            counter!("rouse_fair_starvation_promotions_total", &labels).increment(more.promoted);
        }
    }

    /// The counts with the credit that the keys have now, by queue and key. Also shows the credit in the metrics.
    pub(super) fn report(&self, turns: &Turns) -> Vec<FairQueueStats> {
        let stats = |key: Option<&str>, counts: Counts, deficit: Option<f64>| FairKeyStats {
            key: key.map(str::to_owned),
            selected: counts.selected,
            deferred: counts.deferred,
            promotions: counts.promoted,
            deficit,
        };
        let mut report = Vec::with_capacity(self.queues.len());
        // There may be thousands of queues. At most KEYS_MAX of them have a key that is counted by itself.
        let counted = self.queues.iter();
        let counted = counted.filter(|(_, known)| !known.keys.is_empty());
        for (queue, known) in counted {
            let mut keys = Vec::with_capacity(known.keys.len() + 1);
            for (key, counts) in &known.keys {
                let deficit = turns.credit(queue, key);
                gauge!("rouse_fair_deficit", &labels(queue, known.dimension, key)).set(deficit);
                keys.push(stats(Some(key), *counts, Some(deficit)));
            }
            if known.others != Counts::default() {
                keys.push(stats(None, known.others, None));
            }
            keys.sort_unstable_by(|left, right| left.key.cmp(&right.key));
            report.push(FairQueueStats {
                queue: queue.to_string(),
                rounds: turns.rounds(queue),
                promotions: keys.iter().map(|key| key.promotions).sum(),
                keys,
            });
        }
        report.sort_unstable_by(|left, right| left.queue.cmp(&right.queue));
        report
    }
}

fn labels(queue: &str, dimension: &'static str, key: &str) -> [(&'static str, String); 3] {
    [
        ("queue", queue.to_owned()),
        ("dimension", dimension.to_owned()),
        ("key", key.to_owned()),
    ]
}

#[cfg(test)]
mod tests;
