//! The grants of one handler, except for HTTP.

use std::sync::Arc;

use serde_json::{Map, Value};
use wasmtime_wasi::filesystem::Dir;

use super::quota::{Ledger, Ledgers};
use super::{Grant, Mode, Root, Roots};
use crate::job::{most_specific, pattern_covers};
use crate::sandbox::{Attenuation, Limits, Origin, Settings};

/// The grants of one handler, except for HTTP. The default is nothing.
#[derive(Debug, Clone, Default)]
pub(in crate::sandbox) struct Granted {
    /// The handler.
    pub(in crate::sandbox) handler: Arc<str>,
    pub(in crate::sandbox) dirs: Vec<GrantedDir>,
    /// Guest paths of directories that the job's attenuation removes.
    pub(in crate::sandbox) removed_by_job: Vec<String>,
    /// Guest paths of directories that the job's attenuation restricts to reading.
    pub(in crate::sandbox) read_only_for_job: Vec<String>,
    /// Its environment variables.
    pub(in crate::sandbox) env: Vec<(String, String)>,
    /// Its settings, a JSON object; `None` means an empty one.
    pub(in crate::sandbox) settings: Option<Arc<str>>,
    /// Whether its clocks are as precise as the machine's.
    pub(in crate::sandbox) fine_clocks: bool,
    /// The handlers whose jobs it may enqueue: names and patterns.
    pub(in crate::sandbox) enqueue: Vec<String>,
    /// True if the job's attenuation removes some of them.
    pub(in crate::sandbox) enqueue_is_attenuated: bool,
    /// Whether the schedule that its module declares is created.
    pub(in crate::sandbox) schedule: bool,
    /// The text of the operator's file, for suggested lines.
    pub(in crate::sandbox) config: Arc<str>,
}

/// A directory that a handler may use.
#[derive(Debug, Clone)]
pub(in crate::sandbox) struct GrantedDir {
    pub(in crate::sandbox) grant: Grant,
    pub(in crate::sandbox) root: Arc<Root>,
    /// The count of its contents, if it has a quota.
    pub(in crate::sandbox) ledger: Option<Arc<Ledger>>,
}

impl GrantedDir {
    /// The open directory, with the guest's access.
    ///
    /// # Errors
    /// When the directory has never been opened successfully.
    pub(in crate::sandbox) fn opened(&self) -> Result<Dir, String> {
        let dir = self.root.with(self.grant.mode);
        dir.map_err(|error| self.grant.cannot_be_opened(&error))
    }
}

impl Granted {
    /// What the operator grants to this handler of this module.
    pub(in crate::sandbox) fn for_handler(
        handler: &str,
        origin: Origin<'_>,
        settings: &Settings,
        roots: &Roots,
        ledgers: &Ledgers,
    ) -> Self {
        let dirs = settings.grants.for_handler(handler).into_iter();
        let dirs = dirs.filter(|grant| settings.grants_own_to(&grant.handler, origin));
        let dirs = dirs.map(|grant| {
            let root = roots.get(&grant.dir);
            let ledger = grant.quota.map(|_| ledgers.get(&root));
            GrantedDir {
                grant,
                root,
                ledger,
            }
        });
        let env = most_specific(&settings.env, handler);
        let own = most_specific(&settings.handler_settings, handler);
        Self {
            handler: handler.into(),
            dirs: dirs.collect(),
            removed_by_job: Vec::new(),
            read_only_for_job: Vec::new(),
            env: env.into_iter().flatten().map(clone_pair).collect(),
            settings: own.map(|settings| settings.to_string().into()),
            fine_clocks: most_specific(&settings.fine_clocks, handler) == Some(&true),
            enqueue: most_specific(&settings.enqueue, handler)
                .cloned()
                .unwrap_or_default(),
            enqueue_is_attenuated: false,
            schedule: most_specific(&settings.schedules, handler) == Some(&true),
            config: settings.config.clone(),
        }
    }

