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

use super::view::{Fd, Files};

/// Entries that are read ahead: 10 KiB with names of ordinary length, 40 KiB with the longest. There are at most as
/// many listings as an attempt may have files open.
const AHEAD: usize = 128;

/// A directory listing.
struct Listing {
    /// `None` if everything was read, or a read is in progress.
    rest: Option<Dir>,
    ahead: VecDeque<FsResult<DirectoryEntry>>,
    _open: Arc<OwnedSemaphorePermit>,
}

impl Listing {
    fn new(rest: Dir, open: Arc<OwnedSemaphorePermit>) -> Self {
        Self {
            rest: Some(rest),
            ahead: VecDeque::new(),
            _open: open,
        }
    }
}

impl Files<'_> {
    /// Starts to list a directory.
    pub(super) async fn list(&mut self, fd: &Fd) -> FsResult<Resource<DirectoryEntryStream>> {
        let Descriptor::Dir(dir) = self.descriptor(fd)? else {
            return Err(ErrorCode::NotDirectory.into());
        };
        let open = self.fds.count_one(&self.log)?;
        let rest = self.disk.read(move || list(&dir.dir)).await?;
        let listing = self.inner.table.push(Listing::new(rest, open))?;
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
            && let Some(rest) = listing.rest.take()
        {
            let (rest, ahead) = self.disk.read(move || next(rest)).await;
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

/// Reads the next entries, and returns the rest of the listing if there may be more.
fn next(mut rest: Dir) -> (Option<Dir>, VecDeque<FsResult<DirectoryEntry>>) {
    let mut ahead = VecDeque::new();
    while ahead.len() < AHEAD {
        match rest.read() {
            None => return (None, ahead),
            Some(Err(error)) => {
                ahead.push_back(Err(io::Error::from(error).into()));
                return (None, ahead);
            }
            Some(Ok(entry)) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
            Some(Ok(entry)) => ahead.push_back(entry_for_guest(&rest, &entry)),
        }
    }
    (Some(rest), ahead)
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
        let mut rest = Some(list(&File::open(dir.path()).unwrap()).unwrap());
        let mut names = BTreeSet::new();
        while let Some(dir) = rest {
            let (left, ahead) = next(dir);
            assert!(ahead.len() <= AHEAD);
            for entry in ahead {
                let entry = entry.unwrap();
                assert_eq!(entry.type_, DescriptorType::RegularFile);
                assert!(names.insert(entry.name), "once");
            }
            rest = left;
        }
        assert_eq!(names.len(), count);
    }
}
