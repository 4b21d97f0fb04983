//! Queues: waiting jobs, how they are distributed, and gates.

use maud::{Markup, html};
use serde_json::Value;

use super::cells;
use super::layout::Chrome;

/// The maximum number of keys of a fair queue, and of rows of a backlog.
const KEYS_MAX: usize = 100;

/// The maximum number of listed queues.
const LISTED_MAX: usize = 500;

/// The list. Each gate has `keys`: its first rows of `rouse.gate_keys`.
pub fn queues(chrome: &Chrome, queues: &[Value], gates: &[Value], now: f64) -> Markup {
    html! {
        div class="title" { h1 { "Queues" } }
        section class="card scroll" tabindex="0" aria-label="Queues" {
            @if queues.is_empty() { p { "There are no queues yet: the first job creates one." } }
            @else {
                table class="stack" {
                    thead { tr {
                        th { "Queue" } th { "State" } th class="number" { "Ready" } th { "Oldest wait" } th class="number" { "Scheduled" }
                        th class="number" { "Running" } th { "Distribution" } th { "" }
                    } }
                    tbody { @for queue in queues.iter().take(LISTED_MAX) { (row(chrome, queue)) } }
                }
            }
        }
        section class="card" id="gates" {
            h2 { "Gates" }
            @if gates.is_empty() { p class="soft" { "There are no gates. " code { "rouse gate set" } " or a module creates one." } }
            @else { (gates_table(chrome, gates, now)) }
        }
    }
}

fn row(chrome: &Chrome, queue: &Value) -> Markup {
    let name = cells::text(queue, "name");
    html! {
        tr id={ "queue-" (chrome.encoded(name)) } {
            td data-label="Queue" { a class="row" href={ (chrome.base) "/queues/" (chrome.encoded(name)) } { (cells::line(name)) } }
            td data-label="State" { (cells::state(if queue["paused_at"].is_string() { "paused" } else { "active" })) }
            td class="number" data-label="Ready" { (cells::count(queue, "ready")) }
            td class="keep" data-label="Oldest wait" { (cells::seconds(&queue["oldest_wait_s"])) }
            td class="number" data-label="Scheduled" { (cells::count(queue, "scheduled")) }
            td class="number" data-label="Running" { (cells::count(queue, "running")) }
            td data-label="Distribution" { (shared(queue)) }
            td { (pause(chrome, queue)) }
        }
    }
}

/// How its jobs are distributed: fair share, direct dispatch and shards, if it has any.
fn shared(queue: &Value) -> Markup {
    let scheduler = &queue["scheduler"];
    html! {
        @if scheduler["policy"] == "drr" { span class="tag" { "fair by " (cells::plain(&scheduler["key"])) } }
        @if queue["dispatch"] != "shared" { span class="tag" { "direct: " (cells::plain(&queue["dispatch"])) } }
        @if queue["shards"].as_i64() > Some(0) { span class="tag" { (queue["shards"]) " shards" } }
    }
}

fn pause(chrome: &Chrome, queue: &Value) -> Markup {
    let name = chrome.encoded(cells::text(queue, "name"));
    match queue["paused_at"].is_string() {
        true => chrome.button(&format!("/queues/{name}/resume"), "Resume", "", ""),
        false => chrome.button(&format!("/queues/{name}/pause"), "Pause", "", ""),
    }
}

fn gates_table(chrome: &Chrome, gates: &[Value], now: f64) -> Markup {
    html! {
        div class="scroll" tabindex="0" role="region" aria-label="Gates" {
            table class="stack" {
                thead { tr { th { "Gate" } th { "Limits" } th { "Applies to" } th { "Set by" } th { "Keys" } } }
                tbody {
                    @for gate in gates {
                        tr id={ "gate-" (chrome.encoded(cells::text(gate, "name"))) } {
                            td data-label="Gate" { (cells::plain(&gate["name"])) }
                            td data-label="Limits" { (crate::gate::describe(gate)) }
                            td data-label="Applies to" { (crate::gate::scope(gate)) }
                            td data-label="Set by" { @if gate["declared_by"].is_string() { "its module" } @else { "an operator" } }
                            td data-label="Keys" { (gate_keys(chrome, gate, now)) }
                        }
                    }
                }
            }
        }
    }
}

