//! Counts what a guest uses while it runs.
//!
//! CPU time is measured for each poll, because a guest moves between threads.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use crate::job::Usage;

/// The resources that one attempt has used so far. They can be read at any time.
#[derive(Debug, Default)]
pub struct Meter {
    cpu_ns: AtomicU64,
    memory_bytes: AtomicU64,
    host_calls: AtomicU32,
    bytes_in: AtomicU64,
    bytes_out: AtomicU64,
}

impl Meter {
    /// The usage so far.
    pub fn usage(&self) -> Usage {
        Usage {
            cpu: Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed)),
            memory_bytes_peak: self.memory_bytes.load(Ordering::Relaxed),
            host_calls: self.host_calls.load(Ordering::Relaxed),
            bytes_in: self.bytes_in.load(Ordering::Relaxed),
            bytes_out: self.bytes_out.load(Ordering::Relaxed),
        }
    }

    /// Counts CPU time that was measured elsewhere.
    pub(in crate::sandbox) fn add_cpu(&self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.cpu_ns.fetch_add(ns, Ordering::Relaxed);
    }

    /// Runs work that is not polled, and counts its CPU time.
    pub(in crate::sandbox) fn measure<T>(&self, work: impl FnOnce() -> T) -> T {
        let before = thread_cpu();
        let done = work();
        self.add_cpu(thread_cpu().saturating_sub(before));
        done
    }

    /// Like [`measure`](Self::measure). The work gets a function that returns true once the count exceeds `cpu_max`.
    pub(in crate::sandbox) fn measure_within<T>(
        &self,
        cpu_max: Duration,
        work: impl FnOnce(&dyn Fn() -> bool) -> T,
    ) -> T {
        let before = thread_cpu();
        let used = || thread_cpu().saturating_sub(before);
        let done = work(&|| self.cpu() + used() > cpu_max);
        self.add_cpu(used());
        done
    }

    /// The CPU time so far.
    pub(in crate::sandbox) fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns.load(Ordering::Relaxed))
    }

    /// Records the size of linear memory. It never shrinks, so this is also the peak.
    pub(in crate::sandbox) fn set_memory(&self, bytes: usize) {
        self.memory_bytes.store(bytes as u64, Ordering::Relaxed);
    }

    /// Counts a host call.
    pub(in crate::sandbox) fn count_host_call(&self) {
        self.host_calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts received bytes.
    pub(in crate::sandbox) fn received(&self, bytes: usize) {
        self.bytes_in.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts sent bytes.
    pub(in crate::sandbox) fn sent(&self, bytes: usize) {
        self.bytes_out.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// Awaits a call and counts the CPU time of its polls; `None` if the meter exceeds `cpu_max`. A CPU-bound guest is
/// polled at each tick, so it is stopped at the first tick after that.
pub(in crate::sandbox) async fn with_cpu_limit<F: Future>(
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

/// The whole duration of a poll that is shorter than this counts as CPU time. Reading a thread's CPU time is a system
/// call that takes 0.5 µs, reading the wall clock takes 0.03 µs, and a guest that returns at once is polled for a few
/// microseconds. If the kernel runs another thread during the poll, the count is too high by at most this much.
const SHORT: Duration = Duration::from_micros(200);

/// The maximum age of a thread's last reading when a poll starts.
const READING_AGE_MAX: Duration = Duration::from_millis(10);

/// A reading of a thread's clocks.
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
    // `last` may precede the poll, so the difference alone could be too large.
    meter.add_cpu(if wall < SHORT {
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

    async fn compute_forever() {
        loop {
            (0..100_000).for_each(|n| {
                black_box(n);
            });
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn give_up_a_call_that_computes_too_long() {
        let (call, meter) = (pin!(compute_forever()), Meter::default());
        let max = Duration::from_millis(5);
        assert_eq!(with_cpu_limit(call, &meter, max).await, None);
        assert!(meter.usage().cpu > max);
    }
}
