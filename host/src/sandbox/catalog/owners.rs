//! Whose the names of handlers are.
//!
//! Where no table of `rouse.toml` binds a name, it belongs to the file that served it first. It goes on belonging to that file while
//! the file is away, as in an upgrade that removes it before it copies the new one, and after a restart: what is known of names is
//! kept beside machine code, where nobody but the host's user may write. Where nothing is kept, and two files have one name at a
//! start, nobody knows which of them it belongs to, and neither serves it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::sandbox::{Digest, Sandbox};

/// A file that has been gone for so long has given up its names.
const GONE_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// A contest is noted again so often while it goes on; it ends [`GONE_MAX`] after the last time.
const NOTED_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

/// What is known of names.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Names {
    /// For people who look into it.
    folder: PathBuf,
    owned: BTreeMap<String, Owner>,
    /// Names that several files had at one start.
    contested: BTreeMap<String, Contest>,
}

/// The file that a name belongs to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Owner {
    file: String,
    /// Of what it served last.
    sha256: String,
    /// Since when the file is gone: seconds since 1970.
    gone_since: Option<u64>,
    /// The host is still starting, and another file may turn out to have the name too.
    #[serde(skip)]
    is_unproven: bool,
    /// A file with the same content, which serves while the owner is gone.
    #[serde(skip)]
    stand_in: Option<String>,
}

/// The files that had a name at one start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Contest {
    files: BTreeSet<String>,
    /// When two of them were there last: seconds since 1970.
    seen_at: u64,
}

/// A file that has a name in its manifest.
pub(super) struct Claimant<'a> {
    pub(super) file: &'a str,
    pub(super) digest: Digest,
    /// It was there when the host started.
    pub(super) is_of_start: bool,
    /// A table of `rouse.toml` binds the name to its module.
    pub(super) is_bound: bool,
}

/// Whose a name is, for one who has it in its manifest.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Whose {
    /// Its own, or nobody's.
    Own,
    /// That of a file which is gone, and had the same content.
    StandIn,
    /// This file's, which is there.
    Present(String),
    /// This file's, which is gone.
    Gone(String),
    /// Nobody's, as these files have it too.
    Contested(BTreeSet<String>),
}

/// Whose the names of a folder's handlers are.
pub(super) struct Owners {
    names: Names,
    is_dev: bool,
    /// Where it is kept, and under which name; none: it is not.
    kept: Option<(Arc<Sandbox>, String)>,
    has_changed: bool,
}

impl Owners {
    /// What is known of this folder.
    pub(super) fn read(sandbox: &Arc<Sandbox>, dir: &Path) -> Self {
        let folder = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
        let digest = Digest::of(folder.as_os_str().as_encoded_bytes()).to_string();
        let name = format!("names-{}.json", &digest[..16]);
        let cache = sandbox.cache.as_ref();
        let text = cache.and_then(|cache| cache.note(&name));
        let names = text.and_then(|text| {
            let read = serde_json::from_slice::<Names>(&text);
            read.inspect_err(|error| {
                tracing::warn!(file = name, "what was kept of the names of handlers cannot be read, and is forgotten: {error}");
            })
            .ok()
        });
        let mut names = names.unwrap_or_default();
        names.folder = folder;
        let is_dev = sandbox.settings().is_dev;
        Self {
            names,
            is_dev,
            // What a developer's session lets serve proves nothing to a host that serves.
            kept: (cache.is_some() && !is_dev).then(|| (sandbox.clone(), name)),
            has_changed: false,
        }
    }

    /// Keeps what has changed.
    pub(super) fn keep(&mut self) {
        if !std::mem::take(&mut self.has_changed) {
            return;
        }
        let Some((sandbox, name)) = &self.kept else {
            return;
        };
        let proven = self
            .names
            .owned
            .iter()
            .filter(|(_, owner)| !owner.is_unproven);
        let names = Names {
            folder: self.names.folder.clone(),
            owned: proven
                .map(|(name, owner)| (name.clone(), owner.clone()))
                .collect(),
            contested: self.names.contested.clone(),
        };
        let text = serde_json::to_vec(&names).expect("names can always be written");
        if let Some(cache) = &sandbox.cache {
            cache.set_note(name, &text);
        }
    }

