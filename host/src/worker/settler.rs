//! Settles outcomes in batches: as many as have arrived, in one statement.
//!
//! While one batch commits, the next one gathers, so batches grow with the load. If claims wait for a slot, a batch waits 2 ms for
//! attempts that are about to end. An outcome that Postgres cannot store fails alone, and an outcome whose settlement is never answered
//! is retried in parallel with the others.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::{debug, error, warn};

use super::Shared;
use super::events::{self, EventContext, Since};
use super::meters::{HandlerMeters, OutcomeLabel};
use super::policy::LEASE_MIN;
use super::reach::warn_unless_unreachable;
use crate::job::{Attempt, AttemptError, ErrorKind, Outcome};
use crate::sandbox::BootTime;
use crate::store::{Locked, Settlement, StoreError};

/// How many outcomes may wait before attempts wait with them.
pub(super) const QUEUE_MAX: usize = 4000;
/// The largest number of outcomes in one statement.
const BATCH_MAX: usize = 1000;
/// How long a batch gathers while claims wait for a slot: a statement and a commit cost Postgres as much as ten or twenty outcomes.
const GATHERED_FOR: Duration = Duration::from_millis(2);
/// Results and errors in one statement. Postgres closes a connection that sends 1 GiB.
const BATCH_BYTES_MAX: usize = 64 << 20;
/// The wait after a transient failure. Each further failure doubles it.
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// The longest such wait. No longer than the shortest lease, because the outcome is lost with its lease.
const RETRY_AFTER_MAX: Duration = LEASE_MIN;

/// An outcome that is not settled yet.
pub(super) struct Unsettled {
    pub(super) settlement: Settlement,
    pub(super) meters: Arc<HandlerMeters>,
    pub(super) attempt: Attempt,
    /// Just before its claim was sent.
    pub(super) claim_sent: BootTime,
    /// True if Postgres could not store the handler's result or error, and this outcome replaces it.
    pub(super) replaced: bool,
}

impl Unsettled {
    fn event_context<'a>(&'a self, shared: &'a Shared) -> EventContext<'a> {
        EventContext {
            worker_id: &shared.settings.worker_id,
            id: self.settlement.id,
            handler: &self.meters.handler,
            attempt: self.attempt,
            since: Since::ClaimSent(self.claim_sent),
        }
    }

    /// The bytes of JSON that its settlement sends.
    fn bytes(&self) -> usize {
        match &self.settlement.outcome {
            Outcome::Succeeded(result) => result.0.len(),
            Outcome::Retry { error, .. } | Outcome::Failed(error) | Outcome::TimedOut(error) => {
                error.to_json().len()
            }
            Outcome::Released => 0,
        }
    }
}

/// Settles outcomes until `all_sent` and everything is settled or given up.
pub(super) async fn run(
    shared: Arc<Shared>,
    mut outcomes: mpsc::Receiver<Unsettled>,
    all_sent: CancellationToken,
) {
    let mut settler = Settler {
        shared: &shared,
        later: Vec::new(),
        unanswered: JoinSet::new(),
        one_at_a_time: Arc::new(Semaphore::new(1)),
        failures: 0,
        has_room: false,
    };
    let mut retry_at = Instant::now();
    let mut more = true;
    let mut batch = Vec::new();
    while more || !settler.later.is_empty() || !settler.unanswered.is_empty() {
        tokio::select! {
            received = outcomes.recv_many(&mut batch, BATCH_MAX), if more => more = received > 0,
            // What is in the channel is still received.
            () = all_sent.cancelled(), if !outcomes.is_closed() => outcomes.close(),
            // They are retried even if nothing arrives in the meantime.
            () = tokio::time::sleep_until(retry_at.into()), if !settler.later.is_empty() => {}
            Some(answered) = settler.unanswered.join_next() => {
                settler.later.extend(answered.expect("it does not panic"));
            }
        }
        if !batch.is_empty()
            && batch.len() < BATCH_MAX
            && let Some(time) = settler.gathers_for()
        {
            tokio::time::sleep(time).await;
            while batch.len() < BATCH_MAX
                && let Ok(outcome) = outcomes.try_recv()
            {
                batch.push(outcome);
            }
        }
        let again = match Instant::now() >= retry_at {
            true => std::mem::take(&mut settler.later),
            false => Vec::new(),
        };
        let waits = !settler.later.is_empty();
        settler
            .settle(std::mem::take(&mut batch), Tried::First)
            .await;
        settler.settle(again, Tried::Again).await;
        if !waits {
            retry_at = Instant::now() + retry_after(settler.failures);
        }
        keep_trying(&shared, &mut settler.later);
    }
}

