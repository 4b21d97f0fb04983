//! What a guest says, on its way into the host's log.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tracing::Level;

use super::Stream;
use super::pace::Pace;
use crate::harmless::printable;
use crate::job::{Attempt, JobId};
use crate::sandbox::{AbortHandle, Journal, Limits};

/// A longer line is cut; it would be useless in a log.
const LINE_BYTES_MAX: usize = 16 << 10;

/// What a line costs beside its text, so that empty lines have an end too.
const LINE_BYTES_OVERHEAD: usize = 64;

/// Who speaks.
#[derive(Debug)]
pub(in crate::sandbox) enum Speaker {
    /// An attempt at a job.
    Attempt {
        job: JobId,
        handler: Arc<str>,
        attempt: Attempt,
    },
    /// A module that is asked for its manifest: nobody listens.
    Module,
}

/// What one attempt says: `log`, progress, standard output, standard error. All of it goes to
/// `tracing` under the target `rouse::guest` with the job's id beside it, line by line, with
/// control characters made harmless, up to a limit, and until the attempt is told to stop.
pub(in crate::sandbox) struct GuestLog {
    speaker: Speaker,
    abort: AbortHandle,
    /// Where lines are kept besides.
    journal: Option<Arc<dyn Journal>>,
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    bytes_left: usize,
    pace: Pace,
    /// How many have been written.
    lines: u32,
    /// The unfinished lines of standard output and standard error.
    partial: [Vec<u8>; 2],
}

impl GuestLog {
    pub(in crate::sandbox) fn new(
        speaker: Speaker,
        abort: AbortHandle,
        limits: &Limits,
        journal: Option<Arc<dyn Journal>>,
    ) -> Self {
        Self {
            speaker,
            abort,
            journal,
            inner: Mutex::new(Inner {
                bytes_left: limits.log_bytes,
                pace: Pace::new(limits.log_lines_per_second),
                lines: 0,
                partial: [Vec::new(), Vec::new()],
            }),
        }
    }

    /// A message of `context.log`. Its line breaks are kept as spaces: one message, one event.
    pub(super) fn message(&self, level: Level, message: &str) {
        if let Some(inner) = self.listen() {
            self.line(inner, level, message);
        }
    }

    /// A report of `context.progress`.
    pub(super) fn progress(&self, percent: u8, step: &str) {
        let Some(mut inner) = self.listen() else {
            return;
        };
        if !inner.pay(step.len()) {
            return self.cut(inner);
        }
        drop(inner);
        if let Speaker::Attempt {
            job,
            handler,
            attempt,
        } = &self.speaker
        {
            tracing::event!(
                target: "rouse::guest",
                Level::INFO,
                { job.id = job.0, handler = &**handler, attempt = attempt.0, percent, step },
                "progress"
            );
        }
    }

    /// Bytes of standard output or standard error.
    pub(super) fn print(&self, stream: Stream, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let Some(mut inner) = self.listen() else {
                return;
            };
            let partial = &mut inner.partial[stream as usize];
            partial.extend_from_slice(piece);
            if partial.ends_with(b"\n") || partial.len() >= LINE_BYTES_MAX {
                let line = std::mem::take(partial);
                self.line(inner, stream.level(), &String::from_utf8_lossy(&line));
            }
        }
    }

    /// Writes the lines that the guest began without ending them.
    pub(in crate::sandbox) fn finish(&self) {
        for stream in [Stream::Output, Stream::Error] {
            if let Some(mut inner) = self.listen() {
                let line = std::mem::take(&mut inner.partial[stream as usize]);
                if !line.is_empty() {
                    self.line(inner, stream.level(), &String::from_utf8_lossy(&line));
                }
            }
        }
        self.finish_pace();
    }

    /// Says what is to be said of lines that were left out last.
    fn finish_pace(&self) {
        if let Some(mut inner) = self.listen()
            && let Some(left_out) = inner.pace.left_out()
        {
            let number = inner.next_line();
            drop(inner);
            self.emit(number, Level::WARN, &left_out);
        }
    }

    /// None when nobody listens (any more).
    fn listen(&self) -> Option<MutexGuard<'_, Inner>> {
        if self.abort.reason().is_some() || matches!(self.speaker, Speaker::Module) {
            return None;
        }
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        (inner.bytes_left > 0).then_some(inner)
    }

    fn line(&self, mut inner: MutexGuard<'_, Inner>, level: Level, text: &str) {
        if !inner.pace.allows(Instant::now()) {
            return;
        }
        if let Some(left_out) = inner.pace.left_out() {
            let number = inner.next_line();
            self.emit(number, Level::WARN, &left_out);
        }
        if !inner.pay(text.len().min(LINE_BYTES_MAX)) {
            return self.cut(inner);
        }
        let number = inner.next_line();
        drop(inner);
        self.emit(number, level, &printable(text.trim_end(), LINE_BYTES_MAX));
    }

    fn cut(&self, mut inner: MutexGuard<'_, Inner>) {
        let number = inner.next_line();
        drop(inner);
        self.emit(
            number,
            Level::WARN,
            "this attempt has written more than it may (`log_bytes` in rouse.toml); the rest is left out",
        );
    }

    fn emit(&self, number: u32, level: Level, line: &str) {
        if let Some(journal) = &self.journal {
            journal.say(number, level, line);
        }
        let Speaker::Attempt {
            job,
            handler,
            attempt,
        } = &self.speaker
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
        // The level of an event is part of its call site, so each level needs its own.
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

    /// Pays for one line; false when there is not enough left, and then nothing is.
    fn pay(&mut self, bytes: usize) -> bool {
        let left = self.bytes_left.checked_sub(bytes + LINE_BYTES_OVERHEAD);
        self.bytes_left = left.unwrap_or(0);
        left.is_some()
    }
}

