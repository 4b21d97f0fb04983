//! A guest's log, which is part of the host's log.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tracing::Level;

use super::pace::Pace;
use crate::job::{Attempt, JobId};
use crate::sandbox::{AbortHandle, Journal, Limits};
use crate::sanitize::printable;
use crate::traces::AttemptTrace;

/// The maximum size of a line; longer lines are truncated, because they would be useless in a log.
const LINE_BYTES_MAX: usize = 16 << 10;

/// The cost of a line in addition to its text, so that empty lines are also limited.
const LINE_BYTES_OVERHEAD: usize = 64;

/// The cost of a line that the rate limit drops: small, so that an error is logged even after a flood that lasts a
/// minute, but not zero, so that an endless flood ends.
const DROPPED_BYTES: usize = 1;

/// The maximum size of the end of standard error that is kept for the error of a guest that traps. A stack trace is a
/// few dozen lines long.
const ERRORS_BYTES_MAX: usize = 8 << 10;
const ERRORS_LINES_MAX: usize = 40;

/// An output stream of a guest.
#[derive(Debug, Clone, Copy)]
pub(in crate::sandbox) enum Stream {
    /// Standard output.
    Output,
    /// Standard error.
    Error,
}

impl Stream {
    fn level(self) -> Level {
        match self {
            Self::Output => Level::INFO,
            Self::Error => Level::WARN,
        }
    }
}

/// The source of a log.
#[derive(Debug)]
pub(in crate::sandbox) enum LogSource {
    /// An attempt at a job.
    Attempt {
        job: JobId,
        handler: Arc<str>,
        attempt: Attempt,
    },
    /// A module that is being described: its log is discarded.
    Module,
}

/// The log of one attempt: `log`, progress, standard output, standard error. Everything goes to `tracing` under the
/// target `rouse::guest` with the job's id, line by line, with control characters escaped, up to limits, and until the
/// attempt is aborted. Notices report what the limits have dropped.
pub(in crate::sandbox) struct GuestLog {
    source: LogSource,
    abort: AbortHandle,
    /// Also stores the lines.
    journal: Option<Arc<dyn Journal>>,
    /// Also exports the lines.
    trace: AttemptTrace,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    bytes_left: usize,
    pace: Pace,
    /// The number of lines written.
    lines: u32,
    /// The unfinished lines of standard output and standard error.
    partial: [Vec<u8>; 2],
    /// The end of standard error.
    errors: Errors,
}

/// The end of what a guest wrote to standard error, including lines dropped from the log.
#[derive(Debug, Default)]
struct Errors {
    bytes: Vec<u8>,
    /// The first line is incomplete.
    is_truncated: bool,
}

impl GuestLog {
    pub(in crate::sandbox) fn new(
        source: LogSource,
        abort: AbortHandle,
        limits: &Limits,
        journal: Option<Arc<dyn Journal>>,
    ) -> Self {
        Self {
            source,
            abort,
            journal,
            trace: AttemptTrace::default(),
            inner: Mutex::new(Inner {
                bytes_left: limits.log_bytes,
                pace: Pace::new(limits.log_lines_per_second),
                lines: 0,
                partial: [Vec::new(), Vec::new()],
                errors: Errors::default(),
            }),
        }
    }

    /// Exports its lines in this trace.
    pub(in crate::sandbox) fn traced(self, trace: AttemptTrace) -> Self {
        Self { trace, ..self }
    }

    /// Logs a message of `context.log` as one event: its line breaks become spaces.
    pub(super) fn message(&self, level: Level, message: &str) {
        if let Some(inner) = self.open() {
            self.line(inner, level, message);
        }
    }

