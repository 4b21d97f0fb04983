//! A module that is ready to run.

use std::fmt;
use std::sync::Arc;

use super::binding::Origin;
use super::digest::Digest;
use super::lines::Lines;
use super::manifest::Manifest;
use super::pin::PublicKey;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::ModulePre;

/// Where the machine code of a module is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeFrom {
    /// It was compiled just now.
    Compiler,
    /// It was compiled before, and kept.
    Cache,
}

impl CodeFrom {
    /// For the log.
    pub(in crate::sandbox) fn as_str(self) -> &'static str {
        match self {
            Self::Compiler => "compiled",
            Self::Cache => "cached",
        }
    }
}

/// A file that can run: compiled, linked, asked for its manifest.
pub struct Module {
    /// The file's name in the handlers folder.
    pub file: String,
    /// The sha256 of the file.
    pub digest: Digest,
    /// What it says of its handlers.
    pub manifest: Manifest,
    /// Where its machine code is from.
    pub code: CodeFrom,
    /// The keys that count on this host by which the file was signed.
    pub(in crate::sandbox) signed_by: Vec<PublicKey>,
    pub(in crate::sandbox) pre: ModulePre<AttemptState>,
    pub(in crate::sandbox) lines: Arc<Lines>,
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Module")
            .field("file", &self.file)
            .field("digest", &self.digest)
            .finish_non_exhaustive()
    }
}

impl Module {
    /// What of its manifest this host does not know, as a sentence that starts with "its manifest …"; none: it knows all of it.
    pub fn ignores(&self) -> Option<String> {
        let unknown = &self.manifest.unknown;
        let keys = unknown.join(", ");
        (!unknown.is_empty()).then(|| {
            format!("its manifest has keys that this host does not know, and ignores: {keys}")
        })
    }

    /// What tells it from others.
    pub fn origin(&self) -> Origin<'_> {
        Origin {
            file: &self.file,
            digest: self.digest,
            signed_by: &self.signed_by,
        }
    }

    /// The same module, from another file, with this file's signatures.
    pub(in crate::sandbox) fn renamed(&self, file: &str, signed_by: Vec<PublicKey>) -> Self {
        Self {
            file: file.to_owned(),
            signed_by,
            digest: self.digest,
            manifest: self.manifest.clone(),
            code: self.code,
            pre: self.pre.clone(),
            lines: self.lines.clone(),
        }
    }
}
