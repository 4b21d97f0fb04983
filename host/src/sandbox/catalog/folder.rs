//! Which file of the folder serves in which version.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::entry::{Entry, Looks, Serving};
use super::file::{self, Listed};
use super::gate::Gate;
use super::loading::{self, Loaded};
use super::watch::Wake;
use super::{HandlerSet, Refusal};
use crate::harmless;
use crate::sandbox::load::Refused;
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
    /// How many modules have been begun, and how many are being made now.
    begun: u64,
    loading: usize,
    /// Where they are sent when they are done.
    done: mpsc::Sender<Wake>,
}

impl Folder {
    /// Modules are made on threads of their own, and come to `done`, for [`finish`](Self::finish).
    pub(super) fn new(sandbox: Arc<Sandbox>, dir: PathBuf, done: mpsc::Sender<Wake>) -> Self {
        Self {
            gate: Gate::new(sandbox.settings().pin.clone()),
            sandbox,
            dir,
            entries: BTreeMap::new(),
            unreadable: None,
            begun: 0,
            loading: 0,
            done,
        }
    }

    /// True while a module is being made.
    pub(super) fn is_loading(&self) -> bool {
        self.loading > 0
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
            self.look_at(&name, &listed, trust, &removed, &mut scan);
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
        HandlerSet {
            handlers: serving
                .flat_map(|serving| &serving.handlers)
                .map(|handler| (handler.manifest.name.clone(), handler.clone()))
                .collect(),
            refused: unreadable.chain(refused).collect(),
        }
    }

    fn look_at(
        &mut self,
        name: &str,
        listed: &Listed,
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
        match file::read(listed, self.sandbox.settings().module_bytes_max) {
            Ok(Some(bytes)) => {
                entry.seen = Some(looks);
                entry.retry_at = None;
                scan.changed |= self.take_in(name, &listed.path, bytes, removed);
            }
            // Written to while it was read, or gone again.
            Ok(None) => scan.again_in = Some(QUIET),
            Err(why) => {
                entry.seen = Some(looks);
                entry.refuse(name, why, None);
                scan.changed = true;
            }
        }
    }

    /// Looks into a file's new contents, and begins to make a module of them where that is needed. True when something
    /// changed at once.
    fn take_in(&mut self, name: &str, path: &Path, bytes: Vec<u8>, removed: &[Entry]) -> bool {
        let digest = Digest::of(&bytes);
        let known = self
            .entries
            .values()
            .chain(removed)
            .flat_map(Entry::modules)
            .find(|module| module.digest == digest)
            .cloned();
        let passes = self.gate.check(name, path, digest, &bytes);
        let entry = self.entries.entry(name.to_owned()).or_default();
        if let Err(why) = passes {
            entry.loading = None;
            entry.waiting = None;
            entry.refuse(name, why, None);
            return true;
        }
        if entry.loading.is_some_and(|(_, loading)| loading == digest) {
            return false;
        }
        // Whatever is being made of it is of an older version now.
        entry.loading = None;
        if entry.refused_digest == Some(digest) {
            return false;
        }
        if entry
            .serving
            .as_ref()
            .is_some_and(|serving| serving.module.digest == digest)
        {
            // Back to what serves.
            entry.waiting = None;
            entry.accept();
            return true;
        }
        if known.is_none() && self.loading >= self.sandbox.settings().compilations_max {
            // The next scan looks at it again, and one follows when another is done.
            entry.seen = None;
            return false;
        }
        self.begun += 1;
        let place = self.begun;
        if let Some(module) = known {
            entry.waiting = Some((place, Arc::new(module.renamed(name))));
            entry.accept();
            return true;
        }
        match loading::start(&self.sandbox, place, name, digest, bytes, self.done.clone()) {
            Ok(()) => {
                entry.loading = Some((place, digest));
                self.loading += 1;
                false
            }
            Err(error) => {
                entry.retry_at = Some(Instant::now() + RETRY_AFTER);
                entry.refuse(
                    name,
                    format!("no thread could be started to load it: {error}"),
                    None,
                );
                true
            }
        }
    }

    /// Takes in what has become of a file. True when something changed.
    pub(super) fn finish(&mut self, loaded: Loaded) -> bool {
        self.loading -= 1;
        let entry = self.entries.get_mut(&loaded.file);
        let Some(entry) = entry.filter(|entry| {
            entry
                .loading
                .is_some_and(|(place, _)| place == loaded.place)
        }) else {
            // The file is gone, or has changed again.
            return false;
        };
        let digest = entry.loading.take().map(|(_, digest)| digest);
        match loaded.module {
            Ok(module) => {
                entry.waiting = Some((loaded.place, Arc::from(module)));
                entry.accept();
            }
            Err(Refused::Contents(why)) => entry.refuse(&loaded.file, why, digest),
            Err(Refused::Circumstances(why)) => {
                entry.retry_at = Some(Instant::now() + RETRY_AFTER);
                let why = format!("{why}; it is tried again after {} s", RETRY_AFTER.as_secs());
                entry.refuse(&loaded.file, why, None);
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