    /// Whose this name is. `is_there`: that a file is in the folder, and may have it.
    pub(super) fn whose(
        &self,
        name: &str,
        by: &Claimant<'_>,
        is_there: impl Fn(&str) -> bool,
    ) -> Whose {
        let is_another = |file: &str| file != by.file && is_there(file);
        if let Some(contest) = self.names.contested.get(name) {
            let mut files = contest.files.iter();
            let decided = by.is_bound || self.is_dev;
            if !decided || files.any(|file| is_another(file)) {
                let mut files = contest.files.clone();
                files.insert(by.file.to_owned());
                return Whose::Contested(files);
            }
        }
        let Some(owner) = self.names.owned.get(name) else {
            return Whose::Own;
        };
        if owner.file == by.file {
            return Whose::Own;
        }
        if is_there(&owner.file) {
            return match owner.is_unproven && by.is_of_start {
                true => Whose::Contested([&owner.file, by.file].map(str::to_owned).into()),
                false => Whose::Present(owner.file.clone()),
            };
        }
        if by.is_bound || self.is_dev {
            return Whose::Own;
        }
        let serves_instead = owner.stand_in.as_deref().filter(|file| is_another(file));
        match owner.sha256 == by.digest.to_string() && serves_instead.is_none() {
            true => Whose::StandIn,
            false => Whose::Gone(owner.file.clone()),
        }
    }

    /// True where it is known, and not only since this start, that the name is this file's.
    pub(super) fn knows(&self, name: &str, file: &str) -> bool {
        let owner = self.names.owned.get(name);
        owner.is_some_and(|owner| owner.file == file && !owner.is_unproven)
    }

    /// The file that the name belongs to.
    pub(super) fn owner(&self, name: &str) -> Option<&str> {
        Some(&self.names.owned.get(name)?.file)
    }

    /// The file that serves it, if any does.
    pub(super) fn server(&self, name: &str) -> Option<&str> {
        let owner = self.names.owned.get(name)?;
        Some(owner.stand_in.as_deref().unwrap_or(&owner.file))
    }

    /// The name is this file's from now on, which serves it.
    pub(super) fn take(&mut self, name: &str, by: &Claimant<'_>, is_starting: bool) {
        let was_contested = self.names.contested.remove(name).is_some();
        let before = self.names.owned.get(name);
        let was_proven = before.is_some_and(|it| it.file == by.file && !it.is_unproven);
        let owner = Owner {
            file: by.file.to_owned(),
            sha256: by.digest.to_string(),
            gone_since: None,
            is_unproven: is_starting && !was_proven,
            stand_in: None,
        };
        self.has_changed |= was_contested || before != Some(&owner);
        self.names.owned.insert(name.to_owned(), owner);
    }

    /// This file serves it, while the file that it belongs to is gone.
    pub(super) fn stand_in(&mut self, name: &str, file: &str) {
        if let Some(owner) = self.names.owned.get_mut(name) {
            owner.stand_in = Some(file.to_owned());
        }
    }

    /// These files have it; nobody serves it.
    pub(super) fn contest(&mut self, name: &str, files: BTreeSet<String>, now: SystemTime) {
        let seen_at = secs(now);
        let contest = Contest { files, seen_at };
        let before = self.names.contested.get(name);
        if before.is_some_and(|before| before.files == contest.files) {
            return;
        }
        self.names.owned.remove(name);
        self.names.contested.insert(name.to_owned(), contest);
        self.has_changed = true;
    }

    /// A file serves in a version that has these names alone: the others are nobody's.
    pub(super) fn release_others(&mut self, file: &str, has: impl Fn(&str) -> bool) {
        let before = self.names.owned.len();
        let keeps = |name: &String, owner: &mut Owner| owner.file != file || has(name);
        self.names.owned.retain(keeps);
        self.has_changed |= self.names.owned.len() != before;
    }

