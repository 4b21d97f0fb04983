//! A response body: counted, limited in size and time, and with the handler's secrets removed.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use wasmtime_wasi_http::Error;

use super::fault::Fault;
use super::host_memory::host_bytes;
use super::secrets::Redactor;
use super::tally::{InFlight, fields_bytes};

/// A response body.
pub(super) struct Incoming {
    pub(super) body: hyper::body::Incoming,
    pub(super) in_flight: InFlight,
    pub(super) redactor: Option<Redactor>,
    pub(super) limits: Limits,
    pub(super) timer: Pin<Box<Sleep>>,
    /// The end of the body, which follows the bytes that the redactor holds back.
    pub(super) ending: Option<Ending>,
}

/// The limits of one response.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    pub(super) bytes_max: u64,
    pub(super) bytes_left: u64,
    pub(super) between_bytes: Duration,
    /// The deadline of the whole response.
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

    /// The timer for the first bytes of the body.
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
            // The timer is polled only while nothing arrives.
            if Instant::now() >= self.limits.done_by {
                return Poll::Ready(Some(Err(Fault::BodyTimeout)));
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
                    Err(frame) => match frame.into_trailers() {
                        Ok(trailers) => match self.trailers(trailers) {
                            Ok(trailers) => self.end(Ending::Trailers(trailers)),
                            Err(fault) => return Poll::Ready(Some(Err(fault))),
                        },
                        Err(_) => self.end(Ending::Nothing),
                    },
                },
            };
            // The redactor may hold back all bytes.
            if !bytes.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(bytes))));
            }
        }
    }

    fn take(&mut self, bytes: Bytes) -> Result<Bytes, Fault> {
        self.in_flight.tally().received(bytes.len())?;
        let left = self.limits.bytes_left.checked_sub(bytes.len() as u64);
        self.limits.bytes_left = left.ok_or(Fault::ResponseBody(self.limits.bytes_max))?;
        Ok(match &mut self.redactor {
            None => bytes,
            Some(redactor) => redactor.push(&bytes),
        })
    }

    /// Returns the bytes that were held back; `ending` follows them.
    fn end(&mut self, ending: Ending) -> Bytes {
        self.ending = Some(ending);
        match &mut self.redactor {
            None => Bytes::new(),
            Some(redactor) => redactor.finish(),
        }
    }

    /// The guest may keep trailers after the body, so they count as host memory until the attempt ends.
    fn trailers(&self, mut trailers: HeaderMap) -> Result<HeaderMap, Fault> {
        let tally = self.in_flight.tally();
        tally.received(fields_bytes(&trailers))?;
        if let Some(redactor) = &self.redactor {
            redactor.redact_fields(&mut trailers);
        }
        // A placeholder may be longer than its secret.
        tally.charge_until_end(host_bytes(&trailers))?;
        Ok(trailers)
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http::{HeaderName, HeaderValue, Request};
    use http_body_util::{BodyExt as _, Collected, Empty};
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
    use tokio::task::JoinHandle;

    use super::super::tally::Tally;
    use super::*;
    use crate::sandbox::Meter;
    use crate::sandbox::attempt::memory::{HostMemory, MemoryBudget};
    use crate::sandbox::grants::Secret;

    const TRAILER: usize = 1000;

    /// A body of one byte with a trailer, within this limit of host memory; and its server.
    async fn response(
        host_memory: Arc<HostMemory>,
        meter: &Arc<Meter>,
        redactor: Option<Redactor>,
    ) -> (Incoming, JoinHandle<DuplexStream>) {
        let (client, mut server) = tokio::io::duplex(64 << 10);
        let (mut requests, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(client))
                .await
                .expect("a connection");
        tokio::spawn(connection);
        let server = tokio::spawn(async move {
            let mut request = [0; 1024];
            let read = server.read(&mut request).await;
            assert!(read.expect("a request") > 0);
            let value = "v".repeat(TRAILER);
            let response = format!(
                "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nb\r\n0\r\nx-a: {value}\r\n\r\n"
            );
            let written = server.write_all(response.as_bytes()).await;
            written.expect("it is read");
            server
        });
        let request = Request::get("/").header("te", "trailers");
        let request = request.body(Empty::<Bytes>::new()).expect("a request");
        let response = requests.send_request(request).await.expect("a response");
        let limits = Limits {
            bytes_max: 10,
            bytes_left: 10,
            between_bytes: Duration::from_secs(60),
            done_by: Instant::now() + Duration::from_secs(60),
        };
        let tally = Tally::new(meter.clone(), u64::MAX, Some(host_memory));
        let body = Incoming {
            body: response.into_body(),
            in_flight: tally.start().expect("it fits"),
            redactor,
            limits,
            timer: limits.timer(),
            ending: None,
        };
        (body, server)
    }

    /// Reads this body.
    async fn read(
        host_memory: Arc<HostMemory>,
        meter: &Arc<Meter>,
        redactor: Option<Redactor>,
    ) -> Result<Collected<Bytes>, Error> {
        let (body, server) = response(host_memory, meter, redactor).await;
        let body = body.collect().await;
        drop(server.await.expect("it has responded"));
        body
    }

    #[tokio::test]
    async fn a_body_that_is_read_slowly_ends_at_the_deadline() {
        let host_memory = HostMemory::new(1 << 20, MemoryBudget::new(1 << 20));
        let (mut body, _server) = response(host_memory, &Arc::default(), None).await;
        let first = body.frame().await.expect("a frame").expect("no error");
        assert_eq!(first.into_data().ok().as_deref(), Some(&b"b"[..]));
        body.limits.done_by = Instant::now();
        let rest = body.frame().await.expect("a frame");
        assert!(matches!(rest, Err(Error::HttpResponseTimeout)), "{rest:?}");
    }

    #[tokio::test]
    async fn count_trailers_as_received_and_as_host_memory_until_the_attempt_ends() {
        let mut trailers = HeaderMap::new();
        let value = HeaderValue::from_str(&"v".repeat(TRAILER)).expect("a value");
        trailers.insert(HeaderName::from_static("x-a"), value);
        let (total, meter) = (1 << 20, Arc::new(Meter::default()));
        let budget = MemoryBudget::new(total);
        let host_memory = HostMemory::new(total, budget.clone());
        let body = read(host_memory.clone(), &meter, None)
            .await
            .expect("it fits");
        assert_eq!(body.trailers(), Some(&trailers));
        drop(body);
        assert_eq!(budget.free_bytes(), total - host_bytes(&trailers));
        assert_eq!(meter.usage().bytes_in, 1 + fields_bytes(&trailers) as u64);
        drop(host_memory);
        assert_eq!(budget.free_bytes(), total);

        let short = HostMemory::new((512 << 10) + TRAILER, budget);
        let error = read(short, &meter, None)
            .await
            .expect_err("it does not fit");
        assert!(format!("{error:?}").contains("memory_mb"), "{error:?}");
    }

    #[tokio::test]
    async fn count_trailers_with_placeholders_that_are_longer_than_their_secrets() {
        let secret = Secret::new("vvvvvvvv").expect("a secret");
        let word = "rouse-secret-of-a-trailer";
        let redactor = Redactor::new(vec![(secret, word.into())]);
        let (total, meter) = (1 << 20, Arc::new(Meter::default()));
        let budget = MemoryBudget::new(total);
        let host_memory = HostMemory::new(total, budget.clone());
        let body = read(host_memory.clone(), &meter, Some(redactor)).await;
        let body = body.expect("it fits");
        let trailers = body.trailers().expect("trailers").clone();
        assert_eq!(trailers["x-a"], word.repeat(TRAILER / 8));
        drop(body);
        assert_eq!(budget.free_bytes(), total - host_bytes(&trailers));
    }
}
