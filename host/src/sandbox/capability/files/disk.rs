//! File operations on threads that may block.
//!
//! wasmtime-wasi would choose such a thread automatically, but would neither check for the abort between the wait for
//! the thread and the operation, nor count its CPU time. So its descriptors are set to allow blocking, and are used on
//! threads chosen here.

use std::pin::pin;
use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use wasmtime::component::{Resource, ResourceTable};
use wasmtime_wasi::filesystem::{Descriptor, WasiFilesystemCtx, WasiFilesystemCtxView};
use wasmtime_wasi::runtime::{
    AbortOnDropJoinHandle, poll_noop, spawn, spawn_blocking, with_ambient_tokio_runtime,
};

use super::closing::Closings;
use super::fds::SharedFile;
use crate::sandbox::AbortHandle;
use crate::sandbox::attempt::meter::Meter;

/// The file operations of one attempt.
#[derive(Clone)]
pub(super) struct Disk {
    pub(super) abort: AbortHandle,
    pub(super) meter: Arc<Meter>,
    threads: Threads,
}

/// The maximum number of threads for one attempt. A guest waits for one operation at a time, except those of its
/// streams.
const THREADS_MAX: usize = 4;

/// The maximum number of threads for all attempts of the host. On a mount that does not respond, an operation keeps its
/// thread even if its attempt was stopped. The runtime has 512 such threads: the others are left for everything else
/// that needs one, such as name lookups, which therefore never wait for a disk.
const THREADS_OF_HOST_MAX: usize = 256;

static THREADS_OF_HOST: Semaphore = Semaphore::const_new(THREADS_OF_HOST_MAX);

/// The threads that an attempt may take, within those of the host. On a slow disk, an operation keeps its thread for
/// long, even if the guest has dropped its stream.
#[derive(Clone)]
pub(super) struct Threads {
    all: Arc<Semaphore>,
    /// An attempt makes one change at a time, because changes wait for the measurement of their directory.
    change: Arc<Semaphore>,
    of_host: &'static Semaphore,
    closings: Closings,
}

/// The permits for one thread: of the attempt and of the host.
type Permits = (OwnedSemaphorePermit, SemaphorePermit<'static>);

impl Default for Threads {
    fn default() -> Self {
        Self::within(&THREADS_OF_HOST)
    }
}

impl Threads {
    /// The threads of one attempt. All attempts together take no more than `of_host`.
    fn within(of_host: &'static Semaphore) -> Self {
        Self {
            all: Arc::new(Semaphore::new(THREADS_MAX)),
            change: Arc::new(Semaphore::new(1)),
            of_host,
            closings: Closings::default(),
        }
    }

    /// The files of the attempt that are being closed.
    pub(super) fn closings(&self) -> &Closings {
        &self.closings
    }

    fn try_take(&self) -> Option<Permits> {
        let own = self.all.clone().try_acquire_owned().ok()?;
        Some((own, self.of_host.try_acquire().ok()?))
    }

    /// Waits for a thread. The own limit comes first: an attempt that waits there keeps nothing from others.
    async fn take(&self) -> Permits {
        let own = self.all.clone().acquire_owned().await;
        let of_host = self.of_host.acquire().await;
        (
            own.expect("it is never closed"),
            of_host.expect("it is never closed"),
        )
    }
}

impl Disk {
    /// `threads`: the same for all calls of an attempt.
    pub(super) fn new(abort: AbortHandle, meter: Arc<Meter>, threads: Threads) -> Self {
        Self {
            abort,
            meter,
            threads,
        }
    }

    /// Runs an operation that changes nothing, as soon as the attempt may take a thread. Its CPU time counts as CPU
    /// time of the attempt. An operation whose result is dropped while it waits for a thread is not run.
    pub(super) fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> AbortOnDropJoinHandle<T> {
        let (meter, threads) = (self.meter.clone(), self.threads.clone());
        let run = move |permits: Permits| {
            spawn_blocking(move || {
                // The thread keeps the permits even if the guest no longer waits for it.
                let _permits = permits;
                meter.measure(work)
            })
        };
        match threads.try_take() {
            Some(permits) => run(permits),
            None => spawn(async move { run(threads.take().await).await }),
        }
    }

    /// Drops something that keeps a file open, as soon as the attempt may take a thread. Nobody has to wait for it.
    pub(super) fn close<T: Send + 'static>(&self, value: T) {
        let (meter, threads) = (self.meter.clone(), self.threads.clone());
        let closing = threads.closings.start();
        let close = move |permits: Permits| {
            // Unlike `AbortOnDropJoinHandle`, this does not end what waits for a thread.
            tokio::task::spawn_blocking(move || {
                // Dropped in reverse order.
                let _closing = closing;
                let _permits = permits;
                meter.measure(move || drop(value));
            });
        };
        with_ambient_tokio_runtime(move || match threads.try_take() {
            Some(permits) => close(permits),
            None => {
                tokio::task::spawn(async move { close(threads.take().await) });
            }
        });
    }

    /// Waits until all files are closed that the attempt no longer uses.
    pub(super) async fn closed(&self) {
        self.threads.closings.ended().await;
    }

    /// Counts a change, which may take a long time, and makes it. Does neither if the attempt has to stop before a
    /// thread is free. Does not make the change if the attempt has to stop while the change is being counted. Files
    /// that the guest has closed before are closed first, because removed ones take space until then.
    pub(super) fn change<C, T: Send + 'static>(
        &self,
        count: impl FnOnce() -> C + Send + 'static,
        change: impl FnOnce(C) -> T + Send + 'static,
    ) -> AbortOnDropJoinHandle<Option<T>> {
        let disk = self.clone();
        spawn(async move {
            disk.closed().await;
            let turn = disk.threads.change.clone().acquire_owned().await;
            let turn = turn.expect("it is never closed");
            let abort = disk.abort.clone();
            let changed = disk.read(move || {
                // The thread keeps the turn even if the guest no longer waits for it.
                let _turn = turn;
                if abort.reason().is_some() {
                    return None;
                }
                let counted = count();
                abort.reason().is_none().then(|| change(counted))
            });
            changed.await
        })
    }
}

