//! Stores the lines that guests print and log, with their attempts: in batches, at most twice a second.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::counter;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{Level, debug, error, warn};

use super::Shared;
use super::reach::warn_unless_unreachable;
use crate::job::{Attempt, JobId};
use crate::store::LogLine;

/// The interval. Half a second is short enough for a person who follows a log.
const EVERY: Duration = Duration::from_millis(500);

/// The maximum number of lines in one statement.
const BATCH_MAX: usize = 2_000;

/// The maximum size of lines that wait while the database does not answer, in bytes. Further lines are only in the
/// host's own log.
const PENDING_BYTES_MAX: usize = 8 << 20;

/// The memory of a pending line apart from its text, in bytes.
const LINE_BYTES: usize = 96;

/// How long a worker that stops waits for its last lines to be stored.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// The lines of one worker's attempts that are not stored yet.
#[derive(Default)]
pub(super) struct Logs {
    pending: Mutex<Pending>,
    any: Notify,
}

#[derive(Default)]
struct Pending {
    lines: Vec<PendingLine>,
    bytes: usize,
    lost: u64,
}

struct PendingLine {
    at: Instant,
    /// An earlier call has failed. If only its response was lost, the line has been stored.
    was_sent: bool,
    line: LogLine,
}

impl Logs {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        // Nothing panics while holding the lock, and the list is consistent at every step.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn push(&self, id: JobId, attempt: Attempt, line: u32, level: Level, text: &str) {
        let mut pending = self.lock();
        let bytes = text.len() + LINE_BYTES;
        if pending.bytes + bytes > PENDING_BYTES_MAX {
            pending.lost += 1;
            return;
        }
        pending.bytes += bytes;
        pending.lines.push(PendingLine {
            at: Instant::now(),
            was_sent: false,
            line: LogLine {
                id,
                attempt,
                line,
                age: Duration::ZERO,
                level: level_name(level),
                text: text.to_owned(),
            },
        });
        drop(pending);
        self.any.notify_one();
    }

    /// The number of lines that are not stored yet.
    fn waiting(&self) -> usize {
        self.lock().lines.len()
    }

    /// Takes up to `max` lines.
    fn take(&self, max: usize) -> Vec<PendingLine> {
        let mut pending = self.lock();
        let lost = std::mem::take(&mut pending.lost);
        let count = pending.lines.len().min(max);
        let rest = pending.lines.split_off(count);
        let taken = std::mem::replace(&mut pending.lines, rest);
        pending.bytes -= taken.iter().map(PendingLine::bytes).sum::<usize>();
        drop(pending);
        if lost > 0 {
            counter!("rouse_log_lines_lost_total").increment(lost);
            warn!(
                lost,
                "lines of guests were not stored with their attempts, because the database is too slow; they are only in this log"
            );
        }
        taken
    }

    /// Puts back lines that may not have been written, as many as fit.
    fn put_back(&self, mut taken: Vec<PendingLine>) {
        for line in &mut taken {
            line.was_sent = true;
        }
        let mut pending = self.lock();
        let newer = std::mem::take(&mut pending.lines);
        pending.bytes = 0;
        for line in taken.into_iter().chain(newer) {
            let bytes = line.bytes();
            if pending.bytes + bytes > PENDING_BYTES_MAX {
                pending.lost += 1;
            } else {
                pending.bytes += bytes;
                pending.lines.push(line);
            }
        }
        drop(pending);
        self.any.notify_one();
    }
}

impl PendingLine {
    fn bytes(&self) -> usize {
        self.line.text.len() + LINE_BYTES
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::TRACE => "trace",
        Level::DEBUG => "debug",
        Level::INFO => "info",
        Level::WARN => "warn",
        Level::ERROR => "error",
    }
}

/// Stores lines until `stop`, which interrupts only the waits: otherwise, lines that are being written would be lost.
pub(super) async fn run_until(shared: Arc<Shared>, stop: CancellationToken) {
    while stop
        .run_until_cancelled(shared.reports.logs.any.notified())
        .await
        .is_some()
    {
        while write(&shared).await && !stop.is_cancelled() {}
        stop.run_until_cancelled(tokio::time::sleep(EVERY)).await;
    }
}

/// Stores the last lines of a worker whose attempts have ended.
pub(super) async fn finish(shared: &Shared) {
    let mut left = shared.reports.logs.waiting();
    let all = async {
        // Lines that are still being written at the timeout count as left.
        while write(shared).await {
            left = shared.reports.logs.waiting();
        }
        left = shared.reports.logs.waiting();
    };
    let _ = tokio::time::timeout(FLUSH_TIMEOUT, all).await;
    if left > 0 {
        counter!("rouse_log_lines_lost_total").increment(left as u64);
        warn!(
            lines = left,
            "the last lines of guests were not stored with their attempts: the database did not accept them in time"
        );
    }
}

