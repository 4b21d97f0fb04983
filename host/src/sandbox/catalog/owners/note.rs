//! The note in which a host saves the owners of names. Hosts that use the same folder and cache share it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::anyhow;
use serde::{Deserialize, Serialize};

use super::Owners;
use crate::sandbox::module::cache::CodeCache;
use crate::sandbox::{Digest, Sandbox};

/// The maximum number of names, owned and contested together. It is low enough that the note can be read back
/// regardless of the lengths of the names of handlers and files. When it is reached, known names stay and new ones are
/// refused.
pub(in crate::sandbox::catalog) const NAMES_MAX: usize = 20_000;

/// The maximum number of files that are saved for a contest.
pub(super) const CONTEST_FILES_MAX: usize = 4;

/// The ownership of names.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Names {
    /// The path of the handlers folder, for operators who read the note.
    pub(super) folder: String,
    pub(super) owned: BTreeMap<String, Owner>,
    /// Names that several files claimed when a host started.
    pub(super) contested: BTreeMap<String, Contest>,
    /// The names in both maps, by file. It is an index: a file that serves is compared with its own names only.
    #[serde(skip)]
    by_file: BTreeMap<String, BTreeSet<String>>,
}

impl Names {
    /// Reads the note with this name; `None` on a first start.
    fn read(cache: &CodeCache, note: &str) -> Result<Option<Self>, String> {
        let text = cache.note(note).map_err(|error| error.to_string())?;
        let read = text.map(|text| serde_json::from_slice::<Self>(&text));
        let mut read = read.transpose().map_err(|error| error.to_string())?;
        if let Some(names) = &mut read {
            names.index();
        }
        Ok(read)
    }

    /// Fills the index.
    fn index(&mut self) {
        let owned = self.owned.iter().map(|(name, owner)| (&owner.file, name));
        let contested = self.contested.iter();
        let contested =
            contested.flat_map(|(name, it)| it.files.iter().map(move |file| (file, name)));
        for (file, name) in owned.chain(contested) {
            let names = self.by_file.entry(file.clone()).or_default();
            names.insert(name.clone());
        }
    }

    /// The names that this file owns or contests.
    pub(super) fn of(&self, file: &str) -> impl Iterator<Item = &String> {
        self.by_file.get(file).into_iter().flatten()
    }

    /// Gives the name to an owner.
    pub(super) fn own(&mut self, name: &str, owner: Owner) {
        self.remove(name);
        let names = self.by_file.entry(owner.file.clone()).or_default();
        names.insert(name.to_owned());
        self.owned.insert(name.to_owned(), owner);
    }

    /// Makes the name contested.
    pub(super) fn contest(&mut self, name: &str, contest: Contest) {
        self.remove(name);
        for file in &contest.files {
            let names = self.by_file.entry(file.clone()).or_default();
            names.insert(name.to_owned());
        }
        self.contested.insert(name.to_owned(), contest);
    }

    /// Removes the file from a contest. Returns false if it was not part of it.
    pub(super) fn end_claim(&mut self, name: &str, file: &str) -> bool {
        let contest = self.contested.get_mut(name);
        let was_there = contest.is_some_and(|contest| contest.files.remove(file));
        if was_there {
            self.remove_from_index(name, file);
        }
        was_there
    }

    /// Removes the entry of a name.
    pub(super) fn remove(&mut self, name: &str) {
        if let Some(owner) = self.owned.remove(name) {
            self.remove_from_index(name, &owner.file);
        }
        let contest = self.contested.remove(name);
        for file in contest.iter().flat_map(|contest| &contest.files) {
            self.remove_from_index(name, file);
        }
    }

    fn remove_from_index(&mut self, name: &str, file: &str) {
        let Some(names) = self.by_file.get_mut(file) else {
            return;
        };
        names.remove(name);
        if names.is_empty() {
            self.by_file.remove(file);
        }
    }

    pub(super) fn count(&self) -> usize {
        self.owned.len() + self.contested.len()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.owned.contains_key(name) || self.contested.contains_key(name)
    }

    /// Copies the entry of a name.
    fn copy(&mut self, name: &str, from: &Self) {
        match (from.owned.get(name), from.contested.get(name)) {
            (Some(owner), _) => self.own(name, owner.clone()),
            (None, Some(contest)) => self.contest(name, contest.clone()),
            (None, None) => self.remove(name),
        }
    }
}

