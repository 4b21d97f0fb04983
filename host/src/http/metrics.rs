//! All metrics, as Prometheus text or in the format of OpenMetrics.

mod help_texts;
mod open;

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use metrics::gauge;
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::{sync::Notify, time};

use crate::worker::Exemplars;

/// Upper bounds of the histograms whose names end in `_seconds`: from a warm call to a small handler to the longest
/// attempts. Buckets, not quantiles, because buckets of several hosts add up.
const SECONDS: [f64; 16] = [
    0.000_1, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0,
    300.0, 3600.0,
];

/// The interval at which histograms are folded if nobody scrapes them.
const UPKEEP_EVERY: Duration = Duration::from_secs(1);

/// The metrics of this process.
#[derive(Clone)]
pub struct Metrics {
    handle: PrometheusHandle,
    scraped: Arc<Notify>,
    exemplars: Exemplars,
}

/// Installs the recorder of this process. A second call returns the same metrics.
///
/// # Errors
/// If another recorder is already installed.
pub fn install_metrics() -> Result<Metrics, BuildError> {
    static INSTALLED: Mutex<Option<Metrics>> = Mutex::new(None);
    let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(metrics) = &*installed {
        return Ok(metrics.clone());
    }
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)?
        .install_recorder()?;
    help_texts::describe();
    gauge!("rouse_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    let metrics = Metrics {
        handle,
        scraped: Arc::default(),
        exemplars: Exemplars::new(&SECONDS),
    };
    Ok(installed.insert(metrics).clone())
}

impl Metrics {
    /// All metrics, with the media type of their format: OpenMetrics with exemplars if the `Accept` header names it,
    /// otherwise Prometheus' text format.
    pub fn render(&self, accept: Option<&str>) -> (&'static str, String) {
        self.scraped.notify_one();
        let text = self.handle.render();
        match accept.is_some_and(open::is_accepted) {
            true => (open::MEDIA_TYPE, open::from_text(&text, &self.exemplars)),
            false => ("text/plain; version=0.0.4; charset=utf-8", text),
        }
    }

    /// The exemplars of attempts, which workers record.
    pub fn exemplars(&self) -> Exemplars {
        self.exemplars.clone()
    }

    /// Notified at each scrape. Expensive metrics are computed then, for the next scrape.
    pub fn scraped(&self) -> Arc<Notify> {
        self.scraped.clone()
    }

    /// Keeps memory bounded if nobody scrapes: histograms hold every sample until they are folded.
    pub async fn run_upkeep(&self) -> Infallible {
        let mut ticks = time::interval(UPKEEP_EVERY);
        loop {
            ticks.tick().await;
            self.handle.run_upkeep();
        }
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}
