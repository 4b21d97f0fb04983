//! `[handlers."…"]`: what an operator sets for a handler, or for all that fit a pattern.

use std::collections::BTreeMap;
use std::time::Duration;

use semver::Version;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

use super::dir_table::DirTable;
use super::limits_table::LimitsTable;
use super::own_settings::OwnSettings;
use crate::sandbox::{Instances, ModuleBinding};
use crate::worker::Override;

use super::http_table::HttpTable;
use super::secret_table::SecretUseTable;
use super::state_table::StateTable;

/// The settings of one handler or pattern.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HandlerTable {
    /// Which module the names are from: a file, a digest or a key, or several of them.
    #[serde(default, deserialize_with = "super::modules::bindings")]
    pub(super) module: Option<Vec<ModuleBinding>>,
    /// The oldest version that may serve.
    #[serde(default, deserialize_with = "super::modules::version")]
    pub(super) version_min: Option<Version>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    pub(super) lease: Option<Duration>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    pub(super) timeout: Option<Duration>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    pub(super) grace: Option<Duration>,
    pub(super) max_attempts: Option<u32>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    pub(super) retry_initial: Option<Duration>,
    #[serde(default, deserialize_with = "crate::duration::optional")]
    pub(super) retry_max: Option<Duration>,
    pub(super) retry_multiplier: Option<f64>,
    /// The share of a wait that is random.
    pub(super) retry_jitter: Option<f64>,
    /// How long a slot waits after an attempt.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    pub(super) job_delay: Option<Duration>,
    /// `reuse` allows the instances of the handler to serve many jobs, if its module agrees.
    pub(super) instances: Option<Instances>,
    /// What its attempts may use.
    #[serde(default)]
    pub(super) limits: LimitsTable,
    #[serde(default, deserialize_with = "super::list::read")]
    pub(super) dirs: Vec<DirTable>,
    #[serde(default, deserialize_with = "super::list::read")]
    pub(super) http: Vec<HttpTable>,
    #[serde(default, deserialize_with = "super::list::read")]
    pub(super) secrets: Vec<SecretUseTable>,
    /// Variables of its environment; those of the host are never there.
    pub(super) env: Option<BTreeMap<String, String>>,
    /// What it is told through `settings`.
    pub(super) settings: Option<OwnSettings>,
    /// There: the handler may keep state.
    pub(super) state: Option<StateTable>,
    /// True: its clocks are as fine as the machine's.
    pub(super) fine_clocks: Option<bool>,
    /// Refused, until a host keeps to it: a limit that does not hold is worse than none.
    #[serde(default, rename = "concurrency", deserialize_with = "not_enforced")]
    _concurrency: (),
}

fn not_enforced<'de, D: Deserializer<'de>>(_: D) -> Result<(), D::Error> {
    Err(D::Error::custom(
        "no host enforces `concurrency` yet; take it out (`slots` limits the attempts of a host)",
    ))
}

impl HandlerTable {
    /// What the worker has to know of it.
    pub(super) fn over(&self) -> Override {
        Override {
            lease: self.lease,
            timeout: self.timeout,
            grace: self.grace,
            max_attempts: self.max_attempts,
            retry_initial: self.retry_initial,
            retry_max: self.retry_max,
            retry_multiplier: self.retry_multiplier,
            retry_jitter: self.retry_jitter,
            job_delay: self.job_delay,
        }
    }
}
