//! Retries all jobs that match a filter, one batch per call.
//!
//! The batches go from the newest job down, so a job may be refused because a job that it waits for has failed, and is
//! retried by a later batch. Therefore the refused jobs are tried again, oldest first, as long as that retries some of
//! them. Jobs that another transaction has locked are left out at first, and tried again at the end, when the calls also
//! wait for them.

use std::collections::{BTreeSet, VecDeque};

use serde_json::Value;

use super::{LockWait, RetriedJobs, Store, StoreError};

/// The number of new jobs that are remembered.
pub const NEW_JOBS_MAX: usize = 20;

/// A bulk retry, and what it has done so far.
#[derive(Debug)]
pub struct RetryAll {
    /// The number of jobs that were retried.
    pub retried: usize,
    /// The first new jobs, at most [`NEW_JOBS_MAX`].
    pub new_jobs: Vec<i64>,
    /// The jobs that were refused.
    pub refused: BTreeSet<i64>,
    /// The jobs that another transaction has locked.
    pub locked: BTreeSet<i64>,
    /// The number of jobs that were examined; refused ones count once.
    pub looked_at: i64,
    filter: Value,
    limit: i32,
    /// The remaining calls of this pass: each tries the jobs from `before` down to the last id. A call that does not
    /// get that far is followed by another one.
    calls: VecDeque<(Option<i64>, i64)>,
    is_first_pass: bool,
    /// This pass has retried jobs.
    has_retried: bool,
    wait: LockWait,
}

impl RetryAll {
    /// The number of jobs in a batch of a command. Each job is retried in a subtransaction, and beyond 64 of them in one
    /// transaction, the snapshots of all other transactions become slower (`PGPROC_MAX_CACHED_SUBXIDS`).
    pub const BATCH: i32 = 60;

    /// Nothing is retried before the first [`Self::go_on`]. `limit`: the maximum number of jobs in a batch. Without
    /// `until` in the filter, jobs that end in the meantime may be retried too.
    pub fn new(filter: Value, limit: i32) -> Self {
        Self {
            retried: 0,
            new_jobs: Vec::new(),
            refused: BTreeSet::new(),
            locked: BTreeSet::new(),
            looked_at: 0,
            filter,
            limit,
            calls: VecDeque::from([(None, i64::MIN)]),
            is_first_pass: true,
            has_retried: false,
            wait: LockWait::default(),
        }
    }

    /// Retries one batch, in one transaction. Returns false if that was the last one.
    ///
    /// # Errors
    /// If the filter is invalid, or the database does not answer.
    pub async fn go_on(&mut self, store: &Store) -> Result<bool, StoreError> {
        let Some((before, last)) = self.calls.pop_front() else {
            return Ok(false);
        };
        let batch = store
            .retry_jobs(&self.filter, before, self.limit, self.wait)
            .await?;
        self.note(&batch, before, last);
        Ok(!self.calls.is_empty())
    }

    fn note(&mut self, batch: &RetriedJobs, before: Option<i64>, last: i64) {
        self.retried += batch.retried.len();
        self.has_retried |= !batch.retried.is_empty();
        let room = NEW_JOBS_MAX.saturating_sub(self.new_jobs.len());
        self.new_jobs.extend(batch.made.iter().take(room));
        // This result replaces earlier ones about the jobs that the call has examined.
        let from = batch.next_before.unwrap_or(i64::MIN);
        let was_not_examined = |id: &i64| *id < from || before.is_some_and(|before| *id >= before);
        self.refused.retain(was_not_examined);
        self.locked.retain(was_not_examined);
        self.refused.extend(&batch.refused);
        self.locked.extend(&batch.locked);
        if self.is_first_pass {
            self.looked_at += i64::from(batch.looked_at);
        }
        if batch.next_before.is_some_and(|before| before > last) {
            self.calls.push_front((batch.next_before, last));
        }
        if self.calls.is_empty() && self.has_retried {
            self.try_again(&(&self.refused | &self.locked));
        } else if self.calls.is_empty() && !self.locked.is_empty() && !self.wait.is_started() {
            self.wait = LockWait::start();
            self.try_again(&self.locked.clone());
        }
    }

    /// Plans a pass of calls that each try a batch of these jobs, oldest first.
    fn try_again(&mut self, jobs: &BTreeSet<i64>) {
        self.is_first_pass = false;
        self.has_retried = false;
        let jobs: Vec<i64> = jobs.iter().copied().collect();
        let max = usize::try_from(self.limit).unwrap_or(1).max(1);
        self.calls = jobs
            .chunks(max)
            .filter_map(|jobs| Some((Some(jobs.last()? + 1), *jobs.first()?)))
            .collect();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn batch(retried: &[i64], refused: &[i64], next_before: Option<i64>) -> RetriedJobs {
        RetriedJobs {
            retried: retried.to_vec(),
            made: Vec::new(),
            refused: refused.to_vec(),
            locked: Vec::new(),
            looked_at: 2,
            next_before,
        }
    }

    /// Makes the next call, which has this `before` and this result.
    fn call(all: &mut RetryAll, before: Option<i64>, result: &RetriedJobs) {
        let (of_call, last) = all.calls.pop_front().expect("another call");
        assert_eq!(of_call, before);
        all.note(result, of_call, last);
    }

    #[test]
    fn refused_jobs_are_tried_again_oldest_first_while_some_are_retried() {
        let mut all = RetryAll::new(Value::Null, 2);
        call(&mut all, None, &batch(&[], &[9, 8], Some(8)));
        call(&mut all, Some(8), &batch(&[1], &[5], None));
        // A call for 5 and 8, which has examined too many other jobs to get to 5.
        call(&mut all, Some(9), &batch(&[], &[8], Some(6)));
        call(&mut all, Some(6), &batch(&[5], &[], Some(5)));
        call(&mut all, Some(10), &batch(&[], &[9], None));
        call(&mut all, Some(10), &batch(&[], &[8, 9], Some(8)));
        assert!(all.calls.is_empty());
        assert_eq!((all.retried, all.looked_at), (2, 4));
        assert_eq!(all.refused, BTreeSet::from([8, 9]));
    }

    #[test]
    fn locked_jobs_are_tried_again_once_with_waiting() {
        let mut all = RetryAll::new(Value::Null, 2);
        let locked = |locked: &[i64], next_before| RetriedJobs {
            locked: locked.to_vec(),
            ..batch(&[], &[], next_before)
        };
        call(&mut all, None, &locked(&[9, 8], Some(8)));
        assert!(!all.wait.is_started());
        call(&mut all, Some(8), &locked(&[4], None));
        assert!(all.wait.is_started());
        // Another transaction has retried 4: it does not match any more.
        call(&mut all, Some(9), &locked(&[8], Some(8)));
        call(&mut all, Some(8), &batch(&[], &[], None));
        call(&mut all, Some(10), &batch(&[9], &[], Some(9)));
        // Because a job was retried, the rest is tried again, but this does not wait again.
        call(&mut all, Some(9), &locked(&[8], None));
        assert!(all.calls.is_empty());
        assert_eq!((all.retried, all.looked_at), (1, 4));
        assert_eq!(all.locked, BTreeSet::from([8]));
    }

    #[test]
    fn refused_jobs_are_not_tried_again_if_nothing_was_retried() {
        let mut all = RetryAll::new(Value::Null, 2);
        call(&mut all, None, &batch(&[], &[9], None));
        assert!(all.calls.is_empty());
    }
}
