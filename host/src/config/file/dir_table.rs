//! `[[handlers."…".dirs]]`: directories that a handler may use.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::bounds::within;
use crate::sandbox::{Grant, Mode, Quota};

/// Where only the bytes are limited. Counting as many takes a tenth of a second.
const FILES_MAX: u64 = 100_000;

/// A directory that is granted.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DirTable {
    /// The directory on this machine; relative to the folder of `rouse.toml`.
    pub(super) dir: PathBuf,
    /// Where the handler sees it.
    pub(super) at: String,
    #[serde(default)]
    pub(super) mode: ModeWord,
    /// The sizes of all its files together; default: as much as the disk holds.
    bytes_max: Option<u64>,
    /// Files, directories and links in it; default: any number, or 100,000 where `bytes_max` is set.
    files_max: Option<u64>,
}

/// What may be done in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(super) enum ModeWord {
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

    pub(super) fn quota(&self) -> Option<Quota> {
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

impl DirTable {
    pub(super) fn writes(&self) -> bool {
        self.mode == ModeWord::ReadWrite
    }
}

/// Where a handler sees a directory is a path in one spelling: another spelling of it would hide the directory, or be hidden.
fn is_place(at: &str) -> bool {
    let parts = at.strip_prefix('/').map(|rest| rest.split('/'));
    at == "/" || parts.is_some_and(|mut parts| parts.all(|part| !matches!(part, "" | "." | "..")))
}
