//! Prints a line for each ended attempt of a `rouse dev`, from the events of [`rouse::job`](crate::worker). Under load,
//! only the first attempts of each second get a line, and one more line counts the others. On a terminal, the last line
//! is a summary of all attempts so far.
//!
//! It never blocks a worker: a thread of its own prints the lines, and lines that it cannot print in time are counted.

mod line;
mod summary;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::sync::mpsc::{self, RecvTimeoutError, SyncSender, TrySendError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::{Context, Layer};

use self::line::JobEnd;
use self::summary::Summary;
use crate::cli::screen::Screen;
use crate::telemetry;

/// The maximum number of lines in one second. Nobody can read more.
const LINES_MAX: usize = 20;

/// The maximum number of lines that wait for the thread: standard output may be slow or blocked.
const WAITING_MAX: usize = 2 * LINES_MAX;

const SECOND: Duration = Duration::from_secs(1);

/// The time limit for printing the last lines when `rouse dev` ends.
const END_TIMEOUT: Duration = Duration::from_secs(1);

/// Passes the ends of jobs to the thread that prints them.
#[derive(Debug, Clone)]
pub(in crate::cli) struct Jobs {
    window: Arc<Mutex<Window>>,
}

/// The current second: the number of lines, and the number of jobs without a line.
#[derive(Debug, Default)]
struct Window {
    /// `None` before printing starts, and after the end.
    lines: Option<SyncSender<Output>>,
    started: Option<Instant>,
    shown: usize,
    /// Jobs without a line, by outcome.
    more: BTreeMap<String, u64>,
    summary: Summary,
}

enum Output {
    End(Box<JobEnd>),
    More(BTreeMap<String, u64>),
    /// Confirms that everything before it has been printed.
    Flush(mpsc::Sender<()>),
}

impl Jobs {
    /// Nothing is printed until [`print`](Self::print) is called.
    pub(in crate::cli) fn new() -> Self {
        Self {
            window: Arc::default(),
        }
    }

    /// Listens to the events of jobs.
    pub(in crate::cli) fn listener(&self) -> telemetry::Listener {
        let events = Targets::new().with_target("rouse::job", LevelFilter::DEBUG);
        Listener(self.clone()).with_filter(events).boxed()
    }

    /// Starts printing: as JSON, one object per line, or as text.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub(super) fn print(&self, in_json: bool) -> std::io::Result<()> {
        let (lines, outputs) = mpsc::sync_channel(WAITING_MAX);
        self.lock().lines = Some(lines);
        let window = Arc::downgrade(&self.window);
        let screen = Screen::from_stdout();
        let bottom = (!in_json).then(|| summary::line(screen)).flatten();
        telemetry::keep_below(bottom.clone());
        let print = move || {
            loop {
                if let (Some(bottom), Some(window)) = (&bottom, window.upgrade()) {
                    let window = window.lock().unwrap_or_else(PoisonError::into_inner);
                    let text = window.summary.text(screen.colours);
                    drop(window);
                    if bottom.message() != text {
                        bottom.set_message(text);
                    }
                }
                let output = outputs.recv_timeout(SECOND);
                match (output, window.upgrade()) {
                    (Ok(output), _) => output.print(in_json),
                    // The count of the last busy second.
                    (Err(RecvTimeoutError::Timeout), Some(window)) => {
                        let mut window = window.lock().unwrap_or_else(PoisonError::into_inner);
                        let more = std::mem::take(&mut window.more);
                        drop(window);
                        Output::More(more).print(in_json);
                    }
                    (Err(RecvTimeoutError::Disconnected), _) | (_, None) => return,
                }
            }
        };
        thread::Builder::new()
            .name("job-lines".into())
            .spawn(print)?;
        Ok(())
    }

