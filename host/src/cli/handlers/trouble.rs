//! What of `rouse.toml` would keep a host from starting, and what it would warn of: besides modules, which it refuses one by one.

use std::path::Path;

use crate::cli::host::invocations;
use crate::cli::settings::missing_dirs;
use crate::config::{Environment, File};

/// One line for each.
pub(super) struct Trouble {
    /// `rouse serve` does not start.
    pub(super) errors: Vec<String>,
    /// It starts, and says so.
    pub(super) warnings: Vec<String>,
}

impl Trouble {
    /// Tries what the file names, as a host does when it starts. `folder`: where relative paths start. `handlers`: the
    /// folder with the modules.
    pub(super) fn of(file: &File, folder: &Path, handlers: &Path) -> Self {
        let mut errors = file.secret_errors(folder, Environment);
        if file.invoke_max() != Some(0) {
            errors.extend(invocations::token(file, folder).err());
        }
        let settings = file.sandbox(folder, 1);
        let missing = missing_dirs(&settings)
            .map(|grant| grant.cannot_be_opened(&"there is no such directory"));
        Self {
            errors: errors.iter().map(|error| format!("{error:#}")).collect(),
            warnings: missing.chain(file.exposed(folder, handlers)).collect(),
        }
    }
}
