//! What is known of one file of the folder.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Handler;
use super::file::Stamp;
use crate::harmless::printable;
use crate::job::narrowest;
use crate::sandbox::capability::HttpAccess;
use crate::sandbox::grants::Granted;
use crate::sandbox::{Digest, HandlerManifest, Instances, Module, Sandbox, Settings};

/// Why a file is refused: a sentence or two, and the lines that would help.
const WHY_BYTES_MAX: usize = 8 << 10;

/// What is known of one file of the folder.
#[derive(Default)]
pub(super) struct Entry {
    /// The file as it was when it was last looked into.
    pub(super) seen: Option<Looks>,
    /// The file as it is now, and since when it is like that.
    pub(super) fresh: Option<(Looks, Instant)>,
    /// Its place in the line, where it is being looked into.
    pub(super) loading: Option<u64>,
    /// When it is tried again: it was refused for a reason that may pass.
    pub(super) retry_at: Option<Instant>,
    pub(super) serving: Option<Serving>,
    /// A good version that waits for another file to give up a name, and its place in the line.
    pub(super) waiting: Option<(u64, Arc<Module>)>,
    pub(super) refused: Option<String>,
    pub(super) refused_digest: Option<Digest>,
}

/// How a file looks from outside, and what decides whether it may serve.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Looks {
    pub(super) file: Stamp,
    pub(super) signature: Option<Stamp>,
    pub(super) lock: Option<Stamp>,
}

impl Looks {
    /// How long ago the last of it was written to.
    pub(super) fn age(&self) -> Duration {
        let others = self.signature.iter().chain(&self.lock);
        let youngest = others.map(Stamp::age).min();
        youngest.map_or(self.file.age(), |age| age.min(self.file.age()))
    }
}

/// A module that serves.
pub(super) struct Serving {
    pub(super) module: Arc<Module>,
    pub(super) handlers: Vec<Arc<Handler>>,
}

impl Entry {
    /// Nothing is wrong with the file any more.
    pub(super) fn accept(&mut self) {
        self.refused = None;
        self.refused_digest = None;
        self.retry_at = None;
    }

    /// Something is wrong with the file. A digest says that it is its contents, which need not be
    /// looked at twice. Why may quote what it contains, and is one line.
    pub(super) fn refuse(&mut self, file: &str, why: String, digest: Option<Digest>) {
        let why = printable(&why, WHY_BYTES_MAX);
        tracing::warn!(
            file,
            last_good_serves = self.serving.is_some(),
            "module refused: {why}"
        );
        self.refused = Some(why);
        if digest.is_some() {
            self.waiting = None;
        }
        self.refused_digest = digest;
    }

    /// Lets a module serve in the place of the last one.
    pub(super) fn serve(&mut self, serving: Serving, settings: &Settings) {
        let module = &serving.module;
        let names = serving.handlers.iter().map(|handler| &*handler.name);
        tracing::info!(
            file = module.file,
            digest = %module.digest,
            code = module.code.as_str(),
            handlers = names.collect::<Vec<_>>().join(", "),
            "module serves"
        );
        if let Some(what) = module.ignores() {
            tracing::warn!(file = module.file, "{what}");
        }
        for handler in &serving.handlers {
            let missing = handler.missing();
            if !missing.is_empty() {
                let names = missing.iter().map(|one| one.what.to_string());
                let config = settings.config_file.as_ref();
                let config = config.map(|file| format!(" --config {}", file.display()));
                tracing::warn!(
                    file = module.file,
                    handler = handler.manifest.name,
                    missing = names.collect::<Vec<_>>().join(", "),
                    "the handler asks for something that is not granted to it; `rouse handlers show {}{}` prints the lines of rouse.toml that would",
                    handler.manifest.name,
                    config.unwrap_or_default()
                );
            }
        }
        self.serving = Some(serving);
        self.waiting = None;
        self.accept();
    }
}

impl Serving {
    /// Gives the module's handlers what the operator grants them.
    pub(super) fn new(sandbox: &Sandbox, module: Arc<Module>) -> Self {
        let settings = sandbox.settings();
        let handlers = module
            .manifest
            .handlers
            .iter()
            .map(|manifest| {
                Arc::new(Handler {
                    name: manifest.name.as_str().into(),
                    manifest: manifest.clone(),
                    module: module.clone(),
                    granted: Arc::new(Granted::of(
                        &manifest.name,
                        settings,
                        &sandbox.roots,
                        &sandbox.ledgers,
                    )),
                    limits: settings.limits(&manifest.name),
                    http: HttpAccess::new(&manifest.name, settings, sandbox.net.clone()),
                    state: narrowest(&settings.state, &manifest.name).copied(),
                    state_is_taken: false,
                    reuses: reuses(manifest, settings),
                })
            })
            .collect();
        Self { module, handlers }
    }
}

/// Whether instances serve many jobs: only where both want it.
fn reuses(manifest: &HandlerManifest, settings: &Settings) -> bool {
    let name = &manifest.name;
    match (settings.instances_of(name), manifest.instances) {
        (Instances::Fresh, _) => false,
        (Instances::Reuse, Instances::Reuse) => true,
        (Instances::Reuse, Instances::Fresh) => {
            // Who says so of this very handler expects it; a pattern is for those of its handlers that can.
            if settings.instances.contains_key(name) {
                tracing::warn!(
                    handler = name,
                    "rouse.toml says instances = \"reuse\", but the handler does not declare that it bears it: each attempt has a fresh one"
                );
            } else {
                tracing::info!(
                    handler = name,
                    "rouse.toml lets instances serve many jobs, but the handler does not declare that it bears it: each attempt has a fresh one"
                );
            }
            false
        }
    }
}