/// The file that owns a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Owner {
    pub(super) file: String,
    /// The digest of the file that last served this name.
    pub(super) sha256: String,
    /// The time since which the file has been missing or has served without the name: seconds since 1970.
    pub(super) gone_since: Option<u64>,
    /// The file serves a version without the name.
    #[serde(default)]
    pub(super) is_dropped: bool,
    /// The host is still starting, and another file may also claim the name.
    #[serde(skip)]
    pub(super) is_unproven: bool,
    /// A table binds the name, but it cannot be saved, because the maximum number of names was reached.
    #[serde(skip)]
    pub(super) is_unsaved: bool,
    /// A file with the same content, which serves while the owner is missing.
    #[serde(skip)]
    pub(super) stand_in: Option<String>,
}

/// The files that claimed a name when a host started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Contest {
    /// At most [`CONTEST_FILES_MAX`] files, except those that now serve without the name.
    pub(super) files: BTreeSet<String>,
    /// The time at which two of them were last present: seconds since 1970.
    pub(super) seen_at: u64,
}

impl Owners {
    /// Reads the note of the folder at this path. If a link later leads to another folder, the note stays the same.
    ///
    /// # Errors
    /// When there is a note that cannot be used.
    pub(in crate::sandbox::catalog) fn read(
        sandbox: &Arc<Sandbox>,
        dir: &Path,
    ) -> anyhow::Result<Self> {
        let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        // Removes a trailing slash.
        let folder: PathBuf = absolute.components().collect();
        let digest = Digest::compute(folder.as_os_str().as_encoded_bytes()).to_string();
        let note = format!("names-{}.json", &digest[..16]);
        let read = |cache: &CodeCache| {
            Names::read(cache, &note).map_err(|why| {
                anyhow!(
                    "{}, which records which file owns each handler name in {}, cannot be used: {why}; restore it, or remove it so that each name is assigned to the file that has it now",
                    cache.note_path(&note).display(),
                    folder.display()
                )
            })
        };
        let cache = sandbox.cache.as_ref();
        let mut names = cache.map(read).transpose()?.flatten().unwrap_or_default();
        names.folder = folder.to_string_lossy().into_owned();
        let is_dev = sandbox.settings().is_dev;
        Ok(Self {
            names,
            is_dev,
            // A development session must not decide who owns names on a production host.
            note: (cache.is_some() && !is_dev).then(|| (sandbox.clone(), note)),
            changed: BTreeSet::new(),
            save_error: None,
        })
    }

    /// Saves changes. Changes that cannot be saved now are saved next time.
    pub(in crate::sandbox::catalog) fn save(&mut self) {
        let Some((sandbox, note)) = &self.note else {
            self.changed.clear();
            return;
        };
        let Some(cache) = &sandbox.cache else {
            return;
        };
        let unproven: BTreeSet<String> = self
            .changed
            .extract_if(.., |name| {
                let owner = self.names.owned.get(name);
                owner.is_some_and(|owner| owner.is_unproven)
            })
            .collect();
        if !self.changed.is_empty() {
            match self.write(cache, note) {
                Ok(true) => {
                    self.changed.clear();
                    self.save_error = None;
                }
                Ok(false) => {}
                Err(why) => {
                    if self.save_error.as_ref() != Some(&why) {
                        tracing::warn!(file = %cache.note_path(note).display(), "the owners of handler names cannot be saved for the next start: {why}");
                    }
                    self.save_error = Some(why);
                }
            }
        }
        self.changed.extend(unproven);
    }

    /// Merges the changes into the note, which another host on the folder may have written since. Returns false while
    /// another host is writing it.
    fn write(&self, cache: &CodeCache, note: &str) -> Result<bool, String> {
        let locked = cache.lock_note(note).map_err(|error| error.to_string())?;
        let Some(_lock) = locked else {
            return Ok(false);
        };
        let mut saved = Names::read(cache, note)?.unwrap_or_default();
        saved.folder.clone_from(&self.names.folder);
        for name in &self.changed {
            let owner = self.names.owned.get(name);
            let is_unsaved = owner.is_some_and(|owner| owner.is_unsaved);
            if saved.has(name) || (!is_unsaved && saved.count() < NAMES_MAX) {
                saved.copy(name, &self.names);
            }
        }
        let text = serde_json::to_vec(&saved).map_err(|error| error.to_string())?;
        let set = cache.set_note(note, &text);
        set.map(|()| true).map_err(|error| error.to_string())
    }
}
