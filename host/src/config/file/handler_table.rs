//! `[handlers."…"]`: what an operator sets for a handler, or for all that fit a pattern.

use std::path::PathBuf;
use std::time::Duration;

use serde::Deserialize;

use super::limits_table::LimitsTable;
use crate::sandbox::Instances;
use crate::worker::Override;

use super::http_table::HttpTable;
use super::secret_table::SecretUseTable;
use super::state_table::StateTable;

/// The settings of one handler or pattern.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HandlerTable {
    #[serde(default, deserialize_with = "super::duration::read")]
    pub(super) lease: Option<Duration>,
    #[serde(default, deserialize_with = "super::duration::read")]
    pub(super) timeout: Option<Duration>,
    #[serde(default, deserialize_with = "super::duration::read")]
    pub(super) grace: Option<Duration>,
    pub(super) max_attempts: Option<u32>,
    #[serde(default, deserialize_with = "super::duration::read")]
    pub(super) retry_initial: Option<Duration>,
    #[serde(default, deserialize_with = "super::duration::read")]
    pub(super) retry_max: Option<Duration>,
    pub(super) retry_multiplier: Option<f64>,
    /// `reuse` allows the instances of the handler to serve many jobs, if its module agrees.
    #[serde(default)]
    pub(super) instances: Instances,
    /// What its attempts may use.
    #[serde(default)]
    pub(super) limits: LimitsTable,
    #[serde(default)]
    pub(super) dirs: Vec<DirTable>,
    #[serde(default)]
    pub(super) http: Vec<HttpTable>,
    #[serde(default)]
    pub(super) secrets: Vec<SecretUseTable>,
    /// There: the handler may keep state.
    pub(super) state: Option<StateTable>,
}

/// A directory that is granted.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DirTable {
    /// The directory on this machine; relative to the folder of `rouse.toml`.
    pub(super) dir: PathBuf,
    /// Where the handler sees it.
    pub(super) at: String,
    #[serde(default)]
    pub(super) mode: ModeWord,
}

/// What may be done in it.
#[derive(Debug, Default, Deserialize)]
pub(super) enum ModeWord {
    #[default]
    #[serde(rename = "read")]
    Read,
    #[serde(rename = "read-write")]
    ReadWrite,
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
        }
    }
}
