//! Turns the file into the settings of the worker and the sandbox, with their defaults.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use super::File;
use super::dir_table::DirTable;
use super::handler_table::HandlerTable;
use super::http_table::HttpTable;
use super::secret_table::SecretUseTable;
use crate::sandbox::{self, Grants, HttpSettings, ModuleParts};
use crate::worker::{self, Overrides};

impl File {
    /// The worker's settings, without its key.
    pub fn worker(&self, hostname: String) -> worker::Settings {
        let default = worker::Settings::default();
        worker::Settings {
            worker_id: self.worker_id.clone().unwrap_or(default.worker_id),
            key: default.key,
            hostname,
            queues: self.queues.clone().unwrap_or(default.queues),
            queue_order: self.queue_order.unwrap_or(default.queue_order),
            tags: self.tags.clone().unwrap_or(default.tags),
            slots: self.slots.unwrap_or(default.slots),
            notify: self.notify.unwrap_or(default.notify),
            poll_min: self.poll_min.unwrap_or(default.poll_min),
            poll_max: self.poll_max.unwrap_or(default.poll_max),
            drain_timeout: self.drain_timeout.unwrap_or(default.drain_timeout),
            job_delay: self.job_delay(),
            keep_days: self.keep_days.unwrap_or(default.keep_days),
            promote_after: self
                .promote_after
                .or(default.promote_after)
                .filter(|after| !after.is_zero()),
            promote_share: self.promote_share.unwrap_or(default.promote_share),
            lost_max: self.lost_max.unwrap_or(default.lost_max),
            sources: self.sources.clone().into_iter().collect(),
            overrides: self.overrides(),
            intervals: default.intervals,
        }
    }

    /// The settings that override those of the modules.
    pub fn overrides(&self) -> Overrides {
        Overrides(self.of_handlers(|table| Some(table.policy.clone())))
    }

    /// How long a slot waits after an attempt of any handler.
    pub fn job_delay(&self) -> Duration {
        self.job_delay
            .unwrap_or(worker::Settings::default().job_delay)
    }

    /// The names and patterns of handlers that have settings.
    pub fn patterns(&self) -> impl Iterator<Item = &str> {
        self.handlers.keys().map(String::as_str)
    }

    /// Which handler runs the jobs of a source.
    pub fn sources(&self) -> &BTreeMap<String, String> {
        &self.sources
    }

    /// The entries of a list of all handlers, each with the handler's name or pattern.
    fn by_handler<T, G>(
        &self,
        of: impl Fn(&HandlerTable) -> &Vec<T>,
        grant: impl Fn(&T, &str) -> G,
    ) -> Vec<G> {
        let grant = &grant;
        self.handlers
            .iter()
            .flat_map(|(handler, table)| of(table).iter().map(move |entry| grant(entry, handler)))
            .collect()
    }

    /// A value that some handlers have, by name or pattern.
    fn of_handlers<T>(&self, of: impl Fn(&HandlerTable) -> Option<T>) -> BTreeMap<String, T> {
        let all = self.handlers.iter();
        all.filter_map(|(handler, table)| Some((handler.clone(), of(table)?)))
            .collect()
    }

    /// The sandbox's settings, without the secrets. Relative directories start at `folder`.
    pub fn sandbox(&self, folder: &Path, slots: usize) -> sandbox::Settings {
        let default = sandbox::Settings::default();
        let dir = |dir: &DirTable, handler: &str| dir.grant(handler, folder);
        sandbox::Settings {
            config_file: self.path.clone(),
            config: self.text.clone(),
            attempts_max: slots,
            limits: self.limits.over(&default.limits),
            limits_of: self.of_handlers(|table| Some(table.limits.clone())),
            memory_bytes_total_max: self.memory_total_mb.map(|mb| mb << 20),
            grants: Grants(self.by_handler(|table| &table.dirs, dir)),
            env: self.of_handlers(|table| table.env.clone()),
            handler_settings: self.of_handlers(|table| table.settings.clone().map(|own| own.0)),
            fine_clocks: self.of_handlers(|table| table.fine_clocks),
            http_grants: self.by_handler(|table| &table.http, HttpTable::grant),
            http: HttpSettings {
                timeout: self.http_timeout.unwrap_or(default.http.timeout),
                ca_file: self.http_ca_file.as_ref().map(|file| folder.join(file)),
                resolver: default.http.resolver,
            },
            secret_grants: self.by_handler(|table| &table.secrets, SecretUseTable::grant),
            state: self
                .handlers
                .keys()
                .filter_map(|handler| Some((handler.clone(), self.state(handler)?)))
                .collect(),
            instances: self.of_handlers(|table| table.instances),
            compile_cpu_max: self.compile_cpu.unwrap_or(default.compile_cpu_max),
            compile_memory_bytes_max: self
                .compile_memory_mb
                .map_or(default.compile_memory_bytes_max, |mb| mb << 20),
            compilations_max: self.compilations_max.unwrap_or(default.compilations_max),
            module_parts: ModuleParts {
                core_instances: self
                    .module_core_instances_max
                    .unwrap_or(default.module_parts.core_instances),
                memories: self
                    .module_memories_max
                    .unwrap_or(default.module_parts.memories),
                tables: self
                    .module_tables_max
                    .unwrap_or(default.module_parts.tables),
            },
            cache_dir: self.cache_dir(folder),
            pin: self.pin(folder),
            modules: self.of_handlers(|table| table.module.clone()),
            versions_min: self.of_handlers(|table| table.version_min.clone()),
            ..default
        }
    }
}
