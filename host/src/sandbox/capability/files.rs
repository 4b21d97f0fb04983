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

use self::closing::OnDisk;
use self::disk::{Disk, Threads, with, with_descriptors};
use self::fds::{FdState, InQuota, OpenFile, SharedFile};
use self::input::FileInput;
use self::open::OpenRequest;
use self::outside::{ROOT, nowhere};
use self::view::{Fd, Files};
use crate::job::RunEnd;
use crate::sandbox::AbortHandle;
use crate::sandbox::attempt::meter::Meter;
use crate::sandbox::attempt::state::AttemptState;
use crate::sandbox::grants::Granted;
use crate::sandbox::grants::quota::Size;

pub(in crate::sandbox) use self::closing::Closings;
pub(in crate::sandbox) use self::fds::Fds;
pub(in crate::sandbox) use self::outside::OutsidePaths;

/// Shadows the file functions that wasmtime-wasi has linked, so that guests call the guard.
pub(in crate::sandbox) fn guard_files(linker: &mut Linker<AttemptState>) -> wasmtime::Result<()> {
    linker.allow_shadowing(true);
    add_to_linker::<AttemptState, GuardedFiles>(linker, files)?;
    preopens::add_to_linker::<AttemptState, GuardedFiles>(linker, files)?;
    linker.allow_shadowing(false);
    Ok(())
}

