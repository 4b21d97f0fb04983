//! Sends one request: checks it, sends it, and returns the response.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use http::header::CONTENT_LENGTH;
use http::{HeaderName, HeaderValue, Method, Request, Response, Uri};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use opentelemetry::KeyValue;
use opentelemetry::trace::SpanKind;
use tokio::time::Instant;
use wasmtime_wasi_http::{RequestOptions, WasiBody};

use super::access::{Allowed, HttpAccess};
use super::attempt::{FIELDS_BYTES_MAX, Http};
use super::connect::CONNECT_MAX;
use super::denial;
use super::fault::Fault;
use super::host_memory::host_bytes;
use super::incoming::{Incoming, Limits};
use super::outgoing::Slot;
use super::secrets::{NotInserted, Redactor, Replacements};
use super::tally::{InFlight, Tally, head_bytes};
use crate::sandbox::AbortHandle;
use crate::traces::{AttemptTrace, Span, cut};

/// The trace context of a request: <https://www.w3.org/TR/trace-context/#traceparent-header>.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// The default maximum time until the first byte of the response. The body of the request is also sent within this
/// time, unless the server responds before it has read all of it.
const FIRST_BYTE: Duration = Duration::from_secs(60);

/// The default maximum time between parts of the response.
const BETWEEN_BYTES: Duration = Duration::from_secs(60);

/// The maximum size of a body with a secret, which is buffered completely, because its length is sent first. The limit
/// applies to the final body: a secret may be longer than its placeholder, and occur a thousand times.
const SECRET_BODY_BYTES_MAX: usize = 1 << 20;

/// A granted request, ready to be sent.
pub(super) struct Sending {
    access: Arc<HttpAccess>,
    allowed: Allowed,
    request: Request<WasiBody>,
    replacements: Replacements,
    redactor: Option<Redactor>,
    abort: AbortHandle,
    tally: Arc<Tally>,
    in_flight: InFlight,
    slot: Slot,
    head_by: Instant,
    limits: Limits,
    span: Span,
}

impl Http {
    /// Checks a request, and prepares it.
    pub(super) fn prepare(
        &mut self,
        request: Request<WasiBody>,
        options: RequestOptions,
    ) -> Result<Sending, Fault> {
        let Some(access) = self.access.clone() else {
            return Err(Fault::Denied);
        };
        if self.abort.reason().is_some() {
            return Err(Fault::Stopped);
        }
        self.meter.count_host_call();
        let settings = &access.net.settings;
        let tally = self
            .tally
            .get_or_insert_with(|| {
                Tally::new(
                    self.meter.clone(),
                    self.limits.bytes,
                    self.host_memory.clone(),
                )
            })
            .clone();
        if self.requests >= self.limits.requests {
            return Err(Fault::Limit(format!(
                "the attempt has reached its limit of {} requests (limits.http_requests)",
                self.requests
            )));
        }
        self.requests += 1;
        let mut in_flight = tally.start()?;

        let (mut parts, body) = request.into_parts();
        let allowed = access
            .allow(&parts.method, &parts.uri)
            .map_err(|why| tally.deny(why))?;
        // As the guest wrote it: the URI is rebuilt below.
        let path = parts.uri.path().to_owned();
        let replacements = self
            .placeholders
            .put_into(&access, &allowed.target, &mut parts)
            .map_err(|why| match why {
                NotInserted::Denied(denial) => tally.deny(denial),
                NotInserted::TooLarge => Fault::Limit(format!(
                    "the header fields of a request may have at most {FIELDS_BYTES_MAX} bytes, including their secrets"
                )),
            })?;
        if !replacements.is_empty() {
            // Both the body that the guest wrote and the one that is sent.
            in_flight.charge(2 * SECRET_BODY_BYTES_MAX)?;
        }
        parts.uri = canonical_uri(&allowed, &parts.uri)?;
        let mut span = request_span(&self.trace, &parts.method, &allowed, &path);
        let own = span.traceparent();
        let traceparent = own.as_deref().or(self.trace.traceparent());
        if let Some(traceparent) = traceparent
            && !parts.headers.contains_key(TRACEPARENT)
        {
            let value = HeaderValue::from_str(traceparent).expect("it has digits and hyphens");
            parts.headers.insert(TRACEPARENT, value);
        }
        tally
            .sent(head_bytes(&parts.method, &parts.uri, &parts.headers))
            .inspect_err(|fault| span.fail(fault.word(), &fault.to_string()))?;

        let now = Instant::now();
        let connect = options.connect_timeout.unwrap_or(CONNECT_MAX);
        let first_byte = options.first_byte_timeout.unwrap_or(FIRST_BYTE);
        let head = connect.saturating_add(first_byte).min(settings.timeout);
        let between_bytes = options.between_bytes_timeout.unwrap_or(BETWEEN_BYTES);
        let body_bytes_max = self.limits.body_bytes;
        Ok(Sending {
            request: Request::from_parts(parts, body),
            replacements,
            redactor: self.placeholders.redactor(&access, &allowed.target),
            abort: self.abort.clone(),
            tally,
            in_flight,
            slot: self.unsent.slot(),
            head_by: now + head,
            limits: Limits {
                bytes_max: body_bytes_max,
                bytes_left: body_bytes_max,
                between_bytes: between_bytes.min(settings.timeout),
                done_by: now + settings.timeout,
            },
            allowed,
            access,
            span,
        })
    }
}

