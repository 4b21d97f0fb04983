//! `rouse.toml`: as written, and what comes of it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::job::is_pattern;
use crate::sandbox::{self, Grant, Grants, Instances, Mode};
use crate::worker::{self, Override, Overrides};

/// A mistake in the settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read {}: {error}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// The file is not what `rouse.toml` may be.
    #[error("{}: {message}", .path.display())]
    Invalid {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        message: String,
    },
}

/// The rule for worker ids, which the database holds to as well (SPEC row A1).
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

/// `rouse.toml` as written. Every key may be left out.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct File {
    /// The worker's id; default: a random one for each start.
    worker_id: Option<String>,
    /// The file with the worker's key, made if missing; default: a new key for each start.
    worker_key_file: Option<PathBuf>,
    /// The queues to serve; default: all.
    queues: Option<Vec<String>>,
    /// The tags of this worker.
    tags: Option<Vec<String>>,
    /// Attempts at the same time; default: 4 × cores.
    slots: Option<usize>,
    /// False: poll only.
    notify: Option<bool>,
    /// The shortest wait between two looks; default 5 ms.
    #[serde(default, deserialize_with = "duration")]
    poll_min: Option<Duration>,
    /// The longest one; default 2 s, at most 60 s.
    #[serde(default, deserialize_with = "duration")]
    poll_max: Option<Duration>,
    /// How long running attempts may go on after a stop; default 300 s.
    #[serde(default, deserialize_with = "duration")]
    drain_timeout: Option<Duration>,
    /// Days for which finished jobs are kept; default 7.
    keep_days: Option<u32>,
    /// A job that has waited for so long goes ahead of newer ones; default 15 min, 0s: never.
    #[serde(default, deserialize_with = "duration")]
    promote_after: Option<Duration>,
    /// A job that was lost with its worker this often fails; default 3.
    lost_max: Option<u32>,
    /// Memory of one attempt in MiB; default 128.
    memory_mb: Option<usize>,
    /// Memory of an attempt in MiB after one that ran out of it; default twice `memory_mb`.
    memory_retry_mb: Option<usize>,
    /// The largest result, bytes; default 4 MiB.
    result_bytes_max: Option<usize>,
    /// `off`: no queue, and so no database; only invocations.
    #[serde(default)]
    queue: Queue,
    /// Invocations at the same time, beside the slots; default: as many as slots; 0: none.
    invoke_max: Option<usize>,
    /// The file with the token that invocations have to show.
    invoke_token_file: Option<PathBuf>,
    /// The largest payload of an invocation, bytes; default 256 KiB.
    invoke_payload_bytes_max: Option<usize>,
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
    /// It does.
    #[default]
    On,
    /// It has no database, and does nothing but invocations.
    Off,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct HandlerTable {
    #[serde(default, deserialize_with = "duration")]
    lease: Option<Duration>,
    #[serde(default, deserialize_with = "duration")]
    timeout: Option<Duration>,
    #[serde(default, deserialize_with = "duration")]
    grace: Option<Duration>,
    max_attempts: Option<u32>,
    #[serde(default, deserialize_with = "duration")]
    retry_initial: Option<Duration>,
    #[serde(default, deserialize_with = "duration")]
    retry_max: Option<Duration>,
    retry_multiplier: Option<f64>,
    /// `reuse` allows the instances of the handler to serve many jobs, if its module agrees.
    #[serde(default)]
    instances: Instances,
    #[serde(default)]
    dirs: Vec<DirTable>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct DirTable {
    /// The directory on this machine; relative to the folder of `rouse.toml`.
    dir: PathBuf,
    /// Where the handler sees it.
    at: String,
    #[serde(default)]
    mode: ModeWord,
}

#[derive(Debug, Default, Deserialize)]
enum ModeWord {
    #[default]
    #[serde(rename = "read")]
    Read,
    #[serde(rename = "read-write")]
    ReadWrite,
}

fn duration<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(input)?;
    humantime::parse_duration(&text).map(Some).map_err(|error| {
        serde::de::Error::custom(format!(
            "{text:?} is no duration such as \"90s\" or \"5m\": {error}"
        ))
    })
}

