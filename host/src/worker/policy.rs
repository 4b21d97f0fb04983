//! The settings of one handler: the operator's, or else the module's, or else the default.

use std::collections::BTreeMap;
use std::pin::pin;
use std::time::Duration;

use crate::job::{AbortReason, RetryPolicy, most_specific_first};
use crate::sandbox::{AbortHandle, HandlerManifest, RunReport};
use crate::setting::Field::{Ratio, Time, U32};
use crate::setting::{Overlay, Settable, Setting};

/// The shortest lease. A manifest, `rouse.toml` or an enqueue with a shorter one is refused.
pub(super) const LEASE_MIN: Duration = Duration::from_millis(HandlerManifest::LEASE_MS_MIN);

const HOUR_MS: u64 = 3_600_000;

/// The operator's settings for one handler. The rest are the module's own.
pub type Override = Overlay<Policy>;

/// The operator's settings by handler name or pattern (`image.*`). The most specific entry that has a setting decides
/// it: the exact name before a pattern, a longer pattern before a shorter one.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Overrides(pub BTreeMap<String, Override>);

impl Overrides {
    /// The settings for this handler, or for every handler of this pattern.
    pub fn for_handler(&self, handler: &str) -> Override {
        let most_specific_first = most_specific_first(&self.0, handler).into_iter();
        most_specific_first.fold(Override::default(), |set, (_, wider)| set.or(wider))
    }
}

/// The resolved settings of one handler.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// The time for which a claim is valid without renewal.
    pub lease: Duration,
    /// The run timeout of an attempt.
    pub timeout: Duration,
    /// The time between the abort signal and the hard stop.
    pub grace: Duration,
    /// The backoff, and the maximum number of attempts.
    pub retry: RetryPolicy,
    /// The maximum number of attempts of the handler that run at the same time on this host. `None`: the number of
    /// slots.
    pub concurrency: Option<u32>,
    /// The time that a slot waits after an attempt before it starts the next one. `None` means the worker's setting.
    pub job_delay: Option<Duration>,
}

impl Default for Policy {
    /// The policy of a handler for which neither its manifest nor the operator has settings.
    fn default() -> Self {
        Self {
            lease: HandlerManifest::LEASE,
            timeout: HandlerManifest::TIMEOUT,
            grace: HandlerManifest::GRACE,
            retry: RetryPolicy::default(),
            concurrency: None,
            job_delay: None,
        }
    }
}

impl Settable for Policy {
    const SETTINGS: &'static [Setting<Self>] = &[
        Setting::new(
            "lease",
            HandlerManifest::LEASE_MS_MIN..=HandlerManifest::LEASE_MS_MAX,
            |of| Time(&mut of.lease),
            "How long a claim is valid; running attempts renew it in time",
        ),
        Setting::new(
            "timeout",
            1..=HandlerManifest::WAIT_MS_MAX,
            |of| Time(&mut of.timeout),
            "How long one attempt may run",
        ),
        Setting::new(
            "grace",
            0..=HandlerManifest::GRACE_MS_MAX,
            |of| Time(&mut of.grace),
            "Time from the abort signal to the hard stop",
        ),
        Setting::new(
            "max_attempts",
            1..=1000,
            |of| U32(&mut of.retry.max_attempts),
            "Maximum number of attempts that end in an error, the first included",
        ),
        Setting::new(
            "retry_initial",
            0..=HandlerManifest::WAIT_MS_MAX,
            |of| Time(&mut of.retry.initial),
            "Wait after the first failed attempt",
        ),
        Setting::new(
            "retry_multiplier",
            1..=1000,
            |of| Ratio(&mut of.retry.multiplier),
            "Factor by which each wait is longer than the one before",
        ),
        Setting::new(
            "retry_max",
            0..=HandlerManifest::WAIT_MS_MAX,
            |of| Time(&mut of.retry.max),
            "Longest wait, jitter included",
        ),
        Setting::new(
            "retry_jitter",
            0..=1,
            |of| Ratio(&mut of.retry.jitter),
            "Share of a wait that is random",
        ),
        Setting::new(
            "concurrency",
            1..=1_000_000,
            |of: &mut Self| U32(of.concurrency.get_or_insert_default()),
            "How many attempts of the handler may run at the same time on one host; for a pattern, of each of its handlers",
        )
        .default_text("as many as there are slots"),
        Setting::new(
            "job_delay",
            0..=HOUR_MS,
            |of| Time(of.job_delay.get_or_insert_default()),
            "How long a slot waits after an attempt; if it is not set, the worker's own `job_delay` applies",
        ),
    ];

    fn check_together(&self, here: &Overlay<Self>, set: &Overlay<Self>) -> Result<(), String> {
        // The module's own values are not known here.
        if !here.has("retry_initial") && !here.has("retry_max") {
            return Ok(());
        }
        match (set.time("retry_initial"), set.time("retry_max")) {
            (Some(initial), Some(max)) if initial > max => Err(format!(
                "retry_initial must be at most retry_max, which is {}, not {}",
                humantime::format_duration(max),
                humantime::format_duration(initial)
            )),
            _ => Ok(()),
        }
    }
}

