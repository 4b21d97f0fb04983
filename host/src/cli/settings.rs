//! From `rouse.toml` and the environment to the settings of a sandbox that runs handlers.

use std::path::Path;

use super::compile_module::with_compiler;
use crate::config::{Environment, File};
use crate::sandbox::{self, Grant};

/// What the file says, with the secrets that it names, and with this program as the compiler. `folder`: where relative
/// paths start. `handler`: the only one that will run, with no secrets but those that it is granted.
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

/// The directories that are granted and not there: attempts of their handlers fail.
pub(super) fn missing_dirs(settings: &sandbox::Settings) -> impl Iterator<Item = &Grant> {
    let grants = settings.grants.0.iter();
    grants.filter(|grant| !grant.dir.is_dir())
}
