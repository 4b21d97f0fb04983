//! Settles a batch of outcomes, in parts if the database does not accept it as a whole.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use tracing::{debug, error, warn};

use super::alone::settle_alone;
use super::{
    BATCH_BYTES_MAX, BATCH_JOBS_MAX, Settler, Tried, Unsettled, give_up_lost, report, retry_after,
};
use crate::job::{AttemptError, ErrorKind, JobId, Outcome};
use crate::store::{Locked, SettleResult, Settlement, StoreError};
use crate::worker::reach::warn_unless_unreachable;

/// A batch that is being settled.
struct Batch {
    /// The parts that are not settled yet, in order.
    parts: VecDeque<Vec<Unsettled>>,
    tried: Tried,
    locked: Locked,
    /// The database has no space for an individual outcome. If it has none for others either, they are not halved but
    /// retried together.
    is_full: bool,
    found_no_space: bool,
    /// True if the settlement of a part got no response in time.
    is_silent: bool,
    /// True if missing partitions were created. An outcome that still misses one is refused like any other.
    is_prepared: bool,
    /// Individual outcomes for which the database has no space.
    alone: Vec<Unsettled>,
}

impl Batch {
    fn new(outcomes: Vec<Unsettled>, tried: Tried, locked: Locked, failures: u32) -> Self {
        let mut parts = one_of_each_job(outcomes, |one: &Unsettled| one.settlement.id);
        if tried == Tried::Again && failures > 0 {
            // One of the outcomes, a different one each time, tests whether there is space again.
            let others = parts[0].split_off(1);
            parts.insert(1, others);
        }
        Self {
            parts,
            tried,
            locked,
            is_full: tried != Tried::Again && failures > 0,
            found_no_space: false,
            is_silent: false,
            is_prepared: false,
            alone: Vec::new(),
        }
    }

    /// Makes a part the next one again.
    fn put_back(&mut self, part: Vec<Unsettled>) {
        self.parts.push_front(part);
    }

    /// Makes the halves of a part the next ones.
    fn halve(&mut self, mut part: Vec<Unsettled>) {
        let half = part.split_off(part.len() / 2);
        self.parts.push_front(half);
        self.parts.push_front(part);
    }
}

/// Divides outcomes into parts with at most one of each job, in their order. A worker that has lost a job during an
/// outage may adopt it, and end its next attempt, before the outcome of the previous attempt was refused. The jobs that
/// an attempt enqueues refer to its job, not to the fence, so two outcomes of a job must not share a statement.
fn one_of_each_job<T>(outcomes: Vec<T>, job: impl Fn(&T) -> JobId) -> VecDeque<Vec<T>> {
    let mut parts = VecDeque::from([Vec::with_capacity(outcomes.len())]);
    let mut part_indices: HashMap<JobId, usize> = HashMap::with_capacity(outcomes.len());
    for outcome in outcomes {
        let part_index = part_indices.entry(job(&outcome)).or_default();
        if *part_index == parts.len() {
            parts.push_back(Vec::new());
        }
        parts[*part_index].push(outcome);
        *part_index += 1;
    }
    parts
}

