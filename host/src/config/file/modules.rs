//! What `rouse.toml` says of modules: where their code is kept, and which of them may serve.

use std::path::{Path, PathBuf};

use std::fmt;

use semver::Version;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize as _, Deserializer};

use super::File;
use crate::config::Environment;
use crate::sandbox::{ModuleBinding, Pin, PublicKey};

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

/// Reads what a name is bound to: one text, or a list of them.
pub(super) fn bindings<'de, D: Deserializer<'de>>(
    input: D,
) -> Result<Option<Vec<ModuleBinding>>, D::Error> {
    input.deserialize_any(Bindings).map(Some)
}

struct Bindings;

impl<'de> Visitor<'de> for Bindings {
    type Value = Vec<ModuleBinding>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the name of a file (\"mail.wasm\"), \"sha256:…\", \"ed25519:…\", or a list of such",
        )
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Self::Value, E> {
        Ok(vec![text.parse().map_err(E::custom)?])
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(text) = elements.next_element::<String>()? {
            all.push(text.parse().map_err(serde::de::Error::custom)?);
        }
        match all.is_empty() {
            false => Ok(all),
            true => Err(serde::de::Error::invalid_length(0, &self)),
        }
    }
}

/// Reads a version.
pub(super) fn version<'de, D: Deserializer<'de>>(input: D) -> Result<Option<Version>, D::Error> {
    let text = String::deserialize(input)?;
    let version = text.parse().map_err(|error| {
        serde::de::Error::custom(format!("{text:?} is no version like \"1.2.3\": {error}"))
    });
    version.map(Some)
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
