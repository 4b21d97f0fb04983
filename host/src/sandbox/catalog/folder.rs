//! Tracks the files of the folder and loads those that change.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant, SystemTime};

use super::entry::{Entry, Serving, Snapshot};
use super::file::{self, Identity, Listed, QUIET, Unusable};
use super::loading::{Loaded, Loader, Order, Outcome, Wake};
use super::owners::Owners;
use super::set::{HandlerSet, Refusal};
use super::verification::Verifier;
use crate::sandbox::{Digest, Loads, Module, Sandbox};
use crate::sanitize;

/// A module that was refused because of the machine, not its contents, is tried again after this time: short enough for
/// a host that lacked memory when it started, and long enough that a module that is itself the cause does not keep the
/// host busy.
const RETRY_AFTER: Duration = Duration::from_secs(60);

/// The time for which startup waits for files that could not be tried at first; by then, each has been tried twice
/// more.
const START_MAX: Duration = RETRY_AFTER.saturating_mul(3);

/// The recently written files that are known to be complete.
pub(super) enum Trust {
    /// The files with these names: they were renamed into place.
    Renamed(HashSet<String>),
    /// All files.
    Everything,
}

/// The result of a scan.
pub(super) struct Scan {
    /// The handlers that are served, or the refusals, have changed.
    pub(super) changed: bool,
    /// A file is still being written; scan again after this time.
    pub(super) again_in: Option<Duration>,
}

/// Tracks the files of the folder and loads those that change.
pub(super) struct Folder {
    pub(super) sandbox: Arc<Sandbox>,
    dir: PathBuf,
    pub(super) entries: BTreeMap<String, Entry>,
    /// Why the folder could not be listed; its handlers keep serving in the meantime.
    unreadable: Option<String>,
    verifier: Verifier,
    pub(super) owners: Owners,
    /// True until every file that was present at startup has been tried.
    pub(super) is_starting: bool,
    /// The time at which startup ends even if a file has not been tried.
    start_ends_at: Instant,
    loader: Loader,
    loads: Arc<Loads>,
    /// The number of load orders so far.
    pub(super) started: u64,
    /// The orders that have not been tried yet; `slow` holds those that are slow to load.
    trying: BTreeSet<u64>,
    slow: BTreeSet<u64>,
}

