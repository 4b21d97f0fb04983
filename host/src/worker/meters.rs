//! What is counted of attempts. The counters of a handler are looked up once, not for each job.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::job::ErrorKind;

use super::middleware::{Metered, Middleware, Traced};
use super::waits::Waits;

/// What can become of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Became {
    /// Its job has succeeded.
    Succeeded,
    /// Its job has failed for good.
    Failed,
    /// It ran too long, and its job has ended with that.
    TimedOut,
    /// Its job was cancelled.
    Cancelled,
    /// It failed, and its job is to be tried again.
    Retried,
    /// Its claim was given back.
    Released,
    /// Its lease was lost, and the database said so.
    Refused,
    /// Its lease was lost, and the worker knew it already.
    Dropped,
    /// Its outcome could not be written in time.
    GivenUp,
}

impl Became {
    const ALL: [Self; 9] = [
        Self::Succeeded,
        Self::Failed,
        Self::TimedOut,
        Self::Cancelled,
        Self::Retried,
        Self::Released,
        Self::Refused,
        Self::Dropped,
        Self::GivenUp,
    ];

    /// The word for `rouse_attempts_total`.
    fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Retried => "retried",
            Self::Released => "released",
            Self::Refused => "refused",
            Self::Dropped => "dropped",
            Self::GivenUp => "given_up",
        }
    }
}

/// What has become of all attempts of one worker.
#[derive(Debug, Default)]
pub struct Outcomes([AtomicU64; Became::ALL.len()]);

impl Outcomes {
    /// How many attempts have come to this.
    pub fn of(&self, became: Became) -> u64 {
        self.0[became as usize].load(Ordering::Relaxed)
    }
}

/// What is counted of all attempts.
pub(super) struct Meters {
    pub(super) claimed: Counter,
    running: Gauge,
    pub(super) settle_batch_jobs: Histogram,
    handlers: RwLock<HashMap<String, Arc<HandlerMeters>>>,
    all: Arc<Outcomes>,
}

/// What is counted of one handler's attempts.
pub(super) struct HandlerMeters {
    pub(super) handler: String,
    pub(super) seconds: Histogram,
    outcomes: [Counter; Became::ALL.len()],
    all: Arc<Outcomes>,
}

impl Meters {
    pub(super) fn new(all: Arc<Outcomes>) -> Self {
        Self {
            all,
            claimed: counter!("rouse_jobs_claimed_total"),
            running: gauge!("rouse_attempts_running"),
            settle_batch_jobs: histogram!("rouse_settle_batch_jobs"),
            handlers: RwLock::default(),
        }
    }

    /// Rouse's own middlewares, around these.
    pub(super) fn around(&self, inner: Vec<Arc<dyn Middleware>>) -> Vec<Arc<dyn Middleware>> {
        let metered = Metered {
            running: self.running.clone(),
            waits: Waits::default(),
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
                    outcomes: Became::ALL.map(|became| {
                        counter!("rouse_attempts_total", "handler" => handler.to_string(), "outcome" => became.as_str())
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

    /// Counts what became of an attempt.
    pub(super) fn count(&self, became: Became) {
        self.outcomes[became as usize].increment(1);
        self.all.0[became as usize].fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_outcome_has_its_place_in_the_list() {
        for (place, became) in Became::ALL.into_iter().enumerate() {
            assert_eq!(became as usize, place, "{became:?}");
        }
    }
}
