//! The first page: what happens now, and what needs attention.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::chart::{Sample, rate, throughput};
use super::filter::JobFilter;
use super::layout::Chrome;
use crate::when;

/// The maximum number of queues; the page of queues lists the others.
const QUEUES_MAX: usize = 12;
/// A ready job that waits for longer needs attention, if workers could run it.
const LONG_WAIT_S: f64 = 60.0;
/// A handler with at least this many unsuccessful jobs in an hour needs attention.
const MANY_FAILURES: i64 = 10;
/// A transaction that is open for longer keeps dead rows from being removed.
const LONG_TRANSACTION_S: f64 = 600.0;

/// The data of the page.
#[derive(Debug, Clone, Default)]
pub struct Overview {
    /// As `rouse queue ls --json`.
    pub queues: Vec<Value>,
    /// Rows of `rouse.backlog`.
    pub backlog: Vec<Value>,
    /// As `rouse workers --json`.
    pub workers: Vec<Value>,
    /// Handlers with unsuccessful jobs in the last hour: `handler`, `jobs`, `at_least`, `message`, `first_at`, `last_at`.
    pub failing: Vec<Value>,
    /// Of the newest ended jobs: `jobs`, `failed`, `wait_p50`, `wait_p95`, `run_p50`, `run_p95`, seconds.
    pub recent: Value,
    /// The last hour, the oldest first.
    pub samples: Vec<Sample>,
    /// The age of the oldest open transaction, seconds, if the login can see it.
    pub oldest_transaction_s: Option<f64>,
}

/// The page.
pub fn overview(chrome: &Chrome, it: &Overview, now: f64) -> Markup {
    let sum = |key: &str| {
        let total: i64 = it
            .queues
            .iter()
            .filter_map(|queue| queue[key].as_i64())
            .sum();
        let more = it
            .queues
            .iter()
            .any(|queue| queue["at_least"] == true && queue[key].as_i64() >= Some(100));
        cells::number(total) + if more { "+" } else { "" }
    };
    let active = it
        .workers
        .iter()
        .filter(|worker| worker["state"] == "active");
    let (count, slots) = active.fold((0, 0), |(count, slots), worker| {
        (
            count + 1,
            slots + worker["slots"].as_i64().unwrap_or_default(),
        )
    });
    let jobs = it.recent["jobs"].as_f64().unwrap_or_default();
    let failed = it.recent["failed"].as_f64().unwrap_or_default();
    let took = |key: &str| it.recent[key].as_f64().map_or("–".to_owned(), when::took);
    let speed = it
        .samples
        .last()
        .map_or("–".to_owned(), |sample| rate(sample.ended_per_s));
    html! {
        div class="title" { h1 { "Overview" } }
        (attention(chrome, it, now))
        div class="stats" {
            div class="stat" { b { (speed) } span { "jobs per second" } }
            a class={ "stat" @if failed > 0.0 { " warn" } } href={ (chrome.base) "/jobs?state=failed&state=timed_out" } {
                b { @if jobs > 0.0 { (format!("{:.1} %", (jobs - failed) * 100.0 / jobs)) } @else { "–" } }
                span { "succeeded, of the newest " (cells::number(jobs as i64)) }
            }
            div class="stat" { b { (took("wait_p50")) } span { "wait, p50 (p95 " (took("wait_p95")) ")" } }
            a class="stat" href={ (chrome.base) "/jobs?state=running" } { b { (sum("running")) } span { "running" } }
            a class="stat" href={ (chrome.base) "/queues" } { b { (sum("ready")) } span { "ready" } }
            a class={ "stat" @if count == 0 { " bad" } } href={ (chrome.base) "/workers" } { b { (count) } span { @if count == 1 { "worker, " } @else { "workers, " } (cells::number(slots)) " slots" } }
        }
        section class="card" id="throughput" { h2 { "Throughput" } (throughput(&it.samples, now)) }
        div class="pair" {
            section class="card scroll" tabindex="0" aria-label="Queues" { h2 { "Queues" } (queues(chrome, &it.queues)) }
            section class="card scroll" tabindex="0" aria-label="Failures of the last hour" {
                h2 { "Failures of the last hour" }
                (failing(chrome, &it.failing, now))
            }
        }
    }
}

