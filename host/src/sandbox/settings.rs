//! The operator's settings of the sandbox.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use semver::Version;
use serde_json::Value;

use super::{
    Grants, HttpGrant, HttpSettings, Instances, Limits, ModuleBinding, Pin, SecretGrant, Secrets,
    SqlGrant, StateQuota,
};
use crate::job::{most_specific, most_specific_first};
use crate::setting::Overlay;

/// Short enough for guests that wait their turn, and for stopping a guest that does not stop itself; a hundred
/// interruptions a second have no measurable cost.
const TICK: Duration = Duration::from_millis(10);

/// A Rust guest is 0.1 to 5 MiB large, a JavaScript guest about 12, a Python guest about 40.
const MODULE_BYTES_MAX: usize = 64 << 20;

/// Attempts mostly wait, so there are more of them than cores.
const ATTEMPTS_PER_CORE: usize = 4;

/// A Rust guest takes a second or two, a JavaScript guest ten, a Python guest a minute on a slow machine.
const COMPILE_CPU_MAX: Duration = Duration::from_secs(120);

/// Address space: the program and its threads take half a gigabyte of it, a Python guest one more.
const COMPILE_MEMORY_BYTES_MAX: usize = 2 << 30;

/// Each compiler may take that much memory, and more than four modules rarely arrive at once.
const COMPILATIONS_MAX: usize = 4;

/// The limits of a compiler.
#[derive(Debug, Clone, Copy)]
pub struct CompilerLimits {
    /// CPU time of all its threads together; whole seconds, at least one.
    pub cpu_max: Duration,
    /// Its address space, in bytes.
    pub memory_bytes_max: usize,
}

/// The parts that one module may have. The pool has space for all of them for each attempt, so that no attempt waits
/// for a part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModuleParts {
    /// Core instances. A Rust guest has 3 or 4 (its own code, and small adapters), a guest of componentize-qjs 9, of
    /// componentize-py 14. Unused ones cost nothing. Default: 20.
    pub core_instances: u32,
    /// Linear memories. Most guests have 1, guests of componentize-qjs 2. Each reserves 4 GiB of address space for
    /// each attempt, and up to 4 memory mappings while it is used. Default: 4.
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

