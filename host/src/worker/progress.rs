//! How far the running attempts are: told to the database together, once a second at most.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::job::{Fence, JobId};
use crate::store::Report;

/// People look at it; a guest that reports in a loop costs one row a second.
const EVERY: Duration = Duration::from_secs(1);

/// What the attempts of one worker have said and nobody has written down.
#[derive(Default)]
pub(super) struct Progress {
    news: Mutex<News>,
    any: Notify,
}

#[derive(Default)]
struct News {
    /// The last word of each attempt.
    said: HashMap<JobId, Report>,
    ended: Vec<(JobId, Fence)>,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, News> {
        // Nothing panics while it holds the lock, and the news are whole at every step.
        self.news.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn say(&self, report: Report) {
        self.lock().said.insert(report.id, report);
        self.any.notify_one();
    }

    /// An attempt that had said something has ended: nobody needs to know any more.
    pub(super) fn ended(&self, id: JobId, fence: Fence) {
        let mut news = self.lock();
        // The same job may run here again under another fence.
        if let Entry::Occupied(said) = news.said.entry(id)
            && said.get().fence == fence
        {
            said.remove();
        }
        news.ended.push((id, fence));
        drop(news);
        self.any.notify_one();
    }

    fn take(&self) -> News {
        std::mem::take(&mut *self.lock())
    }

    /// Puts back what attempts have said that could not be written, but for those that have said something since, or have
    /// ended. Which had ended before is not kept, or an outage would pile it up: their rows are shown to nobody, and go with
    /// the next maintenance.
    fn put_back(&self, said: HashMap<JobId, Report>) {
        let mut news = self.lock();
        for (id, report) in said {
            let is_over = news.ended.contains(&(id, report.fence));
            if let Entry::Vacant(free) = news.said.entry(id)
                && !is_over
            {
                free.insert(report);
            }
        }
        drop(news);
        self.any.notify_one();
    }
}

/// Writes down what the attempts say, for as long as the worker lives.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    loop {
        shared.reports.progress.any.notified().await;
        let turn = shared.calls.patient.acquire().await;
        let News { said, ended } = shared.reports.progress.take();
        let reports: Vec<Report> = said.values().cloned().collect();
        let answer = shared.store.report(&reports, &ended).await;
        drop(turn);
        match answer {
            Ok(mine) => {
                for report in reports.iter().filter(|report| !mine.contains(&report.id)) {
                    shared.leases.doubt(Some(report.id));
                }
            }
            // This life is over, and with it what its attempts have to say.
            Err(error) if shared.doubted(&error) => {}
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "could not write down how far the attempts are; trying again"
                );
                shared.reports.progress.put_back(said);
            }
        }
        tokio::time::sleep(EVERY).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(id: i64, fence: i64, percent: u8) -> Report {
        Report {
            id: JobId(id),
            fence: Fence(fence),
            percent,
            step: "s".into(),
        }
    }

    #[test]
    fn the_last_word_counts_and_an_attempt_that_has_ended_has_none() {
        let progress = Progress::default();
        progress.say(report(1, 7, 10));
        progress.say(report(1, 7, 20));
        progress.say(report(2, 7, 30));
        progress.ended(JobId(2), Fence(7));
        let news = progress.take();
        assert_eq!(news.said.len(), 1);
        assert_eq!(news.said[&JobId(1)].percent, 20);
        assert_eq!(news.ended, [(JobId(2), Fence(7))]);
    }

    #[test]
    fn of_what_could_not_be_written_the_last_word_of_each_attempt_that_runs_is_kept() {
        let progress = Progress::default();
        for id in 1..=3 {
            progress.say(report(id, 7, 10));
        }
        progress.ended(JobId(4), Fence(7));
        let old = progress.take();
        progress.say(report(1, 7, 20));
        progress.ended(JobId(2), Fence(7));
        progress.put_back(old.said);
        let news = progress.take();
        assert_eq!(
            news.ended,
            [(JobId(2), Fence(7))],
            "an outage piles up none"
        );
        let mut said: Vec<(i64, u8)> = news.said.values().map(|it| (it.id.0, it.percent)).collect();
        said.sort_unstable();
        assert_eq!(said, [(1, 20), (3, 10)]);
    }

    #[test]
    fn the_end_of_an_earlier_attempt_does_not_silence_the_next() {
        let progress = Progress::default();
        progress.say(report(1, 8, 10));
        progress.ended(JobId(1), Fence(7));
        assert_eq!(progress.take().said.len(), 1);
    }
}
