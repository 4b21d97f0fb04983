//! The result of a drain.

use rouse_display::plural::{choose, counted};
use serde_json::{Value, json};

use crate::cli::text::plain;
use crate::store::Remaining;
use crate::worker::{OutcomeCounts, OutcomeLabel};

/// If a lane has more waiting jobs than were examined, at least this many were; see `rouse.remaining`.
const COUNTED_MIN: i64 = 100;

/// The result of a drain.
#[derive(Debug, Default)]
pub(super) struct Summary {
    pub(super) queue: String,
    pub(super) worker_id: String,
    pub(super) succeeded: u64,
    /// Ended without success.
    pub(super) failed: u64,
    /// Failed attempts whose job is retried.
    pub(super) retried: u64,
    /// Jobs that are ready or due and that this worker can run.
    pub(super) ready: i64,
    pub(super) left: Vec<Left>,
    /// A signal arrived before the queue was empty.
    pub(super) interrupted: bool,
    /// The time at which the queue was paused, if that happened during the drain.
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
    /// The scheduled jobs that wait for a retry.
    retries: i64,
    elsewhere: i64,
    at_least: bool,
    /// Why this worker cannot run them; `None` if it can.
    why: Option<String>,
}

impl Left {
    /// True for jobs that are ready and that this process cannot run.
    pub(super) fn is_unrunnable(&self) -> bool {
        self.ready > 0 && self.why.is_some()
    }

    /// True if more jobs may be scheduled than were examined.
    fn hides_some(&self) -> bool {
        self.at_least && self.scheduled >= COUNTED_MIN
    }
}

/// The jobs that are left: all except those that are running here.
pub(super) fn left(now: &[Remaining], why_not: impl Fn(&Remaining) -> Option<String>) -> Vec<Left> {
    now.iter()
        .filter(|row| row.ready + row.due + row.scheduled + row.others > 0)
        .map(|row| Left {
            handler: row.handler.clone(),
            tags: row.tags.clone(),
            ready: row.ready + row.due,
            scheduled: row.scheduled,
            retries: row.retries,
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

    pub(super) fn count(&mut self, outcomes: &OutcomeCounts) {
        self.succeeded = outcomes.count(OutcomeLabel::Succeeded);
        self.failed = outcomes.count(OutcomeLabel::Failed) + outcomes.count(OutcomeLabel::TimedOut);
        self.retried = outcomes.count(OutcomeLabel::Retried);
    }

    /// True if jobs failed or wait for a retry. A job that succeeded on a retry within the drain does not count. If
    /// more jobs may be scheduled than were examined, a job that waits for a retry may be among them.
    pub(super) fn has_failures(&self) -> bool {
        let waits = |left: &Left| left.retries > 0 || (self.retried > 0 && left.hides_some());
        self.failed > 0 || self.left.iter().any(waits)
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
                    "retries": left.retries,
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
            let attempts = counted(self.retried, "failed attempt");
            let were = choose(self.retried, "was", "were");
            text.push_str(&format!(", {attempts} {were} retried"));
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
        (left.scheduled - left.retries, "for later"),
        (left.retries, "waiting for a retry"),
        (left.elsewhere, "running elsewhere"),
    ]
    .into_iter()
    .filter(|(jobs, _)| *jobs > 0)
    .map(|(jobs, kind)| format!("{jobs}{more} {kind}"))
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
            bound: 0,
            scheduled,
            retries: 0,
            mine,
            others: 0,
            at_least: false,
        }
    }

    #[test]
    fn only_ready_jobs_that_are_left_have_a_reason() {
        let now = [
            row("here", 0, 2, 0),
            row("nowhere", 3, 0, 0),
            row("busy", 0, 0, 1),
        ];
        let left = left(&now, |row| {
            (row.handler == "nowhere").then(|| "no such handler".into())
        });
        let unrunnable: Vec<_> = left.iter().map(Left::is_unrunnable).collect();
        assert_eq!(unrunnable, [false, true]);
        let summary = Summary {
            left,
            succeeded: 5,
            retried: 1,
            ..Summary::new("mail", "w")
        };
        assert_eq!(
            summary.to_text(),
            "queue mail: 5 succeeded, 0 failed, 1 failed attempt was retried\n\
             left: here: 2 for later\nleft: nowhere: 3 ready; no such handler"
        );
        assert!(!summary.has_failures(), "the retry succeeded");
    }

    #[test]
    fn a_job_that_waits_for_a_retry_counts_as_a_failure() {
        let summary = |retried, rows: &[Remaining]| Summary {
            retried,
            left: left(rows, |_| None),
            ..Summary::new("mail", "w")
        };
        let waits = Remaining {
            retries: 1,
            ..row("here", 0, 3, 0)
        };
        assert!(
            summary(0, std::slice::from_ref(&waits)).has_failures(),
            "whichever worker tried it"
        );
        assert_eq!(
            summary(1, &[waits]).to_text().lines().last(),
            Some("left: here: 2 for later, 1 waiting for a retry")
        );
        let many = Remaining {
            at_least: true,
            ..row("here", 0, COUNTED_MIN, 0)
        };
        let few = Remaining {
            at_least: true,
            ..row("here", 20_000, COUNTED_MIN - 1, 0)
        };
        assert!(!summary(1, &[few]).has_failures(), "all were examined");
        assert!(!summary(0, std::slice::from_ref(&many)).has_failures());
        assert!(
            summary(1, &[many]).has_failures(),
            "a retry may be among them"
        );
        let failed = Summary {
            failed: 1,
            ..summary(0, &[])
        };
        assert!(failed.has_failures());
    }
}
