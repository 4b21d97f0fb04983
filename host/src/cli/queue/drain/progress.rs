//! The progress of a drain: a progress bar on a terminal, otherwise a line every few seconds.

use std::cell::Cell;
use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::Summary;
use crate::cli::text::plain;
use crate::telemetry;

/// The time between two lines if there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The progress of a drain, on standard error.
pub(super) enum Progress {
    /// On a terminal.
    Bar(ProgressBar),
    /// Without a terminal; holds the time of the last line.
    Lines(Cell<Instant>),
}

impl Progress {
    pub(super) fn new(queue: &str) -> Self {
        if !std::io::stderr().is_terminal() {
            return Self::Lines(Cell::new(Instant::now()));
        }
        let style = ProgressStyle::with_template("{prefix} {bar:30} {msg} {elapsed}")
            .expect("the template is a valid constant");
        let bar = ProgressBar::new(0).with_style(style);
        bar.set_prefix(plain(queue));
        Self::Bar(bar)
    }

    pub(super) fn show(&self, summary: &Summary, running: i64) {
        let done = summary.succeeded + summary.failed;
        let left = u64::try_from(summary.ready + running).unwrap_or(0);
        let text = format!("{done} done, {} failed, {left} left", summary.failed);
        match self {
            Self::Bar(bar) => {
                bar.set_length(done + left);
                bar.set_position(done);
                bar.set_message(text);
            }
            Self::Lines(last) => {
                if last.get().elapsed() >= LINE_EVERY {
                    last.set(Instant::now());
                    telemetry::line(&format!("rouse: queue {}: {text}", plain(&summary.queue)));
                }
            }
        }
    }

    pub(super) fn end(&self) {
        match self {
            Self::Bar(bar) => bar.finish_and_clear(),
            Self::Lines(_) => {}
        }
    }
}
