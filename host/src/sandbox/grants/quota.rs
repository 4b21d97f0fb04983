//! Counts the contents of directories that have a quota.
//!
//! Growth by guests is added to the count, and is subtracted only if the change failed. Removals become visible when
//! the directory is measured again, which happens when the last measurement is old, and before a write is refused if
//! guests have removed enough. So the count is never too low as long as nobody else writes to the directory. The next
//! measurement finds changes by others (users, other hosts).

mod measure;
mod size;

use std::collections::HashMap;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

pub(in crate::sandbox) use self::size::Size;
use super::{Quota, Root};

/// The time for which a measurement stays valid. Measuring takes one to two microseconds for each file.
const MEASURED_AGE_MAX: Duration = Duration::from_secs(10);

/// The time for which a measurement stays valid after a file was removed or truncated. If one attempt writes a file
/// while another truncates it, the file gets holes that are not counted and could be filled later. For directories that
/// take a long time to measure, this time is longer.
const SHRUNK_AGE_MAX: Duration = Duration::from_millis(100);
/// A measurement is valid for at least this many times its duration.
const MEASURING_SHARE: u32 = 10;

/// The minimum time between measurements of a full directory, regardless of how often guests try to write, unless they
/// have removed enough.
const FULL_AGE_MAX: Duration = Duration::from_secs(1);

/// The ledgers of a host, one for each directory: handlers that share a directory share its quota.
#[derive(Debug, Default)]
pub(in crate::sandbox) struct Ledgers(Mutex<HashMap<PathBuf, Arc<Ledger>>>);

impl Ledgers {
    pub(in crate::sandbox) fn get(&self, root: &Arc<Root>) -> Arc<Ledger> {
        // Canonical, so that each directory has one ledger.
        let dir = root.path();
        let dir = dir.canonicalize().unwrap_or_else(|_| dir.into());
        let mut ledgers = lock(&self.0);
        let new = || Arc::new(Ledger::new(root.clone()));
        ledgers.entry(dir).or_insert_with(new).clone()
    }
}

/// The count for one directory.
#[derive(Debug)]
pub(in crate::sandbox) struct Ledger {
    root: Arc<Root>,
    counts: Mutex<Counts>,
    /// Held while the directory is measured: one thread does it, and the others wait and share its result.
    measuring: Mutex<()>,
    /// Files that guests have opened: removed files take space until they are closed.
    opened: Mutex<Vec<Weak<File>>>,
}

#[derive(Debug, Default)]
struct Counts {
    used: Size,
    /// The total of all additions so far.
    charged: Size,
    /// Additions that may not be on the disk yet.
    under_way: Size,
    measured_at: Option<Instant>,
    measuring_took: Duration,
    /// The last measurement failed, and the failure was logged.
    failed: bool,
    /// The maximum that guests may have removed or truncated since the last measurement.
    freed: Size,
}

impl Counts {
    /// True if the last measurement is too old.
    fn is_due(&self) -> bool {
        match self.freed == Size::default() {
            true => self.is_older(MEASURED_AGE_MAX),
            false => self.is_older(SHRUNK_AGE_MAX),
        }
    }

    /// True if measuring again may find space: guests have removed enough, or others may have.
    fn may_have_space(&self, more: Size, quota: Quota) -> bool {
        let least = self.used.minus(self.freed).plus(more);
        !least.exceeds(more, quota) || self.is_older(FULL_AGE_MAX)
    }

    /// True if the last measurement is older than this, and measuring takes a small share of the time.
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
            measuring: Mutex::default(),
            opened: Mutex::default(),
        }
    }

    /// Counts what is about to be written or created; `None` if it exceeds the quota. A write that does not grow its
    /// file adds nothing to the count, and is refused only if the directory already exceeds its quota. May measure the
    /// directory, and so block for a long time: call it on a thread that may block.
    pub(in crate::sandbox) fn charge(self: &Arc<Self>, more: Size, quota: Quota) -> Option<Charge> {
        self.measure_if(Counts::is_due);
        if !self.take(more, quota) {
            self.measure_if(|counts| {
                counts.used.plus(more).exceeds(more, quota) && counts.may_have_space(more, quota)
            });
            if !self.take(more, quota) {
                return None;
            }
        }
        let ledger = self.clone();
        Some(Charge { ledger, more })
    }

    /// Records that a guest has removed up to this much.
    pub(in crate::sandbox) fn freed(&self, max: Size) {
        let mut counts = lock(&self.counts);
        counts.freed = counts.freed.plus(max);
    }

    /// Records that a guest has opened this file.
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

    /// Measures if the condition still holds after any measurement that is under way.
    fn measure_if(&self, is_needed: impl Fn(&Counts) -> bool) {
        if !is_needed(&lock(&self.counts)) {
            return;
        }
        let _measuring = lock(&self.measuring);
        if is_needed(&lock(&self.counts)) {
            self.measure();
        }
    }

    fn measure(&self) {
        let started = Instant::now();
        let before = {
            let mut counts = lock(&self.counts);
            counts.freed = Size::default();
            counts.charged.minus(counts.under_way)
        };
        // Guests open files meanwhile, even if one of these is on a disk that does not respond.
        let opened = lock(&self.opened).clone();
        let unlinked = measure::unlinked(&opened);
        let walked = self.root.opened().map_err(|error| error.to_string());
        let found = match walked.and_then(measure::walk) {
            Ok(found) => found.plus(unlinked),
            Err(error) => {
                let dir = self.root.path().display();
                if !lock(&self.counts).failed {
                    tracing::warn!(%dir, "the quota of a directory cannot be enforced, so handlers can no longer write there: {error}");
                }
                Size::FULL
            }
        };
        let mut counts = lock(&self.counts);
        counts.failed = found == Size::FULL;
        // Changes that were under way when the measurement started, or were added since, may or may not have been
        // found: they are added.
        counts.used = found.plus(counts.charged.minus(before));
        counts.measured_at = Some(Instant::now());
        counts.measuring_took = started.elapsed();
    }
}