/// The keys of a gate that have an effect now. They may be values of payloads.
fn gate_keys(chrome: &Chrome, gate: &Value, now: f64) -> Markup {
    let keys = gate["keys"].as_array().map_or(&[][..], Vec::as_slice);
    html! {
        @if keys.is_empty() { span class="soft" { "open" } }
        @for key in keys.iter().take(8) {
            div {
                @let name = if chrome.may_read_contents() { cells::joined(&key["key"]) } else { String::new() };
                @if !name.is_empty() { (name) ": " }
                @if let Some(running) = key["running"].as_i64() { (running) " of " (gate["max"]) " running" }
                @else if let Some(left) = key["left"].as_i64() { (left) " may start" }
                @if key["waiting"].as_i64() > Some(0) { ", " (cells::count(key, "waiting")) " wait" }
                @if key["opens_at"].is_string() { ", opens " (cells::time(&key["opens_at"], now)) }
            }
        }
        @if keys.len() > 8 { span class="soft" { "and more (" code { "rouse gate show" } ")" } }
    }
}

/// One queue. `backlog`: its rows of `rouse.backlog`.
pub fn queue(chrome: &Chrome, queue: &Value, backlog: &[Value], now: f64) -> Markup {
    let name = cells::text(queue, "name");
    let path = chrome.encoded(name);
    let scheduler = &queue["scheduler"];
    html! {
        div class="title" {
            h1 { "Queue " (cells::line(name)) }
            (cells::state(if queue["paused_at"].is_string() { "paused" } else { "active" }))
            (shared(queue))
            div class="actions" {
                (pause(chrome, queue))
                (chrome.button(&format!("/queues/{path}/purge"), "Purge", "Cancel ALL ready jobs of this queue? This cannot be undone.", "risky"))
            }
        }
        @if queue["paused_at"].is_string() {
            p class="notice warn" { "Paused since " (cells::exact_time(&queue["paused_at"], now)) ". " a href={ (chrome.base) "/audit?queue=" (chrome.encoded(cells::text(queue, "name"))) } { "Who paused it" } }
        }
        div class="stats" {
            a class="stat" href={ (chrome.base) "/jobs?state=queued&queue=" (path) } { b { (cells::count(queue, "ready")) } span { "ready" } }
            div class="stat" { b { (cells::count(queue, "scheduled")) } span { "scheduled, or waiting for other jobs" } }
            a class="stat" href={ (chrome.base) "/jobs?state=running&queue=" (path) } { b { (cells::count(queue, "running")) } span { "running" } }
            div class="stat" { b { @if queue["oldest_wait_s"].is_number() { (cells::seconds(&queue["oldest_wait_s"])) } @else { "–" } } span { "oldest wait" } }
        }
        section class="card scroll" tabindex="0" aria-label="Handlers of the queue" {
            h2 { "By handler" }
            (backlog_table(chrome, backlog))
        }
        @if scheduler["policy"] == "drr" { (fair(scheduler)) }
        section class="card" {
            h2 { "Settings" }
            dl class="facts" {
                dt { "Payloads" } dd { "at most " (cells::bytes(queue["payload_bytes_max"].as_u64().unwrap_or_default())) }
                dt { "Kept" } dd {
                    (kept(&queue["keep_days"])) "; failed jobs "
                    @if queue["keep_failed_days"].is_null() { "as long as the others" } @else { (kept(&queue["keep_failed_days"])) }
                }
                dt { "Last used" } dd { (cells::time(&queue["last_used_at"], now)) }
            }
        }
    }
}

fn kept(days: &Value) -> String {
    match days.as_i64() {
        Some(days) => format!("{days} days"),
        None => "as long as the default of all queues".to_owned(),
    }
}

