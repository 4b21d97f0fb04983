//! What the database says of itself, on the metrics page: queues, dead rows, old transactions (SPEC row D7).
//!
//! Read only while somebody reads that page: counting the jobs of many lanes is not free, and there may be a hundred
//! hosts.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use metrics::gauge;
use tracing::warn;

use super::Shared;
use crate::store::StoreError;

/// Prometheus asks every 15 to 60 s.
const EVERY: Duration = Duration::from_secs(15);

/// Keeps the gauges up to date, for as long as the worker lives and somebody asks for them.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let mut shown = HashSet::new();
    loop {
        if shared.metrics_asked.swap(false, Ordering::Relaxed)
            && let Err(error) = refresh(&shared, &mut shown).await
        {
            warn!(%error, "could not read how the queues fare; their metrics are out of date");
        }
        tokio::time::sleep(EVERY).await;
    }
}

async fn refresh(shared: &Shared, shown: &mut HashSet<(String, String)>) -> Result<(), StoreError> {
    let vitals = shared.store.vitals().await?;
    gauge!("rouse_dead_rows").set(vitals.dead_rows as f64);
    gauge!("rouse_oldest_transaction_seconds").set(vitals.oldest_transaction_s.unwrap_or(0.0));
    gauge!("rouse_xmin_age_transactions").set(vitals.xmin_age.unwrap_or(0) as f64);
    let mut gone = std::mem::take(shown);
    for depth in shared.store.depths().await? {
        let labels = (depth.queue, depth.handler);
        let counts = [depth.ready, depth.scheduled, depth.running];
        set(&labels, counts, depth.oldest_wait_s.unwrap_or(0.0));
        gone.remove(&labels);
        shown.insert(labels);
    }
    for labels in &gone {
        set(labels, [0; 3], 0.0);
    }
    Ok(())
}

fn set((queue, handler): &(String, String), counts: [i64; 3], oldest_wait_s: f64) {
    let labels = [("queue", queue.clone()), ("handler", handler.clone())];
    for (state, jobs) in ["ready", "scheduled", "running"].into_iter().zip(counts) {
        let [queue, handler] = labels.clone();
        gauge!("rouse_jobs", &[queue, handler, ("state", state.to_owned())]).set(jobs as f64);
    }
    gauge!("rouse_oldest_wait_seconds", &labels).set(oldest_wait_s);
}
