//! A guest's descriptors: how many files are open, and which are in directories with a quota.

use std::collections::{HashMap, HashSet};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::component::Resource;
use wasmtime_wasi::p2::bindings::filesystem::types::{Descriptor, ErrorCode};
use wasmtime_wasi::p2::{FsError, FsResult};

use super::disk::Threads;
use super::outside::{ROOT, joined};
use crate::sandbox::capability::log::GuestLog;
use crate::sandbox::grants::Quota;
use crate::sandbox::grants::quota::{Charge, Ledger, Size};

/// The host's state of the guest's descriptors, by handle.
pub(in crate::sandbox) struct Fds {
    states: HashMap<u32, FdState>,
    /// Descriptors of the empty root.
    roots: HashSet<u32>,
    files_max: usize,
    /// Created with the first file: most attempts open none.
    free: Option<Arc<Semaphore>>,
    free_streams: Option<Arc<Semaphore>>,
    /// Created with the first call.
    threads: Option<Threads>,
    /// An excess was logged.
    logged: bool,
}

/// The host's state of one descriptor.
#[derive(Default)]
pub(super) struct FdState {
    pub(super) quota: Option<Arc<InQuota>>,
    /// `None` for a granted directory, which the host holds open.
    pub(super) open: Option<Arc<OwnedSemaphorePermit>>,
    /// Its guest path.
    pub(super) at: String,
}

impl Fds {
    pub(in crate::sandbox) fn new(files_max: usize) -> Self {
        Self {
            states: HashMap::new(),
            roots: HashSet::new(),
            files_max,
            free: None,
            free_streams: None,
            threads: None,
            logged: false,
        }
    }

    /// The threads that the attempt may take.
    pub(super) fn threads(&mut self) -> Threads {
        self.threads.get_or_insert_default().clone()
    }

    /// The quota of the descriptor's directory.
    pub(super) fn quota(&self, fd: &Resource<Descriptor>) -> Option<Arc<InQuota>> {
        self.states.get(&fd.rep())?.quota.clone()
    }

    /// Counts a stream of a descriptor that is about to be opened, until the result is dropped. Too many are an error,
    /// as with files, because each takes memory in the host.
    pub(super) fn stream(&mut self, fd: &Resource<Descriptor>, log: &GuestLog) -> FsResult<InUse> {
        let file = self
            .states
            .get(&fd.rep())
            .and_then(|state| state.open.clone());
        let stream = count_one(&mut self.free_streams, self.files_max);
        let stream = stream.ok_or_else(|| self.too_many(log))?;
        Ok(InUse {
            _file: file,
            _stream: stream,
        })
    }

    pub(super) fn insert(&mut self, fd: &Resource<Descriptor>, state: FdState) {
        self.states.insert(fd.rep(), state);
    }

    pub(super) fn insert_root(&mut self, fd: &Resource<Descriptor>) {
        self.roots.insert(fd.rep());
    }

    pub(super) fn is_root(&self, fd: &Resource<Descriptor>) -> bool {
        self.roots.contains(&fd.rep())
    }

    /// The guest path of an entry in a directory; of the directory itself if `path` is empty.
    pub(super) fn path(&self, fd: &Resource<Descriptor>, path: &str) -> String {
        let at = self.states.get(&fd.rep()).map_or(ROOT, |state| &state.at);
        joined(at, path)
    }

    pub(super) fn remove(&mut self, fd: &Resource<Descriptor>) {
        self.states.remove(&fd.rep());
        self.roots.remove(&fd.rep());
    }

    /// Counts a file that is about to be opened, until its last user drops the permit. Too many are an error, which is
    /// logged once for each attempt.
    pub(super) fn count_one(&mut self, log: &GuestLog) -> FsResult<Arc<OwnedSemaphorePermit>> {
        let one = count_one(&mut self.free, self.files_max);
        one.map(Arc::new).ok_or_else(|| self.too_many(log))
    }

