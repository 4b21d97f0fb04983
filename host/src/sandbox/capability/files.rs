//! `wasi:filesystem`: files in granted directories, unchangeable once the attempt has to stop, and within the quota of their
//! directory.
//!
//! wasmtime-wasi does the work; this stands before it so that an attempt which may have lost its
//! lease changes nothing any more, not even through a stream that it opened before.

mod denial;
mod fds;
mod stream;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use wasmtime::component::{HasData, Linker, Resource};
use wasmtime_wasi::filesystem::WasiFilesystemCtxView;
use wasmtime_wasi::p2::bindings::filesystem::preopens;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    Advice, Descriptor, DescriptorFlags, DescriptorStat, DescriptorType, DirectoryEntry,
    DirectoryEntryStream, ErrorCode, Filesize, Host, HostDescriptor, HostDirectoryEntryStream,
    MetadataHashValue, NewTimestamp, OpenFlags, PathFlags, add_to_linker,
};
use wasmtime_wasi::p2::{DynInputStream, DynOutputStream, FsError, FsResult};

use self::denial::denial;
use self::fds::InQuota;
use self::stream::{Counted, GuardedStream};
use super::GuestLog;
use crate::sandbox::AbortHandle;
use crate::sandbox::grants::Granted;
use crate::sandbox::quota::{Charge, Size};
use crate::sandbox::state::AttemptState;

pub(in crate::sandbox) use self::fds::Fds;

/// Puts the guard before the files that wasmtime-wasi has linked.
pub(in crate::sandbox) fn guard_files(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    add_to_linker::<AttemptState, GuardedFiles>(linker, files)?;
    preopens::add_to_linker::<AttemptState, GuardedFiles>(linker, files)?;
    linker.allow_shadowing(false);
    Ok(())
}

fn files(state: &mut AttemptState) -> Files<'_> {
    state.meter.called();
    let abort = state.abort.clone();
    let (granted, log) = (state.granted.clone(), state.log.clone());
    let (inner, fds, denial) = state.files();
    Files {
        abort,
        granted,
        log,
        inner,
        fds,
        denial,
    }
}

struct GuardedFiles;

impl HasData for GuardedFiles {
    type Data<'a> = Files<'a>;
}

struct Files<'a> {
    abort: AbortHandle,
    granted: Arc<Granted>,
    log: Arc<GuestLog>,
    inner: WasiFilesystemCtxView<'a>,
    fds: &'a mut Fds,
    denial: &'a mut Option<String>,
}

impl Files<'_> {
    /// Refuses what changes something once the attempt has to stop.
    fn changes(&self) -> FsResult<()> {
        match self.abort.reason() {
            Some(_) => Err(ErrorCode::NotPermitted.into()),
            None => Ok(()),
        }
    }

    /// Notes that something was not permitted.
    fn noted<T>(&mut self, done: FsResult<T>) -> FsResult<T> {
        if let Err(error) = &done
            && error.downcast_ref() == Some(&ErrorCode::NotPermitted)
        {
            *self.denial = Some(denial(&self.granted));
        }
        done
    }

    /// What is given back of a change that was counted. What came to nothing is not.
    fn counted<T>(&mut self, charge: Option<Charge>, done: FsResult<T>) -> FsResult<T> {
        if let (Err(_), Some(charge)) = (&done, charge) {
            charge.undo();
        }
        self.noted(done)
    }

    /// Counts what is about to be made in the directory of this descriptor, where that has a quota.
    fn charge(&self, fd: &Fd, more: Size) -> FsResult<Option<Charge>> {
        match self.fds.of(fd) {
            Some(quota) => {
                let charge = quota.charge(more);
                charge.map(Some).map_err(|()| no_space())
            }
            None => Ok(None),
        }
    }

    /// The bytes of a file; 0 where its directory has no quota.
    async fn size(&mut self, fd: &Fd) -> FsResult<Filesize> {
        if self.fds.of(fd).is_none() {
            return Ok(0);
        }
        let about = HostDescriptor::stat(&mut self.inner, borrowed(fd)).await?;
        Ok(about.size)
    }

    /// What is counted of the thing with this name, or a little more; nothing where there is none, or no quota.
    async fn size_at(&mut self, fd: &Fd, how: PathFlags, path: &str) -> Size {
        if self.fds.of(fd).is_none() {
            return Size::default();
        }
        let path = path.to_owned();
        match self.inner.stat_at(borrowed(fd), how, path).await {
            Ok(about) => Size::one_file().plus(Size::bytes(about.size)),
            Err(_) => Size::default(),
        }
    }

    /// The file behind a descriptor; none: it is a directory.
    fn file(&self, fd: &Fd) -> FsResult<Option<Arc<File>>> {
        Ok(match self.inner.table.get(fd)? {
            Descriptor::File(file) => Some(file.file.clone()),
            Descriptor::Dir(_) => None,
        })
    }

    /// `position`: none, to the end of the file.
    fn guard(
        &mut self,
        fd: &Fd,
        stream: Resource<DynOutputStream>,
        position: Option<Filesize>,
    ) -> FsResult<Resource<DynOutputStream>> {
        let counted = match (self.fds.of(fd), self.file(fd)?) {
            (Some(quota), Some(file)) => Some(Counted::new(quota, file, position)),
            (None, _) | (_, None) => None,
        };
        let inner = self.inner.table.delete(stream)?;
        let abort = self.abort.clone();
        let guarded: DynOutputStream = Box::new(GuardedStream {
            inner,
            abort,
            counted,
        });
        Ok(self.inner.table.push(guarded)?)
    }
}

