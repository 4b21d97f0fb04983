//! What a guest uses, counted while it runs.
//!
//! CPU time is counted by poll, because a guest moves between threads.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::job::Usage;

/// What one attempt has used so far. Whoever runs it may look at any time.
#[derive(Debug, Default)]
pub struct Meter {
    cpu_ns: AtomicU64,
    memory_bytes: AtomicU64,
    host_calls: AtomicU32,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Meter {
    /// What has been used so far.
    pub fn usage(&self) -> Usage {
        Usage {
            cpu: Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed)),
            memory_bytes_peak: self.memory_bytes.load(Ordering::Relaxed),
            host_calls: self.host_calls.load(Ordering::Relaxed),
            bytes_in: self.bytes_in.load(Ordering::Relaxed),
            bytes_out: self.bytes_out.load(Ordering::Relaxed),
        }
    }

    fn computed(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.cpu_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Does this, and counts its CPU time: for what is not polled.
    pub(in crate::sandbox) fn computing<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = thread_cpu();
        let done = work();
        self.computed(thread_cpu().saturating_sub(before));
        done
    }

    fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }

    /// Linear memory never shrinks, so this is the peak too.
    pub(in crate::sandbox) fn has_memory(&self, bytes: usize) {
        self.memory_bytes.store(bytes as u64, Ordering::Relaxed);
    }

    /// Something of the host was asked for.
    pub(in crate::sandbox) fn called(&self) {
        self.host_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes came over the network.
    pub(in crate::sandbox) fn received(&self, bytes: usize) {
        self.bytes_in.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes went over the network.
    pub(in crate::sandbox) fn sent(&self, bytes: usize) {
        self.bytes_out.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Awaits a call and counts the CPU time of its polls; none when the meter shows more than `cpu_max`. A guest that
/// computes is polled at each tick, so that it is given up at the first one after.
pub(in crate::sandbox) async fn within_cpu<F: Future>(
    mut call: Pin<&mut F>,
    meter: &Meter,
    cpu_max: Duration,
) -> Option<F::Output> {
    poll_fn(
        |context| match poll_metered(call.as_mut(), context, meter) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if meter.cpu() > cpu_max => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        },
    )
    .await
}

/// A poll of at most this long is taken to have computed all the time. Asking the kernel for a
/// thread's CPU time is a system call of 0.5 µs, wall time is read in 0.03 µs, and a guest
/// that returns at once is polled for some microseconds. Where the kernel lets another thread run
/// in the middle, up to this much too much is counted.
const SHORT: Duration = Duration::from_micros(200);

/// How old a thread's last reading may be when a poll starts.
const READING_AGE_MAX: Duration = Duration::from_millis(10);

/// What a thread's clocks said at one time.
#[derive(Clone, Copy)]
struct Reading {
    at: Instant,
    cpu: Duration,
}

thread_local! {
    static LAST: Cell<Option<Reading>> = const { Cell::new(None) };
}

fn read(at: Instant) -> Reading {
    let reading = Reading {
        at,
        cpu: thread_cpu(),
    };
    LAST.set(Some(reading));
    reading
}

fn poll_metered<F: Future>(
    call: Pin<&mut F>,
    context: &mut Context<'_>,
    meter: &Meter,
) -> Poll<F::Output> {
    let before = Instant::now();
    let last = match LAST.get() {
        Some(last) if before - last.at < READING_AGE_MAX => last,
        Some(_) | None => read(before),
    };
    let poll = call.poll(context);
    let after = Instant::now();
    let wall = after - before;
    // `last` may lie before the poll, so its difference alone could be too much.
    meter.computed(if wall < SHORT {
        wall
    } else {
        wall.min(read(after).cpu.saturating_sub(last.cpu))
    });
    poll
}

fn thread_cpu() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

#[cfg(test)]
mod tests {
    use std::hint::black_box;
    use std::pin::pin;

    use super::*;

    async fn compute_for_ever() {
        loop {
            (0..100_000).for_each(|n| {
                black_box(n);
            });
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn what_computes_too_long_is_given_up() {
        let (call, meter) = (pin!(compute_for_ever()), Meter::default());
        let most = Duration::from_millis(5);
        assert_eq!(within_cpu(call, &meter, most).await, None);
        assert!(meter.usage().cpu > most);
    }
}
