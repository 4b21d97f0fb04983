//! Which file of the folder serves in which version.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::entry::{Entry, Looks, Serving};
use super::file::{self, Listed};
use super::gate::Gate;
use super::loading::{Loaded, Loader, Order, Outcome};
use super::watch::Wake;
use super::{HandlerSet, Loads, Refusal};
use crate::harmless;
use crate::sandbox::{Digest, Module, Sandbox};

/// A file that was written to this recently may still be written to.
pub(super) const QUIET: Duration = Duration::from_millis(200);

/// A module that was refused because of the machine, not because of what it contains, is tried again after this time: soon
/// enough for a host that was short of memory when it started, and not so often that a module which is to blame after all
/// keeps it busy.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// Which fresh files are complete already.
pub(super) enum Trust {
    /// Those of these names: they were renamed into place.
    Renamed(HashSet<String>),
    /// All.
    Everything,
}

/// What a scan found.
pub(super) struct Scan {
    /// Something else is served, or refused.
    pub(super) changed: bool,
    /// A file is still being written; look again after this time.
    pub(super) again_in: Option<Duration>,
}

/// The folder, with what is known of each file in it.
pub(super) struct Folder {
    sandbox: Arc<Sandbox>,
    dir: PathBuf,
    entries: BTreeMap<String, Entry>,
    /// Why the folder could not be listed; everything goes on serving then.
    unreadable: Option<String>,
    gate: Gate,
    loader: Loader,
    loads: Arc<Loads>,
    /// How many files have been given to it.
    begun: u64,
    /// Of these, those that it has not tried yet, and those that take it long.
    trying: BTreeSet<u64>,
    slow: BTreeSet<u64>,
}

impl Folder {
    /// Modules are made on threads of their own, and come to `done`, for [`finish`](Self::finish).
    pub(super) fn new(
        sandbox: Arc<Sandbox>,
        dir: PathBuf,
        loads: Arc<Loads>,
        done: mpsc::Sender<Wake>,
    ) -> Self {
        Self {
            gate: Gate::new(sandbox.settings().pin.clone()),
            loader: Loader::new(sandbox.clone(), loads.clone(), done),
            loads,
            sandbox,
            dir,
            entries: BTreeMap::new(),
            unreadable: None,
            begun: 0,
            trying: BTreeSet::new(),
            slow: BTreeSet::new(),
        }
    }

    /// True until each file was tried once.
    pub(super) fn is_trying(&self) -> bool {
        !self.trying.is_empty()
    }

