//! Counts what the claims of this host did in fair queues, for metrics and `rouse queue ls --json`.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{counter, gauge};

use super::turns::{Class, Turns};
use crate::store::{FairKeyStats, FairQueueStats};

/// The maximum number of keys that are counted individually, in all queues together: the first keys that had a turn,
/// and later keys in place of idle ones. All other keys are counted together.
const KEYS_MAX: usize = 100;
/// The maximum total size of these keys, in bytes: the statistics of a worker are at most 64 KiB.
const KEY_BYTES_MAX: usize = 16 << 10;
/// A key is idle if it has no lanes with jobs, and none of its jobs was claimed for this long.
const IDLE_AFTER: Duration = Duration::from_secs(3600);
/// How often the host searches for idle keys while there is no space for another key.
const SEARCH_EVERY: Duration = Duration::from_secs(60);
/// The maximum number of keys that the metrics ever show by name. Each key has four time series, which stay on the page
/// until the host ends.
const SHOWN_MAX: usize = 1000;
/// The name under which other keys are counted.
pub(super) const OTHERS: &str = "(other)";

/// The counts of this incarnation.
#[derive(Debug, Default)]
pub(super) struct Fairness {
    queues: HashMap<Arc<str>, Queue>,
    keys: usize,
    key_bytes: usize,
    /// The earliest next search for idle keys.
    search_at: Option<Instant>,
    /// The keys that the metrics show by name, with their queue and its dimension.
    shown: HashSet<(Arc<str>, &'static str, Arc<str>)>,
}

#[derive(Debug)]
struct Queue {
    /// The dimension by which the queue is divided.
    dimension: &'static str,
    keys: HashMap<Arc<str>, Key>,
    others: Counts,
}

#[derive(Debug)]
struct Key {
    counts: Counts,
    /// When its jobs were last claimed.
    selected_at: Instant,
    /// True if the metrics show it by name.
    is_shown: bool,
}

impl Queue {
    /// Sets the deficits of its keys to 0 in the metrics, before the keys are forgotten: their series stay on the page.
    fn clear_deficits(&self, queue: &str) {
        for (key, of_key) in &self.keys {
            if of_key.is_shown {
                gauge!("rouse_fair_deficit", &labels(queue, self.dimension, key)).set(0.0);
            }
        }
    }
}

impl Key {
    /// The name under which the metrics show this key.
    fn shown_as<'a>(&self, key: &'a str) -> &'a str {
        match self.is_shown {
            true => key,
            false => OTHERS,
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    selected: u64,
    deferred: u64,
    promoted: u64,
}

impl Counts {
    fn add(&mut self, more: Self) {
        self.selected += more.selected;
        self.deferred += more.deferred;
        self.promoted += more.promoted;
    }
}

impl Fairness {
    /// Starts to count the claims in a queue that is divided by `dimension`, or continues. If the dimension has
    /// changed, the counts start from zero.
    pub(super) fn watch(&mut self, queue: &str, dimension: &'static str) {
        if self
            .queues
            .get(queue)
            .is_some_and(|known| known.dimension == dimension)
        {
            return;
        }
        if let Some(before) = self.queues.remove(queue) {
            before.clear_deficits(queue);
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

    /// Keeps only the queues for which `keep` returns true.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        self.queues.retain(|queue, known| {
            let is_kept = keep(queue);
            if !is_kept {
                known.clear_deficits(queue);
            }
            is_kept
        });
        self.count_keys();
    }