    /// Prints what is left, then stops.
    pub(super) fn end(&self) {
        let mut window = self.lock();
        let (more, lines) = (std::mem::take(&mut window.more), window.lines.take());
        drop(window);
        let Some(lines) = lines else { return };
        let (done, ended) = mpsc::channel();
        // If nobody reads standard output any more, the last lines are lost.
        if lines.try_send(Output::More(more)).is_ok() && lines.try_send(Output::Flush(done)).is_ok()
        {
            let _ = ended.recv_timeout(END_TIMEOUT);
        }
        telemetry::keep_below(None);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Window> {
        self.window.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self, end: JobEnd, now: Instant) {
        let mut window = self.lock();
        let Some(lines) = window.lines.clone() else {
            return;
        };
        if window
            .started
            .is_none_or(|started| now.duration_since(started) >= SECOND)
        {
            let more = std::mem::take(&mut window.more);
            if let Err(TrySendError::Full(Output::More(more))) = lines.try_send(Output::More(more))
            {
                window.more = more;
            }
            window.started = Some(now);
            window.shown = 0;
        }
        window.shown += 1;
        let outcome = end.outcome.clone();
        if window.shown > LINES_MAX || lines.try_send(Output::End(Box::new(end))).is_err() {
            *window.more.entry(outcome).or_default() += 1;
        }
    }
}

impl Output {
    fn print(self, in_json: bool) {
        let text = match self {
            Self::End(end) if in_json => end.json(),
            Self::End(end) => end.text(Screen::from_stdout().colours),
            Self::More(more) if more.is_empty() => return,
            Self::More(more) if in_json => line::more_json(&more),
            Self::More(more) => line::more_text(&more),
            Self::Flush(done) => {
                // The other side may have stopped waiting.
                let _ = done.send(());
                return;
            }
        };
        // The reader may have closed the pipe.
        let _ = telemetry::above(|| writeln!(std::io::stdout(), "{text}"));
    }
}

struct Listener(Jobs);

impl<S: Subscriber> Layer<S> for Listener {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields::default();
        event.record(&mut fields);
        self.0.lock().summary.follow(&fields.0);
        if let Some(end) = JobEnd::from_fields(&fields.0) {
            self.0.ended(end, Instant::now());
        }
    }
}

/// The fields of an event, as text.
#[derive(Default)]
struct Fields(BTreeMap<&'static str, String>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name(), value.to_owned());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.0.insert(field.name(), format!("{value:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(outcome: &str) -> JobEnd {
        let fields = [
            ("event", outcome),
            ("job.id", "7"),
            ("handler", "noop"),
            ("attempt", "1"),
            ("elapsed_ms", "3"),
        ];
        let fields = fields.map(|(key, value)| (key, value.to_owned()));
        JobEnd::from_fields(&fields.into()).expect("an end")
    }

    #[test]
    fn under_load_the_first_ends_of_a_second_have_lines_and_the_others_are_counted() {
        let jobs = Jobs::new();
        let (lines, outputs) = mpsc::sync_channel(1000);
        jobs.lock().lines = Some(lines);
        let start = Instant::now();
        for _ in 0..LINES_MAX + 30 {
            jobs.ended(end("succeeded"), start);
        }
        jobs.ended(end("failed"), start);
        jobs.ended(end("succeeded"), start + SECOND);
        let mut shown = Vec::new();
        while let Ok(output) = outputs.try_recv() {
            shown.push(match output {
                Output::End(end) => end.outcome,
                Output::More(more) if more.is_empty() => continue,
                Output::More(more) => line::more_text(&more),
                Output::Flush(_) => unreachable!("nothing flushes here"),
            });
        }
        assert_eq!(shown.len(), LINES_MAX + 2, "{shown:?}");
        assert_eq!(
            shown[LINES_MAX],
            "31 more jobs in the last second: 1 failed, 30 succeeded"
        );
        assert_eq!(shown[LINES_MAX + 1], "succeeded");
    }

    #[test]
    fn a_slow_printer_does_not_block_workers_or_lose_counts() {
        let jobs = Jobs::new();
        let (lines, outputs) = mpsc::sync_channel(1);
        jobs.lock().lines = Some(lines);
        let start = Instant::now();
        for _ in 0..5 {
            jobs.ended(end("succeeded"), start);
        }
        // The channel holds the empty count of the second before.
        assert_eq!(jobs.lock().more.get("succeeded"), Some(&5));
        drop(outputs);
        jobs.ended(end("succeeded"), start + SECOND);
    }

    #[test]
    fn nothing_is_kept_before_printing_starts() {
        let jobs = Jobs::new();
        jobs.ended(end("failed"), Instant::now());
        assert!(jobs.lock().more.is_empty());
        jobs.end();
    }
}
