//! `rouse.toml`: the keys that it may have, and how it is read.
//!
//! Rows describe the keys (see [`setting`](crate::setting)): those of the whole file are here and in
//! `host_settings.rs`, those of each inner table in a file of its own.

mod dir_table;
mod fair_table;
mod handler_table;
mod http_table;
mod list;
mod modules;
mod own_settings;
mod resolved_path;
mod secret_table;
mod sql_table;
mod unquoted;

mod checks;
mod dirs_together;
mod exposed;
mod host_settings;
mod in_force;
mod origin;
mod secrets;
mod serving;
mod settings;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};

use crate::read_in_time::read_in_time;
use crate::sandbox::{Limits, PublicKey};
use crate::setting::table::{self, Table, Unchecked};
use crate::setting::{Entry, Overlay};
use crate::worker::QueueOrder;
use fair_table::FairTable;
use handler_table::HandlerTable;
pub use host_settings::{HostSettings, InvokeSettings, host_help, host_number};
use modules::{PinWord, TrustedKeys};
use secret_table::SecretTable;

/// An error in the settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        error: std::io::Error,
    },
    /// The file has an invalid key or value.
    #[error("{}: {message}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The problem, with the line or the key.
        message: String,
    },
}

/// Checks the name of a queue that a worker serves. The database enforces the same rule.
pub fn check_queue(name: &str) -> Result<(), String> {
    checks::check_word("queues", name)
}

/// Checks a tag of a worker. The database enforces the same rule.
pub fn check_tag(tag: &str) -> Result<(), String> {
    checks::check_word("tags", tag)
}

/// Checks a worker id. The database enforces the same rule.
pub fn check_worker_id(id: &str) -> Result<(), String> {
    let fits = (1..=64).contains(&id.len())
        && id
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if fits {
        Ok(())
    } else {
        Err(format!(
            "worker_id must be 1 to 64 letters, digits, - or _, not {id:?}"
        ))
    }
}

/// The contents of `rouse.toml`. Every key may be left out.
#[derive(Debug, Default)]
pub struct File {
    /// The path, unless it is the usual one.
    path: Option<PathBuf>,
    /// Its text.
    text: Arc<str>,
    /// The file that was read; `None` if there is none.
    found: Option<PathBuf>,
    /// The numeric settings of the host, from the file and the command line.
    host: Overlay<HostSettings>,
    worker_id: Option<String>,
    worker_key_file: Option<PathBuf>,
    queues: Option<Vec<String>>,
    queue_order: Option<QueueOrder>,
    tags: Option<Vec<String>>,
    notify: Option<bool>,
    queue: Queue,
    invoke_token_file: Option<PathBuf>,
    cache_dir: Option<PathBuf>,
    pin: Option<PinWord>,
    trusted_keys: Vec<PublicKey>,
    http_ca_file: Option<PathBuf>,
    limits: Overlay<Limits>,
    secrets: BTreeMap<String, SecretTable>,
    /// Source → handler.
    sources: BTreeMap<String, String>,
    /// By queue.
    fair_share: BTreeMap<String, FairTable>,
    /// By handler name or pattern.
    handlers: BTreeMap<String, HandlerTable>,
}

