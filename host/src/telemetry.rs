//! Logs on stderr: readable lines, or JSON for machines.

mod writer;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, Write as _};
use std::panic::{self, PanicHookInfo};
use std::str::FromStr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::Duration;

use anstream::{AutoStream, ColorChoice};
use indicatif::ProgressBar;
use tracing_subscriber::layer::{Layer, SubscriberExt as _};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Registry, fmt};

use self::writer::Writer;

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum LogFormat {
    /// One readable line per event, in colour on a terminal, unless `NO_COLOR` or `CLICOLOR=0` is set.
    #[default]
    Text,
    /// One JSON object per event.
    Json,
}

impl FromStr for LogFormat {
    type Err = TelemetryError;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(TelemetryError::Format(other.to_owned())),
        }
    }
}

/// A log setting that cannot be used.
#[derive(Debug, PartialEq, thiserror::Error)]
pub enum TelemetryError {
    /// The filter cannot be read.
    #[error(
        "ROUSE_LOG is {filter:?}, which is not a valid filter ({why}): set, for instance, info or rouse=debug,warn"
    )]
    Filter {
        /// The value.
        filter: String,
        /// The problem with it.
        why: String,
    },
    /// The format is unknown.
    #[error("unknown log format {0:?}: choose text or json")]
    Format(String),
}

/// The default filter: `info`, without the messages that guests can make wasmtime-wasi-http log as often as they like.
pub const USUAL: &str = "info,wasmtime_wasi_http=error";

/// Another consumer of events, with its own filter.
pub type Listener = Box<dyn Layer<Registry> + Send + Sync>;

/// Sends the events that pass `filter`, the value of `ROUSE_LOG`, to stderr, and all events to `listener`. Does nothing
/// if logging is already set up, as in a test.
///
/// # Errors
/// If the filter is invalid. Then nothing is set up.
pub fn init(
    format: LogFormat,
    filter: &str,
    listener: Option<Listener>,
) -> Result<(), TelemetryError> {
    let filter = parse(filter)?;
    let lines = fmt::layer()
        .with_writer(|| Stderr)
        // The reader may have closed the pipe. An error about that would go to the same stream, and the task that logs
        // would panic.
        .log_internal_errors(false)
        .with_ansi(AutoStream::choice(&std::io::stderr()) != ColorChoice::Never);
    let lines = match format {
        LogFormat::Text => lines.compact().with_filter(filter).boxed(),
        LogFormat::Json => lines.json().flatten_event(true).with_filter(filter).boxed(),
    };
    let result = Registry::default().with(listener).with(lines).try_init();
    // It fails only if logging is already set up, and then the existing setup remains.
    drop::<Result<(), _>>(result);
    Ok(())
}

/// Writes all lines once it is set. Until then, each thread writes its own lines, at once.
static WRITER: OnceLock<Arc<Writer>> = OnceLock::new();

/// The time that the last lines may take at the end of the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);
/// The time for which a panic waits for its message to be written, because the process may end right after the panic.
const PANIC_TIMEOUT: Duration = Duration::from_millis(100);

/// From now on, a separate thread writes log lines, [`line()`]s and the messages of panics, so that a reader that
/// stalls does not stop the process. While 4 MiB wait, further lines are dropped; a warning counts them once the reader
/// reads again.
///
/// # Errors
/// If the thread cannot be started.
pub fn write_in_background() -> io::Result<Flush> {
    let writer = Writer::start(
        |line| {
            // The reader may have closed the pipe.
            let _ = write_now(line);
        },
        |dropped| {
            tracing::warn!(
                lines = dropped,
                "log lines were dropped: standard error was not read in time"
            );
        },
    )?;
    WRITER.get_or_init(|| writer);
    panic::set_hook(Box::new(report_panic));
    Ok(Flush)
}

/// Writes the message of a panic. The standard hook would wait for a reader that stalls, and the panicking task would
/// not end before that.
fn report_panic(panic: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let name = thread.name().unwrap_or("<unnamed>");
    line(&format!("thread '{name}' {panic}"));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        line(&backtrace.to_string());
    }
    flush_for(PANIC_TIMEOUT);
}

/// When dropped, waits for the lines that are not written yet, for up to three seconds.
#[derive(Debug)]
#[non_exhaustive]
pub struct Flush;

impl Drop for Flush {
    fn drop(&mut self) {
        flush();
    }
}

/// Waits until the lines so far are written, for up to three seconds.
pub fn flush() {
    flush_for(FLUSH_TIMEOUT);
}

fn flush_for(timeout: Duration) {
    if let Some(writer) = WRITER.get() {
        writer.flush(timeout);
    }
}

/// Writes a line to standard error, in the order of the log. Unlike `eprintln!` it does not panic if the reader has
/// closed the pipe, and does not wait for a reader that stalls if lines are [written in the
/// background](write_in_background).
pub fn line(text: &str) {
    write(format!("{text}\n").as_bytes());
}

fn write(bytes: &[u8]) {
    match WRITER.get() {
        Some(writer) => writer.push(bytes),
        None => {
            // The reader may have closed the pipe.
            let _ = write_now(bytes);
        }
    }
}

fn write_now(bytes: &[u8]) -> io::Result<()> {
    above(|| io::stderr().write_all(bytes))
}

/// The line at the bottom of the terminal.
static BOTTOM: Mutex<Option<ProgressBar>> = Mutex::new(None);

/// Keeps this line at the bottom of the terminal, below log lines and everything that is written [`above`] it. `None`
/// removes it.
pub fn keep_below(line: Option<ProgressBar>) {
    *BOTTOM.lock().unwrap_or_else(PoisonError::into_inner) = line;
}

/// Writes something to the terminal, above the line at its bottom.
pub fn above<T>(write: impl FnOnce() -> T) -> T {
    let line = BOTTOM
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    match line {
        Some(line) => line.suspend(write),
        None => write(),
    }
}

/// Standard error, [`above`] the line at the bottom. Each event is one write.
struct Stderr;

impl io::Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn parse(filter: &str) -> Result<EnvFilter, TelemetryError> {
    EnvFilter::try_new(filter).map_err(|error| TelemetryError::Filter {
        filter: filter.to_owned(),
        why: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_setup_changes_nothing_and_does_not_panic() {
        assert_eq!(init(LogFormat::Text, USUAL, None), Ok(()));
        assert_eq!(init(LogFormat::Json, "rouse=debug,warn", None), Ok(()));
    }

    #[test]
    fn a_bad_filter_names_the_variable() {
        let error = init(LogFormat::Text, "rouse=loud", None).unwrap_err();
        assert!(
            error.to_string().starts_with("ROUSE_LOG is \"rouse=loud\""),
            "{error}"
        );
    }

    #[test]
    fn formats_are_parsed_from_words() {
        assert_eq!("json".parse(), Ok(LogFormat::Json));
        let error = "xml".parse::<LogFormat>().unwrap_err();
        assert!(error.to_string().contains("text or json"), "{error}");
    }
}
