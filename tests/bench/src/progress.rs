//! Progress of a benchmark: a bar on a terminal, lines elsewhere.

use std::io::IsTerminal as _;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Writes to stderr only: stdout is for the result.
pub(super) struct Progress {
    bar: ProgressBar,
    terminal: bool,
}

impl Progress {
    pub(super) fn new() -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = if terminal {
            ProgressBar::no_length()
        } else {
            ProgressBar::hidden()
        };
        bar.enable_steady_tick(Duration::from_millis(200));
        Self { bar, terminal }
    }

    /// Starts a step of unknown length.
    pub(super) fn step(&self, title: &str) {
        self.start(title, "{spinner} {elapsed} {msg}", None);
    }

    /// Starts a step that counts up to `length`.
    pub(super) fn count(&self, title: &str, length: u64) {
        let template = "{spinner} {elapsed} {msg} {bar:30} {human_pos}/{human_len}";
        self.start(title, template, Some(length));
    }

    /// Starts a step of this duration, during which the bar moves automatically.
    pub(super) async fn during<T>(
        &self,
        title: &str,
        length: Duration,
        work: impl Future<Output = T>,
    ) -> T {
        let template = "{spinner} {elapsed} {msg} {bar:30} {pos}/{len} s";
        self.start(title, template, Some(length.as_secs()));
        let mut work = std::pin::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                () = tokio::time::sleep(Duration::from_secs(1)) => self.bar.inc(1),
            }
        }
    }

    /// Sets the position of the bar.
    pub(super) fn at(&self, position: u64) {
        self.bar.set_position(position);
    }

    /// Prints a permanent line above the bar.
    pub(super) fn note(&self, text: &str) {
        if self.terminal {
            self.bar.println(text);
        } else {
            eprintln!("{text}");
        }
    }

    /// Clears the bar before the result is printed.
    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }

    fn start(&self, title: &str, template: &str, length: Option<u64>) {
        if !self.terminal {
            eprintln!("{title}");
            return;
        }
        let style = ProgressStyle::with_template(template).expect("the templates above are valid");
        self.bar.set_style(style);
        self.bar.set_position(0);
        match length {
            Some(length) => self.bar.set_length(length),
            None => self.bar.unset_length(),
        }
        self.bar.set_message(title.to_owned());
    }
}