    /// Logs a report of `context.progress`, which counts as a line.
    pub(super) fn progress(&self, percent: u8, step: &str) {
        let Some(mut inner) = self.open().and_then(|inner| self.paced(inner)) else {
            return;
        };
        if !inner.charge(step.len()) {
            return self.report_limit(inner);
        }
        drop(inner);
        if let LogSource::Attempt {
            job,
            handler,
            attempt,
        } = &self.source
        {
            tracing::event!(
                target: "rouse::guest",
                Level::INFO,
                { job.id = job.0, handler = &**handler, attempt = attempt.0, percent, step },
                "progress"
            );
        }
    }

    /// Logs bytes of standard output or standard error.
    pub(super) fn print(&self, stream: Stream, bytes: &[u8]) {
        if matches!(stream, Stream::Error) {
            self.lock().errors.push(bytes);
        }
        let mut rest = bytes;
        while !rest.is_empty() {
            let Some(mut inner) = self.open() else {
                return;
            };
            let end = rest.iter().position(|byte| *byte == b'\n');
            let (piece, after) = rest.split_at(end.map_or(rest.len(), |at| at + 1));
            rest = after;
            let partial = &mut inner.partial[stream as usize];
            partial.extend_from_slice(piece);
            if partial.ends_with(b"\n") || partial.len() >= LINE_BYTES_MAX {
                let line = std::mem::take(partial);
                if !self.line(inner, stream.level(), &String::from_utf8_lossy(&line)) {
                    return self.drop_lines(stream, rest);
                }
            }
        }
    }

    /// The last lines of standard error, sanitized, without empty ones.
    pub(in crate::sandbox) fn last_errors(&self) -> Vec<String> {
        self.lock().errors.lines()
    }

    /// Drops the rest of a write after an excess line.
    fn drop_lines(&self, stream: Stream, rest: &[u8]) {
        let Some(mut inner) = self.open() else {
            return;
        };
        let lines = rest.iter().filter(|byte| **byte == b'\n').count();
        let started = rest.rsplit(|byte| *byte == b'\n').next().unwrap_or(rest);
        let started = &started[..started.len().min(LINE_BYTES_MAX - 1)];
        inner.partial[stream as usize].extend_from_slice(started);
        inner.pace.drop_lines(lines);
        if !inner.charge_dropped(lines) {
            self.report_limit(inner);
        }
    }

    /// Logs unfinished lines at the end.
    pub(in crate::sandbox) fn finish(&self) {
        for stream in [Stream::Output, Stream::Error] {
            if let Some(mut inner) = self.open() {
                let line = std::mem::take(&mut inner.partial[stream as usize]);
                if !line.is_empty() {
                    self.line(inner, stream.level(), &String::from_utf8_lossy(&line));
                }
            }
        }
        self.finish_pace();
    }

    /// Logs a notice of the last lines that were dropped. This also happens after an abort, because they were dropped
    /// before it.
    fn finish_pace(&self) {
        let mut inner = self.lock();
        if let Some(dropped) = inner.pace.dropped() {
            let number = inner.next_line();
            drop(inner);
            self.emit(number, Level::WARN, &dropped);
        }
    }

    /// `None` if the log is closed or discarded.
    fn open(&self) -> Option<MutexGuard<'_, Inner>> {
        if self.abort.reason().is_some() || matches!(self.source, LogSource::Module) {
            return None;
        }
        let inner = self.lock();
        (inner.bytes_left > 0).then_some(inner)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Logs a line. Returns false if it exceeds the maximum number of lines per second.
    fn line(&self, inner: MutexGuard<'_, Inner>, level: Level, text: &str) -> bool {
        let Some(mut inner) = self.paced(inner) else {
            return false;
        };
        // Escaping may make the text several times longer.
        let text = printable(text.trim_end(), LINE_BYTES_MAX);
        if !inner.charge(text.len()) {
            self.report_limit(inner);
            return true;
        }
        let number = inner.next_line();
        drop(inner);
        self.emit(number, level, &text);
        true
    }

