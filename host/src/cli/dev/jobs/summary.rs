//! The last line of a `rouse dev` on a terminal: the number of running attempts, and the outcomes of the others.

use std::collections::{BTreeMap, HashSet};
use std::io::{IsTerminal as _, stderr};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::screen::{Colour, Screen};

/// Attempts since the start.
#[derive(Debug, Default)]
pub(super) struct Summary {
    /// The job and the number of each running attempt.
    running: HashSet<(String, String)>,
    /// The number of ended attempts, by their word in [`WORDS`].
    ended: BTreeMap<&'static str, u64>,
}

/// The words of the line, in the order in which it contains them.
const WORDS: [&str; 8] = [
    "succeeded",
    "failed",
    "timed out",
    "to be retried",
    "suspended",
    "released",
    "cancelled",
    "lost",
];

/// The word of the line for the event that ended an attempt. `reason`: why an attempt was dropped.
fn word(event: &str, reason: Option<&str>) -> &'static str {
    match (event, reason) {
        ("succeeded", _) | ("dropped", Some("already_completed")) | ("completed", _) => "succeeded",
        ("failed", _) => "failed",
        ("timed_out", _) => "timed out",
        ("retried", _) => "to be retried",
        ("suspended", _) => "suspended",
        ("released", _) => "released",
        ("cancelled" | "deleted", _) | ("dropped", Some("cancelled")) => "cancelled",
        _ => "lost",
    }
}

impl Summary {
    /// Counts an event of a job: docs/reference/events.md lists them.
    pub(super) fn follow(&mut self, fields: &BTreeMap<&'static str, String>) {
        let (Some(event), Some(job), Some(attempt)) = (
            fields.get("event"),
            fields.get("job.id"),
            fields.get("attempt"),
        ) else {
            return;
        };
        let attempt = (job.clone(), attempt.clone());
        match event.as_str() {
            "started" => drop(self.running.insert(attempt)),
            // The attempt continues.
            "enqueued" | "claimed" | "aborted" => {}
            ended => {
                if self.running.remove(&attempt) {
                    let reason = fields.get("reason").map(String::as_str);
                    *self.ended.entry(word(ended, reason)).or_default() += 1;
                }
            }
        }
    }

    pub(super) fn text(&self, colours: bool) -> String {
        let mut parts = vec![format!("{} running", self.running.len())];
        for word in WORDS {
            let Some(count) = self.ended.get(word) else {
                continue;
            };
            let part = format!("{count} {word}");
            parts.push(match Colour::for_state(&word.replace(' ', "_")) {
                Some(colour) if colours => colour.paint(&part),
                _ => part,
            });
        }
        parts.join(" · ")
    }
}

/// The line on this screen; `None` if it is not a terminal, or log lines go elsewhere.
pub(super) fn line(screen: Screen) -> Option<ProgressBar> {
    if !screen.is_terminal() || !stderr().is_terminal() {
        return None;
    }
    let line = ProgressBar::with_draw_target(None, ProgressDrawTarget::stdout());
    let style = ProgressStyle::with_template("{wide_msg}").expect("the template is valid");
    Some(line.with_style(style))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follow(summary: &mut Summary, event: &str, attempt: &str) {
        let fields = [("event", event), ("job.id", "7"), ("attempt", attempt)];
        summary.follow(&fields.map(|(key, value)| (key, value.to_owned())).into());
    }

    #[test]
    fn running_attempts_and_ends_are_counted() {
        let mut summary = Summary::default();
        assert_eq!(summary.text(false), "0 running");
        for event in ["enqueued", "claimed", "started"] {
            follow(&mut summary, event, "1");
        }
        assert_eq!(summary.text(false), "1 running");
        follow(&mut summary, "retried", "1");
        follow(&mut summary, "started", "2");
        follow(&mut summary, "aborted", "2");
        assert_eq!(summary.text(false), "1 running · 1 to be retried");
        follow(&mut summary, "failed", "2");
        // A second event of the same attempt.
        follow(&mut summary, "failed", "2");
        assert_eq!(
            summary.text(false),
            "0 running · 1 failed · 1 to be retried"
        );
        assert!(summary.text(true).contains("\x1b[31m1 failed\x1b[0m"));
    }
}
