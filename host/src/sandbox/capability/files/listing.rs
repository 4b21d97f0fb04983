//! Directory listings. A few entries are read at a time, because a full list would take the host's memory, not the
//! guest's.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::sync::Arc;

use rustix::fs::{AtFlags, Dir, DirEntry, FileType, statat};
use tokio::sync::OwnedSemaphorePermit;
use wasmtime::component::Resource;
use wasmtime_wasi::p2::FsResult;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    Descriptor, DescriptorType, DirectoryEntry, DirectoryEntryStream, ErrorCode,
    HostDirectoryEntryStream,
};

use super::closing::OnDisk;
use super::view::{Fd, Files};

/// Entries that are read ahead: 10 KiB with names of ordinary length, 40 KiB with the longest. There are at most as
/// many listings as an attempt may have files open.
const AHEAD: usize = 128;

/// A directory listing.
struct Listing {
    /// `None` if everything was read, or a read is in progress.
    rest: Option<OnDisk<Rest>>,
    ahead: VecDeque<FsResult<DirectoryEntry>>,
    _permit: Arc<OwnedSemaphorePermit>,
}

/// The entries that have not been read yet.
struct Rest {
    dir: Dir,
    /// Counts the directory as open until it is closed.
    _permit: Arc<OwnedSemaphorePermit>,
}

impl Files<'_> {
    /// Starts to list a directory.
    pub(super) async fn list(&mut self, fd: &Fd) -> FsResult<Resource<DirectoryEntryStream>> {
        let opened = self.descriptor(fd)?;
        if let Descriptor::File(_) = opened.descriptor {
            return Err(ErrorCode::NotDirectory.into());
        }
        let permit = Arc::new(self.count_one().await?);
        let (disk, of_rest) = (self.disk.clone(), permit.clone());
        let rest = self.disk.read(move || {
            let dir = list(opened.file())?;
            let rest = Rest {
                dir,
                _permit: of_rest,
            };
            io::Result::Ok(OnDisk::new(rest, disk))
        });
        let listing = Listing {
            rest: Some(rest.await?),
            ahead: VecDeque::new(),
            _permit: permit,
        };
        let listing = self.inner.table.push(listing)?;
        // The guest has only a handle, which the two methods below resolve.
        Ok(Resource::new_own(listing.rep()))
    }
}

impl HostDirectoryEntryStream for Files<'_> {
    async fn read_directory_entry(
        &mut self,
        stream: Resource<DirectoryEntryStream>,
    ) -> FsResult<Option<DirectoryEntry>> {
        let stream = Resource::<Listing>::new_borrow(stream.rep());
        let listing = self.inner.table.get_mut(&stream)?;
        if listing.ahead.is_empty()
            && let Some(mut rest) = listing.rest.take()
        {
            let read = self.disk.read(move || {
                let (more, ahead) = next(&mut rest.dir);
                (more.then_some(rest), ahead)
            });
            let (rest, ahead) = read.await;
            let listing = self.inner.table.get_mut(&stream)?;
            (listing.rest, listing.ahead) = (rest, ahead);
        }
        let listing = self.inner.table.get_mut(&stream)?;
        listing.ahead.pop_front().transpose()
    }

    fn drop(&mut self, stream: Resource<DirectoryEntryStream>) -> wasmtime::Result<()> {
        let stream = Resource::<Listing>::new_own(stream.rep());
        self.inner.table.delete(stream)?;
        Ok(())
    }
}

/// Opens a listing with a position of its own.
fn list(dir: &File) -> io::Result<Dir> {
    Ok(Dir::read_from(dir)?)
}

/// Reads the next entries. Returns true if there may be more.
fn next(rest: &mut Dir) -> (bool, VecDeque<FsResult<DirectoryEntry>>) {
    let mut ahead = VecDeque::new();
    while ahead.len() < AHEAD {
        match rest.read() {
            None => return (false, ahead),
            Some(Err(error)) => {
                ahead.push_back(Err(io::Error::from(error).into()));
                return (false, ahead);
            }
            Some(Ok(entry)) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
            Some(Ok(entry)) => ahead.push_back(entry_for_guest(rest, &entry)),
        }
    }
    (true, ahead)
}

fn entry_for_guest(dir: &Dir, entry: &DirEntry) -> FsResult<DirectoryEntry> {
    let kind = match entry.file_type() {
        // Some file systems do not report the type here.
        FileType::Unknown => kind(dir, entry)?,
        known => known,
    };
    let type_ = match kind {
        FileType::RegularFile => DescriptorType::RegularFile,
        FileType::Directory => DescriptorType::Directory,
        FileType::Symlink => DescriptorType::SymbolicLink,
        FileType::CharacterDevice => DescriptorType::CharacterDevice,
        FileType::BlockDevice => DescriptorType::BlockDevice,
        FileType::Fifo | FileType::Socket | FileType::Unknown => DescriptorType::Unknown,
    };
    let name = entry.file_name().to_str();
    let name = name.map_err(|_| ErrorCode::IllegalByteSequence)?.to_owned();
    Ok(DirectoryEntry { type_, name })
}

fn kind(dir: &Dir, entry: &DirEntry) -> io::Result<FileType> {
    let stat = statat(dir.fd()?, entry.file_name(), AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(FileType::from_raw_mode(stat.st_mode))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn list_each_entry_once_in_several_reads() {
        let dir = tempfile::tempdir().unwrap();
        let count = 3 * AHEAD + 7;
        for n in 0..count {
            File::create(dir.path().join(n.to_string())).unwrap();
        }
        let mut rest = list(&File::open(dir.path()).unwrap()).unwrap();
        let (mut names, mut is_more) = (BTreeSet::new(), true);
        while is_more {
            let (more, ahead) = next(&mut rest);
            assert!(ahead.len() <= AHEAD);
            for entry in ahead {
                let entry = entry.unwrap();
                assert_eq!(entry.type_, DescriptorType::RegularFile);
                assert!(names.insert(entry.name), "once");
            }
            is_more = more;
        }
        assert_eq!(names.len(), count);
    }
}