impl Sending {
    /// Sends the request, and waits for the head of the response.
    pub(super) async fn send(mut self) -> Result<Response<WasiBody>, Fault> {
        let mut span = std::mem::take(&mut self.span);
        let sent = self.send_within().await;
        match &sent {
            Ok(response) => {
                let status = response.status();
                span.set(KeyValue::new(
                    "http.response.status_code",
                    i64::from(status.as_u16()),
                ));
                if status.is_client_error() || status.is_server_error() {
                    span.fail(status.as_str(), "");
                }
            }
            Err(fault) => span.fail(fault.word(), &fault.to_string()),
        }
        sent
    }

    async fn send_within(self) -> Result<Response<WasiBody>, Fault> {
        let method = self.request.method().clone();
        let is_head = method == Method::HEAD;
        // The body is counted while it is sent.
        let (abort, tally) = (self.abort.clone(), self.tally.clone());
        let (slot, bytes_max) = (self.slot, self.limits.bytes_max);
        let done_by = self.limits.done_by;
        let outgoing = |body| slot.fill(body, abort, tally, bytes_max, done_by);
        let sent = async {
            let request = with_secrets(self.request, self.replacements).await?;
            let client = self.access.client(self.allowed.reach);
            let sent = client.request(request.map(outgoing)).await;
            sent.map_err(|error| Fault::from_client_error(&error))
        };
        let result = tokio::select! {
            biased;
            () = self.abort.aborted() => Err(Fault::Stopped),
            () = tokio::time::sleep_until(self.head_by) => Err(Fault::HeadTimeout),
            result = while_trusted(&self.abort, sent) => result,
        };
        let response = result.map_err(|fault| match fault {
            Fault::Prohibited { address, kind } => {
                let (handler, target) = (&self.access.handler, &self.allowed.target);
                let config = &self.access.config;
                let denial = denial::prohibited(handler, &method, target, address, kind, config);
                drop(self.tally.deny(denial));
                fault
            }
            fault => fault,
        })?;

        let (mut parts, body) = response.into_parts();
        // A status line has about the length of the shortest request line.
        self.tally
            .received(head_bytes(&method, &Uri::default(), &parts.headers))?;
        if let Some(redactor) = &self.redactor {
            redactor.redact_fields(&mut parts.headers);
            if !is_head {
                // The length may differ without the secret.
                parts.headers.remove(CONTENT_LENGTH);
            }
        }
        // A placeholder may be longer than its secret.
        self.tally.charge_until_end(host_bytes(&parts.headers))?;
        let body = Incoming {
            body,
            timer: self.limits.timer(),
            in_flight: self.in_flight,
            redactor: self.redactor,
            limits: self.limits,
            ending: None,
        };
        Ok(Response::from_parts(parts, body.boxed_unsync()))
    }
}

