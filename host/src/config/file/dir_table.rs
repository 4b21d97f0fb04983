//! `[[handlers."…".dirs]]`: directories that a handler may use.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::checks::within;
use super::handler_table::HandlerTable;
use crate::job::pattern_covers;
use crate::sandbox::{Grant, Mode, Quota};

/// Where only the bytes are limited. Counting as many takes a tenth of a second.
const FILES_MAX: u64 = 100_000;

/// A directory that is granted.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DirTable {
    /// The directory on this machine; relative to the folder of `rouse.toml`.
    dir: PathBuf,
    /// Where the handler sees it.
    at: String,
    #[serde(default)]
    mode: ModeWord,
    /// The sizes of all its files together; default: as much as the disk holds.
    bytes_max: Option<u64>,
    /// Files, directories and links in it; default: any number, or 100,000 where `bytes_max` is set.
    files_max: Option<u64>,
}

/// What may be done in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
enum ModeWord {
    #[default]
    #[serde(rename = "read")]
    Read,
    #[serde(rename = "read-write")]
    ReadWrite,
}

impl DirTable {
    /// Says what is wrong. `name`: of a key.
    pub(super) fn check(&self, name: &str) -> Result<(), String> {
        if self.quota().is_some() && self.mode == ModeWord::Read {
            return Err(format!(
                "{name}: {} has bytes_max or files_max, which hold for mode = \"read-write\"",
                self.at
            ));
        }
        let key = |key: &str| format!("{name}.{key}");
        within(&key("bytes_max"), self.bytes_max, 1, 1 << 60, "")?;
        within(&key("files_max"), self.files_max, 1, 1_000_000, "")
    }

    fn quota(&self) -> Option<Quota> {
        match (self.bytes_max, self.files_max) {
            (None, None) => None,
            (bytes_max, files_max) => Some(Quota {
                bytes_max: bytes_max.unwrap_or(u64::MAX),
                files_max: files_max.unwrap_or(FILES_MAX),
            }),
        }
    }

    pub(super) fn grant(&self, handler: &str, folder: &Path) -> Grant {
        Grant {
            handler: handler.to_owned(),
            dir: folder.join(&self.dir),
            at: self.at.clone(),
            mode: match self.mode {
                ModeWord::Read => Mode::Read,
                ModeWord::ReadWrite => Mode::ReadWrite,
            },
            quota: self.quota(),
        }
    }
}

/// Says which two entries cannot stand in one file: a handler sees one directory at a path, and a directory has one quota, whoever
/// writes there.
pub(super) fn check_together(
    handlers: &BTreeMap<String, HandlerTable>,
    folder: &Path,
) -> Result<(), String> {
    let mut before: Vec<(&str, &DirTable)> = Vec::new();
    for (handler, table) in handlers {
        for dir in &table.dirs {
            for (other_handler, other) in &before {
                let both = || {
                    format!(
                        "handlers.\"{other_handler}\".dirs at {} and handlers.\"{handler}\".dirs at {}",
                        other.at, dir.at
                    )
                };
                let one_handler = pattern_covers(other_handler, handler)
                    || pattern_covers(handler, other_handler);
                // The same twice is no harm: for a pattern, and for a handler that fits it.
                let same = other.mode == dir.mode && other.named(folder) == dir.named(folder);
                if one_handler && other.place() == dir.place() && !same {
                    return Err(format!(
                        "{}: a handler can see one directory there; give one of them another path",
                        both()
                    ));
                }
                if other.writes_where(dir, folder) && other.quota() != dir.quota() {
                    return Err(format!(
                        "{}: both are {}, with different quotas; a directory has one for all who write there, so give both the same \
                         bytes_max and files_max",
                        both(),
                        dir.dir.display()
                    ));
                }
            }
            before.push((handler, dir));
        }
    }
    Ok(())
}

impl DirTable {
    /// Where the handler sees it, in one spelling.
    fn place(&self) -> &str {
        self.at.trim_end_matches('/')
    }

    /// True where handlers may write to this directory through both.
    fn writes_where(&self, other: &Self, folder: &Path) -> bool {
        self.mode == ModeWord::ReadWrite
            && other.mode == ModeWord::ReadWrite
            && self.named(folder) == other.named(folder)
    }

    /// The directory under one name, however it is written.
    fn named(&self, folder: &Path) -> PathBuf {
        let dir = folder.join(&self.dir);
        dir.canonicalize().unwrap_or(dir)
    }
}
