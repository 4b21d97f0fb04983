//! What the operator decides about the sandbox.

use std::collections::BTreeMap;
use std::thread::available_parallelism;

use super::{Grants, Instances};
use crate::job::most_specific;

/// A gigabyte is common on small hosts; 128 MiB leaves room for several attempts at once, and
/// a photograph of 24 megapixels (96 MiB decoded) still fits.
const MEMORY_BYTES_MAX: usize = 128 << 20;

/// Results are kept with the job in Postgres and are read by people; larger ones belong in a
/// file or an object store.
const RESULT_BYTES_MAX: usize = 4 << 20;

/// What a guest prints is for a person who looks for a fault; a loop that prints would fill the
/// host's log.
const LOG_BYTES_MAX: usize = 256 << 10;

/// A Rust guest has 0.1 to 5 MiB, a JavaScript one about 12, a Python one about 40.
const MODULE_BYTES_MAX: usize = 64 << 20;

/// Attempts mostly wait, so there are more of them than cores.
const ATTEMPTS_PER_CORE: usize = 4;

/// What the operator decides about the sandbox. The defaults grant nothing.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Attempts that may run at the same time. May be lowered at start to what the machine can
    /// hold; see [`Sandbox::attempts_max`](super::Sandbox::attempts_max). Default: 4 × cores.
    pub attempts_max: usize,
    /// Memory of one attempt, all its linear memories together, bytes. Default: 128 MiB.
    pub memory_bytes_max: usize,
    /// The most memory of an attempt after one that ran out of it, bytes: that one is tried again with twice
    /// as much, if it fits here. Default: twice `memory_bytes_max`.
    pub memory_retry_bytes_max: usize,
    /// Memory of all attempts together, bytes. None: three quarters of the machine's (or of the
    /// control group's), which is the default.
    pub memory_bytes_total_max: Option<usize>,
    /// Size of a result, bytes. Default: 4 MiB.
    pub result_bytes_max: usize,
    /// What one attempt may write to the host's log through `log`, standard output and standard
    /// error together, bytes. Default: 256 KiB.
    pub log_bytes_max: usize,
    /// Size of a file in the handlers folder, bytes. Default: 64 MiB.
    pub module_bytes_max: usize,
    /// Which directories handlers may use. Default: none.
    pub grants: Grants,
    /// Where instances may serve many jobs, if the module agrees: by handler name or pattern, of
    /// which the most specific one counts. Default: nowhere.
    pub instances: BTreeMap<String, Instances>,
}

impl Settings {
    /// The memory of one attempt, of which an earlier one may have asked for so much.
    pub(super) fn memory_limit(&self, asked: Option<usize>) -> usize {
        let usual = self.memory_bytes_max;
        let most = self.memory_retry_bytes_max.max(usual);
        asked.map_or(usual, |asked| asked.clamp(usual, most))
    }

    /// What an attempt may have after one that ran out of these bytes; none: no more than they.
    pub fn more_memory_than(&self, bytes: usize) -> Option<usize> {
        let more = bytes.saturating_mul(2).min(self.memory_retry_bytes_max);
        (more > bytes).then_some(more)
    }

    /// What the operator says of this handler's instances.
    pub(super) fn instances_of(&self, handler: &str) -> Instances {
        let most_specific = most_specific(&self.instances, handler);
        most_specific.copied().unwrap_or_default()
    }

    /// True when some handler may keep its instances.
    pub(super) fn reuse_somewhere(&self) -> bool {
        self.instances.values().any(|it| *it == Instances::Reuse)
    }
}

impl Default for Settings {
    fn default() -> Self {
        let cores = available_parallelism().map_or(1, usize::from);
        Self {
            attempts_max: ATTEMPTS_PER_CORE * cores,
            memory_bytes_max: MEMORY_BYTES_MAX,
            memory_retry_bytes_max: 2 * MEMORY_BYTES_MAX,
            memory_bytes_total_max: None,
            result_bytes_max: RESULT_BYTES_MAX,
            log_bytes_max: LOG_BYTES_MAX,
            module_bytes_max: MODULE_BYTES_MAX,
            grants: Grants::default(),
            instances: BTreeMap::new(),
        }
    }
}
