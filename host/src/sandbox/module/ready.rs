//! A module that is ready to run.

use std::fmt;
use std::sync::Arc;

use tokio::sync::Semaphore;

use super::binding::Origin;
use super::digest::Digest;
use super::lines::Lines;
use super::manifest::Manifest;
use super::pin::PublicKey;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::bindings::ModulePre;

/// The source of a module's machine code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CodeFrom {
    /// It has just been compiled.
    Compiler,
    /// It was compiled earlier and cached.
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

/// A module that can run: compiled, linked, and described.
pub struct Module {
    /// The file's name in the handlers folder.
    pub file: String,
    /// The sha256 of the file.
    pub digest: Digest,
    /// The manifest that it declares.
    pub manifest: Manifest,
    /// The source of its machine code.
    pub code: CodeFrom,
    /// The keys that signed the file, among those that this host checks.
    pub(in crate::sandbox) signed_by: Vec<PublicKey>,
    pub(in crate::sandbox) pre: ModulePre<AttemptState>,
    pub(in crate::sandbox) lines: Arc<Lines>,
    /// Its share of the threads for long checks.
    pub(in crate::sandbox) checks: Arc<Semaphore>,
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
    /// The manifest keys that this host does not know, as a sentence that starts with "its manifest …"; `None` if it
    /// knows all of them.
    pub fn ignores(&self) -> Option<String> {
        let unknown = &self.manifest.unknown;
        let keys = unknown.join(", ");
        (!unknown.is_empty()).then(|| {
            format!("its manifest has keys that this host does not know and ignores: {keys}")
        })
    }

    /// Its identity, independent of what it declares.
    pub fn origin(&self) -> Origin<'_> {
        Origin {
            file: &self.file,
            digest: self.digest,
            signed_by: &self.signed_by,
        }
    }

    /// The same module from another file, with that file's signatures.
    pub(in crate::sandbox) fn renamed(&self, file: &str, signed_by: Vec<PublicKey>) -> Self {
        Self {
            file: file.to_owned(),
            signed_by,
            digest: self.digest,
            manifest: self.manifest.clone(),
            code: self.code,
            pre: self.pre.clone(),
            lines: self.lines.clone(),
            checks: self.checks.clone(),
        }
    }
}
