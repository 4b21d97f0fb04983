//! The line for an ended attempt.

use std::collections::BTreeMap;

use rouse_display::plural::counted;
use serde_json::{Value, json};

use crate::cli::ago;
use crate::cli::screen::Colour;
use crate::cli::text::{as_json, plain};

/// The length at which an error is truncated in the line; `rouse job ID` prints all of it.
const WHY_CHARS_MAX: usize = 200;

/// An ended attempt, or a job that an admin action ended.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct JobEnd {
    id: String,
    handler: String,
    /// The word of the event: `succeeded`, `failed`, `retried` …
    pub(super) outcome: String,
    attempt: Option<u64>,
    elapsed_ms: Option<u64>,
    /// The delay until the next attempt, or its time.
    next_ms: Option<u64>,
    next_at: Option<String>,
    /// The login of an admin action.
    by: Option<String>,
    error: Option<Value>,
}

impl JobEnd {
    /// Reads the fields of an event (docs/reference/events.md lists them); `None` if it is not an end.
    pub(super) fn from_fields(fields: &BTreeMap<&'static str, String>) -> Option<Self> {
        let text = |key: &str| fields.get(key).cloned();
        let number = |key: &str| fields.get(key)?.parse().ok();
        let event = text("event")?;
        let outcome = match (event.as_str(), text("reason").as_deref()) {
            (
                "succeeded" | "failed" | "timed_out" | "cancelled" | "retried" | "completed"
                | "deleted",
                _,
            ) => event.clone(),
            // The job ended while it ran here: by an admin action, or settled by another worker.
            ("dropped", Some("cancelled")) => "cancelled".to_owned(),
            ("dropped", Some("already_completed")) => "completed".to_owned(),
            ("lost" | "given_up" | "refused" | "unconfirmed", _) => event.clone(),
            _ => return None,
        };
        // A retry by an admin is a new job, not an end.
        if outcome == "retried" && fields.contains_key("by") {
            return None;
        }
        Some(Self {
            id: text("job.id")?,
            handler: text("handler").unwrap_or_default(),
            outcome,
            attempt: number("attempt"),
            elapsed_ms: number("elapsed_ms"),
            next_ms: number("delay_ms"),
            next_at: text("retry_at"),
            by: text("by"),
            error: text("error").and_then(|error| serde_json::from_str(&error).ok()),
        })
    }

    /// As text.
    pub(super) fn text(&self, colours: bool) -> String {
        let word = match self.outcome.as_str() {
            // The attempt failed; the job continues.
            "retried" => "failed",
            "timed_out" => "timed out",
            "given_up" => "outcome given up",
            "refused" => "outcome refused",
            "unconfirmed" => "outcome unconfirmed",
            other => other,
        };
        let word = match Colour::for_state(&self.outcome).or(self.is_error().then_some(Colour::Red))
        {
            Some(colour) if colours => colour.paint(word),
            _ => word.to_owned(),
        };
        let mut text = format!("job {}  {}  {word}", plain(&self.id), plain(&self.handler));
        if let Some(ms) = self.elapsed_ms {
            text += &format!(" after {}", ago::took(ms as f64 / 1e3));
        }
        if let Some(by) = &self.by {
            text += &format!(" by {}", plain(by));
        }
        // A job whose deadline has passed may never have started.
        if self.is_error() && self.attempt.is_some() {
            text += &format!(", attempt {}", self.tries());
        }
        if let Some(ms) = self.next_ms {
            text += &format!(", next in {}", ago::took(ms as f64 / 1e3));
        }
        if let Some(at) = &self.next_at {
            text += &format!(", next at {}", plain(at));
        }
        let why = self.why();
        if !why.is_empty() {
            text += &format!(": {why}");
        }
        text
    }

    /// As JSON.
    pub(super) fn json(&self) -> String {
        let Self {
            id,
            handler,
            outcome,
            attempt,
            elapsed_ms,
            next_ms,
            next_at,
            by,
            error,
        } = self;
        let id: Value = id.parse::<i64>().map_or_else(|_| json!(id), |id| json!(id));
        let mut all = json!({
            "event": "job", "id": id, "handler": handler, "outcome": outcome, "attempt": attempt,
            "duration_ms": elapsed_ms, "next_in_ms": next_ms, "next_at": next_at, "by": by, "error": error,
        });
        if let Some(all) = all.as_object_mut() {
            all.retain(|_, value| !value.is_null());
        }
        as_json(all)
    }

    /// True for an attempt that failed, unless an admin action ended its job.
    fn is_error(&self) -> bool {
        self.by.is_none()
            && matches!(
                self.outcome.as_str(),
                "failed" | "timed_out" | "retried" | "lost"
            )
    }

    /// `2 of 3`.
    fn tries(&self) -> String {
        let attempt = self.attempt.unwrap_or_default();
        let max = self
            .error
            .as_ref()
            .and_then(|error| error["max_attempts"].as_u64());
        match max.filter(|max| *max >= attempt) {
            Some(max) => format!("{attempt} of {max}"),
            None => attempt.to_string(),
        }
    }

