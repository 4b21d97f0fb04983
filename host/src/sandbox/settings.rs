//! What the operator decides about the sandbox.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use semver::Version;
use serde_json::Value;

use super::{
    CompilerLimits, Grants, HttpGrant, HttpSettings, Instances, Limits, ModuleBinding, Pin,
    SecretGrant, Secrets, StateQuota,
};
use crate::job::{narrowest, narrowest_first};
use crate::setting::Overlay;

/// Short enough for guests that wait their turn, and for the end of one that will not stop; a hundred interruptions of a
/// second cost nothing that can be measured.
const TICK: Duration = Duration::from_millis(10);

/// A Rust guest has 0.1 to 5 MiB, a JavaScript one about 12, a Python one about 40.
const MODULE_BYTES_MAX: usize = 64 << 20;

/// Attempts mostly wait, so there are more of them than cores.
const ATTEMPTS_PER_CORE: usize = 4;

/// A Rust guest takes a second or two, a JavaScript one ten, a Python one a minute on a slow machine.
const COMPILE_CPU_MAX: Duration = Duration::from_secs(120);

/// Address space: the program itself and its threads take half a gigabyte of it, a Python guest one more.
const COMPILE_MEMORY_BYTES_MAX: usize = 2 << 30;

/// Each may take so much memory. More than four rarely come at once.
const COMPILATIONS_MAX: usize = 4;

/// What one module may be made of. The pool has room for all of it for each attempt, so that none ever waits for a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleParts {
    /// Core instances. A Rust guest has 3 or 4 (its own code, and small ones that tie it to the host), one of
    /// componentize-qjs 9, one of componentize-py 14. They cost nothing that is not used. Default: 20.
    pub core_instances: u32,
    /// Linear memories. Most guests have 1, those of componentize-qjs 2. Each reserves 4 GiB of address space for each
    /// attempt, and up to 4 memory mappings while it is used. Default: 4.
    pub memories: u32,
    /// Tables. A Rust guest has 2. Each reserves 160 KiB of address space for each attempt. Default: 8.
    pub tables: u32,
}

impl Default for ModuleParts {
    fn default() -> Self {
        Self {
            core_instances: 20,
            memories: 4,
            tables: 8,
        }
    }
}

/// What the operator decides about the sandbox. The defaults grant nothing.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The file in which an operator would change them, for messages. Default: the usual one.
    pub config_file: Option<PathBuf>,
    /// What stands in it, so that lines which are printed for it fit there.
    pub config: Arc<str>,
    /// Attempts that may run at the same time. May be lowered at start to what the machine can
    /// hold; see [`Sandbox::attempts_max`](super::Sandbox::attempts_max). Default: 4 × cores.
    pub attempts_max: usize,
    /// What the attempts of every handler may use, where nothing else is set.
    pub limits: Limits,
    /// What those of some handlers may use, by handler name or pattern: of each limit the narrowest that sets it counts.
    pub limits_of: BTreeMap<String, Overlay<Limits>>,
    /// Memory of all attempts together, bytes. None: three quarters of the machine's (or of the
    /// control group's), which is the default.
    pub memory_bytes_total_max: Option<usize>,
    /// Size of a file in the handlers folder, bytes. Default: 64 MiB.
    pub module_bytes_max: usize,
    /// What one module may be made of.
    pub module_parts: ModuleParts,
    /// Which directories handlers may use. Default: none.
    pub grants: Grants,
    /// Variables of their environment, by handler name or pattern, of which the narrowest one counts. Default: none.
    pub env: BTreeMap<String, BTreeMap<String, String>>,
    /// What handlers are told through `settings`, JSON objects, by handler name or pattern, of which the narrowest one
    /// counts. Default: none.
    pub handler_settings: BTreeMap<String, Value>,
    /// Which handlers have clocks as fine as the machine's: by name or pattern, of which the narrowest one counts.
    /// Default: none.
    pub fine_clocks: BTreeMap<String, bool>,
    /// Which requests handlers may send. Default: none.
    pub http_grants: Vec<HttpGrant>,
    /// What holds for all requests.
    pub http: HttpSettings,
    /// Secrets that handlers can have sent. Default: none.
    pub secrets: Secrets,
    /// Which handlers may have them sent where. Default: none.
    pub secret_grants: Vec<SecretGrant>,
    /// Which handlers may keep state, and how much: by handler name or pattern, of which the narrowest one counts.
    /// Default: none.
    pub state: BTreeMap<String, StateQuota>,
    /// Where instances may serve many jobs, if the module agrees: by handler name or pattern, of
    /// which the narrowest one counts. Default: nowhere.
    pub instances: BTreeMap<String, Instances>,
    /// The `rouse` that compiles modules, each in a child process with limits. None: this process compiles, without any.
    /// Default: none, because only the program knows where it is.
    pub compiler: Option<PathBuf>,
    /// CPU time of a compiler, whole seconds. Default: 120 s.
    pub compile_cpu_max: Duration,
    /// Address space of a compiler, bytes. Default: 2 GiB.
    pub compile_memory_bytes_max: usize,
    /// How many modules may be compiled at once. Default: one for each core, at most 4.
    pub compilations_max: usize,
    /// Where machine code is kept from one start to the next: a directory of this user, to which nobody else may write.
    /// Default: nowhere.
    pub cache_dir: Option<PathBuf>,
    /// What modules have to show before they may serve. Default: nothing.
    pub pin: Pin,
    /// Which modules may have handlers of these names, by name or pattern, of which the narrowest one counts; one of those that are
    /// listed is enough. Secrets that are granted under a name, and directories and state that are granted under a pattern, are for
    /// modules that it is bound to. Default: any.
    pub modules: BTreeMap<String, Vec<ModuleBinding>>,
    /// The oldest version of a handler that may serve, by name or pattern, of which the narrowest one counts. Default: any.
    pub versions_min: BTreeMap<String, Version>,
    /// As while somebody develops, with no modules of strangers: a handler has the secrets of its own table without a binding, and its
    /// name is free as soon as its file is gone. Default: false.
    pub is_dev: bool,
    /// How often a guest that computes makes room for others, and is asked whether it has to stop. Default: 10 ms.
    pub tick: Duration,
}

