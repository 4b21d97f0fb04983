//! The output of a guest that is logged.

use std::io;
use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;
use tracing_subscriber::fmt::MakeWriter;
use wasmtime_wasi::p2::{OutputStream as _, StreamError};

use super::*;
use crate::job::AbortReason;
use crate::sandbox::capability::output::{GuestOutput, WRITE_BYTES_MAX};

fn limits(log_bytes: usize) -> Limits {
    Limits {
        log_bytes,
        ..Limits::default()
    }
}

/// The text that was written to the host's log.
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

/// While a process has only one subscriber, tracing lets the thread that reaches an event first decide whether it is of
/// interest, and keeps the decision for all threads: another test, without a subscriber, would silence this one.
static SECOND_SUBSCRIBER: LazyLock<Dispatch> =
    LazyLock::new(|| Dispatch::new(NoSubscriber::default()));

/// Runs an attempt's output with a limit of 1,000 bytes, and returns the host's log.
fn logged(write: impl FnOnce(&GuestLog, &AbortHandle)) -> String {
    logged_within(&limits(1_000), write)
}

/// Runs an attempt's output within these limits, and returns the host's log.
fn logged_within(limits: &Limits, write: impl FnOnce(&GuestLog, &AbortHandle)) -> String {
    LazyLock::force(&SECOND_SUBSCRIBER);
    let written = Written::default();
    let subscriber = tracing_subscriber::fmt()
        .with_writer(written.clone())
        .with_ansi(false)
        .without_time()
        .finish();
    let source = LogSource::Attempt {
        job: JobId(42),
        handler: "test.it".into(),
        attempt: Attempt(3),
    };
    let abort = AbortHandle::new();
    let log = GuestLog::new(source, abort.clone(), limits, None);
    tracing::subscriber::with_default(subscriber, || write(&log, &abort));
    let bytes = written.0.lock().unwrap().clone();
    String::from_utf8(bytes).unwrap()
}

