//! The descriptors of a guest: how many files it has open, and which lie in directories with a quota.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use wasmtime::component::Resource;
use wasmtime_wasi::p2::FsResult;
use wasmtime_wasi::p2::bindings::filesystem::types::{Descriptor, ErrorCode};

use crate::sandbox::capability::GuestLog;
use crate::sandbox::grants::Quota;
use crate::sandbox::quota::{Charge, Ledger, Size};

/// By what stands for a descriptor in the table of the guest. Granted directories without a quota are not here.
pub(in crate::sandbox) struct Fds {
    held: HashMap<u32, Held>,
    files_max: usize,
    /// Made for the first that is opened: most attempts open none.
    free: Option<Arc<Semaphore>>,
    /// The log has it that there were too many.
    told: bool,
}

/// What the host keeps beside a descriptor.
#[derive(Default)]
pub(super) struct Held {
    pub(super) quota: Option<Arc<InQuota>>,
    /// None: it is a granted directory, which is open without the guest.
    pub(super) open: Option<Arc<OwnedSemaphorePermit>>,
}

impl Fds {
    pub(in crate::sandbox) fn new(files_max: usize) -> Self {
        Self {
            held: HashMap::new(),
            files_max,
            free: None,
            told: false,
        }
    }

    /// The quota of its directory.
    pub(super) fn of(&self, fd: &Resource<Descriptor>) -> Option<Arc<InQuota>> {
        self.held.get(&fd.rep())?.quota.clone()
    }

    /// What counts it among those that are open.
    pub(super) fn open(&self, fd: &Resource<Descriptor>) -> Option<Arc<OwnedSemaphorePermit>> {
        self.held.get(&fd.rep())?.open.clone()
    }

    pub(super) fn insert(&mut self, fd: &Resource<Descriptor>, held: Held) {
        self.held.insert(fd.rep(), held);
    }

    pub(super) fn remove(&mut self, fd: &Resource<Descriptor>) {
        self.held.remove(&fd.rep());
    }

    /// Counts a file that is about to be opened, until the last who uses it has dropped this. Too many are an error, which the log
    /// of the attempt has once.
    pub(super) fn one_more(&mut self, log: &GuestLog) -> FsResult<Arc<OwnedSemaphorePermit>> {
        let max = self.files_max;
        let free = self
            .free
            .get_or_insert_with(|| Arc::new(Semaphore::new(max)));
        match free.clone().try_acquire_owned() {
            Ok(one) => Ok(Arc::new(one)),
            Err(_) => {
                if !std::mem::replace(&mut self.told, true) {
                    let why = format!(
                        "{max} files and directories are open, which is as many as an attempt may have at once: close some, or allow more (files under limits in rouse.toml)"
                    );
                    log.message(tracing::Level::WARN, &why);
                }
                // WASI has no word for too many of these.
                Err(ErrorCode::InsufficientMemory.into())
            }
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
