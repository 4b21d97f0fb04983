//! From `rouse.toml` and the environment to the settings of a sandbox that runs handlers.

use std::path::Path;

use super::compile_module::with_compiler;
use crate::config::{Environment, File};
use crate::sandbox;

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
