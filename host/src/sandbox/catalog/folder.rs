//! Which file of the folder serves in which version.

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::entry::{Entry, Serving};
use super::file::{self, Listed};
use super::{HandlerSet, Refusal};
use crate::sandbox::load::load;
use crate::sandbox::{Digest, Module, Sandbox};

/// A file that was written to this recently may still be written to.
const QUIET: Duration = Duration::from_millis(200);

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
    loads: u64,
}

impl Folder {
    pub(super) fn new(sandbox: Arc<Sandbox>, dir: PathBuf) -> Self {
        Self {
            sandbox,
            dir,
            entries: BTreeMap::new(),
            unreadable: None,
            loads: 0,
        }
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Brings what is served in step with what is in the folder.
    pub(super) fn scan(&mut self, trust: &Trust) -> Scan {
        let listed = match file::list(&self.dir) {
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
        scan.changed |= self.settle_names();
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
                file: file.clone(),
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
        listed: Listed,
        trust: &Trust,
        removed: &[Entry],
        scan: &mut Scan,
    ) {
        let now = Instant::now();
        let entry = self.entries.entry(name.to_owned()).or_default();
        if entry.seen == Some(listed.stamp) {
            entry.fresh = None;
            return;
        }
        let since = match entry.fresh {
            Some((stamp, since)) if stamp == listed.stamp => since,
            Some(_) | None => now,
        };
        entry.fresh = Some((listed.stamp, since));
        let trusted = match trust {
            Trust::Renamed(names) => names.contains(name),
            Trust::Everything => true,
        };
        let quiet_for = (now - since).max(listed.stamp.age());
        if !trusted && quiet_for < QUIET {
            let left = QUIET - quiet_for;
            scan.again_in = Some(scan.again_in.map_or(left, |other| other.min(left)));
            return;
        }

        match file::read(&listed, self.sandbox.settings().module_bytes_max) {
            Ok(Some(bytes)) => {
                entry.seen = Some(listed.stamp);
                self.take_in(name, &bytes, removed);
                scan.changed = true;
            }
            // Written to while it was read, or gone again.
            Ok(None) => scan.again_in = Some(QUIET),
            Err(why) => {
                entry.seen = Some(listed.stamp);
                entry.refuse(name, why, None);
                scan.changed = true;
            }
        }
    }

    /// Makes a module of a file's new contents.
    fn take_in(&mut self, name: &str, bytes: &[u8], removed: &[Entry]) {
        let digest = Digest::of(bytes);
        let known = self
            .entries
            .values()
            .chain(removed)
            .flat_map(Entry::modules)
            .find(|module| module.digest == digest)
            .cloned();
        let entry = self.entries.entry(name.to_owned()).or_default();
        if entry.refused_digest == Some(digest) {
            return;
        }
        if entry
            .serving
            .as_ref()
            .is_some_and(|serving| serving.module.digest == digest)
        {
            // Back to what serves.
            entry.waiting = None;
            entry.accept();
            return;
        }
        let module = match known {
            Some(module) => Ok(module.renamed(name)),
            None => load(&self.sandbox, name, bytes),
        };
        match module {
            Ok(module) => {
                self.loads += 1;
                entry.waiting = Some((self.loads, Arc::new(module)));
                entry.accept();
            }
            Err(why) => entry.refuse(name, why, Some(digest)),
        }
    }

    /// Lets each waiting module serve whose names are free, in the order in which they came.
    /// True when something changed.
    fn settle_names(&mut self) -> bool {
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
                        entry.serve(Serving::new(&self.sandbox, module));
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