impl Table for File {
    type Numbers = HostSettings;
    const EXPECTED: &'static str = "the keys of rouse.toml";
    const ENTRIES: &'static [Entry] = &[
        Entry::new(
            "worker_id",
            "a string",
            "a random one for each start",
            "This worker's id: 1 to 64 letters, digits, - and _",
        )
        .overridden_by(&["--worker-id"]),
        Entry::new(
            "worker_key_file",
            "a path",
            "a new key for each start, and the id is free after 90 s",
            "The file with this worker's key, created if missing: with it, a host that was killed can start again under its id at \
             once",
        )
        .overridden_by(&["--worker-key-file"]),
        Entry::new(
            "queues",
            "a list of names",
            "all",
            "The queues to serve, unless `queue` is `\"off\"`; within a priority, jobs of an earlier queue go first",
        )
        .overridden_by(&["--queue"]),
        Entry::new(
            "queue_order",
            "`\"priority\"`, `\"strict\"`",
            "`\"priority\"`",
            "`priority`: the order of queues counts within a priority; `strict`: an earlier queue goes first, regardless of priorities",
        )
        .overridden_by(&["--queue-order"]),
        Entry::new(
            "tags",
            "a list of names, or of `key=value`",
            "none",
            "The worker's tags; it claims a job that requires tags only if it has all of them",
        )
        .overridden_by(&["--tag"]),
        Entry::new(
            "notify",
            "`true`, `false`",
            "`true`",
            "`false`: do not listen for notifications; find jobs by polling alone",
        )
        .overridden_by(&["--no-notify"]),
        Entry::new(
            "queue",
            "`\"on\"`, `\"off\"`",
            "`\"on\"`",
            "`\"off\"`: take no jobs and use no database: serve only POST /invoke/HANDLER",
        )
        .overridden_by(&["--no-queue"]),
        Entry::new(
            "invoke_token_file",
            "a path",
            "none: `rouse serve` takes no invocations, and shows no jobs",
            "The file with the token that callers of `/invoke` and `/jobs` need; or with several tokens, one per line",
        )
        .overridden_by(&["ROUSE_INVOKE_TOKEN"]),
        Entry::new(
            "cache_dir",
            "a path, `\"off\"`",
            "`ROUSE_CACHE_DIR`, else `rouse` in `XDG_CACHE_HOME`, else `~/.cache/rouse`",
            "The folder of the code cache; `\"off\"`: none",
        ),
        Entry::new(
            "pin",
            "`\"lock\"`",
            "none",
            "`\"lock\"`: only modules listed in handlers.lock serve (`rouse handlers lock`)",
        ),
        Entry::new(
            "trusted_keys",
            "a list of public keys, base64",
            "none",
            "If set, modules need a signature by one of these keys (`rouse handlers keygen`, `sign`)",
        ),
        Entry::new(
            "http_ca_file",
            "a path",
            "none",
            "The file with certificate authorities that are trusted in addition to the system's",
        ),
        Entry::new(
            "limits",
            "a table",
            "the defaults",
            "[Limits](#limits) of the attempts of every handler",
        ),
        Entry::new(
            "secrets",
            "a table for each secret",
            "none",
            "Where [secrets](#secrets) are read from, by their names",
        ),
        Entry::new(
            "sources",
            "a table of handlers by source",
            "none",
            "Jobs of a source run the handler bound to it, regardless of the handler that they name",
        ),
        Entry::new(
            "fair_share",
            "a table for each queue",
            "unchanged",
            "How [queues are shared](#fair-share); set in the database when the worker starts",
        )
        .overridden_by(&["ROUSE_FAIR_SHARE"]),
        Entry::new(
            "handlers",
            "a table for each name or pattern",
            "none",
            "Settings of [handlers](#handlers); a pattern is `image.*` or `*`",
        ),
    ];

    fn numbers(&mut self) -> Option<&mut Overlay<HostSettings>> {
        Some(&mut self.host)
    }

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "worker_id" => self.worker_id = Some(map.next_value()?),
            "worker_key_file" => self.worker_key_file = Some(map.next_value()?),
            "queues" => self.queues = Some(map.next_value()?),
            "queue_order" => self.queue_order = Some(map.next_value()?),
            "tags" => self.tags = Some(map.next_value()?),
            "notify" => self.notify = Some(map.next_value()?),
            "queue" => self.queue = map.next_value()?,
            "invoke_token_file" => self.invoke_token_file = Some(map.next_value()?),
            "cache_dir" => self.cache_dir = Some(map.next_value()?),
            "pin" => self.pin = Some(map.next_value()?),
            "trusted_keys" => self.trusted_keys = map.next_value::<TrustedKeys>()?.0,
            "http_ca_file" => self.http_ca_file = Some(map.next_value()?),
            "limits" => self.limits = map.next_value::<Unchecked<_>>()?.0,
            "secrets" => self.secrets = map.next_value()?,
            "sources" => self.sources = map.next_value()?,
            "fair_share" => self.fair_share = map.next_value()?,
            "handlers" => self.handlers = map.next_value()?,
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for File {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
}

