//! What guests print and log, kept with their attempts: told to the database together, twice a second at most.

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

/// Who follows a log does not notice half a second.
const EVERY: Duration = Duration::from_millis(500);

/// Lines in one statement.
const BATCH_MAX: usize = 2_000;

/// What may wait here while the database does not answer, bytes. The lines that come on top stand in the host's own log only.
const PENDING_BYTES_MAX: usize = 8 << 20;

/// What a line costs here beside its text.
const LINE_BYTES: usize = 96;

/// How long a worker that stops waits for the last lines to be kept.
const LAST_WITHIN: Duration = Duration::from_secs(5);

/// What the attempts of one worker have said and nobody has kept.
#[derive(Default)]
pub(super) struct Logs {
    pending: Mutex<Pending>,
    any: Notify,
}

#[derive(Default)]
struct Pending {
    lines: Vec<Said>,
    bytes: usize,
    lost: u64,
}

struct Said {
    at: Instant,
    line: LogLine,
}

impl Logs {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        // Nothing panics while it holds the lock, and the list is whole at every step.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn say(&self, id: JobId, attempt: Attempt, line: u32, level: Level, text: &str) {
        let mut pending = self.lock();
        let bytes = text.len() + LINE_BYTES;
        if pending.bytes + bytes > PENDING_BYTES_MAX {
            pending.lost += 1;
            return;
        }
        pending.bytes += bytes;
        pending.lines.push(Said {
            at: Instant::now(),
            line: LogLine {
                id,
                attempt,
                line,
                age: Duration::ZERO,
                level: word(level),
                text: text.to_owned(),
            },
        });
        drop(pending);
        self.any.notify_one();
    }

    /// Lines that wait to be kept.
    fn waiting(&self) -> usize {
        self.lock().lines.len()
    }

    /// Takes everything out, at most so many lines.
    fn take(&self, most: usize) -> Vec<Said> {
        let mut pending = self.lock();
        let lost = std::mem::take(&mut pending.lost);
        let rest = pending.lines.len().min(most);
        let rest = pending.lines.split_off(rest);
        let taken = std::mem::replace(&mut pending.lines, rest);
        pending.bytes -= taken.iter().map(Said::bytes).sum::<usize>();
        drop(pending);
        if lost > 0 {
            counter!("rouse_log_lines_lost_total").increment(lost);
            warn!(
                lost,
                "lines of guests are not kept with their attempts: the database takes too long"
            );
        }
        taken
    }

    /// Puts back what could not be written, as far as there is room.
    fn put_back(&self, taken: Vec<Said>) {
        let mut pending = self.lock();
        let since = std::mem::take(&mut pending.lines);
        pending.bytes = 0;
        for said in taken.into_iter().chain(since) {
            let bytes = said.bytes();
            if pending.bytes + bytes > PENDING_BYTES_MAX {
                pending.lost += 1;
            } else {
                pending.bytes += bytes;
                pending.lines.push(said);
            }
        }
        drop(pending);
        self.any.notify_one();
    }
}

impl Said {
    fn bytes(&self) -> usize {
        self.line.text.len() + LINE_BYTES
    }
}

fn word(level: Level) -> &'static str {
    match level {
        Level::TRACE => "trace",
        Level::DEBUG => "debug",
        Level::INFO => "info",
        Level::WARN => "warn",
        Level::ERROR => "error",
    }
}

/// Keeps what the attempts say, until it is told to stop. Only the waits are cut short: lines that are being written would be
/// lost.
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

/// Keeps what was said last, by a worker that stops: its attempts have ended.
pub(super) async fn finish(shared: &Shared) {
    let mut left = shared.reports.logs.waiting();
    let all = async {
        // Those that are being written when the time is up are left too.
        while write(shared).await {
            left = shared.reports.logs.waiting();
        }
        left = shared.reports.logs.waiting();
    };
    let _ = tokio::time::timeout(LAST_WITHIN, all).await;
    if left > 0 {
        counter!("rouse_log_lines_lost_total").increment(left as u64);
        warn!(
            lines = left,
            "the last lines of guests are not kept with their attempts: the database did not take them in time"
        );
    }
}

/// Writes a batch down. False when there is no more to be written now.
async fn write(shared: &Shared) -> bool {
    let mut taken = shared.reports.logs.take(BATCH_MAX);
    if taken.is_empty() {
        return false;
    }
    let lines: Vec<LogLine> = taken
        .iter_mut()
        .map(|said| {
            said.line.age = said.at.elapsed();
            said.line.clone()
        })
        .collect();
    let _turn = shared.calls.patient.acquire().await;
    match shared.store.append_log(&lines).await {
        Ok(_) => true,
        // One of them cannot be stored: nobody is to wait for it for ever.
        Err(error) if error.is_about_data() => {
            error!(%error, lines = lines.len(), "lines of guests cannot be kept with their attempts");
            true
        }
        // This life is over, and what it has said is nobody's any more.
        Err(error) if shared.doubted(&error) => {
            counter!("rouse_log_lines_lost_total").increment(lines.len() as u64);
            false
        }
        Err(error) => {
            warn_unless_unreachable!(error, "could not keep what guests have said; trying again");
            shared.reports.logs.put_back(taken);
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn say(logs: &Logs, line: u32, text: &str) {
        logs.say(JobId(1), Attempt(1), line, Level::INFO, text);
    }

    fn numbers(taken: &[Said]) -> Vec<u32> {
        taken.iter().map(|said| said.line.line).collect()
    }

    #[test]
    fn lines_are_taken_in_their_order_and_what_could_not_be_written_comes_first() {
        let logs = Logs::default();
        for line in 1..=5 {
            say(&logs, line, "x");
        }
        let taken = logs.take(3);
        assert_eq!(numbers(&taken), [1, 2, 3]);
        say(&logs, 6, "x");
        logs.put_back(taken);
        assert_eq!(numbers(&logs.take(9)), [1, 2, 3, 4, 5, 6]);
        assert_eq!(logs.lock().bytes, 0);
    }

    #[test]
    fn what_waits_is_bounded_and_what_is_lost_is_counted() {
        let logs = Logs::default();
        let long = "x".repeat(1 << 20);
        for line in 1..=9 {
            say(&logs, line, &long);
        }
        assert_eq!(
            logs.lock().lost,
            2,
            "seven megabytes and what they cost besides"
        );
        let taken = logs.take(9);
        assert_eq!(taken.len(), 7);
        for line in 10..=12 {
            say(&logs, line, &long);
        }
        logs.put_back(taken);
        assert_eq!(logs.lock().lost, 3);
        assert_eq!(numbers(&logs.take(9)), [1, 2, 3, 4, 5, 6, 7]);
    }
}
