//! Why a job waits, with links to what it waits for.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::filter::JobFilter;
use super::layout::Chrome;

/// Why the job waits: one sentence for each reason, with its remedy.
pub(super) fn why(chrome: &Chrome, record: &Value, reasons: &[Value]) -> Markup {
    html! {
        section class="card" id="why" {
            h2 { "Why it waits" }
            ul class="attention" {
                @for reason in reasons {
                    li {
                        (with_jobs(chrome, cells::text(reason, "sentence")))
                        @if let Some(remedy) = reason["remedy"].as_str() {
                            br; span class="soft" { "→ " } (with_code(remedy))
                        }
                        (link_for(chrome, record, cells::text(reason, "reason")))
                    }
                }
            }
        }
    }
}

/// A link to the page on which the cause can be inspected or changed.
fn link_for(chrome: &Chrome, record: &Value, reason: &str) -> Markup {
    let part = |key: &str| chrome.encoded(cells::text(record, key));
    let link = |path: &str, label: &str| html! { " " a href={ (chrome.base) (path) } { (label) } };
    match reason {
        "paused" => html! {
            " " (chrome.button(&format!("/queues/{}/resume", part("queue")), "Resume the queue", "", ""))
        },
        "no_handler" | "parked" => link(&format!("/handlers/{}", part("handler")), "the handler"),
        "no_worker" | "no_queue" | "no_tag" | "not_permitted" | "draining" | "inbox" | "shard"
        | "queue_order" | "concurrency" | "busy" => link("/workers", "the workers"),
        "max_concurrent" | "throttle" | "batch" | "max_in_flight" => {
            link("/queues#gates", "the gates")
        }
        "ahead" => {
            let these = JobFilter::for_states(&["queued"])
                .with("handler", cells::text(record, "handler"))
                .with("queue", cells::text(record, "queue"));
            link(&format!("/jobs?{}", these.query()), "these jobs")
        }
        _ => html! {},
    }
}

/// A sentence in which the ids of jobs are links.
fn with_jobs(chrome: &Chrome, sentence: &str) -> Markup {
    let mut before = "";
    html! {
        @for (index, word) in sentence.split(' ').enumerate() {
            @if index > 0 { " " }
            @let digits = word.trim_end_matches([',', '.', ':']);
            @let follows = std::mem::replace(&mut before, word).eq_ignore_ascii_case("job");
            @match digits.parse::<i64>() {
                Ok(id) if follows => { (cells::job(chrome, &id.into())) (cells::line(&word[digits.len()..])) },
                _ => { (cells::line(word)) },
            }
        }
    }
}

/// A sentence in which the parts between backticks are commands.
fn with_code(sentence: &str) -> Markup {
    html! {
        @for (index, part) in cells::line(sentence).split('`').enumerate() {
            @if index % 2 == 1 { code { (part) } } @else { (part) }
        }
    }
}
