//! Tasks that enqueue, each over a connection of its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use serde_json::{Map, Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_postgres::types::Json;

use super::calls::{CallOptions, Caller};
use super::ledger::{Ledger, Request, Response, now_us};
use super::load::JobSpec;
use super::random::Random;
use super::suspending;

const ENQUEUE: &str = "SELECT rouse.enqueue($1, $2, queue => $3, priority => $4, tags => $5,
    run_at => to_timestamp($6::bigint / 1000000.0), unique_key => $7, max_attempts => $8, tenant => $9, after => $10)";
/// Maximum number of recent jobs that admin actions choose from.
const RECENT_MAX: usize = 300;

/// The maximum number of jobs that a job waits for.
const PARENTS_MAX: usize = 4;

/// Recently accepted jobs.
#[derive(Default)]
pub(super) struct Recent {
    any: Mutex<VecDeque<i64>>,
    /// Jobs that take a while, and are more likely to be live.
    slow: Mutex<VecDeque<i64>>,
    /// Scheduled jobs, which are rescheduled at most once.
    scheduled: Mutex<VecDeque<i64>>,
    pub(super) accepted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) unknown: AtomicU64,
}

impl Recent {
    fn add(&self, id: i64, spec: &JobSpec) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        if spec.unique_key.is_none() && spec.run_in_ms.is_some_and(|ms| ms > 2_500) {
            push(&self.scheduled, id);
            // No other admin action may touch it.
            return;
        }
        push(&self.any, id);
        if spec.sleep_ms > 700 || spec.run_in_ms.is_some() {
            push(&self.slow, id);
        }
    }

    /// A job that is probably live.
    pub(super) fn live(&self, random: &mut Random) -> Option<i64> {
        let from = match random.per_mille(600) {
            true => &self.slow,
            false => &self.any,
        };
        let from = from.lock().unwrap_or_else(PoisonError::into_inner);
        let newest = from.len().min(25) as u64;
        (newest > 0).then(|| from[from.len() - 1 - random.below(newest) as usize])
    }

    /// A job that is probably finished.
    pub(super) fn finished(&self, random: &mut Random) -> Option<i64> {
        let any = self.any.lock().unwrap_or_else(PoisonError::into_inner);
        (any.len() > 50).then(|| any[random.below(any.len() as u64 / 2) as usize])
    }

    /// A scheduled job, which no later call returns.
    pub(super) fn scheduled(&self) -> Option<i64> {
        let mut scheduled = self
            .scheduled
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        scheduled.pop_back()
    }
}

fn push(queue: &Mutex<VecDeque<i64>>, id: i64) {
    let mut queue = queue.lock().unwrap_or_else(PoisonError::into_inner);
    if queue.len() == RECENT_MAX {
        queue.pop_front();
    }
    queue.push_back(id);
}

/// One producer.
pub(super) struct Producer {
    pub(super) seed: u64,
    pub(super) number: usize,
    /// The mean interval between jobs.
    pub(super) every: Duration,
    pub(super) recent: Arc<Recent>,
    pub(super) url: String,
    pub(super) ledger: Arc<Ledger>,
}

impl Producer {
    /// Enqueues until `until`.
    pub(super) async fn run(self, until: Instant) -> Result<()> {
        let mut caller = Caller::new(&self.url, &self.ledger);
        let mut random = Random::new(self.seed, &format!("pace {}", self.number));
        let mut next = Instant::now();
        // The last jobs that were accepted and are not scheduled, oldest first.
        let mut last = VecDeque::new();
        let mut signals = JoinSet::new();
        for index in 0.. {
            // Jobs that were missed during an outage are not enqueued later: that would be a different load.
            next = next.max(Instant::now() - self.every * 20)
                + self.every * random.between(0, 200) as u32 / 100;
            if next >= until {
                break;
            }
            tokio::time::sleep_until(next).await;
            let mut spec = JobSpec::nth(self.seed, self.number, index);
            spec.after = after(&spec, &last);
            let ends_soon = spec.ends_soon();
            let id = self.enqueue(&mut caller, spec.clone()).await?;
            if let Some(id) = id {
                self.signal(&mut signals, id, &spec);
            }
            while let Some(sent) = signals.try_join_next() {
                sent??;
            }
            if let Some(id) = id.filter(|id| ends_soon && !last.contains(id)) {
                last.push_back(id);
                if last.len() > PARENTS_MAX {
                    last.pop_front();
                }
            }
        }
        while let Some(sent) = signals.join_next().await {
            sent??;
        }
        Ok(())
    }

    /// Sends the signals of this job at their times.
    fn signal(&self, sending: &mut JoinSet<Result<()>>, job: i64, spec: &JobSpec) {
        let delays = spec.suspending.iter().flat_map(|it| &it.signals_ms);
        for (nth, delay) in delays.enumerate() {
            let (url, ledger) = (self.url.clone(), self.ledger.clone());
            let (mark, delay) = (spec.n * 10 + nth as i64, Duration::from_millis(*delay));
            sending.spawn(async move { suspending::signal(&url, &ledger, job, mark, delay).await });
        }
    }

    /// Returns the id of the job, if it was accepted.
    async fn enqueue(&self, caller: &mut Caller<'_>, spec: JobSpec) -> Result<Option<i64>> {
        let run_at_us = spec.run_in_ms.map(|ms| now_us() + ms * 1000);
        let payload = Json(spec.payload());
        caller.options = CallOptions::of_enqueue(spec.rolled_back, spec.hangs_up_us);
        let request = Request::Enqueue {
            spec: spec.clone(),
            run_at_us,
        };
        let response = caller
            .call(
                request,
                ENQUEUE,
                &[
                    &spec.handler,
                    &payload,
                    &spec.queue,
                    &spec.priority,
                    &spec.tags,
                    &run_at_us,
                    &spec.unique_key,
                    &spec.max_attempts,
                    &spec.tenant,
                    &spec.after.clone().map(Json),
                ],
            )
            .await?;
        match response {
            Some(Response::Ok(id)) => {
                self.recent.add(id, &spec);
                return Ok(Some(id));
            }
            Some(Response::Refused(_)) => {
                self.recent.refused.fetch_add(1, Ordering::Relaxed);
            }
            Some(Response::Unknown(_)) => {
                self.recent.unknown.fetch_add(1, Ordering::Relaxed);
            }
            None => {}
        }
        Ok(None)
    }
}

/// The argument `after` of this job: the last jobs of its producer. `None` if it does not wait for any.
fn after(spec: &JobSpec, last: &VecDeque<i64>) -> Option<Value> {
    let parents = last.iter().rev().take(spec.parents);
    let named = parents.map(|id| {
        let job = match spec.runs_on_failure {
            true => json!({"job": id, "on_failure": "run"}),
            false => json!(id),
        };
        (format!("job {id}"), job)
    });
    let named: Map<String, Value> = named.collect();
    (!named.is_empty()).then_some(Value::Object(named))
}