    /// `None` if one more line would exceed the rate limit. Otherwise logs how many lines were dropped before.
    fn paced<'a>(&self, mut inner: MutexGuard<'a, Inner>) -> Option<MutexGuard<'a, Inner>> {
        if !inner.pace.allows(Instant::now()) {
            if !inner.charge_dropped(1) {
                self.report_limit(inner);
            }
            return None;
        }
        if let Some(dropped) = inner.pace.dropped() {
            let number = inner.next_line();
            self.emit(number, Level::WARN, &dropped);
        }
        Some(inner)
    }

    /// Logs that the rest is dropped.
    fn report_limit(&self, mut inner: MutexGuard<'_, Inner>) {
        if let Some(dropped) = inner.pace.dropped() {
            let number = inner.next_line();
            self.emit(number, Level::WARN, &dropped);
        }
        let number = inner.next_line();
        drop(inner);
        self.emit(
            number,
            Level::WARN,
            "this attempt has reached the limit of its log (`log_bytes` in rouse.toml); the rest is dropped",
        );
    }

    fn emit(&self, number: u32, level: Level, line: &str) {
        if let Some(journal) = &self.journal {
            journal.log_line(number, level, line);
        }
        self.trace.log(level, line);
        let LogSource::Attempt {
            job,
            handler,
            attempt,
        } = &self.source
        else {
            return;
        };
        macro_rules! event {
            ($level:expr) => {
                tracing::event!(
                    target: "rouse::guest",
                    $level,
                    { job.id = job.0, handler = &**handler, attempt = attempt.0 },
                    "{line}"
                )
            };
        }
        // The level of an event is part of its call site, so each level needs one.
        match level {
            Level::TRACE => event!(Level::TRACE),
            Level::DEBUG => event!(Level::DEBUG),
            Level::INFO => event!(Level::INFO),
            Level::WARN => event!(Level::WARN),
            Level::ERROR => event!(Level::ERROR),
        }
    }
}

impl Inner {
    /// The number of the next line.
    fn next_line(&mut self) -> u32 {
        self.lines += 1;
        self.lines
    }

    /// Charges a line to the budget. Returns false if too little of it is left; in that case, the rest of the budget is
    /// used up.
    fn charge(&mut self, bytes: usize) -> bool {
        let left = self.bytes_left.checked_sub(bytes + LINE_BYTES_OVERHEAD);
        self.bytes_left = left.unwrap_or(0);
        left.is_some()
    }

    /// Charges dropped lines to the budget. Returns false if nothing is left of the budget.
    fn charge_dropped(&mut self, lines: usize) -> bool {
        let bytes = lines.saturating_mul(DROPPED_BYTES);
        self.bytes_left = self.bytes_left.saturating_sub(bytes);
        self.bytes_left > 0
    }
}

impl Errors {
    fn push(&mut self, bytes: &[u8]) {
        let last = &bytes[bytes.len().saturating_sub(ERRORS_BYTES_MAX)..];
        self.bytes.extend_from_slice(last);
        self.is_truncated |= last.len() < bytes.len();
        // Not done at each write, because a guest may write byte by byte.
        if self.bytes.len() > 2 * ERRORS_BYTES_MAX {
            self.bytes.drain(..self.bytes.len() - ERRORS_BYTES_MAX);
            self.is_truncated = true;
        }
    }

    fn lines(&self) -> Vec<String> {
        let from = self.bytes.len().saturating_sub(ERRORS_BYTES_MAX);
        let text = String::from_utf8_lossy(&self.bytes[from..]);
        let text = match (self.is_truncated || from > 0, text.split_once('\n')) {
            (true, Some((_, whole))) => whole,
            (true, None) | (false, _) => &text,
        };
        let lines = text.lines().map(str::trim_end);
        let mut lines: Vec<_> = lines.filter(|line| !line.is_empty()).collect();
        lines.drain(..lines.len().saturating_sub(ERRORS_LINES_MAX));
        let shown = lines.into_iter();
        shown
            .map(|line| printable(line, ERRORS_BYTES_MAX))
            .collect()
    }
}

#[cfg(test)]
mod tests;
