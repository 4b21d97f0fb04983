//! Waiting: a small executor for the single future of an attempt.

use std::cell::RefCell;
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

#[cfg(not(target_family = "wasm"))]
pub(crate) use crate::native::{Source, park, waker};
#[cfg(target_family = "wasm")]
pub(crate) use crate::wasm::{Source, park, waker};

/// Runs a future to completion. `async fn` handlers run in this executor; a plain `fn` can call `block_on` to wait.
///
/// # Panics
/// In a module, if the future waits for something that can never wake it.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let (waker, woken) = waker();
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        // A future may wake its own task while it is polled; then there is no need to wait.
        while !woken.take() {
            park(&waiting_sources());
            wake_ready();
        }
    }
}

/// Completes after this time.
pub async fn sleep(wait: Duration) {
    Wait::new(Source::after(wait)).await;
}

/// The output of the future that completed first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Either<A, B> {
    /// The first future completed first.
    First(A),
    /// The second future completed first.
    Second(B),
}

/// Completes with the first of two futures to complete, and drops the other. If both are ready, `first` wins.
///
/// ```
/// use std::time::Duration;
/// use rouse_sdk::{Ctx, Either, Error, race, sleep};
///
/// async fn nap(ctx: &Ctx) -> Result<(), Error> {
///     match race(ctx.abort().wait(), sleep(Duration::from_millis(1))).await {
///         Either::First(reason) => Err(Error::retryable(format_args!("stopped: {reason}"))),
///         Either::Second(()) => Ok(()),
///     }
/// }
/// # rouse_sdk::block_on(nap(&rouse_sdk::TestCtx::new())).unwrap();
/// ```
pub async fn race<A: Future, B: Future>(first: A, second: B) -> Either<A::Output, B::Output> {
    let mut first = pin!(first);
    let mut second = pin!(second);
    std::future::poll_fn(|context| {
        if let Poll::Ready(output) = first.as_mut().poll(context) {
            return Poll::Ready(Either::First(output));
        }
        second.as_mut().poll(context).map(Either::Second)
    })
    .await
}

thread_local! {
    /// The sources that the futures of this thread wait for. Weak: a dropped future no longer waits.
    static WAITING: RefCell<Vec<(Weak<Source>, Waker)>> = const { RefCell::new(Vec::new()) };
}

/// Completes when its source is ready.
pub(crate) struct Wait(Rc<Source>);

impl Wait {
    pub(crate) fn new(source: Source) -> Self {
        Self(Rc::new(source))
    }
}

impl Future for Wait {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if self.0.is_ready() {
            return Poll::Ready(());
        }
        WAITING.with_borrow_mut(|waiting| {
            let same = |(source, _): &&mut (Weak<Source>, Waker)| {
                std::ptr::eq(source.as_ptr(), Rc::as_ptr(&self.0))
            };
            match waiting.iter_mut().find(same) {
                Some((_, waker)) => waker.clone_from(context.waker()),
                None => waiting.push((Rc::downgrade(&self.0), context.waker().clone())),
            }
        });
        Poll::Pending
    }
}

fn waiting_sources() -> Vec<Rc<Source>> {
    WAITING.with_borrow_mut(|waiting| {
        waiting.retain(|(source, _)| source.strong_count() > 0);
        waiting
            .iter()
            .filter_map(|(source, _)| source.upgrade())
            .collect()
    })
}

fn wake_ready() {
    let ready = WAITING.with_borrow_mut(|waiting| {
        let (ready, still_waiting) = std::mem::take(waiting)
            .into_iter()
            .partition(|(source, _)| source.upgrade().is_none_or(|source| source.is_ready()));
        *waiting = still_waiting;
        ready
    });
    // Woken outside the borrow: a waker may run code that waits again.
    let ready: Vec<(Weak<Source>, Waker)> = ready;
    for (_, waker) in ready {
        waker.wake();
    }
}
