//! From `rouse.toml` and the environment to the settings of a sandbox that runs handlers.

use std::path::Path;

use super::compile_module::with_compiler;
use crate::config::{Environment, File};
use crate::sandbox::{self, Grant};

/// What the file says, with the secrets that it names, and with this program as the compiler. `folder`: where relative
/// paths start.
pub(super) fn sandbox_settings(
    file: &File,
    folder: &Path,
    attempts_max: usize,
) -> anyhow::Result<sandbox::Settings> {
    Ok(with_compiler(sandbox::Settings {
        secrets: file.secrets(folder, Environment)?,
        ..file.sandbox(folder, attempts_max)
    }))
}

/// The same for one attempt of one handler, with the secrets that this one is granted.
pub(super) fn settings_of(
    file: &File,
    folder: &Path,
    handler: &str,
) -> anyhow::Result<sandbox::Settings> {
    Ok(with_compiler(sandbox::Settings {
        secrets: file.secrets_of(handler, folder, Environment)?,
        ..file.sandbox(folder, 1)
    }))
}

/// The directories that are granted and not there: attempts of their handlers fail.
pub(super) fn missing_dirs(settings: &sandbox::Settings) -> impl Iterator<Item = &Grant> {
    let grants = settings.grants.0.iter();
    grants.filter(|grant| !grant.dir.is_dir())
}