/// 0.2, 0.4, 0.8 … 2 s.
fn retry_after(failures: u32) -> Duration {
    (RETRY_AFTER * (1 << failures.min(8))).min(RETRY_AFTER_MAX)
}

/// Whether the outcomes of a batch were tried before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tried {
    First,
    Again,
}

/// State that is kept from one batch to the next.
struct Settler<'a> {
    shared: &'a Arc<Shared>,
    /// Outcomes that could not be settled and do not hold up others: their jobs are locked by another open transaction, the database
    /// refuses them, or it has no room for them.
    later: Vec<Unsettled>,
    /// Outcomes whose settlement was not answered although it was the only row. Each waits for up to 15 s, so they are retried in
    /// parallel with the others, one at a time. A task returns an outcome that the database has refused.
    unanswered: JoinSet<Option<Unsettled>>,
    one_at_a_time: Arc<Semaphore>,
    /// Consecutive failures to settle anything.
    failures: u32,
    /// Something was settled since the last outcome that found no room.
    has_room: bool,
}

impl Settler<'_> {
    /// How long a batch waits for attempts that are about to end. `None` means not at all.
    fn gathers_for(&self) -> Option<Duration> {
        match self.failures {
            0 => self.shared.slots.are_full().then_some(GATHERED_FOR),
            // Each batch is one more try.
            _ => Some(RETRY_AFTER),
        }
    }

    /// Settles a batch. If the database refuses the batch, its halves are tried, down to the one outcome that is refused. If the database
    /// is unreachable, the batch is retried until the leases have run out.
    async fn settle(&mut self, batch: Vec<Unsettled>, tried: Tried) {
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
                    if settled.has_releases {
                        shared.releases.notify_one();
                    }
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

/// Settles one outcome whose settlement was not answered. If it is not answered again, its lease is no longer renewed, so that the
/// retries end. Returns the outcome if the database refused it.
async fn settle_alone(
    shared: Arc<Shared>,
    one_at_a_time: Arc<Semaphore>,
    one: Unsettled,
) -> Option<Unsettled> {
    let Settlement { id, fence, .. } = one.settlement;
    let mut part = vec![one];
    let mut failures = 0;
    loop {
        tokio::time::sleep(retry_after(failures)).await;
        let permit = one_at_a_time.acquire().await;
        keep_trying(&shared, &mut part);
        let one = part.first()?;
        let answer = shared.store.settle(&[&one.settlement], Locked::Skip).await;
        drop(permit);
        match answer {
            Ok(settled) if settled.locked.contains(&id) => {}
            Ok(settled) => {
                if settled.has_releases {
                    shared.releases.notify_one();
                }
                report(&shared, one, settled.accepted.contains(&id));
                return None;
            }
            Err(error) if error.is_unanswered() => {
                warn!(job.id = id.0, handler = %one.meters.handler, %error, "cannot settle; trying until the lease runs out");
                shared.leases.give_up(id, fence);
            }
            Err(error) if shared.is_incarnation_over(&error) => {
                report(&shared, one, false);
                return None;
            }
            Err(error) if error.is_transient() => {}
            Err(_) => return part.pop(),
        }
        failures += 1;
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

/// Gives up outcomes whose lease can no longer be trusted: another worker will run those jobs.
fn keep_trying(shared: &Shared, part: &mut Vec<Unsettled>) {
    let is_stopping = shared.stop.is_stopping();
    part.retain(|one| {
        let Settlement { id, fence, .. } = one.settlement;
        let lost = shared.stop.now.is_cancelled()
            || shared
                .leases
                .is_lost(id, fence, one.claim_sent, is_stopping);
        if lost {
            one.meters.count(OutcomeLabel::GivenUp);
            events::given_up(one.event_context(shared));
            shared
                .leases
                .remove(one.settlement.id, one.settlement.fence);
        }
        !lost
    });
}

fn report(shared: &Shared, one: &Unsettled, accepted: bool) {
    let Settlement {
        id, fence, outcome, ..
    } = &one.settlement;
    shared.leases.remove(*id, *fence);
    if !accepted {
        one.meters.count(OutcomeLabel::Refused);
        events::refused(one.event_context(shared));
        return;
    }
    one.meters.count(outcome.into());
    shared.presence.tally.settled(outcome);
    events::settled(one.event_context(shared), outcome);
    if let Outcome::Retry { .. } = outcome {
        // The claimer's sleep has to end when this job is due.
        shared.wakeups.notify(None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_waits_after_failures_grow_up_to_the_shortest_lease() {
        let waits: Vec<u128> = [0, 1, 2, 3, 4, 99]
            .map(|failures| retry_after(failures).as_millis())
            .into();
        assert_eq!(waits, [200, 400, 800, 1600, 2000, 2000]);
    }
}