    /// Nobody else of this start can have the names that were taken since.
    pub(super) fn prove(&mut self) {
        for owner in self.names.owned.values_mut() {
            self.has_changed |= std::mem::take(&mut owner.is_unproven);
        }
    }

    /// Notes which files are there, and forgets what was long ago.
    pub(super) fn mind(&mut self, now: SystemTime, is_there: impl Fn(&str) -> bool) {
        let now = secs(now);
        let long_ago = |then: u64| now.saturating_sub(then) >= GONE_MAX.as_secs();
        let mut has_changed = false;
        self.names.owned.retain(|_, owner| {
            let gone_since = match is_there(&owner.file) {
                true => None,
                false => Some(owner.gone_since.unwrap_or(now)),
            };
            has_changed |= owner.gone_since != gone_since;
            owner.gone_since = gone_since;
            !gone_since.is_some_and(long_ago)
        });
        self.names.contested.retain(|_, contest| {
            let there = contest.files.iter().filter(|file| is_there(file)).count();
            let noted = now.saturating_sub(contest.seen_at);
            if there > 1 && noted >= NOTED_EVERY.as_secs() {
                contest.seen_at = now;
                has_changed = true;
            }
            !long_ago(contest.seen_at)
        });
        self.has_changed |= has_changed;
    }
}

