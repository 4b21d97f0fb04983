//! What `rouse.toml` says of modules: where their code is kept, and which of them may serve.

use std::path::{Path, PathBuf};

use serde::{Deserialize as _, Deserializer};

use super::File;
use crate::config::Environment;
use crate::sandbox::{Pin, PublicKey};

/// The word that switches the cache off.
const OFF: &str = "off";

/// How modules are pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum PinWord {
    /// To the digests in `handlers.lock`.
    Lock,
}

/// Reads public keys.
pub(super) fn keys<'de, D: Deserializer<'de>>(input: D) -> Result<Vec<PublicKey>, D::Error> {
    let texts = Vec::<String>::deserialize(input)?;
    let keys = texts.iter().map(|text| {
        text.parse()
            .map_err(|why| serde::de::Error::custom(format!("{text:?}: {why}")))
    });
    keys.collect()
}

impl File {
    /// Where the digests of modules stand that may serve.
    pub fn lock_file(folder: &Path) -> PathBuf {
        folder.join("handlers.lock")
    }

    /// Whether only those may.
    pub fn pins_to_lock(&self) -> bool {
        self.pin == Some(PinWord::Lock)
    }

    /// What modules have to show.
    pub(super) fn pin(&self, folder: &Path) -> Pin {
        Pin {
            lock: self.pins_to_lock().then(|| Self::lock_file(folder)),
            trusted_keys: self.trusted_keys.clone(),
        }
    }

    /// Where machine code is kept; a relative directory counts from `folder`.
    pub(super) fn cache_dir(&self, folder: &Path) -> Option<PathBuf> {
        match &self.cache_dir {
            None => Environment.cache_dir(),
            Some(dir) if dir == Path::new(OFF) => None,
            Some(dir) => Some(folder.join(dir)),
        }
    }
}
