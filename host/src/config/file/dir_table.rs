//! `[[handlers."…".dirs]]`: directories that a handler may use.

use std::path::{Path, PathBuf};

use serde::de::MapAccess;
use serde::{Deserialize, Deserializer};

use crate::sandbox::{Grant, Mode, Quota};
use crate::setting::table::{self, Table};
use crate::setting::{Entry, Overlay};

/// A directory that is granted.
#[derive(Debug, Default)]
pub(super) struct DirTable {
    pub(super) dir: PathBuf,
    pub(super) at: String,
    pub(super) mode: ModeWord,
    /// If the table sets none of these numbers, the directory has no quota.
    quota: Overlay<Quota>,
}

impl Table for DirTable {
    type Numbers = Quota;
    const EXPECTED: &'static str = "a table such as { dir = \"photos\", at = \"/photos\" }";
    const ENTRIES: &'static [Entry] = &[
        Entry::required(
            "dir",
            "a path",
            "The directory on this machine; relative to the folder of `rouse.toml`",
        ),
        Entry::required(
            "at",
            "an absolute path",
            "The path under which the handler sees it",
        ),
        Entry::new(
            "mode",
            "`\"read\"`, `\"read-write\"`",
            "`\"read\"`",
            "Whether the handler may change what is in it",
        ),
    ];

    fn numbers(&mut self) -> Option<&mut Overlay<Quota>> {
        Some(&mut self.quota)
    }

    fn read<'de, A: MapAccess<'de>>(&mut self, key: &str, map: &mut A) -> Result<(), A::Error> {
        match key {
            "dir" => self.dir = map.next_value()?,
            "at" => self.at = map.next_value()?,
            "mode" => self.mode = map.next_value()?,
            key => unreachable!("{key} has a row, and is not read"),
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for DirTable {
    fn deserialize<D: Deserializer<'de>>(input: D) -> Result<Self, D::Error> {
        table::read(input)
    }
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
        self.quota.check(name)
    }

    pub(super) fn quota(&self) -> Option<Quota> {
        (!self.quota.is_empty()).then(|| self.quota.over(&Quota::default()))
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

    pub(super) fn writes(&self) -> bool {
        self.mode == ModeWord::ReadWrite
    }
}

/// True for a normalized absolute path. A path in another spelling would hide a directory, or be hidden.
fn is_normalized(at: &str) -> bool {
    let parts = at.strip_prefix('/').map(|rest| rest.split('/'));
    at == "/" || parts.is_some_and(|mut parts| parts.all(|part| !matches!(part, "" | "." | "..")))
}
