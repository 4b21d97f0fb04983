//! `wasi:filesystem`: files in granted directories, read-only once the attempt has to stop, and within the quota of
//! their directory.
//!
//! wasmtime-wasi does the work behind this guard. An attempt that may have lost its lease no longer changes anything,
//! not even through a stream that it opened earlier, or with a change that is waiting for a thread. Regardless of the
//! contents of a directory, a guest cannot make the host wait, or hold more than a small part of them.

mod closing;
mod denial;
mod disk;
mod fds;
mod granted_dirs;
mod input;
mod listing;
mod open;
mod output;
mod outside;
mod view;

use std::sync::Arc;

use wasmtime::component::{HasData, Linker, Resource};
use wasmtime_wasi::p2::bindings::filesystem::preopens;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    Advice, Descriptor, DescriptorFlags, DescriptorStat, DescriptorType, DirectoryEntryStream,
    ErrorCode, Filesize, Host, HostDescriptor, MetadataHashValue, NewTimestamp, OpenFlags,
    PathFlags, add_to_linker,
};
use wasmtime_wasi::p2::{DynInputStream, DynOutputStream, FsError, FsResult};

use self::disk::{Disk, with, with_descriptors};
use self::fds::{InQuota, SharedFile};
use self::input::FileInput;
use self::open::OpenRequest;
use self::view::{Fd, Files};
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::grants::quota::Size;

pub(in crate::sandbox) use self::closing::Closings;
pub(in crate::sandbox) use self::fds::Fds;
pub(in crate::sandbox) use self::granted_dirs::open_granted;
pub(in crate::sandbox) use self::outside::OutsidePaths;

/// Shadows the file functions that wasmtime-wasi has linked, so that guests call the guard.
pub(in crate::sandbox) fn guard_files(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    add_to_linker::<AttemptState, GuardedFiles>(linker, files)?;
    preopens::add_to_linker::<AttemptState, GuardedFiles>(linker, files)?;
    linker.allow_shadowing(false);
    Ok(())
}

fn files(state: &mut AttemptState) -> Files<'_> {
    state.meter.count_host_call();
    let (abort, meter) = (state.abort.clone(), state.meter.clone());
    let (granted, log) = (state.granted.clone(), state.log.clone());
    let (inner, fds, denial, outside_paths) = state.files();
    Files {
        disk: Disk::new(abort, meter, fds.threads()),
        granted,
        log,
        inner,
        fds,
        denial,
        outside_paths,
    }
}

struct GuardedFiles;

impl HasData for GuardedFiles {
    type Data<'a> = Files<'a>;
}

impl Files<'_> {
    /// The size of a file; 0 if its directory has no quota.
    async fn size(&mut self, fd: &Fd) -> FsResult<Filesize> {
        if self.fds.quota(fd).is_none() {
            return Ok(0);
        }
        let stat = HostDescriptor::stat(self, borrowed(fd)).await?;
        Ok(stat.size)
    }

    /// The counted size of the entry at this path, or slightly more; zero if there is no entry or no quota.
    async fn size_at(&mut self, fd: &Fd, how: PathFlags, path: &str) -> Size {
        if self.fds.quota(fd).is_none() {
            return Size::default();
        }
        let path = path.to_owned();
        match HostDescriptor::stat_at(self, borrowed(fd), how, path).await {
            Ok(stat) => Size::one_file().plus(Size::bytes(stat.size)),
            Err(_) => Size::default(),
        }
    }
}

/// Records the maximum that a successful removal may have freed in this directory.
fn freed_if(done: bool, quota: Option<&InQuota>, max: Size) {
    if let Some(quota) = quota.filter(|_| done) {
        quota.ledger.freed(max);
    }
}

/// Borrows the descriptor for an additional call.
fn borrowed(fd: &Fd) -> Fd {
    Resource::new_borrow(fd.rep())
}

