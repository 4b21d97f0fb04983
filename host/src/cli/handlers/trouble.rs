//! Errors in `rouse.toml` and the environment that keep a host from starting, and warnings. Modules are refused
//! individually, elsewhere.

use std::path::Path;

use crate::cli::host::{dashboard, invocations};
use crate::cli::settings::missing_dirs;
use crate::config::{self, Environment, File};

/// One sentence for each problem.
pub(super) struct Trouble {
    /// `rouse serve` does not start with them.
    pub(super) errors: Vec<String>,
    /// `rouse serve` starts and logs them.
    pub(super) warnings: Vec<String>,
}

impl Trouble {
    /// Checks what `Host::prepare` and the dashboard read from the files and variables that `rouse.toml` names, and from
    /// the variables of Rouse. Relative paths start at `folder`; `handlers` is the folder with the modules.
    pub(super) fn find(file: &File, folder: &Path, handlers: &Path) -> Self {
        let mut errors = file.secret_errors(folder, Environment);
        let key_file = file.worker_key_file(folder);
        // A host creates the key if it is missing.
        let existing = key_file.as_deref().filter(|path| path.exists());
        let key = existing.and_then(|path| config::read_or_make_key(path).err());
        errors.extend(key);
        errors.extend(invocations::tokens(file, folder).err());
        errors.extend(file.fair_share(Environment).err());
        errors.extend(Environment.otlp().err());
        errors.extend(file.sql_logins(folder, Environment, None).err());
        let of_dashboard = dashboard::Settings::read();
        let of_dashboard = of_dashboard.map_err(|error| error.context("with an HTTP port"));
        errors.extend(of_dashboard.err());
        let settings = file.sandbox(folder, 1);
        let missing = missing_dirs(&settings)
            .map(|grant| grant.cannot_be_opened(&"there is no such directory"));
        Self {
            errors: errors.iter().map(|error| format!("{error:#}")).collect(),
            warnings: missing
                .chain(file.exposed(folder, handlers, key_file.as_deref()))
                .collect(),
        }
    }
}
