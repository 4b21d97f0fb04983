//! Settles outcomes in batches: as many as have arrived, in one statement.
//!
//! While one batch commits, the next one gathers, so batches grow with the load. If claims wait for a slot, a batch
//! waits 2 ms for attempts that are about to end. If Postgres cannot store an outcome, only that outcome fails. An
//! outcome whose settlement never gets a response is retried in parallel with the others. Outcomes that are blocked by
//! locks of other transactions are tried again between batches: those whose own job is locked are tried together,
//! because Postgres can skip locked jobs; all others are tried a few at a time.

mod alone;
mod batch;
mod held_up;
mod send;

use std::future::pending;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::task::{JoinError, JoinHandle, JoinSet};
use tokio_util::sync::CancellationToken;

use self::held_up::HeldUp;
pub(super) use self::send::{drop_attempt, send};
use super::Shared;
use super::events::{self, EventContext, Since};
use super::meters::{HandlerMeters, OutcomeLabel};
use super::policy::LEASE_MIN;
use super::repeats::Repeats;
use crate::job::{Attempt, Fence, JobId, LaneId, NewJob, Outcome};
use crate::sandbox::BootTime;
use crate::store::{Lane, Settlement};
use crate::traces::AttemptTrace;

/// Outcomes up to this size are limited only by their number.
const SMALL_BYTES_MAX: usize = 4 << 10;
/// The largest number of outcomes in one statement.
const BATCH_MAX: usize = 1000;
/// The time for which a batch gathers while claims wait for a slot: a statement and a commit cost Postgres as much as
/// ten or twenty outcomes.
const GATHERED_FOR: Duration = Duration::from_millis(2);
/// The maximum size of the results and errors in one statement, in bytes. Postgres closes a connection that sends 1
/// GiB.
const BATCH_BYTES_MAX: usize = 64 << 20;
/// The maximum number of jobs that the attempts of one statement enqueue. This many take tens of milliseconds.
const BATCH_JOBS_MAX: usize = 2000;
/// The wait after a transient failure. Each further failure doubles it.
const RETRY_AFTER: Duration = Duration::from_millis(200);
/// The longest such wait. Not longer than the shortest lease, because the outcome is lost with its lease.
const RETRY_AFTER_MAX: Duration = LEASE_MIN;
/// The wait after a retry of outcomes whose jobs are locked, as a multiple of its duration: with thousands of them, a
/// retry takes a tenth of a second.
const LOCKED_PAUSE_FACTOR: u32 = 4;

/// The minimum time for which a worker that has been stopping for `drain_timeout` tries an outcome that a lock blocks:
/// most locks are held for milliseconds.
const BLOCKED_MIN: Duration = Duration::from_secs(1);

/// Why an outcome is given up if others need its space.
pub(super) const NO_SPACE: &str =
    "other transactions block so many outcomes that there is no space for more";

/// An outcome that is not settled yet.
pub(super) struct Unsettled {
    pub(super) settlement: Settlement,
    pub(super) meters: Arc<HandlerMeters>,
    pub(super) attempt: Attempt,
    /// The time just before its claim was sent.
    pub(super) claim_sent: BootTime,
    /// The lane whose other jobs may start when this job has ended, because the number of running jobs of its key is
    /// limited.
    pub(super) frees: Option<LaneId>,
    /// The lane to whose jobs its CPU time is charged.
    pub(super) charged: Option<Arc<Lane>>,
    /// True if Postgres could not store the handler's result or error, and this outcome replaces it.
    pub(super) replaced: bool,
    /// True if its settlement was sent and got no response: it may have been written.
    pub(super) unanswered: bool,
    /// The time since which locks of other transactions have blocked its settlement. Reset if a try fails for another
    /// reason.
    pub(super) blocked_at: Option<Instant>,
    /// The warnings that the database refuses it or has no space for it, or that its effects cannot be committed.
    pub(super) refusals: Repeats,
    /// The trace of the attempt, whose outcome it gets.
    pub(super) trace: AttemptTrace,
    /// The bytes of JSON that its settlement sends.
    pub(super) bytes: usize,
    /// Its share of [`UnsettledLimits::bytes`](super::UnsettledLimits::bytes), if it is large.
    pub(super) space: Option<OwnedSemaphorePermit>,
}