/// Runs a wasmtime-wasi call with the descriptors of these files.
pub(super) fn with<const N: usize, T>(
    files: [&SharedFile; N],
    call: impl AsyncFnOnce(WasiFilesystemCtxView<'_>, [Resource<Descriptor>; N]) -> T,
) -> T {
    with_descriptors(files.map(|file| file.descriptor.clone()), call)
}

/// Runs a wasmtime-wasi call with these descriptors in a table of their own. They allow blocking, so the call has ended
/// when this returns.
pub(super) fn with_descriptors<const N: usize, T>(
    descriptors: [Descriptor; N],
    call: impl AsyncFnOnce(WasiFilesystemCtxView<'_>, [Resource<Descriptor>; N]) -> T,
) -> T {
    let (mut table, mut no_dirs) = (ResourceTable::new(), WasiFilesystemCtx::default());
    let fds = descriptors.map(|descriptor| {
        let fd = table.push(descriptor);
        fd.expect("the descriptors of one call fit into a table")
    });
    let view = WasiFilesystemCtxView {
        ctx: &mut no_dirs,
        table: &mut table,
    };
    let done = poll_noop(pin!(call(view, fds)));
    done.expect("a descriptor that allows blocking never suspends")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::mpsc;
    use std::time::Duration;

    use tokio::sync::oneshot;

    use super::*;
    use crate::job::AbortReason;

    /// The file operations of a new attempt.
    fn disk() -> Disk {
        Disk::new(AbortHandle::new(), Arc::default(), Threads::default())
    }

    #[tokio::test]
    async fn a_change_that_waited_for_a_thread_until_the_abort_is_never_made() {
        let disk = disk();
        // The runtime of this test has one blocking thread, which is busy.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .max_blocking_threads(1)
            .build()
            .unwrap();
        let made = Arc::new(AtomicBool::new(false));
        let (go, wait) = mpsc::channel::<()>();
        let (busy, change) = {
            let _entered = runtime.enter();
            let busy = disk.read(move || wait.recv());
            let made = made.clone();
            let change = disk.change(|| (), move |()| made.store(true, Ordering::SeqCst));
            (busy, change)
        };
        disk.abort
            .abort(AbortReason::TimedOut, Duration::from_secs(60));
        go.send(()).unwrap();
        assert_eq!(busy.await, Ok(()));
        assert_eq!(change.await, None);
        assert!(!made.load(Ordering::SeqCst));
        assert_eq!(disk.read(|| 7).await, 7, "reading still works");
        runtime.shutdown_background();
    }

    #[tokio::test]
    async fn a_change_is_not_made_if_the_attempt_is_aborted_while_it_is_counted() {
        let disk = disk();
        let abort = disk.abort.clone();
        let count = move || abort.abort(AbortReason::TimedOut, Duration::from_secs(60));
        assert_eq!(disk.change(count, |()| ()).await, None);
    }

    /// Runs a test on a runtime with this number of threads that may block.
    fn with_blocking_threads(max: usize, test: impl Future<Output = ()>) {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .max_blocking_threads(max)
            .build()
            .unwrap();
        runtime.block_on(test);
    }

    /// Lets an operation take a thread until what is returned is dropped. The guest has dropped its stream.
    async fn take_thread(disk: &Disk) -> mpsc::Sender<()> {
        let (started, starts) = oneshot::channel();
        let (go, wait) = mpsc::channel::<()>();
        let read = disk.read(move || {
            started.send(()).ok();
            wait.recv()
        });
        starts.await.expect("it is read");
        drop(read);
        go
    }

    #[test]
    fn an_attempt_takes_few_threads_even_if_it_no_longer_waits_for_them() {
        with_blocking_threads(THREADS_MAX + 1, async {
            let disk = disk();
            let mut waiting = Vec::new();
            for _ in 0..THREADS_MAX {
                waiting.push(take_thread(&disk).await);
            }

            let (ran, runs) = mpsc::channel();
            let one_more = disk.read(move || ran.send(()));
            tokio::task::yield_now().await;
            // The last thread would do it before this.
            let last = tokio::task::spawn_blocking(|| ());
            last.await.expect("it does not panic");
            assert_eq!(runs.try_recv(), Err(mpsc::TryRecvError::Empty));
            drop(waiting);
            assert_eq!(one_more.await, Ok(()));
        });
    }

    #[test]
    fn all_attempts_leave_threads_for_everything_else_and_one_that_waits_for_a_thread_can_be_stopped()
     {
        const OF_HOST: usize = 2 * THREADS_MAX;
        let of_host: &'static Semaphore = Box::leak(Box::new(Semaphore::new(OF_HOST)));
        with_blocking_threads(OF_HOST + 1, async {
            let attempt = || {
                let (abort, meter) = (AbortHandle::new(), Arc::default());
                Disk::new(abort, meter, Threads::within(of_host))
            };
            // Two attempts whose disk does not respond have taken all threads, and were stopped.
            let mut stuck = Vec::new();
            for _ in 0..2 {
                let disk = attempt();
                for _ in 0..THREADS_MAX {
                    stuck.push(take_thread(&disk).await);
                }
            }

            let other = attempt();
            let (ran, runs) = mpsc::channel();
            let stopped = other.read(move || ran.send(()));
            let waits = other.read(|| 7);
            tokio::task::yield_now().await;
            // The last thread would do them before this.
            let last = tokio::task::spawn_blocking(|| ());
            last.await.expect("it does not panic");
            assert_eq!(runs.try_recv(), Err(mpsc::TryRecvError::Empty));
            drop(stopped);
            drop(stuck);
            assert_eq!(waits.await, 7);
            // It was dropped before it could run.
            assert_eq!(runs.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        });
    }

    /// Waits when it is dropped, until it may continue.
    struct SlowToDrop(mpsc::Receiver<()>);

    impl Drop for SlowToDrop {
        fn drop(&mut self) {
            // An error means that the test has failed.
            self.0.recv().ok();
        }
    }

    #[test]
    fn a_change_waits_for_files_that_were_closed_before() {
        // One thread for the close, and one more.
        with_blocking_threads(2, async {
            let disk = disk();
            let (go, wait) = mpsc::channel::<()>();
            disk.close(SlowToDrop(wait));
            let (counted, counts) = mpsc::channel();
            let change = disk.change(move || counted.send(()), |_| ());
            tokio::task::yield_now().await;
            // The other thread would do the change before this.
            disk.read(|| ()).await;
            assert_eq!(counts.try_recv(), Err(mpsc::TryRecvError::Empty));
            go.send(()).expect("the file is being closed");
            assert_eq!(change.await, Some(()));
            assert_eq!(counts.try_recv(), Ok(()));
        });
    }

    #[test]
    fn files_are_closed_even_if_all_threads_of_the_attempt_are_taken_until_after_its_end() {
        with_blocking_threads(THREADS_MAX + 1, async {
            let disk = disk();
            let mut waiting = Vec::new();
            for _ in 0..THREADS_MAX {
                waiting.push(take_thread(&disk).await);
            }
            let (dropped, drops) = oneshot::channel::<()>();
            disk.close(dropped);
            let closings = disk.threads.closings().clone();
            drop(disk);
            tokio::task::yield_now().await;
            drop(waiting);
            closings.ended().await;
            assert!(drops.await.is_err(), "it was dropped");
        });
    }

    #[tokio::test]
    async fn file_operations_count_towards_the_cpu_time_of_the_attempt() {
        let (abort, meter) = (AbortHandle::new(), Arc::<Meter>::default());
        let (max, counted) = (Duration::from_millis(5), meter.clone());
        let disk = Disk::new(abort, meter, Threads::default());
        let started = std::time::Instant::now();
        while counted.usage().cpu < max {
            assert!(
                started.elapsed() < Duration::from_secs(60),
                "CPU time is counted"
            );
            let sum = disk.read(|| (0..1_000_000_u64).map(std::hint::black_box).sum::<u64>());
            assert_eq!(sum.await, 499_999_500_000);
        }
    }
}
