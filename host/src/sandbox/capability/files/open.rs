//! Opens files and directories, and nothing else: opening a pipe waits for its other end, and opening a device may
//! wait for anything.

use std::fs::File;
use std::io;
use std::path::Path;

use cap_primitives::fs::{FollowSymlinks, OpenOptions, OpenOptionsExt as _, open as open_beneath};
use wasmtime_wasi::OpenMode;
use wasmtime_wasi::filesystem::{Descriptor, Dir, File as GuestFile};
use wasmtime_wasi::p2::FsResult;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    DescriptorFlags, ErrorCode, OpenFlags, PathFlags,
};

/// The arguments of `open-at`.
pub(super) struct OpenRequest {
    pub(super) how: PathFlags,
    pub(super) path: String,
    pub(super) open: OpenFlags,
    pub(super) flags: DescriptorFlags,
}

impl OpenRequest {
    /// True if opening may create or truncate something.
    pub(super) fn changes(&self) -> bool {
        Self::changes_with(self.open)
    }

    /// True if these flags may create or truncate something.
    pub(super) fn changes_with(open: OpenFlags) -> bool {
        open.intersects(OpenFlags::CREATE | OpenFlags::TRUNCATE)
    }
}

/// Like wasmtime-wasi's `open-at`, except that entries that are neither files nor directories are refused without
/// waiting.
pub(super) fn open(at: &Descriptor, request: &OpenRequest) -> FsResult<Descriptor> {
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
    let writes = request.changes() || flags.contains(DescriptorFlags::WRITE);
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
