//! What is known of one file of the folder.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::file::Stamp;
use super::handler::Handler;
use crate::harmless::printable;
use crate::job::narrowest_first;
use crate::sandbox::capability::HttpAccess;
use crate::sandbox::grants::{Granted, lines};
use crate::sandbox::module::admission::Denied;
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
    /// A good version that waits for a name, and its place in the line.
    pub(super) waiting: Option<(u64, Arc<Module>)>,
    /// It was there when the host started.
    pub(super) is_of_start: bool,
    /// It was written to so recently, when it was looked into at the start, that half of it may have been missing.
    pub(super) is_young: bool,
    pub(super) refused: Option<Refused>,
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

/// Why a file, or one of its handlers, does not serve.
#[derive(PartialEq, Eq)]
pub(super) struct Refused {
    pub(super) why: String,
    /// The lines of `rouse.toml` that would allow it.
    pub(super) lines: Option<String>,
}

/// A module that serves.
pub(super) struct Serving {
    pub(super) module: Arc<Module>,
    pub(super) handlers: Vec<Arc<Handler>>,
}

impl Entry {
    /// True while it may turn out to have a name that it had when the host started.
    pub(super) fn is_untried(&self) -> bool {
        let is_to_be_tried = self.seen.is_none() || self.fresh.is_some() || self.retry_at.is_some();
        self.is_of_start && is_to_be_tried
    }

    /// Nothing is wrong with the file any more.
    pub(super) fn accept(&mut self) {
        self.refused = None;
        self.refused_digest = None;
        self.retry_at = None;
    }

    /// Something is wrong with the file. A digest says that it is its contents, which need not be
    /// looked at twice. Why may quote what it contains, and is one line.
    pub(super) fn refuse(&mut self, file: &str, why: String, digest: Option<Digest>) {
        if digest.is_some() {
            self.waiting = None;
        }
        self.refused_digest = digest;
        self.deny(file, Denied { why, lines: None });
    }

    /// It may not have a name that it has in its manifest. True where that is new.
    pub(super) fn deny(&mut self, file: &str, denied: Denied) -> bool {
        let refused = Refused {
            why: printable(&denied.why, WHY_BYTES_MAX),
            lines: denied.lines,
        };
        if self.refused.as_ref() == Some(&refused) {
            return false;
        }
        tracing::warn!(
            file,
            last_good_serves = self.serves_any(),
            "module refused: {}",
            refused.why
        );
        self.refused = Some(refused);
        true
    }

    /// True where one of its handlers can run.
    pub(super) fn serves_any(&self) -> bool {
        let serving = self.serving.as_ref();
        serving.is_some_and(|serving| !serving.handlers.is_empty())
    }

    /// True where its module waits, has this name, and may have all of its names.
    pub(super) fn waits_for(&self, name: &str, settings: &Settings) -> bool {
        let Some((_, module)) = &self.waiting else {
            return false;
        };
        let all = &module.manifest.handlers;
        let may_serve = |it| settings.admit(it, module.origin()).is_ok();
        all.iter().any(|it| it.name == name) && all.iter().all(may_serve)
    }

    /// True where it serves this handler.
    pub(super) fn serves(&self, name: &str) -> bool {
        let serving = self.serving.as_ref();
        serving.is_some_and(|serving| serving.handlers.iter().any(|it| &*it.name == name))
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
            for withheld in &handler.withheld {
                tracing::warn!(
                    file = module.file,
                    handler = handler.manifest.name,
                    "[handlers.\"{}\"] in rouse.toml has {} for whatever module has such a name, and grants them to none until it names one: put under it {}",
                    withheld.table,
                    withheld.what,
                    lines::module_key(&module.file)
                );
            }
            if settings.is_dev && settings.withholds_outside_dev(&handler.name, module.origin()) {
                tracing::warn!(
                    file = module.file,
                    handler = handler.manifest.name,
                    "`rouse serve` grants the secrets of [handlers.\"{0}\"] in rouse.toml to no module until it names one: put under it {1}",
                    handler.name,
                    lines::module_key(&module.file)
                );
            }
            let missing = handler.missing();
            if !missing.is_empty() {
                // Nobody may ever want it: an attempt that does is denied, and says what would grant it.
                let names = missing.iter().map(|one| one.what.to_string());
                tracing::debug!(
                    file = module.file,
                    handler = handler.manifest.name,
                    missing = names.collect::<Vec<_>>().join(", "),
                    "the handler asks for something that is not granted to it"
                );
            }
        }
        self.serving = Some(serving);
        self.waiting = None;
        self.accept();
    }
}

impl Serving {
    /// True where all handlers of the module serve.
    pub(super) fn is_whole(&self) -> bool {
        self.handlers.len() == self.module.manifest.handlers.len()
    }

    /// True where these handlers serve, and they alone, in the name of the same files.
    pub(super) fn has_all_of(&self, names: &BTreeMap<String, String>) -> bool {
        let mut handlers = self.handlers.iter();
        self.handlers.len() == names.len()
            && handlers.all(|handler| names.get(&*handler.name) == Some(&handler.owner))
    }

    /// A handler serves no longer; false where it did not.
    pub(super) fn give_up(&mut self, name: &str) -> bool {
        let before = self.handlers.len();
        self.handlers.retain(|handler| &*handler.name != name);
        self.handlers.len() < before
    }

    /// Gives those of the module's handlers that are to serve what the operator grants them. `names`: with the file that each
    /// belongs to.
    pub(super) fn new(
        sandbox: &Sandbox,
        module: Arc<Module>,
        names: &BTreeMap<String, String>,
    ) -> Self {
        let settings = sandbox.settings();
        let named = |manifest: &HandlerManifest| names.get(&manifest.name).cloned();
        let handlers = module.manifest.handlers.iter();
        let handlers = handlers.filter_map(|manifest| Some((manifest, named(manifest)?)));
        let handlers = handlers
            .map(|(manifest, owner)| {
                Arc::new(Handler {
                    name: manifest.name.as_str().into(),
                    manifest: manifest.clone(),
                    module: module.clone(),
                    granted: Arc::new(Granted::of(
                        &manifest.name,
                        module.origin(),
                        settings,
                        &sandbox.roots,
                        &sandbox.ledgers,
                    )),
                    limits: settings.limits(&manifest.name),
                    http: HttpAccess::new(
                        &manifest.name,
                        module.origin(),
                        settings,
                        sandbox.net.clone(),
                    ),
                    state: narrowest_first(&settings.state, &manifest.name)
                        .into_iter()
                        .find(|(table, _)| settings.grants_own_to(table, module.origin()))
                        .map(|(_, quota)| *quota),
                    state_is_taken: false,
                    reuses: reuses(manifest, settings),
                    owner,
                    bound_by: settings
                        .bound(&manifest.name)
                        .map(|(table, _)| table.to_owned()),
                    withheld: settings.withheld(&manifest.name, module.origin()),
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
