//! Writes outcomes: as many as have come up, in one statement.
//!
//! While one batch is being committed the next one gathers, so batches grow with the load and
//! nothing waits for a timer. One outcome that Postgres cannot store fails alone.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use metrics::{counter, histogram};
use tokio::sync::mpsc;
use tokio_postgres::error::SqlState;
use tracing::{debug, error, info, warn};

use super::Shared;
use super::boottime::BootTime;
use crate::job::{Attempt, AttemptError, ErrorKind, State};
use crate::store::{Fate, JsonText, Locked, Settlement, StoreError};

/// How many outcomes may wait before attempts wait with them.
pub(super) const QUEUE_MAX: usize = 2000;
/// The most that one statement settles.
const BATCH_MAX: usize = 500;
/// The wait after a failure that may pass.
const RETRY_AFTER: Duration = Duration::from_millis(200);

/// What the attempts send.
pub(super) enum Ended {
    /// An attempt has ended.
    Settle(Unsettled),
    /// All attempts have ended.
    NoMore,
}

/// An outcome that is not written yet.
pub(super) struct Unsettled {
    pub(super) settlement: Settlement,
    pub(super) handler: String,
    pub(super) attempt: Attempt,
    /// Before its claim was asked for.
    pub(super) asked: BootTime,
}

/// Settles until there is no more.
pub(super) async fn run(shared: Arc<Shared>, mut ended: mpsc::Receiver<Ended>) {
    let mut more = true;
    let mut received = Vec::new();
    // Outcomes of jobs that somebody else's open transaction has locked.
    let mut locked = Vec::new();
    while more || !locked.is_empty() {
        if locked.is_empty() {
            ended.recv_many(&mut received, BATCH_MAX).await;
        } else if more {
            // Where nothing comes in the meantime, the locked ones are tried again all the same.
            let receiving = ended.recv_many(&mut received, BATCH_MAX);
            let _ = tokio::time::timeout(RETRY_AFTER, receiving).await;
        } else {
            tokio::time::sleep(RETRY_AFTER).await;
        }
        let mut batch = Vec::with_capacity(received.len());
        for one in received.drain(..) {
            match one {
                Ended::Settle(unsettled) => batch.push(unsettled),
                Ended::NoMore => more = false,
            }
        }
        let again = std::mem::take(&mut locked);
        settle(&shared, batch, Locked::Wait, &mut locked).await;
        settle(&shared, again, Locked::Skip, &mut locked).await;
    }
}

/// Settles a batch. Where the database refuses it whole, the halves are tried, down to the one
/// that it refuses; where the database is away, it is tried until the leases have run out.
async fn settle(
    shared: &Arc<Shared>,
    batch: Vec<Unsettled>,
    mut how: Locked,
    locked: &mut Vec<Unsettled>,
) {
    let mut parts = VecDeque::from([batch]);
    while let Some(mut part) = parts.pop_front() {
        if part.is_empty() {
            continue;
        }
        let settlements: Vec<Settlement> = part.iter().map(|one| one.settlement.clone()).collect();
        match shared.store.settle(&settlements, how).await {
            Ok(settled) => {
                histogram!("rouse_settle_batch_jobs").record(part.len() as f64);
                for one in part {
                    if settled.locked.contains(&one.settlement.id) {
                        locked.push(one);
                    } else {
                        report(shared, &one, settled.accepted.contains(&one.settlement.id));
                    }
                }
                keep_trying(shared, locked);
            }
            Err(error) if error.code() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                debug!(%error, jobs = part.len(), "somebody has one of these jobs locked; settling the others");
                how = Locked::Skip;
                parts.push_front(part);
            }
            Err(error) if error.is_transient() => {
                warn!(%error, jobs = part.len(), "cannot settle; trying again");
                tokio::time::sleep(RETRY_AFTER).await;
                keep_trying(shared, &mut part);
                parts.push_front(part);
            }
            Err(error) if missing_partition(&error) => {
                if let Err(error) = shared.store.prepare_partitions().await {
                    error!(%error, "cannot make today's partition of the history");
                    tokio::time::sleep(RETRY_AFTER).await;
                }
                keep_trying(shared, &mut part);
                parts.push_front(part);
            }
            Err(error) if part.len() > 1 => {
                debug!(%error, jobs = part.len(), "a batch was refused; settling its halves");
                let half = part.split_off(part.len() / 2);
                parts.push_front(half);
                parts.push_front(part);
            }
            Err(error) => alone(shared, part, error, &mut parts).await,
        }
    }
}