/// Rows of `rouse.backlog`, the longest wait first.
pub(super) fn backlog_table(chrome: &Chrome, rows: &[Value]) -> Markup {
    let wait = |row: &Value| row["oldest_wait_s"].as_f64().unwrap_or(-1.0);
    let mut rows: Vec<&Value> = rows.iter().collect();
    rows.sort_by(|a, b| wait(b).total_cmp(&wait(a)));
    html! {
        @if rows.is_empty() { p class="soft" { "There are no live jobs." } }
        @else {
            table class="stack" {
                thead { tr {
                    th { "Handler" } th { "Tags" } th class="number" { "Ready" } th { "Oldest wait" } th class="number" { "Scheduled" }
                    th class="number" { "Running" } th class="number" { "Workers" } th class="number" { "Slots" }
                } }
                tbody {
                    @for row in rows.iter().take(KEYS_MAX) {
                        tr {
                            td data-label="Handler" { (cells::handler(chrome, cells::text(row, "handler"))) }
                            td data-label="Tags" { (super::job::tags(&row["tags"])) }
                            td class="number" data-label="Ready" { (cells::count(row, "ready")) }
                            td class="keep" data-label="Oldest wait" { (cells::seconds(&row["oldest_wait_s"])) }
                            td class="number" data-label="Scheduled" { (cells::count(row, "scheduled")) }
                            td class="number" data-label="Running" { (cells::count(row, "running")) }
                            td class="number" data-label="Workers" {
                                @if row["workers"] == 0 { (cells::state("none")) } @else { (row["workers"]) }
                            }
                            td class="number" data-label="Slots" { (row["slots"]) }
                        }
                    }
                }
            }
            @if rows.len() > KEYS_MAX { p class="soft" { (KEYS_MAX) " of " (cells::number(rows.len() as i64)) "." } }
        }
    }
}

/// The keys of a fair queue.
fn fair(scheduler: &Value) -> Markup {
    let keys = scheduler["keys"].as_array().map_or(&[][..], Vec::as_slice);
    html! {
        section class="card scroll" tabindex="0" aria-label="Fair share" {
            h2 { "Fair share" }
            p class="soft" {
                "By " (cells::plain(&scheduler["key"])) ", quantum " (cells::plain(&scheduler["quantum"])) ", charged by "
                (cells::plain(&scheduler["charge"])) "."
                @if let Some(ms) = scheduler["starvation_ms"].as_u64().filter(|ms| *ms > 0) {
                    " Jobs that have waited for " (ms / 1000) " s go first, the oldest of them first."
                }
            }
            table class="stack" {
                thead { tr {
                    th { "Key" } th class="number" { "Weight" } th class="number" { "Ready" } th class="number" { "Running" } th { "Oldest wait" }
                    th class="number" { "Claimed" } th class="number" { "Deferred" } th class="number" { "Promoted" }
                } }
                tbody {
                    @for key in keys.iter().take(KEYS_MAX) {
                        tr {
                            td data-label="Key" { (cells::plain(&key["key"])) }
                            td class="number" data-label="Weight" { (cells::plain(&key["weight"])) }
                            td class="number" data-label="Ready" { (cells::count(key, "ready")) }
                            td class="number" data-label="Running" { (cells::count(key, "in_flight")) }
                            td class="keep" data-label="Oldest wait" { (cells::seconds(&key["oldest_age_s"])) }
                            td class="number" data-label="Claimed" { (cells::plain(&key["selected"])) }
                            td class="number" data-label="Deferred" { (cells::plain(&key["deferred"])) }
                            td class="number" data-label="Promoted" { (cells::plain(&key["promotions"])) }
                        }
                    }
                }
            }
            @if keys.len() > KEYS_MAX { p class="soft" { (KEYS_MAX) " of " (cells::number(keys.len() as i64)) " keys." } }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn settings_that_are_not_set_are_described_by_what_applies_instead() {
        let page = |days: Option<i64>, failed: Option<i64>, starvation_ms: u64| {
            let settings = json!({
                "name": "q", "keep_days": days, "keep_failed_days": failed,
                "scheduler": {"policy": "drr", "key": "tenant", "quantum": 1, "charge": "job", "starvation_ms": starvation_ms},
            });
            queue(&Chrome::default(), &settings, &[], 1.0).into_string()
        };
        let of_all = page(None, None, 0);
        assert!(
            of_all.contains(
                "as long as the default of all queues; failed jobs as long as the others"
            ),
            "{of_all}"
        );
        assert!(!of_all.contains("go first"), "{of_all}");
        let own = page(Some(30), Some(90), 300_000);
        assert!(own.contains("30 days; failed jobs 90 days"), "{own}");
        assert!(own.contains("waited for 300 s go first"), "{own}");
    }
}