/// The bytes of JSON that this settlement sends.
pub(super) fn bytes_of(settlement: &Settlement) -> usize {
    let outcome = match &settlement.outcome {
        Outcome::Succeeded(result) => result.0.len(),
        Outcome::Retry { error, .. } | Outcome::Failed(error) | Outcome::TimedOut(error) => {
            error.to_json().len()
        }
        Outcome::Suspended(_) | Outcome::Released => 0,
    };
    outcome + settlement.jobs.iter().map(NewJob::bytes).sum::<usize>()
}

impl Unsettled {
    /// Gives it another outcome.
    pub(super) fn replace(&mut self, outcome: Outcome) {
        self.settlement.replace(outcome);
        self.bytes = bytes_of(&self.settlement);
    }

    /// Waits until there is space for it among the outcomes that are not settled. It keeps the space until it is
    /// dropped.
    pub(super) async fn take_space(&mut self, shared: &Shared) {
        if self.bytes <= SMALL_BYTES_MAX {
            return;
        }
        let max = shared.settings.unsettled_limits.bytes;
        let bytes = u32::try_from(self.bytes).unwrap_or(u32::MAX).min(max);
        let space = shared.attempts.space.clone().acquire_many_owned(bytes);
        self.space = Some(space.await.expect("it is never closed"));
    }

    /// The space that it keeps, in bytes.
    fn space_bytes(&self) -> usize {
        self.space
            .as_ref()
            .map_or(0, OwnedSemaphorePermit::num_permits)
    }

    pub(super) fn event_context<'a>(&'a self, shared: &'a Shared) -> EventContext<'a> {
        EventContext {
            worker_id: &shared.settings.worker_id,
            id: self.settlement.id,
            handler: &self.meters.handler,
            attempt: self.attempt,
            since: Since::ClaimSent(self.claim_sent),
        }
    }

    /// Counts how the attempt has ended, and ends its trace.
    fn ended(&self, outcome: OutcomeLabel) {
        self.meters.count(outcome);
        let error = self.settlement.outcome.error();
        let error = error.map(|error| (error.kind.as_str(), error.message.as_str()));
        self.trace.end(outcome.as_str(), error);
    }

    /// Notes that a lock of another transaction blocks its settlement.
    pub(super) fn note_blocked(&mut self) {
        self.blocked_at.get_or_insert_with(Instant::now);
    }

    /// True if a lock has blocked it for at least this long.
    pub(super) fn is_blocked_for(&self, min: Duration) -> bool {
        self.blocked_at.is_some_and(|at| at.elapsed() >= min)
    }

    /// True if a lock blocks it and the worker, which has been stopping for `drain_timeout`, no longer waits for it.
    fn is_blocked_too_long(&self, shared: &Shared) -> bool {
        shared.drain_timed_out.is_cancelled() && self.is_blocked_for(BLOCKED_MIN)
    }

    /// True if its lease can no longer be trusted, if a stop no longer waits for it, or after an immediate stop.
    pub(super) fn is_lost(&self, shared: &Shared) -> bool {
        let Settlement { id, fence, .. } = self.settlement;
        let is_stopping = shared.stop.is_stopping();
        shared.stop.now.is_cancelled()
            || self.is_blocked_too_long(shared)
            || shared
                .leases
                .is_lost(id, fence, self.claim_sent, is_stopping)
    }
}

/// The task that settles the outcomes of one worker.
pub(super) struct SettlerTask {
    task: JoinHandle<()>,
    all_sent: CancellationToken,
}

impl SettlerTask {
    pub(super) fn start(shared: &Arc<Shared>, outcomes: mpsc::Receiver<Unsettled>) -> Self {
        let all_sent = CancellationToken::new();
        Self {
            task: tokio::spawn(run(shared.clone(), outcomes, all_sent.clone())),
            all_sent,
        }
    }

    /// Notes that every attempt has sent its outcome: the task ends once it has written all of them.
    pub(super) fn finish_soon(&self) {
        self.all_sent.cancel();
    }

    /// Waits until the task has ended.
    pub(super) async fn ended(&mut self) -> Result<(), JoinError> {
        (&mut self.task).await
    }