/// Methods that are forwarded to threads that may block on the disk.
macro_rules! forward {
    ($(fn $name:ident(fd: Fd $(, $argument:ident: $kind:ty)*) -> $result:ty;)*) => {
        $(
            async fn $name(&mut self, fd: Fd, $($argument: $kind),*) -> $result {
                let at = self.descriptor(&fd)?;
                self.disk.read(move || with([&at], async move |mut view, [fd]| {
                    HostDescriptor::$name(&mut view, fd, $($argument),*).await
                })).await
            }
        )*
    };
}

/// Forwarded methods with a path. A path that leads out of a granted directory is not recorded as a denial, because
/// these methods only inspect it.
macro_rules! forward_at {
    ($(fn $name:ident(fd: Fd $(, $argument:ident: $kind:ty)*; path: String) -> $result:ty;)*) => {
        $(
            async fn $name(&mut self, fd: Fd, $($argument: $kind,)* path: String) -> $result {
                self.check_granted(&fd, &path, false)?;
                let at = self.descriptor(&fd)?;
                self.disk.read(move || with([&at], async move |mut view, [fd]| {
                    HostDescriptor::$name(&mut view, fd, $($argument,)* path).await
                })).await
            }
        )*
    };
}

/// Forwarded changes, with what they add to a directory, if anything.
macro_rules! change {
    ($files:expr, $about:expr, [$($fd:ident),+], $name:ident($($argument:expr),*)) => {
        change!($files, $about, None, [$($fd),+], $name($($argument),*))
    };
    ($files:expr, $about:expr, $growth:expr, [$($fd:ident),+], $name:ident($($argument:expr),*)) => {{
        let about = $about;
        let descriptors = [$($files.descriptor(&$fd)?),+];
        let work = move || with(descriptors.each_ref(), async move |mut view, [$($fd),+]| {
            HostDescriptor::$name(&mut view, $($argument),*).await
        });
        $files.change(about, $growth, work).await
    }};
}

