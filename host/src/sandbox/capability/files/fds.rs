//! Which descriptors of a guest lie in directories with a quota.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use wasmtime::component::Resource;
use wasmtime_wasi::p2::bindings::filesystem::types::Descriptor;

use crate::sandbox::capability::GuestLog;
use crate::sandbox::grants::Quota;
use crate::sandbox::quota::{Charge, Ledger, Size};

/// By what stands for a descriptor in the table of the guest. Those of other directories are not here.
#[derive(Default)]
pub(in crate::sandbox) struct Fds(HashMap<u32, Arc<InQuota>>);

impl Fds {
    pub(super) fn of(&self, fd: &Resource<Descriptor>) -> Option<Arc<InQuota>> {
        self.0.get(&fd.rep()).cloned()
    }

    pub(super) fn insert(&mut self, fd: &Resource<Descriptor>, quota: Arc<InQuota>) {
        self.0.insert(fd.rep(), quota);
    }

    pub(super) fn remove(&mut self, fd: &Resource<Descriptor>) {
        self.0.remove(&fd.rep());
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