/// The operator's settings for the sandbox. The defaults do not grant anything.
#[derive(Debug, Clone)]
pub struct Settings {
    /// The configuration file that messages name. Default: the usual file.
    pub config_file: Option<PathBuf>,
    /// Its text, so that suggested lines can be adapted to it.
    pub config: Arc<str>,
    /// Attempts that may run at the same time. Lowered at startup to the number that the machine can hold; see
    /// [`Sandbox::attempts_max`](super::Sandbox::attempts_max). Default: 4 × cores.
    pub attempts_max: usize,
    /// The limits of attempts, unless a handler's own are set.
    pub limits: Limits,
    /// Limits by handler name or pattern: each limit comes from the most specific entry that sets it.
    pub limits_of: BTreeMap<String, Overlay<Limits>>,
    /// The maximum memory of all attempts together, in bytes. `None`, the default, means three quarters of the
    /// machine's memory (or of the control group's).
    pub memory_bytes_total_max: Option<usize>,
    /// The maximum size of a file in the handlers folder, in bytes. Default: 64 MiB.
    pub module_bytes_max: usize,
    /// The parts that one module may have.
    pub module_parts: ModuleParts,
    /// Which directories handlers may use. Default: none.
    pub grants: Grants,
    /// Environment variables, by handler name or pattern; the most specific entry counts. Default: none.
    pub env: BTreeMap<String, BTreeMap<String, String>>,
    /// The JSON objects that handlers get through `settings`, by handler name or pattern; the most specific entry
    /// counts. Default: none.
    pub handler_settings: BTreeMap<String, Value>,
    /// Which handlers have clocks as fine as the machine's, by name or pattern; the most specific entry counts.
    /// Default: none.
    pub fine_clocks: BTreeMap<String, bool>,
    /// The handlers whose jobs a handler may enqueue (names and patterns), by handler name or pattern.
    pub enqueue: BTreeMap<String, Vec<String>>,
    /// The handlers for which the schedules that their modules declare are created, by name or pattern; the most
    /// specific entry counts. Default: none.
    pub schedules: BTreeMap<String, bool>,
    /// Which requests handlers may send. Default: none.
    pub http_grants: Vec<HttpGrant>,
    /// Settings for all requests.
    pub http: HttpSettings,
    /// The secrets of the host. Default: none.
    pub secrets: Secrets,
    /// Which secrets handlers may send, and where. Default: none.
    pub secret_grants: Vec<SecretGrant>,
    /// Which handlers may keep state, and how much, by handler name or pattern; the most specific entry counts.
    /// Default: none.
    pub state: BTreeMap<String, StateQuota>,
    /// Which SQL statements of their modules handlers may run, by handler name or pattern; the most specific entry
    /// counts. Default: none.
    pub sql: BTreeMap<String, SqlGrant>,
    /// The handlers whose instances may serve many jobs if the module agrees, by handler name or pattern; the most
    /// specific entry counts. Default: none.
    pub instances: BTreeMap<String, Instances>,
    /// The `rouse` program that compiles modules in limited child processes. `None` compiles in this process without
    /// limits. Default: `None`, because only the program knows where it is.
    pub compiler: Option<PathBuf>,
    /// The maximum CPU time of a compiler, in whole seconds. Default: 120 s.
    pub compile_cpu_max: Duration,
    /// The maximum address space of a compiler, in bytes. Default: 2 GiB.
    pub compile_memory_bytes_max: usize,
    /// The number of modules that may be compiled at once. Default: one for each core, at most 4.
    pub compilations_max: usize,
    /// The directory in which machine code is kept across restarts. It must belong to this user, and no other user may
    /// write to it. Default: none.
    pub cache_dir: Option<PathBuf>,
    /// What modules need before they may serve. Default: nothing.
    pub pin: Pin,
    /// Which modules may have these handler names, by name or pattern; the most specific entry counts, and one of its
    /// bindings is enough. Secrets and statements, and directories and state that are granted to a pattern, are only
    /// for modules that the name is bound to. Default: any.
    pub modules: BTreeMap<String, Vec<ModuleBinding>>,
    /// The minimum version of a handler that may serve, by name or pattern; the most specific entry counts. Default:
    /// any.
    pub versions_min: BTreeMap<String, Version>,
    /// True in development, without untrusted modules: a handler gets the secrets of its own table without a binding,
    /// and its name is free as soon as its file is missing. Default: false.
    pub is_dev: bool,
    /// The interval at which a CPU-bound guest yields to others and is checked for an abort. Default: 10 ms.
    pub tick: Duration,
}

impl Settings {
    /// The limits of this handler's attempts: each comes from the most specific table that sets it.
    pub fn limits(&self, handler: &str) -> Limits {
        let widest_first = most_specific_first(&self.limits_of, handler)
            .into_iter()
            .rev();
        widest_first.fold(self.limits.clone(), |limits, (_, set)| set.over(&limits))
    }

    /// The largest memory limit of any attempt, in bytes.
    pub(super) fn memory_bytes_max(&self) -> usize {
        let some = self.limits_of.values().map(|set| set.over(&self.limits));
        some.chain([self.limits.clone()])
            .map(|limits| limits.memory_bytes.max(limits.memory_retry_bytes))
            .fold(0, usize::max)
    }

    /// The limits of a compiler.
    pub(super) fn compiler_limits(&self) -> CompilerLimits {
        CompilerLimits {
            cpu_max: self.compile_cpu_max,
            memory_bytes_max: self.compile_memory_bytes_max,
        }
    }

    /// The operator's setting for this handler's instances.
    pub fn instances_of(&self, handler: &str) -> Instances {
        let set = most_specific(&self.instances, handler);
        set.copied().unwrap_or_default()
    }

    /// True if any handler may keep its instances.
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
            enqueue: BTreeMap::new(),
            schedules: BTreeMap::new(),
            http_grants: Vec::new(),
            http: HttpSettings::default(),
            secrets: Secrets::default(),
            secret_grants: Vec::new(),
            state: BTreeMap::new(),
            sql: BTreeMap::new(),
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
