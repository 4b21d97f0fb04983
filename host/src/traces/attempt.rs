//! The trace of one attempt: its span, the spans below it, and the lines of its log.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use opentelemetry::logs::{LogRecord as _, Logger as _, Severity};
use opentelemetry::trace::{
    Link, Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _, TraceFlags,
    TraceState,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace as sdk;
use opentelemetry_sdk::trace::SdkTracer;
use tracing::Level;

use super::context;
use super::export::Exporter;

/// The maximum size of a text in a span, in bytes. Longer texts are cut, because thousands of spans may wait for their
/// export.
const TEXT_BYTES_MAX: usize = 1 << 10;

/// The data about a job that the spans of its attempts record.
#[derive(Debug, Clone)]
pub struct TracedJob<'a> {
    /// The job's id.
    pub id: i64,
    /// The handler that runs it.
    pub handler: &'a str,
    /// Its queue.
    pub queue: &'a str,
    /// Its tenant.
    pub tenant: Option<&'a str>,
    /// The number of the attempt: 1 for the first.
    pub attempt: i32,
    /// When it was enqueued, by the database's clock.
    pub requested_at: SystemTime,
    /// The trace context of its producer, a `traceparent`. An invalid one is ignored.
    pub trace: Option<&'a str>,
    /// The worker that runs it.
    pub worker_id: &'a str,
    /// True if the span of its enqueue is exported with this attempt: no earlier one is known to have exported it.
    pub exports_enqueue: bool,
}

/// The trace of one attempt. Cheap to clone; the attempt's span ends with [`end`](Self::end), or with the last clone.
#[derive(Clone, Default)]
pub struct AttemptTrace(Option<Arc<Inner>>);

struct Inner {
    /// The context for requests and for the jobs that the attempt enqueues, a `traceparent`; `None` if there is none.
    traceparent: Option<String>,
    exporter: Option<Arc<Exporter>>,
    /// The context of the lines of its log.
    context: SpanContext,
    /// The attempt's span; `None` if it is not recorded.
    span: Option<Context>,
    /// When the guest ended, or the attempt without it: the settlement comes later.
    ran_at: OnceLock<SystemTime>,
    /// The job, the attempt and the handler, for lines of its log.
    job: (i64, i32, String),
}