/// The span of a request, according to OpenTelemetry's conventions for HTTP clients. The path is the one that the guest
/// wrote, so it contains no secrets. The query is left out, because it often contains credentials. Method and path are
/// cut, because the guest chooses them and the span waits for its export.
fn request_span(trace: &AttemptTrace, method: &Method, allowed: &Allowed, path: &str) -> Span {
    let target = &allowed.target;
    let method = cut(method.as_str());
    let attributes = || {
        vec![
            KeyValue::new("http.request.method", method.clone()),
            KeyValue::new("server.address", target.host.to_string()),
            KeyValue::new("server.port", i64::from(target.port)),
            KeyValue::new("url.scheme", target.scheme.as_str()),
            KeyValue::new("url.path", cut(path)),
        ]
    };
    trace.span(method.clone(), SpanKind::Client, attributes)
}

/// Inserts secrets into the body of a request.
async fn with_secrets(
    request: Request<WasiBody>,
    replacements: Replacements,
) -> Result<Request<WasiBody>, Fault> {
    if replacements.is_empty() {
        return Ok(request);
    }
    let too_large = || {
        Fault::Limit(format!(
            "a body that may contain a secret must have at most {SECRET_BODY_BYTES_MAX} bytes with its secrets"
        ))
    };
    let (parts, body) = request.into_parts();
    let body = Limited::new(body, SECRET_BODY_BYTES_MAX).collect().await;
    let body = body.map_err(|error| match error.is::<LengthLimitError>() {
        true => too_large(),
        false => Fault::Unfinished,
    })?;
    let body = replacements
        .put_into(body.to_bytes().into(), SECRET_BODY_BYTES_MAX)
        .ok_or_else(too_large)?;
    let body = Full::from(body).map_err(|never| match never {});
    Ok(Request::from_parts(parts, body.boxed_unsync()))
}

/// Polls `work` only while the attempt may continue. This is checked before each poll, because a process that was
/// frozen may have lost its lease since.
async fn while_trusted<T>(
    abort: &AbortHandle,
    work: impl Future<Output = Result<T, Fault>>,
) -> Result<T, Fault> {
    let mut work = pin!(work);
    poll_fn(|context| match abort.reason() {
        Some(_) => Poll::Ready(Err(Fault::Stopped)),
        None => work.as_mut().poll(context),
    })
    .await
}

