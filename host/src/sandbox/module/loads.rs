//! Counters of the work done to load modules.

use std::sync::atomic::{AtomicU64, Ordering};

/// The work that a catalog has done to load its modules since it was opened.
#[derive(Debug, Default)]
pub struct Loads {
    files_read: AtomicU64,
    modules_compiled: AtomicU64,
    compilers_started: AtomicU64,
}

impl Loads {
    /// Files that were read and hashed.
    pub fn files_read(&self) -> u64 {
        self.files_read.load(Ordering::Relaxed)
    }

    /// Modules that were handed to a compiler; a module that was tried twice counts twice.
    pub fn modules_compiled(&self) -> u64 {
        self.modules_compiled.load(Ordering::Relaxed)
    }

    /// Processes that were started to compile modules.
    pub fn compilers_started(&self) -> u64 {
        self.compilers_started.load(Ordering::Relaxed)
    }

    pub(in crate::sandbox) fn read_file(&self) {
        self.files_read.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn compiled(&self) {
        self.modules_compiled.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn started_compiler(&self) {
        self.compilers_started.fetch_add(1, Ordering::Relaxed);
    }
}