#[cfg(test)]
mod tests {
    fn limits(log_bytes: usize) -> Limits {
        Limits {
            log_bytes,
            ..Limits::default()
        }
    }

    use std::io;
    use std::time::Duration;

    use tracing_subscriber::fmt::MakeWriter;

    use super::*;
    use crate::job::AbortReason;

    /// What was written to the host's log.
    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl<'a> MakeWriter<'a> for Written {
        type Writer = Self;

        fn make_writer(&'a self) -> Self {
            self.clone()
        }
    }

    /// The host's log of what this attempt says, with a limit of 1,000 bytes.
    fn logged(says: impl FnOnce(&GuestLog, &AbortHandle)) -> String {
        let written = Written::default();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(written.clone())
            .with_ansi(false)
            .without_time()
            .finish();
        let speaker = Speaker::Attempt {
            job: JobId(42),
            handler: "test.it".into(),
            attempt: Attempt(3),
        };
        let abort = AbortHandle::new();
        let log = GuestLog::new(speaker, abort.clone(), &limits(1_000), None);
        tracing::subscriber::with_default(subscriber, || says(&log, &abort));
        let bytes = written.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn each_line_has_its_job_beside_it() {
        let log = logged(|log, _| {
            log.message(Level::WARN, "careful\nnow");
            log.print(Stream::Output, b"one\ntw");
            log.print(Stream::Output, b"o\nthree");
            log.finish();
            log.progress(50, "half");
        });
        let lines: Vec<&str> = log.lines().map(str::trim).collect();
        let job = r#"job.id=42 handler="test.it" attempt=3"#;
        assert_eq!(
            lines,
            [
                format!("WARN rouse::guest: careful now {job}"),
                format!("INFO rouse::guest: one {job}"),
                format!("INFO rouse::guest: two {job}"),
                format!("INFO rouse::guest: three {job}"),
                format!(r#"INFO rouse::guest: progress {job} percent=50 step="half""#),
            ]
        );
    }

    #[test]
    fn what_is_too_much_is_left_out_and_said_once() {
        let log = logged(|log, _| {
            for _ in 0..100 {
                log.print(Stream::Error, b"a line\n");
                log.message(Level::INFO, "a message");
            }
        });
        assert!(log.len() < 2_000, "{log}");
        let said = "more than it may (`log_bytes` in rouse.toml); the rest is left out";
        assert_eq!(log.matches(said).count(), 1);
    }

    #[test]
    fn after_the_abort_nobody_listens() {
        let log = logged(|log, abort| {
            log.print(Stream::Output, b"begun");
            abort.abort(AbortReason::TakenByAnotherWorker, Duration::from_secs(5));
            log.print(Stream::Output, b" and ended\n");
            log.message(Level::ERROR, "late");
            log.progress(100, "late");
            log.finish();
        });
        assert_eq!(log, "");
    }

    #[test]
    fn even_empty_lines_use_up_the_limit() {
        let mut inner = Inner {
            pace: Pace::new(1_000),
            lines: 0,
            bytes_left: 3 * LINE_BYTES_OVERHEAD,
            partial: [Vec::new(), Vec::new()],
        };
        assert!(inner.pay(0) && inner.pay(0) && inner.pay(0));
        assert!(!inner.pay(0));
    }

    #[test]
    fn an_endless_line_is_not_kept_in_memory() {
        let speaker = Speaker::Attempt {
            job: JobId(1),
            handler: "a".into(),
            attempt: Attempt(1),
        };
        let log = GuestLog::new(speaker, AbortHandle::new(), &limits(1 << 20), None);
        for _ in 0..100 {
            log.print(Stream::Output, &[b'x'; 4096]);
        }
        let inner = log.inner.lock().unwrap();
        assert!(inner.partial[0].len() < LINE_BYTES_MAX);
        assert!(inner.bytes_left < 1 << 20);
    }
}
