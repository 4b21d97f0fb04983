//! A guest's descriptors: how many files are open, and which are in directories with a quota.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::component::Resource;
use wasmtime_wasi::p2::bindings::filesystem::types::{Descriptor, ErrorCode};
use wasmtime_wasi::p2::{FsError, FsResult};

use super::closing::{Closings, OnDisk};
use super::disk::Threads;
use super::outside::{ROOT, joined};
use crate::sandbox::capability::log::GuestLog;
use crate::sandbox::grants::Quota;
use crate::sandbox::grants::quota::{Charge, Ledger, Size};

/// The host's state for the guest's descriptors, by handle.
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

/// The host's state for one descriptor.
pub(super) struct FdState {
    pub(super) quota: Option<Arc<InQuota>>,
    /// Its guest path.
    pub(super) at: String,
}

/// A file or directory that is open, for the guest, for its streams and for operations that are under way.
pub(super) type SharedFile = Arc<OnDisk<OpenFile>>;

/// A file or directory that is open. Dropping it closes it.
pub(super) struct OpenFile {
    pub(super) descriptor: Descriptor,
    /// Counts its directory, if that has a quota.
    ledger: Option<Arc<Ledger>>,
    /// `None` for a granted directory, which the host holds open.
    _permit: Option<OwnedSemaphorePermit>,
}

impl OpenFile {
    pub(super) fn new(
        descriptor: Descriptor,
        ledger: Option<Arc<Ledger>>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self {
            descriptor,
            ledger,
            _permit: Some(permit),
        }
    }

    /// A directory that the host holds open.
    pub(super) fn held_by_host(descriptor: Descriptor) -> SharedFile {
        Arc::new(OnDisk::held_by_host(Self {
            descriptor,
            ledger: None,
            _permit: None,
        }))
    }

    pub(super) fn file(&self) -> &File {
        match &self.descriptor {
            Descriptor::File(file) => &file.file,
            Descriptor::Dir(dir) => &dir.dir,
        }
    }
}

impl Drop for OpenFile {
    /// A removed file takes space until it is closed.
    fn drop(&mut self) {
        if let (Some(ledger), Descriptor::File(file)) = (&self.ledger, &self.descriptor)
            && let Ok(metadata) = file.file.metadata()
            && metadata.nlink() == 0
        {
            ledger.freed(Size::bytes(metadata.len()));
        }
    }
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

    /// Counts the files that are being closed; `None` if the guest has called no function for files.
    pub(in crate::sandbox) fn closings(&self) -> Option<Closings> {
        Some(self.threads.as_ref()?.closings().clone())
    }

    /// The quota of the descriptor's directory.
    pub(super) fn quota(&self, fd: &Resource<Descriptor>) -> Option<Arc<InQuota>> {
        self.states.get(&fd.rep())?.quota.clone()
    }

    /// Counts a stream that is about to be opened, until the result is dropped. Too many are an error, as with files,
    /// because each takes memory in the host.
    pub(super) fn stream(&mut self, log: &GuestLog) -> FsResult<OwnedSemaphorePermit> {
        let one = count_one(&mut self.free_streams, self.files_max);
        one.ok_or_else(|| self.too_many(log))
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

    /// True if no other file may be open.
    pub(super) fn are_all_open(&self) -> bool {
        let free = self.free.as_ref();
        free.map_or(self.files_max, |free| free.available_permits()) == 0
    }

    /// Counts a file that is about to be opened, until the permit is dropped. Too many are an error, which is logged
    /// once for each attempt.
    pub(super) fn count_one(&mut self, log: &GuestLog) -> FsResult<OwnedSemaphorePermit> {
        let one = count_one(&mut self.free, self.files_max);
        one.ok_or_else(|| self.too_many(log))
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

#[cfg(test)]
impl OpenFile {
    /// A file that counts towards no limit, for reading and writing.
    pub(super) fn unlimited(file: File, disk: super::disk::Disk) -> SharedFile {
        use wasmtime_wasi::filesystem::File as GuestFile;
        use wasmtime_wasi::{FsPerms, OpenMode};

        let mode = OpenMode::READ | OpenMode::WRITE;
        let file = GuestFile::new(file, FsPerms::ReadWrite, mode, true);
        let open = Self::new(Descriptor::File(file), None, unlimited());
        Arc::new(OnDisk::new(open, disk))
    }
}

/// The permit of a file or stream that counts towards no limit.
#[cfg(test)]
pub(super) fn unlimited() -> OwnedSemaphorePermit {
    count_one(&mut None, 1).expect("it is the first")
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
    use wasmtime_wasi::filesystem::File as GuestFile;
    use wasmtime_wasi::{FsPerms, OpenMode};

    use super::super::disk::Disk;
    use super::super::input::FileInput;
    use super::*;
    use crate::sandbox::capability::LogSource;
    use crate::sandbox::{AbortHandle, Limits};

    #[tokio::test]
    async fn limit_the_streams_of_a_file_which_keep_it_open() {
        let limits = Limits::default();
        let log = GuestLog::new(LogSource::Module, AbortHandle::new(), &limits, None);
        let mut fds = Fds::new(2);
        let disk = Disk::new(AbortHandle::new(), Arc::default(), fds.threads());
        let file = GuestFile::new(
            tempfile::tempfile().unwrap(),
            FsPerms::ReadOnly,
            OpenMode::READ,
            true,
        );
        let permit = fds.count_one(&log).unwrap();
        let file = OpenFile::new(Descriptor::File(file), None, permit);
        let file = Arc::new(OnDisk::new(file, disk.clone()));
        let streams = [(); 2].map(|()| {
            let stream = fds.stream(&log).unwrap();
            FileInput::new(disk.clone(), file.clone(), 0, stream)
        });
        assert!(fds.stream(&log).is_err(), "there are two already");
        drop(file);
        assert!(!fds.are_all_open());
        let _other = fds.count_one(&log).unwrap();
        assert!(fds.are_all_open());
        assert!(
            fds.count_one(&log).is_err(),
            "the streams keep the first file open"
        );
        drop(streams);
        disk.closed().await;
        assert!(fds.stream(&log).is_ok() && fds.count_one(&log).is_ok());
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
