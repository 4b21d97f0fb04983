//! What one handler is granted, but for what it sends over HTTP.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::{Grant, Mode};
use crate::job::most_specific;
use crate::sandbox::quota::{Ledger, Ledgers};
use crate::sandbox::{Limits, Narrowing, Settings};

/// What one handler is granted, but for what it sends over HTTP. The default is nothing.
#[derive(Debug, Clone, Default)]
pub(in crate::sandbox) struct Granted {
    /// Directories, each with the count of what is in it where it has a quota.
    pub(in crate::sandbox) dirs: Vec<(Grant, Option<Arc<Ledger>>)>,
    /// Where the handler sees those of which the job leaves reading only, which the operator does not.
    pub(in crate::sandbox) only_read_for_job: Vec<String>,
    /// Variables of its environment.
    pub(in crate::sandbox) env: Vec<(String, String)>,
    /// Its settings, a JSON object; none: an empty one.
    pub(in crate::sandbox) settings: Option<Arc<str>>,
    /// Clocks as fine as the machine's.
    pub(in crate::sandbox) fine_clocks: bool,
}

impl Granted {
    /// What the operator grants to this handler.
    pub(in crate::sandbox) fn of(handler: &str, settings: &Settings, ledgers: &Ledgers) -> Self {
        let dirs = settings.grants.of(handler).into_iter().map(|grant| {
            let ledger = grant.quota.map(|_| ledgers.of(&grant.dir));
            (grant, ledger)
        });
        let env = most_specific(&settings.env, handler);
        let own = most_specific(&settings.handler_settings, handler);
        Self {
            dirs: dirs.collect(),
            only_read_for_job: Vec::new(),
            env: env.into_iter().flatten().map(clone_pair).collect(),
            settings: own.map(|settings| settings.to_string().into()),
            fine_clocks: most_specific(&settings.fine_clocks, handler) == Some(&true),
        }
    }

    /// The same without what a job takes away.
    pub(in crate::sandbox) fn narrowed(&self, job: &Narrowing) -> Self {
        let mut only_read_for_job = Vec::new();
        let dirs = self.dirs.iter().filter_map(|(grant, ledger)| {
            let mode = job.mode(&grant.at, grant.mode)?;
            if mode != grant.mode {
                only_read_for_job.push(grant.at.clone());
            }
            let grant = Grant {
                mode,
                ..grant.clone()
            };
            Some((grant, ledger.clone()))
        });
        let dirs = dirs.collect();
        let env = self.env.iter().filter(|(name, _)| job.leaves_env(name));
        Self {
            dirs,
            only_read_for_job,
            env: env.cloned().collect(),
            settings: self.settings.clone(),
            fine_clocks: self.fine_clocks,
        }
    }

    /// What the operator has set.
    pub(super) fn setting_names(&self) -> Vec<String> {
        let settings = self.settings.as_deref().unwrap_or("{}");
        let settings: Map<String, Value> =
            serde_json::from_str(settings).expect("settings are a JSON object");
        settings.into_iter().map(|(name, _)| name).collect()
    }

    /// True where the handler sees a directory at this path, with at least this right.
    pub(super) fn has_dir(&self, at: &str, mode: Mode) -> bool {
        self.dirs.iter().any(|(grant, _)| {
            grant.at == at && (mode == Mode::Read || grant.mode == Mode::ReadWrite)
        })
    }
}

fn clone_pair((name, value): (&String, &String)) -> (String, String) {
    (name.clone(), value.clone())
}

impl Limits {
    /// The same, or less where the job asks for it.
    pub(in crate::sandbox) fn narrowed(&self, job: &Narrowing) -> Self {
        let memory = job.memory_bytes().unwrap_or(usize::MAX);
        Self {
            memory_bytes: self.memory_bytes.min(memory),
            memory_retry_bytes: self.memory_retry_bytes.min(memory),
            cpu: job.cpu.map_or(self.cpu, |cpu| cpu.min(self.cpu)),
            ..self.clone()
        }
    }
}
