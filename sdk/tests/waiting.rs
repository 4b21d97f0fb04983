//! Waiting natively: sleeps, races, aborts.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::mpsc;
use std::task::Poll;
use std::time::{Duration, Instant};

use rouse_sdk::{AbortReason, Either, TestCtx, block_on, race, sleep};

const LONG: Duration = Duration::from_secs(3600);

#[test]
fn a_sleep_lasts_as_long_as_requested() {
    let start = Instant::now();
    block_on(sleep(Duration::from_millis(20)));
    assert!(start.elapsed() >= Duration::from_millis(20));
}

#[test]
fn the_shorter_of_two_sleeps_wins_the_race() {
    let short = Duration::from_millis(1);
    assert_eq!(
        block_on(race(sleep(LONG), sleep(short))),
        Either::Second(())
    );
    assert_eq!(block_on(race(sleep(short), sleep(LONG))), Either::First(()));
    // Longer than any clock can represent.
    assert_eq!(
        block_on(race(sleep(Duration::MAX), sleep(short))),
        Either::Second(())
    );
}

#[test]
fn an_earlier_abort_ends_the_wait_at_once() {
    let ctx = TestCtx::new();
    assert_eq!(ctx.abort().reason(), None);
    assert_eq!(ctx.abort().grace_remaining(), None);
    let start = Instant::now();
    ctx.fire_abort(AbortReason::Cancelled);
    ctx.fire_abort(AbortReason::Shutdown);
    assert_eq!(block_on(ctx.abort().wait()), AbortReason::Cancelled);
    let grace = ctx.abort().grace_remaining().unwrap();
    let full = Duration::from_secs(5);
    assert!(
        grace <= full && grace + start.elapsed() >= full,
        "{grace:?}"
    );
}

#[test]
fn an_abort_from_another_thread_ends_a_race_against_a_long_sleep() {
    let ctx = TestCtx::new();
    let aborter = ctx.aborter();
    let (is_waiting, waits) = mpsc::channel();
    let firing = std::thread::spawn(move || {
        waits.recv().unwrap();
        aborter.fire(AbortReason::TimedOut, Duration::ZERO);
    });
    let signal = ctx.abort();
    let ended = block_on(async {
        let mut race = pin!(race(signal.wait(), sleep(LONG)));
        // Signals that it is waiting only once it has been polled.
        poll_fn(|context| {
            let poll = race.as_mut().poll(context);
            // Fails at later polls, when the receiver has been dropped.
            let _ = is_waiting.send(());
            poll
        })
        .await
    });
    firing.join().unwrap();
    assert_eq!(ended, Either::First(AbortReason::TimedOut));
    assert_eq!(ctx.abort().grace_remaining(), Some(Duration::ZERO));
}

#[test]
fn a_future_may_wake_itself() {
    let mut polls = 0;
    block_on(poll_fn(|context| {
        polls += 1;
        context.waker().wake_by_ref();
        if polls < 3 {
            Poll::Pending
        } else {
            Poll::Ready(())
        }
    }));
    assert_eq!(polls, 3);
}

#[test]
fn nested_waiting_works() {
    let slept = block_on(async {
        let outer = sleep(LONG);
        let inner = async { block_on(sleep(Duration::from_millis(1))) };
        race(outer, inner).await
    });
    assert_eq!(slept, Either::Second(()));
}

#[test]
fn sleeps_of_one_task_run_concurrently() {
    let are_quick = || {
        let start = Instant::now();
        block_on(async {
            let mut sleeps: Vec<_> = (0..100)
                .map(|_| Box::pin(sleep(Duration::from_millis(20))))
                .collect();
            poll_fn(|context| {
                sleeps.retain_mut(|sleep| sleep.as_mut().poll(context).is_pending());
                if sleeps.is_empty() {
                    Poll::Ready(())
                } else {
                    Poll::Pending
                }
            })
            .await;
        });
        start.elapsed() < Duration::from_millis(20 * 50)
    };
    // Any of them may be delayed by the machine. One after another, they would take 2 s each time.
    assert!((0..10).any(|_| are_quick()));
}