impl Settler<'_> {
    /// Settles a batch. If the database refuses the batch, its halves are tried, down to the one outcome that is
    /// refused. If the database is unreachable, the batch is retried until the leases have expired.
    pub(super) async fn settle(&mut self, outcomes: Vec<Unsettled>, tried: Tried) {
        if outcomes.is_empty() {
            return;
        }
        if tried != Tried::Again {
            self.has_space = false;
        }
        let locked = match tried {
            // While others are blocked, this batch is likely to be blocked by the same lock.
            Tried::First if self.held_up.is_empty() && self.locked.is_empty() => Locked::Wait,
            Tried::First | Tried::Again | Tried::HeldUp(_) => Locked::Skip,
        };
        let mut batch = Batch::new(outcomes, tried, locked, self.failures);
        while let Some(mut part) = batch.parts.pop_front() {
            if batch.is_silent && self.shared.stop.now.is_cancelled() {
                // Each further part might wait just as long for its response.
                give_up_lost(self.shared, &mut part);
            }
            if part.is_empty() {
                continue;
            }
            let bytes = part.iter().map(|one| one.bytes).sum::<usize>();
            let jobs = part.iter().map(|one| one.settlement.jobs.len());
            let is_large = bytes > BATCH_BYTES_MAX || jobs.sum::<usize>() > BATCH_JOBS_MAX;
            if part.len() > 1 && is_large {
                batch.halve(part);
                continue;
            }
            let settlements: Vec<&Settlement> = part.iter().map(|one| &one.settlement).collect();
            match self.shared.store.settle(&settlements, batch.locked).await {
                Ok(settled) => self.report_part(part, &settled),
                Err(error) => self.handle_error(&mut batch, part, &error).await,
            }
        }
        self.finish(batch);
    }

    /// Reports the outcomes of a part for which the database has sent a response.
    fn report_part(&mut self, part: Vec<Unsettled>, settled: &SettleResult) {
        if settled.has_releases {
            self.shared.releases.notify_one();
        }
        // If all rows were locked, nothing was written.
        if settled.locked.len() < part.len() {
            (self.has_space, self.failures) = (true, 0);
        }
        self.shared
            .attempts
            .meters
            .settle_batch_jobs
            .record(part.len() as f64);
        for one in part {
            if settled.locked.contains(&one.settlement.id) {
                self.keep_locked(one);
            } else {
                let accepted = settled.accepted.contains(&one.settlement.id);
                report(self.shared, &one, accepted);
            }
        }
    }

    /// Handles a part whose settlement has failed.
    async fn handle_error(
        &mut self,
        batch: &mut Batch,
        mut part: Vec<Unsettled>,
        error: &StoreError,
    ) {
        if !error.is_locked() {
            for one in &mut part {
                one.blocked_at = None;
            }
        }
        if error.is_locked() && batch.locked == Locked::Skip {
            // Something other than these jobs is locked and blocks one of their outcomes: nearly always because of a
            // job that it enqueues.
            let enqueues = |one: &mut Unsettled| !one.settlement.jobs.is_empty();
            let of_enqueuers: Vec<Unsettled> = part.extract_if(.., enqueues).collect();
            if !of_enqueuers.is_empty() && !part.is_empty() {
                batch.put_back(part);
                part = of_enqueuers;
            } else {
                part.extend(of_enqueuers);
            }
            for one in &mut part {
                one.note_blocked();
            }
            let times = match batch.tried {
                Tried::HeldUp(times) => times,
                Tried::First | Tried::Again => 0,
            };
            self.held_up.add(part, times, Instant::now());
            self.give_up_most_held_up();
        } else if error.is_locked() {
            debug!(%error, jobs = part.len(), "another transaction has locked some of these jobs; settling the others");
            batch.locked = Locked::Skip;
            batch.put_back(part);
        } else if error.may_be_one_rows_fault() {
            self.handle_no_space(batch, part, error);
        } else if self.shared.has_incarnation_ended(error) {
            // The database no longer knows this worker, and has given its jobs to others.
            for one in &part {
                report(self.shared, one, false);
            }
        } else if error.is_unanswered() {
            self.retry_unanswered(batch, part, error).await;
        } else if error.is_transient() {
            warn_unless_unreachable!(error, jobs = part.len(), "cannot settle; trying again");
            self.wait().await;
            give_up_lost(self.shared, &mut part);
            batch.put_back(part);
        } else if error.is_partition_missing() && !batch.is_prepared {
            batch.is_prepared = self.prepare_partitions().await;
            give_up_lost(self.shared, &mut part);
            batch.put_back(part);
        } else if part.len() > 1 {
            debug!(%error, jobs = part.len(), "a batch was refused; settling its halves");
            batch.halve(part);
        } else if let Some(one) = part.pop() {
            self.handle_refusal(batch, one, error);
        }
    }

    /// Handles a part for which the database has no space: its halves are tried, down to individual outcomes. Once
    /// there is no space for an individual one, the rest of the batch is retried later.
    fn handle_no_space(&mut self, batch: &mut Batch, mut part: Vec<Unsettled>, error: &StoreError) {
        match part.len() {
            2.. if !batch.is_full => {
                debug!(%error, jobs = part.len(), "the database has no space for a batch; settling its halves");
                batch.halve(part);
            }
            2.. => {
                batch.found_no_space = true;
                self.later.append(&mut part);
                self.later.extend(batch.parts.drain(..).flatten());
            }
            _ => {
                if part
                    .iter_mut()
                    .any(|one| one.refusals.is_logged(Instant::now()))
                {
                    warn!(%error, "cannot settle; trying again");
                }
                (batch.is_full, batch.found_no_space) = (true, true);
                batch.alone.append(&mut part);
            }
        }
    }

    /// Handles a part whose settlement got no response: its halves are tried, and an individual outcome is retried in
    /// parallel with the others.
    async fn retry_unanswered(
        &mut self,
        batch: &mut Batch,
        mut part: Vec<Unsettled>,
        error: &StoreError,
    ) {
        // The first statement may still be running and holding its locks.
        batch.locked = Locked::Skip;
        for one in &mut part {
            one.unanswered = true;
        }
        // If only the connection broke, the next connection may work.
        batch.is_silent |= matches!(error, StoreError::Silent { .. });
        if part.len() > 1 {
            warn_unless_unreachable!(error, jobs = part.len(), "cannot settle; trying its halves");
            self.wait().await;
            give_up_lost(self.shared, &mut part);
            batch.halve(part);
        } else if let Some(one) = part.pop() {
            warn_unless_unreachable!(
                error,
                job.id = one.settlement.id.0,
                handler = %one.meters.handler,
                "cannot settle; retrying in parallel with the others"
            );
            let (shared, one_at_a_time) = (self.shared.clone(), self.one_at_a_time.clone());
            self.unanswered
                .spawn(settle_alone(shared, one_at_a_time, one));
        }
    }

    /// Creates today's partition of the history, and returns true. If that fails, waits.
    async fn prepare_partitions(&mut self) -> bool {
        let prepared = self.shared.store.prepare_partitions().await;
        if let Err(error) = &prepared {
            error!(%error, "cannot create today's partition of the history; trying again");
            self.wait().await;
        }
        prepared.is_ok()
    }

    /// Handles an individual outcome that the database refuses. A value that Postgres cannot store makes the job fail.
    /// Any other refusal may be temporary: the outcome is retried after the others, and its lease is no longer renewed,
    /// so that the retries end with the lease.
    fn handle_refusal(&mut self, batch: &mut Batch, mut one: Unsettled, error: &StoreError) {
        let Settlement { id, fence, .. } = one.settlement;
        let value = match &one.settlement.outcome {
            Outcome::Succeeded(_) if !one.settlement.jobs.is_empty() => {
                Some("the job's result, or the jobs that it enqueues")
            }
            Outcome::Succeeded(_) => Some("the job's result"),
            Outcome::Failed(_) | Outcome::TimedOut(_) | Outcome::Retry { .. } => {
                Some("the job's error")
            }
            Outcome::Suspended(_) => Some("the job's wait, or the jobs that it calls"),
            Outcome::Released => None,
        };
        match value {
            Some(value) if error.is_about_data() && !one.replaced => {
                warn!(job.id = id.0, handler = %one.meters.handler, %error, "Postgres cannot store {value}; the job fails");
                let failure = AttemptError::new(
                    ErrorKind::InvalidResult,
                    format!("Postgres cannot store {value}: {error}"),
                );
                one.replace(Outcome::Failed(failure));
                one.replaced = true;
                batch.put_back(vec![one]);
            }
            Some(_) | None => {
                if one.refusals.is_logged(Instant::now()) {
                    error!(job.id = id.0, handler = %one.meters.handler, %error, "cannot settle; trying until the lease expires");
                }
                self.shared.leases.give_up(id, fence);
                self.later.push(one);
            }
        }
    }

    /// Keeps, for the next try, the outcomes for which there was no space.
    fn finish(&mut self, mut batch: Batch) {
        if self.has_space {
            // There is space, but not for these outcomes. Their leases are no longer renewed, so that the retries end.
            for Unsettled { settlement, .. } in &batch.alone {
                self.shared.leases.give_up(settlement.id, settlement.fence);
            }
        } else if batch.found_no_space {
            self.failures += 1;
        }
        // These outcomes go last, so that the next try finds the problems of other outcomes first.
        self.later.append(&mut batch.alone);
    }

    /// Waits for a database that is unreachable.
    async fn wait(&mut self) {
        tokio::time::sleep(retry_after(self.failures)).await;
        self.failures += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_of_one_job_are_settled_one_after_the_other() {
        let outcomes = [
            (1, "lost"),
            (2, "only"),
            (1, "next"),
            (1, "last"),
            (3, "only"),
        ];
        let parts = one_of_each_job(outcomes.into(), |(job, _)| JobId(*job));
        let expected = [
            vec![(1, "lost"), (2, "only"), (3, "only")],
            vec![(1, "next")],
            vec![(1, "last")],
        ];
        assert_eq!(parts, expected);
    }
}