/// Writes one batch. If the database can never store one of the lines, those of each job are sent separately, so that
/// only those of that job are lost. False if there is nothing more to write now.
async fn write(shared: &Shared) -> bool {
    let taken = shared.reports.logs.take(BATCH_MAX);
    if taken.is_empty() {
        return false;
    }
    let mut parts = VecDeque::from([taken]);
    while let Some(mut part) = parts.pop_front() {
        let lines: Vec<LogLine> = part
            .iter_mut()
            .map(|pending| {
                pending.line.age = pending.at.elapsed();
                pending.line.clone()
            })
            .collect();
        let repeats = part.iter().any(|pending| pending.was_sent);
        let permit = shared.calls.patient.acquire().await;
        let response = shared.store.append_log(&lines, repeats).await;
        drop(permit);
        match response {
            // The other lines belong to jobs that other workers have taken over since.
            Ok(kept) => count_lost(lines.len().saturating_sub(kept)),
            Err(error) if error.is_about_data() => {
                let of_jobs = by_job(part);
                if of_jobs.len() > 1 {
                    debug!(%error, lines = lines.len(), "lines of guests were refused; storing those of each job");
                    parts.extend(of_jobs);
                } else {
                    count_lost(lines.len());
                    let id = lines[0].id.0;
                    error!(job.id = id, %error, lines = lines.len(), "cannot store lines of a guest with its attempt");
                }
            }
            // The attempts of these lines are lost.
            Err(error) if shared.has_incarnation_ended(&error) => {
                count_lost(lines.len() + parts.iter().map(Vec::len).sum::<usize>());
                return false;
            }
            Err(error) => {
                shared.note_missing_partition(&error);
                warn_unless_unreachable!(error, "could not store lines of guests; trying again");
                part.extend(parts.into_iter().flatten());
                shared.reports.logs.put_back(part);
                return false;
            }
        }
    }
    true
}

/// Divides lines by their jobs. The lines of each job keep their order.
fn by_job(lines: Vec<PendingLine>) -> impl ExactSizeIterator<Item = Vec<PendingLine>> {
    let mut of_jobs: BTreeMap<JobId, Vec<PendingLine>> = BTreeMap::new();
    for line in lines {
        of_jobs.entry(line.line.id).or_default().push(line);
    }
    of_jobs.into_values()
}

fn count_lost(lines: usize) {
    if lines > 0 {
        counter!("rouse_log_lines_lost_total").increment(lines as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(logs: &Logs, line: u32, text: &str) {
        logs.push(JobId(1), Attempt(1), line, Level::INFO, text);
    }

    fn numbers(taken: &[PendingLine]) -> Vec<u32> {
        taken.iter().map(|pending| pending.line.line).collect()
    }

    #[test]
    fn lines_are_taken_in_order_and_those_that_were_put_back_come_first() {
        let logs = Logs::default();
        for line in 1..=5 {
            push(&logs, line, "x");
        }
        let taken = logs.take(3);
        assert_eq!(numbers(&taken), [1, 2, 3]);
        assert!(!taken.iter().any(|pending| pending.was_sent));
        push(&logs, 6, "x");
        logs.put_back(taken);
        let taken = logs.take(9);
        assert_eq!(numbers(&taken), [1, 2, 3, 4, 5, 6]);
        let sent = taken.iter().filter(|pending| pending.was_sent).count();
        assert_eq!(sent, 3);
        assert_eq!(logs.lock().bytes, 0);
    }

    #[test]
    fn lines_are_divided_by_their_jobs() {
        let logs = Logs::default();
        for (job, line) in [(2, 1), (1, 1), (2, 2), (1, 2), (3, 1)] {
            logs.push(JobId(job), Attempt(1), line, Level::INFO, "x");
        }
        let id = |part: &[PendingLine]| part[0].line.id.0;
        let parts = by_job(logs.take(9)).map(|part| (id(&part), numbers(&part)));
        let parts: Vec<(i64, Vec<u32>)> = parts.collect();
        assert_eq!(parts, [(1, vec![1, 2]), (2, vec![1, 2]), (3, vec![1])]);
    }

    #[test]
    fn pending_lines_are_limited_and_lost_lines_are_counted() {
        let logs = Logs::default();
        let long = "x".repeat(1 << 20);
        for line in 1..=9 {
            push(&logs, line, &long);
        }
        assert_eq!(
            logs.lock().lost,
            2,
            "seven lines of 1 MiB, with their overhead, fit"
        );
        let taken = logs.take(9);
        assert_eq!(taken.len(), 7);
        for line in 10..=12 {
            push(&logs, line, &long);
        }
        logs.put_back(taken);
        assert_eq!(logs.lock().lost, 3);
        assert_eq!(numbers(&logs.take(9)), [1, 2, 3, 4, 5, 6, 7]);
    }
}