#[test]
fn each_line_has_its_job() {
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
fn drop_excess_output_with_one_notice() {
    let log = logged(|log, _| {
        for _ in 0..100 {
            log.print(Stream::Error, b"a line\n");
            log.message(Level::INFO, "a message");
        }
    });
    assert!(log.len() < 2_000, "{log}");
    let notice = "the limit of its log (`log_bytes` in rouse.toml); the rest is dropped";
    assert_eq!(log.matches(notice).count(), 1);
}

#[test]
fn log_nothing_after_the_abort() {
    let log = logged(|log, abort| {
        log.print(Stream::Output, b"started");
        abort.abort(AbortReason::TakenByAnotherWorker, Duration::from_secs(5));
        log.print(Stream::Output, b" and ended\n");
        log.message(Level::ERROR, "late");
        log.progress(100, "late");
        log.finish();
    });
    assert_eq!(log, "");
}

#[test]
fn empty_lines_use_up_the_limit() {
    let mut inner = Inner {
        pace: Pace::new(1_000),
        lines: 0,
        bytes_left: 3 * LINE_BYTES_OVERHEAD,
        partial: [Vec::new(), Vec::new()],
        errors: Errors::default(),
    };
    assert!(inner.charge(0) && inner.charge(0) && inner.charge(0));
    assert!(!inner.charge(0));
}

#[test]
fn do_not_buffer_an_endless_line() {
    let source = LogSource::Attempt {
        job: JobId(1),
        handler: "a".into(),
        attempt: Attempt(1),
    };
    let log = GuestLog::new(source, AbortHandle::new(), &limits(1 << 20), None);
    for _ in 0..100 {
        log.print(Stream::Output, &[b'x'; 4096]);
    }
    let inner = log.inner.lock().unwrap();
    assert!(inner.partial[0].len() < LINE_BYTES_MAX);
    assert!(inner.bytes_left < 1 << 20);
}

#[test]
fn report_dropped_lines_of_an_aborted_attempt() {
    let none = Limits {
        log_lines_per_second: 0,
        ..limits(1_000)
    };
    let log = logged_within(&none, |log, abort| {
        for _ in 0..5 {
            log.message(Level::INFO, "a message");
        }
        abort.abort(AbortReason::TimedOut, Duration::from_secs(5));
        log.message(Level::INFO, "late");
        log.finish();
    });
    assert_eq!(log.matches("a message").count(), 0, "{log}");
    assert_eq!(log.matches("5 lines were dropped").count(), 1, "{log}");
    assert!(!log.contains("late"), "{log}");
}

/// The log of an attempt with this limit, which may write three lines within a second.
fn slow(log_bytes: usize) -> Arc<GuestLog> {
    let source = LogSource::Attempt {
        job: JobId(1),
        handler: "a".into(),
        attempt: Attempt(1),
    };
    let limits = Limits {
        log_lines_per_second: 3,
        ..limits(log_bytes)
    };
    Arc::new(GuestLog::new(source, AbortHandle::new(), &limits, None))
}

#[test]
fn count_the_excess_lines_of_one_write_together() {
    let log = slow(1_000);
    log.print(Stream::Output, b"1\n2\n3\n4\n5\n6\nstarted");
    log.print(Stream::Output, b" here");
    let mut inner = log.inner.lock().unwrap();
    assert_eq!(inner.partial[0], b"started here");
    assert_eq!(inner.lines, 3);
    let paid = 3 * (LINE_BYTES_OVERHEAD + "1".len()) + 3 * DROPPED_BYTES;
    assert_eq!(inner.bytes_left, 1_000 - paid);
    let notice = inner.pace.dropped().unwrap();
    assert!(notice.starts_with("3 lines were dropped"), "{notice}");
}

#[test]
fn a_line_costs_its_escaped_text() {
    let log = slow(1_000);
    log.print(Stream::Output, b"\x1b[2J\xff \r\n");
    log.message(Level::INFO, "\u{202e}");
    let paid = 2 * LINE_BYTES_OVERHEAD + "\\u{1b}[2J\u{fffd}".len() + "\\u{202e}".len();
    assert_eq!(log.inner.lock().unwrap().bytes_left, 1_000 - paid);
}

#[test]
fn reports_of_progress_count_as_lines() {
    let log = slow(1_000);
    for percent in 0..5 {
        log.progress(percent, "step");
    }
    log.message(Level::INFO, "too many");
    let mut inner = log.inner.lock().unwrap();
    let paid = 3 * (LINE_BYTES_OVERHEAD + "step".len()) + 3 * DROPPED_BYTES;
    assert_eq!(inner.bytes_left, 1_000 - paid);
    let notice = inner.pace.dropped().unwrap();
    assert!(notice.starts_with("3 lines were dropped"), "{notice}");
}

#[test]
fn do_not_buffer_an_unfinished_line_after_a_flood() {
    let log = slow(1_000);
    let mut flood = b"\n\n\n\n".to_vec();
    flood.resize(WRITE_BYTES_MAX, b'x');
    log.print(Stream::Output, &flood);
    assert!(log.inner.lock().unwrap().partial[0].len() < LINE_BYTES_MAX);
}

#[test]
fn a_flood_closes_the_log() {
    let log = slow(256 << 10);
    let mut output = GuestOutput::new(log.clone(), Stream::Output);
    let flood = Bytes::from(vec![b'\n'; WRITE_BYTES_MAX]);
    for _ in 0..5 {
        output.write(flood.clone()).unwrap();
    }
    assert!(log.open().is_none(), "the log is closed");
    // The three lines, the notice of those dropped, and the notice of the end.
    assert!(log.inner.lock().unwrap().lines >= 3 + 2);
}

#[test]
fn trap_a_write_beyond_what_was_allowed() {
    let mut output = GuestOutput::new(slow(1_000), Stream::Output);
    let allowed = output.check_write().unwrap();
    assert_eq!(allowed, WRITE_BYTES_MAX);
    assert!(output.write(Bytes::from(vec![b'x'; allowed])).is_ok());
    let more = output.write(Bytes::from(vec![b'x'; allowed + 1]));
    assert!(matches!(more, Err(StreamError::Trap(_))));
}

/// The kept lines of standard error.
fn errors(write: impl FnOnce(&GuestLog)) -> Vec<String> {
    let log = GuestLog::new(LogSource::Module, AbortHandle::new(), &limits(1_000), None);
    write(&log);
    log.last_errors()
}

#[test]
fn keep_the_last_lines_of_standard_error_even_if_not_logged() {
    let kept = errors(|log| {
        log.print(Stream::Output, b"not this\n");
        for line in 0..10_000 {
            log.print(Stream::Error, format!("line {line}\n").as_bytes());
        }
        log.print(Stream::Error, b"\n  why \x1b[2J\r\nunfinished");
    });
    assert_eq!(kept.len(), ERRORS_LINES_MAX);
    let shown = ["line 9999", "  why \\u{1b}[2J", "unfinished"];
    assert_eq!(kept[ERRORS_LINES_MAX - 3..], shown);
    assert_eq!(kept[0], "line 9962");
}

#[test]
fn keep_whole_lines_of_standard_error_within_a_size() {
    assert_eq!(errors(|_| {}), [""; 0]);
    let long = "x".repeat(3_000);
    let kept = errors(|log| {
        for _ in 0..9 {
            log.print(Stream::Error, format!("{long}\n").as_bytes());
        }
    });
    assert_eq!(kept, [long.as_str(); 2], "an incomplete line is dropped");
    // An endless line is shown from its first kept byte, in one write or in many.
    let endless = vec![b'y'; 100 << 10];
    for piece in [1_000, endless.len()] {
        let kept = errors(|log| {
            let pieces = endless.chunks(piece);
            pieces.for_each(|piece| log.print(Stream::Error, piece));
        });
        assert_eq!(kept, ["y".repeat(ERRORS_BYTES_MAX)]);
    }
}
