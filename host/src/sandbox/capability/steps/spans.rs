//! The spans of steps that have started.

use std::collections::HashMap;
use std::fmt::Display;

use opentelemetry::KeyValue;
use opentelemetry::trace::SpanKind;

use crate::traces::{AttemptTrace, Span};

/// Steps that have started and are not completed. Further ones have no span: a guest could start any number.
const OPEN_MAX: usize = 64;

/// The spans of the steps that have started, by name.
#[derive(Default)]
pub(in crate::sandbox) struct StepSpans(HashMap<String, Span>);

impl StepSpans {
    /// Starts the span of a step, if it is recorded.
    pub(super) fn start(&mut self, trace: &AttemptTrace, name: String) {
        if self.0.len() >= OPEN_MAX || self.0.contains_key(&name) {
            return;
        }
        let attributes = || vec![KeyValue::new("rouse.step", name.clone())];
        let span = trace.span("step", SpanKind::Internal, attributes);
        if span.is_recorded() {
            self.0.insert(name, span);
        }
    }

    /// The span of a step that is being completed.
    pub(in crate::sandbox) fn take(&mut self, name: &str) -> Option<Span> {
        self.0.remove(name)
    }
}

/// Ends the span of a step. `error`: why it could not be recorded.
pub(in crate::sandbox) fn end_step(span: Option<Span>, error: Option<impl Display>) {
    if let (Some(mut span), Some(error)) = (span, error) {
        span.fail("not_recorded", &error.to_string());
    }
}
