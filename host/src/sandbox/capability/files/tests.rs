use std::fs::File;
use std::path::Path;
use std::sync::Weak;
use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::sync::oneshot;

use super::disk::Threads;
use super::*;
use crate::job::{AbortReason, RunEnd};
use crate::sandbox::AbortHandle;
use crate::sandbox::Limits;
use crate::sandbox::attempt::memory::{AttemptLimiter, MemoryBudget};
use crate::sandbox::attempt::state::PerAttempt;
use crate::sandbox::grants::{Grant, Granted, GrantedDir, Mode, Root};

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
