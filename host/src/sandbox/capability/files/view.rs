//! The view of an attempt's files that a guest call uses.

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use wasmtime::component::{Resource, ResourceTableError};
use wasmtime_wasi::filesystem::WasiFilesystemCtxView;
use wasmtime_wasi::p2::bindings::filesystem::types::{Descriptor, ErrorCode, Filesize};
use wasmtime_wasi::p2::{DynOutputStream, FsResult};

use super::denial::denial;
use super::disk::Disk;
use super::fds::{Fds, InQuota, SharedFile, no_space};
use super::output::FileOutput;
use super::outside::OutsidePaths;
use crate::sandbox::capability::log::GuestLog;
use crate::sandbox::grants::Granted;
use crate::sandbox::grants::quota::{Charge, Size};

pub(super) type Fd = Resource<Descriptor>;

pub(super) struct Files<'a> {
    pub(super) disk: Disk,
    pub(super) granted: Arc<Granted>,
    pub(super) log: Arc<GuestLog>,
    pub(super) inner: WasiFilesystemCtxView<'a>,
    pub(super) fds: &'a mut Fds,
    pub(super) denial: &'a mut Option<String>,
    pub(super) outside_paths: &'a mut OutsidePaths,
}

/// The path and kind of a call, for its denial.
pub(super) struct About {
    pub(super) path: String,
    pub(super) changes: bool,
}

/// The size that a change adds to a directory with a quota.
pub(super) struct Growth {
    quota: Arc<InQuota>,
    more: Size,
}

impl Growth {
    fn charge(self) -> Result<Charge, ()> {
        self.quota.charge(self.more)
    }
}

impl Files<'_> {
    /// Refuses changes once the attempt has to stop.
    pub(super) fn changes(&self) -> FsResult<()> {
        match self.disk.abort.reason() {
            Some(_) => Err(ErrorCode::NotPermitted.into()),
            None => Ok(()),
        }
    }

    /// Describes a call for its denial.
    pub(super) fn about(&self, fd: &Fd, path: &str, changes: bool) -> About {
        About {
            path: self.fds.path(fd, path),
            changes,
        }
    }

    /// Records a denial if the call was not permitted.
    pub(super) fn record_denial<T>(&mut self, about: &About, done: FsResult<T>) -> FsResult<T> {
        if let Err(error) = &done
            && error.downcast_ref() == Some(&ErrorCode::NotPermitted)
        {
            *self.denial = Some(denial(&self.granted, &about.path, about.changes));
        }
        done
    }

    /// Fails for paths outside granted directories, and records them.
    pub(super) fn check_granted(&mut self, fd: &Fd, path: &str, changes: bool) -> FsResult<()> {
        if !self.fds.is_root(fd) {
            return Ok(());
        }
        self.outside_paths.record(self.fds.path(fd, path), changes);
        Err(ErrorCode::NoEntry.into())
    }

    /// Makes a change on a thread that may block, unless the attempt has to stop first. `growth` counts against the
    /// quota.
    pub(super) async fn change<T: Send + 'static>(
        &mut self,
        about: About,
        growth: Option<Growth>,
        work: impl FnOnce() -> FsResult<T> + Send + 'static,
    ) -> FsResult<T> {
        let count = move || growth.map(Growth::charge).transpose();
        let change = move |charge: Result<Option<Charge>, ()>| match charge {
            Ok(charge) => undo_if_failed(charge, work()),
            Err(()) => Err(no_space().into()),
        };
        match self.disk.change(count, change).await {
            Some(done) => self.record_denial(&about, done),
            None => Err(ErrorCode::NotPermitted.into()),
        }
    }

    /// The size that a change adds to the descriptor's directory, if that has a quota.
    pub(super) fn growth(&self, fd: &Fd, more: Size) -> Option<Growth> {
        let quota = self.fds.quota(fd)?;
        Some(Growth { quota, more })
    }

    /// Counts a file that is about to be opened. If too many are open, this waits for those that the guest has closed.
    pub(super) async fn count_one(&mut self) -> FsResult<OwnedSemaphorePermit> {
        if self.fds.are_all_open() {
            self.disk.closed().await;
        }
        self.fds.count_one(&self.log)
    }

    /// The file behind a guest's handle; the root has none.
    pub(super) fn descriptor(&self, fd: &Fd) -> FsResult<SharedFile> {
        match self.fds.is_root(fd) {
            true => Err(ErrorCode::NoEntry.into()),
            false => Ok(self.raw(fd)?),
        }
    }

    /// The file behind a handle, without the check for the root.
    pub(super) fn raw(&self, fd: &Fd) -> Result<SharedFile, ResourceTableError> {
        let file = Resource::<SharedFile>::new_borrow(fd.rep());
        self.inner.table.get(&file).cloned()
    }

    /// Adds a file, and returns its handle: the guest's type is that of wasmtime-wasi, but only these methods use it.
    pub(super) fn push(&mut self, file: SharedFile) -> Result<Fd, ResourceTableError> {
        let file = self.inner.table.push(file)?;
        Ok(Resource::new_own(file.rep()))
    }

    /// `position`: `None` appends to the file.
    pub(super) fn output(
        &mut self,
        fd: &Fd,
        position: Option<Filesize>,
    ) -> FsResult<Resource<DynOutputStream>> {
        let opened = self.descriptor(fd)?;
        let Descriptor::File(file) = &opened.descriptor else {
            return Err(ErrorCode::BadDescriptor.into());
        };
        if file.perms.write_not_permitted() {
            let about = self.about(fd, "", true);
            return self.record_denial(&about, Err(ErrorCode::NotPermitted.into()));
        }
        let (quota, permit) = (self.fds.quota(fd), self.fds.stream(&self.log)?);
        let disk = self.disk.clone();
        let output: DynOutputStream =
            Box::new(FileOutput::new(disk, opened, position, quota, permit));
        Ok(self.inner.table.push(output)?)
    }
}

/// Undoes the charge for a change that failed.
fn undo_if_failed<T>(charge: Option<Charge>, done: FsResult<T>) -> FsResult<T> {
    if let (Err(_), Some(charge)) = (&done, charge) {
        charge.undo();
    }
    done
}
