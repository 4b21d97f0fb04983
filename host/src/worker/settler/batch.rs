//! Settles a batch of outcomes.

use std::collections::VecDeque;

use tracing::{debug, error, warn};

use super::{
    BATCH_BYTES_MAX, Settler, Tried, Unsettled, alone::settle_alone, keep_trying, report,
    retry_after,
};
use crate::job::{AttemptError, ErrorKind, Outcome};
use crate::store::{Locked, Settlement, StoreError};
use crate::worker::Shared;
use crate::worker::reach::warn_unless_unreachable;

impl Settler<'_> {
    /// Settles a batch. If the database refuses the batch, its halves are tried, down to the one outcome that is refused. If the database
    /// is unreachable, the batch is retried until the leases have run out.
    pub(super) async fn settle(&mut self, batch: Vec<Unsettled>, tried: Tried) {
        if batch.is_empty() {
            return;
        }
        let shared = self.shared;
        let mut how = match tried {
            Tried::First => Locked::Wait,
            Tried::Again => Locked::Skip,
        };
        // A single outcome found no room. If others find none either, they are not halved but retried together.
        let mut is_full = tried == Tried::First && self.failures > 0;
        let mut found_no_room = false;
        let mut alone = Vec::new();
        if tried == Tried::First {
            self.has_room = false;
        }
        let mut parts = VecDeque::from([batch]);
        if tried == Tried::Again && self.failures > 0 {
            // One of them, a different one each time, finds out whether there is room again.
            let others = parts[0].split_off(1);
            parts.push_back(others);
        }
        let mut unanswered = false;
        while let Some(mut part) = parts.pop_front() {
            if unanswered && shared.stop.now.is_cancelled() {
                // Each further part could wait for its answer just as long.
                keep_trying(shared, &mut part);
            }
            if part.is_empty() {
                continue;
            }
            if part.len() > 1 && part.iter().map(Unsettled::bytes).sum::<usize>() > BATCH_BYTES_MAX
            {
                halve(part, &mut parts);
                continue;
            }
            let settlements: Vec<&Settlement> = part.iter().map(|one| &one.settlement).collect();
            match shared.store.settle(&settlements, how).await {
                Ok(settled) => {
                    // If all rows were locked, nothing was written.
                    if settled.locked.len() < part.len() {
                        (self.has_room, self.failures) = (true, 0);
                    }
                    shared
                        .attempts
                        .meters
                        .settle_batch_jobs
                        .record(part.len() as f64);
                    for one in part {
                        if settled.locked.contains(&one.settlement.id) {
                            self.later.push(one);
                        } else {
                            report(shared, &one, settled.accepted.contains(&one.settlement.id));
                        }
                    }
                }
                Err(error) if error.is_locked() => {
                    debug!(%error, jobs = part.len(), "another transaction has locked some of these jobs; settling the others");
                    how = Locked::Skip;
                    parts.push_front(part);
                }
                Err(error) if error.may_be_one_rows_fault() => match part.len() {
                    2.. if !is_full => {
                        debug!(%error, jobs = part.len(), "a batch found no room; settling its halves");
                        halve(part, &mut parts);
                    }
                    2.. => {
                        found_no_room = true;
                        self.later.append(&mut part);
                        self.later.extend(parts.drain(..).flatten());
                    }
                    _ => {
                        warn!(%error, "cannot settle; trying again");
                        (is_full, found_no_room) = (true, true);
                        alone.append(&mut part);
                    }
                },
                // The database no longer knows this worker, and has given its jobs to others.
                Err(error) if shared.is_incarnation_over(&error) => {
                    for one in part {
                        report(shared, &one, false);
                    }
                }
                Err(error) if error.is_unanswered() => {
                    // The first statement may still be running and holding its locks.
                    how = Locked::Skip;
                    // If only the connection broke, the next one may work.
                    unanswered |= matches!(error, StoreError::Silent { .. });
                    if part.len() > 1 {
                        warn_unless_unreachable!(
                            error,
                            jobs = part.len(),
                            "cannot settle; trying its halves"
                        );
                        self.wait().await;
                        keep_trying(shared, &mut part);
                        halve(part, &mut parts);
                    } else if let Some(one) = part.pop() {
                        warn_unless_unreachable!(
                            error,
                            job.id = one.settlement.id.0,
                            handler = %one.meters.handler,
                            "cannot settle; retrying in parallel with the others"
                        );
                        let retrying =
                            settle_alone(shared.clone(), self.one_at_a_time.clone(), one);
                        self.unanswered.spawn(retrying);
                    }
                }
                Err(error) if error.is_transient() => {
                    warn_unless_unreachable!(
                        error,
                        jobs = part.len(),
                        "cannot settle; trying again"
                    );
                    self.wait().await;
                    keep_trying(shared, &mut part);
                    parts.push_front(part);
                }
                Err(error) if error.is_partition_missing() => {
                    if let Err(error) = shared.store.prepare_partitions().await {
                        error!(%error, "cannot make today's partition of the history");
                        self.wait().await;
                    }
                    keep_trying(shared, &mut part);
                    parts.push_front(part);
                }
                Err(error) if part.len() > 1 => {
                    debug!(%error, jobs = part.len(), "a batch was refused; settling its halves");
                    halve(part, &mut parts);
                }
                Err(error) => {
                    if let Some(one) = part.pop() {
                        refused(shared, one, &error, &mut parts, &mut self.later);
                    }
                }
            }
        }
        if self.has_room {
            // There is room, but not for these. Their leases are no longer renewed, so that the retries end.
            for Unsettled { settlement, .. } in &alone {
                shared.leases.give_up(settlement.id, settlement.fence);
            }
        } else if found_no_room {
            self.failures += 1;
        }
        // They go last, so that the next try finds the fault of other outcomes first.
        self.later.append(&mut alone);
    }

    /// Waits for a database that is unreachable.
    async fn wait(&mut self) {
        tokio::time::sleep(retry_after(self.failures)).await;
        self.failures += 1;
    }
}

/// Puts the halves of a batch at the front of the queue.
fn halve(mut part: Vec<Unsettled>, parts: &mut VecDeque<Vec<Unsettled>>) {
    let half = part.split_off(part.len() / 2);
    parts.push_front(half);
    parts.push_front(part);
}

/// Handles a single outcome that the database refuses. A value that Postgres cannot store fails the job. Any other refusal may be
/// temporary: the outcome is retried after the others, and its lease is no longer renewed, so that the retries end with the lease.
fn refused(
    shared: &Shared,
    mut one: Unsettled,
    error: &StoreError,
    parts: &mut VecDeque<Vec<Unsettled>>,
    later: &mut Vec<Unsettled>,
) {
    let Settlement { id, fence, .. } = one.settlement;
    let what = match &one.settlement.outcome {
        Outcome::Succeeded(_) => Some("its result"),
        Outcome::Failed(_) | Outcome::TimedOut(_) | Outcome::Retry { .. } => Some("its error"),
        Outcome::Released => None,
    };
    match what {
        Some(what) if error.is_about_data() && !one.replaced => {
            warn!(job.id = id.0, handler = %one.meters.handler, %error, "Postgres cannot store {what}; the job fails");
            let why = AttemptError::new(
                ErrorKind::InvalidResult,
                format!("Postgres cannot store {what}: {error}"),
            );
            one.settlement.outcome = Outcome::Failed(why);
            one.replaced = true;
            parts.push_front(vec![one]);
        }
        Some(_) | None => {
            error!(job.id = id.0, handler = %one.meters.handler, %error, "cannot settle; trying until the lease runs out");
            shared.leases.give_up(id, fence);
            later.push(one);
        }
    }
}