#[cfg(test)]
impl Ledger {
    /// Acts as a measurement that lasts until the result is dropped.
    pub(in crate::sandbox) fn block_measuring(&self) -> MutexGuard<'_, ()> {
        lock(&self.measuring)
    }

    /// Keeps the last measurement from growing old, however slow the test is: it seems to be one of the future.
    fn keep_recent(&self) {
        let later = Instant::now() + Duration::from_secs(3600);
        lock(&self.counts).measured_at = Some(later);
    }
}

/// A counted change that is under way.
#[derive(Debug)]
pub(in crate::sandbox) struct Charge {
    ledger: Arc<Ledger>,
    more: Size,
}

impl Charge {
    /// Undoes the count, because the change failed.
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

/// Nothing panics while a lock is held, so poisoned data is consistent.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    const QUOTA: Quota = Quota {
        bytes_max: 100,
        files_max: 3,
    };

    #[test]
    fn count_existing_files_and_stop_counting_removed_ones() {
        let dir = std::env::temp_dir().join(format!("rouse-quota-{}", rand::random::<u64>()));
        std::fs::create_dir_all(dir.join("under")).unwrap();
        std::fs::write(dir.join("under/a"), [0; 60]).unwrap();
        let ledger = Ledgers::default().get(&Root::new(&dir));
        assert!(ledger.charge(Size::bytes(41), QUOTA).is_none());
        assert!(ledger.charge(Size::bytes(40), QUOTA).is_some());
        // The charge counts although nothing was written.
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
            "a removed file takes space while it is open"
        );
        drop(file);
        ledger.freed(Size::bytes(60));
        assert!(ledger.charge(Size::bytes(100), QUOTA).is_some());
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn callers_at_the_same_time_share_one_measurement() {
        let dir = tempfile::tempdir().unwrap();
        let ledger = Ledgers::default().get(&Root::new(dir.path()));
        let measuring = ledger.block_measuring();
        let (charged, charges) = mpsc::channel();
        for _ in 0..4 {
            let (ledger, charged) = (ledger.clone(), charged.clone());
            thread::spawn(move || {
                let charge = ledger.charge(Size::bytes(1), QUOTA);
                charged.send(charge.is_some()).unwrap();
            });
        }
        let early = charges.recv_timeout(Duration::from_millis(50));
        assert!(early.is_err(), "they wait for the measurement");
        ledger.measure();
        ledger.keep_recent();
        let measured_at = lock(&ledger.counts).measured_at;
        drop(measuring);
        assert!(charges.iter().take(4).all(|charged| charged));
        assert_eq!(lock(&ledger.counts).measured_at, measured_at);
    }

    #[test]
    fn measure_a_full_directory_again_only_if_that_may_find_space() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a"), [0; 100]).unwrap();
        let ledger = Ledgers::default().get(&Root::new(dir.path()));
        let writes = || ledger.charge(Size::bytes(10), QUOTA).is_some();
        let measured_at = || lock(&ledger.counts).measured_at;
        assert!(!writes());
        ledger.keep_recent();
        let first = measured_at();
        for _ in 0..1000 {
            assert!(!writes());
        }
        // Each removal is too small, until they add up.
        for left in (91..100).rev() {
            std::fs::write(dir.path().join("a"), vec![0; left]).unwrap();
            ledger.freed(Size::bytes(1));
            assert!(!writes());
        }
        assert_eq!(measured_at(), first);
        std::fs::write(dir.path().join("a"), [0; 90]).unwrap();
        ledger.freed(Size::bytes(1));
        assert!(writes());
        assert_ne!(measured_at(), first);
        ledger.keep_recent();
        assert!(!writes());
    }
}
