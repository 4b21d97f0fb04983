//! The descriptors of a guest: how many files it has open, and which lie in directories with a quota.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::component::Resource;
use wasmtime_wasi::p2::bindings::filesystem::types::{Descriptor, ErrorCode};
use wasmtime_wasi::p2::{FsError, FsResult};

use super::elsewhere::{ROOT, joined};
use crate::sandbox::capability::log::GuestLog;
use crate::sandbox::grants::Quota;
use crate::sandbox::grants::quota::{Charge, Ledger, Size};

/// By what stands for a descriptor in the table of the guest.
pub(in crate::sandbox) struct Fds {
    held: HashMap<u32, Held>,
    /// Descriptors of the root, in which there is nothing.
    roots: HashSet<u32>,
    files_max: usize,
    /// Made for the first that is opened: most attempts open none.
    free: Option<Arc<Semaphore>>,
    free_streams: Option<Arc<Semaphore>>,
    /// The log has it that there were too many.
    told: bool,
}

/// What the host keeps beside a descriptor.
#[derive(Default)]
pub(super) struct Held {
    pub(super) quota: Option<Arc<InQuota>>,
    /// None: it is a granted directory, which is open without the guest.
    pub(super) open: Option<Arc<OwnedSemaphorePermit>>,
    /// Where the guest sees it.
    pub(super) at: String,
}

impl Fds {
    pub(in crate::sandbox) fn new(files_max: usize) -> Self {
        Self {
            held: HashMap::new(),
            roots: HashSet::new(),
            files_max,
            free: None,
            free_streams: None,
            told: false,
        }
    }

    /// The quota of its directory.
    pub(super) fn of(&self, fd: &Resource<Descriptor>) -> Option<Arc<InQuota>> {
        self.held.get(&fd.rep())?.quota.clone()
    }

    /// Counts a stream that is about to be opened on it, until this is dropped. Too many are an error, as with files: each has
    /// something in the host that it has read, or is to write.
    pub(super) fn stream(&mut self, fd: &Resource<Descriptor>, log: &GuestLog) -> FsResult<InUse> {
        let file = self.held.get(&fd.rep()).and_then(|held| held.open.clone());
        let stream = one_more(&mut self.free_streams, self.files_max);
        let stream = stream.ok_or_else(|| self.too_many(log))?;
        Ok(InUse {
            _file: file,
            _stream: stream,
        })
    }

    pub(super) fn insert(&mut self, fd: &Resource<Descriptor>, held: Held) {
        self.held.insert(fd.rep(), held);
    }

    pub(super) fn insert_root(&mut self, fd: &Resource<Descriptor>) {
        self.roots.insert(fd.rep());
    }

    pub(super) fn is_root(&self, fd: &Resource<Descriptor>) -> bool {
        self.roots.contains(&fd.rep())
    }

    /// Where the guest sees what has this path in a directory; without a path, the thing itself.
    pub(super) fn path(&self, fd: &Resource<Descriptor>, path: &str) -> String {
        let at = self.held.get(&fd.rep()).map_or(ROOT, |held| &held.at);
        joined(at, path)
    }

    pub(super) fn remove(&mut self, fd: &Resource<Descriptor>) {
        self.held.remove(&fd.rep());
        self.roots.remove(&fd.rep());
    }

    /// Counts a file that is about to be opened, until the last who uses it has dropped this. Too many are an error, which the log
    /// of the attempt has once.
    pub(super) fn one_more(&mut self, log: &GuestLog) -> FsResult<Arc<OwnedSemaphorePermit>> {
        let one = one_more(&mut self.free, self.files_max);
        one.map(Arc::new).ok_or_else(|| self.too_many(log))
    }

    fn too_many(&mut self, log: &GuestLog) -> FsError {
        if !std::mem::replace(&mut self.told, true) {
            let why = format!(
                "{} files and directories, or streams of them, are open, which is as many as an attempt may have at once: close some, or allow more (files under limits in rouse.toml)",
                self.files_max
            );
            log.message(tracing::Level::WARN, &why);
        }
        // WASI has no word for too many of these.
        ErrorCode::InsufficientMemory.into()
    }
}

