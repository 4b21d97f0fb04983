//! A request body: counted, limited in size and time, and ended by the abort.
//!
//! hyper keeps the body of a request as long as it may still have to send some of it. A server that stops taking data
//! determines how long this takes. So the body belongs to the attempt, and is taken from hyper when the attempt ends.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep_until};
use wasmtime_wasi_http::WasiBody;

use super::fault::Fault;
use super::tally::Tally;
use crate::sandbox::AbortHandle;

/// The number of chunks of a body that are buffered on their way to the network: wasmtime-wasi-http buffers one more
/// than requested.
pub(super) const CHUNKS_MAX: usize = 2;
pub(super) const CHUNK_BYTES_MAX: usize = 64 << 10;

/// A request body, as hyper holds it.
pub(super) struct Outgoing(Shared);

/// The bodies of an attempt that hyper may still hold.
#[derive(Default)]
pub(in crate::sandbox) struct Unsent(Vec<Shared>);

/// The slot for a body, before the body is known: secrets may have to be inserted.
pub(super) struct Slot(Shared);

type Shared = Arc<Mutex<State>>;

enum State {
    Empty,
    Full(Contents),
    TakenAway,
}

struct Contents {
    body: WasiBody,
    abort: AbortHandle,
    tally: Arc<Tally>,
    bytes_max: u64,
    bytes_left: u64,
    /// Fires at the deadline of the whole request: a server may respond before it has read the body.
    timer: Pin<Box<Sleep>>,
}

impl Unsent {
    /// A slot for the body of one more request.
    pub(super) fn slot(&mut self) -> Slot {
        // Bodies that hyper has dropped are done.
        self.0.retain(|body| Arc::strong_count(body) > 1);
        let shared = Arc::new(Mutex::new(State::Empty));
        self.0.push(shared.clone());
        Slot(shared)
    }

    /// Drops what hyper has not sent.
    pub(in crate::sandbox) fn take_away(&mut self) {
        for shared in self.0.drain(..) {
            // Dropped after the lock is released.
            let _body = std::mem::replace(&mut *lock(&shared), State::TakenAway);
        }
    }
}

impl Slot {
    /// Puts the body into its slot, unless the attempt has ended.
    pub(super) fn fill(
        self,
        body: WasiBody,
        abort: AbortHandle,
        tally: Arc<Tally>,
        bytes_max: u64,
        done_by: Instant,
    ) -> Outgoing {
        let contents = Contents {
            body,
            abort,
            tally,
            bytes_max,
            bytes_left: bytes_max,
            timer: Box::pin(sleep_until(done_by)),
        };
        let mut state = lock(&self.0);
        if let State::Empty = *state {
            *state = State::Full(contents);
        }
        drop(state);
        Outgoing(self.0)
    }
}

impl Drop for Unsent {
    fn drop(&mut self) {
        self.take_away();
    }
}

/// Ignores poisoning: a body that has panicked is never polled again.
fn lock(shared: &Shared) -> MutexGuard<'_, State> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Contents {
    fn count(&mut self, bytes: usize) -> Result<(), Fault> {
        let left = self.bytes_left.checked_sub(bytes as u64);
        self.bytes_left = left.ok_or(Fault::RequestBody(self.bytes_max))?;
        self.tally.sent(bytes)
    }

    fn poll_frame(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        if self.abort.reason().is_some() {
            return Poll::Ready(Some(Err(Fault::Stopped)));
        }
        // The timer is polled only while the guest writes nothing.
        if Instant::now() >= self.timer.deadline() {
            return Poll::Ready(Some(Err(Fault::SendTimeout)));
        }
        let frame = match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Pending => {
                ready!(self.timer.as_mut().poll(context));
                return Poll::Ready(Some(Err(Fault::SendTimeout)));
            }
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Err(_))) => Err(Fault::Unfinished),
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                self.count(bytes).map(|()| frame)
            }
        };
        Poll::Ready(Some(frame))
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        match &mut *lock(&self.0) {
            State::Full(contents) => contents.poll_frame(context),
            State::Empty | State::TakenAway => Poll::Ready(Some(Err(Fault::Stopped))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &*lock(&self.0) {
            State::Full(contents) => contents.body.is_end_stream(),
            State::Empty | State::TakenAway => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &*lock(&self.0) {
            State::Full(contents) => contents.body.size_hint(),
            State::Empty | State::TakenAway => SizeHint::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http_body_util::{BodyExt as _, Full};
    use wasmtime_wasi_http::Error;

    use super::*;

    const LATER: Duration = Duration::from_secs(60);

    /// A body of which the guest never writes anything.
    struct Unwritten;

    impl Body for Unwritten {
        type Data = Bytes;
        type Error = Error;

        fn poll_frame(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
            Poll::Pending
        }
    }

    #[tokio::test]
    async fn a_body_ends_at_the_deadline_of_its_request() {
        let ready = Full::from("text").map_err(|never| match never {});
        let soon = Duration::from_millis(1);
        let bodies = [
            (ready.boxed_unsync(), Duration::ZERO),
            (Unwritten.boxed_unsync(), soon),
        ];
        let mut unsent = Unsent::default();
        for (body, after) in bodies {
            let tally = Tally::new(Arc::default(), u64::MAX, None);
            let (slot, done_by) = (unsent.slot(), Instant::now() + after);
            let mut body = slot.fill(body, AbortHandle::new(), tally, 10, done_by);
            let end = body.frame().await.expect("it ends with an error");
            assert!(matches!(end, Err(Fault::SendTimeout)));
        }
    }

    #[tokio::test]
    async fn a_body_that_hyper_keeps_is_empty_when_its_attempt_has_ended() {
        let tally = Tally::new(Arc::default(), u64::MAX, None);
        let mut unsent = Unsent::default();
        let fill = |slot: Slot| {
            let body = Full::from("text").map_err(|never| match never {});
            let (body, done_by) = (body.boxed_unsync(), Instant::now() + LATER);
            slot.fill(body, AbortHandle::new(), tally.clone(), 10, done_by)
        };
        let (done, mut kept) = (fill(unsent.slot()), fill(unsent.slot()));
        let done = done.collect().await.expect("it is whole").to_bytes();
        assert_eq!(done, "text");
        let late = unsent.slot();
        assert_eq!(unsent.0.len(), 2, "the first one is done");
        assert_eq!(Arc::strong_count(&tally), 2);
        drop(unsent);
        let mut late = fill(late);
        assert_eq!(Arc::strong_count(&tally), 1, "hyper holds nothing of it");
        for body in [&mut kept, &mut late] {
            let end = body.frame().await.expect("it ends with an error");
            assert!(matches!(end, Err(Fault::Stopped)));
        }
    }
}
