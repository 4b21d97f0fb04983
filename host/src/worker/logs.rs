//! Stores the lines that guests print and log, with their attempts: in batches, at most twice a second.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use metrics::counter;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::{Level, error, warn};

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

/// The time that a worker that stops waits for the last lines to be stored.
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
                "lines of guests were not stored with their attempts: the database is too slow"
            );
        }
        taken
    }

    /// Puts back as many of the lines that may not have been written as fit.
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
        while write(&shared).await {}
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

/// Writes one batch. False if there is nothing more to write now.
async fn write(shared: &Shared) -> bool {
    let mut taken = shared.reports.logs.take(BATCH_MAX);
    if taken.is_empty() {
        return false;
    }
    let lines: Vec<LogLine> = taken
        .iter_mut()
        .map(|pending| {
            pending.line.age = pending.at.elapsed();
            pending.line.clone()
        })
        .collect();
    let repeats = taken.iter().any(|pending| pending.was_sent);
    let _permit = shared.calls.patient.acquire().await;
    match shared.store.append_log(&lines, repeats).await {
        Ok(kept) => {
            // The other lines belong to jobs that other workers have taken over since.
            let lost = lines.len().saturating_sub(kept);
            if lost > 0 {
                counter!("rouse_log_lines_lost_total").increment(lost as u64);
            }
            true
        }
        // One of the lines can never be stored, so the batch is dropped.
        Err(error) if error.is_about_data() => {
            counter!("rouse_log_lines_lost_total").increment(lines.len() as u64);
            error!(%error, lines = lines.len(), "cannot store lines of guests with their attempts");
            true
        }
        // The attempts of these lines are lost.
        Err(error) if shared.has_incarnation_ended(&error) => {
            counter!("rouse_log_lines_lost_total").increment(lines.len() as u64);
            false
        }
        Err(error) => {
            shared.note_missing_partition(&error);
            warn_unless_unreachable!(error, "could not store lines of guests; trying again");
            shared.reports.logs.put_back(taken);
            false
        }
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
