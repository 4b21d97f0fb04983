//! The exporters of the OpenTelemetry SDK, with the host's own HTTP client and ids.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use metrics::counter;
use opentelemetry::logs::LoggerProvider as _;
use opentelemetry::trace::{
    SpanContext, SpanId, SpanKind, TraceContextExt as _, TraceId, TracerProvider as _,
};
use opentelemetry::{Context, InstrumentationScope, KeyValue};
use opentelemetry_http::{HttpClient, HttpError};
use opentelemetry_otlp::{LogExporter, SpanExporter, WithHttpConfig as _};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::logs::{
    BatchConfigBuilder as LogBatches, BatchLogProcessor, SdkLogger, SdkLoggerProvider,
};
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, Config, IdGenerator, RandomIdGenerator, Sampler,
    SamplingDecision, SdkTracer, SdkTracerProvider, ShouldSample,
};
use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use tokio::runtime::Handle;

/// The maximum number of spans that wait for their export, usually of less than 1 KiB each. More are dropped, and the
/// SDK logs how many.
const SPANS_MAX: usize = 16 << 10;

/// The maximum number of lines that wait for their export, of at most 16 KiB each.
const LINES_MAX: usize = 4 << 10;

/// The maximum number of links of a span: one for each job of the largest batch.
const LINKS_MAX: u32 = 1000;

/// The default timeout of one request, including its response.
const REQUEST_MAX: Duration = Duration::from_secs(10);

/// The maximum size of a response, in bytes. A response contains little more than the number of rejected spans.
const RESPONSE_BYTES_MAX: usize = 1 << 20;

/// The signals to export, and the settings of their exporters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Signals {
    /// Spans.
    pub traces: bool,
    /// Lines of the logs of guests.
    pub logs: bool,
    /// The operator has set `service.name`.
    pub has_name: bool,
    /// The operator has set `service.instance.id`.
    pub has_instance_id: bool,
    /// The timeout of one request with spans, if the operator has set it.
    pub traces_timeout: Option<Duration>,
    /// The timeout of one request with lines, if the operator has set it.
    pub logs_timeout: Option<Duration>,
    /// `OTEL_BSP_MAX_QUEUE_SIZE` is set.
    pub spans_max_is_set: bool,
    /// `OTEL_BLRP_MAX_QUEUE_SIZE` is set.
    pub lines_max_is_set: bool,
}

/// The exporters of a host.
pub(super) struct Exporter {
    pub(super) tracer: Option<SdkTracer>,
    pub(super) logger: Option<SdkLogger>,
    spans: Option<SdkTracerProvider>,
    logs: Option<SdkLoggerProvider>,
    sampler: Box<dyn ShouldSample>,
}

impl Exporter {
    pub(super) fn start(signals: Signals, worker_id: &str) -> anyhow::Result<Option<Self>> {
        if !signals.traces && !signals.logs {
            return Ok(None);
        }
        let http = http_client();
        let resource = resource(signals, worker_id);
        let scope = InstrumentationScope::builder("rouse")
            .with_version(env!("CARGO_PKG_VERSION"))
            .build();
        let mut exporter = Self {
            tracer: None,
            logger: None,
            spans: None,
            logs: None,
            sampler: Config::default().sampler,
        };
        if signals.traces {
            let spans = SpanExporter::builder()
                .with_http()
                .with_http_client(http.of("traces", signals.traces_timeout))
                .build()
                .context("set up the export of traces (OTEL_EXPORTER_OTLP_*)")?;
            let mut batches = BatchConfigBuilder::default();
            if !signals.spans_max_is_set {
                batches = batches.with_max_queue_size(SPANS_MAX);
            }
            let batches = BatchSpanProcessor::builder(spans).with_batch_config(batches.build());
            let provider = SdkTracerProvider::builder()
                .with_span_processor(batches.build())
                // Only sampled spans are started.
                .with_sampler(Sampler::AlwaysOn)
                .with_max_links_per_span(LINKS_MAX)
                .with_id_generator(Ids::default())
                .with_resource(resource.clone())
                .build();
            exporter.tracer = Some(provider.tracer_with_scope(scope.clone()));
            exporter.spans = Some(provider);
        }
        if signals.logs {
            let lines = LogExporter::builder()
                .with_http()
                .with_http_client(http.of("logs", signals.logs_timeout))
                .build()
                .context("set up the export of logs (OTEL_EXPORTER_OTLP_*)")?;
            let mut batches = LogBatches::default();
            if !signals.lines_max_is_set {
                batches = batches.with_max_queue_size(LINES_MAX);
            }
            let batches = BatchLogProcessor::builder(lines).with_batch_config(batches.build());
            let provider = SdkLoggerProvider::builder()
                .with_log_processor(batches.build())
                .with_resource(resource)
                .build();
            exporter.logger = Some(provider.logger_with_scope(scope));
            exporter.logs = Some(provider);
        }
        Ok(Some(exporter))
    }

