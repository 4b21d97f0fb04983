//! Metrics of attempts. The counters of a handler are looked up once, not for each job.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

use crate::job::{ErrorKind, Outcome};

use super::middleware::{AttemptInfo, Middleware, Next, Running, Traced};
use super::waits::WaitHistograms;

/// The values of the label `outcome` of `rouse_attempts_total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutcomeLabel {
    /// Its job has succeeded.
    Succeeded,
    /// Its job has failed.
    Failed,
    /// It ran longer than its run timeout, and its job has ended.
    TimedOut,
    /// It failed, and its job will be tried again.
    Retried,
    /// It was suspended until its wait ends.
    Suspended,
    /// Its claim was given back.
    Released,
    /// Its lease was lost, and the database refused its outcome.
    Refused,
    /// The response to its settlement was lost, and a later try was refused: its outcome may have been written.
    Unconfirmed,
    /// It had lost its job, and the worker knew this before the settlement.
    Dropped,
    /// Its outcome could not be settled in time.
    GivenUp,
}

impl OutcomeLabel {
    const ALL: [Self; 10] = [
        Self::Succeeded,
        Self::Failed,
        Self::TimedOut,
        Self::Retried,
        Self::Suspended,
        Self::Released,
        Self::Refused,
        Self::Unconfirmed,
        Self::Dropped,
        Self::GivenUp,
    ];

    /// The value of the label.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::TimedOut => "timed_out",
            Self::Retried => "retried",
            Self::Suspended => "suspended",
            Self::Released => "released",
            Self::Refused => "refused",
            Self::Unconfirmed => "unconfirmed",
            Self::Dropped => "dropped",
            Self::GivenUp => "given_up",
        }
    }
}

impl From<&Outcome> for OutcomeLabel {
    fn from(outcome: &Outcome) -> Self {
        match outcome {
            Outcome::Succeeded(_) => Self::Succeeded,
            Outcome::Failed(_) => Self::Failed,
            Outcome::TimedOut(_) => Self::TimedOut,
            Outcome::Retry { .. } => Self::Retried,
            Outcome::Suspended(_) => Self::Suspended,
            Outcome::Released => Self::Released,
        }
    }
}

/// The attempts of one worker, counted by outcome.
#[derive(Debug, Default)]
pub struct OutcomeCounts([AtomicU64; OutcomeLabel::ALL.len()]);

impl OutcomeCounts {
    /// The number of attempts that had this outcome.
    pub fn count(&self, outcome: OutcomeLabel) -> u64 {
        self.0[outcome as usize].load(Ordering::Relaxed)
    }
}

/// The metrics of all attempts.
pub(super) struct Meters {
    pub(super) claimed: Counter,
    running: Gauge,
    pub(super) settle_batch_jobs: Histogram,
    pub(super) waits: WaitHistograms,
    handlers: RwLock<HashMap<String, Arc<HandlerMeters>>>,
    all: Arc<OutcomeCounts>,
}

/// The metrics of one handler's attempts.
pub(super) struct HandlerMeters {
    pub(super) handler: String,
    pub(super) seconds: Histogram,
    outcomes: [Counter; OutcomeLabel::ALL.len()],
    all: Arc<OutcomeCounts>,
}

impl Meters {
    pub(super) fn new(all: Arc<OutcomeCounts>) -> Self {
        Self {
            all,
            claimed: counter!("rouse_jobs_claimed_total"),
            running: gauge!("rouse_attempts_running"),
            settle_batch_jobs: histogram!("rouse_settle_batch_jobs"),
            waits: WaitHistograms::default(),
            handlers: RwLock::default(),
        }
    }

    /// Wraps Rouse's own middleware around this.
    pub(super) fn around(&self, inner: Vec<Arc<dyn Middleware>>) -> Vec<Arc<dyn Middleware>> {
        let metered = Metered {
            running: self.running.clone(),
        };
        let mut all: Vec<Arc<dyn Middleware>> = vec![Arc::new(Traced), Arc::new(metered)];
        all.extend(inner);
        all
    }

    /// The counters of this handler.
    pub(super) fn for_handler(&self, handler: &str) -> Arc<HandlerMeters> {
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
                    outcomes: OutcomeLabel::ALL.map(|outcome| {
                        counter!("rouse_attempts_total", "handler" => handler.to_string(), "outcome" => outcome.as_str())
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

    /// Counts an attempt by its outcome.
    pub(super) fn count(&self, outcome: OutcomeLabel) {
        self.outcomes[outcome as usize].increment(1);
        self.all.0[outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts running attempts.
struct Metered {
    running: Gauge,
}

impl Middleware for Metered {
    fn around<'a>(&'a self, _: &'a AttemptInfo<'a>, next: Next<'a>) -> Running<'a> {
        Box::pin(async move {
            self.running.increment(1);
            let _decrements = Decrement(&self.running);
            next.run().await
        })
    }
}

/// Decrements the gauge even if the attempt panics.
struct Decrement<'a>(&'a Gauge);

impl Drop for Decrement<'_> {
    fn drop(&mut self) {
        self.0.decrement(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_are_listed_in_the_order_of_their_discriminants() {
        for (index, outcome) in OutcomeLabel::ALL.into_iter().enumerate() {
            assert_eq!(outcome as usize, index, "{outcome:?}");
        }
    }
}
