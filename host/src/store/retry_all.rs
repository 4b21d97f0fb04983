//! Retries all jobs that match a filter, one batch per call.
//!
//! The batches go from the newest job down, so a job may be refused because a job that it waits for has failed, and is
//! retried by a later batch. Therefore the refused jobs are tried again, oldest first, as long as that retries some of
//! them. Jobs that another transaction has locked are left out at first. At the end, they are tried again, each by a
//! call of its own that waits for it: refused jobs between them would use up the time, and a batch would keep the locks
//! of its first jobs while it waits for the others. These calls end after 3 s in all ([`LockWait`]), however many jobs
//! are locked; those that are left are tried once more in batches that do not wait.

use std::collections::{BTreeSet, VecDeque};

use serde_json::Value;

use super::{LockWait, RetriedJobs, Store, StoreError, retry_conflicts};

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
    pub examined_count: i64,
    filter: Value,
    limit: i32,
    /// The remaining calls of this pass.
    calls: VecDeque<Call>,
    is_first_pass: bool,
    /// This pass has retried jobs.
    has_retried: bool,
    wait: LockWait,
}

/// A call that retries jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Call {
    /// Tries the jobs below `before` (`None`: all) down to `last`. If it does not get that far, another call follows.
    Range { before: Option<i64>, last: i64 },
    /// Tries this job only.
    One(i64),
}

impl RetryAll {
    /// The number of jobs in a batch of a command. Each job is retried in a subtransaction, and beyond 64 of them in
    /// one transaction, the snapshots of all other transactions become slower (`PGPROC_MAX_CACHED_SUBXIDS`).
    pub const BATCH: i32 = 60;

    /// Nothing is retried before the first [`Self::advance`]. `limit`: the maximum number of jobs in a batch. Without
    /// `until` in the filter, jobs that end in the meantime may be retried too.
    pub fn new(filter: Value, limit: i32) -> Self {
        Self {
            retried: 0,
            new_jobs: Vec::new(),
            refused: BTreeSet::new(),
            locked: BTreeSet::new(),
            examined_count: 0,
            filter,
            limit,
            calls: VecDeque::from([Call::Range {
                before: None,
                last: i64::MIN,
            }]),
            is_first_pass: true,
            has_retried: false,
            wait: LockWait::default(),
        }
    }

    /// Makes one call, in one transaction; again if concurrent transactions made Postgres roll it back. Returns false
    /// if that was the last call.
    ///
    /// # Errors
    /// If the filter is invalid, or the database does not respond.
    pub async fn advance(&mut self, store: &Store) -> Result<bool, StoreError> {
        let Some(call) = self.calls.pop_front() else {
            return Ok(false);
        };
        let filter = &self.filter;
        let (limit, wait) = (self.limit, self.wait);
        let batch = retry_conflicts(StoreError::is_conflict, || async {
            match call {
                Call::Range { before, .. } => store.retry_jobs(filter, before, limit).await,
                Call::One(id) => store.retry_job_if_matching(filter, id, wait).await,
            }
        });
        let batch = batch.await?;
        self.note(&batch, call);
        Ok(!self.calls.is_empty())
    }