    pub(super) fn abort(&self) {
        self.task.abort();
    }
}

/// Settles outcomes until `all_sent` and everything is settled or given up.
async fn run(
    shared: Arc<Shared>,
    mut outcomes: mpsc::Receiver<Unsettled>,
    all_sent: CancellationToken,
) {
    let mut settler = Settler::new(&shared);
    let mut retry_at = Instant::now();
    let mut more = true;
    let mut batch = Vec::new();
    while more || settler.has_unsettled() {
        let next_try_at = settler.next_try_at(retry_at);
        let room = settler.room();
        tokio::select! {
            // New outcomes go ahead of those that can be tried again.
            biased;
            // Outcomes in the channel are still received.
            () = all_sent.cancelled(), if !outcomes.is_closed() => outcomes.close(),
            Some(answered) = settler.unanswered.join_next() => {
                settler.later.extend(answered.expect("it does not panic"));
            }
            received = outcomes.recv_many(&mut batch, room), if more && room > 0 => more = received > 0,
            // These outcomes are retried even if no new ones arrive.
            () = sleep_until(next_try_at), if next_try_at.is_some() => {}
        }
        settler.gather(&mut batch, &mut outcomes, room).await;
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
        settler.try_locked().await;
        settler.try_held_up().await;
        settler.give_up_lost();
        settler.make_space();
    }
}

/// Waits until this time; forever if it is `None`.
async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => pending().await,
    }
}

/// 0.2, 0.4, 0.8 … 2 s.
pub(super) fn retry_after(failures: u32) -> Duration {
    (RETRY_AFTER * (1 << failures.min(8))).min(RETRY_AFTER_MAX)
}

/// The earlier tries of the outcomes of a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Tried {
    First,
    Again,
    /// A part that was blocked; if it is one outcome, this many times.
    HeldUp(u32),
}

/// State that is kept from one batch to the next.
struct Settler<'a> {
    shared: &'a Arc<Shared>,
    /// Outcomes that could not be settled and do not block others: the database refuses them, or it has no space for
    /// them.
    later: Vec<Unsettled>,
    /// Outcomes whose jobs another open transaction has locked, in the order in which this was noticed. The lock of a
    /// producer that has named a job prevents its end, but not the renewal of its lease.
    locked: Vec<Unsettled>,
    /// The time of the next retry of the locked ones.
    retry_locked_at: Instant,
    /// Outcomes, some of which are blocked by a lock other than that of their job.
    held_up: HeldUp<Unsettled>,
    /// Outcomes whose settlement got no response although it was the only row. Each try waits for up to 15 s, so they
    /// are retried in parallel with the others, one at a time. A task returns an outcome that the database has refused.
    unanswered: JoinSet<Option<Unsettled>>,
    one_at_a_time: Arc<Semaphore>,
    /// The number of consecutive failures to settle anything.
    failures: u32,
    /// True if something has been settled since the start of the last batch other than [`Tried::Again`].
    has_space: bool,
}

impl<'a> Settler<'a> {
    fn new(shared: &'a Arc<Shared>) -> Self {
        Self {
            shared,
            later: Vec::new(),
            locked: Vec::new(),
            retry_locked_at: Instant::now(),
            held_up: HeldUp::new(),
            unanswered: JoinSet::new(),
            one_at_a_time: Arc::new(Semaphore::new(1)),
            failures: 0,
            has_space: false,
        }
    }

    /// True while it keeps outcomes that are not settled.
    fn has_unsettled(&self) -> bool {
        self.kept() > 0
    }

    /// The number of outcomes that it keeps.
    fn kept(&self) -> usize {
        self.later.len() + self.locked.len() + self.held_up.count() + self.unanswered.len()
    }

    /// The number of outcomes that it may receive. While it keeps many, as on a full disk, attempts wait in their
    /// slots. After a stop no more attempts start, so it receives all outcomes, and their leases end together.
    fn room(&self) -> usize {
        if self.shared.stop.is_stopping() {
            return BATCH_MAX;
        }
        let count_max = self.shared.settings.unsettled_limits.count;
        count_max.saturating_sub(self.kept()).min(BATCH_MAX)
    }

