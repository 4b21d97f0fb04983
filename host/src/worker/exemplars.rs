//! Exemplars of a histogram: for each bucket, the trace of the newest attempt in it, so that a peak in a chart can be
//! traced to an attempt. Only recorded traces count.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

/// The exemplars of `rouse_attempt_seconds`, by handler. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Exemplars {
    /// The upper bounds of all buckets except the last, which has none.
    bounds: &'static [f64],
    of: Arc<Mutex<HashMap<String, Vec<Option<Exemplar>>>>>,
}

/// The attempt that a bucket shows.
#[derive(Debug, Clone, PartialEq)]
pub struct Exemplar {
    /// The id of its trace, in hexadecimal.
    pub trace_id: String,
    /// Its duration.
    pub seconds: f64,
    /// When it ended.
    pub at: SystemTime,
}

impl Exemplars {
    /// Exemplars for a histogram with these upper bounds, ascending.
    pub fn new(bounds: &'static [f64]) -> Self {
        Self {
            bounds,
            of: Arc::default(),
        }
    }

    /// Records an attempt of a handler.
    pub fn record(&self, handler: &str, exemplar: Exemplar) {
        let bucket = self.bucket(exemplar.seconds);
        let mut of = self.lock();
        if let Some(buckets) = of.get_mut(handler) {
            buckets[bucket] = Some(exemplar);
            return;
        }
        let mut buckets = vec![None; self.bounds.len() + 1];
        buckets[bucket] = Some(exemplar);
        of.insert(handler.to_owned(), buckets);
    }

    /// The exemplar of the bucket that ends at this bound; infinity for the last.
    pub fn get(&self, handler: &str, bound: f64) -> Option<Exemplar> {
        self.lock().get(handler)?[self.bucket(bound)].clone()
    }

    /// The first bucket that includes the value.
    fn bucket(&self, value: f64) -> usize {
        self.bounds.partition_point(|bound| *bound < value)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<Option<Exemplar>>>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Exemplars {
    /// Exemplars with a single bucket, for hosts on which nothing reads them.
    fn default() -> Self {
        Self::new(&[])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_bucket_has_the_newest_attempt_in_it() {
        let exemplars = Exemplars::new(&[0.1, 1.0]);
        let of = |trace: &str, seconds| Exemplar {
            trace_id: trace.into(),
            seconds,
            at: SystemTime::UNIX_EPOCH,
        };
        for (trace, seconds) in [("a", 0.1), ("b", 0.5), ("c", 1.0), ("d", 7.0)] {
            exemplars.record("x", of(trace, seconds));
        }
        let found = |bound| exemplars.get("x", bound).map(|found| found.trace_id);
        assert_eq!(found(0.1).as_deref(), Some("a"));
        assert_eq!(found(1.0).as_deref(), Some("c"));
        assert_eq!(found(f64::INFINITY).as_deref(), Some("d"));
        assert_eq!(exemplars.get("y", 1.0), None);
    }
}
