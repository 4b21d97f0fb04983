//! Which file owns a handler's name.
//!
//! A name that no table of `rouse.toml` binds belongs to the file that served it first. The file keeps it while it is
//! missing, as in an upgrade that removes the file before it copies the new one, and across restarts: ownership is
//! saved next to the machine code cache, where only the host's user may write. If nothing is saved and two files have
//! the same name at a start, its owner is unknown and neither file serves it. A saved file that cannot be used is an
//! error: a host that ignored it would assign the names again.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::anyhow;
use serde::{Deserialize, Serialize};

use crate::sandbox::module::cache::CodeCache;
use crate::sandbox::{Digest, Sandbox};

/// A file that has been missing, or has served without a name, for this long loses the name.
const GONE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The maximum number of names, owned and contested together. It is low enough that the saved note can be read back
/// however long the names of handlers and files are. When it is reached, known names stay and new ones are refused.
pub(super) const NAMES_MAX: usize = 20_000;

/// The maximum number of files that are saved for a contest.
const CONTEST_FILES_MAX: usize = 4;

/// How often a continuing contest is saved again; it ends [`GONE_MAX`] after the last time.
const NOTED_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// The ownership of names.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Names {
    /// For people who read the note.
    folder: String,
    owned: BTreeMap<String, Owner>,
    /// Names that several files had at the same start.
    contested: BTreeMap<String, Contest>,
}

impl Names {
    /// The note saved under this name; `None` on a first start.
    fn read(cache: &CodeCache, note: &str) -> Result<Option<Self>, String> {
        let text = cache.note(note).map_err(|error| error.to_string())?;
        let read = text.map(|text| serde_json::from_slice(&text));
        read.transpose().map_err(|error| error.to_string())
    }

    fn count(&self) -> usize {
        self.owned.len() + self.contested.len()
    }

    fn has(&self, name: &str) -> bool {
        self.owned.contains_key(name) || self.contested.contains_key(name)
    }

    /// Copies the entry of a name.
    fn copy(&mut self, name: &str, from: &Self) {
        match from.owned.get(name) {
            Some(owner) => self.owned.insert(name.to_owned(), owner.clone()),
            None => self.owned.remove(name),
        };
        match from.contested.get(name) {
            Some(contest) => self.contested.insert(name.to_owned(), contest.clone()),
            None => self.contested.remove(name),
        };
    }
}

/// The file that owns a name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    file: String,
    /// The digest of the file that last served this name.
    sha256: String,
    /// Since when the file has been missing or has served without the name: seconds since 1970.
    gone_since: Option<u64>,
    /// The file serves in a version without the name.
    #[serde(default)]
    is_dropped: bool,
    /// The host is still starting, and another file may have the name too.
    #[serde(skip)]
    is_unproven: bool,
    /// A table binds the name, but there was no room to save it.
    #[serde(skip)]
    is_unkept: bool,
    /// A file with the same content, which serves while the owner is missing.
    #[serde(skip)]
    stand_in: Option<String>,
}

/// The files that had a name at the same start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Contest {
    /// At most [`CONTEST_FILES_MAX`] files, without those that now serve without the name.
    files: BTreeSet<String>,
    /// When two of them were last present: seconds since 1970.
    seen_at: u64,
}

/// A file that has a name in its manifest.
pub(super) struct Claimant<'a> {
    pub(super) file: &'a str,
    pub(super) digest: Digest,
    /// It was there when the host started.
    pub(super) was_at_start: bool,
    /// A table of `rouse.toml` binds the name to its module.
    pub(super) is_bound: bool,
}

/// The owner of a name, from the point of view of a claimant.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Ownership {
    /// The claimant, or no file.
    Own,
    /// A missing file that had the same content.
    StandIn,
    /// This file, which is present.
    Present(String),
    /// This file, which is present in a version without the name.
    Dropped(String),
    /// This file, which is missing.
    Gone(String),
    /// No file, because these files have it too.
    Contested(BTreeSet<String>),
}