impl AttemptTrace {
    /// `others`: the other jobs of a batch. The attempt's span is in the trace of the first job whose trace is recorded;
    /// `job` is the one of the lines of its log.
    pub(super) fn start(
        exporter: Option<&Arc<Exporter>>,
        job: &TracedJob<'_>,
        others: &[TracedJob<'_>],
    ) -> Self {
        let passed_on = || job.trace.filter(|it| context::is_traceparent(it));
        let Some(exporter) = exporter else {
            let passed_on = passed_on();
            return Self(passed_on.map(|it| Arc::new(Inner::new(None, Some(it), None, job))));
        };
        let Some(tracer) = &exporter.tracer else {
            // Only logs are exported: this context is not passed on to others, which may record traces.
            let context = Enqueue::of(exporter, job).context;
            let inner = Inner::new(Some(exporter), passed_on(), Some(context), job);
            return Self(Some(Arc::new(inner)));
        };
        let all = std::iter::once(job).chain(others);
        let all: Vec<_> = all.map(|job| (job, Enqueue::of(exporter, job))).collect();
        let mut recorded = all
            .iter()
            .filter(|(_, enqueue)| enqueue.context.is_sampled());
        for (job, enqueue) in recorded.clone().filter(|(job, _)| job.exports_enqueue) {
            enqueue.record(tracer, job);
        }
        let Some((first, enqueue)) = recorded.next() else {
            let context = all[0].1.context.clone();
            let own = context::traceparent(&context);
            let passed_on = passed_on().unwrap_or(&own);
            let inner = Inner::new(Some(exporter), Some(passed_on), Some(context), job);
            return Self(Some(Arc::new(inner)));
        };
        let mut links = vec![Link::with_context(enqueue.context.clone())];
        for (other, enqueue) in all.iter().filter(|(other, _)| other.id != first.id) {
            let id = KeyValue::new("messaging.message.id", other.id.to_string());
            links.push(Link::new(enqueue.context.clone(), vec![id], 0));
        }
        let span = attempt_span(tracer, first, enqueue.context.clone(), links);
        let span = Context::new().with_span(span);
        let context = span.span().span_context().clone();
        let own = context::traceparent(&context);
        Self(Some(Arc::new(Inner {
            span: Some(span),
            ..Inner::new(Some(exporter), Some(&own), Some(context), job)
        })))
    }

    /// The trace context of the attempt, a `traceparent`; `None` if the job has none, and no traces are exported.
    pub fn traceparent(&self) -> Option<&str> {
        self.0.as_ref()?.traceparent.as_deref()
    }

    /// The id of its trace in hexadecimal, if it is recorded.
    pub fn recorded_id(&self) -> Option<String> {
        let inner = self.0.as_ref()?;
        inner.span.as_ref()?;
        Some(inner.context.trace_id().to_string())
    }

    /// Starts a span below the attempt's. It records nothing if the attempt is not recorded.
    pub(crate) fn span(
        &self,
        name: impl Into<Cow<'static, str>>,
        kind: SpanKind,
        attributes: impl FnOnce() -> Vec<KeyValue>,
    ) -> Span {
        Span(self.0.as_ref().and_then(|inner| {
            let tracer = inner.exporter.as_ref()?.tracer.as_ref()?;
            let parent = inner.span.as_ref()?;
            let builder = SpanBuilder::from_name(name)
                .with_kind(kind)
                .with_attributes(attributes());
            Some(builder.start_with_context(tracer, parent))
        }))
    }

    /// Exports a line of the guest's log.
    pub(crate) fn log(&self, level: Level, line: &str) {
        let Some(inner) = &self.0 else { return };
        let logger = inner.exporter.as_ref().and_then(|it| it.logger.as_ref());
        let Some(logger) = logger else { return };
        let (severity, text) = match level {
            Level::TRACE => (Severity::Trace, "TRACE"),
            Level::DEBUG => (Severity::Debug, "DEBUG"),
            Level::INFO => (Severity::Info, "INFO"),
            Level::WARN => (Severity::Warn, "WARN"),
            Level::ERROR => (Severity::Error, "ERROR"),
        };
        let (job, attempt, handler) = &inner.job;
        let mut record = logger.create_log_record();
        record.set_timestamp(SystemTime::now());
        record.set_severity_number(severity);
        record.set_severity_text(text);
        record.set_body(line.to_owned().into());
        record.add_attribute("rouse.job.id", *job);
        record.add_attribute("rouse.attempt", i64::from(*attempt));
        record.add_attribute("rouse.handler", handler.clone());
        let context = &inner.context;
        record.set_trace_context(
            context.trace_id(),
            context.span_id(),
            Some(context.trace_flags()),
        );
        logger.emit(record);
    }

    /// Notes that the guest has ended, or the attempt without it: the settlement is not part of the span. Only the
    /// first call counts.
    pub fn ran(&self) {
        if let Some(inner) = &self.0 {
            inner.ran_at.get_or_init(SystemTime::now);
        }
    }

    /// Ends the attempt's span with its outcome; `error`: the kind and the message, if it did not succeed.
    pub fn end(&self, outcome: &'static str, error: Option<(&str, &str)>) {
        let Some(inner) = &self.0 else { return };
        let Some(span) = inner.span.as_ref().map(|context| context.span()) else {
            return;
        };
        span.set_attribute(KeyValue::new("rouse.outcome", outcome));
        if let Some((kind, message)) = error {
            span.set_attribute(KeyValue::new("error.type", kind.to_owned()));
            span.set_status(Status::error(cut(message)));
        }
        span.end_with_timestamp(*inner.ran_at.get_or_init(SystemTime::now));
    }
}

impl fmt::Debug for AttemptTrace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AttemptTrace")
            .field(&self.traceparent())
            .finish()
    }
}

impl Inner {
    /// Without a span.
    fn new(
        exporter: Option<&Arc<Exporter>>,
        traceparent: Option<&str>,
        context: Option<SpanContext>,
        job: &TracedJob<'_>,
    ) -> Self {
        Self {
            traceparent: traceparent.map(str::to_owned),
            exporter: exporter.cloned(),
            context: context.unwrap_or(SpanContext::NONE),
            span: None,
            ran_at: OnceLock::new(),
            job: (job.id, job.attempt, job.handler.to_owned()),
        }
    }
}

/// A span below that of an attempt. It ends when it is dropped.
#[derive(Debug, Default)]
pub struct Span(Option<sdk::Span>);