fn secs(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owners(is_dev: bool) -> Owners {
        Owners {
            names: Names::default(),
            is_dev,
            kept: None,
            has_changed: false,
        }
    }

    fn by(file: &str) -> Claimant<'_> {
        Claimant {
            file,
            digest: Digest::of(file.as_bytes()),
            is_of_start: true,
            is_bound: false,
        }
    }

    fn there<'a>(files: &'a [&str]) -> impl Fn(&str) -> bool + 'a {
        |file| files.contains(&file)
    }

    fn contested(files: &[&str]) -> Whose {
        Whose::Contested(files.iter().map(|file| (*file).to_owned()).collect())
    }

    #[test]
    fn a_name_stays_with_its_file_while_that_is_gone() {
        let mut owners = owners(false);
        let (mail, other) = (by("mail.wasm"), by("0.wasm"));
        assert_eq!(owners.whose("x", &mail, there(&["mail.wasm"])), Whose::Own);
        owners.take("x", &mail, false);
        let both = there(&["mail.wasm", "0.wasm"]);
        let present = Whose::Present("mail.wasm".into());
        assert_eq!(owners.whose("x", &other, both), present);
        let alone = there(&["0.wasm"]);
        let gone = Whose::Gone("mail.wasm".into());
        assert_eq!(owners.whose("x", &other, alone), gone);
        assert_eq!(owners.whose("x", &mail, there(&["mail.wasm"])), Whose::Own);

        // The same content under another name serves, and gets nothing by it.
        let copy = Claimant {
            digest: mail.digest,
            ..by("copy.wasm")
        };
        let alone = there(&["copy.wasm"]);
        assert_eq!(owners.whose("x", &copy, alone), Whose::StandIn);
        owners.stand_in("x", "copy.wasm");
        assert_eq!(owners.server("x"), Some("copy.wasm"));
        let changed = by("copy.wasm");
        assert_eq!(owners.whose("x", &changed, there(&["copy.wasm"])), gone);
        let second = Claimant {
            digest: mail.digest,
            ..by("second.wasm")
        };
        let two = there(&["copy.wasm", "second.wasm"]);
        assert_eq!(owners.whose("x", &second, two), gone);
    }

    #[test]
    fn a_name_is_free_once_its_file_gives_it_up_or_has_been_gone_for_a_month() {
        let mut owners = owners(false);
        owners.take("x", &by("mail.wasm"), false);
        owners.take("y", &by("mail.wasm"), false);
        owners.release_others("mail.wasm", |name| name == "y");
        let both = ["mail.wasm", "0.wasm"];
        assert_eq!(owners.whose("x", &by("0.wasm"), there(&both)), Whose::Own);

        let now = SystemTime::now();
        owners.mind(now, there(&["0.wasm"]));
        owners.mind(now + GONE_MAX / 2, there(&["0.wasm"]));
        let gone = Whose::Gone("mail.wasm".into());
        assert_eq!(owners.whose("y", &by("0.wasm"), there(&["0.wasm"])), gone);
        // It comes back, and the month begins anew.
        owners.mind(now + GONE_MAX / 2, there(&both));
        owners.mind(now + GONE_MAX / 2, there(&["0.wasm"]));
        owners.mind(now + GONE_MAX, there(&["0.wasm"]));
        assert_eq!(owners.whose("y", &by("0.wasm"), there(&["0.wasm"])), gone);
        owners.mind(now + GONE_MAX / 2 + GONE_MAX, there(&["0.wasm"]));
        assert_eq!(
            owners.whose("y", &by("0.wasm"), there(&["0.wasm"])),
            Whose::Own
        );
    }

    #[test]
    fn of_two_that_have_a_name_at_one_start_neither_has_it_until_a_table_says_so() {
        let mut owners = owners(false);
        let both = ["0.wasm", "mail.wasm"];
        owners.take("x", &by("0.wasm"), true);
        assert_eq!(
            owners.whose("x", &by("mail.wasm"), there(&both)),
            contested(&both)
        );
        let later = Claimant {
            is_of_start: false,
            ..by("mail.wasm")
        };
        let present = Whose::Present("0.wasm".into());
        assert_eq!(owners.whose("x", &later, there(&both)), present);
        let files = both.map(str::to_owned).into();
        let now = SystemTime::now();
        owners.contest("x", files, now);
        assert_eq!(owners.server("x"), None);
        // One of them goes away: it may be the one that the name belongs to.
        for file in both {
            let alone = [file];
            assert_eq!(
                owners.whose("x", &by(file), there(&alone)),
                contested(&both)
            );
        }
        let bound = Claimant {
            is_bound: true,
            ..by("mail.wasm")
        };
        assert_eq!(owners.whose("x", &bound, there(&["mail.wasm"])), Whose::Own);
        // What is contested no longer is forgotten some day, and not as long as it is.
        owners.mind(now + GONE_MAX / 2, there(&both));
        owners.mind(now + GONE_MAX, there(&["mail.wasm"]));
        assert_eq!(
            owners.whose("x", &by("0.wasm"), there(&both)),
            contested(&both)
        );
        owners.mind(now + GONE_MAX / 2 + GONE_MAX, there(&["mail.wasm"]));
        assert_eq!(
            owners.whose("x", &by("mail.wasm"), there(&["mail.wasm"])),
            Whose::Own
        );
    }

    #[test]
    fn what_was_proven_before_is_not_contested_at_the_next_start() {
        let mut owners = owners(false);
        owners.take("x", &by("mail.wasm"), true);
        assert!(!owners.knows("x", "mail.wasm"));
        owners.prove();
        assert!(owners.knows("x", "mail.wasm"));
        // As it serves again, at a start.
        owners.take("x", &by("mail.wasm"), true);
        let both = there(&["0.wasm", "mail.wasm"]);
        let present = Whose::Present("mail.wasm".into());
        assert_eq!(owners.whose("x", &by("0.wasm"), both), present);
    }

    #[test]
    fn while_somebody_develops_a_name_is_free_as_soon_as_its_file_is_gone() {
        let mut owners = owners(true);
        owners.take("x", &by("mail.wasm"), false);
        let present = Whose::Present("mail.wasm".into());
        let both = ["0.wasm", "mail.wasm"];
        assert_eq!(owners.whose("x", &by("0.wasm"), there(&both)), present);
        assert_eq!(
            owners.whose("x", &by("0.wasm"), there(&["0.wasm"])),
            Whose::Own
        );
        owners.contest("x", both.map(str::to_owned).into(), SystemTime::now());
        assert_eq!(
            owners.whose("x", &by("0.wasm"), there(&both)),
            contested(&both)
        );
        assert_eq!(
            owners.whose("x", &by("0.wasm"), there(&["0.wasm"])),
            Whose::Own
        );
    }
}
