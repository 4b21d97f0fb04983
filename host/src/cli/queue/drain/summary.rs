//! What came of a drain.

use serde_json::{Value, json};

use crate::cli::text::plain;
use crate::store::Remaining;
use crate::worker::Outcomes;

/// What came of a drain.
#[derive(Debug, Default)]
pub(super) struct Summary {
    pub(super) queue: String,
    pub(super) worker_id: String,
    pub(super) succeeded: u64,
    /// Ended without success.
    pub(super) failed: u64,
    /// Attempts after which the job waits for another try.
    pub(super) retried: u64,
    /// Ready or due, and for this worker.
    pub(super) ready: i64,
    pub(super) left: Vec<Left>,
    /// A signal came before the queue was empty.
    pub(super) interrupted: bool,
    /// It was paused meanwhile.
    pub(super) paused_at: Option<String>,
}

/// Jobs of one kind that are left.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Left {
    handler: String,
    tags: Vec<String>,
    /// Ready or due.
    ready: i64,
    scheduled: i64,
    elsewhere: i64,
    at_least: bool,
    /// Why this worker could not run them; none: it could.
    why: Option<String>,
}

impl Left {
    /// True for jobs that could run now, and not here.
    pub(super) fn is_in_vain(&self) -> bool {
        self.ready > 0 && self.why.is_some()
    }
}

/// What of this is left: everything but what runs here.
pub(super) fn left(now: &[Remaining], why_not: impl Fn(&Remaining) -> Option<String>) -> Vec<Left> {
    now.iter()
        .filter(|row| row.ready + row.due + row.scheduled + row.others > 0)
        .map(|row| Left {
            handler: row.handler.clone(),
            tags: row.tags.clone(),
            ready: row.ready + row.due,
            scheduled: row.scheduled,
            elsewhere: row.others,
            at_least: row.at_least,
            why: why_not(row),
        })
        .collect()
}

impl Summary {
    pub(super) fn new(queue: &str, worker_id: &str) -> Self {
        Self {
            queue: queue.into(),
            worker_id: worker_id.into(),
            ..Self::default()
        }
    }

    pub(super) fn count(&mut self, outcomes: &Outcomes) {
        self.succeeded = outcomes.of("succeeded");
        self.failed = outcomes.of("failed") + outcomes.of("timed_out");
        self.retried = outcomes.of("retried");
    }

    /// Attempts that did not succeed.
    pub(super) fn failures(&self) -> u64 {
        self.failed + self.retried
    }

    pub(super) fn to_json(&self) -> Value {
        let left: Vec<Value> = self
            .left
            .iter()
            .map(|left| {
                json!({
                    "handler": left.handler,
                    "tags": left.tags,
                    "ready": left.ready,
                    "scheduled": left.scheduled,
                    "running_elsewhere": left.elsewhere,
                    "at_least": left.at_least,
                    "why": left.why,
                })
            })
            .collect();
        json!({
            "queue": self.queue,
            "worker_id": self.worker_id,
            "succeeded": self.succeeded,
            "failed": self.failed,
            "retried": self.retried,
            "interrupted": self.interrupted,
            "paused_at": self.paused_at,
            "left": left,
        })
    }

    pub(super) fn to_text(&self) -> String {
        let mut text = format!(
            "queue {}: {} succeeded, {} failed",
            plain(&self.queue),
            self.succeeded,
            self.failed
        );
        if self.retried > 0 {
            text.push_str(&format!(
                ", {} attempts failed and are tried again later",
                self.retried
            ));
        }
        for left in &self.left {
            text.push_str(&format!("\nleft: {}", line(left)));
        }
        text
    }
}

fn line(left: &Left) -> String {
    let more = if left.at_least { "+" } else { "" };
    let counts: Vec<String> = [
        (left.ready, "ready"),
        (left.scheduled, "for later"),
        (left.elsewhere, "running elsewhere"),
    ]
    .into_iter()
    .filter(|(jobs, _)| *jobs > 0)
    .map(|(jobs, what)| format!("{jobs}{more} {what}"))
    .collect();
    let mut text = format!("{}: {}", plain(&left.handler), counts.join(", "));
    if let Some(why) = left.why.as_ref().filter(|_| left.ready > 0) {
        text.push_str(&format!("; {}", plain(why)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(handler: &str, ready: i64, scheduled: i64, mine: i64) -> Remaining {
        Remaining {
            handler: handler.into(),
            tags: Vec::new(),
            ready,
            due: 0,
            scheduled,
            mine,
            others: 0,
            at_least: false,
        }
    }

    #[test]
    fn what_is_left_says_why_only_where_it_could_run_now() {
        let now = [
            row("here", 0, 2, 0),
            row("nowhere", 3, 0, 0),
            row("busy", 0, 0, 1),
        ];
        let left = left(&now, |row| {
            (row.handler == "nowhere").then(|| "no such handler".into())
        });
        let in_vain: Vec<_> = left.iter().map(Left::is_in_vain).collect();
        assert_eq!(in_vain, [false, true]);
        let summary = Summary {
            left,
            succeeded: 5,
            retried: 1,
            ..Summary::new("mail", "w")
        };
        assert_eq!(
            summary.to_text(),
            "queue mail: 5 succeeded, 0 failed, 1 attempts failed and are tried again later\n\
             left: here: 2 for later\nleft: nowhere: 3 ready; no such handler"
        );
        assert_eq!(summary.failures(), 1);
    }
}