fn one_more(free: &mut Option<Arc<Semaphore>>, max: usize) -> Option<OwnedSemaphorePermit> {
    let free = free.get_or_insert_with(|| Arc::new(Semaphore::new(max)));
    free.clone().try_acquire_owned().ok()
}

/// A stream, and the file that stays open for it.
pub(super) struct InUse {
    /// None: it is a granted directory.
    _file: Option<Arc<OwnedSemaphorePermit>>,
    _stream: OwnedSemaphorePermit,
}

#[cfg(test)]
impl InUse {
    /// Of a stream that nobody counts.
    pub(super) fn alone() -> Self {
        Self {
            _file: None,
            _stream: one_more(&mut None, 1).expect("it is the first"),
        }
    }
}

/// A granted directory with a quota, for one attempt.
pub(super) struct InQuota {
    pub(super) ledger: Arc<Ledger>,
    quota: Quota,
    at: String,
    log: Arc<GuestLog>,
    /// The log has it.
    told: AtomicBool,
}

impl InQuota {
    pub(super) fn new(ledger: Arc<Ledger>, quota: Quota, at: &str, log: Arc<GuestLog>) -> Self {
        Self {
            ledger,
            quota,
            at: at.to_owned(),
            log,
            told: AtomicBool::new(false),
        }
    }

    /// Counts what is about to be made; an error where there is no room for it, which the log of the attempt has once.
    pub(super) fn charge(&self, more: Size) -> Result<Charge, ()> {
        let charge = self.ledger.charge(more, self.quota);
        if charge.is_none() && !self.told.swap(true, Ordering::Relaxed) {
            let why = full(&self.at, more, self.quota);
            self.log.message(tracing::Level::WARN, &why);
        }
        charge.ok_or(())
    }
}

/// Which of the two limits it was.
fn full(at: &str, more: Size, quota: Quota) -> String {
    let most = match more.files {
        0 => format!("{} bytes (`bytes_max`", quota.bytes_max),
        _ => format!("{} files and directories (`files_max`", quota.files_max),
    };
    format!("the directory {at} is full: it may hold {most} of its grant in rouse.toml)")
}

/// What a full disk says.
pub(super) fn no_space() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_of_one_file_are_as_many_as_files_may_be_and_hold_it_open() {
        use crate::sandbox::capability::Speaker;
        use crate::sandbox::{AbortHandle, Limits};

        let limits = Limits::default();
        let log = GuestLog::new(Speaker::Module, AbortHandle::new(), &limits, None);
        let (mut fds, fd) = (Fds::new(2), Resource::new_own(7));
        let open = Some(fds.one_more(&log).unwrap());
        fds.insert(
            &fd,
            Held {
                open,
                ..Held::default()
            },
        );
        let streams = [(); 2].map(|()| fds.stream(&fd, &log).unwrap());
        assert!(fds.stream(&fd, &log).is_err(), "there are two");
        fds.remove(&fd);
        let _other = fds.one_more(&log).unwrap();
        assert!(fds.one_more(&log).is_err(), "the streams hold the first");
        drop(streams);
        assert!(fds.stream(&fd, &log).is_ok() && fds.one_more(&log).is_ok());
    }

    #[test]
    fn a_full_directory_names_the_limit_that_was_met() {
        let quota = Quota {
            bytes_max: 1_000,
            files_max: 2,
        };
        assert_eq!(
            full("/out", Size::bytes(1), quota),
            "the directory /out is full: it may hold 1000 bytes (`bytes_max` of its grant in rouse.toml)"
        );
        assert_eq!(
            full("/out", Size::one_file(), quota),
            "the directory /out is full: it may hold 2 files and directories (`files_max` of its grant in rouse.toml)"
        );
    }
}