/// The help of an option that sets a key of the host whose value is not a number.
///
/// # Panics
/// If there is no such key.
pub fn help(key: &str) -> String {
    let entry = File::ENTRIES.iter().find(|entry| entry.key == key);
    entry
        .unwrap_or_else(|| panic!("there is no key {key}"))
        .help()
}

/// The options and variables that override a key of the file or a variable.
#[cfg(test)]
pub(crate) fn overrides() -> Vec<&'static str> {
    let entries = File::ENTRIES.iter().chain(super::Environment::VARIABLES);
    let numbers = <HostSettings as crate::setting::Settable>::SETTINGS.iter();
    let entries = entries.flat_map(Entry::overrides);
    let numbers = numbers.flat_map(|setting| setting.overrides());
    entries.chain(numbers).copied().collect()
}

/// Whether the host takes jobs from the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Queue {
    /// It claims jobs.
    #[default]
    On,
    /// It has no database, and only takes invocations.
    Off,
}

impl File {
    /// The file in the working directory that is read if none is named.
    pub const USUAL: &str = "rouse.toml";

    /// Reads and checks the file; without a path, `rouse.toml` of the working directory, which may be missing. Also
    /// returns the folder at which relative paths start.
    pub fn read(path: Option<&Path>) -> Result<(Self, PathBuf), ConfigError> {
        let wanted = path.unwrap_or(Path::new(Self::USUAL));
        let at = wanted.to_owned();
        let text = match read_in_time(move || std::fs::read_to_string(at)) {
            Ok(text) => text,
            Err(error) if path.is_none() && error.kind() == std::io::ErrorKind::NotFound => {
                return Ok((Self::default(), PathBuf::from(".")));
            }
            Err(error) => {
                return Err(ConfigError::Unreadable {
                    path: wanted.into(),
                    error,
                });
            }
        };
        let folder = match wanted.parent() {
            Some(folder) if folder != Path::new("") => folder.to_path_buf(),
            Some(_) | None => PathBuf::from("."),
        };
        let mut file = toml::from_str::<Self>(&text)
            .map_err(|error| message(&error, &text))
            .and_then(|file| file.check(&folder).map(|()| file))
            .map_err(|message| ConfigError::Invalid {
                path: wanted.into(),
                message,
            })?;
        file.path = path.map(Path::to_path_buf);
        file.text = text.into();
        file.found = Some(wanted.into());
        Ok((file, folder))
    }

    /// The file that was read; `None` if there is none.
    pub fn found(&self) -> Option<&Path> {
        self.found.as_deref()
    }

    /// Its text; empty if there is none.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The file with the worker's key; a relative path starts at `folder`.
    pub fn worker_key_file(&self, folder: &Path) -> Option<PathBuf> {
        self.worker_key_file.as_ref().map(|file| folder.join(file))
    }

    /// Whether the host takes jobs from the queue.
    pub fn queue(&self) -> Queue {
        self.queue
    }

    /// The file with the tokens of invocations; a relative path starts at `folder`.
    pub fn invoke_token_file(&self, folder: &Path) -> Option<PathBuf> {
        self.invoke_token_file
            .as_ref()
            .map(|file| folder.join(file))
    }
}

/// The message for a file that cannot be parsed.
fn message(error: &toml::de::Error, text: &str) -> String {
    // The parser's own error would repeat the secret.
    if let Some(why) = secret_table::written_out(text) {
        return why;
    }
    if let Some(why) = secret_table::redacted_error(error, text) {
        return why;
    }
    let message = whole_numbers(&error.to_string());
    match unquoted::hint(text) {
        Some(hint) => format!("{}\n{hint}", message.trim_end()),
        None => message,
    }
}

/// Replaces the names of number types with words.
fn whole_numbers(message: &str) -> String {
    let mut message = message.to_owned();
    for (types, words) in [
        (
            &["usize", "u64", "u32", "u16"][..],
            "a whole number, 0 or more",
        ),
        (&["i64", "i32"], "a whole number"),
        (&["f64"], "a number"),
    ] {
        for name in types {
            message = message.replace(&format!("expected {name}"), &format!("expected {words}"));
        }
    }
    message
}

#[cfg(test)]
mod tests;
