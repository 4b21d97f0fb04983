//! Processor time of a guest, which moves between threads.

use std::cell::Cell;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

/// Awaits a call and adds the processor time of its polls to `cpu`.
pub(super) async fn metered<F: Future>(mut call: Pin<&mut F>, cpu: &mut Duration) -> F::Output {
    poll_fn(|context| poll_metered(call.as_mut(), context, cpu)).await
}

/// Awaits a call; none when it uses more processor time than `cpu_max`.
pub(super) async fn within_cpu<F: Future>(
    mut call: Pin<&mut F>,
    cpu_max: Duration,
) -> Option<F::Output> {
    let mut cpu = Duration::ZERO;
    poll_fn(
        |context| match poll_metered(call.as_mut(), context, &mut cpu) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if cpu > cpu_max => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        },
    )
    .await
}

/// A poll of at most this long is taken to have computed all the time. Asking the kernel for a
/// thread's processor time is a system call of 0.5 µs, wall time is read in 0.03 µs, and a guest
/// that returns at once is polled for some microseconds. Where the kernel lets another thread run
/// in the middle, up to this much too much is counted.
const SHORT: Duration = Duration::from_micros(200);

/// How old a thread's last reading may be when a poll begins.
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
    cpu: &mut Duration,
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
    *cpu += if wall < SHORT {
        wall
    } else {
        wall.min(read(after).cpu.saturating_sub(last.cpu))
    };
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
        let call = pin!(compute_for_ever());
        assert_eq!(within_cpu(call, Duration::from_millis(5)).await, None);
    }

    #[tokio::test]
    async fn computing_is_counted() {
        let mut cpu = Duration::ZERO;
        let call = pin!(compute_for_ever());
        let limited = pin!(within_cpu(call, Duration::from_millis(5)));
        metered(limited, &mut cpu).await;
        assert!(cpu >= Duration::from_millis(5));
    }
}
