//! What is counted of attempts. The counters of a handler are looked up once, not for each job.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::job::ErrorKind;

use super::middleware::{Metered, Middleware, Traced};

/// What can become of an attempt, as `rouse_attempts_total` says it. `refused`: its lease was lost,
/// and the database said so; `dropped`: the worker knew it already.
const OUTCOMES: [&str; 8] = [
    "succeeded",
    "failed",
    "timed_out",
    "cancelled",
    "retried",
    "released",
    "refused",
    "dropped",
];

/// What has become of all attempts of one worker.
#[derive(Debug, Default)]
pub struct Outcomes([AtomicU64; OUTCOMES.len()]);

impl Outcomes {
    /// How many attempts have come to this outcome, a word of `rouse_attempts_total`; 0 for any other word.
    pub fn of(&self, outcome: &str) -> u64 {
        let place = OUTCOMES.iter().position(|one| *one == outcome);
        place.map_or(0, |place| self.0[place].load(Ordering::Relaxed))
    }
}

/// What is counted of all attempts.
pub(super) struct Meters {
    pub(super) claimed: Counter,
    running: Gauge,
    wait_seconds: Histogram,
    pub(super) settle_batch_jobs: Histogram,
    handlers: RwLock<HashMap<String, Arc<HandlerMeters>>>,
    all: Arc<Outcomes>,
}

/// What is counted of one handler's attempts.
pub(super) struct HandlerMeters {
    pub(super) handler: String,
    pub(super) seconds: Histogram,
    outcomes: [Counter; OUTCOMES.len()],
    all: Arc<Outcomes>,
}

impl Meters {
    pub(super) fn new(all: Arc<Outcomes>) -> Self {
        Self {
            all,
            claimed: counter!("rouse_jobs_claimed_total"),
            running: gauge!("rouse_attempts_running"),
            wait_seconds: histogram!("rouse_wait_seconds"),
            settle_batch_jobs: histogram!("rouse_settle_batch_jobs"),
            handlers: RwLock::default(),
        }
    }

    /// Rouse's own middlewares, around these.
    pub(super) fn around(&self, inner: Vec<Arc<dyn Middleware>>) -> Vec<Arc<dyn Middleware>> {
        let metered = Metered {
            running: self.running.clone(),
            wait_seconds: self.wait_seconds.clone(),
        };
        let mut all: Vec<Arc<dyn Middleware>> = vec![Arc::new(Traced), Arc::new(metered)];
        all.extend(inner);
        all
    }

    /// The counters of this handler.
    pub(super) fn of(&self, handler: &str) -> Arc<HandlerMeters> {
        let known = self.handlers.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(meters) = known.get(handler) {
            return meters.clone();
        }
        drop(known);
        let mut known = self
            .handlers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        known
            .entry(handler.to_string())
            .or_insert_with(|| {
                Arc::new(HandlerMeters {
                    handler: handler.to_string(),
                    all: self.all.clone(),
                    seconds: histogram!("rouse_attempt_seconds", "handler" => handler.to_string()),
                    outcomes: OUTCOMES.map(|outcome| {
                        counter!("rouse_attempts_total", "handler" => handler.to_string(), "outcome" => outcome)
                    }),
                })
            })
            .clone()
    }
}

impl HandlerMeters {
    /// Counts why an attempt did not succeed.
    pub(super) fn count_error(&self, kind: ErrorKind) {
        counter!("rouse_attempt_errors_total", "handler" => self.handler.clone(), "kind" => kind.as_str())
            .increment(1);
    }

    /// Counts what became of an attempt: one of [`OUTCOMES`].
    pub(super) fn count(&self, outcome: &str) {
        let place = OUTCOMES.iter().position(|one| *one == outcome);
        debug_assert!(place.is_some(), "{outcome} is no outcome");
        if let Some(place) = place {
            self.outcomes[place].increment(1);
            self.all.0[place].fetch_add(1, Ordering::Relaxed);
        }
    }
}
