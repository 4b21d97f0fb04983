//! Database metrics: queues, dead rows, old transactions.
//!
//! They are queried only after the metrics page was read, for its next reading: counting the jobs of many lanes is
//! expensive, and there may be a hundred hosts.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::gauge;
use tracing::warn;

use super::Shared;
use super::fairness::OTHERS;
use super::reach::warn_unless_unreachable;
use crate::store::{Depth, FairAge, StoreError};

/// Prometheus scrapes every 15 to 60 s.
const EVERY: Duration = Duration::from_secs(15);
/// The queries take at most 5 % of the time, however expensive they are.
const SHARE: u32 = 20;
/// The maximum number of pairs of queue and handler that a host ever shows. Each pair has four time series, which stay
/// on the page until the host ends. `rouse.backlog` shows all pairs.
const PAIRS_MAX: usize = 1_000;
/// The maximum number of keys of fair queues that a host ever shows by name.
const KEYS_MAX: usize = 100;

/// Updates the gauges after each reading, until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    let mut pairs = Pairs::default();
    let mut ages = Ages::default();
    loop {
        shared.health.metrics_read.notified().await;
        let started = Instant::now();
        if let Err(error) = refresh(&shared, &mut pairs, &mut ages).await {
            warn_unless_unreachable!(
                error,
                "could not read the database metrics; they are out of date until a later reading succeeds"
            );
        }
        tokio::time::sleep(pause_after(started.elapsed())).await;
    }
}

/// The pause after a refresh that took this long.
fn pause_after(took: Duration) -> Duration {
    EVERY.max(took * SHARE)
}

async fn refresh(shared: &Shared, pairs: &mut Pairs, ages: &mut Ages) -> Result<(), StoreError> {
    let _permit = shared.calls.patient.acquire().await;
    let database_metrics = shared.store.database_metrics().await?;
    gauge!("rouse_dead_rows").set(database_metrics.dead_rows as f64);
    gauge!("rouse_oldest_transaction_seconds")
        .set(database_metrics.oldest_transaction_s.unwrap_or(0.0));
    gauge!("rouse_xmin_age_transactions").set(database_metrics.xmin_age.unwrap_or(0) as f64);
    gauge!("rouse_notification_queue_usage").set(database_metrics.notification_queue_usage);
    let depths = shared.store.depths().await?;
    let (shown, gone) = pairs.update(depths);
    for depth in shown {
        let counts = [depth.ready, depth.scheduled, depth.running];
        let oldest_wait_s = depth.oldest_wait_s.unwrap_or(0.0);
        set(&(depth.queue, depth.handler), counts, oldest_wait_s);
    }
    for pair in &gone {
        set(pair, [0; 3], 0.0);
    }
    ages.show(shared.store.fair_ages().await?);
    Ok(())
}

/// The ages of the oldest ready jobs of fair queues that are on the page, by queue, dimension and key.
#[derive(Default)]
struct Ages {
    shown: HashMap<[String; 3], f64>,
    /// The number of these entries that are keys shown by name.
    keys: usize,
}

impl Ages {
    fn show(&mut self, ages: Vec<FairAge>) {
        self.update(ages);
        for ([queue, dimension, key], age) in &self.shown {
            let labels = [
                ("queue", queue.clone()),
                ("dimension", dimension.clone()),
                ("key", key.clone()),
            ];
            gauge!("rouse_fair_oldest_ready_seconds", &labels).set(*age);
        }
    }

    /// The keys beyond the maximum share an entry with the age of their oldest job; a key without ready jobs has 0.
    fn update(&mut self, ages: Vec<FairAge>) {
        for age in self.shown.values_mut() {
            *age = 0.0;
        }
        for FairAge {
            queue,
            dimension,
            key,
            age_s,
        } in ages
        {
            let mut series = [queue, dimension, key];
            if !self.shown.contains_key(&series) {
                match self.keys < KEYS_MAX {
                    true => self.keys += 1,
                    false => series[2] = OTHERS.to_owned(),
                }
            }
            let shown = self.shown.entry(series).or_default();
            *shown = shown.max(age_s);
        }
    }
}

type Pair = (String, String);

/// The pairs of queue and handler that are on the page.
#[derive(Default)]
struct Pairs {
    shown: HashSet<Pair>,
    /// True if a warning that there are more pairs has been logged.
    has_warned: bool,
}

impl Pairs {
    /// Returns the depths that are shown, and the pairs on the page that no longer have jobs.
    fn update(&mut self, depths: Vec<Depth>) -> (Vec<Depth>, Vec<Pair>) {
        let mut gone = self.shown.clone();
        let mut shown = Vec::with_capacity(depths.len());
        for depth in depths {
            let pair = (depth.queue.clone(), depth.handler.clone());
            gone.remove(&pair);
            if self.shown.contains(&pair) || self.shown.len() < PAIRS_MAX {
                self.shown.insert(pair);
                shown.push(depth);
            } else if !std::mem::replace(&mut self.has_warned, true) {
                warn!(
                    shown = PAIRS_MAX,
                    "there are more pairs of queue and handler than the metrics show; query rouse.backlog for the others"
                );
            }
        }
        (shown, gone.into_iter().collect())
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
    fn a_pair_without_jobs_is_set_to_zero() {
        let mut pairs = Pairs::default();
        let (shown, gone) = pairs.update(vec![depth(1), depth(2)]);
        assert_eq!((shown.len(), gone.len()), (2, 0));
        let (shown, gone) = pairs.update(vec![depth(2)]);
        assert_eq!(shown, [depth(2)]);
        assert_eq!(gone, [("default".to_owned(), "1".to_owned())]);
    }

    #[test]
    fn the_number_of_pairs_on_the_page_is_limited() {
        let mut pairs = Pairs::default();
        pairs.update((0..PAIRS_MAX).map(depth).collect());
        let (shown, gone) = pairs.update(vec![depth(7), depth(PAIRS_MAX)]);
        assert_eq!(shown, [depth(7)], "the new pair is not shown");
        assert_eq!(gone.len(), PAIRS_MAX - 1);
    }

    #[test]
    fn keys_beyond_the_limit_share_the_age_of_their_oldest_job() {
        let age = |key: usize, age_s: f64| FairAge {
            queue: "mail".into(),
            dimension: "tenant".into(),
            key: key.to_string(),
            age_s,
        };
        let of = |ages: &Ages, key: &str| ages.shown[&["mail", "tenant", key].map(String::from)];
        let mut ages = Ages::default();
        ages.update((0..KEYS_MAX + 3).map(|key| age(key, key as f64)).collect());
        assert_eq!(ages.shown.len(), KEYS_MAX + 1);
        assert_eq!(
            (of(&ages, "7"), of(&ages, OTHERS)),
            (7.0, (KEYS_MAX + 2) as f64)
        );
        ages.update(vec![age(8, 1.5), age(KEYS_MAX, 2.0)]);
        assert_eq!(
            [of(&ages, "7"), of(&ages, "8"), of(&ages, OTHERS)],
            [0.0, 1.5, 2.0]
        );
    }

    #[test]
    fn an_expensive_refresh_is_repeated_rarely() {
        assert_eq!(pause_after(Duration::from_millis(2)), EVERY);
        assert_eq!(
            pause_after(Duration::from_secs(5)),
            Duration::from_secs(100)
        );
    }
}
