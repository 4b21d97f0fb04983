//! Values in cells of tables and lists: states, times, numbers, ids, untrusted text.

use maud::{Markup, html};
use serde_json::Value;

use super::layout::Chrome;
pub(super) use crate::sanitize::line;
use crate::when;

/// Lists cut longer strings; the page of the job shows them in full.
pub(super) const CELL_CHARS_MAX: usize = 160;

/// A string of a row, or an empty one.
pub(super) fn text<'a>(row: &'a Value, key: &str) -> &'a str {
    row[key].as_str().unwrap_or_default()
}

/// The start of untrusted text, on one line.
pub(super) fn excerpt(text: &str) -> String {
    let mut chars = text.chars();
    let cut: String = chars.by_ref().take(CELL_CHARS_MAX).collect();
    let more = if chars.next().is_some() { "…" } else { "" };
    line(&cut) + more
}

/// Any value on one line: strings without quotes, nothing for null.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) => line(text),
        other => line(&other.to_string()),
    }
}

/// The strings of a list, joined by commas.
pub(super) fn joined(list: &Value) -> String {
    let strings = list.as_array().into_iter().flatten().map(plain);
    strings.collect::<Vec<_>>().join(", ")
}

/// The style class of a state.
pub(super) fn tone(state: &str) -> &'static str {
    match state {
        "succeeded" | "completed" | "active" | "done" => "good",
        "failed" | "timed_out" | "dead" | "lost" | "error" | "refused" => "bad",
        "running" | "claimed" | "started" | "live" => "busy",
        "cancelled" | "draining" | "paused" | "retry" | "stuck" | "suspended" => "warn",
        _ => "quiet",
    }
}

/// A state in its colour.
pub(super) fn state(word: &str) -> Markup {
    html! { span class={ "state " (tone(word)) } { (line(word).replace('_', " ")) } }
}

/// A number with separators, for instance `1,204`.
pub(super) fn number(value: i64) -> String {
    let digits = value.unsigned_abs().to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3 + 1);
    if value < 0 {
        out.push('-');
    }
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The number of jobs, for instance `1 job` or `1,204 jobs`.
pub(super) fn jobs(row: &Value, key: &str) -> String {
    match row[key].as_i64() {
        Some(1) => "1 job".to_owned(),
        _ => format!("{} jobs", count(row, key)),
    }
}

/// A count of a row, with `+` if it was only counted up to a bound.
pub(super) fn count(row: &Value, key: &str) -> String {
    let value = row[key].as_i64().unwrap_or_default();
    at_least(value, row["at_least"] == true)
}

/// A count, with `+` if it may have been counted only up to a bound: `rouse.depth` counts at least 100 jobs of a lane.
pub(super) fn at_least(value: i64, is_bounded: bool) -> String {
    let more = is_bounded && value >= 100;
    number(value) + if more { "+" } else { "" }
}

/// A size, for instance `1.5 MiB`.
pub(super) fn bytes(bytes: u64) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut size = bytes as f64 / 1024.0;
    let mut unit = 0;
    while size >= 1024.0 && unit + 1 < units.len() {
        size /= 1024.0;
        unit += 1;
    }
    match size {
        ..10.0 => format!("{size:.1} {}", units[unit]),
        _ => format!("{size:.0} {}", units[unit]),
    }
}

/// A time of the database, relative to now; the exact time is in its title.
pub(super) fn time(value: &Value, now: f64) -> Markup {
    let written = value.as_str().unwrap_or_default();
    match when::epoch(written) {
        Some(at) => html! {
            time datetime=(line(written)) title=(when::exact(at)) { (when::relative(at, now)) }
        },
        None => html! { (line(written)) },
    }
}

/// A time of the database, exact, and relative to now.
pub(super) fn exact_time(value: &Value, now: f64) -> Markup {
    let written = value.as_str().unwrap_or_default();
    match when::epoch(written) {
        Some(at) => html! {
            time datetime=(line(written)) { (when::exact(at)) }
            " " span class="soft" { "(" (when::relative(at, now)) ")" }
        },
        None => html! { (line(written)) },
    }
}

/// A duration in seconds, or nothing.
pub(super) fn seconds(value: &Value) -> String {
    value.as_f64().map(when::took).unwrap_or_default()
}

/// A link to a job.
pub(super) fn job(chrome: &Chrome, id: &Value) -> Markup {
    match id.as_i64() {
        Some(id) => html! { a class="row mono" href={ (chrome.base) "/jobs/" (id) } { (id) } },
        None => html! {},
    }
}

/// A link to a handler.
pub(super) fn handler(chrome: &Chrome, name: &str) -> Markup {
    html! { a href={ (chrome.base) "/handlers/" (chrome.encoded(name)) } { (line(name)) } }
}

/// A link to a queue.
pub(super) fn queue(chrome: &Chrome, name: &str) -> Markup {
    html! { a href={ (chrome.base) "/queues/" (chrome.encoded(name)) } { (line(name)) } }
}

/// A link to a worker.
pub(super) fn worker(chrome: &Chrome, id: &str) -> Markup {
    html! { a href={ (chrome.base) "/workers/" (chrome.encoded(id)) } { (line(id)) } }
}

/// A command that operators can select and copy.
pub(super) fn command(words: &str) -> Markup {
    html! {
        code { (words) } " "
        button type="button" data-copy=(words) aria-label={ "copy " (words) } { "copy" }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_have_separators_and_large_ids_stay_exact() {
        for (value, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (-1_234_567, "-1,234,567"),
            (i64::MAX, "9,223,372,036,854,775,807"),
        ] {
            assert_eq!(number(value), text);
        }
        let chrome = Chrome::default();
        let link = job(&chrome, &json!(9_007_199_254_740_993_i64)).into_string();
        assert!(link.contains("/jobs/9007199254740993\""), "{link}");
    }

    #[test]
    fn counts_that_were_bounded_have_a_plus() {
        let row = json!({"ready": 100, "running": 3, "at_least": true});
        assert_eq!(count(&row, "ready"), "100+");
        assert_eq!(count(&row, "running"), "3");
        assert_eq!(count(&row, "none"), "0");
        assert_eq!(jobs(&json!({"ready": 1}), "ready"), "1 job");
        assert_eq!(jobs(&row, "running"), "3 jobs");
    }

    #[test]
    fn sizes_have_a_unit() {
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(64 << 20), "64 MiB");
        assert_eq!(bytes(u64::MAX), "16777216 TiB");
    }

    #[test]
    fn untrusted_text_is_escaped_and_cut() {
        let row = state("<script>").into_string();
        assert!(row.contains("&lt;script&gt;"), "{row}");
        assert_eq!(excerpt("a\u{202e}b"), "a\\u{202e}b");
        assert_eq!(excerpt(&"x".repeat(500)).chars().count(), 161);
    }
}
