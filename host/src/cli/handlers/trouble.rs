//! Errors in `rouse.toml` that keep a host from starting, and its warnings. Modules are refused one by one elsewhere.

use std::path::Path;

use crate::cli::host::invocations;
use crate::cli::settings::missing_dirs;
use crate::config::{Environment, File};

/// One sentence for each problem.
pub(super) struct Trouble {
    /// `rouse serve` does not start with them.
    pub(super) errors: Vec<String>,
    /// `rouse serve` starts and logs them.
    pub(super) warnings: Vec<String>,
}

impl Trouble {
    /// Checks the files and variables that `rouse.toml` names, as a starting host does. Relative paths start at
    /// `folder`; `handlers` is the folder with the modules.
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