impl Policy {
    /// The operator's settings override the module's. The manifest already contains the defaults.
    pub fn resolve(manifest: &HandlerManifest, overrides: &Overrides) -> Self {
        let of_module = Self {
            lease: manifest.lease,
            timeout: manifest.timeout,
            grace: manifest.grace,
            retry: manifest.retry.clone(),
            concurrency: manifest.concurrency,
            job_delay: None,
        };
        overrides.for_handler(&manifest.name).over(&of_module)
    }

    /// The policy with the lease and the run timeout of a job, if it has its own. The timeout may exceed the module's,
    /// which is only a default, but never the one that the operator has set for the handler.
    pub(super) fn with_job_times(
        self,
        lease: Option<Duration>,
        timeout: Option<Duration>,
        operator_timeout: Option<Duration>,
    ) -> Self {
        Self {
            lease: lease.unwrap_or(self.lease),
            timeout: match (timeout, operator_timeout) {
                (Some(own), Some(max)) => own.min(max),
                (Some(own), None) => own,
                (None, _) => self.timeout,
            },
            ..self
        }
    }

    /// Awaits the run, and aborts it at the run timeout.
    pub async fn run_with_timeout(
        &self,
        run: impl Future<Output = RunReport>,
        abort: &AbortHandle,
    ) -> RunReport {
        let mut run = pin!(run);
        tokio::select! {
            biased;
            report = &mut run => report,
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
    use crate::setting::Number;

    #[test]
    fn a_jobs_timeout_may_exceed_the_modules_but_not_the_operators() {
        let secs = Duration::from_secs;
        let handler = Policy {
            lease: secs(60),
            timeout: secs(10),
            grace: secs(5),
            retry: RetryPolicy::default(),
            concurrency: None,
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
                .with_job_times(None, own.map(secs), operator.map(secs));
            assert_eq!(found.timeout, secs(timeout), "{own:?}, {operator:?}");
            assert_eq!(found.lease, secs(60));
        }
        let found = handler.with_job_times(Some(secs(300)), None, None);
        assert_eq!((found.lease, found.timeout), (secs(300), secs(10)));
    }

    #[test]
    fn the_most_specific_entry_with_a_setting_decides_it() {
        let secs = |secs| Some(Duration::from_secs(secs));
        let set = |times: &[(&str, u64)]| {
            times.iter().fold(Override::default(), |set, (key, secs)| {
                set.with(key, Duration::from_secs(*secs))
            })
        };
        let overrides = Overrides(BTreeMap::from([
            ("*".into(), set(&[("lease", 4), ("grace", 1)])),
            ("image.*".into(), set(&[("lease", 2), ("timeout", 2)])),
            (
                "image.thumbnail".into(),
                set(&[("lease", 3)]).with("max_attempts", 3_u32),
            ),
        ]));
        for (handler, lease, timeout, max_attempts) in [
            ("image.thumbnail", secs(3), secs(2), Some(Number::Whole(3))),
            ("image.crop", secs(2), secs(2), None),
            ("text.stats", secs(4), None, None),
        ] {
            let set = overrides.for_handler(handler);
            assert_eq!(set.time("lease"), lease, "{handler}");
            assert_eq!(set.time("timeout"), timeout, "{handler}");
            assert_eq!(set.get("max_attempts"), max_attempts, "{handler}");
            assert_eq!(set.time("grace"), secs(1), "{handler}");
        }
    }
}