    /// True if a job in this trace is recorded, as `OTEL_TRACES_SAMPLER` decides: by default if its producer's span is
    /// recorded, or if there is none.
    pub(super) fn samples(&self, producer: Option<&SpanContext>, trace: TraceId) -> bool {
        if self.tracer.is_none() {
            return false;
        }
        let parent = producer.map(|it| Context::new().with_remote_span_context(it.clone()));
        let (kind, name) = (SpanKind::Producer, "enqueue");
        let sampled = self
            .sampler
            .should_sample(parent.as_ref(), trace, name, &kind, &[], &[]);
        sampled.decision == SamplingDecision::RecordAndSample
    }

    /// Starts a span that gets the ids of this context.
    pub(super) fn with_ids<T>(context: &SpanContext, start: impl FnOnce() -> T) -> T {
        NEXT.set(Some((context.trace_id(), context.span_id())));
        let started = start();
        NEXT.set(None);
        started
    }

    /// Sends what is recorded, and ends. Blocks for at most this time for each signal.
    pub(super) fn shut_down(&self, within: Duration) {
        let spans = self
            .spans
            .as_ref()
            .map(|it| it.shutdown_with_timeout(within));
        let logs = self
            .logs
            .as_ref()
            .map(|it| it.shutdown_with_timeout(within));
        for (signal, ended) in [("traces", spans), ("logs", logs)] {
            if let Some(Err(error)) = ended {
                tracing::warn!(signal, %error, "could not export all that was recorded");
            }
        }
    }
}

/// The attributes of this host, which are part of each export. The operator's attributes take precedence.
fn resource(signals: Signals, worker_id: &str) -> Resource {
    let mut resource = Resource::builder()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")));
    if !signals.has_instance_id {
        let id = KeyValue::new("service.instance.id", worker_id.to_owned());
        resource = resource.with_attribute(id);
    }
    if !signals.has_name {
        resource = resource.with_service_name("rouse");
    }
    resource.build()
}

thread_local! {
    /// The ids of the next span that starts on this thread, if they are not random.
    static NEXT: Cell<Option<(TraceId, SpanId)>> = const { Cell::new(None) };
}

/// Random ids, except within [`Exporter::with_ids`].
#[derive(Debug, Default)]
struct Ids(RandomIdGenerator);

impl IdGenerator for Ids {
    fn new_trace_id(&self) -> TraceId {
        NEXT.get()
            .map_or_else(|| self.0.new_trace_id(), |(trace, _)| trace)
    }

    fn new_span_id(&self) -> SpanId {
        NEXT.get()
            .map_or_else(|| self.0.new_span_id(), |(_, span)| span)
    }
}

/// Sends the exporters' requests in the host's runtime. The exporters' own threads have no runtime.
#[derive(Debug, Clone)]
struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    runtime: Handle,
    timeout: Duration,
    signal: &'static str,
}

fn http_client() -> Http {
    let mut roots = RootCertStore::empty();
    // Without certificates, https fails when it is used, and the SDK logs the error.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    let tls = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("ring supports these versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let connector = HttpsConnectorBuilder::new()
        .with_tls_config(tls)
        .https_or_http()
        .enable_http1()
        .build();
    Http {
        client: Client::builder(TokioExecutor::new()).build(connector),
        runtime: Handle::current(),
        timeout: REQUEST_MAX,
        signal: "",
    }
}

impl Http {
    fn of(&self, signal: &'static str, timeout: Option<Duration>) -> Self {
        Self {
            signal,
            timeout: timeout.unwrap_or(REQUEST_MAX),
            ..self.clone()
        }
    }
}

#[async_trait::async_trait]
impl HttpClient for Http {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let (client, timeout) = (self.client.clone(), self.timeout);
        let sent = self.runtime.spawn(async move {
            let response = async {
                let (parts, body) = client.request(request.map(Full::new)).await?.into_parts();
                let body = Limited::new(body, RESPONSE_BYTES_MAX).collect().await?;
                Ok(Response::from_parts(parts, body.to_bytes()))
            };
            tokio::time::timeout(timeout, response).await?
        });
        let response: Result<Response<Bytes>, HttpError> = sent.await?;
        let is_ok = response.as_ref().is_ok_and(|it| it.status().is_success());
        let outcome = if is_ok { "ok" } else { "error" };
        counter!("rouse_otlp_requests_total", "signal" => self.signal, "outcome" => outcome)
            .increment(1);
        response
    }
}
