//! Writes outcomes: as many as have come up, in one statement.
//!
//! While one batch is being committed the next one gathers, so batches grow with the load; where
//! claims wait for a slot, a batch waits 2 ms for what is about to end. One outcome that Postgres
//! cannot store fails alone, and one whose settlement is never answered is tried beside the others.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;
use tracing::{debug, error, warn};

use super::Shared;
use super::events;
use super::meters::{Became, HandlerMeters};
use super::policy::LEASE_MIN;
use super::reach::warn_unless_unreachable;
use crate::job::{Attempt, AttemptError, ErrorKind, State};
use crate::sandbox::BootTime;
use crate::store::{Fate, JsonText, Locked, Settlement, StoreError};

/// How many outcomes may wait before attempts wait with them.
pub(super) const QUEUE_MAX: usize = 4000;
/// The most that one statement settles.
const BATCH_MAX: usize = 1000;
/// How long a batch gathers while there is more to run: a statement and a commit cost Postgres as
/// much as ten or twenty outcomes.
const GATHERED_FOR: Duration = Duration::from_millis(2);
/// Results and errors in one statement. Postgres closes a connection that sends 1 GiB.
const BATCH_BYTES_MAX: usize = 64 << 20;
/// The wait after a failure that may pass; twice as long after each further one.
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// The longest such wait. No longer than the shortest lease: the outcome is lost with it.
const RETRY_AFTER_MAX: Duration = LEASE_MIN;

/// What the attempts send.
#[expect(
    clippy::large_enum_variant,
    reason = "the small one is sent once, at the end"
)]
pub(super) enum Ended {
    /// An attempt has ended.
    Settle(Unsettled),
    /// All attempts have ended.
    NoMore,
}

/// An outcome that is not written yet.
pub(super) struct Unsettled {
    pub(super) settlement: Settlement,
    pub(super) meters: Arc<HandlerMeters>,
    pub(super) attempt: Attempt,
    /// Before its claim was asked for.
    pub(super) asked: BootTime,
    /// True: Postgres could not store what the handler said, and this stands in its place.
    pub(super) replaced: bool,
}

/// Settles until there is no more.
pub(super) async fn run(shared: Arc<Shared>, mut ended: mpsc::Receiver<Ended>) {
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
    let mut received = Vec::new();
    while more || !settler.later.is_empty() || !settler.unanswered.is_empty() {
        tokio::select! {
            _ = ended.recv_many(&mut received, BATCH_MAX), if more => {}
            // Where nothing comes in the meantime, those are tried again all the same.
            () = tokio::time::sleep_until(retry_at.into()), if !settler.later.is_empty() => {}
            Some(answered) = settler.unanswered.join_next() => {
                settler.later.extend(answered.expect("it does not panic"));
            }
        }
        if !received.is_empty()
            && received.len() < BATCH_MAX
            && let Some(time) = settler.gathers_for()
        {
            tokio::time::sleep(time).await;
            while received.len() < BATCH_MAX
                && let Ok(one) = ended.try_recv()
            {
                received.push(one);
            }
        }
        let mut batch = Vec::with_capacity(received.len());
        for one in received.drain(..) {
            match one {
                Ended::Settle(unsettled) => batch.push(unsettled),
                Ended::NoMore => more = false,
            }
        }
        let again = match Instant::now() >= retry_at {
            true => std::mem::take(&mut settler.later),
            false => Vec::new(),
        };
        let waits = !settler.later.is_empty();
        settler.settle(batch, Tried::First).await;
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

/// What is left from one batch to the next.
struct Settler<'a> {
    shared: &'a Arc<Shared>,
    /// Outcomes that could not be written and hold up nobody: of jobs that somebody else's open
    /// transaction has locked, those that the database refuses, and those for which it has no room.
    later: Vec<Unsettled>,
    /// Outcomes whose settlement was not answered although it had one row. Each waits for up to 15 s, so they are tried beside the
    /// others, one at a time. A task returns what the database has refused.
    unanswered: JoinSet<Option<Unsettled>>,
    one_at_a_time: Arc<Semaphore>,
    /// How often in a row nothing could be written.
    failures: u32,
    /// Something was written since the last that found no room.
    has_room: bool,
}

impl Settler<'_> {
    /// How long a batch waits for what is about to end; none: not at all.
    fn gathers_for(&self) -> Option<Duration> {
        match self.failures {
            0 => self.shared.slots.are_full().then_some(GATHERED_FOR),
            // Each batch is one try more.
            _ => Some(RETRY_AFTER),
        }
    }

    /// Settles a batch. Where the database refuses it whole, the halves are tried, down to the one
    /// that it refuses; where the database is away, it is tried until the leases have run out.
    async fn settle(&mut self, batch: Vec<Unsettled>, tried: Tried) {
        if batch.is_empty() {
            return;
        }
        let shared = self.shared;
        let mut how = match tried {
            Tried::First => Locked::Wait,
            Tried::Again => Locked::Skip,
        };
        // One alone found no room. Where others find none either, they are not halved: they are tried again together.
        let mut is_full = tried == Tried::First && self.failures > 0;
        let mut found_no_room = false;
        let mut alone = Vec::new();
        if tried == Tried::First {
            self.has_room = false;
        }
        let mut parts = VecDeque::from([batch]);
        if tried == Tried::Again && self.failures > 0 {
            // Whether there is room again is tried with one of them. It is another one each time.
            let others = parts[0].split_off(1);
            parts.push_back(others);
        }
        let mut unanswered = false;
        while let Some(mut part) = parts.pop_front() {
            if unanswered && shared.stop.now.is_cancelled() {
                // Each further part could wait as long for its answer.
                keep_trying(shared, &mut part);
            }
            if part.is_empty() {
                continue;
            }
            if part.len() > 1 && part.iter().map(bytes).sum::<usize>() > BATCH_BYTES_MAX {
                halve(part, &mut parts);
                continue;
            }
            let settlements: Vec<&Settlement> = part.iter().map(|one| &one.settlement).collect();
            match shared.store.settle(&settlements, how).await {
                Ok(settled) => {
                    // Where all rows were locked, nothing was written.
                    if settled.locked.len() < part.len() {
                        (self.has_room, self.failures) = (true, 0);
                    }
                    shared.meters.settle_batch_jobs.record(part.len() as f64);
                    for one in part {
                        if settled.locked.contains(&one.settlement.id) {
                            self.later.push(one);
                        } else {
                            report(shared, &one, settled.accepted.contains(&one.settlement.id));
                        }
                    }
                }
                Err(error) if error.is_locked() => {
                    debug!(%error, jobs = part.len(), "somebody has one of these jobs locked; settling the others");
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
                // The database knows this worker no more, and has given its jobs to others.
                Err(error) if shared.doubted(&error) => {
                    for one in part {
                        report(shared, &one, false);
                    }
                }
                Err(error) if error.is_unanswered() => {
                    // The first statement may still be running, and hold its locks.
                    how = Locked::Skip;
                    // Where only its connection broke, the next one may work.
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
                            "cannot settle; trying it beside the others"
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
            // But not for these. So that this ends, their leases are renewed no more.
            for Unsettled { settlement, .. } in &alone {
                shared.leases.give_up(settlement.id, settlement.fence);
            }
        } else if found_no_room {
            self.failures += 1;
        }
        // Last, so that with the next try the fault of another is found before theirs.
        self.later.append(&mut alone);
    }

    /// Waits for a database that is away.
    async fn wait(&mut self) {
        tokio::time::sleep(retry_after(self.failures)).await;
        self.failures += 1;
    }
}

/// Settles one outcome whose settlement was not answered. If it is not answered again, its lease is no longer renewed, so that this
/// ends. Returns an outcome that the database refused.
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
                report(&shared, one, settled.accepted.contains(&id));
                return None;
            }
            Err(error) if error.is_unanswered() => {
                warn!(job.id = id.0, handler = %one.meters.handler, %error, "cannot settle; trying until the lease runs out");
                shared.leases.give_up(id, fence);
            }
            Err(error) if shared.doubted(&error) => {
                report(&shared, one, false);
                return None;
            }
            Err(error) if error.is_transient() => {}
            Err(_) => return part.pop(),
        }
        failures += 1;
    }
}