/// One line for each thing that needs attention, each with a link.
fn attention(chrome: &Chrome, it: &Overview, now: f64) -> Markup {
    let base = &chrome.base;
    let mut lines: Vec<(&str, Markup)> = Vec::new();
    if it.workers.iter().all(|worker| worker["state"] != "active") {
        lines.push((
            "bad",
            html! { "No worker is active: jobs wait until " code { "rouse serve" } " runs." },
        ));
    }
    for row in it.backlog.iter().filter(|row| row["workers"] == 0) {
        if row["ready"].as_i64() > Some(0) && lines.len() < 8 {
            let handler = cells::text(row, "handler");
            lines.push(("bad", html! {
                "No worker " @if row["tags"] != serde_json::json!([]) { "with the tags " (cells::joined(&row["tags"])) " " }
                "can run " (cells::jobs(row, "ready")) " of " a href={ (base) "/handlers/" (chrome.encoded(handler)) } { (cells::line(handler)) } "."
            }));
        }
    }
    let fails = |row: &&Value| row["jobs"].as_i64() >= Some(MANY_FAILURES);
    for row in it.failing.iter().filter(fails).take(3) {
        let handler = cells::text(row, "handler");
        let filter = JobFilter::for_states(&["failed", "timed_out"])
            .with("handler", handler)
            .with("since", "1h");
        lines.push(("bad", html! {
            a href={ (base) "/jobs?" (filter.query()) } { (cells::number(row["jobs"].as_i64().unwrap_or_default())) @if row["at_least"] == true { "+" } " jobs" }
            " of " (cells::handler(chrome, handler)) " have failed in the last hour, the last one " (cells::time(&row["last_at"], now)) "."
        }));
    }
    for queue in &it.queues {
        let name = cells::text(queue, "name");
        let link = cells::queue(chrome, name);
        let ready = queue["ready"].as_i64() > Some(0);
        if queue["paused_at"].is_string() {
            lines.push(("", html! { "Queue " (link) " has been paused for " (ago(&queue["paused_at"], now)) " and has " (cells::jobs(queue, "ready")) "." }));
        } else if ready && queue["oldest_wait_s"].as_f64() > Some(LONG_WAIT_S) {
            lines.push(("", html! { "The oldest ready job of queue " (link) " has waited for " (cells::seconds(&queue["oldest_wait_s"])) "." }));
        }
    }
    for worker in it.workers.iter().filter(|worker| worker["state"] == "dead") {
        lines.push(("bad", html! { "Worker " (cells::worker(chrome, cells::text(worker, "worker_id"))) " is dead: it was last seen " (cells::time(&worker["seen_at"], now)) "." }));
    }
    for worker in it
        .workers
        .iter()
        .filter(|worker| worker["timeouts"].as_i64() > Some(0))
    {
        lines.push(("", html! { "Attempts that have timed out on worker " (cells::worker(chrome, cells::text(worker, "worker_id"))) ": " (worker["timeouts"]) "." }));
    }
    if let Some(age) = it
        .oldest_transaction_s
        .filter(|age| *age > LONG_TRANSACTION_S)
    {
        lines.push(("", html! { "A transaction has been open for " (when::short(age)) ": dead rows cannot be removed until it ends." }));
    }
    let hidden = lines.len().saturating_sub(12);
    lines.truncate(12);
    html! {
        section class="card" id="attention" {
            h2 { "What needs attention" }
            ul class="attention" {
                @if lines.is_empty() { li class="good" { "Nothing." } }
                @for (class, line) in lines { li class=[(!class.is_empty()).then_some(class)] { (line) } }
                @if hidden > 0 { li { "and " (hidden) " more" } }
            }
        }
    }
}

