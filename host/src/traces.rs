//! Traces of attempts and logs of guests, for an OpenTelemetry collector (OTLP over HTTP).
//!
//! A job has one trace: that of its producer, or else one of its own. Its enqueue is a span that the host exports with
//! the first attempt, because no part of Rouse runs in the producer. Each attempt is a span below it, on whichever host
//! it runs ([`AttemptTrace`]); steps and requests are spans below the attempt, and so are the enqueues of the jobs that
//! it enqueues. Nothing spans the host's own loops.
//!
//! Without an endpoint nothing is exported, and the producer's trace context is passed on as it is.

mod attempt;
mod context;
mod export;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

pub(crate) use self::attempt::cut;
pub use self::attempt::{AttemptTrace, Span, TracedJob};
pub use self::context::is_traceparent;
use self::export::Exporter;
pub use self::export::Signals;

/// The maximum time for which a host that is ending waits until its recorded data has been sent.
const SHUTDOWN: Duration = Duration::from_secs(5);

/// Exports traces and logs, if there is an endpoint. Cheap to clone.
#[derive(Clone, Default)]
pub struct Traces(Option<Arc<Exporter>>);

impl Traces {
    /// Starts the exporters of these signals. Call it within a Tokio runtime, which sends the requests.
    ///
    /// # Errors
    /// If the `OTEL_*` variables, which the exporters read, are invalid.
    pub fn start(signals: Signals, worker_id: &str) -> anyhow::Result<Self> {
        let exporter = Exporter::start(signals, worker_id)?;
        Ok(Self(exporter.map(Arc::new)))
    }

    /// The trace of an attempt that starts now.
    pub fn attempt(&self, job: &TracedJob<'_>) -> AttemptTrace {
        AttemptTrace::start(self.0.as_ref(), job, &[])
    }

    /// The trace of an attempt at several jobs, at least one: that of the first job whose trace is recorded.
    pub fn batch(&self, jobs: &[TracedJob<'_>]) -> AttemptTrace {
        let (first, others) = jobs.split_first().expect("a batch has jobs");
        AttemptTrace::start(self.0.as_ref(), first, others)
    }

    /// Sends the recorded data, which takes at most five seconds for each signal.
    pub async fn shut_down(self) {
        if let Some(exporter) = self.0 {
            let stop = tokio::task::spawn_blocking(move || exporter.shut_down(SHUTDOWN));
            // It fails only if the runtime is ending, and then nothing can be sent.
            drop(stop.await);
        }
    }
}

impl fmt::Debug for Traces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Traces").field(&self.0.is_some()).finish()
    }
}
