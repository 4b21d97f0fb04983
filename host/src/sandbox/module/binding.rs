//! The modules that a table of `rouse.toml` binds a handler's name to.

use std::fmt;
use std::str::FromStr;

use super::digest::Digest;
use super::pin::PublicKey;
use crate::sanitize::is_unsafe;

/// The module that a name is bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModuleBinding {
    /// The file of this name in the handlers folder.
    File(String),
    /// The file with this content, regardless of its name.
    Sha256(Digest),
    /// A file that was signed with this key, regardless of its name.
    Key(PublicKey),
}

/// The identity of a module, independent of what it declares about itself.
#[derive(Debug, Clone, Copy)]
pub struct Origin<'a> {
    /// The file's name in the handlers folder.
    pub file: &'a str,
    /// The sha256 of the file.
    pub digest: Digest,
    /// The keys that signed it, among those that this host checks.
    pub signed_by: &'a [PublicKey],
}

#[cfg(test)]
impl Origin<'static> {
    /// A module for tests that do not depend on its origin.
    pub(in crate::sandbox) fn for_tests() -> Self {
        Self {
            file: "test.wasm",
            digest: Digest([0; 32]),
            signed_by: &[],
        }
    }
}

/// Prefixes of a digest and of a key.
const SHA256: &str = "sha256:";
const KEY: &str = "ed25519:";

impl ModuleBinding {
    pub(in crate::sandbox) fn is(&self, origin: Origin<'_>) -> bool {
        match self {
            Self::File(file) => file == origin.file,
            Self::Sha256(digest) => *digest == origin.digest,
            Self::Key(key) => origin.signed_by.contains(key),
        }
    }
}

impl FromStr for ModuleBinding {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(digest) = text.strip_prefix(SHA256) {
            return digest.parse().map(Self::Sha256);
        }
        if let Some(key) = text.strip_prefix(KEY) {
            return key.parse().map(Self::Key);
        }
        let is_file = text.ends_with(".wasm") && !text.starts_with('.') && !text.contains('/');
        match is_file && !text.contains(is_unsafe) {
            true => Ok(Self::File(text.to_owned())),
            false => Err(format!(
                "{text:?} does not name a module: write the name of a file in the handlers folder (\"mail.wasm\"), \"{SHA256}…\" or \"{KEY}…\""
            )),
        }
    }
}

impl fmt::Display for ModuleBinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(file) => f.write_str(file),
            Self::Sha256(digest) => write!(f, "{SHA256}{digest}"),
            Self::Key(key) => write!(f, "{KEY}{key}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_binding_round_trips_as_text() {
        let digest = format!("sha256:{}", Digest::compute(b""));
        let key = format!("ed25519:{}", "A".repeat(43) + "=");
        for text in ["mail.wasm", "mail 2.wasm", &digest, &key] {
            let binding: ModuleBinding = text.parse().unwrap_or_else(|why| panic!("{why}"));
            assert_eq!(binding.to_string(), text);
        }
        for (text, words) in [
            ("mail", "does not name a module"),
            ("", "does not name a module"),
            ("../mail.wasm", "does not name a module"),
            (".mail.wasm", "does not name a module"),
            ("mail\n.wasm", "does not name a module"),
            ("sha256:abc", "is not a sha256"),
            ("ed25519:abc", "keygen"),
        ] {
            let why = text.parse::<ModuleBinding>().unwrap_err();
            assert!(why.contains(words), "{text}: {why}");
        }
    }
}