/// So much may be gone from this directory now, where that has succeeded.
fn freed_if(done: bool, quota: Option<&InQuota>, most: Size) {
    if let Some(quota) = quota.filter(|_| done) {
        quota.ledger.freed(most);
    }
}

fn no_space() -> FsError {
    ErrorCode::InsufficientSpace.into()
}

/// The same descriptor once more, for a call besides.
fn borrowed(fd: &Fd) -> Fd {
    Resource::new_borrow(fd.rep())
}

/// Methods that are handed on.
macro_rules! hand_on {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(
            async fn $name(&mut self, $($argument: $kind),*) -> $result {
                HostDescriptor::$name(&mut self.inner, $($argument),*).await
            }
        )*
    };
}

/// The same for those that change something: only while the attempt may go on.
macro_rules! hand_on_changes {
    ($(fn $name:ident($($argument:ident: $kind:ty),*) -> $result:ty;)*) => {
        $(
            async fn $name(&mut self, $($argument: $kind),*) -> $result {
                self.changes()?;
                let done = HostDescriptor::$name(&mut self.inner, $($argument),*).await;
                self.noted(done)
            }
        )*
    };
}

type Fd = Resource<Descriptor>;

impl HostDescriptor for Files<'_> {
    hand_on! {
        fn advise(fd: Fd, offset: Filesize, bytes: Filesize, advice: Advice) -> FsResult<()>;
        fn get_flags(fd: Fd) -> FsResult<DescriptorFlags>;
        fn get_type(fd: Fd) -> FsResult<DescriptorType>;
        fn is_same_object(one: Fd, other: Fd) -> wasmtime::Result<bool>;
        fn metadata_hash(fd: Fd) -> FsResult<MetadataHashValue>;
        fn metadata_hash_at(fd: Fd, how: PathFlags, path: String) -> FsResult<MetadataHashValue>;
        fn read(fd: Fd, bytes: Filesize, offset: Filesize) -> FsResult<(Vec<u8>, bool)>;
        fn read_directory(fd: Fd) -> FsResult<Resource<DirectoryEntryStream>>;
        fn readlink_at(fd: Fd, path: String) -> FsResult<String>;
        fn stat(fd: Fd) -> FsResult<DescriptorStat>;
        fn stat_at(fd: Fd, how: PathFlags, path: String) -> FsResult<DescriptorStat>;
        fn sync(fd: Fd) -> FsResult<()>;
        fn sync_data(fd: Fd) -> FsResult<()>;
    }

    hand_on_changes! {
        fn set_times(fd: Fd, accessed: NewTimestamp, modified: NewTimestamp) -> FsResult<()>;
        fn set_times_at(
            fd: Fd,
            how: PathFlags,
            path: String,
            accessed: NewTimestamp,
            modified: NewTimestamp
        ) -> FsResult<()>;
    }

    async fn create_directory_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
        self.changes()?;
        let charge = self.charge(&fd, Size::one_file())?;
        let done = self.inner.create_directory_at(fd, path).await;
        self.counted(charge, done)
    }

    async fn symlink_at(&mut self, fd: Fd, path: String, new_path: String) -> FsResult<()> {
        self.changes()?;
        let charge = self.charge(&fd, Size::one_file())?;
        let done = self.inner.symlink_at(fd, path, new_path).await;
        self.counted(charge, done)
    }

    /// A file with two names would be counted twice, or be gone with one of them: where there is a quota, there are none.
    async fn link_at(
        &mut self,
        fd: Fd,
        how: PathFlags,
        path: String,
        new_dir: Fd,
        new_path: String,
    ) -> FsResult<()> {
        self.changes()?;
        if self.fds.of(&fd).is_some() || self.fds.of(&new_dir).is_some() {
            return Err(ErrorCode::Unsupported.into());
        }
        let done = self.inner.link_at(fd, how, path, new_dir, new_path).await;
        self.noted(done)
    }

    async fn remove_directory_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
        self.changes()?;
        let quota = self.fds.of(&fd);
        let done = self.inner.remove_directory_at(fd, path).await;
        freed_if(done.is_ok(), quota.as_deref(), Size::one_file());
        self.noted(done)
    }

    async fn unlink_file_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
        self.changes()?;
        let quota = self.fds.of(&fd);
        let gone = self.size_at(&fd, PathFlags::empty(), &path).await;
        let done = self.inner.unlink_file_at(fd, path).await;
        freed_if(done.is_ok(), quota.as_deref(), gone);
        self.noted(done)
    }

    /// From one quota to another, or to none, as from one disk to another.
    async fn rename_at(
        &mut self,
        fd: Fd,
        path: String,
        new_dir: Fd,
        new_path: String,
    ) -> FsResult<()> {
        self.changes()?;
        let quota = self.fds.of(&fd);
        let same = match (&quota, self.fds.of(&new_dir)) {
            (Some(one), Some(other)) => Arc::ptr_eq(&one.ledger, &other.ledger),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        if !same {
            return Err(ErrorCode::CrossDevice.into());
        }
        // There may be another file of that name.
        let gone = self.size_at(&new_dir, PathFlags::empty(), &new_path).await;
        let done = self.inner.rename_at(fd, path, new_dir, new_path).await;
        freed_if(done.is_ok(), quota.as_deref(), gone);
        self.noted(done)
    }

    async fn set_size(&mut self, fd: Fd, bytes: Filesize) -> FsResult<()> {
        self.changes()?;
        let before = self.size(&fd).await?;
        // Cutting off is possible in a full directory too.
        let charge = match bytes <= before {
            true => None,
            false => self.charge(&fd, Size::bytes(bytes - before))?,
        };
        let quota = self.fds.of(&fd);
        let gone = before.saturating_sub(bytes);
        let done = self.inner.set_size(fd, bytes).await;
        freed_if(done.is_ok(), quota.as_deref(), Size::bytes(gone));
        self.counted(charge, done)
    }

    async fn write(&mut self, fd: Fd, bytes: Vec<u8>, offset: Filesize) -> FsResult<Filesize> {
        self.changes()?;
        let end = offset.saturating_add(bytes.len() as u64);
        // By how much it grows, which may be nothing.
        let more = end.saturating_sub(self.size(&fd).await?);
        let charge = self.charge(&fd, Size::bytes(more))?;
        let done = self.inner.write(fd, bytes, offset).await;
        self.counted(charge, done)
    }

    async fn open_at(
        &mut self,
        fd: Fd,
        how: PathFlags,
        path: String,
        open: OpenFlags,
        flags: DescriptorFlags,
    ) -> FsResult<Fd> {
        if open.intersects(OpenFlags::CREATE | OpenFlags::TRUNCATE) {
            self.changes()?;
        }
        let Some(quota) = self.fds.of(&fd) else {
            let opened = self.inner.open_at(fd, how, path, open, flags).await;
            return self.noted(opened);
        };
        let mut charge = None;
        let mut there = Size::default();
        if open.intersects(OpenFlags::CREATE | OpenFlags::TRUNCATE) {
            there = self.size_at(&fd, how, &path).await;
        }
        if open.contains(OpenFlags::CREATE) && there == Size::default() {
            charge = self.charge(&fd, Size::one_file())?;
        }
        let opened = self.inner.open_at(fd, how, path, open, flags).await;
        if let Ok(opened) = &opened {
            if let Some(file) = self.file(opened)? {
                quota.ledger.opened(&file);
            }
            if open.contains(OpenFlags::TRUNCATE) {
                quota.ledger.freed(Size::bytes(there.bytes));
            }
            self.fds.insert(opened, quota);
        }
        self.counted(charge, opened)
    }

    fn read_via_stream(&mut self, fd: Fd, offset: Filesize) -> FsResult<Resource<DynInputStream>> {
        self.inner.read_via_stream(fd, offset)
    }

    fn write_via_stream(
        &mut self,
        fd: Fd,
        offset: Filesize,
    ) -> FsResult<Resource<DynOutputStream>> {
        let stream = self.inner.write_via_stream(borrowed(&fd), offset)?;
        self.guard(&fd, stream, Some(offset))
    }

    fn append_via_stream(&mut self, fd: Fd) -> FsResult<Resource<DynOutputStream>> {
        let stream = self.inner.append_via_stream(borrowed(&fd))?;
        self.guard(&fd, stream, None)
    }

    fn drop(&mut self, fd: Fd) -> wasmtime::Result<()> {
        if let Some(quota) = self.fds.of(&fd) {
            // A file without a name goes with the last who has it open.
            let file = self.file(&fd).ok().flatten();
            let about = file.and_then(|file| file.metadata().ok());
            if let Some(about) = about.filter(|about| about.nlink() == 0) {
                quota.ledger.freed(Size::bytes(about.len()));
            }
            self.fds.remove(&fd);
        }
        HostDescriptor::drop(&mut self.inner, fd)
    }
}

