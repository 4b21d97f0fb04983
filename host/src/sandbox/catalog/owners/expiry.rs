//! Takes names from files that have been missing, or have served without the name, for too long.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Owners;
use super::note::Names;

/// A file that has been missing, or has served without a name, for this long loses the name.
pub(super) const MISSING_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The interval at which a continuing contest is saved again; it ends [`MISSING_MAX`] after it was last saved.
const CONTEST_SAVED_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

impl Owners {
    /// Records that a file now serves without its other names. They wait for it as if it were missing, because the
    /// earlier version may come back.
    pub(in crate::sandbox::catalog) fn drop_others(
        &mut self,
        file: &str,
        has: impl Fn(&str) -> bool,
        now: SystemTime,
    ) {
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

    /// Records the files that are present, and forgets old entries.
    pub(in crate::sandbox::catalog) fn update_presence(
        &mut self,
        now: SystemTime,
        is_there: impl Fn(&str) -> bool,
    ) {
        let now = secs(now);
        let long_ago = |then: u64| now.saturating_sub(then) >= MISSING_MAX.as_secs();
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
            if there > 1 && noted >= CONTEST_SAVED_EVERY.as_secs() {
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

/// Seconds since 1970.
pub(super) fn secs(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
