//! Tasks that enqueue, each over a connection of its own.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use tokio::time::Instant;
use tokio_postgres::types::Json;

use super::calls::{Caller, Manner};
use super::ledger::{Answer, Ask, Ledger, now_us};
use super::load::Wish;
use super::random::Random;

const ENQUEUE: &str = "SELECT rouse.enqueue($1, $2, queue => $3, priority => $4, tags => $5,
    run_at => to_timestamp($6::bigint / 1000000.0), unique_key => $7, max_attempts => $8, tenant => $9)";
/// Jobs that something may be done to from outside.
const RECENT_MAX: usize = 300;

/// Jobs that were accepted lately.
#[derive(Default)]
pub(super) struct Recent {
    any: Mutex<VecDeque<i64>>,
    /// Those that take a while: they are more likely to be there still.
    slow: Mutex<VecDeque<i64>>,
    /// Those that wait for their time, and are moved at most once.
    scheduled: Mutex<VecDeque<i64>>,
    pub(super) accepted: AtomicU64,
    pub(super) refused: AtomicU64,
    pub(super) unknown: AtomicU64,
}

impl Recent {
    fn note(&self, id: i64, wish: &Wish) {
        self.accepted.fetch_add(1, Ordering::Relaxed);
        if wish.unique_key.is_none() && wish.run_in_ms.is_some_and(|ms| ms > 2_500) {
            push(&self.scheduled, id);
            // Nothing else is done to it.
            return;
        }
        push(&self.any, id);
        if wish.sleep_ms > 700 || wish.run_in_ms.is_some() {
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

    /// A job that waits for its time, which nobody else will get.
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
    /// From one job to the next, in the middle.
    pub(super) every: Duration,
    pub(super) recent: Arc<Recent>,
    pub(super) url: String,
    pub(super) ledger: Arc<Ledger>,
}

impl Producer {
    /// Enqueues until then.
    pub(super) async fn run(self, until: Instant) -> Result<()> {
        let mut caller = Caller::new(&self.url, &self.ledger);
        let mut random = Random::new(self.seed, &format!("pace {}", self.number));
        let mut next = Instant::now();
        for place in 0.. {
            // What an outage has held up is not made up for: that would be another load.
            next = next.max(Instant::now() - self.every * 20)
                + self.every * random.between(0, 200) as u32 / 100;
            if next >= until {
                break;
            }
            tokio::time::sleep_until(next).await;
            let wish = Wish::nth(self.seed, self.number, place);
            self.enqueue(&mut caller, wish).await?;
        }
        Ok(())
    }

    async fn enqueue(&self, caller: &mut Caller<'_>, wish: Wish) -> Result<()> {
        let run_at_us = wish.run_in_ms.map(|ms| now_us() + ms * 1000);
        let payload = Json(wish.payload());
        let usual = Manner::default();
        caller.manner = Manner {
            roll_back: wish.rolled_back,
            patience: wish
                .hangs_up_us
                .map_or(usual.patience, Duration::from_micros),
        };
        let ask = Ask::Enqueue {
            wish: wish.clone(),
            run_at_us,
        };
        let answer = caller
            .call(
                ask,
                ENQUEUE,
                &[
                    &wish.handler,
                    &payload,
                    &wish.queue,
                    &wish.priority,
                    &wish.tags,
                    &run_at_us,
                    &wish.unique_key,
                    &wish.max_attempts,
                    &wish.tenant,
                ],
            )
            .await?;
        match answer {
            Some(Answer::Ok(id)) => self.recent.note(id, &wish),
            Some(Answer::Refused(_)) => {
                self.recent.refused.fetch_add(1, Ordering::Relaxed);
            }
            Some(Answer::Unknown(_)) => {
                self.recent.unknown.fetch_add(1, Ordering::Relaxed);
            }
            None => {}
        }
        Ok(())
    }
}
