//! `[handlers."…"]`: what an operator sets for a handler, or for all handlers of a pattern.

use std::collections::BTreeMap;
use std::fmt;

use semver::Version;
use serde::de::{Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::dir_table::DirTable;
use super::http_table::HttpTable;
use super::list::List;
use super::modules::{Bindings, OldestVersion};
use super::own_settings::OwnSettings;
use super::secret_table::SecretUseTable;
use crate::sandbox::{Instances, Limits, ModuleBinding, StateQuota};
use crate::setting::{Key, Keys, Overlay};
use crate::worker::Policy;

/// The settings of one handler or pattern.
#[derive(Debug, Default)]
pub(super) struct HandlerTable {
    /// The modules that may have the name: files, digests or keys. `None`: any module.
    pub(super) module: Option<Vec<ModuleBinding>>,
    /// The oldest version that may serve.
    pub(super) version_min: Option<Version>,
    /// `lease` to `job_delay`.
    pub(super) policy: Overlay<Policy>,
    /// `reuse` allows the instances of the handler to serve many jobs, if its module agrees.
    pub(super) instances: Option<Instances>,
    /// What its attempts may use.
    pub(super) limits: Overlay<Limits>,
    /// Directories that it may use.
    pub(super) dirs: Vec<DirTable>,
    /// Requests that it may send.
    pub(super) http: Vec<HttpTable>,
    /// Secrets that it may have sent, or may sign with.
    pub(super) secrets: Vec<SecretUseTable>,
    /// Its environment variables; it never has those of the host.
    pub(super) env: Option<BTreeMap<String, String>>,
    /// What it reads through `settings`.
    pub(super) settings: Option<OwnSettings>,
    /// The quota of its state. The table is the grant: every key may be left out.
    pub(super) state: Option<Overlay<StateQuota>>,
    /// True: its clocks are as fine as the machine's.
    pub(super) fine_clocks: Option<bool>,
}

/// The keys besides those of [`Policy`].
const KEYS: [&str; 12] = [
    "module",
    "version_min",
    "instances",
    "limits",
    "dirs",
    "http",
    "secrets",
    "env",
    "settings",
    "state",
    "fine_clocks",
    "concurrency",
];

impl<'de> Deserialize<'de> for HandlerTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        input.deserialize_map(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = HandlerTable;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a table such as [handlers.\"mail.send\"]")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut table = HandlerTable::default();
        while let Some(key) = map.next_key_seed(Keys::and(&KEYS))? {
            let key = match key {
                Key::Setting(setting) => {
                    table.policy.insert(setting, map.next_value_seed(setting)?);
                    continue;
                }
                Key::Other(key) => key,
            };
            match key {
                "module" => table.module = Some(map.next_value::<Bindings>()?.0),
                "version_min" => table.version_min = Some(map.next_value::<OldestVersion>()?.0),
                "instances" => table.instances = Some(map.next_value()?),
                "limits" => table.limits = map.next_value()?,
                "dirs" => table.dirs = map.next_value::<List<_>>()?.0,
                "http" => table.http = map.next_value::<List<_>>()?.0,
                "secrets" => table.secrets = map.next_value::<List<_>>()?.0,
                "env" => table.env = Some(map.next_value()?),
                "settings" => table.settings = Some(map.next_value()?),
                "state" => table.state = Some(map.next_value()?),
                "fine_clocks" => table.fine_clocks = Some(map.next_value()?),
                "concurrency" => map.next_value::<NotEnforced>().map(drop)?,
                key => unreachable!("{key} is one of KEYS"),
            }
        }
        Ok(table)
    }
}

/// `concurrency`, which is refused until a host enforces it: a limit that does not hold is worse than none.
struct NotEnforced;

impl<'de> Deserialize<'de> for NotEnforced {
    fn deserialize<D: Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        Err(D::Error::custom(
            "no host enforces `concurrency` yet; remove it (`slots` limits the attempts of a host)",
        ))
    }
}