    /// The error's kind and the first line of its message.
    fn why(&self) -> String {
        let Some(error) = &self.error else {
            return String::new();
        };
        let text = |key: &str| error[key].as_str().unwrap_or_default();
        let mut lines = text("message").lines();
        let message = lines.next().unwrap_or_default();
        let why = match message {
            "" => text("kind").to_owned(),
            message => format!("{}: {message}", text("kind")),
        };
        let mut shown: String = why.chars().take(WHY_CHARS_MAX).collect();
        if shown.len() < why.len() {
            shown.push('…');
        }
        let mut shown = plain(&shown);
        if lines.next().is_some() {
            shown += &format!(" (`rouse job {}` prints the rest)", plain(&self.id));
        }
        shown
    }
}

/// The line that counts the jobs without a line.
pub(super) fn more_text(more: &BTreeMap<String, u64>) -> String {
    let each: Vec<String> = more
        .iter()
        .map(|(outcome, jobs)| format!("{jobs} {outcome}"))
        .collect();
    let jobs = counted(more.values().sum::<u64>(), "more job");
    format!("{jobs} in the last second: {}", each.join(", "))
}

/// The same line as JSON.
pub(super) fn more_json(more: &BTreeMap<String, u64>) -> String {
    as_json(json!({"event": "jobs", "more": more.values().sum::<u64>(), "outcomes": more}))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end_from(fields: &[(&'static str, &str)]) -> Option<JobEnd> {
        let ended = [("job.id", "18"), ("handler", "mail.send"), ("attempt", "2")];
        let all = fields.iter().copied().chain(ended);
        JobEnd::from_fields(&all.map(|(key, value)| (key, value.to_owned())).collect())
    }

    #[test]
    fn each_end_is_a_line_with_id_handler_outcome_and_duration() {
        let error = r#"{"kind":"guest_error","message":"no such user\nmore","max_attempts":3}"#;
        for (fields, line) in [
            (
                &[("event", "succeeded"), ("elapsed_ms", "12")][..],
                "job 18  mail.send  succeeded after 12 ms",
            ),
            (
                &[
                    ("event", "retried"),
                    ("elapsed_ms", "1500"),
                    ("delay_ms", "8000"),
                    ("error", error),
                ],
                "job 18  mail.send  failed after 1.5 s, attempt 2 of 3, next in 8.0 s: guest_error: no such user (`rouse job 18` prints the rest)",
            ),
            (
                &[
                    ("event", "retried"),
                    ("elapsed_ms", "1"),
                    ("retry_at", "2027-01-01T00:00:00Z"),
                    ("error", error),
                ],
                "job 18  mail.send  failed after 1 ms, attempt 2 of 3, next at 2027-01-01T00:00:00Z: guest_error: no such user (`rouse job 18` prints the rest)",
            ),
            (
                &[
                    ("event", "timed_out"),
                    ("elapsed_ms", "90000"),
                    ("error", r#"{"kind":"timed_out"}"#),
                ],
                "job 18  mail.send  timed out after 90 s, attempt 2: timed_out",
            ),
            (
                &[("event", "cancelled"), ("by", "rouse")],
                "job 18  mail.send  cancelled by rouse",
            ),
            (
                &[
                    ("event", "dropped"),
                    ("reason", "cancelled"),
                    ("elapsed_ms", "3000"),
                ],
                "job 18  mail.send  cancelled after 3.0 s",
            ),
        ] {
            let end = end_from(fields).expect("an end");
            assert_eq!(end.text(false), line);
            let read: Value = serde_json::from_str(&end.json()).expect("JSON");
            assert_eq!((&read["event"], &read["id"]), (&json!("job"), &json!(18)));
        }
    }

    #[test]
    fn other_events_have_no_line() {
        for fields in [
            &[("event", "started")][..],
            &[("event", "claimed")],
            &[("event", "released")],
            &[("event", "retried"), ("by", "rouse")],
            &[("event", "paused"), ("by", "rouse")],
            &[("event", "dropped"), ("reason", "taken_by_another_worker")],
            &[],
        ] {
            assert_eq!(end_from(fields), None, "{fields:?}");
        }
    }

    #[test]
    fn states_have_colours_and_guests_cannot_set_any() {
        let error = "{\"kind\":\"guest_error\",\"message\":\"\\u001b[2J\"}";
        let end = end_from(&[("event", "failed"), ("error", error)]).expect("an end");
        let text = end.text(true);
        assert!(text.contains("\x1b[31mfailed\x1b[0m"), "{text:?}");
        assert!(text.ends_with("guest_error: \\u{1b}[2J"), "{text:?}");
        assert!(!end.text(false).contains('\x1b'));
        let long = format!(
            "{{\"kind\":\"guest_error\",\"message\":\"{}\"}}",
            "x".repeat(1000)
        );
        let end = end_from(&[("event", "failed"), ("error", &long)]).expect("an end");
        assert!(end.text(false).len() < 300);
    }
}
