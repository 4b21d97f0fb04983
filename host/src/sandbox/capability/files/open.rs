//! Opens files and directories, and nothing else: opening a pipe waits for its other end, and opening a device may
//! wait for anything.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;

use cap_primitives::fs::{FollowSymlinks, OpenOptions, OpenOptionsExt as _, open as open_beneath};
use wasmtime_wasi::OpenMode;
use wasmtime_wasi::filesystem::{Descriptor, Dir, File as GuestFile};
use wasmtime_wasi::p2::FsResult;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    DescriptorFlags, ErrorCode, OpenFlags, PathFlags,
};

use super::closing::OnDisk;
use super::fds::{FdState, OpenFile};
use super::view::{Fd, Files};
use crate::sandbox::grants::quota::Size;

/// The arguments of `open-at`.
pub(super) struct OpenRequest {
    pub(super) how: PathFlags,
    pub(super) path: String,
    pub(super) open: OpenFlags,
    pub(super) flags: DescriptorFlags,
}

impl OpenRequest {
    /// True if opening may create or truncate something.
    fn changes(&self) -> bool {
        self.open
            .intersects(OpenFlags::CREATE | OpenFlags::TRUNCATE)
    }

    /// True if opening, or the descriptor, may change something.
    fn writes(&self) -> bool {
        self.changes() || self.flags.contains(DescriptorFlags::WRITE)
    }
}

impl Files<'_> {
    /// Opens an entry, within the maximum number of open files and the quota of the directory.
    pub(super) async fn open(&mut self, fd: &Fd, request: OpenRequest) -> FsResult<Fd> {
        self.check_granted(fd, &request.path, request.writes())?;
        let about = self.about(fd, &request.path, request.writes());
        let permit = self.count_one().await?;
        let (changes, quota, at) = (request.changes(), self.fds.quota(fd), self.descriptor(fd)?);
        let (how, open_flags) = (request.how, request.open);
        let mut growth = None;
        let mut before = Size::default();
        if changes {
            self.changes()?;
            before = self.size_at(fd, how, &request.path).await;
            if open_flags.contains(OpenFlags::CREATE) && before == Size::default() {
                growth = self.growth(fd, Size::one_file());
            }
        }
        let ledger = quota.as_ref().map(|quota| quota.ledger.clone());
        let disk = self.disk.clone();
        let work = move || {
            let opened = open(&at.descriptor, &request)?;
            let opened = OpenFile::new(opened, ledger, permit);
            FsResult::Ok(Arc::new(OnDisk::new(opened, disk)))
        };
        let at = about.path.clone();
        let opened = if changes {
            self.change(about, growth, work).await
        } else {
            let opened = self.disk.read(work).await;
            self.record_denial(&about, opened)
        };
        let opened = opened?;
        if let Some(quota) = &quota {
            if let Descriptor::File(file) = &opened.descriptor {
                quota.ledger.opened(&file.file);
            }
            if open_flags.contains(OpenFlags::TRUNCATE) {
                quota.ledger.freed(Size::bytes(before.bytes));
            }
        }
        let opened = self.push(opened)?;
        self.fds.insert(&opened, FdState { quota, at });
        Ok(opened)
    }
}

/// Like wasmtime-wasi's `open-at`, except that entries that are neither files nor directories are refused without
/// waiting.
fn open(at: &Descriptor, request: &OpenRequest) -> FsResult<Descriptor> {
    let dir = dir(at)?;
    let OpenRequest {
        how, open, flags, ..
    } = *request;
    let synced = DescriptorFlags::FILE_INTEGRITY_SYNC
        | DescriptorFlags::DATA_INTEGRITY_SYNC
        | DescriptorFlags::REQUESTED_WRITE_SYNC;
    if flags.intersects(synced) {
        return Err(ErrorCode::Unsupported.into());
    }
    let creates = OpenFlags::CREATE | OpenFlags::EXCLUSIVE | OpenFlags::TRUNCATE;
    if open.contains(OpenFlags::DIRECTORY) && open.intersects(creates) {
        return Err(ErrorCode::Invalid.into());
    }
    let writes = request.writes();
    // The system requires at least one kind of access: without flags for any, the entry is opened for reading.
    let reads = flags.contains(DescriptorFlags::READ) || !flags.contains(DescriptorFlags::WRITE);
    if writes && dir.perms.write_not_permitted() {
        return Err(ErrorCode::NotPermitted.into());
    }

    let mut options = OpenOptions::new();
    options
        .read(reads)
        .write(writes)
        .create(open.contains(OpenFlags::CREATE))
        .create_new(open.contains(OpenFlags::CREATE | OpenFlags::EXCLUSIVE))
        .truncate(open.contains(OpenFlags::TRUNCATE));
    let opened = opened(&dir.dir, &request.path, how, &mut options)?;

    let mut mode = OpenMode::empty();
    mode.set(OpenMode::READ, reads);
    mode.set(OpenMode::WRITE, writes);
    let kind = opened.metadata()?.file_type();
    if kind.is_dir() {
        Ok(Descriptor::Dir(Dir::new(opened, dir.perms, mode, true)))
    } else if open.contains(OpenFlags::DIRECTORY) {
        Err(ErrorCode::NotDirectory.into())
    } else {
        Ok(Descriptor::File(GuestFile::new(
            opened, dir.perms, mode, true,
        )))
    }
}

/// Opens an entry to set its times. A file can be opened for writing, a directory only for reading.
pub(super) fn for_times(at: &Descriptor, how: PathFlags, path: &str) -> FsResult<Descriptor> {
    let dir = dir(at)?;
    if dir.perms.write_not_permitted() {
        return Err(ErrorCode::NotPermitted.into());
    }
    let file = match opened(&dir.dir, path, how, OpenOptions::new().write(true)) {
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::IsADirectory | io::ErrorKind::PermissionDenied
            ) =>
        {
            opened(&dir.dir, path, how, OpenOptions::new().read(true))?
        }
        opened => opened?,
    };
    Ok(Descriptor::File(GuestFile::new(
        file,
        dir.perms,
        OpenMode::WRITE,
        true,
    )))
}

fn dir(at: &Descriptor) -> FsResult<&Dir> {
    match at {
        Descriptor::Dir(dir) => Ok(dir),
        Descriptor::File(_) => Err(ErrorCode::NotDirectory.into()),
    }
}

/// Opens a file or directory below `dir`. `O_NONBLOCK` prevents waiting, and has no effect on files and directories.
/// The type is checked after opening, because the name may mean something else a moment after a check.
fn opened(dir: &File, path: &str, how: PathFlags, options: &mut OpenOptions) -> io::Result<File> {
    let follow = match how.contains(PathFlags::SYMLINK_FOLLOW) {
        true => FollowSymlinks::Yes,
        false => FollowSymlinks::No,
    };
    options
        ._cap_fs_ext_follow(follow)
        .custom_flags(libc::O_NONBLOCK);
    let file = open_beneath(dir, Path::new(path), options).map_err(|error| {
        match error.raw_os_error() {
            // The entry is a socket, or a pipe without a reader.
            Some(libc::ENXIO) => not_supported(),
            Some(_) | None => error,
        }
    })?;
    let kind = file.metadata()?.file_type();
    match kind.is_file() || kind.is_dir() {
        true => Ok(file),
        false => Err(not_supported()),
    }
}

fn not_supported() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOTSUP)
}
