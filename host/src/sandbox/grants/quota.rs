//! How much is in a directory that has a quota, as far as this host knows.
//!
//! What guests make larger is added up and never taken off again: what went away shows when the directory is measured anew, which is
//! done where the last measurement is old, and before anything is refused for which guests have removed enough. So the count errs towards too much, for as long as nobody
//! else writes there. What others do there (people, other hosts) is seen with the next measurement.

mod measure;
mod size;

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(in crate::sandbox) use self::size::Size;
use super::{Quota, Root};

/// A measurement takes some microseconds for each file; for so long the count is good without another.
const MEASURED_AGE_MAX: Duration = Duration::from_secs(10);

/// Where something was removed or cut off it is good for less: attempts that write a file while others cut it off make holes that
/// are not counted, and could fill them. Not for so short a time that a large directory is measured all the time.
const SHRUNK_AGE_MAX: Duration = Duration::from_millis(100);
const MEASURING_SHARE: u32 = 10;

/// A full directory of which not enough was removed by guests is not measured again for so long, however often they try to write.
const FULL_AGE_MAX: Duration = Duration::from_secs(1);

/// The ledgers of a host, one for each directory: handlers that share it share its quota.
#[derive(Debug, Default)]
pub(in crate::sandbox) struct Ledgers(Mutex<HashMap<PathBuf, Arc<Ledger>>>);

impl Ledgers {
    pub(in crate::sandbox) fn of(&self, root: &Arc<Root>) -> Arc<Ledger> {
        // Under one name, however it is written.
        let dir = root.path();
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.into());
        let mut ledgers = lock(&self.0);
        let new = || Arc::new(Ledger::new(root.clone()));
        ledgers.entry(dir).or_insert_with(new).clone()
    }
}

/// What is in one directory.
#[derive(Debug)]
pub(in crate::sandbox) struct Ledger {
    root: Arc<Root>,
    counts: Mutex<Counts>,
    /// Files that guests have opened: those that are removed take room until they are closed.
    opened: Mutex<Vec<Weak<File>>>,
}

#[derive(Debug, Default)]
struct Counts {
    used: Size,
    /// All that was ever added.
    charged: Size,
    /// What was added and may not be on the disk yet.
    under_way: Size,
    measured_at: Option<Instant>,
    measuring_took: Duration,
    /// It could not be measured, which was said.
    failed: bool,
    /// The most that guests have removed or cut off since.
    freed: Size,
}

impl Counts {
    /// True where the last measurement is too old.
    fn is_due(&self) -> bool {
        match self.freed == Size::default() {
            true => self.is_older(MEASURED_AGE_MAX),
            false => self.is_older(SHRUNK_AGE_MAX),
        }
    }

    /// True where measuring anew may find room for this: guests have removed enough, or somebody else may have.
    fn may_have_room(&self, more: Size, quota: Quota) -> bool {
        let least = self.used.minus(self.freed).plus(more);
        !least.exceeds(more, quota) || self.is_older(FULL_AGE_MAX)
    }

    /// True where the last measurement is so old, and measuring takes a small share of the time.
    fn is_older(&self, age: Duration) -> bool {
        let age = age.max(MEASURING_SHARE * self.measuring_took);
        self.measured_at
            .is_none_or(|at| at.elapsed() >= age.min(MEASURED_AGE_MAX))
    }
}

impl Ledger {
    fn new(root: Arc<Root>) -> Self {
        Self {
            root,
            counts: Mutex::default(),
            opened: Mutex::default(),
        }
    }

    /// Counts what is about to be written or made; none where there is no room for it. What is written into a file without making it larger is
    /// nothing more, and refused only where there is too much already. May measure, and so block.
    pub(in crate::sandbox) fn charge(self: &Arc<Self>, more: Size, quota: Quota) -> Option<Charge> {
        let due = lock(&self.counts).is_due();
        if due {
            self.measure();
        }
        if !self.take(more, quota) {
            if !lock(&self.counts).may_have_room(more, quota) {
                return None;
            }
            self.measure();
            if !self.take(more, quota) {
                return None;
            }
        }
        let ledger = self.clone();
        Some(Charge { ledger, more })
    }

    /// A guest has removed so much, or less.
    pub(in crate::sandbox) fn freed(&self, most: Size) {
        let mut counts = lock(&self.counts);
        counts.freed = counts.freed.plus(most);
    }

    /// A guest has opened this file.
    pub(in crate::sandbox) fn opened(&self, file: &Arc<File>) {
        let mut opened = lock(&self.opened);
        if opened.len() == opened.capacity() {
            opened.retain(|file| file.strong_count() > 0);
        }
        opened.push(Arc::downgrade(file));
    }

