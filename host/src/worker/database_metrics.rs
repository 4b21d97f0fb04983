//! What the database says of itself, on the metrics page: queues, dead rows, old transactions.
//!
//! Read only when somebody has read that page, for the next time: counting the jobs of many lanes is not free, and there may
//! be a hundred hosts.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::gauge;
use tracing::warn;

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::store::{Depth, StoreError};

/// Prometheus asks every 15 to 60 s.
const EVERY: Duration = Duration::from_secs(15);
/// Reading takes at most one part in so many of the time, however dear it is.
const SHARE: u32 = 20;
/// The most pairs of queue and handler that are shown in the life of a host: each is four series, and stays on the page for
/// good. Whoever has more of them asks `rouse.backlog`.
const PAIRS_MAX: usize = 1_000;

/// Keeps the gauges up to date, for as long as the worker lives and somebody asks for them.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let mut pairs = Pairs::default();
    loop {
        shared.health.metrics_asked.notified().await;
        let started = Instant::now();
        if let Err(error) = refresh(&shared, &mut pairs).await {
            warn_unless_unreachable!(
                error,
                "could not read how the queues fare; their metrics are out of date"
            );
        }
        tokio::time::sleep(rest(started.elapsed())).await;
    }
}

/// How long to rest after a reading that took so long.
fn rest(took: Duration) -> Duration {
    EVERY.max(took * SHARE)
}

async fn refresh(shared: &Shared, pairs: &mut Pairs) -> Result<(), StoreError> {
    let _turn = shared.calls.patient.acquire().await;
    let database_metrics = shared.store.database_metrics().await?;
    gauge!("rouse_dead_rows").set(database_metrics.dead_rows as f64);
    gauge!("rouse_oldest_transaction_seconds")
        .set(database_metrics.oldest_transaction_s.unwrap_or(0.0));
    gauge!("rouse_xmin_age_transactions").set(database_metrics.xmin_age.unwrap_or(0) as f64);
    gauge!("rouse_notification_queue_usage").set(database_metrics.notification_queue_usage);
    let depths = shared.store.depths().await?;
    let (there, gone) = pairs.take(depths);
    for depth in there {
        let counts = [depth.ready, depth.scheduled, depth.running];
        let oldest_wait_s = depth.oldest_wait_s.unwrap_or(0.0);
        set(&(depth.queue, depth.handler), counts, oldest_wait_s);
    }
    for pair in &gone {
        set(pair, [0; 3], 0.0);
    }
    Ok(())
}

type Pair = (String, String);

/// The pairs of queue and handler that are on the page.
#[derive(Default)]
struct Pairs {
    shown: HashSet<Pair>,
    /// It was said that there are more.
    has_warned: bool,
}

impl Pairs {
    /// Which of these are shown; and which are on the page and have no jobs any more.
    fn take(&mut self, depths: Vec<Depth>) -> (Vec<Depth>, Vec<Pair>) {
        let mut gone = self.shown.clone();
        let mut there = Vec::with_capacity(depths.len());
        for depth in depths {
            let pair = (depth.queue.clone(), depth.handler.clone());
            gone.remove(&pair);
            if self.shown.contains(&pair) || self.shown.len() < PAIRS_MAX {
                self.shown.insert(pair);
                there.push(depth);
            } else if !std::mem::replace(&mut self.has_warned, true) {
                warn!(
                    shown = PAIRS_MAX,
                    "there are more queues and handlers than the metrics show; ask rouse.backlog for the others"
                );
            }
        }
        (there, gone.into_iter().collect())
    }
}

fn set((queue, handler): &Pair, counts: [i64; 3], oldest_wait_s: f64) {
    let labels = [("queue", queue.clone()), ("handler", handler.clone())];
    for (state, jobs) in ["ready", "scheduled", "running"].into_iter().zip(counts) {
        let [queue, handler] = labels.clone();
        gauge!("rouse_jobs", &[queue, handler, ("state", state.to_owned())]).set(jobs as f64);
    }
    gauge!("rouse_oldest_wait_seconds", &labels).set(oldest_wait_s);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depth(handler: usize) -> Depth {
        Depth {
            queue: "default".into(),
            handler: handler.to_string(),
            ready: 1,
            scheduled: 0,
            running: 0,
            oldest_wait_s: None,
        }
    }

    #[test]
    fn whoever_has_no_jobs_any_more_is_shown_with_none() {
        let mut pairs = Pairs::default();
        let (there, gone) = pairs.take(vec![depth(1), depth(2)]);
        assert_eq!((there.len(), gone.len()), (2, 0));
        let (there, gone) = pairs.take(vec![depth(2)]);
        assert_eq!(there, [depth(2)]);
        assert_eq!(gone, [("default".to_owned(), "1".to_owned())]);
    }

    #[test]
    fn the_page_does_not_grow_beyond_its_limit() {
        let mut pairs = Pairs::default();
        pairs.take((0..PAIRS_MAX).map(depth).collect());
        let (there, gone) = pairs.take(vec![depth(7), depth(PAIRS_MAX)]);
        assert_eq!(there, [depth(7)], "a new one finds no room");
        assert_eq!(gone.len(), PAIRS_MAX - 1);
    }

    #[test]
    fn what_is_dear_to_read_is_read_seldom() {
        assert_eq!(rest(Duration::from_millis(2)), EVERY);
        assert_eq!(rest(Duration::from_secs(5)), Duration::from_secs(100));
    }
}
