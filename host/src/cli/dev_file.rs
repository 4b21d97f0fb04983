//! A file next to the data of a `rouse dev`, from which other commands in the same folder read what it serves.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::{Deserialize, Serialize};

use super::target::data_dir;
use crate::postgres::Running;

/// The file, in the data directory of the private Postgres.
const FILE: &str = "dev.json";

/// The folder and settings that a `rouse dev` serves; paths are absolute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Serves {
    /// The folder with the handlers.
    pub(super) handlers: PathBuf,
    /// Its `rouse.toml`, if it has one.
    pub(super) config: Option<PathBuf>,
}

impl Serves {
    /// # Errors
    /// If the folder does not exist.
    pub(super) fn new(handlers: &Path, config: Option<&Path>) -> anyhow::Result<Self> {
        let handlers = fs::canonicalize(handlers)
            .with_context(|| format!("resolve the path {}", handlers.display()))?;
        let config = config.and_then(|config| fs::canonicalize(config).ok());
        Ok(Self { handlers, config })
    }

    /// Writes the file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub(super) fn write(&self, data_dir: &Path) -> anyhow::Result<()> {
        let path = data_dir.join(FILE);
        let text = serde_json::to_vec(self).context("write the served folder as JSON")?;
        fs::write(&path, text).with_context(|| format!("write {}", path.display()))
    }

    /// Removes the file of an earlier `rouse dev` on this data.
    ///
    /// # Errors
    /// If the file cannot be removed.
    pub(super) fn forget(data_dir: &Path) -> anyhow::Result<()> {
        let path = data_dir.join(FILE);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("remove {}", path.display()))
            }
            _ => Ok(()),
        }
    }

    /// The folder and settings that the `rouse dev` of this folder (or of `ROUSE_DATA_DIR`) serves; `None` if none
    /// runs.
    pub(super) fn here() -> Option<Self> {
        let server = Running::find(&data_dir(None))?;
        let text = fs::read(server.data_dir.join(FILE)).ok()?;
        serde_json::from_slice(&text).ok()
    }
}