/// Opens the granted directories that have never been opened, on a thread that may block. Returns the end of the
/// attempt if one cannot be opened, or if the attempt is stopped first.
pub(in crate::sandbox) async fn open_granted(
    granted: &Arc<Granted>,
    abort: &AbortHandle,
    meter: &Arc<Meter>,
) -> Option<RunEnd> {
    if granted.is_open() {
        return None;
    }
    let disk = Disk::new(abort.clone(), meter.clone(), Threads::default());
    let granted = granted.clone();
    tokio::select! {
        biased;
        opened = disk.read(move || granted.open()) => opened.err().map(RunEnd::Unrunnable),
        reason = abort.hard_stopped() => Some(RunEnd::Aborted(reason)),
    }
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
        let changes = OpenRequest::changes_with(open) || flags.contains(DescriptorFlags::WRITE);
        self.check_granted(&fd, &path, changes)?;
        let about = self.about(&fd, &path, changes);
        let permit = self.count_one().await?;
        let request = OpenRequest {
            how,
            path,
            open,
            flags,
        };
        let (changes, quota, at) = (
            request.changes(),
            self.fds.quota(&fd),
            self.descriptor(&fd)?,
        );
        let mut growth = None;
        let mut before = Size::default();
        if changes {
            self.changes()?;
            before = self.size_at(&fd, how, &request.path).await;
            if open.contains(OpenFlags::CREATE) && before == Size::default() {
                growth = self.growth(&fd, Size::one_file());
            }
        }
        let ledger = quota.as_ref().map(|quota| quota.ledger.clone());
        let disk = self.disk.clone();
        let work = move || {
            let opened = open::open(&at.descriptor, &request)?;
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
            if open.contains(OpenFlags::TRUNCATE) {
                quota.ledger.freed(Size::bytes(before.bytes));
            }
        }
        let opened = self.push(opened)?;
        self.fds.insert(&opened, FdState { quota, at });
        Ok(opened)
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

impl preopens::Host for Files<'_> {
    fn get_directories(&mut self) -> wasmtime::Result<Vec<(Fd, String)>> {
        let mut preopens = Vec::with_capacity(self.granted.dirs.len() + 1);
        let granted = self.granted.clone();
        for dir in &granted.dirs {
            let opened = dir.opened().map_err(wasmtime::Error::msg)?;
            let fd = self.push(OpenFile::held_by_host(Descriptor::Dir(opened)))?;
            let quota = dir
                .grant
                .quota
                .zip(dir.ledger.clone())
                .map(|(quota, ledger)| {
                    Arc::new(InQuota::new(ledger, quota, &dir.grant.at, self.log.clone()))
                });
            let at = dir.grant.at.clone();
            let state = FdState {
                quota,
                at: at.clone(),
            };
            self.fds.insert(&fd, state);
            preopens.push((fd, at));
        }
        // The root comes last, because guests rely on the numbers of the directories before it. Libraries use it for
        // every path outside those directories; without it, they would not call the host at all.
        if let Some(nowhere) = nowhere() {
            let fd = self.push(OpenFile::held_by_host(Descriptor::Dir(nowhere)))?;
            self.fds.insert_root(&fd);
            preopens.push((fd, ROOT.to_owned()));
        }
        Ok(preopens)
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
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::sync::Weak;
    use std::sync::mpsc::{self, TryRecvError};
    use std::time::Duration;

    use tokio::runtime::Builder;
    use tokio::sync::oneshot;

    use super::*;
    use crate::job::AbortReason;
    use crate::sandbox::Limits;
    use crate::sandbox::attempt::memory::{AttemptLimiter, MemoryBudget};
    use crate::sandbox::attempt::state::PerAttempt;
    use crate::sandbox::grants::{Grant, GrantedDir, Mode, Root};

    /// The grant of this directory, at `/work`.
    fn granted(dir: &Path) -> Arc<Granted> {
        let grant = Grant {
            handler: "x".into(),
            dir: dir.into(),
            at: "/work".into(),
            mode: Mode::ReadWrite,
            quota: None,
        };
        let dir = GrantedDir {
            root: Root::new(dir),
            grant,
            ledger: None,
        };
        Arc::new(Granted {
            dirs: vec![dir],
            ..Granted::default()
        })
    }

    /// The state of an attempt that may use this directory, and its descriptor. At most `files_max` files may be open.
    fn attempt_with(dir: &Path, files_max: usize) -> (AttemptState, Fd) {
        let limits = Limits {
            files: files_max,
            ..Limits::default()
        };
        let limiter = AttemptLimiter::new(&limits, MemoryBudget::new(0));
        let of = PerAttempt::placeholder();
        let state = AttemptState::new(granted(dir), Arc::default(), &limits, limiter, of);
        let mut state = state.expect("the directory exists");
        let dirs = preopens::Host::get_directories(&mut files(&mut state));
        let (dir, _) = dirs.expect("it is open").swap_remove(0);
        (state, dir)
    }

    async fn create(state: &mut AttemptState, dir: &Fd, name: &str) -> FsResult<Fd> {
        let flags = DescriptorFlags::READ | DescriptorFlags::WRITE;
        let (how, name) = (PathFlags::empty(), name.to_owned());
        let mut files = files(state);
        let created = files.open_at(borrowed(dir), how, name, OpenFlags::CREATE, flags);
        created.await
    }

    /// Watches whether a file is open.
    fn watch(state: &mut AttemptState, fd: &Fd) -> Weak<File> {
        match &files(state).raw(fd).expect("it is open").descriptor {
            Descriptor::File(file) => Arc::downgrade(&file.file),
            Descriptor::Dir(_) => unreachable!("it was created as a file"),
        }
    }

    /// A runtime with one thread that may block.
    fn one_blocking_thread() -> tokio::runtime::Runtime {
        let mut runtime = Builder::new_current_thread();
        let runtime = runtime.max_blocking_threads(1).enable_time().build();
        runtime.expect("a runtime for the test")
    }

    #[test]
    fn files_are_closed_on_a_thread_that_may_block_by_the_guest_and_with_its_instance() {
        let dir = tempfile::tempdir().unwrap();
        one_blocking_thread().block_on(async {
            let (mut state, at) = attempt_with(dir.path(), 3);
            let closed = create(&mut state, &at, "a").await.unwrap();
            let left_open = create(&mut state, &at, "b").await.unwrap();
            let one = watch(&mut state, &closed);
            let other = watch(&mut state, &left_open);
            let streamed = create(&mut state, &at, "c").await.unwrap();
            let third = watch(&mut state, &streamed);
            let stream = files(&mut state).append_via_stream(borrowed(&streamed));
            let _stream = stream.unwrap();
            HostDescriptor::drop(&mut files(&mut state), streamed).unwrap();

            // The thread is busy, so nothing can be closed.
            let (go, wait) = mpsc::channel::<()>();
            let busy = files(&mut state).disk.read(move || wait.recv());
            HostDescriptor::drop(&mut files(&mut state), closed).unwrap();
            assert!(one.strong_count() > 0);
            let closings = state.closings().expect("files were open");
            drop(state);
            assert!(other.strong_count() > 0 && third.strong_count() > 0);
            go.send(()).expect("the thread waits");
            assert_eq!(busy.await, Ok(()));
            let abort = AbortHandle::new();
            assert_eq!(closings.ended_or_stopped(&abort).await, None);
            let open = [one, other, third].map(|file| file.strong_count());
            assert_eq!(open, [0, 0, 0]);
        });
    }

    #[test]
    fn a_file_that_is_being_closed_makes_room_for_another() {
        let dir = tempfile::tempdir().unwrap();
        one_blocking_thread().block_on(async {
            let (mut state, at) = attempt_with(dir.path(), 1);
            let first = create(&mut state, &at, "a").await.unwrap();
            let (go, wait) = mpsc::channel::<()>();
            let busy = files(&mut state).disk.read(move || wait.recv());
            HostDescriptor::drop(&mut files(&mut state), first).unwrap();
            let (second, sent) = tokio::join!(create(&mut state, &at, "b"), async { go.send(()) });
            assert!(second.is_ok() && sent.is_ok());
            assert_eq!(busy.await, Ok(()));
            assert!(create(&mut state, &at, "c").await.is_err());
        });
    }

    #[test]
    fn an_attempt_that_waits_for_a_granted_directory_can_be_stopped() {
        let dir = tempfile::tempdir().unwrap();
        one_blocking_thread().block_on(async {
            let (granted, meter) = (granted(dir.path()), Arc::default());
            let (abort, stopped) = (AbortHandle::new(), AbortHandle::new());
            stopped.abort(AbortReason::TimedOut, Duration::ZERO);
            let disk = Disk::new(abort.clone(), Arc::clone(&meter), Threads::default());
            let (go, wait) = mpsc::channel::<()>();
            let busy = disk.read(move || wait.recv());
            let end = open_granted(&granted, &stopped, &meter).await;
            assert_eq!(end, Some(RunEnd::Aborted(AbortReason::TimedOut)));
            assert!(!granted.is_open());
            go.send(()).expect("the thread waits");
            assert_eq!(busy.await, Ok(()));
            assert_eq!(open_granted(&granted, &abort, &meter).await, None);
            assert!(granted.is_open());
        });
    }

    #[test]
    fn an_attempt_changes_one_thing_at_a_time_even_if_it_no_longer_waits_for_the_first() {
        // One thread for the first change, and one more.
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(2)
            .build()
            .unwrap();
        runtime.block_on(async {
            let limits = Limits::default();
            let limiter = AttemptLimiter::new(&limits, MemoryBudget::new(0));
            let of = PerAttempt::placeholder();
            let state = AttemptState::new(Arc::default(), Arc::default(), &limits, limiter, of);
            let mut state = state.expect("it has no directories");

            let (started, starts) = oneshot::channel();
            let (go, wait) = mpsc::channel::<()>();
            let count = move || {
                started.send(()).ok();
                wait.recv()
            };
            let first = files(&mut state).disk.change(count, |_| ());
            starts.await.expect("the first change is being counted");
            // The guest drops its stream.
            drop(first);

            let (counted, counts) = mpsc::channel();
            let count = move || counted.send(());
            let second = files(&mut state).disk.change(count, |_| ());
            tokio::task::yield_now().await;
            // The other thread would do the second change before this.
            files(&mut state).disk.read(|| ()).await;
            assert_eq!(counts.try_recv(), Err(TryRecvError::Empty));
            go.send(()).expect("the first change is being counted");
            assert_eq!(second.await, Some(()));
            assert_eq!(counts.try_recv(), Ok(()));
        });
    }
}