/// The ownership of handler names in a folder.
pub(super) struct Owners {
    names: Names,
    is_dev: bool,
    /// Where it is saved, and under which name; `None` if it is not.
    kept: Option<(Arc<Sandbox>, String)>,
    /// Names whose current owner is not saved yet.
    changed: BTreeSet<String>,
    /// Why the last save failed.
    unkept: Option<String>,
}

impl Owners {
    /// Reads what is saved for the folder at this path. If a link later leads to another folder, it is still the same
    /// path.
    ///
    /// # Errors
    /// When there is a saved note that cannot be used.
    pub(super) fn read(sandbox: &Arc<Sandbox>, dir: &Path) -> anyhow::Result<Self> {
        let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
        // Removes a trailing slash.
        let folder: PathBuf = absolute.components().collect();
        let digest = Digest::of(folder.as_os_str().as_encoded_bytes()).to_string();
        let note = format!("names-{}.json", &digest[..16]);
        let read = |cache: &CodeCache| {
            Names::read(cache, &note).map_err(|why| {
                anyhow!(
                    "{}, which records which file owns each handler name in {}, cannot be used: {why}; restore it, or remove it to assign each name to the file that has it now",
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
            // A development session is not evidence for a production host.
            kept: (cache.is_some() && !is_dev).then(|| (sandbox.clone(), note)),
            changed: BTreeSet::new(),
            unkept: None,
        })
    }

    /// Saves what has changed; what cannot be saved now is saved next time.
    pub(super) fn keep(&mut self) {
        let Some((sandbox, note)) = &self.kept else {
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
                    self.unkept = None;
                }
                Ok(false) => {}
                Err(why) => {
                    if self.unkept.as_ref() != Some(&why) {
                        tracing::warn!(file = %cache.note_path(note).display(), "the ownership of handler names cannot be saved for the next start: {why}");
                    }
                    self.unkept = Some(why);
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
        let mut kept = Names::read(cache, note)?.unwrap_or_default();
        kept.folder.clone_from(&self.names.folder);
        for name in &self.changed {
            let owner = self.names.owned.get(name);
            let is_unkept = owner.is_some_and(|owner| owner.is_unkept);
            if kept.has(name) || (!is_unkept && kept.count() < NAMES_MAX) {
                kept.copy(name, &self.names);
            }
        }
        let text = serde_json::to_vec(&kept).map_err(|error| error.to_string())?;
        let set = cache.set_note(note, &text);
        set.map(|()| true).map_err(|error| error.to_string())
    }

    /// True if all of these names can be saved.
    pub(super) fn has_room<'a>(&self, names: impl Iterator<Item = &'a String>) -> bool {
        let new = names.filter(|name| !self.names.has(name)).count();
        new == 0 || self.names.count() + new <= NAMES_MAX
    }

    /// The owner of this name. `is_there`: whether a file is in the folder and may have the name.
    pub(super) fn ownership(
        &self,
        name: &str,
        by: &Claimant<'_>,
        is_there: impl Fn(&str) -> bool,
    ) -> Ownership {
        let is_another = |file: &str| file != by.file && is_there(file);
        if let Some(contest) = self.names.contested.get(name) {
            let mut files = contest.files.iter();
            let decided = by.is_bound || self.is_dev;
            if !decided || files.any(|file| is_another(file)) {
                let mut files = contest.files.clone();
                files.insert(by.file.to_owned());
                return Ownership::Contested(files);
            }
        }
        let Some(owner) = self.names.owned.get(name) else {
            return Ownership::Own;
        };
        if owner.file == by.file {
            return Ownership::Own;
        }
        let is_there = is_there(&owner.file);
        if is_there && !owner.is_dropped {
            return match owner.is_unproven && by.was_at_start {
                true => Ownership::Contested([&owner.file, by.file].map(str::to_owned).into()),
                false => Ownership::Present(owner.file.clone()),
            };
        }
        if by.is_bound || self.is_dev {
            return Ownership::Own;
        }
        let serves_instead = owner.stand_in.as_deref().filter(|file| is_another(file));
        if owner.sha256 == by.digest.to_string() && serves_instead.is_none() {
            return Ownership::StandIn;
        }
        match is_there {
            true => Ownership::Dropped(owner.file.clone()),
            false => Ownership::Gone(owner.file.clone()),
        }
    }

    /// True if the file was known to own the name before this start.
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

    /// Gives the name to this file, which serves it from now on.
    pub(super) fn take(&mut self, name: &str, by: &Claimant<'_>, is_starting: bool) {
        let was_contested = self.names.contested.remove(name).is_some();
        let before = self.names.owned.get(name);
        let was_proven = before.is_some_and(|it| it.file == by.file && !it.is_unproven);
        let is_full = self.names.count() >= NAMES_MAX;
        let owner = Owner {
            file: by.file.to_owned(),
            sha256: by.digest.to_string(),
            gone_since: None,
            is_dropped: false,
            is_unproven: is_starting && !was_proven,
            is_unkept: before.map_or(is_full, |before| before.is_unkept),
            stand_in: None,
        };
        if was_contested || before != Some(&owner) {
            self.changed.insert(name.to_owned());
        }
        self.names.owned.insert(name.to_owned(), owner);
    }

    /// Lets this file serve the name while its owner is missing.
    pub(super) fn stand_in(&mut self, name: &str, file: &str) {
        if let Some(owner) = self.names.owned.get_mut(name) {
            owner.stand_in = Some(file.to_owned());
        }
    }

    /// Records that several files have the name, so none serves it. If there are too many to save, files that are
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
        self.names.owned.remove(name);
        self.names.contested.insert(name.to_owned(), contest);
        self.changed.insert(name.to_owned());
    }

    /// Records that a file now serves without its other names. They wait for it as if it were missing, because the
    /// earlier version may come back.
    pub(super) fn drop_others(&mut self, file: &str, has: impl Fn(&str) -> bool, now: SystemTime) {
        let Names {
            owned, contested, ..
        } = &mut self.names;
        let now = secs(now);
        owned.retain(|name, owner| {
            if owner.file != file || owner.is_dropped || has(name) {
                return true;
            }
            owner.is_dropped = true;
            owner.gone_since = Some(now);
            self.changed.insert(name.clone());
            // While the host starts, another file has an equal claim to it.
            !owner.is_unproven
        });
        for (name, contest) in contested {
            if contest.files.contains(file) && !has(name) {
                contest.files.remove(file);
                self.changed.insert(name.clone());
            }
        }
    }

    /// Ends the start: the names taken during it are proven.
    pub(super) fn prove(&mut self) {
        for (name, owner) in &mut self.names.owned {
            if std::mem::take(&mut owner.is_unproven) {
                self.changed.insert(name.clone());
            }
        }
    }

    /// Records which files are present, and forgets old entries.
    pub(super) fn update_presence(&mut self, now: SystemTime, is_there: impl Fn(&str) -> bool) {
        let now = secs(now);
        let long_ago = |then: u64| now.saturating_sub(then) >= GONE_MAX.as_secs();
        self.names.owned.retain(|name, owner| {
            let gone_since = match is_there(&owner.file) && !owner.is_dropped {
                true => None,
                false => Some(owner.gone_since.unwrap_or(now)),
            };
            let is_over = gone_since.is_some_and(long_ago);
            if owner.gone_since != gone_since || is_over {
                self.changed.insert(name.clone());
            }
            owner.gone_since = gone_since;
            !is_over
        });
        self.names.contested.retain(|name, contest| {
            let there = contest.files.iter().filter(|file| is_there(file)).count();
            let noted = now.saturating_sub(contest.seen_at);
            if there > 1 && noted >= NOTED_EVERY.as_secs() {
                contest.seen_at = now;
                self.changed.insert(name.clone());
            }
            let is_over = long_ago(contest.seen_at);
            if is_over {
                self.changed.insert(name.clone());
            }
            !is_over
        });
    }
}

fn secs(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::Settings;
    use crate::sandbox::module::cache::NOTE_BYTES_MAX;

    fn owners(is_dev: bool) -> Owners {
        Owners {
            names: Names::default(),
            is_dev,
            kept: None,
            changed: BTreeSet::new(),
            unkept: None,
        }
    }

    fn by(file: &str) -> Claimant<'_> {
        Claimant {
            file,
            digest: Digest::of(file.as_bytes()),
            was_at_start: true,
            is_bound: false,
        }
    }

