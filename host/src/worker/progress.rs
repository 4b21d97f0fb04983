//! Reports the progress of running attempts to the database, in one statement, at most once a second.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::job::{Fence, JobId};
use crate::store::Report;

/// The interval. Progress is meant for human readers, and a guest that reports it in a loop costs only one row a
/// second.
const EVERY: Duration = Duration::from_secs(1);

/// The progress of one worker's attempts that is not written yet.
#[derive(Default)]
pub(super) struct Progress {
    pending: Mutex<Pending>,
    any: Notify,
}

#[derive(Default)]
struct Pending {
    /// The last report of each attempt.
    reports: HashMap<JobId, Report>,
    /// Attempts that have ended after they reported progress.
    ended: Vec<(JobId, Fence)>,
}

impl Progress {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        // Nothing panics while holding the lock, and the reports are consistent at every step.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn report(&self, report: Report) {
        self.lock().reports.insert(report.id, report);
        self.any.notify_one();
    }

    /// Notes that an attempt that had reported progress has ended: its progress is deleted.
    pub(super) fn ended(&self, id: JobId, fence: Fence) {
        let mut pending = self.lock();
        // The same job may run here again under another fence.
        if let Entry::Occupied(report) = pending.reports.entry(id)
            && report.get().fence == fence
        {
            report.remove();
        }
        pending.ended.push((id, fence));
        drop(pending);
        self.any.notify_one();
    }

    fn take(&self) -> Pending {
        std::mem::take(&mut *self.lock())
    }

    /// Puts back reports that could not be written, except for attempts that have ended or reported again. Attempts
    /// that had already ended are not put back, because they would accumulate during an outage; their rows are not
    /// shown, and the next maintenance deletes them.
    fn put_back(&self, reports: HashMap<JobId, Report>) {
        let mut pending = self.lock();
        for (id, report) in reports {
            let has_ended = pending.ended.contains(&(id, report.fence));
            if let Entry::Vacant(free) = pending.reports.entry(id)
                && !has_ended
            {
                free.insert(report);
            }
        }
        drop(pending);
        self.any.notify_one();
    }
}

/// Writes the progress of attempts until the worker ends.
pub(super) async fn run_forever(shared: Arc<Shared>) {
    loop {
        shared.reports.progress.any.notified().await;
        let permit = shared.calls.patient.acquire().await;
        let Pending { reports, ended } = shared.reports.progress.take();
        let sent: Vec<Report> = reports.values().cloned().collect();
        let response = shared.store.report(&sent, &ended).await;
        drop(permit);
        match response {
            Ok(mine) => {
                for report in sent.iter().filter(|report| !mine.contains(&report.id)) {
                    shared.leases.doubt(Some(report.id));
                }
            }
            // The attempts of these reports are lost.
            Err(error) if shared.has_incarnation_ended(&error) => {}
            Err(error) => {
                warn_unless_unreachable!(
                    error,
                    "could not write the progress of attempts; trying again"
                );
                shared.reports.progress.put_back(reports);
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
    fn only_the_last_report_of_an_attempt_that_still_runs_is_written() {
        let progress = Progress::default();
        progress.report(report(1, 7, 10));
        progress.report(report(1, 7, 20));
        progress.report(report(2, 7, 30));
        progress.ended(JobId(2), Fence(7));
        let pending = progress.take();
        assert_eq!(pending.reports.len(), 1);
        assert_eq!(pending.reports[&JobId(1)].percent, 20);
        assert_eq!(pending.ended, [(JobId(2), Fence(7))]);
    }

    #[test]
    fn unwritten_reports_are_put_back_unless_the_attempt_has_ended_or_reported_again() {
        let progress = Progress::default();
        for id in 1..=3 {
            progress.report(report(id, 7, 10));
        }
        progress.ended(JobId(4), Fence(7));
        let old = progress.take();
        progress.report(report(1, 7, 20));
        progress.ended(JobId(2), Fence(7));
        progress.put_back(old.reports);
        let pending = progress.take();
        assert_eq!(
            pending.ended,
            [(JobId(2), Fence(7))],
            "ended attempts do not accumulate"
        );
        let reports = pending.reports.values();
        let mut reports: Vec<(i64, u8)> = reports
            .map(|report| (report.id.0, report.percent))
            .collect();
        reports.sort_unstable();
        assert_eq!(reports, [(1, 20), (3, 10)]);
    }

    #[test]
    fn the_end_of_an_earlier_attempt_keeps_the_reports_of_the_next_one() {
        let progress = Progress::default();
        progress.report(report(1, 8, 10));
        progress.ended(JobId(1), Fence(7));
        assert_eq!(progress.take().reports.len(), 1);
    }
}