impl HostDirectoryEntryStream for Files<'_> {
    async fn read_directory_entry(
        &mut self,
        stream: Resource<DirectoryEntryStream>,
    ) -> FsResult<Option<DirectoryEntry>> {
        self.inner.read_directory_entry(stream).await
    }

    fn drop(&mut self, stream: Resource<DirectoryEntryStream>) -> wasmtime::Result<()> {
        HostDirectoryEntryStream::drop(&mut self.inner, stream)
    }
}

impl preopens::Host for Files<'_> {
    fn get_directories(&mut self) -> wasmtime::Result<Vec<(Fd, String)>> {
        let mut given = Vec::with_capacity(self.granted.dirs.len());
        for dir in &self.granted.dirs {
            let opened = dir.opened().map_err(wasmtime::Error::msg)?;
            let fd = self.inner.table.push(Descriptor::Dir(opened))?;
            if let (Some(quota), Some(ledger)) = (dir.grant.quota, &dir.ledger) {
                let quota = InQuota::new(ledger.clone(), quota, &dir.grant.at, self.log.clone());
                self.fds.insert(&fd, Arc::new(quota));
            }
            given.push((fd, dir.grant.at.clone()));
        }
        Ok(given)
    }
}

impl Host for Files<'_> {
    fn convert_error_code(&mut self, error: FsError) -> wasmtime::Result<ErrorCode> {
        self.inner.convert_error_code(error)
    }

    fn filesystem_error_code(
        &mut self,
        error: Resource<wasmtime::Error>,
    ) -> wasmtime::Result<Option<ErrorCode>> {
        self.inner.filesystem_error_code(error)
    }
}
