//! The life of a job as bars: waits and attempts.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::chart::{px, swatch};
use crate::plural::{choose, counted};
use crate::when;

/// The width of the drawing; it is stretched to the page.
const WIDTH: f64 = 1000.0;
/// Shorter bars would be invisible.
const BAR_MIN: f64 = 4.0;
/// The maximum number of bars; the oldest ones are left out.
const BARS_MAX: usize = 400;

/// The colours of bars, as [`cells::tone`] chooses them.
const MEANINGS: [(&str, &str); 5] = [
    ("wait", "waited"),
    ("busy", "running"),
    ("good", "succeeded"),
    ("bad", "failed, timed out or lost"),
    ("warn", "cancelled or suspended"),
];

/// A part of a job's life.
#[derive(Debug, PartialEq)]
struct Bar {
    from: f64,
    to: f64,
    /// The class of its colour.
    tone: &'static str,
    /// Its description, shown at the pointer and read by screen readers.
    title: String,
}

/// The bars of a history, as `rouse.history` returns it; `is_live`: the last one has not ended.
fn bars(history: &[Value], is_live: bool, now: f64) -> Vec<Bar> {
    let mut bars = Vec::new();
    let mut waits_since = None;
    let mut runs_since: Option<(f64, String)> = None;
    let wait = |from: f64, to: f64| Bar {
        from,
        to,
        tone: "wait",
        title: format!("waited {}", when::took(to - from)),
    };
    for event in history {
        let Some(at) = when::epoch(cells::text(event, "at")) else {
            continue;
        };
        let word = cells::text(event, "event");
        match word {
            "requested" => waits_since = Some(at),
            "claimed" | "started" => {
                if let Some(since) = waits_since.take() {
                    bars.push(wait(since, at));
                }
                let who = cells::line(cells::text(event, "worker"));
                let name = format!("attempt {} on {who}", event["attempt"]);
                runs_since = Some((at, name));
            }
            "failed" | "lost" | "suspended" | "succeeded" | "timed_out" | "cancelled" => {
                if let Some((since, name)) = runs_since.take() {
                    bars.push(Bar {
                        from: since,
                        to: at,
                        tone: cells::tone(word),
                        title: format!("{name}: {word} after {}", when::took(at - since)),
                    });
                } else if let Some(since) = waits_since {
                    bars.push(wait(since, at));
                }
                waits_since = Some(at);
            }
            _ => {}
        }
    }
    if is_live {
        if let Some((since, name)) = runs_since {
            let title = format!("{name}: running for {}", when::took(now - since));
            bars.push(Bar {
                from: since,
                to: now,
                tone: "busy",
                title,
            });
        } else if let Some(since) = waits_since {
            bars.push(wait(since, now));
        }
    }
    bars
}

/// The drawing; nothing for a history without times.
pub(super) fn timeline(history: &[Value], is_live: bool, now: f64) -> Markup {
    let mut bars = bars(history, is_live, now);
    let left_out = bars.len().saturating_sub(BARS_MAX);
    bars.drain(..left_out);
    let (Some(first), Some(last)) = (bars.first(), bars.last()) else {
        return html! {};
    };
    let (start, end) = (first.from, last.to.max(first.from));
    let scale = WIDTH / (end - start).max(0.001);
    let running: f64 = bars
        .iter()
        .filter(|bar| bar.tone != "wait")
        .map(|bar| bar.to - bar.from)
        .sum();
    // The history of a job on its page may lack its first events.
    let is_whole = left_out == 0 && history.first().is_some_and(|it| it["event"] == "requested");
    let label = format!(
        "{} {}, of which {} in attempts",
        when::took(end - start),
        match is_whole {
            true => "from the enqueue",
            false => "since the first part that is drawn",
        },
        when::took(running)
    );
    html! {
        svg class="timeline" viewBox="0 0 1000 26" preserveAspectRatio="none" height="26" role="img" aria-label=(label) {
            @for bar in &bars {
                @let width = ((bar.to - bar.from) * scale).clamp(BAR_MIN, WIDTH);
                rect class=(bar.tone) x=(px(((bar.from - start) * scale).min(WIDTH - width)))
                    y=(if bar.tone == "wait" { "9" } else { "2" })
                    height=(if bar.tone == "wait" { "8" } else { "22" })
                    width=(px(width)) rx="2" { title { (bar.title) } }
            }
        }
        p class="legend" {
            span { (when::exact(start)) }
            span { (label) }
            @for (tone, meaning) in MEANINGS {
                @if bars.iter().any(|bar| bar.tone == tone) { span { (swatch(tone)) (meaning) } }
            }
            @if left_out > 0 { span { "The first " (counted(left_out, "part")) " " (choose(left_out, "is", "are")) " not drawn." } }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn event(at: u32, event: &str, attempt: u32) -> Value {
        json!({"at": format!("2026-11-28T15:00:{at:02}+00:00"), "event": event, "attempt": attempt, "worker": "w"})
    }

    #[test]
    fn waits_and_attempts_alternate_and_the_last_one_goes_on() {
        let history = [
            event(0, "requested", 0),
            event(1, "started", 1),
            event(3, "failed", 1),
            event(10, "claimed", 2),
        ];
        let now = when::epoch("2026-11-28T15:00:15+00:00").unwrap();
        let bars = bars(&history, true, now);
        let shown: Vec<_> = bars.iter().map(|b| (b.tone, b.to - b.from)).collect();
        assert_eq!(
            shown,
            [("wait", 1.0), ("bad", 2.0), ("wait", 7.0), ("busy", 5.0)]
        );
        let drawn = timeline(&history, true, now).into_string();
        assert!(
            drawn.contains("attempt 1 on w: failed after 2.0 s"),
            "{drawn}"
        );
        assert!(drawn.contains("failed, timed out or lost") && !drawn.contains("succeeded"));
        assert!(drawn.contains("15 s from the enqueue, of which"), "{drawn}");
        let newest = timeline(&history[1..], true, now).into_string();
        assert!(
            newest.contains("14 s since the first part that is drawn, of which"),
            "{newest}"
        );
        assert!(timeline(&[], true, now).into_string().is_empty());
    }

    #[test]
    fn a_job_that_was_cancelled_in_line_only_waited() {
        let history = [event(0, "requested", 0), event(9, "cancelled", 0)];
        let bars = bars(&history, false, 0.0);
        assert_eq!(bars.len(), 1);
        assert_eq!((bars[0].tone, bars[0].to - bars[0].from), ("wait", 9.0));
    }
}