    /// True while a module is being made.
    pub(super) fn is_loading(&self) -> bool {
        self.is_trying() || !self.slow.is_empty()
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Looks for what has changed, and begins to make modules of it.
    pub(super) fn scan(&mut self, trust: &Trust) -> Scan {
        self.gate.refresh();
        let listed = match file::list(&self.dir, self.gate.asks_for_signatures()) {
            Ok(listed) => listed,
            Err(why) => {
                let changed = self.unreadable.as_ref() != Some(&why);
                if changed {
                    tracing::warn!(dir = %self.dir.display(), "the handlers folder cannot be read, its handlers go on serving: {why}");
                }
                self.unreadable = Some(why);
                return Scan {
                    changed,
                    again_in: None,
                };
            }
        };
        let mut scan = Scan {
            changed: self.unreadable.take().is_some(),
            again_in: None,
        };

        let removed: Vec<Entry> = self
            .entries
            .extract_if(.., |name, _| !listed.contains_key(name))
            .map(|(name, entry)| {
                tracing::info!(file = name, "module withdrawn: its file is gone");
                entry
            })
            .collect();
        scan.changed |= !removed.is_empty();

        for (name, listed) in listed {
            self.look_at(&name, listed, trust, &removed, &mut scan);
        }
        if !removed.is_empty() {
            drop(removed);
            self.loader.forget_gone();
        }
        scan
    }

    /// What is served now.
    pub(super) fn handlers(&self) -> HandlerSet {
        let serving = self
            .entries
            .values()
            .filter_map(|entry| entry.serving.as_ref());
        let refused = self.entries.iter().filter_map(|(file, entry)| {
            Some(Refusal {
                file: harmless::name(file),
                why: entry.refused.clone()?,
                last_good_serves: entry.serving.is_some(),
            })
        });
        let unreadable = self.unreadable.iter().map(|why| Refusal {
            file: self.dir.display().to_string(),
            why: why.clone(),
            last_good_serves: true,
        });
        let loading = |is_slow: bool| {
            let entries = self.entries.iter();
            let these = entries.filter(move |(_, entry)| {
                entry
                    .loading
                    .is_some_and(|place| self.slow.contains(&place) == is_slow)
            });
            these.map(|(file, _)| harmless::name(file)).collect()
        };
        HandlerSet {
            handlers: serving
                .flat_map(|serving| &serving.handlers)
                .map(|handler| (handler.manifest.name.clone(), handler.clone()))
                .collect(),
            refused: unreadable.chain(refused).collect(),
            loading: loading(false),
            slow: loading(true),
            unreadable: self.unreadable.clone(),
        }
    }

    fn look_at(
        &mut self,
        name: &str,
        listed: Listed,
        trust: &Trust,
        removed: &[Entry],
        scan: &mut Scan,
    ) {
        let now = Instant::now();
        let looks = Looks {
            file: listed.stamp,
            signature: listed.signature,
            lock: self.gate.lock_stamp(),
        };
        let entry = self.entries.entry(name.to_owned()).or_default();
        let again = entry.retry_at.is_some_and(|at| at <= now);
        if entry.seen == Some(looks) && !again {
            entry.fresh = None;
            return;
        }
        let since = match entry.fresh {
            Some((before, since)) if before == looks => since,
            Some(_) | None => now,
        };
        entry.fresh = Some((looks, since));
        let trusted = match trust {
            Trust::Renamed(names) => names.contains(name),
            Trust::Everything => true,
        };
        let quiet_for = (now - since).max(looks.age());
        if !trusted && quiet_for < QUIET {
            let left = QUIET - quiet_for;
            scan.again_in = Some(scan.again_in.map_or(left, |other| other.min(left)));
            return;
        }
        entry.seen = Some(looks);
        entry.fresh = None;
        entry.retry_at = None;
        self.begun += 1;
        // Whatever is being made of it is of an older version now.
        entry.loading = None;
        let had_other_name = removed.iter().find(|entry| {
            entry
                .seen
                .is_some_and(|seen| seen.file.is_same_file(&listed.stamp))
        });
        if let Some(module) = had_other_name.and_then(|it| self.renamed(name, &listed, it)) {
            let entry = self.entries.entry(name.to_owned()).or_default();
            entry.waiting = Some((self.begun, module));
            entry.accept();
            scan.changed = true;
            return;
        }
        let entry = self.entries.entry(name.to_owned()).or_default();
        entry.loading = Some(self.begun);
        self.trying.insert(self.begun);
        self.loader.load(Order {
            file: name.to_owned(),
            place: self.begun,
            listed,
            rules: self.gate.rules(),
            refused: entry.refused_digest,
        });
    }

    /// The module of a file that had another name until now. It is looked into at once, so that its handlers go on serving.
    fn renamed(&self, name: &str, listed: &Listed, before: &Entry) -> Option<Arc<Module>> {
        let module = &before.serving.as_ref()?.module;
        self.loads.read_file();
        let bytes = file::read(listed, self.sandbox.settings().module_bytes_max);
        let bytes = bytes.ok().flatten()?;
        let digest = Digest::of(&bytes);
        let rules = self.gate.rules();
        let passes =
            digest == module.digest && rules.check(name, &listed.path, digest, &bytes).is_ok();
        passes.then(|| Arc::new(module.renamed(name)))
    }

    /// Takes in what has become of a file. True when something changed.
    pub(super) fn finish(&mut self, loaded: Loaded) -> bool {
        let Loaded {
            file,
            place,
            outcome,
        } = loaded;
        self.trying.remove(&place);
        match outcome {
            Outcome::Slow => self.slow.insert(place),
            Outcome::Module(_)
            | Outcome::Changed
            | Outcome::StillRefused
            | Outcome::Refused(..)
            | Outcome::Unlucky(_) => self.slow.remove(&place),
        };
        let entry = self.entries.get_mut(&file);
        let Some(entry) = entry.filter(|entry| entry.loading == Some(place)) else {
            // The file is gone, or has changed again.
            return false;
        };
        if let Outcome::Slow = outcome {
            tracing::info!(
                file,
                "the module takes its compiler long; it is compiled once all others were"
            );
            return true;
        }
        entry.loading = None;
        match outcome {
            Outcome::Slow | Outcome::StillRefused => {}
            Outcome::Changed => entry.seen = None,
            Outcome::Module(module) => {
                let serves = entry.serving.as_ref();
                // Back to what serves, where it is that.
                entry.waiting = match serves.is_some_and(|it| it.module.digest == module.digest) {
                    true => None,
                    false => Some((place, module)),
                };
                entry.accept();
            }
            Outcome::Refused(why, digest) => {
                entry.waiting = None;
                entry.refuse(&file, why, digest);
            }
            Outcome::Unlucky(why) => {
                entry.retry_at = Some(Instant::now() + RETRY_AFTER);
                let why = format!("{why}; it is tried again after {} s", RETRY_AFTER.as_secs());
                entry.refuse(&file, why, None);
            }
        }
        true
    }

    /// Lets each waiting module serve whose names are free, in the order in which they came.
    /// True when something changed.
    pub(super) fn settle_names(&mut self) -> bool {
        let mut changed = false;
        // A module that begins to serve may give up names of its last version, so start over.
        'over: loop {
            let mut waiting: Vec<(u64, String, Arc<Module>)> = self
                .entries
                .iter()
                .filter_map(|(name, entry)| {
                    let (place, module) = entry.waiting.as_ref()?;
                    Some((*place, name.clone(), module.clone()))
                })
                .collect();
            waiting.sort_by_key(|(place, ..)| *place);
            for (_, name, module) in waiting {
                let taken = self.taken_name(&name, &module);
                let entry = self.entries.get_mut(&name).expect("it was listed above");
                match taken {
                    None => {
                        let serving = Serving::new(&self.sandbox, module);
                        entry.serve(serving, self.sandbox.settings());
                        changed = true;
                        continue 'over;
                    }
                    Some(why) if entry.refused.as_ref() != Some(&why) => {
                        entry.refuse(&name, why, None);
                        changed = true;
                    }
                    Some(_) => {}
                }
            }
            return changed;
        }
    }

    /// Why this module cannot serve beside the others; none when it can.
    fn taken_name(&self, file: &str, module: &Module) -> Option<String> {
        self.entries
            .iter()
            .filter(|(other, _)| *other != file)
            .filter_map(|(other, entry)| Some((other, entry.serving.as_ref()?)))
            .find_map(|(other, serving)| {
                let taken = module.manifest.handlers.iter().find(|mine| {
                    serving
                        .handlers
                        .iter()
                        .any(|theirs| theirs.manifest.name == mine.name)
                })?;
                Some(format!(
                    "it has the handler `{}`, which {other} serves already; remove one of the \
                     two files, or give one of the handlers another name",
                    taken.name
                ))
            })
    }
}
