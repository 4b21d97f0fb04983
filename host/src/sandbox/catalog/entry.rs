//! The state of one file in the folder.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::file::{Stamp, Unusable};
use super::handler::Handler;
use crate::job::most_specific_first;
use crate::sandbox::capability::{HttpAccess, SqlAccess};
use crate::sandbox::grants::{Granted, lines};
use crate::sandbox::module::admission::Denied;
use crate::sandbox::{Digest, HandlerManifest, Instances, Module, Sandbox, Settings};
use crate::sanitize::printable;

/// The maximum size of the reason for a refusal: a sentence or two, and the lines that would help.
const WHY_BYTES_MAX: usize = 8 << 10;

/// The state of one file in the folder.
#[derive(Default)]
pub(super) struct Entry {
    /// The file as it was when it was last loaded.
    pub(super) seen: Option<Snapshot>,
    /// The file as it is now, and the time since which it has been unchanged.
    pub(super) fresh: Option<(Snapshot, Instant)>,
    /// Why the last scan could not determine whether the file is there; `None` if it could.
    pub(super) unreadable: Option<Unusable>,
    /// Its number in the load queue, while it is being loaded.
    pub(super) loading: Option<u64>,
    /// The time of the next try, if it was refused for a reason that may be temporary.
    pub(super) retry_at: Option<Instant>,
    pub(super) serving: Option<Serving>,
    /// A good version that waits for a name, and its number in the load queue.
    pub(super) waiting: Option<(u64, Arc<Module>)>,
    /// The file was there when the host started.
    pub(super) was_at_start: bool,
    /// When the file was loaded at startup, its last write was so recent that the file may have been incomplete.
    pub(super) is_recent: bool,
    pub(super) refused: Option<Refused>,
    pub(super) refused_digest: Option<Digest>,
}

/// The stamps that a scan has found: of a file, and of everything else that decides whether it may serve.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Snapshot {
    pub(super) file: Stamp,
    pub(super) signature: Option<Stamp>,
    pub(super) lock: Option<Stamp>,
}

impl Snapshot {
    /// The time since the most recent write to any of these files.
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
    /// True while it may still turn out that the file claimed a name when the host started.
    pub(super) fn is_untried(&self) -> bool {
        // Without permission to read the file, there is nothing more to try.
        let is_forbidden = matches!(self.unreadable, Some(Unusable::UntilChanged(_)));
        let is_unseen = self.seen.is_none() && !is_forbidden;
        let will_be_tried = is_unseen || self.fresh.is_some() || self.retry_at.is_some();
        self.was_at_start && will_be_tried
    }

    /// Clears an earlier refusal.
    pub(super) fn accept(&mut self) {
        self.refused = None;
        self.refused_digest = None;
        self.retry_at = None;
    }

    /// Refuses the file. A digest means that the contents are the cause, and need not be tried again. `why` may quote
    /// the contents, and is printed on one line. Returns true if the reason is new.
    pub(super) fn refuse(&mut self, file: &str, why: String, digest: Option<Digest>) -> bool {
        if digest.is_some() {
            self.waiting = None;
        }
        self.refused_digest = digest;
        self.deny(file, Denied { why, lines: None })
    }

    /// Denies the file a name that is in its manifest. Returns true if that is new.
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

    /// True if one of its handlers can run.
    pub(super) fn serves_any(&self) -> bool {
        let serving = self.serving.as_ref();
        serving.is_some_and(|serving| !serving.handlers.is_empty())
    }

    /// True if its module is waiting, declares this name, and may have all the names that it declares.
    pub(super) fn waits_for(&self, name: &str, settings: &Settings) -> bool {
        let Some((_, module)) = &self.waiting else {
            return false;
        };
        let all = &module.manifest.handlers;
        let may_serve = |it| settings.admit(it, module.origin()).is_ok();
        all.iter().any(|it| it.name == name) && all.iter().all(may_serve)
    }