    fn take(&self, more: Size, quota: Quota) -> bool {
        let mut counts = lock(&self.counts);
        let then = counts.used.plus(more);
        if then.exceeds(more, quota) {
            return false;
        }
        counts.used = then;
        counts.charged = counts.charged.plus(more);
        counts.under_way = counts.under_way.plus(more);
        true
    }

    fn measure(&self) {
        let started = Instant::now();
        let before = {
            let mut counts = lock(&self.counts);
            counts.freed = Size::default();
            counts.charged.minus(counts.under_way)
        };
        let found = tokio::task::block_in_place(|| {
            let unlinked = measure::unlinked(&lock(&self.opened));
            let walked = self.root.opened().map_err(|error| error.to_string());
            match walked.and_then(measure::walk) {
                Ok(found) => found.plus(unlinked),
                Err(error) => {
                    let dir = self.root.path().display();
                    if !lock(&self.counts).failed {
                        tracing::warn!(%dir, "the quota of a directory cannot be kept to, so nothing more is written there: {error}");
                    }
                    Size::FULL
                }
            }
        });
        let mut counts = lock(&self.counts);
        counts.failed = found == Size::FULL;
        // What was under way then, or was added since, may or may not have been found: it is added.
        counts.used = found.plus(counts.charged.minus(before));
        counts.measured_at = Some(Instant::now());
        counts.measuring_took = started.elapsed();
    }
}

/// Something that was counted, and is being made.
#[derive(Debug)]
pub(in crate::sandbox) struct Charge {
    ledger: Arc<Ledger>,
    more: Size,
}

impl Charge {
    /// It came to nothing.
    pub(in crate::sandbox) fn undo(self) {
        let mut counts = lock(&self.ledger.counts);
        counts.used = counts.used.minus(self.more);
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let mut counts = lock(&self.ledger.counts);
        counts.under_way = counts.under_way.minus(self.more);
    }
}

/// Nothing panics while a lock is held, so what is in a poisoned one is whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUOTA: Quota = Quota {
        bytes_max: 100,
        files_max: 3,
    };

    #[tokio::test(flavor = "multi_thread")]
    async fn what_is_there_counts_and_what_is_removed_counts_no_more() {
        let dir = std::env::temp_dir().join(format!("rouse-quota-{}", rand::random::<u64>()));
        std::fs::create_dir_all(dir.join("under")).unwrap();
        std::fs::write(dir.join("under/a"), [0; 60]).unwrap();
        let ledger = Ledgers::default().of(&Root::new(&dir));
        assert!(ledger.charge(Size::bytes(41), QUOTA).is_none());
        assert!(ledger.charge(Size::bytes(40), QUOTA).is_some());
        // It was never written.
        assert!(ledger.charge(Size::bytes(1), QUOTA).is_none());
        ledger.charge(Size::one_file(), QUOTA).unwrap().undo();
        let third = ledger.charge(Size::one_file(), QUOTA);
        assert!(third.is_some() && ledger.charge(Size::one_file(), QUOTA).is_none());

        let file = Arc::new(File::open(dir.join("under/a")).unwrap());
        ledger.opened(&file);
        std::fs::remove_file(dir.join("under/a")).unwrap();
        ledger.freed(Size::bytes(60));
        assert!(
            ledger.charge(Size::bytes(41), QUOTA).is_none(),
            "a removed file that is open takes its room"
        );
        drop(file);
        ledger.freed(Size::bytes(60));
        assert!(ledger.charge(Size::bytes(100), QUOTA).is_some());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_full_directory_is_measured_again_only_where_that_may_find_room() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), [0; 100]).unwrap();
        let ledger = Ledgers::default().of(&Root::new(dir.path()));
        let writes = || ledger.charge(Size::bytes(10), QUOTA).is_some();
        let measured_at = || lock(&ledger.counts).measured_at;
        assert!(!writes());
        let (first, started) = (measured_at(), Instant::now());
        for _ in 0..1000 {
            assert!(!writes());
        }
        // Too little is removed each time, until it is enough.
        for left in (91..100).rev() {
            std::fs::write(dir.path().join("a"), vec![0; left]).unwrap();
            ledger.freed(Size::bytes(1));
            assert!(!writes());
        }
        if started.elapsed() >= SHRUNK_AGE_MAX / 2 {
            return; // This machine was away for a while.
        }
        assert_eq!(measured_at(), first);
        std::fs::write(dir.path().join("a"), [0; 90]).unwrap();
        ledger.freed(Size::bytes(1));
        assert!(writes() && !writes());
        assert_ne!(measured_at(), first);
    }
}