impl Span {
    /// Its trace context, for a server; `None` if it is not recorded.
    pub(crate) fn traceparent(&self) -> Option<String> {
        let span = self.0.as_ref()?;
        Some(context::traceparent(span.span_context()))
    }

    /// True if it records something.
    pub(crate) fn is_recorded(&self) -> bool {
        self.0.is_some()
    }

    /// Sets an attribute.
    pub(crate) fn set(&mut self, attribute: KeyValue) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(attribute);
        }
    }

    /// Marks it as failed. `kind`: a word for the kind of the error.
    pub(crate) fn fail(&mut self, kind: &str, message: &str) {
        if let Some(span) = &mut self.0 {
            span.set_attribute(KeyValue::new("error.type", kind.to_owned()));
            span.set_status(Status::error(cut(message)));
        }
    }
}

/// The beginning of a text.
pub(crate) fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(TEXT_BYTES_MAX)].to_owned()
}

/// The enqueue of a job: a span that this host may export.
struct Enqueue {
    /// In the trace of the producer, or else in one of its own.
    context: SpanContext,
    producer: Option<SpanContext>,
}

impl Enqueue {
    fn of(exporter: &Exporter, job: &TracedJob<'_>) -> Self {
        let producer = job.trace.and_then(context::parse);
        let trace = match &producer {
            Some(producer) => producer.trace_id(),
            None => context::trace_of(job.id, job.requested_at),
        };
        let flags = match exporter.samples(producer.as_ref(), trace) {
            true => TraceFlags::SAMPLED,
            false => TraceFlags::default(),
        };
        let span = context::enqueue_of(job.id, trace);
        Self {
            context: SpanContext::new(trace, span, flags, true, TraceState::default()),
            producer,
        }
    }

    /// Exports the span. The enqueue itself took place earlier.
    fn record(&self, tracer: &SdkTracer, job: &TracedJob<'_>) {
        let mut attributes = attributes(job);
        attributes.push(KeyValue::new("messaging.operation.name", "enqueue"));
        attributes.push(KeyValue::new("messaging.operation.type", "create"));
        let builder = SpanBuilder::from_name(format!("enqueue {}", job.handler))
            .with_kind(SpanKind::Producer)
            .with_start_time(job.requested_at)
            .with_attributes(attributes);
        let parent = match &self.producer {
            Some(producer) => Context::new().with_remote_span_context(producer.clone()),
            None => Context::new(),
        };
        let mut span = Exporter::with_ids(&self.context, || {
            builder.start_with_context(tracer, &parent)
        });
        span.end_with_timestamp(job.requested_at);
    }
}

fn attempt_span(
    tracer: &SdkTracer,
    job: &TracedJob<'_>,
    enqueue: SpanContext,
    links: Vec<Link>,
) -> sdk::Span {
    let mut attributes = attributes(job);
    attributes.push(KeyValue::new("messaging.operation.name", "process"));
    attributes.push(KeyValue::new("messaging.operation.type", "process"));
    attributes.push(KeyValue::new(
        "messaging.consumer.id",
        job.worker_id.to_owned(),
    ));
    attributes.push(KeyValue::new("rouse.attempt", i64::from(job.attempt)));
    if links.len() > 1 {
        let jobs = i64::try_from(links.len()).unwrap_or(i64::MAX);
        attributes.push(KeyValue::new("messaging.batch.message_count", jobs));
    }
    let parent = Context::new().with_remote_span_context(enqueue);
    SpanBuilder::from_name(format!("process {}", job.handler))
        .with_kind(SpanKind::Consumer)
        .with_attributes(attributes)
        .with_links(links)
        .start_with_context(tracer, &parent)
}

/// The attributes of both spans of a job, by the conventions for messaging:
/// <https://opentelemetry.io/docs/specs/semconv/messaging/messaging-spans/>.
fn attributes(job: &TracedJob<'_>) -> Vec<KeyValue> {
    let mut attributes = Vec::with_capacity(10);
    attributes.push(KeyValue::new("messaging.system", "rouse"));
    attributes.push(KeyValue::new(
        "messaging.destination.name",
        job.queue.to_owned(),
    ));
    attributes.push(KeyValue::new("messaging.message.id", job.id.to_string()));
    attributes.push(KeyValue::new("rouse.handler", job.handler.to_owned()));
    if let Some(tenant) = job.tenant {
        attributes.push(KeyValue::new("rouse.tenant", tenant.to_owned()));
    }
    attributes
}