/// Rebuilds the URI from the parsed target, so that the client connects to the target that was checked.
fn canonical_uri(allowed: &Allowed, uri: &Uri) -> Result<Uri, Fault> {
    let path = match uri.path_and_query().map(|path| path.as_str()) {
        None | Some("") => "/".to_owned(),
        Some(path) if path.starts_with('/') => path.to_owned(),
        Some(query) => format!("/{query}"),
    };
    Uri::builder()
        .scheme(allowed.target.scheme.as_str())
        .authority(allowed.target.authority())
        .path_and_query(path)
        .build()
        .map_err(|error| Fault::Broken(error.to_string()))
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::net::{IpAddr, Ipv4Addr, TcpListener};

    use http_body_util::Empty;
    use tokio::sync::Notify;

    use super::super::outgoing::Unsent;
    use super::super::{Addresses, HttpSettings, Net, Resolver};
    use super::*;
    use crate::job::AbortReason;
    use crate::sandbox::{BootTime, HttpGrant, HttpScheme, Settings};

    /// Resolves a name when the test allows it.
    #[derive(Debug, Default)]
    struct Gate {
        requested: Notify,
        open: Notify,
        passed: Notify,
    }

    #[derive(Debug)]
    struct Gated(Arc<Gate>);

    impl Resolver for Gated {
        fn resolve<'a>(&'a self, _: &'a str) -> Addresses<'a> {
            Box::pin(async move {
                self.0.requested.notify_one();
                self.0.open.notified().await;
                self.0.passed.notify_one();
                Ok(vec![IpAddr::V4(Ipv4Addr::LOCALHOST)])
            })
        }
    }

    fn http(gate: &Arc<Gate>, abort: &AbortHandle, port: u16) -> Http {
        let settings = Settings {
            http_grants: vec![HttpGrant {
                handler: "x".into(),
                hosts: vec!["a.test".parse().expect("a host")],
                schemes: vec![HttpScheme::Http],
                ports: vec![port],
                methods: vec![],
                private: true,
            }],
            http: HttpSettings {
                resolver: Arc::new(Gated(gate.clone())),
                ..HttpSettings::default()
            },
            ..Settings::default()
        };
        let net = Net::new(settings.http.clone(), 1).expect("no file to read");
        let access = HttpAccess::new("x", crate::sandbox::Origin::for_tests(), &settings, net);
        Http::new(
            Some(access),
            &crate::sandbox::Limits::default(),
            abort.clone(),
            Arc::default(),
        )
    }

    /// Prepares a request to a server that gets no other connection.
    fn prepared(
        gate: &Arc<Gate>,
        abort: &AbortHandle,
        server: &TcpListener,
    ) -> Result<Sending, Fault> {
        let port = server.local_addr().expect("it is bound").port();
        let body = Empty::new().map_err(|never| match never {});
        let mut request = Request::new(body.boxed_unsync());
        *request.uri_mut() = format!("http://a.test:{port}/").parse().expect("a URI");
        http(gate, abort, port).prepare(request, RequestOptions::default())
    }

    fn start() -> (Arc<Gate>, AbortHandle, TcpListener) {
        let server = TcpListener::bind("127.0.0.1:0").expect("a port");
        server.set_nonblocking(true).expect("a non-blocking socket");
        (Arc::default(), AbortHandle::new(), server)
    }

    #[tokio::test]
    async fn send_nothing_after_the_abort() {
        let (gate, abort, server) = start();
        abort.abort(AbortReason::Cancelled, Duration::from_secs(60));
        let refused = prepared(&gate, &abort, &server)
            .err()
            .expect("it is refused");
        assert!(matches!(refused, Fault::Stopped), "{refused:?}");
    }

    #[tokio::test]
    async fn a_request_without_a_connection_at_the_abort_never_gets_one() {
        let (gate, abort, server) = start();
        let sending = prepared(&gate, &abort, &server).expect("it is granted");
        let sent = tokio::spawn(sending.send());
        gate.requested.notified().await;
        abort.abort(AbortReason::Cancelled, Duration::from_secs(60));
        let sent = sent.await.expect("it does not panic");
        assert!(matches!(sent, Err(Fault::Stopped)));
        // The name is still resolved, but the result is not used.
        gate.open.notify_one();
        gate.passed.notified().await;
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        let connected = server.accept().map(|(_, from)| from);
        let error = connected.expect_err("no connection").kind();
        assert_eq!(error, ErrorKind::WouldBlock);
    }

    #[tokio::test]
    async fn an_attempt_whose_trust_expired_sends_nothing() {
        let (gate, abort, server) = start();
        let sending = prepared(&gate, &abort, &server).expect("it is granted");
        let sent = tokio::spawn(sending.send());
        gate.requested.notified().await;
        abort.trust_until(BootTime::now(), Duration::ZERO);
        gate.open.notify_one();
        let sent = sent.await.expect("it does not panic");
        assert!(matches!(sent, Err(Fault::Stopped)));
    }

    #[tokio::test]
    async fn a_body_ends_with_the_abort() {
        let (abort, tally) = (AbortHandle::new(), Tally::new(Arc::default(), 100, None));
        let body = Full::from("all of it").map_err(|never| match never {});
        let mut unsent = Unsent::default();
        let (body, done_by) = (body.boxed_unsync(), Instant::now() + BETWEEN_BYTES);
        let body = unsent.slot().fill(body, abort.clone(), tally, 100, done_by);
        abort.abort(AbortReason::Cancelled, Duration::from_secs(60));
        let read = body.collect().await.expect_err("it is cut off");
        assert!(matches!(read, Fault::Stopped), "{read:?}");
    }
}
