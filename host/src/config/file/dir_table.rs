//! `[[handlers."…".dirs]]`: directories that a handler may use.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::sandbox::{Grant, Mode, Quota};
use crate::setting::Number;

/// The default of `files_max` if `bytes_max` is set. Counting this many files takes a tenth of a second.
const FILES_MAX: u64 = 100_000;

/// A directory that is granted.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DirTable {
    /// The directory on this machine; relative to the folder of `rouse.toml`.
    pub(super) dir: PathBuf,
    /// The path under which the handler sees it.
    pub(super) at: String,
    #[serde(default)]
    pub(super) mode: ModeWord,
    /// The total size of its files; default: no limit.
    bytes_max: Option<u64>,
    /// Files, directories and links in it; default: no limit, or 100,000 if `bytes_max` is set.
    files_max: Option<u64>,
}

/// What the handler may do in it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
pub(super) enum ModeWord {
    #[default]
    #[serde(rename = "read")]
    Read,
    #[serde(rename = "read-write")]
    ReadWrite,
}

impl DirTable {
    /// Rejects an invalid table. `name` is that of the key.
    pub(super) fn check(&self, name: &str) -> Result<(), String> {
        if !is_normalized(&self.at) {
            return Err(format!(
                "{name}: at = {:?} is not a path under which a handler can see a directory: write it like \"/photos\", from /, without \".\", \
                 \"..\", \"//\" or a / at the end",
                self.at
            ));
        }
        if self.quota().is_some() && self.mode == ModeWord::Read {
            return Err(format!(
                "{name}: {} has bytes_max or files_max, which need mode = \"read-write\"",
                self.at
            ));
        }
        for (key, value, max) in [
            ("bytes_max", self.bytes_max, 1 << 60),
            ("files_max", self.files_max, 1_000_000),
        ] {
            if let Some(value) = value {
                Number::from(value).check(&format!("{name}.{key}"), &(1..=max))?;
            }
        }
        Ok(())
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

/// True for a normalized absolute path. A path in another spelling would hide a directory, or be hidden.
fn is_normalized(at: &str) -> bool {
    let parts = at.strip_prefix('/').map(|rest| rest.split('/'));
    at == "/" || parts.is_some_and(|mut parts| parts.all(|part| !matches!(part, "" | "." | "..")))
}