    /// Counts claimed jobs of a key. If there is no space for it, idle keys are removed.
    pub(super) fn selected(
        &mut self,
        queue: &str,
        key: &Arc<str>,
        jobs: usize,
        is_promotion: bool,
        turns: &Turns,
        now: Instant,
    ) {
        let is_new = |known: &Queue| !known.keys.contains_key(key);
        if self.queues.get(queue).is_some_and(is_new) {
            if !self.has_room(key) {
                self.drop_idle(turns, now);
            }
            if self.has_room(key) {
                self.insert(queue, key, now);
            }
        }
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
            now,
        );
    }

    fn has_room(&self, key: &str) -> bool {
        self.keys < KEYS_MAX && self.key_bytes + key.len() <= KEY_BYTES_MAX
    }

    /// Starts to count a key separately.
    fn insert(&mut self, queue: &str, key: &Arc<str>, now: Instant) {
        let Some(known) = self.queues.get_mut(queue) else {
            return;
        };
        self.keys += 1;
        self.key_bytes += key.len();
        let series = (Arc::<str>::from(queue), known.dimension, key.clone());
        let is_shown = self.shown.contains(&series)
            || self.shown.len() < SHOWN_MAX && self.shown.insert(series);
        let of_key = Key {
            counts: Counts::default(),
            selected_at: now,
            is_shown,
        };
        known.keys.insert(key.clone(), of_key);
    }

    /// Merges idle keys and their counts into the entry of the other keys. The last key of a queue stays: the report
    /// leaves out queues without keys. In the metrics, the earlier counts keep the name of their key.
    fn drop_idle(&mut self, turns: &Turns, now: Instant) {
        if self.search_at.is_some_and(|at| now < at) {
            return;
        }
        self.search_at = Some(now + SEARCH_EVERY);
        for (queue, known) in &mut self.queues {
            let Queue {
                dimension,
                keys,
                others,
            } = known;
            let mut left = keys.len();
            keys.retain(|key, of_key| {
                let unselected = now.saturating_duration_since(of_key.selected_at);
                let is_idle = unselected >= IDLE_AFTER && !turns.has_lanes(queue, key);
                if !is_idle || left == 1 {
                    return true;
                }
                left -= 1;
                others.add(of_key.counts);
                if of_key.is_shown {
                    gauge!("rouse_fair_deficit", &labels(queue, dimension, key)).set(0.0);
                }
                false
            });
        }
        self.count_keys();
    }

    /// Counts the keys again, after some have been removed.
    fn count_keys(&mut self) {
        let keys = || self.queues.values().flat_map(|queue| queue.keys.keys());
        self.keys = keys().count();
        self.key_bytes = keys().map(|key| key.len()).sum();
    }

    /// Counts the keys of a class that have jobs but none in the next claim: all except the `chosen` ones.
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
        for (key, of_key) in &mut known.keys {
            if !chosen.contains(key) && turns.has_key(class, queue, key) {
                others -= 1;
                let labels = labels(queue, known.dimension, of_key.shown_as(key));
                counter!("rouse_fair_deferrals_total", &labels).increment(1);
                of_key.counts.deferred += 1;
            }
        }
        if others > 0 {
            let others = u64::try_from(others).unwrap_or(u64::MAX);
            let labels = labels(queue, known.dimension, OTHERS);
            counter!("rouse_fair_deferrals_total", &labels).increment(others);
            known.others.deferred += others;
        }
    }

    fn add(&mut self, queue: &str, key: &str, more: Counts, now: Instant) {
        let Some(known) = self.queues.get_mut(queue) else {
            return;
        };
        let (counts, name) = match known.keys.get_mut(key) {
            Some(of_key) => {
                of_key.selected_at = now;
                let name = of_key.shown_as(key);
                (&mut of_key.counts, name)
            }
            None => (&mut known.others, OTHERS),
        };
        counts.add(more);
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
        // There may be thousands of queues. At most KEYS_MAX of them have a key that is counted separately.
        let counted = self.queues.iter();
        let counted = counted.filter(|(_, known)| !known.keys.is_empty());
        for (queue, known) in counted {
            let mut keys = Vec::with_capacity(known.keys.len() + 1);
            for (key, of_key) in &known.keys {
                let deficit = turns.credit(queue, key);
                if of_key.is_shown {
                    gauge!("rouse_fair_deficit", &labels(queue, known.dimension, key)).set(deficit);
                }
                keys.push(stats(Some(key), of_key.counts, Some(deficit)));
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
