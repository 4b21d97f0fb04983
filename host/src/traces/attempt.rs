//! The trace of one attempt: its span, the spans below it, and the lines of its log.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use opentelemetry::logs::{LogRecord as _, Logger as _, Severity};
use opentelemetry::trace::{
    Link, Span as _, SpanBuilder, SpanContext, SpanKind, Status, TraceContextExt as _, TraceFlags,
    TraceState,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace as sdk;
use tracing::Level;

use super::context;
use super::export::Exporter;

/// What is recorded of a job in the spans of its attempts.
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
    /// The other jobs of a batch: the id and the trace context of each.
    pub others: &'a [(i64, SystemTime, Option<&'a str>)],
}

/// The trace of one attempt. Cheap to clone; the attempt's span ends with [`end`](Self::end), or with the last clone.
#[derive(Clone, Default)]
pub struct AttemptTrace(Option<Arc<Inner>>);

struct Inner {
    /// Passed on to requests, and to the jobs that the attempt enqueues.
    context: SpanContext,
    exporter: Option<Arc<Exporter>>,
    /// The attempt's span; `None` if it is not recorded.
    span: Option<Context>,
    /// The job, the attempt and the handler, for lines of its log.
    job: (i64, i32, String),
}

impl AttemptTrace {
    pub(super) fn start(exporter: Option<&Arc<Exporter>>, job: &TracedJob<'_>) -> Self {
        let producer = job.trace.and_then(context::parse);
        let Some(exporter) = exporter else {
            return Self(producer.map(|context| Arc::new(Inner::passed_on(context, job))));
        };
        let enqueue = enqueue_context(exporter, job.id, job.requested_at, producer.as_ref());
        if !enqueue.is_sampled() {
            let inner = Inner {
                exporter: Some(exporter.clone()),
                ..Inner::passed_on(producer.unwrap_or(enqueue), job)
            };
            return Self(Some(Arc::new(inner)));
        }
        if job.attempt == 1 {
            record_enqueue(exporter, job, &enqueue, producer);
        }
        let span = attempt_span(exporter, job, enqueue);
        let span = Context::new().with_span(span);
        Self(Some(Arc::new(Inner {
            context: span.span().span_context().clone(),
            exporter: Some(exporter.clone()),
            span: Some(span),
            ..Inner::passed_on(SpanContext::NONE, job)
        })))
    }

    /// The trace context of the attempt, a `traceparent`; `None` if the job has none, and nothing is exported.
    pub fn traceparent(&self) -> Option<String> {
        let inner = self.0.as_ref()?;
        Some(context::traceparent(&inner.context))
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
        attributes: Vec<KeyValue>,
    ) -> Span {
        let recorded = self.0.as_ref().and_then(|inner| {
            let tracer = inner.exporter.as_ref()?.tracer.as_ref()?;
            let builder = SpanBuilder::from_name(name)
                .with_kind(kind)
                .with_attributes(attributes);
            Some(builder.start_with_context(tracer, inner.span.as_ref()?))
        });
        Span {
            traceparent: match &recorded {
                Some(span) => Some(context::traceparent(span.span_context())),
                None => self.traceparent(),
            },
            recorded,
        }
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

    /// Ends the attempt's span with its outcome; `error`: the kind and the message, if it did not succeed.
    pub fn end(&self, outcome: &'static str, error: Option<(&str, &str)>) {
        let Some(span) = self.0.as_ref().and_then(|inner| inner.span.as_ref()) else {
            return;
        };
        let span = span.span();
        span.set_attribute(KeyValue::new("rouse.outcome", outcome));
        if let Some((kind, message)) = error {
            span.set_attribute(KeyValue::new("error.type", kind.to_owned()));
            span.set_status(Status::error(message.to_owned()));
        }
        span.end();
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
    /// Records nothing, and passes this context on.
    fn passed_on(context: SpanContext, job: &TracedJob<'_>) -> Self {
        Self {
            context,
            exporter: None,
            span: None,
            job: (job.id, job.attempt, job.handler.to_owned()),
        }
    }
}

/// A span below that of an attempt. It ends when it is dropped.
#[derive(Debug, Default)]
pub struct Span {
    recorded: Option<sdk::Span>,
    traceparent: Option<String>,
}

impl Span {
    /// Its trace context for a server, or that of the attempt if it is not recorded.
    pub(crate) fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_deref()
    }

    /// Sets an attribute.
    pub(crate) fn set(&mut self, attribute: KeyValue) {
        if let Some(span) = &mut self.recorded {
            span.set_attribute(attribute);
        }
    }

    /// Marks it as failed. `kind`: a word for the kind of the error.
    pub(crate) fn fail(&mut self, kind: &str, message: String) {
        self.set(KeyValue::new("error.type", kind.to_owned()));
        if let Some(span) = &mut self.recorded {
            span.set_status(Status::error(message));
        }
    }
}

/// The context of a job's enqueue: in the trace of its producer, or else in one of its own.
fn enqueue_context(
    exporter: &Exporter,
    job: i64,
    requested_at: SystemTime,
    producer: Option<&SpanContext>,
) -> SpanContext {
    let trace = match producer {
        Some(producer) => producer.trace_id(),
        None => context::trace_of(job, requested_at),
    };
    let flags = match exporter.samples(producer, trace) {
        true => TraceFlags::SAMPLED,
        false => TraceFlags::default(),
    };
    let span = context::enqueue_of(job, trace);
    SpanContext::new(trace, span, flags, true, TraceState::default())
}

/// Records the enqueue of a job, which took place before.
fn record_enqueue(
    exporter: &Exporter,
    job: &TracedJob<'_>,
    enqueue: &SpanContext,
    producer: Option<SpanContext>,
) {
    let Some(tracer) = &exporter.tracer else {
        return;
    };
    let mut attributes = attributes(job);
    attributes.push(KeyValue::new("messaging.operation.name", "enqueue"));
    attributes.push(KeyValue::new("messaging.operation.type", "create"));
    let builder = SpanBuilder::from_name(format!("enqueue {}", job.handler))
        .with_kind(SpanKind::Producer)
        .with_start_time(job.requested_at)
        .with_attributes(attributes);
    let parent = match producer {
        Some(producer) => Context::new().with_remote_span_context(producer),
        None => Context::new(),
    };
    let span = exporter.with_ids(enqueue, || builder.start_with_context(tracer, &parent));
    let mut span = span;
    span.end_with_timestamp(job.requested_at);
}

fn attempt_span(exporter: &Exporter, job: &TracedJob<'_>, enqueue: SpanContext) -> sdk::Span {
    let tracer = exporter
        .tracer
        .as_ref()
        .expect("otherwise it samples nothing");
    let mut attributes = attributes(job);
    attributes.push(KeyValue::new("messaging.operation.name", "process"));
    attributes.push(KeyValue::new("messaging.operation.type", "process"));
    attributes.push(KeyValue::new(
        "messaging.consumer.id",
        job.worker_id.to_owned(),
    ));
    attributes.push(KeyValue::new("rouse.attempt", i64::from(job.attempt)));
    let mut links = vec![Link::with_context(enqueue.clone())];
    for (id, requested_at, trace) in job.others {
        let producer = trace.and_then(context::parse);
        let of = enqueue_context(exporter, *id, *requested_at, producer.as_ref());
        let id = KeyValue::new("messaging.message.id", id.to_string());
        links.push(Link::new(of, vec![id], 0));
    }
    if !job.others.is_empty() {
        let jobs = i64::try_from(1 + job.others.len()).unwrap_or(i64::MAX);
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