fn ago(time: &Value, now: f64) -> String {
    let at = when::epoch(time.as_str().unwrap_or_default());
    at.map_or_else(String::new, |at| when::short((now - at).max(0.0)))
}

fn queues(chrome: &Chrome, queues: &[Value]) -> Markup {
    let mut longest: Vec<&Value> = queues.iter().collect();
    let wait = |queue: &Value| queue["oldest_wait_s"].as_f64().unwrap_or(-1.0);
    longest.sort_by(|a, b| wait(b).total_cmp(&wait(a)));
    html! {
        @if queues.is_empty() { p class="soft" { "There are no queues yet: the first job creates one." } }
        @else {
            table {
                thead { tr { th { "Queue" } th class="number" { "Ready" } th class="number" { "Running" } th class="number" { "Oldest wait" } } }
                tbody {
                    @for queue in longest.iter().take(QUEUES_MAX) {
                        tr {
                            td { (cells::queue(chrome, cells::text(queue, "name"))) @if queue["paused_at"].is_string() { " " (cells::state("paused")) } }
                            td class="number" { (cells::count(queue, "ready")) }
                            td class="number" { (cells::count(queue, "running")) }
                            td class="number" { (cells::seconds(&queue["oldest_wait_s"])) }
                        }
                    }
                }
            }
            @if queues.len() > QUEUES_MAX { p { a href={ (chrome.base) "/queues" } { "All " (queues.len()) " queues" } } }
        }
    }
}

fn failing(chrome: &Chrome, failing: &[Value], now: f64) -> Markup {
    html! {
        @if failing.is_empty() { p class="soft" { "None." } }
        @else {
            table {
                thead { tr { th { "Handler" } th class="number" { "Jobs" } th { "First" } th { "Last" } th { "Newest error" } } }
                tbody {
                    @for row in failing {
                        @let handler = cells::text(row, "handler");
                        @let filter = JobFilter::for_states(&["failed", "timed_out"]).with("handler", handler).with("since", "1h");
                        tr {
                            td { (cells::handler(chrome, handler)) }
                            td class="number" { a href={ (chrome.base) "/jobs?" (filter.query()) } { (row["jobs"]) @if row["at_least"] == true { "+" } } }
                            td class="keep" { (cells::time(&row["first_at"], now)) }
                            td class="keep" { (cells::time(&row["last_at"], now)) }
                            td class="message" { @if chrome.may_read_contents() { (cells::excerpt(cells::text(row, "message"))) } }
                        }
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn items_that_need_attention_come_first_and_each_has_a_link() {
        let it = Overview {
            queues: vec![
                json!({"name": "mail", "paused_at": "1970-01-01T00:00:00+00:00", "ready": 3}),
            ],
            backlog: vec![
                json!({"handler": "no.such", "workers": 0, "ready": 7, "paused": false, "tags": []}),
            ],
            workers: vec![
                json!({"worker_id": "w-1", "state": "dead", "seen_at": "1970-01-01T00:00:00+00:00"}),
            ],
            oldest_transaction_s: Some(7_200.0),
            failing: vec![
                json!({"handler": "csv.summary", "jobs": 40, "last_at": "1970-01-01T00:01:00+00:00"}),
                json!({"handler": "rarely", "jobs": 2, "last_at": "1970-01-01T00:01:00+00:00"}),
            ],
            ..Overview::default()
        };
        let page = overview(&Chrome::default(), &it, 100.0).into_string();
        for part in [
            "No worker is active",
            "/handlers/no%2Esuch",
            "/queues/mail",
            "/workers/w%2D1",
            "open for 2 h",
            "40 jobs</a> of",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("2 jobs</a> of"), "{page}");
        let quiet = Overview {
            workers: vec![json!({"state": "active", "slots": 8})],
            ..Overview::default()
        };
        assert!(
            overview(&Chrome::default(), &quiet, 1.0)
                .into_string()
                .contains("Nothing.")
        );
    }
}
