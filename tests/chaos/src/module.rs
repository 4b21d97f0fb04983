//! Builds of the module that differ only in their bytes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

pub(super) const NAME: &str = "chaos_guest.wasm";

/// The module, and the folder that hosts watch.
pub(super) struct Module {
    bytes: Vec<u8>,
    folder: PathBuf,
}

impl Module {
    /// Reads the module from the folder of test guests.
    pub(super) fn read(guests: &Path, folder: &Path) -> Result<Self> {
        let path = guests.join(NAME);
        Ok(Self {
            bytes: fs::read(&path).with_context(|| format!("read {}", path.display()))?,
            folder: folder.to_owned(),
        })
    }

    /// Puts a build into the folder as a deployment would: under a hidden name, then renamed. Returns its SHA-256.
    pub(super) fn place(&self, build: u64) -> Result<String> {
        let hidden = self.folder.join(format!(".{NAME}.{build}"));
        let target = self.folder.join(NAME);
        let bytes = variant(&self.bytes, build);
        fs::write(&hidden, &bytes)
            .and_then(|()| fs::rename(&hidden, &target))
            .with_context(|| format!("write {}", target.display()))?;
        Ok(format!("{:x}", Sha256::digest(&bytes)))
    }
}

/// The module with an additional custom section that contains the number of the build.
fn variant(module: &[u8], build: u64) -> Vec<u8> {
    const SECTION: &[u8] = b"build";
    let text = build.to_string();
    let mut bytes = module.to_vec();
    // Id 0, the length of the section, and the name with its length. Each length is below 128: one byte.
    bytes.extend([
        0,
        (1 + SECTION.len() + text.len()) as u8,
        SECTION.len() as u8,
    ]);
    bytes.extend(SECTION);
    bytes.extend(text.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn builds_differ_only_in_a_trailing_custom_section() {
        let build = variant(b"\0asm", 7);
        assert_eq!(build, b"\0asm\0\x07\x05build7");
        assert_ne!(build, variant(b"\0asm", 8));
    }
}