    /// Applies a job's attenuation.
    pub(in crate::sandbox) fn attenuated(&self, job: &Attenuation) -> Self {
        let mut read_only_for_job = Vec::new();
        let mut removed_by_job = Vec::new();
        let dirs = self.dirs.iter().filter_map(|dir| {
            let Some(mode) = job.mode(&dir.grant.at, dir.grant.mode) else {
                removed_by_job.push(dir.grant.at.clone());
                return None;
            };
            if mode != dir.grant.mode {
                read_only_for_job.push(dir.grant.at.clone());
            }
            let mut dir = dir.clone();
            dir.grant.mode = mode;
            Some(dir)
        });
        let dirs = dirs.collect();
        let env = self.env.iter().filter(|(name, _)| job.leaves_env(name));
        Self {
            handler: self.handler.clone(),
            dirs,
            removed_by_job,
            read_only_for_job,
            env: env.cloned().collect(),
            settings: self.settings.clone(),
            fine_clocks: self.fine_clocks,
            enqueue: job.leaves_enqueue(&self.enqueue),
            enqueue_is_attenuated: job.leaves_enqueue(&self.enqueue) != self.enqueue,
            schedule: self.schedule,
            config: self.config.clone(),
        }
    }

    /// True if [`open`](Self::open) has nothing left to open.
    pub(in crate::sandbox) fn is_open(&self) -> bool {
        self.dirs.iter().all(|dir| dir.root.is_open())
    }

    /// Checks that its directories can be opened.
    ///
    /// # Errors
    /// A message that names a directory that has never been opened successfully.
    pub(in crate::sandbox) fn open(&self) -> Result<(), String> {
        self.dirs.iter().try_for_each(|dir| dir.opened().map(drop))
    }

    /// The directory that contains this guest path; the innermost of several.
    pub(in crate::sandbox) fn dir_of(&self, path: &str) -> Option<&GrantedDir> {
        let contains = |dir: &&GrantedDir| {
            let rest = path.strip_prefix(dir.grant.at.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        let dirs = self.dirs.iter().filter(contains);
        dirs.max_by_key(|dir| dir.grant.at.len())
    }

    /// True if it may enqueue jobs for this handler, or for all that this pattern covers.
    pub(in crate::sandbox) fn may_enqueue(&self, handler: &str) -> bool {
        self.enqueue
            .iter()
            .any(|pattern| pattern == handler || pattern_covers(pattern, handler))
    }

    /// True for a path in a directory with read access only.
    pub(in crate::sandbox) fn is_read_only(&self, path: &str) -> bool {
        self.dir_of(path)
            .is_some_and(|dir| dir.grant.mode == Mode::Read)
    }

    /// The names of its settings.
    pub(super) fn setting_names(&self) -> Vec<String> {
        let settings = self.settings.as_deref().unwrap_or("{}");
        let settings: Map<String, Value> =
            serde_json::from_str(settings).expect("settings are a JSON object");
        settings.into_iter().map(|(name, _)| name).collect()
    }

    /// True if the handler sees a directory at this path with at least this access.
    pub(super) fn has_dir(&self, at: &str, mode: Mode) -> bool {
        self.dirs.iter().any(|GrantedDir { grant, .. }| {
            grant.at == at && (mode == Mode::Read || grant.mode == Mode::ReadWrite)
        })
    }
}

fn clone_pair((name, value): (&String, &String)) -> (String, String) {
    (name.clone(), value.clone())
}

impl Limits {
    /// Applies a job's attenuation.
    pub(in crate::sandbox) fn attenuated(&self, job: &Attenuation) -> Self {
        let memory = job.memory_bytes().unwrap_or(usize::MAX);
        Self {
            memory_bytes: self.memory_bytes.min(memory),
            memory_retry_bytes: self.memory_retry_bytes.min(memory),
            cpu: job.cpu(self.cpu),
            ..self.clone()
        }
    }
}