impl File {
    /// Reads the file. Without a path, `rouse.toml` of the working directory, which may be missing.
    pub fn read(path: Option<&Path>) -> Result<(Self, PathBuf), ConfigError> {
        let wanted = path.unwrap_or(Path::new("rouse.toml"));
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
        let file = toml::from_str::<Self>(&text)
            .map_err(|error| error.to_string())
            .and_then(|file| file.check().map(|()| file))
            .map_err(|message| ConfigError::Invalid {
                path: wanted.into(),
                message,
            })?;
        let folder = match wanted.parent() {
            Some(folder) if folder != Path::new("") => folder.to_path_buf(),
            Some(_) | None => PathBuf::from("."),
        };
        Ok((file, folder))
    }

    /// Rules that the types do not carry.
    fn check(&self) -> Result<(), String> {
        if let Some(id) = &self.worker_id {
            check_worker_id(id)?;
        }
        for (key, words) in [("queues", &self.queues), ("tags", &self.tags)] {
            for word in words.iter().flatten() {
                let fits = (1..=128).contains(&word.len())
                    && word.starts_with(|c: char| c.is_ascii_alphanumeric())
                    && word
                        .bytes()
                        .all(|b| b.is_ascii_alphanumeric() || b"_.:-".contains(&b));
                if !fits {
                    return Err(format!(
                        "{key}: {word:?} is no name: letters, digits and _ . : - ; at most 128 characters"
                    ));
                }
            }
        }
        let within = |name: &str, value: Option<u64>, min: u64, max: u64, unit: &str| match value {
            Some(value) if !(min..=max).contains(&value) => Err(format!(
                "{name} must be between {min} and {max}{unit}, not {value}"
            )),
            Some(_) | None => Ok(()),
        };
        let ms = |duration: Option<Duration>| {
            duration.map(|duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
        };
        within("slots", self.slots.map(|slots| slots as u64), 1, 10_000, "")?;
        within("poll_min", ms(self.poll_min), 1, 60_000, " ms")?;
        within("poll_max", ms(self.poll_max), 1, 60_000, " ms")?;
        within("keep_days", self.keep_days.map(u64::from), 1, 36_500, "")?;
        within("lost_max", self.lost_max.map(u64::from), 1, 1000, "")?;
        within("memory_mb", self.memory_mb.map(|mb| mb as u64), 1, 4096, "")?;
        let memory_mb = self
            .memory_mb
            .unwrap_or(sandbox::Settings::default().memory_bytes_max >> 20);
        within(
            "memory_retry_mb",
            self.memory_retry_mb.map(|mb| mb as u64),
            memory_mb as u64,
            4096,
            " (memory_mb is the least)",
        )?;
        within(
            "result_bytes_max",
            self.result_bytes_max.map(|bytes| bytes as u64),
            2,
            64 << 20,
            "",
        )?;
        within(
            "invoke_max",
            self.invoke_max.map(|max| max as u64),
            0,
            10_000,
            "",
        )?;
        within(
            "invoke_payload_bytes_max",
            self.invoke_payload_bytes_max.map(|bytes| bytes as u64),
            2,
            64 << 20,
            "",
        )?;
        if self.queues.as_ref().is_some_and(Vec::is_empty) {
            return Err("queues is empty: leave it out to serve all queues".into());
        }
        for (handler, table) in &self.handlers {
            if !is_pattern(handler) {
                return Err(format!(
                    "handlers.\"{handler}\" is neither a handler's name nor a pattern such as \"image.*\" or \"*\""
                ));
            }
            let name = |key: &str| format!("handlers.\"{handler}\".{key}");
            within(&name("lease"), ms(table.lease), 2000, 86_400_000, " ms")?;
            within(
                &name("timeout"),
                ms(table.timeout),
                1,
                30 * 86_400_000,
                " ms",
            )?;
            within(&name("grace"), ms(table.grace), 0, 3_600_000, " ms")?;
            within(
                &name("max_attempts"),
                table.max_attempts.map(u64::from),
                1,
                1000,
                "",
            )?;
            within(
                &name("retry_initial"),
                ms(table.retry_initial),
                0,
                30 * 86_400_000,
                " ms",
            )?;
            within(
                &name("retry_max"),
                ms(table.retry_max),
                0,
                30 * 86_400_000,
                " ms",
            )?;
            if table
                .retry_multiplier
                .is_some_and(|multiplier| !(1.0..=1000.0).contains(&multiplier))
            {
                return Err(format!(
                    "{} must be between 1 and 1000",
                    name("retry_multiplier")
                ));
            }
        }
        Ok(())
    }

    /// The file with the worker's key; a relative one counts from `folder`.
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

    /// The file with the token that invocations have to show; a relative one counts from `folder`.
    pub fn invoke_token_file(&self, folder: &Path) -> Option<PathBuf> {
        self.invoke_token_file
            .as_ref()
            .map(|file| folder.join(file))
    }

    /// The largest payload of an invocation, bytes: what a queue takes where nothing else is set.
    pub fn invoke_payload_bytes_max(&self) -> usize {
        self.invoke_payload_bytes_max.unwrap_or(256 << 10)
    }

    /// The worker's settings, but for its key.
    pub fn worker(&self, hostname: String) -> worker::Settings {
        let default = worker::Settings::default();
        worker::Settings {
            worker_id: self.worker_id.clone().unwrap_or(default.worker_id),
            key: default.key,
            hostname,
            queues: self.queues.clone().unwrap_or(default.queues),
            tags: self.tags.clone().unwrap_or(default.tags),
            slots: self.slots.unwrap_or(default.slots),
            notify: self.notify.unwrap_or(default.notify),
            poll_min: self.poll_min.unwrap_or(default.poll_min),
            poll_max: self.poll_max.unwrap_or(default.poll_max),
            drain_timeout: self.drain_timeout.unwrap_or(default.drain_timeout),
            keep_days: self.keep_days.unwrap_or(default.keep_days),
            promote_after: self
                .promote_after
                .or(default.promote_after)
                .filter(|after| !after.is_zero()),
            lost_max: self.lost_max.unwrap_or(default.lost_max),
            sources: self.sources.clone().into_iter().collect(),
            overrides: Overrides(
                self.handlers
                    .iter()
                    .map(|(name, table)| (name.clone(), table.over()))
                    .collect(),
            ),
        }
    }

    /// The sandbox's settings. `folder` is where relative directories start.
    pub fn sandbox(&self, folder: &Path, slots: usize) -> sandbox::Settings {
        let default = sandbox::Settings::default();
        let grants = self.handlers.iter().flat_map(|(handler, table)| {
            table.dirs.iter().map(|dir| Grant {
                handler: handler.clone(),
                dir: folder.join(&dir.dir),
                at: dir.at.clone(),
                mode: match dir.mode {
                    ModeWord::Read => Mode::Read,
                    ModeWord::ReadWrite => Mode::ReadWrite,
                },
            })
        });
        let memory_bytes_max = self
            .memory_mb
            .map_or(default.memory_bytes_max, |mb| mb << 20);
        sandbox::Settings {
            attempts_max: slots,
            memory_bytes_max,
            memory_retry_bytes_max: self
                .memory_retry_mb
                .map_or((2 * memory_bytes_max).min(4 << 30), |mb| mb << 20),
            result_bytes_max: self.result_bytes_max.unwrap_or(default.result_bytes_max),
            grants: Grants(grants.collect()),
            instances: self
                .handlers
                .iter()
                .map(|(handler, table)| (handler.clone(), table.instances))
                .collect(),
            ..default
        }
    }
}

impl HandlerTable {
    fn over(&self) -> Override {
        Override {
            lease: self.lease,
            timeout: self.timeout,
            grace: self.grace,
            max_attempts: self.max_attempts,
            retry_initial: self.retry_initial,
            retry_max: self.retry_max,
            retry_multiplier: self.retry_multiplier,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<File, String> {
        let dir = std::env::temp_dir().join(format!("rouse-config-{}", rand::random::<u64>()));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("rouse.toml");
        std::fs::write(&path, text).unwrap();
        let read = File::read(Some(&path))
            .map(|(file, _)| file)
            .map_err(|e| e.to_string());
        std::fs::remove_dir_all(&dir).unwrap();
        read
    }

    #[test]
    fn every_key_may_be_left_out() {
        let worker = read("").unwrap().worker("here".into());
        assert_eq!(worker.poll_max, Duration::from_secs(2));
        assert!(worker.notify && worker.queues.is_empty());
    }

    #[test]
    fn directories_are_relative_to_the_file() {
        let file = read(
            "[handlers.\"image.*\"]\nlease = \"30s\"\ndirs = [{ dir = \"photos\", at = \"/in\" }, { dir = \"/out\", at = \"/out\", mode = \"read-write\" }]",
        )
        .unwrap();
        let sandbox = file.sandbox(Path::new("/etc/rouse"), 4);
        let dirs: Vec<_> = sandbox
            .grants
            .0
            .iter()
            .map(|grant| grant.dir.clone())
            .collect();
        assert_eq!(
            dirs,
            [PathBuf::from("/etc/rouse/photos"), PathBuf::from("/out")]
        );
    }

    #[test]
    fn instances_are_fresh_where_nothing_else_is_written() {
        let file = read(
            "[handlers.\"*\"]\ninstances = \"reuse\"\n[handlers.noop]\nlease = \"5s\"\n[handlers.\"a.*\"]\ninstances = \"fresh\"",
        )
        .unwrap();
        let sandbox = file.sandbox(Path::new("."), 4);
        let instances: Vec<_> = sandbox.instances.into_iter().collect();
        assert_eq!(
            instances,
            [
                ("*".into(), Instances::Reuse),
                ("a.*".into(), Instances::Fresh),
                ("noop".into(), Instances::Fresh),
            ]
        );
    }

    #[test]
    fn a_mistake_is_named_with_its_key() {
        for (text, part) in [
            ("quues = [\"a\"]", "quues"),
            ("slots = 0", "slots"),
            ("poll_max = \"5 minutes\"", "poll_max"),
            ("poll_max = \"soon\"", "no duration"),
            ("queues = []", "queues is empty"),
            ("queue = \"no\"", "queue"),
            ("invoke_max = 10001", "invoke_max"),
            ("invoke_payload_bytes_max = 1", "invoke_payload_bytes_max"),
            ("queues = [\"a b\"]", "\"a b\" is no name"),
            ("tags = [\"\"]", "\"\" is no name"),
            ("worker_id = \"a b\"", "worker_id"),
            ("[handlers.x]\nlease = \"1s\"", "lease"),
            ("[handlers.x]\ninstances = \"keep\"", "keep"),
            ("[handlers.\"ima*\"]\nlease = \"5s\"", "ima*"),
            (
                "[handlers.x]\ndirs = [{ dir = \"a\", at = \"/a\", mode = \"append\" }]",
                "append",
            ),
        ] {
            let message = read(text).unwrap_err();
            assert!(message.contains(part), "{text}: {message}");
        }
    }

    #[test]
    fn a_file_that_was_asked_for_must_exist() {
        let message = File::read(Some(Path::new("/nowhere/rouse.toml"))).unwrap_err();
        assert!(message.to_string().contains("/nowhere/rouse.toml"));
    }
}