    /// The time of its next retry, if `later` is due at `retry_at`.
    fn next_try_at(&self, retry_at: Instant) -> Option<Instant> {
        let later = (!self.later.is_empty()).then_some(retry_at);
        let locked = (!self.locked.is_empty()).then_some(self.retry_locked_at);
        let all = later.into_iter().chain(locked);
        all.chain(self.held_up.next_at()).min()
    }

    /// Keeps an outcome whose job is locked.
    fn keep_locked(&mut self, mut one: Unsettled) {
        one.note_blocked();
        if self.locked.is_empty() {
            self.retry_locked_at = Instant::now() + RETRY_AFTER;
        }
        self.locked.push(one);
    }

    /// Retries the outcomes whose jobs were locked, if it is time.
    async fn try_locked(&mut self) {
        let started_at = Instant::now();
        if started_at >= self.retry_locked_at {
            let locked = std::mem::take(&mut self.locked);
            self.settle(locked, Tried::Again).await;
            let pause = started_at.elapsed() * LOCKED_PAUSE_FACTOR;
            let pause = pause.clamp(RETRY_AFTER, RETRY_AFTER_MAX);
            self.retry_locked_at = Instant::now() + pause;
        }
        self.give_up_most_locked();
    }

    /// Like [`give_up_most_held_up`](Self::give_up_most_held_up), for outcomes whose jobs are locked: those that have
    /// waited longest are given up first.
    fn give_up_most_locked(&self) {
        let max = self.shared.settings.unsettled_limits.count / 2;
        let excess = self.locked.len().saturating_sub(max);
        for Unsettled { settlement, .. } in &self.locked[..excess] {
            self.shared.leases.give_up(settlement.id, settlement.fence);
        }
    }

    /// Retries blocked outcomes, for as long as new ones can wait.
    async fn try_held_up(&mut self) {
        let started_at = Instant::now();
        while started_at.elapsed() < held_up::TRIED_FOR
            && let Some(part) = self.held_up.take_due(Instant::now())
        {
            self.settle(part.outcomes, Tried::HeldUp(part.times)).await;
        }
    }

    /// If so many outcomes are blocked that there will soon be no space for others, stops renewing the leases of those
    /// that were blocked most often: these jobs run again once the leases have ended.
    fn give_up_most_held_up(&mut self) {
        let max = self.shared.settings.unsettled_limits.count / 2;
        for one in self.held_up.beyond(max) {
            let Settlement { id, fence, .. } = one.settlement;
            self.shared.leases.give_up(id, fence);
        }
    }

    /// Gives up the outcomes that it keeps and whose lease can no longer be trusted.
    fn give_up_lost(&mut self) {
        let shared = self.shared;
        give_up_lost(shared, &mut self.later);
        give_up_lost(shared, &mut self.locked);
        self.held_up.retain(|one| !give_up_if_lost(shared, one));
    }

    /// Gives up outcomes that locks have blocked for a long time, while these take more than three quarters of the
    /// space: otherwise, attempts would keep their slots until the leases end, and nothing would be claimed.
    fn make_space(&mut self) {
        let shared = self.shared;
        if shared.stop.is_stopping() {
            return;
        }
        let max = &shared.settings.unsettled_limits;
        let (count_max, bytes_max) = (max.count / 4 * 3, max.bytes as usize / 4 * 3);
        let (mut count, mut bytes) = (0, 0);
        for one in self.locked.iter().chain(self.held_up.iter()) {
            count += 1;
            bytes += one.space_bytes();
        }
        let mut is_kept = |one: &Unsettled| {
            let own_bytes = one.space_bytes();
            // One outcome alone may need all of the space, and small ones need none of it.
            let is_large = bytes > bytes_max && (1..bytes).contains(&own_bytes);
            let is_excess = count > count_max || is_large;
            if !is_excess || !one.is_blocked_for(max.blocked) {
                return true;
            }
            count -= 1;
            bytes -= own_bytes;
            give_up(shared, one, NO_SPACE);
            false
        };
        // Those that have waited longest are given up first.
        self.locked.retain(&mut is_kept);
        self.held_up.retain(&mut is_kept);
    }