impl HostDescriptor for Files<'_> {
    forward! {
        fn advise(fd: Fd, offset: Filesize, bytes: Filesize, advice: Advice) -> FsResult<()>;
        fn metadata_hash(fd: Fd) -> FsResult<MetadataHashValue>;
        fn read(fd: Fd, bytes: Filesize, offset: Filesize) -> FsResult<(Vec<u8>, bool)>;
        fn stat(fd: Fd) -> FsResult<DescriptorStat>;
        fn sync(fd: Fd) -> FsResult<()>;
        fn sync_data(fd: Fd) -> FsResult<()>;
    }

    forward_at! {
        fn metadata_hash_at(fd: Fd, how: PathFlags; path: String) -> FsResult<MetadataHashValue>;
        fn readlink_at(fd: Fd; path: String) -> FsResult<String>;
        fn stat_at(fd: Fd, how: PathFlags; path: String) -> FsResult<DescriptorStat>;
    }

    /// Libraries call this on the root before they search it.
    async fn get_type(&mut self, fd: Fd) -> FsResult<DescriptorType> {
        if self.fds.is_root(&fd) {
            return Ok(DescriptorType::Directory);
        }
        let at = self.descriptor(&fd)?;
        let read = self.disk.read(move || {
            with([&at], async move |mut view, [fd]| {
                HostDescriptor::get_type(&mut view, fd).await
            })
        });
        read.await
    }

    /// Libraries also call this on the root. The denial is recorded when the guest accesses something there.
    async fn get_flags(&mut self, fd: Fd) -> FsResult<DescriptorFlags> {
        if self.fds.is_root(&fd) {
            return Ok(DescriptorFlags::READ
                | DescriptorFlags::WRITE
                | DescriptorFlags::MUTATE_DIRECTORY);
        }
        let at = self.descriptor(&fd)?;
        let read = self.disk.read(move || {
            with([&at], async move |mut view, [fd]| {
                HostDescriptor::get_flags(&mut view, fd).await
            })
        });
        read.await
    }

    async fn create_directory_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
        self.changes()?;
        self.check_granted(&fd, &path, true)?;
        let growth = self.growth(&fd, Size::one_file());
        let about = self.about(&fd, &path, true);
        change!(self, about, growth, [fd], create_directory_at(fd, path))
    }

    async fn symlink_at(&mut self, fd: Fd, path: String, new_path: String) -> FsResult<()> {
        self.changes()?;
        self.check_granted(&fd, &new_path, true)?;
        let growth = self.growth(&fd, Size::one_file());
        let about = self.about(&fd, &new_path, true);
        change!(self, about, growth, [fd], symlink_at(fd, path, new_path))
    }

    async fn set_times(
        &mut self,
        fd: Fd,
        accessed: NewTimestamp,
        modified: NewTimestamp,
    ) -> FsResult<()> {
        self.changes()?;
        let about = self.about(&fd, "", true);
        change!(self, about, [fd], set_times(fd, accessed, modified))
    }

    async fn is_same_object(&mut self, one: Fd, other: Fd) -> wasmtime::Result<bool> {
        let both = [self.raw(&one)?, self.raw(&other)?];
        let read = self.disk.read(move || {
            with(both.each_ref(), async move |mut view, [one, other]| {
                HostDescriptor::is_same_object(&mut view, one, other).await
            })
        });
        read.await
    }

    /// If links are followed, wasmtime-wasi opens the target; if that is a pipe, it would wait for the other end. So
    /// the target is opened here.
    async fn set_times_at(
        &mut self,
        fd: Fd,
        how: PathFlags,
        path: String,
        accessed: NewTimestamp,
        modified: NewTimestamp,
    ) -> FsResult<()> {
        self.changes()?;
        self.check_granted(&fd, &path, true)?;
        let about = self.about(&fd, &path, true);
        if !how.contains(PathFlags::SYMLINK_FOLLOW) {
            let done = change!(
                self,
                about,
                [fd],
                set_times_at(fd, how, path, accessed, modified)
            );
            return done;
        }
        let at = self.descriptor(&fd)?;
        let work = move || {
            let found = open::for_times(&at.descriptor, how, &path)?;
            with_descriptors([found], async move |mut view, [fd]| {
                HostDescriptor::set_times(&mut view, fd, accessed, modified).await
            })
        };
        self.change(about, None, work).await
    }

    async fn read_directory(&mut self, fd: Fd) -> FsResult<Resource<DirectoryEntryStream>> {
        self.list(&fd).await
    }

    /// A file with two names would be counted twice, or not at all after one name was removed, so directories with a
    /// quota do not allow hard links.
    async fn link_at(
        &mut self,
        fd: Fd,
        how: PathFlags,
        path: String,
        new_dir: Fd,
        new_path: String,
    ) -> FsResult<()> {
        self.changes()?;
        self.check_granted(&fd, &path, false)?;
        self.check_granted(&new_dir, &new_path, true)?;
        if self.fds.quota(&fd).is_some() || self.fds.quota(&new_dir).is_some() {
            return Err(ErrorCode::Unsupported.into());
        }
        let about = self.about(&new_dir, &new_path, true);
        change!(
            self,
            about,
            [fd, new_dir],
            link_at(fd, how, path, new_dir, new_path)
        )
    }

    async fn remove_directory_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
        self.changes()?;
        self.check_granted(&fd, &path, true)?;
        let quota = self.fds.quota(&fd);
        let about = self.about(&fd, &path, true);
        let done = change!(self, about, [fd], remove_directory_at(fd, path));
        freed_if(done.is_ok(), quota.as_deref(), Size::one_file());
        done
    }

    async fn unlink_file_at(&mut self, fd: Fd, path: String) -> FsResult<()> {
        self.changes()?;
        self.check_granted(&fd, &path, true)?;
        let quota = self.fds.quota(&fd);
        let freed = self.size_at(&fd, PathFlags::empty(), &path).await;
        let about = self.about(&fd, &path, true);
        let done = change!(self, about, [fd], unlink_file_at(fd, path));
        freed_if(done.is_ok(), quota.as_deref(), freed);
        done
    }

    /// A move between quotas, or out of a quota, fails like a move between disks.
    async fn rename_at(
        &mut self,
        fd: Fd,
        path: String,
        new_dir: Fd,
        new_path: String,
    ) -> FsResult<()> {
        self.changes()?;
        self.check_granted(&fd, &path, true)?;
        self.check_granted(&new_dir, &new_path, true)?;
        let quota = self.fds.quota(&fd);
        let same = match (&quota, self.fds.quota(&new_dir)) {
            (Some(one), Some(other)) => Arc::ptr_eq(&one.ledger, &other.ledger),
            (None, None) => true,
            (Some(_), None) | (None, Some(_)) => false,
        };
        if !same {
            return Err(ErrorCode::CrossDevice.into());
        }
        // The move may replace another file.
        let freed = self.size_at(&new_dir, PathFlags::empty(), &new_path).await;
        // Either directory may be the read-only one.
        let about = match self.granted.is_read_only(&self.fds.path(&fd, &path)) {
            true => self.about(&fd, &path, true),
            false => self.about(&new_dir, &new_path, true),
        };
        let done = change!(
            self,
            about,
            [fd, new_dir],
            rename_at(fd, path, new_dir, new_path)
        );
        freed_if(done.is_ok(), quota.as_deref(), freed);
        done
    }

    async fn set_size(&mut self, fd: Fd, bytes: Filesize) -> FsResult<()> {
        self.changes()?;
        let before = self.size(&fd).await?;
        // Truncating also works in a full directory.
        let growth = match bytes <= before {
            true => None,
            false => self.growth(&fd, Size::bytes(bytes - before)),
        };
        let quota = self.fds.quota(&fd);
        let freed = before.saturating_sub(bytes);
        let about = self.about(&fd, "", true);
        let done = change!(self, about, growth, [fd], set_size(fd, bytes));
        freed_if(done.is_ok(), quota.as_deref(), Size::bytes(freed));
        done
    }

    async fn write(&mut self, fd: Fd, bytes: Vec<u8>, offset: Filesize) -> FsResult<Filesize> {
        self.changes()?;
        let end = offset.saturating_add(bytes.len() as u64);
        // Counts the growth, which may be zero.
        let more = end.saturating_sub(self.size(&fd).await?);
        let growth = self.growth(&fd, Size::bytes(more));
        let about = self.about(&fd, "", true);
        change!(self, about, growth, [fd], write(fd, bytes, offset))
    }

    async fn open_at(
        &mut self,
        fd: Fd,
        how: PathFlags,
        path: String,
        open: OpenFlags,
        flags: DescriptorFlags,
    ) -> FsResult<Fd> {
        let request = OpenRequest {
            how,
            path,
            open,
            flags,
        };
        self.open(&fd, request).await
    }

    fn read_via_stream(&mut self, fd: Fd, offset: Filesize) -> FsResult<Resource<DynInputStream>> {
        let opened = self.descriptor(&fd)?;
        if let Descriptor::Dir(_) = opened.descriptor {
            return Err(ErrorCode::IsDirectory.into());
        }
        let (disk, permit) = (self.disk.clone(), self.fds.stream(&self.log)?);
        let input: DynInputStream = Box::new(FileInput::new(disk, opened, offset, permit));
        Ok(self.inner.table.push(input)?)
    }

    fn write_via_stream(
        &mut self,
        fd: Fd,
        offset: Filesize,
    ) -> FsResult<Resource<DynOutputStream>> {
        self.output(&fd, Some(offset))
    }

    fn append_via_stream(&mut self, fd: Fd) -> FsResult<Resource<DynOutputStream>> {
        self.output(&fd, None)
    }

    /// The file is closed once its streams and the operations that are under way no longer use it.
    fn drop(&mut self, fd: Fd) -> wasmtime::Result<()> {
        self.fds.remove(&fd);
        self.inner
            .table
            .delete(Resource::<SharedFile>::new_own(fd.rep()))?;
        Ok(())
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

#[cfg(test)]
mod tests;
