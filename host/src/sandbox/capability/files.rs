//! `wasi:filesystem/types`: files in granted directories, unchangeable once the attempt has to stop.
//!
//! wasmtime-wasi does the work; this stands before it so that an attempt which may have lost its
//! lease changes nothing any more, not even through a stream that it opened before.

use bytes::Bytes;
use wasmtime::component::{HasData, Linker, Resource};
use wasmtime_wasi::async_trait;
use wasmtime_wasi::filesystem::WasiFilesystemCtxView;
use wasmtime_wasi::p2::bindings::filesystem::types::{
    Advice, Descriptor, DescriptorFlags, DescriptorStat, DescriptorType, DirectoryEntry,
    DirectoryEntryStream, ErrorCode, Filesize, Host, HostDescriptor, HostDirectoryEntryStream,
    MetadataHashValue, NewTimestamp, OpenFlags, PathFlags, add_to_linker,
};
use wasmtime_wasi::p2::{
    DynInputStream, DynOutputStream, FsError, FsResult, OutputStream, Pollable, StreamError,
    StreamResult,
};

use crate::sandbox::AbortHandle;
use crate::sandbox::state::AttemptState;

/// Puts the guard before the files that wasmtime-wasi has linked.
pub(in crate::sandbox) fn guard_files(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    add_to_linker::<AttemptState, GuardedFiles>(linker, |state| {
        state.meter.called();
        let abort = state.abort.clone();
        let (inner, denial) = state.files();
        Files {
            abort,
            inner,
            denial,
        }
    })?;
    linker.allow_shadowing(false);
    Ok(())
}

/// Both are the operator's to change, so the lines say what stands in rouse.toml.
const DENIAL: &str = "the handler did something to a file that is not permitted: directories are granted for \
                      reading only unless rouse.toml has mode = \"read-write\" there, and no path leads out of them";

struct GuardedFiles;

impl HasData for GuardedFiles {
    type Data<'a> = Files<'a>;
}

struct Files<'a> {
    abort: AbortHandle,
    inner: WasiFilesystemCtxView<'a>,
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
            *self.denial = Some(DENIAL.into());
        }
        done
    }

    fn guard(&mut self, stream: Resource<DynOutputStream>) -> FsResult<Resource<DynOutputStream>> {
        let inner = self.inner.table.delete(stream)?;
        let abort = self.abort.clone();
        let guarded: DynOutputStream = Box::new(GuardedStream { inner, abort });
        Ok(self.inner.table.push(guarded)?)
    }
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
        fn create_directory_at(fd: Fd, path: String) -> FsResult<()>;
        fn link_at(
            fd: Fd,
            how: PathFlags,
            path: String,
            new_dir: Fd,
            new_path: String
        ) -> FsResult<()>;
        fn remove_directory_at(fd: Fd, path: String) -> FsResult<()>;
        fn rename_at(fd: Fd, path: String, new_dir: Fd, new_path: String) -> FsResult<()>;
        fn set_size(fd: Fd, bytes: Filesize) -> FsResult<()>;
        fn set_times(fd: Fd, accessed: NewTimestamp, modified: NewTimestamp) -> FsResult<()>;
        fn set_times_at(
            fd: Fd,
            how: PathFlags,
            path: String,
            accessed: NewTimestamp,
            modified: NewTimestamp
        ) -> FsResult<()>;
        fn symlink_at(fd: Fd, path: String, new_path: String) -> FsResult<()>;
        fn unlink_file_at(fd: Fd, path: String) -> FsResult<()>;
        fn write(fd: Fd, bytes: Vec<u8>, offset: Filesize) -> FsResult<Filesize>;
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
        let opened = self.inner.open_at(fd, how, path, open, flags).await;
        self.noted(opened)
    }

    fn read_via_stream(&mut self, fd: Fd, offset: Filesize) -> FsResult<Resource<DynInputStream>> {
        self.inner.read_via_stream(fd, offset)
    }

    fn write_via_stream(
        &mut self,
        fd: Fd,
        offset: Filesize,
    ) -> FsResult<Resource<DynOutputStream>> {
        let stream = self.inner.write_via_stream(fd, offset)?;
        self.guard(stream)
    }

    fn append_via_stream(&mut self, fd: Fd) -> FsResult<Resource<DynOutputStream>> {
        let stream = self.inner.append_via_stream(fd)?;
        self.guard(stream)
    }

    fn drop(&mut self, fd: Fd) -> wasmtime::Result<()> {
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

/// A stream into a file; closed once the attempt has to stop.
struct GuardedStream {
    inner: DynOutputStream,
    abort: AbortHandle,
}

impl GuardedStream {
    fn open(&self) -> StreamResult<()> {
        match self.abort.reason() {
            Some(_) => Err(StreamError::Closed),
            None => Ok(()),
        }
    }
}

#[async_trait]
impl Pollable for GuardedStream {
    async fn ready(&mut self) {
        self.inner.ready().await;
    }
}

#[async_trait]
impl OutputStream for GuardedStream {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        self.open()?;
        self.inner.write(bytes)
    }

    // What was written before may still go to the disk.
    fn flush(&mut self) -> StreamResult<()> {
        self.inner.flush()
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        self.open()?;
        self.inner.check_write()
    }

    async fn cancel(&mut self) {
        self.inner.cancel().await;
    }
}
