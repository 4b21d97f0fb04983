//! `[[handlers."…".dirs]]`: directories that a handler may use.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::checks::within;
use super::handler_table::HandlerTable;
use super::way::Way;
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
        if !is_place(&self.at) {
            return Err(format!(
                "{name}: at = {:?} is no path under which a handler can see a directory: write it like \"/photos\", from /, without \".\", \
                 \"..\", and a / that is doubled or at the end",
                self.at
            ));
        }
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

/// An entry, with whose it is and where its directory is.
struct Entry<'a> {
    handler: &'a str,
    table: &'a DirTable,
    way: Way,
}

/// Says which two entries cannot stand in one file: a handler sees one directory at a path, a directory has one quota, whoever
/// writes there, and none lies in another one that handlers may change.
pub(super) fn check_together(
    handlers: &BTreeMap<String, HandlerTable>,
    folder: &Path,
) -> Result<(), String> {
    let mut before: Vec<Entry<'_>> = Vec::new();
    for (handler, table) in handlers {
        for dir in &table.dirs {
            let entry = Entry {
                handler,
                table: dir,
                way: Way::of(&folder.join(&dir.dir)),
            };
            for other in &before {
                other.check_with(&entry)?;
                other.check_above(&entry)?;
                entry.check_above(other)?;
            }
            before.push(entry);
        }
    }
    Ok(())
}

impl Entry<'_> {
    /// In the words of the file.
    fn name(&self) -> String {
        format!("handlers.\"{}\".dirs at {}", self.handler, self.table.at)
    }

    fn check_with(&self, other: &Self) -> Result<(), String> {
        let both = || format!("{} and {}", self.name(), other.name());
        let one_handler = pattern_covers(self.handler, other.handler)
            || pattern_covers(other.handler, self.handler);
        // The same twice is no harm: for a pattern, and for a handler that fits it.
        let same = self.table.mode == other.table.mode && self.way.end == other.way.end;
        if one_handler && self.table.at == other.table.at && !same {
            return Err(format!(
                "{}: a handler can see one directory there; give one of them another path",
                both()
            ));
        }
        let both_write = self.table.writes() && other.table.writes();
        if both_write && self.way.end == other.way.end && self.table.quota() != other.table.quota()
        {
            return Err(format!(
                "{}: both are {}, with different quotas; a directory has one for all who write there, so give both the same \
                 bytes_max and files_max",
                both(),
                other.table.dir.display()
            ));
        }
        Ok(())
    }

    /// Whoever may change a directory could put another one, or a link to one, in the place of what is in it.
    fn check_above(&self, beneath: &Self) -> Result<(), String> {
        if !self.table.writes() || !beneath.way.is_beneath(&self.way.end) {
            return Ok(());
        }
        Err(format!(
            "{} is {}, to which the way leads through {}, where {} lets handlers write: they could put something else in its place, and \
             write there around a quota; grant directories that lie beside each other, or {} with mode = \"read\"",
            beneath.name(),
            beneath.table.dir.display(),
            self.table.dir.display(),
            self.name(),
            self.table.dir.display()
        ))
    }
}

impl DirTable {
    fn writes(&self) -> bool {
        self.mode == ModeWord::ReadWrite
    }
}

/// Where a handler sees a directory is a path in one spelling: another spelling of it would hide the directory, or be hidden.
fn is_place(at: &str) -> bool {
    let parts = at.strip_prefix('/').map(|rest| rest.split('/'));
    at == "/" || parts.is_some_and(|mut parts| parts.all(|part| !matches!(part, "" | "." | "..")))
}
