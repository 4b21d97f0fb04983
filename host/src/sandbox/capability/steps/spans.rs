//! The spans of steps that have started.

use std::collections::HashMap;
use std::fmt::Display;

use opentelemetry::KeyValue;
use opentelemetry::trace::SpanKind;

use crate::traces::{AttemptTrace, Span};

/// The maximum number of steps that have started and are not completed. Further steps have no span: a guest could start
/// any number.
const OPEN_MAX: usize = 64;

/// The spans of the steps that have started.
#[derive(Default)]
pub(in crate::sandbox) struct StepSpans {
    /// By name, until the step is completed.
    open: HashMap<String, Span>,
    /// The number of spans that were started.
    count: usize,
}

impl StepSpans {
    /// Starts the span of a step if the trace is recorded and the attempt has had fewer than `count_max` spans: a guest
    /// can start the same step repeatedly without recording its result.
    pub(super) fn start(&mut self, trace: &AttemptTrace, name: String, count_max: usize) {
        let is_full = self.open.len() >= OPEN_MAX || self.count >= count_max;
        if is_full || self.open.contains_key(&name) {
            return;
        }
        self.count += 1;
        let attributes = || vec![KeyValue::new("rouse.step", name.clone())];
        let span = trace.span("step", SpanKind::Internal, attributes);
        if span.is_recorded() {
            self.open.insert(name, span);
        }
    }

    /// The span of a step that is being completed.
    pub(in crate::sandbox) fn take(&mut self, name: &str) -> Option<Span> {
        self.open.remove(name)
    }
}

/// Ends the span of a step. `error`: why it could not be recorded.
pub(in crate::sandbox) fn end_step(span: Option<Span>, error: Option<impl Display>) {
    if let (Some(mut span), Some(error)) = (span, error) {
        span.fail("not_recorded", &error.to_string());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_of_steps_has_no_more_spans_than_a_job_may_have_steps() {
        let (mut spans, trace) = (StepSpans::default(), AttemptTrace::default());
        for _ in 0..5 {
            spans.start(&trace, "again".into(), 3);
            spans.take("again");
        }
        assert_eq!(spans.count, 3);
    }
}