impl Folder {
    /// Modules are loaded on separate threads and sent to `done`, for [`finish`](Self::finish).
    ///
    /// # Errors
    /// When the saved ownership of handler names cannot be used.
    pub(super) fn new(
        sandbox: Arc<Sandbox>,
        dir: PathBuf,
        loads: Arc<Loads>,
        done: mpsc::Sender<Wake>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            verifier: Verifier::new(sandbox.settings()),
            owners: Owners::read(&sandbox, &dir)?,
            is_starting: true,
            start_ends_at: Instant::now() + START_MAX,
            loader: Loader::new(sandbox.clone(), loads.clone(), done),
            loads,
            sandbox,
            dir,
            entries: BTreeMap::new(),
            unreadable: None,
            started: 0,
            trying: BTreeSet::new(),
            slow: BTreeSet::new(),
        })
    }

    /// True until each file has been tried once.
    pub(super) fn is_trying(&self) -> bool {
        !self.trying.is_empty()
    }

    /// True while a module is being loaded.
    pub(super) fn is_loading(&self) -> bool {
        self.is_trying() || !self.slow.is_empty()
    }

    pub(super) fn dir(&self) -> &Path {
        &self.dir
    }

    /// Searches for changed files and starts to load them.
    pub(super) fn scan(&mut self, trust: &Trust) -> Scan {
        self.verifier.refresh();
        let listing = match file::list(&self.dir, self.verifier.needs_signatures()) {
            Ok(listing) => listing,
            Err(why) => {
                let changed = self.unreadable.as_ref() != Some(&why);
                if changed {
                    tracing::warn!(dir = %self.dir.display(), "the handlers folder cannot be read; its handlers keep serving: {why}");
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
            .extract_if(.., |name, _| !listing.may_have(name))
            .map(|(name, entry)| {
                tracing::info!(file = name, "module withdrawn: its file was removed");
                entry
            })
            .collect();
        scan.changed |= !removed.is_empty();
        let removed: HashMap<Identity, Entry> = removed
            .into_iter()
            .filter_map(|entry| Some((entry.seen?.file.identity(), entry)))
            .collect();
        self.owners
            .update_presence(SystemTime::now(), |file| listing.may_have(file));

        for (name, why) in listing.unreadable {
            scan.changed |= self.refuse_unreadable(&name, why, trust);
        }
        for (name, listed) in listing.files {
            self.check_file(&name, listed, trust, &removed, &mut scan);
        }
        scan
    }

    /// The handlers that are served now, and the files that are not.
    pub(super) fn handlers(&self) -> HandlerSet {
        let serving = self
            .entries
            .values()
            .filter_map(|entry| entry.serving.as_ref());
        let refused = self.entries.iter().filter_map(|(file, entry)| {
            let refused = entry.refused.as_ref()?;
            Some(Refusal {
                file: sanitize::name(file),
                why: refused.why.clone(),
                lines: refused.lines.clone(),
                last_good_serves: entry.serves_any(),
            })
        });
        let unreadable = self.unreadable.iter().map(|why| Refusal {
            file: self.dir.display().to_string(),
            why: why.clone(),
            lines: None,
            last_good_serves: true,
        });
        let loading = |is_slow: bool| {
            let entries = self.entries.iter();
            let these = entries.filter(move |(_, entry)| {
                entry
                    .loading
                    .is_some_and(|number| self.slow.contains(&number) == is_slow)
            });
            these.map(|(file, _)| sanitize::name(file)).collect()
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

    /// Refuses a file that may exist but cannot be read. Its last good version keeps serving. Returns true if the
    /// refusal is new.
    fn refuse_unreadable(&mut self, name: &str, why: Unusable, trust: &Trust) -> bool {
        let new = self.new_entry(trust);
        let entry = self.entries.entry(name.to_owned()).or_insert(new);
        // The file is loaded as soon as it can be read.
        entry.seen = None;
        entry.fresh = None;
        entry.retry_at = None;
        // The refusal may have been cleared since, because a version that waited for a name was accepted.
        if entry.unreadable.as_ref() == Some(&why) && entry.refused.is_some() {
            return false;
        }
        entry.unreadable = Some(why.clone());
        entry.refuse(name, why.why(), None)
    }

    /// The state of a file that is new in this scan.
    fn new_entry(&self, trust: &Trust) -> Entry {
        Entry {
            was_at_start: self.is_starting && matches!(trust, Trust::Everything),
            ..Entry::default()
        }
    }

    fn check_file(
        &mut self,
        name: &str,
        listed: Listed,
        trust: &Trust,
        removed: &HashMap<Identity, Entry>,
        scan: &mut Scan,
    ) {
        let now = Instant::now();
        let snapshot = Snapshot {
            file: listed.stamp,
            signature: listed.signature,
            lock: self.verifier.lock_stamp(),
        };
        let new = self.new_entry(trust);
        let entry = self.entries.entry(name.to_owned()).or_insert(new);
        entry.unreadable = None;
        let again = entry.retry_at.is_some_and(|at| at <= now);
        if entry.seen == Some(snapshot) && !again {
            entry.fresh = None;
            return;
        }
        let since = match entry.fresh {
            Some((before, since)) if before == snapshot => since,
            Some(_) | None => now,
        };
        entry.fresh = Some((snapshot, since));
        let trusted = match trust {
            Trust::Renamed(names) => names.contains(name),
            Trust::Everything => true,
        };
        let quiet_for = (now - since).max(snapshot.age());
        if !trusted && quiet_for < QUIET {
            let left = QUIET - quiet_for;
            scan.again_in = Some(scan.again_in.map_or(left, |other| other.min(left)));
            return;
        }
        entry.is_recent = entry.refused.is_none() && self.is_starting && quiet_for < QUIET;
        entry.seen = Some(snapshot);
        entry.fresh = None;
        entry.retry_at = None;
        self.started += 1;
        // Any load in progress is of an older version now.
        entry.loading = None;
        let old_name = removed.get(&listed.stamp.identity());
        if let Some(module) = old_name.and_then(|it| self.renamed(name, &listed, it)) {
            let entry = self.entries.entry(name.to_owned()).or_default();
            entry.waiting = Some((self.started, module));
            entry.accept();
            scan.changed = true;
            return;
        }
        let entry = self.entries.entry(name.to_owned()).or_default();
        entry.loading = Some(self.started);
        self.trying.insert(self.started);
        self.loader.load(Order {
            file: name.to_owned(),
            number: self.started,
            listed,
            rules: self.verifier.rules(),
            refused: entry.refused_digest,
        });
    }

    /// The module of a file that was renamed. The file is read at once, so that its handlers keep serving.
    fn renamed(&self, name: &str, listed: &Listed, before: &Entry) -> Option<Arc<Module>> {
        let module = &before.serving.as_ref()?.module;
        self.loads.read_file();
        let bytes = file::read(listed, self.sandbox.settings().module_bytes_max);
        let bytes = bytes.ok().flatten()?;
        let digest = Digest::compute(&bytes);
        let rules = self.verifier.rules();
        let signed_by = rules.check(name, &listed.path, digest, &bytes).ok()?;
        (digest == module.digest).then(|| Arc::new(module.renamed(name, signed_by)))
    }

    /// Records the outcome of a load. Returns false if the outcome is out of date, because the file was removed or has
    /// changed again.
    pub(super) fn finish(&mut self, loaded: Loaded) -> bool {
        let Loaded {
            file,
            number,
            outcome,
        } = loaded;
        self.trying.remove(&number);
        match outcome {
            Outcome::Slow => self.slow.insert(number),
            Outcome::Module(_)
            | Outcome::Changed
            | Outcome::StillRefused
            | Outcome::Refused(..)
            | Outcome::Transient(_) => self.slow.remove(&number),
        };
        let entry = self.entries.get_mut(&file);
        let Some(entry) = entry.filter(|entry| entry.loading == Some(number)) else {
            // The outcome is of a version that is no longer there.
            return false;
        };
        if let Outcome::Slow = outcome {
            tracing::info!(
                file,
                "the module is slow to load; it is loaded after all others"
            );
            return true;
        }
        entry.loading = None;
        let is_recent = std::mem::take(&mut entry.is_recent);
        match outcome {
            Outcome::Slow | Outcome::StillRefused => {}
            Outcome::Changed => entry.seen = None,
            Outcome::Module(module) => {
                let serves = entry.serving.as_ref();
                let is_same = |it: &Serving| {
                    it.module.digest == module.digest && it.module.signed_by == module.signed_by
                };
                // If this module already serves, with all its names, there is nothing to do.
                entry.waiting = match serves {
                    Some(it) if is_same(it) && it.is_complete() => None,
                    Some(it) if is_same(it) => Some((number, it.module.clone())),
                    Some(_) | None => Some((number, module)),
                };
                entry.accept();
            }
            Outcome::Refused(why, digest) => {
                entry.waiting = None;
                entry.refuse(&file, why, digest);
                if is_recent && Instant::now() < self.start_ends_at {
                    // The file is loaded once more when the writes have stopped.
                    entry.seen = None;
                }
            }
            Outcome::Transient(why) => {
                entry.retry_at = Some(Instant::now() + RETRY_AFTER);
                let why = format!("{why}; it is retried after {} s", RETRY_AFTER.as_secs());
                entry.refuse(&file, why, None);
            }
        }
        true
    }

    /// True if startup can end, after names are assigned one last time.
    pub(super) fn ends_start(&self) -> bool {
        self.is_starting && !self.is_start_open()
    }

    /// Ends startup as soon as nothing is being loaded, because no thread follows the folder.
    pub(super) fn end_start_when_loaded(&mut self) {
        self.start_ends_at = Instant::now();
    }

    /// True while a file that was present at startup may still turn out to claim a name.
    pub(super) fn is_start_open(&self) -> bool {
        let is_open =
            || Instant::now() < self.start_ends_at && self.entries.values().any(Entry::is_untried);
        self.is_starting && (self.is_loading() || is_open())
    }

    /// Saves the ownership of names for the next start.
    pub(super) fn save_names(&mut self) {
        self.owners.save();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::sandbox::Settings;
    use crate::sandbox::module::admission::Denied;

    /// A folder with one file, `mail.wasm`, during startup. The test decides when the folder receives loaded modules.
    struct Start {
        dir: tempfile::TempDir,
        folder: Folder,
        done: mpsc::Receiver<Wake>,
    }

    impl Start {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let sandbox = Sandbox::start(Settings {
                attempts_max: 1,
                ..Settings::default()
            });
            let (wake, done) = mpsc::channel();
            let loads = Arc::default();
            let path = dir.path().to_owned();
            let folder = Folder::new(sandbox.unwrap(), path, loads, wake).unwrap();
            let mut start = Self { dir, folder, done };
            start.write("half of it");
            start.folder.scan(&Trust::Everything);
            assert!(start.folder.is_loading() && !start.folder.ends_start());
            start
        }

        /// The modification time is in the future, so the file is recent regardless of the duration of the test.
        fn write(&self, text: &str) {
            let path = self.dir.path().join("mail.wasm");
            fs::write(&path, text).unwrap();
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_modified(SystemTime::now() + Duration::from_secs(3600))
                .unwrap();
        }

        /// Puts another version in place, which is loaded at once.
        fn replace(&mut self) {
            self.write("complete, and not a module");
            let renamed = HashSet::from(["mail.wasm".to_owned()]);
            self.folder.scan(&Trust::Renamed(renamed));
            assert!(self.folder.is_loading());
        }

        /// Waits for the outcome of the current load.
        fn finish(&mut self) {
            loop {
                let Wake::Loaded(loaded) = self.done.recv().unwrap() else {
                    continue;
                };
                let is_last = loaded.number == self.folder.started;
                self.folder.finish(loaded);
                if is_last {
                    return;
                }
            }
        }

        /// Reports this outcome for the current load.
        fn finish_with(&mut self, outcome: Outcome) {
            self.folder.finish(Loaded {
                file: "mail.wasm".into(),
                number: self.folder.started,
                outcome,
            });
            assert!(!self.folder.is_loading());
        }
    }

    #[test]
    fn a_start_continues_while_a_file_may_be_incomplete() {
        let mut start = Start::new();
        start.finish();
        assert!(!start.folder.is_loading() && !start.folder.ends_start());
        start.replace();
        start.finish();
        assert!(start.folder.ends_start());
    }

    #[test]
    fn a_start_continues_while_a_changed_file_is_untried() {
        let mut start = Start::new();
        start.finish_with(Outcome::Changed);
        assert!(!start.folder.ends_start());
        start.replace();
        start.finish_with(Outcome::StillRefused);
        assert!(start.folder.ends_start());
    }

    #[test]
    fn a_start_ends_in_time_without_a_file_that_cannot_be_tried() {
        let mut start = Start::new();
        start.finish_with(Outcome::Transient("there is not enough memory".into()));
        assert!(!start.folder.ends_start());
        start.folder.start_ends_at = Instant::now();
        assert!(start.folder.ends_start());
    }

    #[test]
    fn a_start_ends_without_a_file_that_it_may_not_read() {
        let mut start = Start::new();
        start.finish_with(Outcome::Changed);
        let mut refuse = |why: Unusable| {
            let folder = &mut start.folder;
            folder.refuse_unreadable("mail.wasm", why, &Trust::Everything);
            folder.ends_start()
        };
        assert!(!refuse(Unusable::ForNow("input/output error".into())));
        assert!(refuse(Unusable::UntilChanged("permission denied".into())));
        // Now the file may be read.
        start.replace();
        assert!(!start.folder.ends_start());
        start.finish();
        assert!(start.folder.ends_start());
    }

    #[test]
    fn a_file_that_cannot_be_read_is_refused_once() {
        let mut start = Start::new();
        start.finish();
        let path = start.dir.path().join("mail.wasm");
        fs::remove_file(&path).unwrap();
        // An error that occurs even for root: the name is too long.
        std::os::unix::fs::symlink("x".repeat(300), &path).unwrap();
        assert!(start.folder.scan(&Trust::Everything).changed);
        let entry = start.folder.entries.get_mut("mail.wasm").unwrap();
        assert!(matches!(entry.unreadable, Some(Unusable::ForNow(_))));
        // The same state as while a version of the file waits for a name.
        let why = "the name belongs to another file".into();
        assert!(entry.deny("mail.wasm", Denied { why, lines: None }));
        for _ in 0..2 {
            assert!(!start.folder.scan(&Trust::Everything).changed);
        }
        // The same state as after that version was accepted.
        start.folder.entries.get_mut("mail.wasm").unwrap().accept();
        assert!(start.folder.scan(&Trust::Everything).changed);
        assert!(!start.folder.scan(&Trust::Everything).changed);
    }

    #[test]
    fn a_start_ends_when_its_last_file_is_removed_while_it_loads() {
        let mut start = Start::new();
        fs::remove_file(start.dir.path().join("mail.wasm")).unwrap();
        start.folder.scan(&Trust::Everything);
        assert!(!start.folder.ends_start());
        start.finish();
        assert!(start.folder.ends_start());
    }
}