    /// Adds the outcomes of attempts that end within a short time to a batch that has space for them.
    async fn gather(
        &self,
        batch: &mut Vec<Unsettled>,
        outcomes: &mut mpsc::Receiver<Unsettled>,
        room: usize,
    ) {
        if batch.is_empty() || batch.len() >= room {
            return;
        }
        let Some(time) = self.gathers_for() else {
            return;
        };
        tokio::time::sleep(time).await;
        while batch.len() < room
            && let Ok(outcome) = outcomes.try_recv()
        {
            batch.push(outcome);
        }
    }

    /// The time that a batch waits for attempts that are about to end. `None` means not at all.
    fn gathers_for(&self) -> Option<Duration> {
        match self.failures {
            0 => self
                .shared
                .slots
                .have_waiting_claims()
                .then_some(GATHERED_FOR),
            // While settlements fail, each batch is one more try.
            _ => Some(RETRY_AFTER),
        }
    }
}

/// Gives up the outcomes whose lease can no longer be trusted: another worker will run those jobs. After an immediate
/// stop, gives up all. Once the worker stops, the leases of the others are no longer renewed, so that the tries end;
/// after `drain_timeout`, those that locks block are given up, because leases can be much longer.
fn give_up_lost(shared: &Shared, part: &mut Vec<Unsettled>) {
    part.retain(|one| !give_up_if_lost(shared, one));
}

/// The same for one outcome; true if it is given up.
pub(super) fn give_up_if_lost(shared: &Shared, one: &Unsettled) -> bool {
    let Settlement { id, fence, .. } = one.settlement;
    let is_lost = one.is_lost(shared);
    if is_lost {
        let why = match one.is_blocked_too_long(shared) {
            true => "another transaction has blocked it until the end of drain_timeout",
            false => "it could not be written before the lease expired, or the host had to stop",
        };
        give_up(shared, one, why);
    } else if shared.stop.is_stopping() {
        shared.leases.give_up(id, fence);
    }
    is_lost
}

/// Counts and logs an outcome that is given up for this reason, and stops renewing its lease.
pub(super) fn give_up(shared: &Shared, one: &Unsettled, why: &str) {
    let Settlement { id, fence, .. } = one.settlement;
    one.ended(OutcomeLabel::GivenUp);
    events::given_up(one.event_context(shared), why);
    shared.leases.remove(id, fence);
    free(shared, one.frees);
}

/// Stops renewing the lease of an outcome that waits for others once the worker stops. Never returns.
pub(super) async fn give_up_when_stopping(shared: &Shared, id: JobId, fence: Fence) {
    shared.stop.stopping().await;
    shared.leases.give_up(id, fence);
    pending().await
}

/// Announces that jobs that waited for the end of this one may start, regardless of what has ended it: cancellations
/// and job timeouts are announced in no other way.
pub(super) fn free(shared: &Shared, lane: Option<LaneId>) {
    if let Some(lane) = lane {
        shared.wakeups.freed(lane);
    }
}

/// Counts and logs an outcome for which the database has sent a response.
pub(super) fn report(shared: &Shared, one: &Unsettled, accepted: bool) {
    let Settlement {
        id, fence, outcome, ..
    } = &one.settlement;
    shared.leases.remove(*id, *fence);
    if let (Some(lane), Some(run)) = (&one.charged, &one.settlement.guest_run) {
        shared.costs.record(&lane.queue, lane.id, run.usage.cpu);
    }
    free(shared, one.frees);
    if !accepted {
        if one.unanswered {
            one.ended(OutcomeLabel::Unconfirmed);
            events::unconfirmed(one.event_context(shared));
        } else {
            one.ended(OutcomeLabel::Refused);
            events::refused(one.event_context(shared));
        }
        return;
    }
    one.ended(outcome.into());
    shared.presence.tally.settled(outcome);
    events::settled(one.event_context(shared), outcome);
    match outcome {
        Outcome::Succeeded(_) | Outcome::Failed(_) | Outcome::TimedOut(_) => {
            shared.health.ends.job_ended(*id);
        }
        // The claimer's sleep has to end when this job is due.
        Outcome::Retry { .. } | Outcome::Suspended(_) => shared.wakeups.notify(None),
        Outcome::Released => {}
    }
    if !one.settlement.jobs.is_empty() {
        // A worker that has just looked is not asleep, so it gets no notification about the jobs that it has enqueued.
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