    /// True if it serves this handler.
    pub(super) fn serves(&self, name: &str) -> bool {
        let serving = self.serving.as_ref();
        serving.is_some_and(|serving| serving.handlers.iter().any(|it| &*it.name == name))
    }

    /// Lets a module serve instead of the previous one.
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
        if let Some(ignored) = module.ignores() {
            tracing::warn!(file = module.file, "{ignored}");
        }
        for handler in &serving.handlers {
            for withheld in &handler.withheld {
                tracing::warn!(
                    file = module.file,
                    handler = handler.manifest.name,
                    "[handlers.\"{}\"] in rouse.toml grants {} without naming a module, so no module gets them; add {} to the table",
                    withheld.table,
                    withheld.what,
                    lines::module_key(&module.file)
                );
            }
            if settings.is_dev && settings.withholds_outside_dev(&handler.name, module.origin()) {
                tracing::warn!(
                    file = module.file,
                    handler = handler.manifest.name,
                    "`rouse serve` will not grant the secrets of [handlers.\"{0}\"] in rouse.toml until the table names a module; add {1} to it",
                    handler.name,
                    lines::module_key(&module.file)
                );
            }
            let missing = handler.missing();
            if !missing.is_empty() {
                // Not a warning: the handler may never need them. An attempt that needs one is denied, and its error
                // names the lines that would grant the capability.
                let names = missing.iter().map(|missing| missing.what.to_string());
                tracing::debug!(
                    file = module.file,
                    handler = handler.manifest.name,
                    missing = names.collect::<Vec<_>>().join(", "),
                    "the handler declares capabilities that it is not granted"
                );
            }
        }
        self.serving = Some(serving);
        self.waiting = None;
        self.accept();
    }
}

impl Serving {
    /// True if all handlers of the module serve.
    pub(super) fn is_complete(&self) -> bool {
        self.handlers.len() == self.module.manifest.handlers.len()
    }

    /// True if exactly these handlers serve, each for the file that owns its name.
    pub(super) fn has_all_of(&self, names: &BTreeMap<String, String>) -> bool {
        let mut handlers = self.handlers.iter();
        self.handlers.len() == names.len()
            && handlers.all(|handler| names.get(&*handler.name) == Some(&handler.owner))
    }

    /// Stops serving a handler. Returns false if it was not served.
    pub(super) fn stop_serving(&mut self, name: &str) -> bool {
        let before = self.handlers.len();
        self.handlers.retain(|handler| &*handler.name != name);
        self.handlers.len() < before
    }

    /// Builds the handlers of a module with their grants. `names`: the handlers to serve, each with the file that
    /// owns its name.
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
                    granted: Arc::new(Granted::for_handler(
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
                    state: most_specific_first(&settings.state, &manifest.name)
                        .into_iter()
                        .find(|(table, _)| settings.grants_own_to(table, module.origin()))
                        .map(|(_, quota)| *quota),
                    state_is_removed: false,
                    sql: Arc::new(SqlAccess::for_handler(manifest, module.origin(), settings)),
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

/// Whether instances serve many jobs: only if both the module and the operator allow it.
fn reuses(manifest: &HandlerManifest, settings: &Settings) -> bool {
    let name = &manifest.name;
    match (settings.instances_of(name), manifest.instances) {
        (Instances::Fresh, _) => false,
        (Instances::Reuse, Instances::Reuse) => true,
        (Instances::Reuse, Instances::Fresh) => {
            // An operator who sets this for the handler itself expects it to apply. A pattern is meant only for the
            // matching handlers that allow it.
            if settings.instances.contains_key(name) {
                tracing::warn!(
                    handler = name,
                    "rouse.toml sets instances = \"reuse\", but the handler's manifest does not allow it: each attempt gets a fresh instance"
                );
            } else {
                tracing::info!(
                    handler = name,
                    "rouse.toml lets instances serve many jobs, but the handler's manifest does not allow it: each attempt gets a fresh instance"
                );
            }
            false
        }
    }
}