impl Settings {
    /// What the attempts of this handler may use: each limit from the narrowest table that sets it.
    pub fn limits(&self, handler: &str) -> Limits {
        let widest_first = narrowest_first(&self.limits_of, handler).into_iter().rev();
        widest_first.fold(self.limits.clone(), |limits, (_, set)| set.over(&limits))
    }

    /// The most memory that any attempt may have, bytes: whatever is set for it stands in one of the tables.
    pub(super) fn memory_bytes_most(&self) -> usize {
        let some = self.limits_of.values().map(|set| set.over(&self.limits));
        some.chain([self.limits.clone()])
            .map(|limits| limits.memory_bytes.max(limits.memory_retry_bytes))
            .fold(0, usize::max)
    }

    /// What a compiler may use.
    pub(super) fn compiler_limits(&self) -> CompilerLimits {
        CompilerLimits {
            cpu_max: self.compile_cpu_max,
            memory_bytes_max: self.compile_memory_bytes_max,
        }
    }

    /// What the operator says of this handler's instances.
    pub fn instances_of(&self, handler: &str) -> Instances {
        let said = narrowest(&self.instances, handler);
        said.copied().unwrap_or_default()
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
            config_file: None,
            config: Arc::default(),
            attempts_max: ATTEMPTS_PER_CORE * cores,
            limits: Limits::default(),
            limits_of: BTreeMap::new(),
            memory_bytes_total_max: None,
            module_bytes_max: MODULE_BYTES_MAX,
            module_parts: ModuleParts::default(),
            grants: Grants::default(),
            env: BTreeMap::new(),
            handler_settings: BTreeMap::new(),
            fine_clocks: BTreeMap::new(),
            http_grants: Vec::new(),
            http: HttpSettings::default(),
            secrets: Secrets::default(),
            secret_grants: Vec::new(),
            state: BTreeMap::new(),
            instances: BTreeMap::new(),
            compiler: None,
            compile_cpu_max: COMPILE_CPU_MAX,
            compile_memory_bytes_max: COMPILE_MEMORY_BYTES_MAX,
            compilations_max: cores.min(COMPILATIONS_MAX),
            cache_dir: None,
            pin: Pin::default(),
            modules: BTreeMap::new(),
            versions_min: BTreeMap::new(),
            is_dev: false,
            tick: TICK,
        }
    }
}
