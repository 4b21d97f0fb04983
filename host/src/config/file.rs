//! `rouse.toml`: the keys that it may have, and how it is read.
//!
//! The numbers of a handler are described in tables (see [`setting`](crate::setting)); this struct has the other keys.

mod dir_table;
mod handler_table;
mod http_table;
mod list;
mod modules;
mod own_settings;
mod secret_table;
mod unquoted;
mod way;

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
use std::time::Duration;

use serde::Deserialize;

use crate::sandbox::{Limits, PublicKey};
use crate::setting::Overlay;
use crate::worker::QueueOrder;
use handler_table::HandlerTable;
use modules::PinWord;
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
        /// What is wrong, with the line or the key.
        message: String,
    },
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
            "a worker_id has 1 to 64 letters, digits, - and _, not {id:?}"
        ))
    }
}

/// The keys of `rouse.toml`. Every key may be left out.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// The path, unless it is the usual one.
    #[serde(skip)]
    path: Option<PathBuf>,
    /// Its text.
    #[serde(skip)]
    text: Arc<str>,
    /// The file that was read; `None` if there is none.
    #[serde(skip)]
    found: Option<PathBuf>,
    /// The worker's id; default: a random one for each start.
    worker_id: Option<String>,
    /// The file with the worker's key, created if missing; default: a new key for each start.
    worker_key_file: Option<PathBuf>,
    /// The queues to serve; default: all.
    queues: Option<Vec<String>>,
    /// What their order means; default: it orders jobs of one priority.
    queue_order: Option<QueueOrder>,
    /// The worker's tags.
    tags: Option<Vec<String>>,
    /// Attempts at the same time; default: 4 × cores.
    slots: Option<usize>,
    /// False: poll only.
    notify: Option<bool>,
    /// The shortest wait between two polls; default 5 ms.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    poll_min: Option<Duration>,
    /// The longest wait between two polls; default 2 s, at most 60 s.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    poll_max: Option<Duration>,
    /// How long running attempts may continue after a stop; default 300 s.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    drain_timeout: Option<Duration>,
    /// How long a slot waits after an attempt before it starts the next one; default 0.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    job_delay: Option<Duration>,
    /// Days for which finished jobs are kept; default 7.
    keep_days: Option<u32>,
    /// How long a job waits before it goes ahead of newer ones; default 15 min, 0s: never.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    promote_after: Option<Duration>,
    /// The share of each claim for such jobs, percent; default 100.
    promote_share: Option<u8>,
    /// How often a job may be lost with its worker before it fails; default 3.
    lost_max: Option<u32>,
    /// Memory of all attempts together in MiB; default: three quarters of the machine's.
    memory_total_mb: Option<usize>,
    /// What the attempts of every handler may use.
    #[serde(default)]
    limits: Overlay<Limits>,
    /// `off`: no queue and no database, only invocations.
    #[serde(default)]
    queue: Queue,
    /// Invocations at the same time, in addition to the slots; default: as many as slots; 0: none.
    invoke_max: Option<usize>,
    /// The file with the token of invocations.
    invoke_token_file: Option<PathBuf>,
    /// The largest payload of an invocation, bytes; default 256 KiB.
    invoke_payload_bytes_max: Option<usize>,
    /// The folder of the code cache, or `off`; default: in the user's cache.
    cache_dir: Option<PathBuf>,
    /// Compilations at the same time; default: one for each core, at most 4.
    compilations_max: Option<usize>,
    /// CPU time to compile one module; default 120 s.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    compile_cpu: Option<Duration>,
    /// Address space to compile one module, MiB; default 2048.
    compile_memory_mb: Option<usize>,
    /// Core instances of one module; default 20.
    module_core_instances_max: Option<u32>,
    /// Linear memories of one module; default 4.
    module_memories_max: Option<u32>,
    /// Tables of one module; default 8.
    module_tables_max: Option<u32>,
    /// `lock`: only modules serve whose digests are in `handlers.lock` next to this file.
    pin: Option<PinWord>,
    /// Keys of which a module needs a signature; default: none.
    #[serde(default, deserialize_with = "modules::keys")]
    trusted_keys: Vec<PublicKey>,
    /// How long an HTTP request may take, its response included; default 10 min.
    #[serde(default, deserialize_with = "crate::duration::optional")]
    http_timeout: Option<Duration>,
    /// The file with certificate authorities that are trusted in addition to the system's.
    http_ca_file: Option<PathBuf>,
    /// Secrets by name, each with where it is read from.
    #[serde(default)]
    secrets: BTreeMap<String, SecretTable>,
    /// Source → handler.
    #[serde(default)]
    sources: BTreeMap<String, String>,
    /// Settings by handler name or pattern.
    #[serde(default)]
    handlers: BTreeMap<String, HandlerTable>,
}

/// Whether the host works for the queue.
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

    /// Reads and checks the file; without a path, `rouse.toml` of the working directory, which may be missing. Also returns the
    /// folder at which relative paths start.
    pub fn read(path: Option<&Path>) -> Result<(Self, PathBuf), ConfigError> {
        let wanted = path.unwrap_or(Path::new(Self::USUAL));
        let text = match std::fs::read_to_string(wanted) {
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

    /// Whether the host works for the queue.
    pub fn queue(&self) -> Queue {
        self.queue
    }

    /// Invocations at the same time.
    pub fn invoke_max(&self) -> Option<usize> {
        self.invoke_max
    }

    /// The file with the token of invocations; a relative path starts at `folder`.
    pub fn invoke_token_file(&self, folder: &Path) -> Option<PathBuf> {
        self.invoke_token_file
            .as_ref()
            .map(|file| folder.join(file))
    }

    /// The largest payload of an invocation, bytes. The default is that of a queue.
    pub fn invoke_payload_bytes_max(&self) -> usize {
        self.invoke_payload_bytes_max.unwrap_or(256 << 10)
    }
}

/// The message for a file that cannot be parsed.
fn message(error: &toml::de::Error, text: &str) -> String {
    // The error of the parser would repeat the secret.
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

/// Replaces the names of number types by words.
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
