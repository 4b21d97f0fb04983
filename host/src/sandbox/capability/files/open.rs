//! Opening files and directories, and nothing else: who opens a pipe waits for its other end, and who opens a device may wait for
//! anything.

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

/// What a guest asks for, with the words of `open-at`.
pub(super) struct Ask {
    pub(super) how: PathFlags,
    pub(super) path: String,
    pub(super) open: OpenFlags,
    pub(super) flags: DescriptorFlags,
}

impl Ask {
    /// True where something may be made or cut off by opening it.
    pub(super) fn changes(&self) -> bool {
        Self::changes_with(self.open)
    }

    /// The same of these words.
    pub(super) fn changes_with(open: OpenFlags) -> bool {
        open.intersects(OpenFlags::CREATE | OpenFlags::TRUNCATE)
    }
}

/// As wasmtime-wasi's own, but for things that are neither file nor directory, which are refused without a wait.
pub(super) fn open(at: &Descriptor, ask: &Ask) -> FsResult<Descriptor> {
    let dir = dir(at)?;
    let Ask {
        how, open, flags, ..
    } = *ask;
    let synced = DescriptorFlags::FILE_INTEGRITY_SYNC
        | DescriptorFlags::DATA_INTEGRITY_SYNC
        | DescriptorFlags::REQUESTED_WRITE_SYNC;
    if flags.intersects(synced) {
        return Err(ErrorCode::Unsupported.into());
    }
    let makes = OpenFlags::CREATE | OpenFlags::EXCLUSIVE | OpenFlags::TRUNCATE;
    if open.contains(OpenFlags::DIRECTORY) && open.intersects(makes) {
        return Err(ErrorCode::Invalid.into());
    }
    let writes = ask.changes() || flags.contains(DescriptorFlags::WRITE);
    // Where nothing is asked for, it is opened for reading, and the descriptor knows better.
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
    let opened = opened(&dir.dir, &ask.path, how, &mut options)?;

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

/// Opens something whose times are to be set. Files and directories can be opened for writing or for reading.
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

/// A file or directory beneath this one. Who opens something with `O_NONBLOCK` waits for nothing, and of files and directories it
/// changes nothing; that it is one is looked at when it is open, because a name could mean something else a moment later.
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
            // A socket, or a pipe that nobody reads.
            Some(libc::ENXIO) => neither(),
            Some(_) | None => error,
        }
    })?;
    let kind = file.metadata()?.file_type();
    match kind.is_file() || kind.is_dir() {
        true => Ok(file),
        false => Err(neither()),
    }
}

fn neither() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOTSUP)
}
