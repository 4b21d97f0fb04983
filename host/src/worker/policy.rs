//! What holds for one handler: the operator's setting, else the module's, else the default.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use crate::job::{AbortReason, RetryPolicy, most_specific};
use crate::sandbox::{AbortHandle, HandlerManifest, Run};

/// The shortest lease: renewals come at under half of it, and need a round trip.
pub(super) const LEASE_MIN: Duration = Duration::from_secs(2);

/// What the operator sets for one handler; none: the module's own.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Override {
    /// How long a claim is good for before it has to be renewed.
    pub lease: Option<Duration>,
    /// How long one attempt may run.
    pub timeout: Option<Duration>,
    /// From the abort signal to the hard stop.
    pub grace: Option<Duration>,
    /// Attempts in all.
    pub max_attempts: Option<u32>,
    /// The wait after the first failed attempt.
    pub retry_initial: Option<Duration>,
    /// The longest wait.
    pub retry_max: Option<Duration>,
    /// By how much each further wait is longer.
    pub retry_multiplier: Option<f64>,
}

/// The operator's settings by handler name or pattern (`image.*`). The exact name wins over a
/// pattern, and a longer pattern over a shorter one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides(pub BTreeMap<String, Override>);

impl Overrides {
    fn of(&self, handler: &str) -> Override {
        most_specific(&self.0, handler).cloned().unwrap_or_default()
    }
}

/// What holds for one handler.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// How long a claim is good for before it has to be renewed.
    pub lease: Duration,
    /// How long one attempt may run.
    pub timeout: Duration,
    /// From the abort signal to the hard stop.
    pub grace: Duration,
    /// When to try again.
    pub retry: RetryPolicy,
}

impl Policy {
    /// Operator over module; the manifest has the defaults filled in.
    pub fn resolve(manifest: &HandlerManifest, overrides: &Overrides) -> Self {
        let set = overrides.of(&manifest.name);
        let module = &manifest.retry;
        Self {
            lease: set.lease.unwrap_or(manifest.lease).max(LEASE_MIN),
            timeout: set.timeout.unwrap_or(manifest.timeout),
            grace: set.grace.unwrap_or(manifest.grace),
            retry: RetryPolicy {
                max_attempts: set.max_attempts.unwrap_or(module.max_attempts),
                initial: set.retry_initial.unwrap_or(module.initial),
                max: set.retry_max.unwrap_or(module.max),
                multiplier: set.retry_multiplier.unwrap_or(module.multiplier),
                jitter: module.jitter,
            },
        }
    }

    /// The run, which is told to stop when its time is over.
    pub async fn within(&self, run: impl Future<Output = Run>, abort: &AbortHandle) -> Run {
        let mut run = pin!(run);
        tokio::select! {
            biased;
            run = &mut run => run,
            () = tokio::time::sleep(self.timeout) => {
                abort.abort(AbortReason::TimedOut, self.grace);
                run.await
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exact_name_wins_over_a_pattern_and_the_longer_pattern_over_the_shorter() {
        let lease = |secs| Override {
            lease: Some(Duration::from_secs(secs)),
            ..Override::default()
        };
        let overrides = Overrides(BTreeMap::from([
            ("*".into(), lease(1)),
            ("image.*".into(), lease(2)),
            ("image.thumbnail".into(), lease(3)),
        ]));
        for (handler, secs) in [("image.thumbnail", 3), ("image.crop", 2), ("text.stats", 1)] {
            assert_eq!(
                overrides.of(handler).lease,
                Some(Duration::from_secs(secs)),
                "{handler}"
            );
        }
    }
}
