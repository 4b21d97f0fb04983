//! `[handlers."…"]`: what an operator sets for a handler, or for all handlers of a pattern.

use std::collections::BTreeMap;

use semver::Version;
use serde::de::{Error as _, MapAccess};
use serde::{Deserialize, Deserializer};

use super::dir_table::DirTable;
use super::http_table::HttpTable;
use super::list::List;
use super::modules::{Bindings, OldestVersion};
use super::own_settings::OwnSettings;
use super::secret_table::SecretUseTable;
use super::sql_table::SqlTable;
use crate::job::is_pattern;
use crate::sandbox::{Instances, Limits, ModuleBinding, StateQuota};
use crate::setting::table::{self, Table, Unchecked};
use crate::setting::{Entry, Overlay};
use crate::worker::Policy;

/// The settings of one handler or pattern.
#[derive(Debug, Default)]
pub(super) struct HandlerTable {
    /// The modules that may have the name: files, digests or keys. `None`: any module.
    pub(super) module: Option<Vec<ModuleBinding>>,
    /// The oldest version that may serve.
    pub(super) version_min: Option<Version>,
    /// The keys from `lease` to `job_delay`.
    pub(super) policy: Overlay<Policy>,
    /// `reuse` allows the instances of the handler to serve many jobs, if its module agrees.
    pub(super) instances: Option<Instances>,
    /// What its attempts may use.
    pub(super) limits: Overlay<Limits>,
    /// Directories that it may use.
    pub(super) dirs: Vec<DirTable>,
    /// Requests that it may send.
    pub(super) http: Vec<HttpTable>,
    /// Secrets that the host may send for it, or sign with for it.
    pub(super) secrets: Vec<SecretUseTable>,
    /// Its environment variables; it never has those of the host.
    pub(super) env: Option<BTreeMap<String, String>>,
    /// What it reads through `settings`.
    pub(super) settings: Option<OwnSettings>,
    /// The quota of its state. The table is the grant: every key may be left out.
    pub(super) state: Option<Overlay<StateQuota>>,
    /// SQL statements that it may run.
    pub(super) sql: Option<SqlTable>,
    /// True: its clocks are as fine as the machine's.
    pub(super) fine_clocks: Option<bool>,
    pub(super) enqueue: Option<Vec<String>>,
    /// True: the schedule that its module declares is created.
    pub(super) schedule: Option<bool>,
    /// The keys that the table sets, except numbers.
    pub(super) set: Vec<&'static str>,
}

impl Table for HandlerTable {
    type Numbers = Policy;
    const EXPECTED: &'static str = "a table such as [handlers.\"mail.send\"]";
    const ENTRIES: &'static [Entry] = &[
        Entry::new(
            "module",
            "`\"mail.wasm\"`, `\"sha256:…\"`, `\"ed25519:…\"`, or a list",
            "any module",
            "The modules that may have the name: files, digests or signing keys",
        ),
        Entry::new(
            "version_min",
            "a version such as `\"1.2.0\"`",
            "any version",
            "The oldest version that may serve",
        ),
        Entry::new(
            "instances",
            "`\"fresh\"`, `\"reuse\"`",
            "`\"fresh\"`",
            "`\"reuse\"`: an instance may serve many jobs of a tenant, if the handler declares reuse",
        ),
        Entry::new(
            "limits",
            "a table",
            "`[limits]`",
            "[Limits](#limits) of its attempts",
        ),
        Entry::new(
            "dirs",
            "a list of tables",
            "none",
            "[Directories](#directories) that it may use",
        ),
        Entry::new(
            "http",
            "a list of tables",
            "none",
            "[Requests](#requests) that it may send",
        ),
        Entry::new(
            "secrets",
            "a list of tables",
            "none",
            "[Secrets](#secrets) that may be sent for it, or with which the host signs for it",
        ),
        Entry::new(
            "env",
            "a table of strings",
            "none",
            "Its environment variables; it never has those of the host",
        ),
        Entry::new(
            "settings",
            "a table",
            "none",
            "The handler's own settings, for `ctx.settings()`; at most 64 KiB as JSON",
        ),
        Entry::new(
            "state",
            "a table",
            "none",
            "Grants [state](#state), with its quota",
        ),
        Entry::new(
            "sql",
            "a table",
            "none",
            "Grants [SQL statements](#sql) that its module declares",
        ),
        Entry::new(
            "fine_clocks",
            "`true`, `false`",
            "`false`",
            "`true`: its clocks are as fine as the machine's, instead of 1 ms",
        ),
        Entry::new(
            "enqueue",
            "a list of names and patterns",
            "none",
            "The handlers whose jobs it may enqueue, call, and continue with",
        ),
        Entry::new(
            "schedule",
            "`true`, `false`",
            "`false`",
            "`true`: the schedule that its module declares is created",
        ),
    ];

    fn numbers(&mut self) -> Option<&mut Overlay<Policy>> {
        Some(&mut self.policy)
    }

    fn note(&mut self, keys: Vec<&'static str>) {
        self.set = keys;
    }

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "module" => self.module = Some(map.next_value::<Bindings>()?.0),
            "version_min" => self.version_min = Some(map.next_value::<OldestVersion>()?.0),
            "instances" => self.instances = Some(map.next_value()?),
            "limits" => self.limits = map.next_value::<Unchecked<_>>()?.0,
            "dirs" => self.dirs = map.next_value::<List<_>>()?.0,
            "http" => self.http = map.next_value::<List<_>>()?.0,
            "secrets" => self.secrets = map.next_value::<List<_>>()?.0,
            "env" => self.env = Some(map.next_value()?),
            "settings" => self.settings = Some(map.next_value()?),
            "state" => self.state = Some(map.next_value::<Unchecked<_>>()?.0),
            "sql" => self.sql = Some(map.next_value()?),
            "fine_clocks" => self.fine_clocks = Some(map.next_value()?),
            "enqueue" => self.enqueue = Some(map.next_value::<Patterns>()?.0),
            "schedule" => self.schedule = Some(map.next_value()?),
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for HandlerTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

/// Names of handlers, and patterns.
struct Patterns(Vec<String>);

impl<'de> Deserialize<'de> for Patterns {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        let patterns = Vec::<String>::deserialize(input)?;
        match patterns.iter().find(|pattern| !is_pattern(pattern)) {
            Some(invalid) => Err(D::Error::custom(format!(
                "enqueue: {invalid:?} is neither a handler name nor a pattern such as \"photo.*\""
            ))),
            None => Ok(Self(patterns)),
        }
    }
}
