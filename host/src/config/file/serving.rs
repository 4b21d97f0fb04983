//! Which modules may serve, and where their machine code is kept.

use std::path::{Path, PathBuf};

use super::File;
use super::modules::PinWord;
use crate::config::env::Environment;
use crate::sandbox::Pin;

/// The word that switches the cache off.
const OFF: &str = "off";

impl File {
    /// The file with the digests of the modules that may serve.
    pub fn lock_file(folder: &Path) -> PathBuf {
        folder.join("handlers.lock")
    }

    /// True if only the modules in the lock file may serve.
    pub fn pins_to_lock(&self) -> bool {
        self.pin == Some(PinWord::Lock)
    }

    /// What a module needs before it may serve.
    pub(super) fn pin(&self, folder: &Path) -> Pin {
        Pin {
            lock: self.pins_to_lock().then(|| Self::lock_file(folder)),
            trusted_keys: self.trusted_keys.clone(),
        }
    }

    /// The folder of the code cache; a relative path starts at `folder`.
    pub(super) fn cache_dir(&self, folder: &Path) -> Option<PathBuf> {
        match &self.cache_dir {
            None => Environment.cache_dir(),
            Some(dir) if dir == Path::new(OFF) => None,
            Some(dir) => Some(folder.join(dir)),
        }
    }
}
