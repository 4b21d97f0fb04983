//! The settings of one handler: the operator's, or else the module's, or else the default.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use crate::job::{AbortReason, RetryPolicy, narrowest_first};
use crate::sandbox::{AbortHandle, HandlerManifest, Run};

/// The shortest lease: a renewal is sent before half of it has passed, and needs a round trip.
pub(super) const LEASE_MIN: Duration = Duration::from_secs(2);

/// The operator's settings for one handler. `None` means the module's own.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Override {
    /// How long a claim is valid without renewal.
    pub lease: Option<Duration>,
    /// The run timeout of an attempt.
    pub timeout: Option<Duration>,
    /// From the abort signal to the hard stop.
    pub grace: Option<Duration>,
    /// The maximum number of attempts.
    pub max_attempts: Option<u32>,
    /// The wait after the first failed attempt.
    pub retry_initial: Option<Duration>,
    /// The longest wait.
    pub retry_max: Option<Duration>,
    /// The factor by which each further wait is longer.
    pub retry_multiplier: Option<f64>,
    /// The random share of a wait, 0 to 1.
    pub retry_jitter: Option<f64>,
    /// How long a slot waits after an attempt before it starts the next one.
    pub job_delay: Option<Duration>,
}

/// The operator's settings by handler name or pattern (`image.*`). The most specific entry that has a setting decides it: the exact name
/// before a pattern, a longer pattern before a shorter one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides(pub BTreeMap<String, Override>);

impl Overrides {
    /// The settings for this handler, or for every handler of this pattern.
    pub fn of(&self, handler: &str) -> Override {
        let narrowest_first = narrowest_first(&self.0, handler).into_iter();
        narrowest_first.fold(Override::default(), |set, (_, wider)| set.or(wider))
    }
}

impl Override {
    /// These settings, completed from a less specific entry.
    fn or(&self, wider: &Self) -> Self {
        Self {
            lease: self.lease.or(wider.lease),
            timeout: self.timeout.or(wider.timeout),
            grace: self.grace.or(wider.grace),
            max_attempts: self.max_attempts.or(wider.max_attempts),
            retry_initial: self.retry_initial.or(wider.retry_initial),
            retry_max: self.retry_max.or(wider.retry_max),
            retry_multiplier: self.retry_multiplier.or(wider.retry_multiplier),
            retry_jitter: self.retry_jitter.or(wider.retry_jitter),
            job_delay: self.job_delay.or(wider.job_delay),
        }
    }
}

/// The resolved settings of one handler.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// How long a claim is valid without renewal.
    pub lease: Duration,
    /// The run timeout of an attempt.
    pub timeout: Duration,
    /// From the abort signal to the hard stop.
    pub grace: Duration,
    /// The backoff, and the maximum number of attempts.
    pub retry: RetryPolicy,
    /// How long a slot waits after an attempt before it starts the next one. `None` means the worker's setting.
    pub job_delay: Option<Duration>,
}

impl Policy {
    /// The operator's settings override the module's. The manifest already contains the defaults.
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
                jitter: set.retry_jitter.unwrap_or(module.jitter),
            },
            job_delay: set.job_delay,
        }
    }

    /// The policy with the lease and the run timeout of a job, if it has its own. The timeout may exceed the module's, which is only a
    /// proposal, but never the one that the operator has set for the handler.
    pub(super) fn of_job(
        self,
        lease: Option<Duration>,
        timeout: Option<Duration>,
        operator_timeout: Option<Duration>,
    ) -> Self {
        Self {
            lease: lease.unwrap_or(self.lease).max(LEASE_MIN),
            timeout: match (timeout, operator_timeout) {
                (Some(own), Some(max)) => own.min(max),
                (Some(own), None) => own,
                (None, _) => self.timeout,
            },
            ..self
        }
    }

    /// Awaits the run, and aborts it at the run timeout.
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
    fn a_jobs_timeout_may_exceed_the_modules_but_not_the_operators() {
        let secs = Duration::from_secs;
        let handler = Policy {
            lease: secs(60),
            timeout: secs(10),
            grace: secs(5),
            retry: RetryPolicy::default(),
            job_delay: None,
        };
        for (own, operator, timeout) in [
            (None, None, 10),
            (None, Some(10), 10),
            (Some(3), None, 3),
            (Some(30), None, 30),
            (Some(3), Some(10), 3),
            (Some(30), Some(10), 10),
        ] {
            let found = handler
                .clone()
                .of_job(None, own.map(secs), operator.map(secs));
            assert_eq!(found.timeout, secs(timeout), "{own:?}, {operator:?}");
            assert_eq!(found.lease, secs(60));
        }
        let found = handler.of_job(Some(secs(300)), None, None);
        assert_eq!((found.lease, found.timeout), (secs(300), secs(10)));
    }

    #[test]
    fn the_most_specific_entry_with_a_setting_decides_it() {
        let secs = |secs| Some(Duration::from_secs(secs));
        let overrides = Overrides(BTreeMap::from([
            (
                "*".into(),
                Override {
                    lease: secs(1),
                    grace: secs(1),
                    ..Override::default()
                },
            ),
            (
                "image.*".into(),
                Override {
                    lease: secs(2),
                    timeout: secs(2),
                    ..Override::default()
                },
            ),
            (
                "image.thumbnail".into(),
                Override {
                    lease: secs(3),
                    max_attempts: Some(3),
                    ..Override::default()
                },
            ),
        ]));
        for (handler, lease, timeout, max_attempts) in [
            ("image.thumbnail", secs(3), secs(2), Some(3)),
            ("image.crop", secs(2), secs(2), None),
            ("text.stats", secs(1), None, None),
        ] {
            let set = overrides.of(handler);
            let found = (set.lease, set.timeout, set.max_attempts);
            assert_eq!(found, (lease, timeout, max_attempts), "{handler}");
            assert_eq!(set.grace, secs(1), "{handler}");
        }
    }
}
