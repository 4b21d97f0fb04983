//! Takes names from files that have been missing, or have served without the name, for too long.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::Owners;

/// A file that has been missing, or has served without a name, for this long loses the name.
pub(super) const MISSING_MAX: Duration = Duration::from_secs(30 * 24 * 60 * 60);

/// The interval at which a continuing contest is saved again; it ends [`MISSING_MAX`] after it was last saved.
const CONTEST_SAVED_EVERY: Duration = Duration::from_secs(24 * 60 * 60);

impl Owners {
    /// Records that a file now serves without its other names. The names wait for the file as if the file were missing,
    /// because its earlier version may come back.
    pub(in crate::sandbox::catalog) fn drop_others(
        &mut self,
        file: &str,
        has: impl Fn(&str) -> bool,
        now: SystemTime,
    ) {
        let others: Vec<String> = self
            .names
            .of(file)
            .filter(|name| !has(name))
            .cloned()
            .collect();
        for name in others {
            if self.names.end_claim(&name, file) {
                self.changed.insert(name);
                continue;
            }
            let owner = self.names.owned.get_mut(&name);
            let Some(owner) = owner.filter(|owner| owner.file == file && !owner.is_dropped) else {
                continue;
            };
            owner.is_dropped = true;
            owner.gone_since = Some(secs(now));
            if owner.is_unproven {
                // While the host starts, another file has an equal claim to the name.
                self.names.remove(&name);
            }
            self.changed.insert(name);
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
        let mut over = Vec::new();
        for (name, owner) in &mut self.names.owned {
            let gone_since = match is_there(&owner.file) && !owner.is_dropped {
                true => None,
                false => Some(owner.gone_since.unwrap_or(now)),
            };
            if owner.gone_since != gone_since {
                self.changed.insert(name.clone());
            }
            owner.gone_since = gone_since;
            if gone_since.is_some_and(long_ago) {
                over.push(name.clone());
            }
        }
        for (name, contest) in &mut self.names.contested {
            let there = contest.files.iter().filter(|file| is_there(file)).count();
            let noted = now.saturating_sub(contest.seen_at);
            if there > 1 && noted >= CONTEST_SAVED_EVERY.as_secs() {
                contest.seen_at = now;
                self.changed.insert(name.clone());
            }
            if long_ago(contest.seen_at) {
                over.push(name.clone());
            }
        }
        for name in over {
            self.names.remove(&name);
            self.changed.insert(name);
        }
    }
}

/// Seconds since 1970.
pub(super) fn secs(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs())
}