    fn there<'a>(files: &'a [&str]) -> impl Fn(&str) -> bool + 'a {
        |file| files.contains(&file)
    }

    fn contested(files: &[&str]) -> Ownership {
        Ownership::Contested(files.iter().map(|file| (*file).to_owned()).collect())
    }

    #[test]
    fn a_name_stays_with_its_missing_file() {
        let mut owners = owners(false);
        let (mail, other) = (by("mail.wasm"), by("0.wasm"));
        assert_eq!(
            owners.ownership("x", &mail, there(&["mail.wasm"])),
            Ownership::Own
        );
        owners.take("x", &mail, false);
        let both = there(&["mail.wasm", "0.wasm"]);
        let present = Ownership::Present("mail.wasm".into());
        assert_eq!(owners.ownership("x", &other, both), present);
        let alone = there(&["0.wasm"]);
        let gone = Ownership::Gone("mail.wasm".into());
        assert_eq!(owners.ownership("x", &other, alone), gone);
        assert_eq!(
            owners.ownership("x", &mail, there(&["mail.wasm"])),
            Ownership::Own
        );

        // A file with the same content serves meanwhile, but does not gain the name.
        let copy = Claimant {
            digest: mail.digest,
            ..by("copy.wasm")
        };
        let alone = there(&["copy.wasm"]);
        assert_eq!(owners.ownership("x", &copy, alone), Ownership::StandIn);
        owners.stand_in("x", "copy.wasm");
        assert_eq!(owners.server("x"), Some("copy.wasm"));
        let changed = by("copy.wasm");
        assert_eq!(owners.ownership("x", &changed, there(&["copy.wasm"])), gone);
        let second = Claimant {
            digest: mail.digest,
            ..by("second.wasm")
        };
        let two = there(&["copy.wasm", "second.wasm"]);
        assert_eq!(owners.ownership("x", &second, two), gone);
    }

    #[test]
    fn release_a_name_after_its_file_lacked_it_for_a_month() {
        let mut owners = owners(false);
        owners.take("x", &by("mail.wasm"), false);
        owners.take("y", &by("mail.wasm"), false);
        let both = ["mail.wasm", "0.wasm"];
        let now = SystemTime::now();
        owners.drop_others("mail.wasm", |name| name == "y", now);
        owners.drop_others("mail.wasm", |name| name == "y", now + GONE_MAX / 2);
        owners.update_presence(now + GONE_MAX / 2, there(&both));
        let dropped = Ownership::Dropped("mail.wasm".into());
        assert_eq!(owners.ownership("x", &by("0.wasm"), there(&both)), dropped);
        let bound = Claimant {
            is_bound: true,
            ..by("0.wasm")
        };
        assert_eq!(owners.ownership("x", &bound, there(&both)), Ownership::Own);
        owners.update_presence(now + GONE_MAX, there(&both));
        assert_eq!(
            owners.ownership("x", &by("0.wasm"), there(&both)),
            Ownership::Own
        );

        owners.update_presence(now, there(&["0.wasm"]));
        owners.update_presence(now + GONE_MAX / 2, there(&["0.wasm"]));
        let gone = Ownership::Gone("mail.wasm".into());
        assert_eq!(
            owners.ownership("y", &by("0.wasm"), there(&["0.wasm"])),
            gone
        );
        // The file comes back, and the month starts again.
        owners.update_presence(now + GONE_MAX / 2, there(&both));
        owners.update_presence(now + GONE_MAX / 2, there(&["0.wasm"]));
        owners.update_presence(now + GONE_MAX, there(&["0.wasm"]));
        assert_eq!(
            owners.ownership("y", &by("0.wasm"), there(&["0.wasm"])),
            gone
        );
        owners.update_presence(now + GONE_MAX / 2 + GONE_MAX, there(&["0.wasm"]));
        assert_eq!(
            owners.ownership("y", &by("0.wasm"), there(&["0.wasm"])),
            Ownership::Own
        );
    }

    #[test]
    fn two_files_with_a_name_at_a_start_contest_it_until_a_table_binds_it() {
        let mut owners = owners(false);
        let both = ["0.wasm", "mail.wasm"];
        owners.take("x", &by("0.wasm"), true);
        assert_eq!(
            owners.ownership("x", &by("mail.wasm"), there(&both)),
            contested(&both)
        );
        let later = Claimant {
            was_at_start: false,
            ..by("mail.wasm")
        };
        let present = Ownership::Present("0.wasm".into());
        assert_eq!(owners.ownership("x", &later, there(&both)), present);
        let files = both.map(str::to_owned).into();
        let now = SystemTime::now();
        owners.contest("x", files, now, there(&both));
        assert_eq!(owners.server("x"), None);
        // One of them is removed: it may be the owner.
        for file in both {
            let alone = [file];
            assert_eq!(
                owners.ownership("x", &by(file), there(&alone)),
                contested(&both)
            );
        }
        let bound = Claimant {
            is_bound: true,
            ..by("mail.wasm")
        };
        assert_eq!(
            owners.ownership("x", &bound, there(&["mail.wasm"])),
            Ownership::Own
        );
        // An ended contest is forgotten after a month, and not while it continues.
        owners.update_presence(now + GONE_MAX / 2, there(&both));
        owners.update_presence(now + GONE_MAX, there(&["mail.wasm"]));
        assert_eq!(
            owners.ownership("x", &by("0.wasm"), there(&both)),
            contested(&both)
        );
        owners.update_presence(now + GONE_MAX / 2 + GONE_MAX, there(&["mail.wasm"]));
        assert_eq!(
            owners.ownership("x", &by("mail.wasm"), there(&["mail.wasm"])),
            Ownership::Own
        );
    }

    #[test]
    fn a_proven_name_is_not_contested_at_the_next_start() {
        let mut owners = owners(false);
        owners.take("x", &by("mail.wasm"), true);
        assert!(!owners.knows("x", "mail.wasm"));
        owners.prove();
        assert!(owners.knows("x", "mail.wasm"));
        // It serves again at the next start.
        owners.take("x", &by("mail.wasm"), true);
        let both = there(&["0.wasm", "mail.wasm"]);
        let present = Ownership::Present("mail.wasm".into());
        assert_eq!(owners.ownership("x", &by("0.wasm"), both), present);
    }

    #[test]
    fn in_development_a_name_is_free_as_soon_as_its_file_is_missing() {
        let mut owners = owners(true);
        owners.take("x", &by("mail.wasm"), false);
        let present = Ownership::Present("mail.wasm".into());
        let both = ["0.wasm", "mail.wasm"];
        assert_eq!(owners.ownership("x", &by("0.wasm"), there(&both)), present);
        assert_eq!(
            owners.ownership("x", &by("0.wasm"), there(&["0.wasm"])),
            Ownership::Own
        );
        let now = SystemTime::now();
        owners.contest("x", both.map(str::to_owned).into(), now, there(&both));
        assert_eq!(
            owners.ownership("x", &by("0.wasm"), there(&both)),
            contested(&both)
        );
        assert_eq!(
            owners.ownership("x", &by("0.wasm"), there(&["0.wasm"])),
            Ownership::Own
        );
    }

    /// The longest name that 255 bytes can have in JSON.
    fn longest(n: usize) -> String {
        format!("{n:05}{}", "\u{fffd}".repeat(250))
    }

    #[test]
    fn a_full_note_can_be_read_back() {
        let mut owners = owners(false);
        let now = SystemTime::now();
        let name = |n: usize| format!("{n:0128}");
        for n in 0..NAMES_MAX {
            assert!(owners.has_room([name(n)].iter()), "{n}");
            owners.take(&name(n), &by(&longest(n)), false);
            let files = (0..2 * CONTEST_FILES_MAX).map(longest);
            owners.contest(&name(n), files.collect(), now, |_| true);
        }
        let text = serde_json::to_vec(&owners.names).unwrap();
        assert!(text.len() as u64 <= NOTE_BYTES_MAX, "{}", text.len());
        // Known names still have room, and a bound name serves without being saved.
        assert!(owners.has_room([name(7)].iter()) && !owners.has_room(["x".to_owned()].iter()));
        owners.take("x", &by("mail.wasm"), false);
        assert!(owners.names.owned["x"].is_unkept);
        let other = Claimant {
            is_bound: true,
            ..by("0.wasm")
        };
        let present = Ownership::Present("mail.wasm".into());
        assert_eq!(
            owners.ownership("x", &other, there(&["mail.wasm"])),
            present
        );
    }

    #[test]
    fn a_contest_drops_files_that_are_missing_or_without_the_name() {
        let mut owners = owners(true);
        let now = SystemTime::now();
        let all = ["a", "b", "c", "d", "e"];
        let contest = |owners: &mut Owners, there: &[&str]| {
            let files = all.map(str::to_owned).into();
            owners.contest("x", files, now, |file| there.contains(&file));
            owners.names.contested["x"].files.clone()
        };
        let files = |files: &[&str]| files.iter().map(|file| (*file).to_owned()).collect();
        let first: BTreeSet<String> = files(&all[..4]);
        assert_eq!(contest(&mut owners, &all), first);
        let there: BTreeSet<String> = files(&["a", "e"]);
        assert_eq!(contest(&mut owners, &["a", "e"]), there);
        // In development, a name is free as soon as the other files lack it.
        assert_eq!(
            owners.ownership("x", &by("e"), |_| true),
            contested(&["a", "e"])
        );
        owners.drop_others("a", |_| false, now);
        assert_eq!(owners.ownership("x", &by("e"), |_| true), Ownership::Own);
    }

    #[test]
    fn two_hosts_on_one_folder_merge_their_notes() {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings {
            attempts_max: 1,
            cache_dir: Some(dir.path().join("cache")),
            ..Settings::default()
        };
        let sandbox = Sandbox::start(settings).unwrap();
        let read = || Owners::read(&sandbox, dir.path()).unwrap();
        let (mut one, mut other) = (read(), read());
        one.take("x", &by("x.wasm"), false);
        one.take("gone", &by("gone.wasm"), false);
        other.take("y", &by("y.wasm"), false);
        other.take("unproven", &by("z.wasm"), true);
        let cache = sandbox.cache.as_ref().unwrap();
        let (_, note) = one.kept.as_ref().unwrap();
        let lock = cache.lock_note(note).unwrap().unwrap();
        one.keep();
        assert!(read().names.owned.is_empty(), "another host is writing");
        drop(lock);
        one.keep();
        other.keep();
        one.update_presence(SystemTime::now() - GONE_MAX, |file| file != "gone.wasm");
        one.update_presence(SystemTime::now(), |file| file != "gone.wasm");
        one.keep();
        let kept: Vec<String> = read().names.owned.into_keys().collect();
        assert_eq!(kept, ["x", "y"]);
        other.prove();
        other.keep();
        let kept: Vec<String> = read().names.owned.into_keys().collect();
        assert_eq!(kept, ["unproven", "x", "y"]);
    }
}
