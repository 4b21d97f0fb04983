//! The file that owns a handler's name.
//!
//! A name that no table of `rouse.toml` binds belongs to the file that served it first. The file keeps it while it is
//! missing, as in an upgrade that removes the file before it copies the new one, and across restarts: ownership is
//! saved next to the machine code cache, where only the host's user may write. If nothing is saved and two files claim
//! the same name when a host starts, its owner is unknown and neither file serves it. A saved file that cannot be used
//! is an error: a host that ignored it would assign the names again.

mod expiry;
mod note;
mod ownership;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::SystemTime;

use self::expiry::secs;
pub(super) use self::note::NAMES_MAX;
use self::note::{CONTEST_FILES_MAX, Contest, Names, Owner};
pub(super) use self::ownership::{Claimant, Ownership};
use crate::sandbox::Sandbox;

/// The ownership of handler names in a folder.
pub(super) struct Owners {
    names: Names,
    is_dev: bool,
    /// The sandbox whose cache contains the note, and the name of the note; `None` if nothing is saved.
    note: Option<(Arc<Sandbox>, String)>,
    /// Names whose current owner is not saved yet.
    changed: BTreeSet<String>,
    /// Why the last save failed.
    save_error: Option<String>,
}

impl Owners {
    /// True if all of these names can be saved.
    pub(super) fn can_save<'a>(&self, names: impl Iterator<Item = &'a String>) -> bool {
        let new = names.filter(|name| !self.names.has(name)).count();
        new == 0 || self.names.count() + new <= NAMES_MAX
    }

    /// True if the file owned the name before this host started.
    pub(super) fn knows(&self, name: &str, file: &str) -> bool {
        let owner = self.names.owned.get(name);
        owner.is_some_and(|owner| owner.file == file && !owner.is_unproven)
    }

    /// The file that owns the name.
    pub(super) fn owner(&self, name: &str) -> Option<&str> {
        Some(&self.names.owned.get(name)?.file)
    }

    /// The file that serves the name, if any.
    pub(super) fn server(&self, name: &str) -> Option<&str> {
        let owner = self.names.owned.get(name)?;
        Some(owner.stand_in.as_deref().unwrap_or(&owner.file))
    }

    /// Gives the name to this file, which then serves it.
    pub(super) fn take(&mut self, name: &str, by: &Claimant<'_>, is_starting: bool) {
        let was_contested = self.names.contested.contains_key(name);
        let before = self.names.owned.get(name);
        let was_proven = before.is_some_and(|it| it.file == by.file && !it.is_unproven);
        let is_full = !was_contested && self.names.count() >= NAMES_MAX;
        let owner = Owner {
            file: by.file.to_owned(),
            sha256: by.digest.to_string(),
            gone_since: None,
            is_dropped: false,
            is_unproven: is_starting && !was_proven,
            is_unsaved: before.map_or(is_full, |before| before.is_unsaved),
            stand_in: None,
        };
        if was_contested || before != Some(&owner) {
            self.changed.insert(name.to_owned());
        }
        self.names.own(name, owner);
    }

    /// Lets this file serve the name while its owner is missing.
    pub(super) fn stand_in(&mut self, name: &str, file: &str) {
        if let Some(owner) = self.names.owned.get_mut(name) {
            owner.stand_in = Some(file.to_owned());
        }
    }

    /// Records that several files claim the name, so none serves it. If there are too many to save, files that are
    /// present take precedence.
    pub(super) fn contest(
        &mut self,
        name: &str,
        mut files: BTreeSet<String>,
        now: SystemTime,
        is_there: impl Fn(&str) -> bool,
    ) {
        if files.len() > CONTEST_FILES_MAX {
            files.retain(|file| is_there(file));
        }
        while files.len() > CONTEST_FILES_MAX {
            files.pop_last();
        }
        let seen_at = secs(now);
        let contest = Contest { files, seen_at };
        let before = self.names.contested.get(name);
        if before.is_some_and(|before| before.files == contest.files) {
            return;
        }
        self.names.contest(name, contest);
        self.changed.insert(name.to_owned());
    }

    /// Ends startup. The names that were taken during startup are now proven.
    pub(super) fn prove(&mut self) {
        for (name, owner) in &mut self.names.owned {
            if std::mem::take(&mut owner.is_unproven) {
                self.changed.insert(name.clone());
            }
        }
    }
}
