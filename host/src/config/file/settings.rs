//! Turns the file into the settings of the worker and the sandbox, with their defaults.

use std::collections::BTreeMap;
use std::path::Path;

use super::File;
use super::dir_table::DirTable;
use super::handler_table::HandlerTable;
use super::http_table::HttpTable;
use super::secret_table::SecretUseTable;
use crate::sandbox::{self, Grants, HttpSettings};
use crate::worker::{self, Overrides};

impl File {
    /// The worker's settings, without its key.
    pub fn worker(&self, hostname: String) -> worker::Settings {
        let host = self.host().worker;
        worker::Settings {
            worker_id: self.worker_id.clone().unwrap_or(host.worker_id),
            hostname,
            queues: self.queues.clone().unwrap_or(host.queues),
            queue_order: self.queue_order.unwrap_or(host.queue_order),
            tags: self.tags.clone().unwrap_or(host.tags),
            notify: self.notify.unwrap_or(host.notify),
            sources: self.sources.clone().into_iter().collect(),
            overrides: self.overrides(),
            ..host
        }
    }

    /// The settings that override those of the modules.
    pub fn overrides(&self) -> Overrides {
        Overrides(self.of_handlers(|table| Some(table.policy.clone())))
    }

    /// The names and patterns of handlers that have settings.
    pub fn patterns(&self) -> impl Iterator<Item = &str> {
        self.handlers.keys().map(String::as_str)
    }

    /// Which handler runs the jobs of a source.
    pub fn sources(&self) -> &BTreeMap<String, String> {
        &self.sources
    }

    /// The entries of one list in the tables of all handlers, each with the handler's name or pattern.
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
        let host = self.host().sandbox;
        let dir = |dir: &DirTable, handler: &str| dir.grant(handler, folder);
        let state = self.handlers.keys();
        let state = state.filter_map(|handler| Some((handler.clone(), self.state(handler)?)));
        sandbox::Settings {
            config_file: self.path.clone(),
            config: self.text.clone(),
            attempts_max: slots,
            limits: self.limits.over(&host.limits),
            limits_of: self.of_handlers(|table| Some(table.limits.clone())),
            grants: Grants(self.by_handler(|table| &table.dirs, dir)),
            env: self.of_handlers(|table| table.env.clone()),
            handler_settings: self.of_handlers(|table| table.settings.clone().map(|own| own.0)),
            fine_clocks: self.of_handlers(|table| table.fine_clocks),
            enqueue: self.of_handlers(|table| table.enqueue.clone()),
            schedules: self.of_handlers(|table| table.schedule),
            http_grants: self.by_handler(|table| &table.http, HttpTable::grant),
            http: HttpSettings {
                ca_file: self.http_ca_file.as_ref().map(|file| folder.join(file)),
                ..host.http
            },
            secret_grants: self.by_handler(|table| &table.secrets, SecretUseTable::grant),
            state: state.collect(),
            sql: self.of_handlers(|table| Some(table.sql.as_ref()?.grant())),
            instances: self.of_handlers(|table| table.instances),
            cache_dir: self.cache_dir(folder),
            pin: self.pin(folder),
            modules: self.of_handlers(|table| table.module.clone()),
            versions_min: self.of_handlers(|table| table.version_min.clone()),
            ..host
        }
    }
}
