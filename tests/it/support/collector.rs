//! A receiver of OTLP over HTTP, which stands in for an OpenTelemetry collector.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use opentelemetry_proto::tonic::collector::logs::v1::ExportLogsServiceRequest;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value::Value};
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message as _;
use tokio::net::TcpListener;
use tokio::sync::Notify;

/// How a collector responds to requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behaviour {
    Accept,
    /// Never answer.
    Hang,
}

/// Everything that a collector has received.
#[derive(Debug, Default)]
struct Received {
    spans: Vec<Span>,
    lines: Vec<LogRecord>,
    resources: Vec<KeyValue>,
}

pub(crate) struct Collector {
    port: u16,
    received: Arc<Mutex<Received>>,
    /// Notified of the first request.
    requested: Arc<Notify>,
}

impl Collector {
    /// Starts the receiver. It ends with the test's runtime.
    pub(crate) async fn start(behaviour: Behaviour) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let port = listener.local_addr().expect("it is bound").port();
        let received: Arc<Mutex<Received>> = Arc::default();
        let requested = Arc::<Notify>::default();
        let (own, notify) = (received.clone(), requested.clone());
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (received, notify) = (own.clone(), notify.clone());
                let service = service_fn(move |request| {
                    notify.notify_one();
                    receive(received.clone(), behaviour, request)
                });
                tokio::spawn(async move {
                    let server = auto::Builder::new(TokioExecutor::new());
                    // A host that ends cuts its connection.
                    drop(server.serve_connection(TokioIo::new(stream), service).await);
                });
            }
        });
        Self {
            port,
            received,
            requested,
        }
    }

    /// The value of `OTEL_EXPORTER_OTLP_ENDPOINT`.
    pub(crate) fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// All spans so far.
    pub(crate) fn spans(&self) -> Vec<Span> {
        self.lock().spans.clone()
    }

    /// All lines of logs so far.
    pub(crate) fn lines(&self) -> Vec<LogRecord> {
        self.lock().lines.clone()
    }

    /// The attributes of the resources that have sent something.
    pub(crate) fn resources(&self) -> Vec<KeyValue> {
        self.lock().resources.clone()
    }

    /// Waits until a host has sent a request.
    pub(crate) async fn requested(&self) {
        self.requested.notified().await;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Received> {
        self.received.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn receive(
    received: Arc<Mutex<Received>>,
    behaviour: Behaviour,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let path = request.uri().path().to_owned();
    let body = request.into_body().collect().await;
    let body = body
        .map(http_body_util::Collected::to_bytes)
        .unwrap_or_default();
    if behaviour == Behaviour::Hang {
        std::future::pending::<()>().await;
    }
    let mut response = Response::new(Full::default());
    let mut received = received.lock().unwrap_or_else(PoisonError::into_inner);
    match path.as_str() {
        "/v1/traces" => {
            let request = ExportTraceServiceRequest::decode(body).expect("a request of OTLP");
            for of in request.resource_spans {
                received
                    .resources
                    .extend(of.resource.into_iter().flat_map(|it| it.attributes));
                received
                    .spans
                    .extend(of.scope_spans.into_iter().flat_map(|it| it.spans));
            }
        }
        "/v1/logs" => {
            let request = ExportLogsServiceRequest::decode(body).expect("a request of OTLP");
            for of in request.resource_logs {
                received
                    .lines
                    .extend(of.scope_logs.into_iter().flat_map(|it| it.log_records));
            }
        }
        _ => *response.status_mut() = StatusCode::NOT_FOUND,
    }
    Ok(response)
}

/// An attribute as text; `None` if there is none.
pub(crate) fn attribute(attributes: &[KeyValue], key: &str) -> Option<String> {
    let found = attributes.iter().find(|one| one.key == key)?;
    Some(text(found.value.as_ref()?))
}

/// A value as text.
pub(crate) fn text(value: &AnyValue) -> String {
    match value.value.as_ref().expect("it has a value") {
        Value::StringValue(text) => text.clone(),
        Value::IntValue(number) => number.to_string(),
        other => format!("{other:?}"),
    }
}