    fn too_many(&mut self, log: &GuestLog) -> FsError {
        if !std::mem::replace(&mut self.logged, true) {
            let why = format!(
                "{} files and directories, or streams of them, are open, which is the limit of an attempt; close some, or raise limits.files in rouse.toml",
                self.files_max
            );
            log.message(tracing::Level::WARN, &why);
        }
        // WASI has no error code for this.
        ErrorCode::InsufficientMemory.into()
    }
}

fn count_one(free: &mut Option<Arc<Semaphore>>, max: usize) -> Option<OwnedSemaphorePermit> {
    let free = free.get_or_insert_with(|| Arc::new(Semaphore::new(max)));
    free.clone().try_acquire_owned().ok()
}

/// The permits of a stream and of its file, which stays open as long as the stream.
pub(super) struct InUse {
    /// `None` for a granted directory.
    _file: Option<Arc<OwnedSemaphorePermit>>,
    _stream: OwnedSemaphorePermit,
}

#[cfg(test)]
impl InUse {
    /// The permits of a stream that is not limited.
    pub(super) fn unlimited() -> Self {
        Self {
            _file: None,
            _stream: count_one(&mut None, 1).expect("it is the first"),
        }
    }
}

/// A granted directory with a quota, for one attempt.
pub(super) struct InQuota {
    pub(super) ledger: Arc<Ledger>,
    quota: Quota,
    at: String,
    log: Arc<GuestLog>,
    /// A notice about the full directory was logged.
    logged: AtomicBool,
}

impl InQuota {
    pub(super) fn new(ledger: Arc<Ledger>, quota: Quota, at: &str, log: Arc<GuestLog>) -> Self {
        Self {
            ledger,
            quota,
            at: at.to_owned(),
            log,
            logged: AtomicBool::new(false),
        }
    }

    /// Counts what is about to be written or created. Exceeding the quota is an error, which is logged once for each
    /// attempt.
    pub(super) fn charge(&self, more: Size) -> Result<Charge, ()> {
        let charge = self.ledger.charge(more, self.quota);
        if charge.is_none() && !self.logged.swap(true, Ordering::Relaxed) {
            let why = full(&self.at, more, self.quota);
            self.log.message(tracing::Level::WARN, &why);
        }
        charge.ok_or(())
    }
}

/// The message for a full directory, which names the limit.
fn full(at: &str, more: Size, quota: Quota) -> String {
    let max = match more.files {
        0 => format!("{} bytes (`bytes_max`", quota.bytes_max),
        _ => format!("{} files and directories (`files_max`", quota.files_max),
    };
    format!("the directory {at} is full: it may contain at most {max} of its grant in rouse.toml)")
}

/// The error of a full disk.
pub(super) fn no_space() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_the_streams_of_a_file_which_keep_it_open() {
        use crate::sandbox::capability::LogSource;
        use crate::sandbox::{AbortHandle, Limits};

        let limits = Limits::default();
        let log = GuestLog::new(LogSource::Module, AbortHandle::new(), &limits, None);
        let (mut fds, fd) = (Fds::new(2), Resource::new_own(7));
        let open = Some(fds.count_one(&log).unwrap());
        fds.insert(
            &fd,
            FdState {
                open,
                ..FdState::default()
            },
        );
        let streams = [(); 2].map(|()| fds.stream(&fd, &log).unwrap());
        assert!(fds.stream(&fd, &log).is_err(), "there are two already");
        fds.remove(&fd);
        let _other = fds.count_one(&log).unwrap();
        assert!(
            fds.count_one(&log).is_err(),
            "the streams keep the first file open"
        );
        drop(streams);
        assert!(fds.stream(&fd, &log).is_ok() && fds.count_one(&log).is_ok());
    }

    #[test]
    fn a_full_directory_names_the_limit() {
        let quota = Quota {
            bytes_max: 1_000,
            files_max: 2,
        };
        assert_eq!(
            full("/out", Size::bytes(1), quota),
            "the directory /out is full: it may contain at most 1000 bytes (`bytes_max` of its grant in rouse.toml)"
        );
        assert_eq!(
            full("/out", Size::one_file(), quota),
            "the directory /out is full: it may contain at most 2 files and directories (`files_max` of its grant in rouse.toml)"
        );
    }
}
