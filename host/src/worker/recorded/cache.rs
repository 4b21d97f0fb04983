//! The steps of jobs that were suspended on this host, so that the next attempt reads only newer ones.
//!
//! The database decides whether they are still valid (`store/steps.rs`), so a job may safely be resumed on another
//! host.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use crate::job::JobId;
use crate::store::RecordedSteps;

/// The maximum total size of the cached steps, in bytes: about a hundred jobs with a thousand small steps.
const BYTES_MAX: usize = 16 << 20;

/// The minimum number of steps for which a job's steps are kept. Reading fewer takes less than a tenth of the time of a
/// resumption.
const STEPS_MIN: usize = 32;

/// The cached steps, by job.
#[derive(Default)]
pub(in crate::worker) struct StepCache(Mutex<Jobs>);

#[derive(Default)]
struct Jobs {
    by_id: HashMap<JobId, Job>,
    bytes: usize,
    /// The number of times that steps were kept.
    count: u64,
}

struct Job {
    steps: RecordedSteps,
    bytes: usize,
    /// Its number in the order in which steps were kept, from 1.
    number: u64,
}

impl StepCache {
    /// Takes the cached steps of a job that starts, if there are any.
    pub(in crate::worker) fn take(&self, id: JobId) -> RecordedSteps {
        let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.remove(id).unwrap_or_default()
    }

    /// Keeps the steps of a job that is being suspended, if there are many. When there are too many in all, those of
    /// the jobs that were suspended first are dropped.
    pub(in crate::worker) fn keep(&self, id: JobId, steps: RecordedSteps) {
        let bytes = steps.bytes();
        if steps.steps.len() < STEPS_MIN || bytes > BYTES_MAX {
            return;
        }
        let mut jobs = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.remove(id);
        while jobs.bytes + bytes > BYTES_MAX {
            let first = jobs.by_id.iter().min_by_key(|(_, job)| job.number);
            let Some(first) = first.map(|(id, _)| *id) else {
                break;
            };
            jobs.remove(first);
        }
        jobs.count += 1;
        jobs.bytes += bytes;
        let number = jobs.count;
        let job = Job {
            steps,
            bytes,
            number,
        };
        jobs.by_id.insert(id, job);
    }
}

impl Jobs {
    fn remove(&mut self, id: JobId) -> Option<RecordedSteps> {
        let job = self.by_id.remove(&id)?;
        self.bytes -= job.bytes;
        Some(job.steps)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::job::RecordedStep;

    /// This many steps with results of a kilobyte.
    fn steps(count: usize) -> RecordedSteps {
        let step = |n: usize| {
            let done = RecordedStep::Done {
                bytes: 1024,
                result: Some(vec![b'1'; 1024]),
            };
            (n.to_string(), done)
        };
        let mut steps = RecordedSteps::default();
        Arc::make_mut(&mut steps.steps).extend((0..count).map(step));
        steps
    }

    fn count(cache: &StepCache, id: i64) -> usize {
        cache.take(JobId(id)).steps.len()
    }

    #[test]
    fn the_jobs_that_were_suspended_last_are_kept_within_the_limit() {
        let cache = StepCache::default();
        let each = 1_000;
        let fitting = i64::try_from(BYTES_MAX / steps(each).bytes()).unwrap();
        for id in 0..=fitting {
            cache.keep(JobId(id), steps(each));
        }
        assert!(cache.0.lock().unwrap().bytes <= BYTES_MAX);
        assert_eq!(count(&cache, 0), 0, "the first one made room for the last");
        for id in 1..=fitting {
            assert_eq!(count(&cache, id), each, "{id}");
        }
        assert_eq!(cache.0.lock().unwrap().bytes, 0);
    }

    #[test]
    fn neither_few_steps_nor_those_that_would_displace_all_others_are_kept() {
        let cache = StepCache::default();
        cache.keep(JobId(1), steps(STEPS_MIN));
        cache.keep(JobId(2), steps(STEPS_MIN - 1));
        cache.keep(JobId(3), steps(BYTES_MAX / 1024));
        assert_eq!([1, 2, 3].map(|id| count(&cache, id)), [STEPS_MIN, 0, 0]);
    }

    #[test]
    fn the_newest_steps_of_a_job_are_kept_and_counted_once() {
        let cache = StepCache::default();
        cache.keep(JobId(1), steps(40));
        cache.keep(JobId(1), steps(50));
        assert_eq!(count(&cache, 1), 50);
        assert_eq!(count(&cache, 1), 0, "taken");
        assert_eq!(cache.0.lock().unwrap().bytes, 0);
    }
}
