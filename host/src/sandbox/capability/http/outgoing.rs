//! A request body: counted, limited, and ended by the abort.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use wasmtime_wasi_http::WasiBody;

use super::fault::Fault;
use super::tally::Tally;
use crate::sandbox::AbortHandle;

/// A request body.
pub(super) struct Outgoing {
    body: WasiBody,
    abort: AbortHandle,
    tally: Arc<Tally>,
    bytes_max: u64,
    bytes_left: u64,
}

impl Outgoing {
    pub(super) fn new(
        body: WasiBody,
        abort: AbortHandle,
        tally: Arc<Tally>,
        bytes_max: u64,
    ) -> Self {
        Self {
            body,
            abort,
            tally,
            bytes_max,
            bytes_left: bytes_max,
        }
    }

    fn count(&mut self, bytes: usize) -> Result<(), Fault> {
        let left = self.bytes_left.checked_sub(bytes as u64);
        self.bytes_left = left.ok_or(Fault::RequestBody(self.bytes_max))?;
        self.tally.sent(bytes)
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = Fault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Fault>>> {
        if self.abort.reason().is_some() {
            return Poll::Ready(Some(Err(Fault::Stopped)));
        }
        let frame = match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(None) => return Poll::Ready(None),
            Poll::Ready(Some(Err(_))) => Err(Fault::Unfinished),
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                self.count(bytes).map(|()| frame)
            }
        };
        Poll::Ready(Some(frame))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
