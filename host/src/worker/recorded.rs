//! The recorded steps of attempts that have just started: those that wait for a connection share one call.

mod cache;

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::oneshot;

pub(super) use self::cache::StepCache;
use super::Shared;
use crate::job::{Fence, JobId};
use crate::store::{LostJob, RecordedSteps, StoreError};

/// The maximum number of jobs in one call. Each has at most 1,000 steps with results of 1 KiB, 16 MiB in all, unless an
/// operator allows more.
const JOBS_MAX: usize = 16;

/// The wait after a call has failed, for the attempts that share it. The attempt that has made it waits just as long
/// (`journal.rs`).
const RETRY_AFTER: Duration = Duration::from_millis(200);

type Steps = Result<RecordedSteps, LostJob>;

/// Jobs whose steps no call has requested yet.
#[derive(Default)]
pub(super) struct Waiting(Mutex<Vec<Question>>);

struct Question {
    job: (JobId, Fence),
    /// Dropped if the call fails: the attempt then adds the question again.
    response: oneshot::Sender<Steps>,
}

impl Waiting {
    fn push(&self, job: (JobId, Fence)) -> oneshot::Receiver<Steps> {
        let (response, answered) = oneshot::channel();
        let question = Question { job, response };
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.push(question);
        answered
    }

    /// Takes the question about this job, and other questions that wait. Empty if another call has already taken that
    /// question.
    fn take(&self, job: (JobId, Fence)) -> Vec<Question> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(index) = waiting.iter().position(|question| question.job == job) else {
            return Vec::new();
        };
        let mut taken = vec![waiting.swap_remove(index)];
        // The questions of attempts that have been aborted since are dropped.
        waiting.retain(|question| !question.response.is_closed());
        let others = waiting.len().min(JOBS_MAX - 1);
        taken.extend(waiting.drain(..others));
        taken
    }
}

/// The recorded steps of a job that this worker has claimed.
///
/// # Errors
/// The call for this job has failed.
pub(super) async fn recorded(shared: &Shared, job: (JobId, Fence)) -> Result<Steps, StoreError> {
    loop {
        let mut answered = shared.recorded.push(job);
        let call = tokio::select! {
            biased;
            response = &mut answered => match response {
                Ok(steps) => return Ok(steps),
                Err(_) => {
                    tokio::time::sleep(RETRY_AFTER).await;
                    continue;
                }
            },
            call = shared.calls.steps.acquire() => call,
        };
        let questions = shared.recorded.take(job);
        if !questions.is_empty() {
            let jobs: Vec<_> = questions.iter().map(|question| question.job).collect();
            // If the call fails, the next one reads all of them.
            let known = jobs
                .iter()
                .map(|(id, _)| shared.step_cache.take(*id))
                .collect();
            let responses = shared.store.recorded_steps(&jobs, known).await?;
            for (question, steps) in questions.into_iter().zip(responses) {
                // An attempt that was aborted does not wait for it.
                let _ = question.response.send(steps);
            }
        }
        drop(call);
        if let Ok(steps) = answered.await {
            return Ok(steps);
        }
        tokio::time::sleep(RETRY_AFTER).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(id: i64) -> (JobId, Fence) {
        (JobId(id), Fence(1))
    }

    #[test]
    fn one_call_takes_its_own_question_and_those_of_others_up_to_the_maximum() {
        let waiting = Waiting::default();
        let _answered: Vec<_> = (0..40).map(|id| waiting.push(job(id))).collect();
        let ids = |questions: Vec<Question>| -> Vec<i64> {
            questions.iter().map(|question| question.job.0.0).collect()
        };
        let first = ids(waiting.take(job(39)));
        assert_eq!((first.len(), first[0]), (JOBS_MAX, 39));
        let second = ids(waiting.take(job(38)));
        assert_eq!((second.len(), second[0]), (JOBS_MAX, 38));
        assert!(waiting.take(job(39)).is_empty(), "taken");
        let third = ids(waiting.take(job(37)));
        assert_eq!(third.len(), 40 - 2 * JOBS_MAX);
    }

    #[test]
    fn questions_of_aborted_attempts_are_dropped() {
        let waiting = Waiting::default();
        drop(waiting.push(job(1)));
        let _answered = waiting.push(job(2));
        assert_eq!(waiting.take(job(2)).len(), 1);
        assert!(waiting.take(job(1)).is_empty());
    }
}