    fn note(&mut self, batch: &RetriedJobs, call: Call) {
        let (before, last) = match call {
            Call::Range { before, last } => (before, last),
            Call::One(id) => (Some(id + 1), id),
        };
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
            self.examined_count += i64::from(batch.examined_count);
        }
        if batch.next_before.is_some_and(|before| before > last) {
            let before = batch.next_before;
            self.calls.push_front(Call::Range { before, last });
        }
        if self.wait.is_over() && matches!(self.calls.front(), Some(Call::One(_))) {
            self.calls = self.batches(&self.locked);
        }
        if self.calls.is_empty() && self.has_retried {
            let calls = self.batches(&(&self.refused | &self.locked));
            self.start_pass(calls);
        } else if self.calls.is_empty() && !self.locked.is_empty() && !self.wait.is_started() {
            self.wait = LockWait::start();
            let calls = self.locked.iter().copied().map(Call::One).collect();
            self.start_pass(calls);
        }
    }

    fn start_pass(&mut self, calls: VecDeque<Call>) {
        self.is_first_pass = false;
        self.has_retried = false;
        self.calls = calls;
    }

    /// Calls that each try a batch of these jobs, oldest first.
    fn batches(&self, jobs: &BTreeSet<i64>) -> VecDeque<Call> {
        let jobs: Vec<i64> = jobs.iter().copied().collect();
        let max = usize::try_from(self.limit).unwrap_or(1).max(1);
        let call = |jobs: &[i64]| {
            Some(Call::Range {
                before: Some(jobs.last()? + 1),
                last: *jobs.first()?,
            })
        };
        jobs.chunks(max).filter_map(call).collect()
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
            examined_count: 2,
            next_before,
        }
    }

    /// Makes the next call, which has this `before` and this result.
    fn call(all: &mut RetryAll, before: Option<i64>, result: &RetriedJobs) {
        let call = all.calls.pop_front().expect("another call");
        assert!(
            matches!(call, Call::Range { before: of_call, .. } if of_call == before),
            "{call:?}, not before {before:?}"
        );
        all.note(result, call);
    }

    /// Makes the next call, which tries this job only and has this result.
    fn call_one(all: &mut RetryAll, id: i64, result: &RetriedJobs) {
        let call = all.calls.pop_front().expect("another call");
        assert_eq!(call, Call::One(id));
        all.note(result, call);
    }

    fn locked(locked: &[i64], next_before: Option<i64>) -> RetriedJobs {
        RetriedJobs {
            locked: locked.to_vec(),
            ..batch(&[], &[], next_before)
        }
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
        assert_eq!((all.retried, all.examined_count), (2, 4));
        assert_eq!(all.refused, BTreeSet::from([8, 9]));
    }

    #[test]
    fn locked_jobs_are_waited_for_once() {
        let mut all = RetryAll::new(Value::Null, 2);
        call(&mut all, None, &locked(&[9, 8], Some(8)));
        assert!(!all.wait.is_started());
        call(&mut all, Some(8), &locked(&[4], None));
        assert!(all.wait.is_started());
        // Another transaction has retried 4: it does not match any more.
        call_one(&mut all, 4, &batch(&[], &[], Some(4)));
        call_one(&mut all, 8, &locked(&[8], Some(8)));
        call_one(&mut all, 9, &batch(&[9], &[], Some(9)));
        // Because a job was retried, the rest is tried again, but this does not wait again.
        call(&mut all, Some(9), &locked(&[8], None));
        assert!(all.calls.is_empty());
        assert_eq!((all.retried, all.examined_count), (1, 4));
        assert_eq!(all.locked, BTreeSet::from([8]));
    }

    #[test]
    fn locked_jobs_are_tried_in_batches_once_they_were_waited_for_long_enough() {
        let mut all = RetryAll::new(Value::Null, 2);
        call(&mut all, None, &locked(&[9, 8], Some(8)));
        call(&mut all, Some(8), &locked(&[4, 2], None));
        call_one(&mut all, 2, &batch(&[2], &[], Some(2)));
        all.wait = LockWait::over();
        call_one(&mut all, 4, &locked(&[4], Some(4)));
        call(&mut all, Some(9), &locked(&[8, 4], Some(4)));
        call(&mut all, Some(10), &batch(&[9], &[], Some(9)));
        // Because jobs were retried.
        call(&mut all, Some(9), &locked(&[8, 4], None));
        assert!(all.calls.is_empty());
        assert_eq!((all.retried, all.locked), (2, BTreeSet::from([4, 8])));
    }

    #[test]
    fn refused_jobs_are_not_tried_while_locked_ones_are_waited_for() {
        let mut all = RetryAll::new(Value::Null, 10);
        let result = RetriedJobs {
            refused: vec![8, 6],
            ..locked(&[9, 7], None)
        };
        call(&mut all, None, &result);
        assert!(all.wait.is_started());
        call_one(&mut all, 7, &locked(&[7], Some(7)));
        call_one(&mut all, 9, &locked(&[9], Some(9)));
        assert!(all.calls.is_empty());
        assert_eq!(all.refused, BTreeSet::from([6, 8]));
        assert_eq!(all.locked, BTreeSet::from([7, 9]));
    }

    #[test]
    fn refused_jobs_are_tried_again_after_a_locked_one_was_retried() {
        let mut all = RetryAll::new(Value::Null, 10);
        let result = RetriedJobs {
            refused: vec![8],
            ..locked(&[7], None)
        };
        call(&mut all, None, &result);
        call_one(&mut all, 7, &batch(&[7], &[], Some(7)));
        call(&mut all, Some(9), &batch(&[8], &[], None));
        assert!(all.calls.is_empty());
        assert_eq!((all.retried, all.refused.len()), (2, 0));
    }

    #[test]
    fn refused_jobs_are_not_tried_again_if_nothing_was_retried() {
        let mut all = RetryAll::new(Value::Null, 2);
        call(&mut all, None, &batch(&[], &[9], None));
        assert!(all.calls.is_empty());
    }
}