/// Puts the halves of a batch in front of the line.
fn halve(mut part: Vec<Unsettled>, parts: &mut VecDeque<Vec<Unsettled>>) {
    let half = part.split_off(part.len() / 2);
    parts.push_front(half);
    parts.push_front(part);
}

/// Bytes that its settlement sends.
fn bytes(one: &Unsettled) -> usize {
    match &one.settlement.fate {
        Fate::Succeeded(text) | Fate::Ended(_, text) | Fate::Retry(_, text) => text.0.len(),
        Fate::Released => 0,
    }
}

/// What becomes of the one outcome that the database refuses. A value that it cannot store fails
/// the job. Whatever else it is may pass, but is not waited for: it is tried again beside the
/// others, and its lease is renewed no more, so that this ends with the lease at the latest.
fn refused(
    shared: &Shared,
    mut one: Unsettled,
    error: &StoreError,
    parts: &mut VecDeque<Vec<Unsettled>>,
    later: &mut Vec<Unsettled>,
) {
    let Settlement { id, fence, .. } = one.settlement;
    let what = match &one.settlement.fate {
        Fate::Succeeded(_) => Some("its result"),
        Fate::Ended(..) | Fate::Retry(..) => Some("its error"),
        Fate::Released => None,
    };
    match what {
        Some(what) if error.is_about_data() && !one.replaced => {
            warn!(job.id = id.0, handler = %one.meters.handler, %error, "Postgres cannot store {what}; the job fails");
            let why = AttemptError::new(
                ErrorKind::InvalidResult,
                format!("Postgres cannot store {what}: {error}"),
            );
            one.settlement.fate = Fate::Ended(State::Failed, JsonText(why.to_json()));
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

/// Gives up outcomes whose lease cannot be trusted any more: another worker will run those jobs.
fn keep_trying(shared: &Shared, part: &mut Vec<Unsettled>) {
    part.retain(|one| {
        let lost = shared.stop.now.is_cancelled()
            || shared
                .leases
                .is_lost(one.settlement.id, one.settlement.fence, one.asked);
        if lost {
            one.meters.count(Became::GivenUp);
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
        id, fence, fate, ..
    } = &one.settlement;
    shared.leases.remove(*id, *fence);
    if !accepted {
        one.meters.count(Became::Refused);
        events::refused(one.event_context(shared));
        return;
    }
    one.meters.count(became(fate));
    shared.tally.settled(fate);
    events::settled(one.event_context(shared), fate);
    if let Fate::Retry(..) = fate {
        // The claimer's sleep has to end when this job is due.
        shared.wakeups.ring(None);
    }
}

fn became(fate: &Fate) -> Became {
    match fate {
        Fate::Succeeded(_) => Became::Succeeded,
        Fate::Ended(state, _) => match state {
            State::TimedOut => Became::TimedOut,
            State::Cancelled => Became::Cancelled,
            // No outcome ends a job in one of the others.
            State::Failed | State::Queued | State::Running | State::Succeeded => Became::Failed,
        },
        Fate::Retry(..) => Became::Retried,
        Fate::Released => Became::Released,
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
