//! The files of one attempt: what each call of the guest works on.

use std::sync::Arc;

use wasmtime::component::{Resource, ResourceTableError};
use wasmtime_wasi::filesystem::WasiFilesystemCtxView;
use wasmtime_wasi::p2::bindings::filesystem::types::{Descriptor, ErrorCode, Filesize};
use wasmtime_wasi::p2::{DynOutputStream, FsResult};

use super::denial::denial;
use super::disk::Disk;
use super::elsewhere::Elsewhere;
use super::fds::{Fds, no_space};
use super::output::FileOutput;
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
    pub(super) elsewhere: &'a mut Elsewhere,
}

/// What a call is about, for whoever has to be told that it was not permitted.
pub(super) struct About {
    pub(super) path: String,
    pub(super) changes: bool,
}

impl Files<'_> {
    /// Refuses what changes something once the attempt has to stop.
    pub(super) fn changes(&self) -> FsResult<()> {
        match self.disk.abort.reason() {
            Some(_) => Err(ErrorCode::NotPermitted.into()),
            None => Ok(()),
        }
    }

    /// Where the guest sees what a call is about.
    pub(super) fn about(&self, fd: &Fd, path: &str, changes: bool) -> About {
        About {
            path: self.fds.path(fd, path),
            changes,
        }
    }

    /// Notes that something was not permitted.
    pub(super) fn noted<T>(&mut self, about: &About, done: FsResult<T>) -> FsResult<T> {
        if let Err(error) = &done
            && error.downcast_ref() == Some(&ErrorCode::NotPermitted)
        {
            *self.denial = Some(denial(&self.granted, &about.path, about.changes));
        }
        done
    }

    /// There is nothing where no directory is granted, and what a guest looked for there is noted.
    pub(super) fn is_granted(&mut self, fd: &Fd, path: &str, changes: bool) -> FsResult<()> {
        if !self.fds.is_root(fd) {
            return Ok(());
        }
        self.elsewhere.note(self.fds.path(fd, path), changes);
        Err(ErrorCode::NoEntry.into())
    }

    /// Does what changes something where waiting for the disk holds up no guest, unless the attempt has to stop by then.
    pub(super) async fn change<T: Send + 'static>(
        &mut self,
        about: About,
        work: impl FnOnce() -> FsResult<T> + Send + 'static,
    ) -> FsResult<T> {
        match self.disk.change(work).await {
            Some(done) => self.noted(&about, done),
            None => Err(ErrorCode::NotPermitted.into()),
        }
    }

    /// Counts what is about to be made in the directory of this descriptor, where that has a quota.
    pub(super) fn charge(&self, fd: &Fd, more: Size) -> FsResult<Option<Charge>> {
        match self.fds.of(fd) {
            Some(quota) => {
                let charge = quota.charge(more);
                charge.map(Some).map_err(|()| no_space().into())
            }
            None => Ok(None),
        }
    }

    /// What stands behind a number of the guest; nothing behind the root.
    pub(super) fn descriptor(&self, fd: &Fd) -> FsResult<Descriptor> {
        match self.fds.is_root(fd) {
            true => Err(ErrorCode::NoEntry.into()),
            false => Ok(self.raw(fd)?),
        }
    }

    /// The same, whatever it is.
    pub(super) fn raw(&self, fd: &Fd) -> Result<Descriptor, ResourceTableError> {
        self.inner.table.get(fd).cloned()
    }

    /// `position`: none, to the end of the file.
    pub(super) fn output(
        &mut self,
        fd: &Fd,
        position: Option<Filesize>,
    ) -> FsResult<Resource<DynOutputStream>> {
        let Descriptor::File(file) = self.descriptor(fd)? else {
            return Err(ErrorCode::BadDescriptor.into());
        };
        if file.perms.write_not_permitted() {
            let about = self.about(fd, "", true);
            return self.noted(&about, Err(ErrorCode::NotPermitted.into()));
        }
        let (quota, open) = (self.fds.of(fd), self.fds.stream(fd, &self.log)?);
        let disk = self.disk.clone();
        let output: DynOutputStream =
            Box::new(FileOutput::new(disk, file.file, position, quota, open));
        Ok(self.inner.table.push(output)?)
    }
}