/// What becomes of the one outcome that the database refuses.
async fn alone(
    shared: &Arc<Shared>,
    mut part: Vec<Unsettled>,
    error: StoreError,
    parts: &mut VecDeque<Vec<Unsettled>>,
) {
    let Some(one) = part.first_mut() else { return };
    let id = one.settlement.id;
    let substitute = match &one.settlement.fate {
        Fate::Succeeded(_) => Some("its result"),
        Fate::Ended(..) | Fate::Retry(..) => Some("its error"),
        Fate::Released => None,
    };
    match substitute {
        Some(what) if is_data(&error) => {
            warn!(job.id = %id, handler = %one.handler, %error, "Postgres cannot store {what}; the job fails");
            let why = AttemptError::new(
                ErrorKind::InvalidResult,
                format!("Postgres cannot store {what}: {error}"),
            );
            let why =
                serde_json::to_string(&why).expect("an AttemptError has only strings for keys");
            one.settlement.fate = Fate::Ended(State::Failed, JsonText(why));
            parts.push_front(part);
        }
        Some(_) | None => {
            error!(job.id = %id, handler = %one.handler, %error, "cannot settle; trying until the lease runs out");
            tokio::time::sleep(RETRY_AFTER).await;
            keep_trying(shared, &mut part);
            parts.push_back(part);
        }
    }
}

/// Gives up outcomes whose lease cannot be trusted any more: another worker will run those jobs.
fn keep_trying(shared: &Shared, part: &mut Vec<Unsettled>) {
    part.retain(|one| {
        let lost = shared.leases.is_lost(one.settlement.id, one.settlement.fence, one.asked);
        if lost {
            error!(job.id = %one.settlement.id, handler = %one.handler, "outcome given up: the lease ran out before it could be written");
            shared.leases.remove(one.settlement.id, one.settlement.fence);
        }
        !lost
    });
}

fn report(shared: &Shared, one: &Unsettled, accepted: bool) {
    let Settlement {
        id, fence, fate, ..
    } = &one.settlement;
    shared.leases.remove(*id, *fence);
    if !accepted {
        count(&one.handler, "refused");
        info!(job.id = %id, handler = %one.handler, attempt = one.attempt.0, "outcome refused: the lease is lost");
        return;
    }
    count(
        &one.handler,
        match fate {
            Fate::Succeeded(_) => State::Succeeded.as_str(),
            Fate::Ended(state, _) => state.as_str(),
            Fate::Retry(..) => "retried",
            Fate::Released => "released",
        },
    );
    match fate {
        Fate::Succeeded(_) => {
            debug!(job.id = %id, handler = %one.handler, attempt = one.attempt.0, "succeeded");
        }
        Fate::Ended(state, why) => {
            warn!(job.id = %id, handler = %one.handler, attempt = one.attempt.0, error = %why.0, "{}", state.as_str());
        }
        Fate::Retry(delay, why) => {
            info!(job.id = %id, handler = %one.handler, attempt = one.attempt.0, delay_ms = delay.as_millis(), error = %why.0, "retry");
            // The claimer's sleep has to end when this job is due.
            shared.look.notify_one();
        }
        Fate::Released => debug!(job.id = %id, "given back"),
    }
}

/// Counts what became of an attempt; `refused`: its lease was lost, `dropped`: that was known already.
pub(super) fn count(handler: &str, outcome: &'static str) {
    counter!("rouse_attempts_total", "handler" => handler.to_string(), "outcome" => outcome)
        .increment(1);
}

/// The day's partition is not there, because nobody was there to make it.
fn missing_partition(error: &StoreError) -> bool {
    error.code() == Some(&SqlState::CHECK_VIOLATION) && error.to_string().contains("no partition")
}

/// Postgres objects to the value: class 22 is data, class 54 limits (a string too long for jsonb).
fn is_data(error: &StoreError) -> bool {
    error
        .code()
        .is_some_and(|code| matches!(&code.code()[..2], "22" | "54"))
}
