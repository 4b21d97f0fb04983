//! What of a guest's words comes into the log.

use std::io;
use std::time::Duration;

use bytes::Bytes;
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
        errors: Errors::default(),
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

/// The log of an attempt that may say so much, and three lines within a second.
fn slow(log_bytes: usize) -> Arc<GuestLog> {
    let speaker = Speaker::Attempt {
        job: JobId(1),
        handler: "a".into(),
        attempt: Attempt(1),
    };
    let limits = Limits {
        log_lines_per_second: 3,
        ..limits(log_bytes)
    };
    Arc::new(GuestLog::new(speaker, AbortHandle::new(), &limits, None))
}

#[test]
fn lines_of_one_write_that_are_too_many_are_counted_together() {
    let log = slow(1_000);
    log.print(Stream::Output, b"1\n2\n3\n4\n5\n6\nbegun");
    log.print(Stream::Output, b" here");
    let mut inner = log.inner.lock().unwrap();
    assert_eq!(inner.partial[0], b"begun here");
    assert_eq!(inner.lines, 3);
    let paid = 3 * (LINE_BYTES_OVERHEAD + b"1\n".len()) + 3 * LEFT_OUT_BYTES;
    assert_eq!(inner.bytes_left, 1_000 - paid);
    let said = inner.pace.left_out().unwrap();
    assert!(said.starts_with("3 lines are left out"), "{said}");
}

#[test]
fn a_line_that_is_started_behind_a_flood_is_not_kept_in_memory_either() {
    let log = slow(1_000);
    let mut flood = b"\n\n\n\n".to_vec();
    flood.resize(WRITE_BYTES_MAX, b'x');
    log.print(Stream::Output, &flood);
    assert!(log.inner.lock().unwrap().partial[0].len() < LINE_BYTES_MAX);
}

#[test]
fn a_flood_has_an_end() {
    let log = slow(256 << 10);
    let mut output = GuestOutput::new(log.clone(), Stream::Output);
    let flood = Bytes::from(vec![b'\n'; WRITE_BYTES_MAX]);
    for _ in 0..5 {
        output.write(flood.clone()).unwrap();
    }
    assert!(log.listen().is_none(), "nobody listens any more");
    // The three lines, how many were left out, and that this is the end.
    assert!(log.inner.lock().unwrap().lines >= 3 + 2);
}

#[test]
fn a_write_beyond_what_was_allowed_is_a_trap() {
    let mut output = GuestOutput::new(slow(1_000), Stream::Output);
    let allowed = output.check_write().unwrap();
    assert_eq!(allowed, WRITE_BYTES_MAX);
    assert!(output.write(Bytes::from(vec![b'x'; allowed])).is_ok());
    let more = output.write(Bytes::from(vec![b'x'; allowed + 1]));
    assert!(matches!(more, Err(StreamError::Trap(_))));
}

/// What is kept of standard error.
fn errors(says: impl FnOnce(&GuestLog)) -> Vec<String> {
    let log = GuestLog::new(Speaker::Module, AbortHandle::new(), &limits(1_000), None);
    says(&log);
    log.last_errors()
}

#[test]
fn the_last_lines_of_standard_error_are_kept_also_of_what_is_left_out_of_the_log() {
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
fn what_is_kept_of_standard_error_is_whole_lines_within_a_size() {
    assert_eq!(errors(|_| {}), [""; 0]);
    let long = "x".repeat(3_000);
    let kept = errors(|log| {
        for _ in 0..9 {
            log.print(Stream::Error, format!("{long}\n").as_bytes());
        }
    });
    assert_eq!(
        kept,
        [long.as_str(); 2],
        "what has lost its start is left out"
    );
    // One endless line is shown from where it is known, in one write or in many.
    let endless = vec![b'y'; 100 << 10];
    for piece in [1_000, endless.len()] {
        let kept = errors(|log| {
            let pieces = endless.chunks(piece);
            pieces.for_each(|piece| log.print(Stream::Error, piece));
        });
        assert_eq!(kept, ["y".repeat(ERRORS_BYTES_MAX)]);
    }
}
