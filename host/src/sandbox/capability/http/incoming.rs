//! The body of a response, on its way in: counted, limited in size and time, and without the handler's secrets.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use wasmtime_wasi_http::Error;

use super::Fault;
use super::secrets::Redactor;
use super::tally::UnderWay;

/// The body of a response.
pub(super) struct Incoming {
    pub(super) body: hyper::body::Incoming,
    pub(super) under_way: UnderWay,
    pub(super) redactor: Option<Redactor>,
    pub(super) limits: Limits,
    pub(super) timer: Pin<Box<Sleep>>,
    /// What comes after the bytes that the redactor held back.
    pub(super) ending: Option<Ending>,
}

/// Of one response.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) bytes_max: u64,
    pub(super) bytes_left: u64,
    pub(super) between_bytes: Duration,
    /// When all of it has to be there.
    pub(super) done_by: Instant,
}

/// How a body ends.
pub(super) enum Ending {
    Nothing,
    Trailers(HeaderMap),
}

impl Limits {
    fn next_by(&self) -> Instant {
        (Instant::now() + self.between_bytes).min(self.done_by)
    }

    /// The clock for the first bytes of the body.
    pub(super) fn timer(&self) -> Pin<Box<Sleep>> {
        Box::pin(sleep_until(self.next_by()))
    }
}

type Polled = Poll<Option<Result<Frame<Bytes>, Fault>>>;

impl Incoming {
    fn poll(&mut self, context: &mut Context<'_>) -> Polled {
        loop {
            if let Some(ending) = self.ending.take() {
                return Poll::Ready(match ending {
                    Ending::Nothing => None,
                    Ending::Trailers(trailers) => Some(Ok(Frame::trailers(trailers))),
                });
            }
            let frame = match Pin::new(&mut self.body).poll_frame(context) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    std::task::ready!(self.timer.as_mut().poll(context));
                    return Poll::Ready(Some(Err(Fault::BodyTimeout)));
                }
            };
            let next_by = self.limits.next_by();
            self.timer.as_mut().reset(next_by);
            let bytes = match frame {
                None => self.end(Ending::Nothing),
                Some(Err(error)) => {
                    return Poll::Ready(Some(Err(Fault::Broken(error.to_string()))));
                }
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(bytes) => match self.take(bytes) {
                        Ok(bytes) => bytes,
                        Err(fault) => return Poll::Ready(Some(Err(fault))),
                    },
                    Err(frame) => self.end(match frame.into_trailers() {
                        Ok(trailers) => Ending::Trailers(self.redacted(trailers)),
                        Err(_) => Ending::Nothing,
                    }),
                },
            };
            // All of them may be held back.
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
        }
    }

    fn take(&mut self, bytes: Bytes) -> Result<Bytes, Fault> {
        self.under_way.tally().received(bytes.len())?;
        let left = self.limits.bytes_left.checked_sub(bytes.len() as u64);
        self.limits.bytes_left = left.ok_or(Fault::ResponseBody(self.limits.bytes_max))?;
        Ok(match &mut self.redactor {
            None => bytes,
            Some(redactor) => redactor.push(&bytes),
        })
    }

    /// The last bytes, after which this comes.
    fn end(&mut self, ending: Ending) -> Bytes {
        self.ending = Some(ending);
        match &mut self.redactor {
            None => Bytes::new(),
            Some(redactor) => redactor.finish(),
        }
    }

    fn redacted(&self, mut fields: HeaderMap) -> HeaderMap {
        if let Some(redactor) = &self.redactor {
            redactor.redact_fields(&mut fields);
        }
        fields
    }
}

impl Body for Incoming {
    type Data = Bytes;
    type Error = Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Error>>> {
        self.poll(context)
            .map(|frame| frame.map(|frame| frame.map_err(Fault::into_error)))
    }
}
