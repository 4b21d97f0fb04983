//! The folder of a run, which can be checked again later.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

pub(super) struct Folder(PathBuf);

impl Folder {
    /// Creates the folder. Fails if it exists.
    pub(super) fn create(path: &Path) -> Result<Self> {
        let folder = Self(std::path::absolute(path)?);
        if let Some(parent) = folder.0.parent() {
            fs::create_dir_all(parent).with_context(|| format!("create {}", parent.display()))?;
        }
        for part in [
            folder.0.clone(),
            folder.evidence(),
            folder.hosts(),
            folder.handlers(),
        ] {
            fs::create_dir(&part).with_context(|| format!("create {}", part.display()))?;
        }
        Ok(folder)
    }

    /// The folder of an earlier run.
    pub(super) fn of(path: &Path) -> Self {
        Self(path.to_owned())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    /// A folder for each host, with a file for each start and each end of an attempt.
    pub(super) fn evidence(&self) -> PathBuf {
        self.0.join("evidence")
    }

    /// A folder for each host, with its settings and its log.
    pub(super) fn hosts(&self) -> PathBuf {
        self.0.join("hosts")
    }

    /// The folder that the hosts watch.
    pub(super) fn handlers(&self) -> PathBuf {
        self.0.join("handlers")
    }

    pub(super) fn ledger(&self) -> PathBuf {
        self.0.join("ledger.jsonl")
    }

    pub(super) fn plan(&self) -> PathBuf {
        self.0.join("plan.jsonl")
    }

    /// The rows of one table at the end of the run.
    pub(super) fn dump(&self, table: &str) -> PathBuf {
        self.0.join(format!("{table}.jsonl"))
    }

    pub(super) fn violations(&self) -> PathBuf {
        self.0.join("violations.txt")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_existing_folder_is_never_overwritten() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("new/run");
        Folder::create(&path).unwrap();
        let again = Folder::create(&path).err().expect("it exists");
        assert!(again.to_string().contains("new/run"), "{again:#}");
    }
}
