//! The settings of a sandbox, from `rouse.toml` and the environment.

use std::path::Path;

use super::compile_module::with_compiler;
use crate::config::{Environment, File};
use crate::sandbox::{self, Grant};

/// The settings of the file, with the secrets that it names, and with this program as the compiler. Relative paths
/// start at `folder`. `handler` is the only handler that will run, if there is only one: other secrets are not read.
pub(super) fn sandbox_settings(
    file: &File,
    folder: &Path,
    attempts_max: usize,
    handler: Option<&str>,
) -> anyhow::Result<sandbox::Settings> {
    Ok(with_compiler(sandbox::Settings {
        secrets: file.secrets(folder, Environment, handler)?,
        ..file.sandbox(folder, attempts_max)
    }))
}

/// The granted directories that are missing: attempts of their handlers fail.
pub(super) fn missing_dirs(settings: &sandbox::Settings) -> impl Iterator<Item = &Grant> {
    let grants = settings.grants.0.iter();
    grants.filter(|grant| !grant.dir.is_dir())
}
